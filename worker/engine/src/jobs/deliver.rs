//! The deliver job: sends the outgoing messages of one conversation through one channel, in order.
#![doc = include_str!("deliver.md")]

use super::{give_back, hold, not_given_back};
use crate::channel::{Channel, Found, Outbound, SEND, SendError};
use crate::ctx::Ctx;
use crate::outcome;
use crate::telemetry::{self, names};
use crate::watchdog::UNYIELDING;
use apalis::prelude::{BoxDynError, Data};
use futures::FutureExt;
use std::ops::ControlFlow;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;
use tracing::{Instrument, Span, debug, info, info_span, warn};
use wakeful_store::delivery::{ClaimedDelivery, DeliveryLimits, Settled};
use wakeful_store::queue::{self, Job, Term};
use wakeful_workflow::agent::Limits;
use wakeful_workflow::delivery::{self, Answer, Attempt, Decision, Doubt, Facts, PriorAttempt};

/// How long the worker tries to send a message before it gives up. This is enough for a receiver that is
/// down, greylists or throttles. It is limited because the conversation's later messages wait behind this
/// one.
pub(super) const TRY_FOR: Duration = Duration::from_secs(5 * 3600);

/// A longer pause between two attempts means that no worker ran, because every normal delay is shorter. Then
/// [`TRY_FOR`] starts again: see [`DeliveryLimits::longest_pause`].
const LONGEST_PAUSE: Duration = Duration::from_secs(2 * 3600);

/// The longest wait for a receiver that throttles, even if it asks for a longer one. After it, the job tries
/// again.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// Runs one claimed deliver job and records in the job's row how the claim ended. apalis only learns that the
/// job is over.
///
/// # Errors
/// Never. apalis requires this signature.
pub async fn deliver(job: Job, ctx: Data<Arc<Ctx>>) -> Result<(), BoxDynError> {
    let ctx = Arc::clone(&ctx);
    let channel = job.channel.as_deref().unwrap_or_default();
    let what = format!("a delivery by {channel} of conversation {}", job.conversation_id);
    let work = ctx.watchdog.watch(job.lease.job_id, what, UNYIELDING, work(&ctx, &job));
    let work = AssertUnwindSafe(work).catch_unwind();
    let end = tokio::select! {
        end = work => end.unwrap_or_else(|_| Err(GiveBack::later("internal error: the delivery panicked"))),
        () = job.lease.lost().cancelled() => Ok(()),
        () = ctx.shutdown.abort.cancelled() => {
            give_back(&ctx, &job, || ctx.store.hand_over(&job.lease)).await;
            Ok(())
        }
    };
    if let Err(GiveBack { error, why }) = end {
        match why {
            Why::Fault | Why::NoAnswer => {
                let delay = queue::delay(job.stuck, None);
                warn!(
                    conversation.id = %job.conversation_id,
                    channel,
                    error,
                    delay_ms = delay.as_millis() as u64,
                    "Delivering failed; trying again later"
                );
                if matches!(why, Why::NoAnswer) {
                    unclaim(&ctx, &job, channel, delay, &error).await;
                } else {
                    give_back(&ctx, &job, || ctx.store.retry_later(&job.lease, delay, &error)).await;
                }
            }
            Why::Throttled { after } => {
                let delay = after.min(LONGEST_WAIT);
                debug!(
                    error,
                    delay_ms = delay.as_millis() as u64,
                    "The receiver accepts nothing more for now; waiting"
                );
                give_back(&ctx, &job, || ctx.store.postpone(&job.lease, delay, &error)).await;
            }
        }
    }
    Ok(())
}

/// Why a job is given back before everything was sent.
#[derive(Debug)]
struct GiveBack {
    error: String,
    why: Why,
}

#[derive(Debug)]
enum Why {
    /// The delay grows with each retry.
    Fault,
    /// As after a fault. The database did not answer a claim, which may have taken a delivery all the same.
    NoAnswer,
    /// The receiver asks us to wait so long. That is no fault.
    Throttled { after: Duration },
}

impl GiveBack {
    fn later(error: impl ToString) -> GiveBack {
        GiveBack { error: error.to_string(), why: Why::Fault }
    }
}

