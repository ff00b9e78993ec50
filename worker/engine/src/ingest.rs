//! The way in for every trigger: what it brought is committed, and then workers and readers are told.
//!
//! What cannot be taken now is refused at once, with a time to come again: a queue in memory would be lost with the
//! process, and would keep its senders waiting for longer than they do. There are two bounds. `Intake::enter` counts
//! everything that is being taken. The turns to write are as many as there are connections for it, and what does not get one
//! in time goes away as well. Readers and workers have connections of their own ([`Store::connect`]).

use crate::ctx::Ctx;
use crate::origin::CannotBegin;
use crate::telemetry::{self, names};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use tracing::field::Empty;
use tracing::{Instrument, Span, debug, info_span};
use wakeful_store::Store;
use wakeful_store::legacy::Imported;
use wakeful_store::mail::{MailWakes, NewMail};
use wakeful_store::queue::Kind;
use wakeful_store::wake::{NewMessage, NewSession, Woken};
use wakeful_workflow::id::InvalidConversationId;

/// When a sender that was refused may come again. What is in hand takes milliseconds each.
pub const RETRY_AFTER_S: u32 = 1;

/// Why a message was not taken. Each edge says it in its own protocol's words.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// Too much comes in at once. Nothing was taken, and the same message may be sent again after [`RETRY_AFTER_S`].
    #[error("too many messages come in at once; nothing was taken, send it again")]
    Full,
    /// No session can be made for it.
    #[error(transparent)]
    CannotBegin(#[from] CannotBegin),
    /// The conversation id that it names cannot be one.
    #[error(transparent)]
    ConversationId(#[from] InvalidConversationId),
    /// The store refused it, or failed.
    #[error(transparent)]
    Store(#[from] wakeful_store::Error),
}

/// How much may come in at once.
#[derive(Debug)]
pub struct Intake {
    places: Arc<Semaphore>,
    turns: Semaphore,
    wait: Duration,
}

/// The right to be taken, and a connection's worth of the database.
pub struct Permit<'a> {
    _place: OwnedSemaphorePermit,
    _turn: SemaphorePermit<'a>,
}

impl Intake {
    /// `concurrency` messages at once, each of which waits at most `wait` for one of `store`'s connections.
    pub fn new(store: &Store, concurrency: usize, wait: Duration) -> Intake {
        let concurrency =
            if crate::mutant("intake_unbounded") { Semaphore::MAX_PERMITS } else { concurrency };
        let places = Arc::new(Semaphore::new(concurrency));
        Intake { places, turns: Semaphore::new(store.intake_connections() as usize), wait }
    }

    /// Whether one more would be refused now. A look, for those who have a body to read first: they may be refused yet.
    pub fn is_full(&self) -> bool {
        self.places.available_permits() == 0
    }

    /// A turn to write.
    ///
    /// # Errors
    /// [`Refused::Full`] when too many are in already, or none of them has gone in time.
    pub async fn enter(&self) -> Result<Permit<'_>, Refused> {
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| full())?;
        let turn = tokio::time::timeout(self.wait, self.turns.acquire()).await.map_err(|_| full())?;
        // Nobody closes it.
        let turn = turn.map_err(|_| full())?;
        Ok(Permit { _place: place, _turn: turn })
    }
}

fn full() -> Refused {
    debug!("A message was refused: too many at once");
    Refused::Full
}

/// Wakes the session that `new` finds or makes. When this returns, the message is durable.
///
/// # Errors
/// Those of [`wakeful_store::Store::wake`], and [`Refused::Full`] while too much comes in, where nothing was taken.
pub async fn take(ctx: &Ctx, new: NewSession, message: NewMessage) -> Result<Woken, Refused> {
    taken(ctx, new, message, None).await
}

/// The same for a chat that has no session here and was kept elsewhere before: a new session begins with `imported`.
///
/// # Errors
/// Those of [`take`].
pub async fn take_imported(
    ctx: &Ctx,
    new: NewSession,
    message: NewMessage,
    imported: &Imported,
) -> Result<Woken, Refused> {
    taken(ctx, new, message, Some(imported)).await
}

async fn taken(
    ctx: &Ctx,
    new: NewSession,
    message: NewMessage,
    imported: Option<&Imported>,
) -> Result<Woken, Refused> {
    let _turn = ctx.intake.enter().await?;
    let span = send_span(&new.conversation_id);
    async {
        let message = NewMessage { trace_context: telemetry::trace_context(), ..message };
        let woken = match imported {
            Some(imported) => ctx.store.wake_imported(&new, &message, imported).await?,
            None => ctx.store.wake(&new, &message).await?,
        };
        crate::failpoint("K2");
        announce(ctx, &woken);
        Ok(woken)
    }
    .instrument(span)
    .await
}

/// A message for a session that exists. When this returns, it is durable.
///
/// # Errors
/// Those of [`wakeful_store::Store::send`], and [`Refused::Full`] while too much comes in, where nothing was taken.
pub async fn send(
    ctx: &Ctx,
    session_id: &str,
    conversation_id: &str,
    message: NewMessage,
) -> Result<Woken, Refused> {
    let _turn = ctx.intake.enter().await?;
    async {
        let message = NewMessage { trace_context: telemetry::trace_context(), ..message };
        let woken = ctx.store.send(session_id, &message).await?;
        announce(ctx, &woken);
        Ok(woken)
    }
    .instrument(send_span(conversation_id))
    .await
}

/// The same for a mail, which is remembered in the same commit. It was looked up within the turn in which it is taken.
///
/// # Errors
/// Those of [`wakeful_store::Store::take_mail`].
pub async fn take_mail(
    ctx: &Ctx,
    _turn: &Permit<'_>,
    mail: &NewMail,
    wakes: MailWakes<'_>,
    message: NewMessage,
) -> Result<Woken, Refused> {
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
pub fn send_span(conversation_id: &str) -> Span {
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
pub fn announce(ctx: &Ctx, woken: &Woken) {
    let span = Span::current();
    span.record(names::SESSION_ID, woken.session_id.as_str());
    span.record(names::RUN_ID, woken.run_id.as_str());
    if !woken.duplicate {
        ctx.bus.notifier.job();
        ctx.bus.notifier.session(&woken.session_id);
    }
}
