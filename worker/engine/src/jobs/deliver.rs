//! The deliver job: sends the outgoing messages of one conversation through one channel, in order.

use crate::ctx::Ctx;
use crate::channel::{Channel, Found, Outbound, SEND, SendError};
use crate::telemetry::{self, names};
use crate::watchdog::UNYIELDING;
use apalis::prelude::{BoxDynError, Data};
use futures::FutureExt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;
use tracing::{Instrument, Span, debug, info, info_span, warn};
use wakeful_store::delivery::{Claimed, Settled, Terms};
use wakeful_store::queue::{self, Job, Term};
use wakeful_workflow::agent::Limits;

/// How long a message is tried before it counts as failed. This is enough for a receiver that is down,
/// greylists or throttles. It is limited because the conversation's later messages wait behind this one.
const TRY_FOR: Duration = Duration::from_secs(5 * 3600);

/// Longer than any delay between two attempts. So a longer pause means that no worker ran, and [`TRY_FOR`]
/// starts again: see [`Terms::longest_pause`].
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
    let work = ctx.watchdog.watch(job.lease.token, what, UNYIELDING, work(&ctx, &job));
    let work = AssertUnwindSafe(work).catch_unwind();
    let end = tokio::select! {
        end = work => end.unwrap_or_else(|_| Err(Again::later("internal error: the delivery panicked"))),
        () = job.lease.lost().cancelled() => Ok(()),
        () = ctx.shutdown.abort.cancelled() => {
            if let Err(error) = ctx.store.release(&job.lease).await {
                warn!(%error, "A job was not released; it is free when its lease ends");
            }
            Ok(())
        }
    };
    if let Err(Again { error, after }) = end {
        let given_back = match after {
            None => {
                let delay = queue::delay(job.stuck, None);
                warn!(
                    conversation.id = %job.conversation_id,
                    channel,
                    error,
                    delay_ms = delay.as_millis() as u64,
                    "Delivering failed; trying again later"
                );
                ctx.store.retry_later(&job.lease, delay, &error).await
            }
            Some(after) => {
                let delay = after.min(LONGEST_WAIT);
                debug!(
                    error,
                    delay_ms = delay.as_millis() as u64,
                    "The receiver accepts nothing more for now; waiting"
                );
                ctx.store.postpone(&job.lease, delay, &error).await
            }
        };
        if let Err(error) = given_back {
            warn!(%error, "The job could not be given back; workers can claim it when its lease ends");
        }
    }
    Ok(())
}

/// Why a job is given back before everything was sent.
#[derive(Debug)]
struct Again {
    error: String,
    /// How long the receiver asks us to wait, which is no fault. `None` after a fault: the delay then grows
    /// with each retry.
    after: Option<Duration>,
}

impl Again {
    fn later(error: impl ToString) -> Again {
        Again { error: error.to_string(), after: None }
    }
}

async fn work(ctx: &Ctx, job: &Job) -> Result<(), Again> {
    let channel_name = job.channel.as_deref().unwrap_or_default();
    let terms = Terms {
        max_age: ctx.config.max_age(channel_name),
        attempt_limit: attempt_limit(ctx),
        longest_pause: LONGEST_PAUSE,
    };
    // Deaths count only against the first delivery: the workers died before they came to the later ones.
    let mut deaths = i64::from(job.died);
    loop {
        // Read this counter before claiming. A delivery that is enqueued later changes it, and then
        // `end_deliver_job` keeps the job.
        let Some(seen) = ctx.store.pending_deliveries(&job.lease).await.map_err(Again::later)? else {
            return Ok(());
        };
        loop {
            // Claim nothing on a lost lease: the next worker would find the delivery claimed and have to
            // assume that it may have gone out.
            if !job.lease.is_live() {
                return Ok(());
            }
            crate::failpoint("K12_claim");
            // The attempt must begin before this end of the lease, even if a heartbeat extends the lease
            // later: other workers take the attempt to be over `attempt_limit` after its claim.
            let term = job.lease.term();
            let claimed =
                ctx.store.claim_delivery(&job.lease, &job.conversation_id, channel_name, terms).await;
            let Some(claimed) = claimed.map_err(Again::later)? else { break };
            let span = delivery_span(job, channel_name, &claimed);
            let given_up = given_up(&claimed, deaths);
            let sent = one(ctx, job, channel_name, &claimed, given_up.as_deref(), term);
            let sent = sent.instrument(span.clone()).await;
            sent.inspect_err(|again| {
                if again.after.is_none() {
                    telemetry::failed(&span, "retry");
                }
            })?;
            deaths = 0;
        }
        if ctx.store.end_deliver_job(&job.lease, seen).await.map_err(Again::later)? {
            return Ok(());
        }
    }
}