/// Gives the job back after a claim without an answer. If the claim took a delivery, the next worker would find it begun, and ask
/// a person whether it went out.
async fn unclaim(ctx: &Ctx, job: &Job, channel: &str, delay: Duration, error: &str) {
    // Also beyond the end of a drain: only this process knows that nothing was sent.
    let what = format!("a claim of conversation {}", job.conversation_id);
    let unclaimed = outcome::record(&job.lease, &what, || {
        ctx.store.unclaim_delivery(&job.lease, &job.conversation_id, channel, delay, error)
    });
    if let Err(error) = unclaimed.await {
        not_given_back(&error);
    }
}

async fn work(ctx: &Ctx, job: &Job) -> Result<(), GiveBack> {
    let channel_name = job.channel.as_deref().unwrap_or_default();
    let terms = DeliveryLimits {
        max_age: ctx.config.max_age(channel_name),
        attempt_limit: attempt_limit(ctx),
        longest_pause: LONGEST_PAUSE,
    };
    // Workers that died with this job count only against its first delivery: they did not reach the later
    // ones.
    let mut deaths = i64::from(job.died);
    loop {
        // Read this counter before claiming. A delivery that is enqueued later changes it, and then
        // `end_deliver_job` keeps the job.
        let Some(seen) = ctx.store.enqueued_deliveries(&job.lease).await.map_err(GiveBack::later)? else {
            return Ok(());
        };
        loop {
            // Claim nothing on a lost lease. Otherwise the next worker finds the delivery claimed and must
            // assume that it may have gone out.
            if !job.lease.is_live() {
                return Ok(());
            }
            if ctx.shutdown.draining.is_cancelled() {
                // Another message would be cut off in its middle at the end of the drain.
                return ctx.store.hand_over(&job.lease).await.map_err(GiveBack::later);
            }
            if let Some((subject, why)) = ctx.pauses.holding_channel(channel_name, &job.pause_passes) {
                hold(ctx, job, &subject, &why).await;
                return Ok(());
            }
            wakeful_store::failpoint!("K12_claim");
            // The attempt must begin before this end of the lease, even if a heartbeat extends the lease
            // later. Other workers assume that the attempt is over `attempt_limit` after its claim.
            let term = job.lease.term();
            let claimed =
                ctx.store.claim_delivery(&job.lease, &job.conversation_id, channel_name, terms).await;
            let Some(claimed) =
                claimed.map_err(|error| GiveBack { error: error.to_string(), why: Why::NoAnswer })?
            else {
                break;
            };
            let span = delivery_span(job, channel_name, &claimed);
            let given_up = given_up(&claimed, deaths);
            let sent = send_one(ctx, job, channel_name, &claimed, given_up.as_deref(), term);
            let sent = sent.instrument(span.clone()).await;
            sent.inspect_err(|again| {
                if !matches!(again.why, Why::Throttled { .. }) {
                    telemetry::failed(&span, "retry");
                }
            })?;
            deaths = 0;
        }
        if ctx.store.end_deliver_job(&job.lease, seen).await.map_err(GiveBack::later)? {
            return Ok(());
        }
    }
}

