//! The two tasks of notifications, in every process that serves or works: one follows the transitions and makes messages, the
//! other sends them. So a process that only serves can tell people that no worker is alive. Without a rule, the first task only
//! deletes old transitions, and the second ends at once.
//!
//! A message is composed when it is sent, from the rows as they are then. It has links by which a person may act, if the rule
//! says so. How an attempt ends is judged as for deliveries: [`wakeful_workflow::delivery`].

use super::deliver::{TRY_FOR, answer, look_up};
use super::timer;
use crate::channel::{Channel, Outbound, SEND, SendError};
use crate::ctx::Ctx;
use crate::notify::{ButtonOrLink, Message, content};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tracing::{info, warn};
use wakeful_config::notify::{Notify, To};
use wakeful_store::notify::link::{Act, Minted, Way};
use wakeful_store::notify::outbox::{ClaimedNotification, Ended, Told};
use wakeful_store::queue;
use wakeful_workflow::delivery::{self, Attempt, Decision, Facts, PriorAttempt};
use wakeful_workflow::notify::{Kind, Rule};

/// How often a process looks while there is nothing to do.
const EVERY: Duration = Duration::from_secs(1);

/// Without a rule, transitions are kept this long, for a process that has one.
const FORGET: Duration = Duration::from_secs(3600);

/// How many messages a process sends at a time.
const AT_ONCE: usize = 8;

/// The longest attempt at a webhook.
const WEBHOOK: Duration = Duration::from_secs(15);

/// How many transitions of a message get links.
const LINKED: usize = 5;

/// How many links a message has, and how many buttons: a card of Slack has room for these.
const ACTS: usize = 20;

/// The name of the channel that posts the webhooks of rules.
pub const CHANNEL: &str = "notify";

/// Follows and sends until `ctx.shutdown.draining` fires.
pub async fn run(ctx: Arc<Ctx>) {
    let (follows, sends) = (Arc::clone(&ctx), ctx);
    let follows = timer::start("notifications", move || follow(Arc::clone(&follows)));
    let sends = timer::start("sender of notifications", move || send(Arc::clone(&sends)));
    let _ = follows.await;
    let _ = sends.await;
}