/// Sends one claimed delivery, if it may be sent, and records how it ended.
///
/// # Errors
/// [`Again`], when the job must be given back and tried later.
async fn one(
    ctx: &Ctx,
    job: &Job,
    channel_name: &str,
    claimed: &Claimed,
    given_up: Option<&str>,
    term: Term,
) -> Result<(), Again> {
    let settled = match next(ctx, job, channel_name, claimed, given_up, term).await {
        Next::Settle(settled) => settled,
        Next::Again { error, unsent } => {
            if unsent {
                ctx.store.unsend(&job.lease, &claimed.delivery_id, &error).await.map_err(Again::later)?;
            }
            return Err(Again::later(error));
        }
        Next::Throttled { error, after, unsent } => {
            let given_back =
                ctx.store.postpone_delivery(&job.lease, &claimed.delivery_id, unsent, &error).await;
            given_back.map_err(Again::later)?;
            return Err(Again { error, after: Some(after) });
        }
    };
    crate::failpoint("K13");
    let held = settle(ctx, job, channel_name, claimed, &settled).await.map_err(Again::later)?;
    crate::failpoint("K14");
    ctx.bus.notifier.session(&claimed.session_id);
    match settled {
        Settled::Sent { .. } if held => info!(delivery.id = claimed.delivery_id, "Sent by {channel_name}"),
        Settled::Sent { .. } => {
            warn!(delivery.id = claimed.delivery_id, "Sent, but the lease was lost before that was recorded")
        }
        Settled::Failed { error } | Settled::Expired { error } => {
            telemetry::failed(&Span::current(), "not_sent");
            let remedy = format!("wakeful delivery resend {}", claimed.delivery_id);
            warn!(delivery.id = claimed.delivery_id, error, remedy, "Not sent by {channel_name}");
        }
        Settled::Uncertain { error } => {
            telemetry::failed(&Span::current(), "not_sent");
            let remedy = format!("wakeful session why {}", claimed.session_id);
            warn!(delivery.id = claimed.delivery_id, error, remedy, "Possibly not sent by {channel_name}");
        }
    }
    Ok(())
}

/// Returns how long after its claim an attempt may still be under way: it begins within one lease, and then
/// takes at most [`SEND`].
fn attempt_limit(ctx: &Ctx) -> Duration {
    Duration::from_secs(ctx.config.queue.lease_s) + SEND
}

/// Returns the reason if this attempt is the last one.
fn given_up(claimed: &Claimed, deaths: i64) -> Option<String> {
    if claimed.maybe_sent && deaths >= Limits::DEATHS {
        return Some(format!("{deaths} workers died while they were sending it"));
    }
    let hours = TRY_FOR.as_secs() / 3600;
    (claimed.tried_for >= TRY_FOR).then(|| format!("it was tried for {hours} hours"))
}

/// What is to be done about a claimed delivery.
enum Next {
    Settle(Settled),
    /// Later. `unsent`: it certainly was not sent, and may expire.
    Again {
        error: String,
        unsent: bool,
    },
    /// When the receiver takes more: `unsent` as above.
    Throttled {
        error: String,
        after: Duration,
        unsent: bool,
    },
}

/// What may be known of a delivery before it is sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    Unsent,
    MaybeSent,
}