/// Sends one claimed delivery, if it may be sent, and records how it ended.
///
/// # Errors
/// [`GiveBack`], when the job must be given back and tried later.
async fn send_one(
    ctx: &Ctx,
    job: &Job,
    channel_name: &str,
    claimed: &ClaimedDelivery,
    given_up: Option<&str>,
    term: Term,
) -> Result<(), GiveBack> {
    let settled = match next_action(ctx, job, channel_name, claimed, given_up, term).await {
        NextAction::Settle(settled) => settled,
        NextAction::GiveBack { error, unsent } => {
            ctx.metrics.delivery_tried(channel_name, "retried");
            let delivery_id = &claimed.delivery_id;
            // Without the record, the next claim would find the delivery begun, and ask a person whether it went out.
            outcome::record(&job.lease, &format!("the try of delivery {delivery_id}"), || {
                ctx.store.try_delivery_later(&job.lease, delivery_id, unsent, &error)
            })
            .await
            .map_err(GiveBack::later)?;
            return Err(GiveBack::later(error));
        }
        NextAction::Throttled { error, after, unsent } => {
            ctx.metrics.delivery_tried(channel_name, "throttled");
            let delivery_id = &claimed.delivery_id;
            outcome::record(&job.lease, &format!("the try of delivery {delivery_id}"), || {
                ctx.store.postpone_delivery(&job.lease, delivery_id, unsent, &error)
            })
            .await
            .map_err(GiveBack::later)?;
            return Err(GiveBack { error, why: Why::Throttled { after } });
        }
    };
    wakeful_store::failpoint!("K13");
    let held = settle(ctx, job, channel_name, claimed, &settled).await.map_err(GiveBack::later)?;
    wakeful_store::failpoint!("K14");
    ctx.bus.notifier.session(&claimed.session_id);
    ctx.metrics.delivery_tried(channel_name, settled.as_str());
    match settled {
        Settled::Sent { .. } if held => info!(delivery.id = claimed.delivery_id, "Sent by {channel_name}"),
        Settled::Sent { .. } => {
            warn!(delivery.id = claimed.delivery_id, "Sent, but the lease was lost before that was recorded")
        }
        Settled::Failed { error } | Settled::Expired { error } => {
            telemetry::failed(&Span::current(), "not_sent");
            let remedy = format!("wakeful delivery resend {}", claimed.delivery_id);
            let error = ctx.store.in_log(Some(&claimed.session_id), &error);
            warn!(delivery.id = claimed.delivery_id, error, remedy, "Not sent by {channel_name}");
        }
        Settled::Uncertain { error } => {
            telemetry::failed(&Span::current(), "not_sent");
            let remedy = format!("wakeful session why {}", claimed.session_id);
            let error = ctx.store.in_log(Some(&claimed.session_id), &error);
            warn!(delivery.id = claimed.delivery_id, error, remedy, "Possibly not sent by {channel_name}");
        }
    }
    Ok(())
}

/// Returns how long after its claim an attempt may still be under way: it begins within one lease, and then
/// takes at most [`SEND`].
fn attempt_limit(ctx: &Ctx) -> Duration {
    ctx.config.queue.lease + SEND
}

/// Returns the reason if this attempt is the last one.
fn given_up(claimed: &ClaimedDelivery, deaths: i64) -> Option<String> {
    if claimed.maybe_sent && deaths >= Limits::DEATHS {
        return Some(format!("{deaths} workers died while they were sending it"));
    }
    let hours = TRY_FOR.as_secs() / 3600;
    (claimed.tried_for >= TRY_FOR).then(|| format!("it was tried for {hours} hours"))
}

/// What [`send_one`] does with a claimed delivery.
enum NextAction {
    Settle(Settled),
    /// Gives the job back after a fault. `unsent`: the delivery certainly was not sent, so it may expire.
    GiveBack {
        error: String,
        unsent: bool,
    },
    /// Gives the job back until the receiver accepts messages again. `unsent` means the same as in
    /// [`NextAction::GiveBack`].
    Throttled {
        error: String,
        after: Duration,
        unsent: bool,
    },
}

