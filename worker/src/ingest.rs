//! The way in for every trigger: what it brought is committed, and then workers and readers are told.

use crate::Ctx;
use crate::api::Problem;
use crate::telemetry::{self, names};
use tracing::field::Empty;
use tracing::{Instrument, Span, info_span};
use wakeful_store::mail::{MailWakes, NewMail};
use wakeful_store::queue::Kind;
use wakeful_store::wake::{NewMessage, NewSession, Woken};

/// Wakes the session that `new` finds or makes. When this returns, the message is durable.
///
/// # Errors
/// Those of [`wakeful_store::Store::wake`], as answers.
pub async fn take(ctx: &Ctx, new: NewSession, message: NewMessage) -> Result<Woken, Problem> {
    let span = send_span(&new.conversation_id);
    async {
        let message = NewMessage { trace_context: telemetry::trace_context(), ..message };
        let woken = ctx.store.wake(&new, &message).await?;
        crate::failpoint("K2");
        announce(ctx, &woken);
        Ok(woken)
    }
    .instrument(span)
    .await
}

/// The same for a mail, which is remembered in the same commit.
///
/// # Errors
/// Those of [`wakeful_store::Store::take_mail`], as answers.
pub async fn take_mail(
    ctx: &Ctx,
    mail: &NewMail,
    wakes: MailWakes<'_>,
    message: NewMessage,
) -> Result<Woken, Problem> {
    let span = send_span(&mail.conversation_id);
    async {
        let message = NewMessage { trace_context: telemetry::trace_context(), ..message };
        let woken = ctx.store.take_mail(mail, wakes, &message).await?;
        crate::failpoint("K2");
        announce(ctx, &woken);
        Ok(woken)
    }
    .instrument(span)
    .await
}

/// A message on its way into the queue. What it wakes is linked to it.
pub(crate) fn send_span(conversation_id: &str) -> Span {
    info_span!(
        names::SEND_STEP,
        "otel.kind" = names::KIND_PRODUCER,
        { names::CONVERSATION_ID } = conversation_id,
        { names::SESSION_ID } = Empty,
        { names::RUN_ID } = Empty,
        { names::MESSAGING_SYSTEM } = names::MESSAGING_SYSTEM_WAKEFUL,
        { names::MESSAGING_OPERATION_NAME } = names::MESSAGING_SEND,
        { names::MESSAGING_OPERATION_TYPE } = names::MESSAGING_SEND,
        { names::MESSAGING_DESTINATION_NAME } = Kind::Step.as_str(),
    )
}

/// Tells workers and readers of a message that was taken, and completes its span.
pub(crate) fn announce(ctx: &Ctx, woken: &Woken) {
    let span = Span::current();
    span.record(names::SESSION_ID, woken.session_id.as_str());
    span.record(names::RUN_ID, woken.run_id.as_str());
    if !woken.duplicate {
        ctx.notifier.job();
        ctx.notifier.session(&woken.session_id);
    }
}