async fn next(
    ctx: &Ctx,
    job: &Job,
    channel_name: &str,
    claimed: &Claimed,
    given_up: Option<&str>,
    mut term: Term,
) -> Next {
    let again = |error: String, before| Next::Again { error, unsent: before == Before::Unsent };
    let throttled =
        |error: String, after, before| Next::Throttled { error, after, unsent: before == Before::Unsent };
    let expired = || {
        let error = format!("it was not sent by {channel_name} in time, and is not sent late");
        Next::Settle(Settled::Expired { error })
    };
    let uncertain = |error: &str| Next::Settle(Settled::Uncertain { error: error.to_owned() });
    let failed = |error: &str, why: &str| Next::Settle(Settled::Failed { error: format!("{error} ({why})") });
    if claimed.late && !claimed.maybe_sent {
        return expired();
    }
    let mut before = if claimed.maybe_sent { Before::MaybeSent } else { Before::Unsent };
    let Some(channel) = ctx.plugins.channels.get(channel_name) else {
        let remedy = match channel_name {
            "email" => "configure a way out for mail ([email]) on one of the workers".to_owned(),
            "slack" | "telegram" | "webhook" => {
                format!("configure [messenger.{channel_name}] on one of the workers")
            }
            _ => "start a worker that registers it by `App::channel`".to_owned(),
        };
        let error = format!("this worker has no channel {channel_name:?}: {remedy}");
        // Another worker may have it.
        return match (given_up, before) {
            (None, _) => again(error, before),
            (Some(why), Before::Unsent) => failed(&error, why),
            (Some(_), Before::MaybeSent) => uncertain(&format!("{DIED}, and {error}")),
        };
    };
    let outbound = Outbound { delivery_id: &claimed.delivery_id, content: &claimed.content };
    if before == Before::MaybeSent {
        match ask(channel.as_ref(), &outbound).await {
            Ok(Found::Sent { receipt }) => return Next::Settle(Settled::Sent { receipt }),
            // A worker that was stopped and not killed may be in the middle of it.
            Ok(Found::NotSent)
                if !claimed.quiet && (claimed.late || given_up.is_some() || !channel.is_idempotent()) =>
            {
                return again("an earlier attempt may still be under way".to_owned(), before);
            }
            Ok(Found::NotSent) if claimed.late => return expired(),
            Ok(Found::NotSent) => {
                if let Some(why) = given_up {
                    return failed("its attempts ended without an answer", why);
                }
                if claimed.quiet {
                    before = Before::Unsent;
                }
            }
            Ok(Found::Unknown) if claimed.late => {
                return uncertain(&format!("{DIED}, and it is too old to be sent again"));
            }
            Ok(Found::Unknown) if !channel.is_idempotent() => return uncertain(DIED),
            Ok(Found::Unknown) => {
                if let Some(why) = given_up {
                    return uncertain(&format!("its attempts ended without an answer ({why})"));
                }
            }
            Err(error) => match (given_up, error) {
                (Some(_), error) => {
                    return uncertain(&format!("{DIED}, and the channel does not say: {error}"));
                }
                (None, SendError::Throttled { error, after }) => return throttled(error, after, before),
                (None, error) => return again(error.to_string(), before),
            },
        }
    }
    if claimed.maybe_sent {
        term = job.lease.term();
        match ctx.store.send_again(&job.lease, &claimed.delivery_id, attempt_limit(ctx)).await {
            Ok(true) => {}
            Ok(false) => return again("the lease was lost before it was sent again".to_owned(), before),
            Err(error) => return again(error.to_string(), before),
        }
    }
    // Nothing is sent on a lease that may have ended: its successor sends.
    if !job.lease.is_live() || !term.lasts() {
        return again("the lease may have ended before it was sent".to_owned(), before);
    }
    crate::failpoint("K12");
    let sent = tokio::time::timeout(SEND, channel.send(&outbound)).await;
    let unknown = || SendError::Unknown(format!("no answer within {} seconds", SEND.as_secs()));
    match sent.unwrap_or_else(|_| Err(unknown())) {
        Ok(receipt) => Next::Settle(Settled::Sent { receipt }),
        // What is refused now may have been taken the first time.
        Err(SendError::Refused(error)) if before == Before::MaybeSent => uncertain(&error),
        Err(SendError::Refused(error)) => Next::Settle(Settled::Failed { error }),
        Err(SendError::Later(error) | SendError::Throttled { error, .. }) if let Some(why) = given_up => {
            match before {
                Before::Unsent => failed(&error, why),
                Before::MaybeSent => uncertain(&error),
            }
        }
        Err(SendError::Later(error)) => again(error, before),
        Err(SendError::Throttled { error, after }) => throttled(error, after, before),
        Err(SendError::Unknown(error)) => match ask(channel.as_ref(), &outbound).await {
            Ok(Found::Sent { receipt }) => Next::Settle(Settled::Sent { receipt }),
            Ok(Found::Unknown) if !channel.is_idempotent() => uncertain(&error),
            // The next claim asks again, or sends it again under its key.
            Ok(Found::Unknown | Found::NotSent) | Err(_) => again(error, Before::MaybeSent),
        },
    }
}

const DIED: &str = "a worker stopped while sending it; it may have gone out";

async fn ask(channel: &dyn Channel, message: &Outbound<'_>) -> Result<Found, SendError> {
    let answer = tokio::time::timeout(SEND, channel.find_message(message)).await;
    answer.unwrap_or_else(|_| Err(SendError::Later(format!("no answer within {} seconds", SEND.as_secs()))))
}

/// The root span of a new trace for one message. It links to the claim whose commit enqueued the message.
fn delivery_span(job: &Job, channel_name: &str, claimed: &Claimed) -> Span {
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

/// Records how the delivery ended. Tries again while the database is away and the lease lasts: without this
/// record, a message that went out would be sent twice or count as uncertain. Returns `false` if the lease is
/// lost.
async fn settle(
    ctx: &Ctx,
    job: &Job,
    channel_name: &str,
    claimed: &Claimed,
    settled: &Settled,
) -> wakeful_store::Result<bool> {
    let mut faults = 0;
    loop {
        match ctx.store.settle_delivery(&job.lease, claimed, channel_name, settled).await {
            Err(error) if error.is_transient() && job.lease.is_live() => {
                faults += 1;
                warn!(%error, delivery.id = claimed.delivery_id, "The result of a delivery was not recorded; trying again");
                tokio::time::sleep(queue::delay(faults, None)).await;
            }
            done => return done,
        }
    }
}