/// Sends a claimed delivery if it may be sent now. [`delivery::decide`] and [`delivery::after`] decide. This
/// function asks the channel, sends, and writes the error texts.
async fn next_action(
    ctx: &Ctx,
    job: &Job,
    channel_name: &str,
    claimed: &ClaimedDelivery,
    given_up: Option<&str>,
    mut term: Term,
) -> NextAction {
    let channel = ctx.plugins.channels.get(channel_name);
    let facts = Facts {
        maybe_sent: claimed.maybe_sent,
        late: claimed.late,
        quiet: claimed.quiet,
        given_up: given_up.is_some(),
        idempotent: channel.is_some_and(|channel| channel.is_idempotent()),
    };
    let end = |decision, error: &str| end(channel_name, given_up, decision, error);
    let decision = delivery::decide(&facts, None);
    if decision == Decision::Expired {
        return end(decision, "");
    }
    let Some(channel) = channel else {
        let remedy = ctx.config.how_to_enable(channel_name);
        let error = format!("this worker has no channel {channel_name:?}: {remedy}");
        return match delivery::decide(&facts, Some(Answer::NoChannel)) {
            decision @ Decision::Uncertain(_) => end(decision, &format!("{DIED}, and {error}")),
            decision => end(decision, &error),
        };
    };
    let outbound = Outbound::new(&claimed.delivery_id, &claimed.content);
    let sending = Sending { channel: channel.as_ref(), channel_name, outbound, facts, given_up };
    let before = match decision {
        Decision::Ask => match sending.ask().await {
            ControlFlow::Continue(before) => before,
            ControlFlow::Break(next_action) => return next_action,
        },
        Decision::Send(before) => before,
        Decision::GiveBack(_)
        | Decision::Failed
        | Decision::Expired
        | Decision::Uncertain(_)
        | Decision::Sent => return end(decision, DIED),
    };
    let again = |error: String| NextAction::GiveBack { error, unsent: before == PriorAttempt::Unsent };
    if claimed.maybe_sent {
        term = job.lease.term();
        match ctx.store.send_again(&job.lease, &claimed.delivery_id, attempt_limit(ctx)).await {
            Ok(true) => {}
            Ok(false) => return again("the lease was lost before it was sent again".to_owned()),
            Err(error) => return again(error.to_string()),
        }
    }
    // Never send on a lease that may have ended: the next holder of the job may be sending.
    if !job.lease.is_live() || !term.is_ahead() {
        return again("the lease may have ended before it was sent".to_owned());
    }
    wakeful_store::failpoint!("K12");
    sending.send(before).await
}

/// A delivery that its channel may send, and what decides about that.
struct Sending<'a> {
    channel: &'a dyn Channel,
    channel_name: &'a str,
    outbound: Outbound<'a>,
    facts: Facts,
    given_up: Option<&'a str>,
}

impl Sending<'_> {
    /// Asks the channel what became of an earlier attempt. Continues if the message is to be sent.
    async fn ask(&self) -> ControlFlow<NextAction, PriorAttempt> {
        let found = look_up(self.channel, &self.outbound).await;
        let decision = delivery::decide(&self.facts, Some(answer(&found)));
        ControlFlow::Break(match (decision, found) {
            (Decision::Send(before), _) => return ControlFlow::Continue(before),
            (Decision::Sent, Ok(Found::Sent { receipt })) => NextAction::Settle(Settled::Sent { receipt }),
            (Decision::GiveBack(before), Err(SendError::Throttled { error, after })) => {
                NextAction::Throttled { error, after, unsent: before == PriorAttempt::Unsent }
            }
            (Decision::Uncertain(_), Err(error)) => {
                self.end(decision, &format!("{DIED}, and the channel does not say: {error}"))
            }
            (_, Err(error)) => self.end(decision, &error.to_string()),
            (Decision::Uncertain(Doubt::TooOld), Ok(_)) => {
                self.end(decision, &format!("{DIED}, and it is too old to be sent again"))
            }
            (Decision::Uncertain(Doubt::CannotTell), Ok(_)) => self.end(decision, DIED),
            (Decision::Uncertain(_), Ok(_)) => {
                let why = self.given_up.unwrap_or_default();
                self.end(decision, &format!("its attempts ended without an answer ({why})"))
            }
            (Decision::GiveBack(_), Ok(_)) => self.end(decision, "an earlier attempt may still be under way"),
            (_, Ok(_)) => self.end(decision, "its attempts ended without an answer"),
        })
    }

    /// Sends the message. `before` is what is known of the attempts before this one.
    async fn send(&self, before: PriorAttempt) -> NextAction {
        let sent = tokio::time::timeout(SEND, self.channel.send(&self.outbound)).await;
        let unknown = || SendError::Unknown(format!("no answer within {} seconds", SEND.as_secs()));
        let after = |attempt| delivery::after(&self.facts, before, attempt);
        match sent.unwrap_or_else(|_| Err(unknown())) {
            Ok(receipt) => NextAction::Settle(Settled::Sent { receipt }),
            Err(SendError::Refused(error)) => match after(Attempt::Refused) {
                Decision::Failed => NextAction::Settle(Settled::Failed { error }),
                decision => self.end(decision, &error),
            },
            Err(SendError::Later(error)) => self.end(after(Attempt::Later), &error),
            Err(SendError::Throttled { error, after: pause }) => match after(Attempt::Later) {
                Decision::GiveBack(before) => {
                    NextAction::Throttled { error, after: pause, unsent: before == PriorAttempt::Unsent }
                }
                decision => self.end(decision, &error),
            },
            Err(SendError::Unknown(error)) => {
                let found = look_up(self.channel, &self.outbound).await;
                match (after(Attempt::Unknown(answer(&found))), found) {
                    (Decision::Sent, Ok(Found::Sent { receipt })) => {
                        NextAction::Settle(Settled::Sent { receipt })
                    }
                    (decision, _) => self.end(decision, &error),
                }
            }
        }
    }

    fn end(&self, decision: Decision, error: &str) -> NextAction {
        end(self.channel_name, self.given_up, decision, error)
    }
}

