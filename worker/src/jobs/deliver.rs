//! The deliver job: the outgoing messages of one channel of one conversation, in order.

use crate::Ctx;
use crate::channel::{Outbound, SendError};
use crate::telemetry::{self, names};
use apalis::prelude::{BoxDynError, Data};
use futures::FutureExt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use tracing::{Instrument, Span, info, info_span, warn};
use wakeful_store::delivery::{Claimed, Settled};
use wakeful_store::queue::{self, Job};

/// Attempts after which a message that is refused temporarily counts as failed.
const ATTEMPTS: i32 = 10;

/// Runs one claimed deliver job. Every end of it is accounted for here: apalis is only told that it is over.
///
/// # Errors
/// Never; the signature is apalis'.
pub async fn deliver(job: Job, ctx: Data<Arc<Ctx>>) -> Result<(), BoxDynError> {
    let ctx = Arc::clone(&ctx);
    let work = AssertUnwindSafe(work(&ctx, &job)).catch_unwind();
    let end = tokio::select! {
        end = work => end.unwrap_or_else(|_| Err("internal error: the delivery panicked".to_owned())),
        () = job.lease.lost().cancelled() => Ok(()),
        () = ctx.abort.cancelled() => {
            if let Err(error) = ctx.store.release(&job.lease).await {
                warn!(%error, "A job was not released; it is free when its lease ends");
            }
            Ok(())
        }
    };
    if let Err(error) = end {
        let delay = queue::delay(job.stuck, None);
        warn!(error, delay_ms = delay.as_millis() as u64, "Delivering failed; trying again later");
        if let Err(error) = ctx.store.retry_later(&job.lease, delay, &error).await {
            warn!(%error, "The job was not given back; it is free when its lease ends");
        }
    }
    Ok(())
}

async fn work(ctx: &Ctx, job: &Job) -> Result<(), String> {
    let channel_name = job.channel.as_deref().unwrap_or_default();
    loop {
        // Read before looking: what is enqueued after the look moves this number.
        let Some(seen) = ctx.store.pending_deliveries(&job.lease).await.map_err(text)? else {
            return Ok(());
        };
        loop {
            // What is claimed and not sent would look half sent to the one who finds it.
            if !job.lease.is_live() {
                return Ok(());
            }
            let claimed = ctx.store.claim_delivery(&job.lease, &job.conversation_id, channel_name).await;
            let Some(claimed) = claimed.map_err(text)? else { break };
            let span = delivery_span(job, channel_name, &claimed);
            let sent = one(ctx, job, channel_name, &claimed).instrument(span.clone()).await;
            sent.inspect_err(|_| telemetry::failed(&span, "retry"))?;
        }
        if ctx.store.end_deliver_job(&job.lease, seen).await.map_err(text)? {
            return Ok(());
        }
    }
}

/// Sends one message and writes down how it ended.
///
/// # Errors
/// What to try again, in words.
async fn one(ctx: &Ctx, job: &Job, channel_name: &str, claimed: &Claimed) -> Result<(), String> {
    let settled = match ctx.channels.get(channel_name) {
        // Another worker may have it.
        None => {
            let error = format!("no channel named {channel_name:?} is configured on this worker");
            if claimed.attempt < ATTEMPTS {
                if !claimed.maybe_sent {
                    ctx.store.unsend(&job.lease, &claimed.delivery_id, &error).await.map_err(text)?;
                }
                return Err(error);
            }
            Settled::Failed { error }
        }
        Some(channel) if claimed.maybe_sent && !channel.is_idempotent() => {
            Settled::Uncertain { error: "a worker stopped while sending it; it may have gone out".to_owned() }
        }
        Some(_) if claimed.maybe_sent && claimed.attempt > ATTEMPTS => {
            Settled::Uncertain { error: format!("{ATTEMPTS} attempts ended without an answer") }
        }
        // Nothing is sent on a lease that may have ended: its successor sends.
        Some(_) if !job.lease.is_live() => {
            let error = "the lease may have ended before it was sent";
            if !claimed.maybe_sent {
                ctx.store.unsend(&job.lease, &claimed.delivery_id, error).await.map_err(text)?;
            }
            return Err(error.to_owned());
        }
        Some(channel) => {
            crate::failpoint("K12");
            let outbound = Outbound { delivery_id: &claimed.delivery_id, content: &claimed.content };
            match channel.send(&outbound).await {
                Ok(receipt) => Settled::Sent { receipt },
                Err(SendError::Refused(error)) => Settled::Failed { error },
                Err(SendError::Later(error)) if claimed.attempt >= ATTEMPTS => Settled::Failed { error },
                Err(SendError::Later(error)) => {
                    ctx.store.unsend(&job.lease, &claimed.delivery_id, &error).await.map_err(text)?;
                    return Err(error);
                }
                Err(SendError::Unknown(error)) if channel.is_idempotent() => return Err(error),
                Err(SendError::Unknown(error)) => Settled::Uncertain { error },
            }
        }
    };
    crate::failpoint("K13");
    let held = settle(ctx, job, channel_name, claimed, &settled).await.map_err(text)?;
    crate::failpoint("K14");
    ctx.notifier.session(&claimed.session_id);
    match settled {
        Settled::Sent { .. } if held => info!(delivery.id = claimed.delivery_id, "Sent by {channel_name}"),
        Settled::Sent { .. } => {
            warn!(delivery.id = claimed.delivery_id, "Sent, but the lease was lost meanwhile")
        }
        Settled::Failed { error } | Settled::Uncertain { error } => {
            telemetry::failed(&Span::current(), "not_sent");
            warn!(delivery.id = claimed.delivery_id, error, "Not sent for certain");
        }
    }
    Ok(())
}

/// A trace of its own for every message, linked to the claim whose commit enqueued it.
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

/// Writes the end down, and tries again while the database is away and the lease lasts: it was sent, and forgetting
/// that would send it twice or leave it uncertain.
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
                warn!(%error, delivery.id = claimed.delivery_id, "A delivery's end was not written; trying again");
                tokio::time::sleep(queue::delay(faults, None)).await;
            }
            done => return done,
        }
    }
}

fn text(error: wakeful_store::Error) -> String {
    error.to_string()
}