async fn follow(ctx: Arc<Ctx>) {
    let rules: Vec<Rule> = ctx.config.notify.iter().map(|one| one.rule.clone()).collect();
    // A worker that has not shown itself for two leases is gone.
    let beat = ctx.config.queue.lease * 2;
    // Without a rule here, other processes have none either, or they follow what is younger than this.
    let older_than = if rules.is_empty() { FORGET } else { Duration::from_secs(86_400) };
    let mut forget_at = Instant::now();
    loop {
        if forget_at <= Instant::now() {
            forget_at = Instant::now() + queue::jittered(FORGET);
            if let Err(error) = ctx.store.forget_transitions(older_than).await {
                warn!(%error, "Old notifications could not be deleted; trying again");
            }
        }
        let looked = match rules.is_empty() {
            true => Ok(false),
            false => ctx.store.follow_transitions(&rules, beat).await.map(|followed| followed.more),
        };
        let pause = match looked {
            Ok(true) => Duration::ZERO,
            Ok(false) if rules.is_empty() => queue::jittered(FORGET),
            Ok(false) => queue::jittered(EVERY),
            Err(error) => {
                warn!(%error, "Notifications could not be made; trying again");
                queue::jittered(EVERY)
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = ctx.shutdown.draining.cancelled() => return,
        }
    }
}

async fn send(ctx: Arc<Ctx>) {
    let rules: Vec<(String, Duration)> =
        ctx.config.notify.iter().map(|one| (one.rule.name.clone(), hold(&ctx, one))).collect();
    if rules.is_empty() {
        return;
    }
    let mut under_way = JoinSet::new();
    loop {
        while under_way.try_join_next().is_some() {}
        if under_way.len() >= AT_ONCE {
            under_way.join_next().await;
        }
        let pause = match ctx.store.claim_notification(&rules).await {
            Ok(Some(claimed)) => {
                let ctx = Arc::clone(&ctx);
                under_way.spawn(async move { send_one(&ctx, &claimed).await });
                Duration::ZERO
            }
            Ok(None) => queue::jittered(EVERY),
            Err(error) => {
                warn!(%error, "Notifications could not be sent; trying again");
                queue::jittered(EVERY)
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = ctx.shutdown.draining.cancelled() => break,
        }
    }
    // What is under way is let end, so that its outcome is known.
    while under_way.join_next().await.is_some() {}
}

/// The channel that a rule sends by.
pub fn channel_of(to: &To) -> &'static str {
    match to {
        To::Webhook { .. } => CHANNEL,
        To::Slack { .. } => "slack",
        To::Email { .. } => "email",
    }
}

/// The longest attempt of a rule.
fn limit(ctx: &Ctx, rule: &Notify) -> Duration {
    match rule.to {
        To::Webhook { .. } => WEBHOOK.min(ctx.config.queue.lease),
        To::Slack { .. } | To::Email { .. } => SEND,
    }
}

/// After how long another process may take a message that this one has claimed.
fn hold(ctx: &Ctx, rule: &Notify) -> Duration {
    ctx.config.queue.lease + limit(ctx, rule)
}

/// What became of an attempt.
enum Outcome {
    Ended(Ended),
    Again { unsent: bool, error: String, after: Option<Duration> },
}

async fn send_one(ctx: &Ctx, claimed: &ClaimedNotification) {
    let Some(rule) = ctx.config.notify.iter().find(|one| one.rule.name == claimed.rule) else { return };
    let written = match attempt(ctx, rule, claimed).await {
        Outcome::Ended(ended) => {
            wakeful_store::failpoint!("K81_notified");
            let written = ctx.store.settle_notification(claimed, &ended).await;
            let id = &claimed.notification_id;
            match &ended {
                Ended::Sent { .. } => {
                    info!(notification.id = id, rule = claimed.rule, "A notification is sent")
                }
                Ended::Failed { error } | Ended::Uncertain { error } => {
                    let remedy = format!("wakeful notification resend {id}");
                    warn!(
                        notification.id = id,
                        rule = claimed.rule,
                        error,
                        remedy,
                        "A notification was not sent"
                    );
                }
            }
            written.map(|_| ())
        }
        Outcome::Again { unsent, error, after } => {
            let delay = after.unwrap_or_else(|| queue::delay(claimed.attempt, None));
            warn!(notification.id = claimed.notification_id, error, "A notification is tried again later");
            ctx.store.postpone_notification(claimed, unsent, &error, delay).await
        }
    };
    if let Err(error) = written {
        warn!(%error, notification.id = claimed.notification_id, "The end of a notification was not written; it is tried again");
    }
}

async fn attempt(ctx: &Ctx, rule: &Notify, claimed: &ClaimedNotification) -> Outcome {
    let again = |error: String| Outcome::Again { unsent: !claimed.maybe_sent, error, after: None };
    let given_up = claimed.tried_for >= TRY_FOR;
    let name = channel_of(&rule.to);
    let Some(channel) = ctx.plugins.channels.get(name) else {
        return again(format!("this process has no channel {name:?}: {}", ctx.config.how_to_enable(name)));
    };
    let failed = |error: wakeful_store::Error| match given_up {
        true => Outcome::Ended(Ended::Failed { error: error.to_string() }),
        false => again(error.to_string()),
    };
    let facts = Facts {
        maybe_sent: claimed.maybe_sent,
        late: false,
        // It is claimed again only after the time of the attempt before.
        quiet: true,
        given_up,
        // Told twice is better than not at all. A mail keeps its Message-ID, and a webhook its id.
        idempotent: true,
    };
    let mut decision = delivery::decide(&facts, None);
    if decision == Decision::Ask {
        // Only where it went says whether it did, so no link is made for this.
        let content = match compose(ctx, rule, claimed, false).await {
            Ok(content) => content,
            Err(error) => return failed(error),
        };
        let found = look_up(channel.as_ref(), &Outbound::new(&claimed.notification_id, &content)).await;
        decision = delivery::decide(&facts, Some(answer(&found)));
        if let (Decision::Sent, Ok(crate::channel::Found::Sent { receipt })) = (decision, found) {
            return Outcome::Ended(Ended::Sent { receipt });
        }
    }
    let Decision::Send(before) = decision else {
        return outcome(decision, "a process stopped while sending it".to_owned(), None);
    };
    let content = match compose(ctx, rule, claimed, true).await {
        Ok(content) => content,
        Err(error) => return failed(error),
    };
    let outbound = Outbound::new(&claimed.notification_id, &content);
    wakeful_store::failpoint!("K80_notify");
    post(channel.as_ref(), &outbound, &facts, before, limit(ctx, rule)).await
}

async fn post(
    channel: &dyn Channel,
    outbound: &Outbound<'_>,
    facts: &Facts,
    before: PriorAttempt,
    limit: Duration,
) -> Outcome {
    let sent = tokio::time::timeout(limit, channel.send(outbound)).await;
    let sent = sent
        .unwrap_or_else(|_| Err(SendError::Unknown(format!("no answer within {} s", limit.as_secs_f64()))));
    let after = |attempt| delivery::after(facts, before, attempt);
    match sent {
        Ok(receipt) => Outcome::Ended(Ended::Sent { receipt }),
        Err(SendError::Refused(error)) => outcome(after(Attempt::Refused), error, None),
        Err(SendError::Later(error)) => outcome(after(Attempt::Later), error, None),
        Err(SendError::Throttled { error, after: pause }) => {
            outcome(after(Attempt::Later), error, Some(pause))
        }
        Err(SendError::Unknown(error)) => {
            let found = look_up(channel, outbound).await;
            match (after(Attempt::Unknown(answer(&found))), found) {
                (Decision::Sent, Ok(crate::channel::Found::Sent { receipt })) => {
                    Outcome::Ended(Ended::Sent { receipt })
                }
                (decision, _) => outcome(decision, error, None),
            }
        }
    }
}

fn outcome(decision: Decision, error: String, after: Option<Duration>) -> Outcome {
    match decision {
        Decision::Failed | Decision::Expired => Outcome::Ended(Ended::Failed { error }),
        Decision::Uncertain(_) => Outcome::Ended(Ended::Uncertain { error }),
        Decision::GiveBack(before) => Outcome::Again { unsent: before == PriorAttempt::Unsent, error, after },
        // These need a receipt, which this caller does not have: the next claim asks again.
        Decision::Ask | Decision::Send(_) | Decision::Sent => Outcome::Again { unsent: false, error, after },
    }
}

/// What the channel gets. `acts`: with new links and buttons, if the rule says so.
async fn compose(
    ctx: &Ctx,
    rule: &Notify,
    claimed: &ClaimedNotification,
    acts: bool,
) -> wakeful_store::Result<serde_json::Value> {
    let told = ctx.store.told_by(&claimed.notification_id).await?;
    if acts && !claimed.maybe_sent {
        // The receiver did not take the earlier attempts, so their links reached no person.
        ctx.store.delete_unsent_links(&claimed.notification_id).await?;
    }
    let server = &ctx.config.server;
    let console = server.public_url.as_ref().filter(|_| server.console);
    let console = console.map(|url| format!("{url}{}/console", server.base_path));
    let (mut links, mut buttons) = (Vec::new(), Vec::new());
    // A session that is told twice asks once.
    let mut seen = BTreeSet::new();
    let each = told.iter().filter(|one| match claimed.kind {
        Kind::DeliveryFailed => seen.insert(Some(one.subject.clone())),
        _ => seen.insert(one.session_id.clone()),
    });
    for one in each.take(if acts { LINKED } else { 0 }) {
        if let Some(console) = console.as_deref().filter(|_| rule.links) {
            for made in acts_of(ctx, rule, claimed, one, (Way::Link, ACTS - links.len())).await? {
                let about = about(ctx, &made).await?;
                let url = format!("{console}/act/{}", made.token);
                links.push(ButtonOrLink::of(one, made, about, url));
            }
        }
        if matches!(rule.to, To::Slack { buttons: true, .. }) {
            for made in acts_of(ctx, rule, claimed, one, (Way::Slack, ACTS - buttons.len())).await? {
                let about = about(ctx, &made).await?;
                let token = made.token.clone();
                buttons.push(ButtonOrLink::of(one, made, about, token));
            }
        }
    }
    let console = console.as_deref();
    Ok(content(&Message { claimed, told: &told, links: &links, buttons: &buttons, console }, &rule.to))
}

/// The effect in words, if the act has one. Read after the act was bound to it, so what is read is never newer.
async fn about(ctx: &Ctx, made: &Minted) -> wakeful_store::Result<Option<String>> {
    match &made.act {
        // The item has the question.
        Act::Retry | Act::Answer { .. } => Ok(None),
        Act::Resolve { effect_id: id } | Act::Approve { call_id: id } | Act::Resend { delivery_id: id } => {
            ctx.store.effect_in_words(&made.session_id, id).await
        }
    }
}

/// Makes the links or the buttons by which a person may act on one transition now, `most` of them at most. Their tokens are in the
/// message and nowhere else.
async fn acts_of(
    ctx: &Ctx,
    rule: &Notify,
    claimed: &ClaimedNotification,
    told: &Told,
    (way, most): (Way, usize),
) -> wakeful_store::Result<Vec<Minted>> {
    let Some(session_id) = &told.session_id else { return Ok(Vec::new()) };
    let acts: Vec<Act> = match claimed.kind {
        Kind::DeliveryFailed => ctx.store.wanted_of_delivery(&told.subject).await?.into_iter().collect(),
        _ => ctx.store.wanted_acts(session_id).await?,
    };
    let mut made = Vec::new();
    for act in acts {
        if made.len() >= most {
            break;
        }
        // A button takes no text.
        if way == Way::Slack && matches!(act, Act::Answer { .. }) {
            continue;
        }
        let id = &claimed.notification_id;
        made.extend(ctx.store.mint_link(id, session_id, act, way, rule.links_last).await?);
    }
    Ok(made)
}