pub(super) fn answer(found: &Result<Found, SendError>) -> Answer {
    match found {
        Ok(Found::Sent { .. }) => Answer::Sent,
        Ok(Found::NotSent) => Answer::NotSent,
        Ok(Found::Unknown) => Answer::Unknown,
        Err(_) => Answer::Unreachable,
    }
}

/// Turns a decision that ends this attempt without a receipt into its [`NextAction`]. `error` says why.
fn end(channel_name: &str, given_up: Option<&str>, decision: Decision, error: &str) -> NextAction {
    match decision {
        Decision::GiveBack(before) => {
            NextAction::GiveBack { error: error.to_owned(), unsent: before == PriorAttempt::Unsent }
        }
        Decision::Failed => {
            let why = given_up.unwrap_or_default();
            NextAction::Settle(Settled::Failed { error: format!("{error} ({why})") })
        }
        Decision::Expired => {
            let error = format!("it was not sent by {channel_name} in time, and is not sent late");
            NextAction::Settle(Settled::Expired { error })
        }
        Decision::Uncertain(_) => NextAction::Settle(Settled::Uncertain { error: error.to_owned() }),
        // These decisions need the channel or its receipt, which this caller does not have. The next claim
        // asks again.
        Decision::Ask | Decision::Send(_) | Decision::Sent => {
            NextAction::GiveBack { error: error.to_owned(), unsent: false }
        }
    }
}

const DIED: &str = "a worker stopped while sending it; it may have gone out";

pub(super) async fn look_up(channel: &dyn Channel, message: &Outbound<'_>) -> Result<Found, SendError> {
    let answer = tokio::time::timeout(SEND, channel.find_message(message)).await;
    answer.unwrap_or_else(|_| Err(SendError::Later(format!("no answer within {} seconds", SEND.as_secs()))))
}

/// The root span of a new trace for one message. It links to the claim whose commit enqueued the message.
fn delivery_span(job: &Job, channel_name: &str, claimed: &ClaimedDelivery) -> Span {
    let span = info_span!(
        parent: None,
        "deliver",
        "otel.name" = names::deliver(channel_name),
        "otel.kind" = names::KIND_PRODUCER,
        { names::DELIVERY_ID } = %claimed.delivery_id,
        { names::SESSION_ID } = %claimed.session_id,
        { names::CONVERSATION_ID } = %job.conversation_id,
        { names::JOB_ID } = job.lease.job_id,
        { names::STEP_ATTEMPT } = claimed.attempt,
        { names::MESSAGING_SYSTEM } = names::MESSAGING_SYSTEM_WAKEFUL,
        { names::MESSAGING_OPERATION_NAME } = names::MESSAGING_SEND,
        { names::MESSAGING_OPERATION_TYPE } = names::MESSAGING_SEND,
        { names::MESSAGING_DESTINATION_NAME } = channel_name,
    );
    if let Some(trace_context) = &job.lease.trace_context {
        telemetry::link(&span, trace_context);
    }
    span
}

/// Records how the delivery ended ([`outcome::record`]). Returns `false` if another worker has the job.
async fn settle(
    ctx: &Ctx,
    job: &Job,
    channel_name: &str,
    claimed: &ClaimedDelivery,
    settled: &Settled,
) -> wakeful_store::Result<bool> {
    let what = format!("delivery {}", claimed.delivery_id);
    let settled = outcome::record(&job.lease, &what, || {
        ctx.store.settle_delivery(&job.lease, claimed, channel_name, settled)
    })
    .await?;
    if settled {
        job.made_progress();
    }
    Ok(settled)
}
