//! Ingest: triggers hand their messages to this module, which commits them and then notifies workers and readers. Schedules do
//! not: [`Store::fire_due`] commits their ticks. A program's own handle ([`crate::handle`]) also calls the store itself.
//!
//! When too many messages come in at once, the surplus is refused with a time to retry. A queue in memory
//! would be lost with the process, and its senders would give up before it reached them. [`Intake::enter`]
//! applies two limits. A message needs one of `concurrency` slots, or it is refused at once. It then waits
//! for one of the connections that messages may take. If it gets none in time, it is refused too. One
//! connection is always left to readers and workers ([`Store::connect`]).
//!
//! Messages of one conversation are written one after the other, and wait for each other without a connection
//! ([`Lines`]). So if another transaction holds one conversation, messages of all others come in. A mail stands in no line,
//! because its conversation is not known when it takes its permit. So it holds a connection while it waits for its conversation.
#![doc = include_str!("ingest.md")]

use crate::ctx::Ctx;
use crate::new_session::CannotBegin;
use crate::telemetry::{self, Metrics, names};
use prometheus_client::metrics::counter::Counter;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use tracing::field::Empty;
use tracing::{Instrument, Span, debug, info_span};
use wakeful_store::Store;
use wakeful_store::legacy::Imported;
use wakeful_store::lines::{self, Front, Lines, NotReached};
use wakeful_store::mail::{MailWakes, NewMail};
use wakeful_store::queue::{Kind, Offer};
use wakeful_store::wake::{ChatWoken, NewMessage, NewSession, Woken};
use wakeful_workflow::id::InvalidConversationId;
use wakeful_workflow::inbox::Acceptance;

/// Seconds after which a refused sender may try again. One second is enough, because a message takes
/// milliseconds.
pub const RETRY_AFTER_S: u32 = 1;

/// Why a message was not taken. Each edge (HTTP, LMTP) translates it into its own protocol.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// Too many messages come in at once. Nothing was committed; the sender may try again after
    /// [`RETRY_AFTER_S`].
    #[error("too many messages come in at once; nothing was taken, send it again")]
    Full,
    /// No session can be created for the message.
    #[error(transparent)]
    CannotBegin(#[from] CannotBegin),
    /// The message names an invalid conversation id.
    #[error(transparent)]
    ConversationId(#[from] InvalidConversationId),
    /// The store refused the message, or failed.
    #[error(transparent)]
    Store(#[from] wakeful_store::Error),
}

/// Limits how many messages are taken at once.
#[derive(Debug)]
pub struct Intake {
    slots: Arc<Semaphore>,
    connections: Semaphore,
    wait: Duration,
    lines: Lines,
    /// How many messages of one conversation may be under way: fewer than all, so that others find room.
    of_one: usize,
    refused: Counter,
}

/// Permission to commit a message: a slot of the intake, and a connection for messages. Dropping it
/// frees both.
pub struct Permit<'a> {
    _front: Option<Front>,
    _slot: OwnedSemaphorePermit,
    _connection: SemaphorePermit<'a>,
}

impl Intake {
    /// Allows `concurrency` messages at once. Each waits at most `wait` for one of the connections that `store` gives
    /// messages. Counts in `metrics` those that it refuses.
    pub fn new(store: &Store, concurrency: usize, wait: Duration, metrics: &Metrics) -> Intake {
        let slots = Arc::new(Semaphore::new(concurrency));
        let connections = Semaphore::new(store.intake_connections());
        Intake {
            slots,
            connections,
            wait,
            lines: Lines::default(),
            of_one: (concurrency * 3).div_ceil(4),
            refused: metrics.refused_messages(),
        }
    }

    /// Returns whether a message would be refused now. Takes no slot: callers ask before they read a body,
    /// and [`Intake::enter`] may still refuse the message after that.
    pub fn is_full(&self) -> bool {
        self.slots.available_permits() == 0
    }

    /// Takes a slot, then waits for a connection.
    ///
    /// # Errors
    /// [`Refused::Full`] when all slots are taken, or when no connection became free in time.
    pub async fn enter(&self) -> Result<Permit<'_>, Refused> {
        let slot = self.slot()?;
        self.connection(slot, None).await
    }

    /// Takes a slot, waits for the messages of this conversation that came before, then waits for a connection.
    ///
    /// # Errors
    /// Those of [`Intake::enter`]. [`Refused::Store`] when another transaction holds the conversation.
    pub async fn enter_line(&self, conversation_id: &str) -> Result<Permit<'_>, Refused> {
        let slot = self.slot()?;
        let reached = self.lines.front(&conversation_id.into(), self.of_one, lines::WAITS).await;
        let front = reached.map_err(|why| match why {
            NotReached::TooMany => self.refuse(),
            NotReached::TooLate => Refused::Store(why.into()),
        })?;
        self.connection(slot, Some(front)).await
    }

    /// Counts a message that is refused because too many come in at once.
    pub fn refuse(&self) -> Refused {
        debug!("A message was refused: too many at once");
        self.refused.inc();
        Refused::Full
    }

    fn slot(&self) -> Result<OwnedSemaphorePermit, Refused> {
        Arc::clone(&self.slots).try_acquire_owned().map_err(|_| self.refuse())
    }

    async fn connection(
        &self,
        slot: OwnedSemaphorePermit,
        front: Option<Front>,
    ) -> Result<Permit<'_>, Refused> {
        let connection =
            tokio::time::timeout(self.wait, self.connections.acquire()).await.map_err(|_| self.refuse())?;
        // Cannot fail: the semaphore is never closed.
        let connection = connection.map_err(|_| self.refuse())?;
        Ok(Permit { _front: front, _slot: slot, _connection: connection })
    }
}

/// Commits `message` to the session that `new` describes, and wakes it. Creates the session if it does not
/// exist. When this returns `Ok`, the message is durable.
///
/// # Errors
/// Those of [`wakeful_store::Store::wake`]. [`Refused::Full`] when too many messages come in at once; nothing
/// was committed then.
pub async fn accept(ctx: &Ctx, new: NewSession, message: NewMessage) -> Result<Woken, Refused> {
    accept_message(ctx, new, message, None).await
}

/// Like [`accept`], for a chat message that names no agent. If it opens a chat about a notice whose agent is not that of
/// `new`, nothing is committed: call [`accept`] with a session of that agent.
///
/// # Errors
/// Those of [`accept`].
pub async fn accept_chat(ctx: &Ctx, new: NewSession, message: NewMessage) -> Result<ChatWoken, Refused> {
    let _permit = ctx.intake.enter_line(&new.conversation_id).await?;
    let span = send_span(&new.conversation_id);
    async {
        let message = NewMessage { trace_context: telemetry::trace_context(), ..message };
        let mut offer = ctx.bus.notifier.offer(Kind::Step);
        let woken = ctx.store.wake_chat(&new, &message, offer.as_mut()).await?;
        if let ChatWoken::Accepted(woken) = &woken {
            wakeful_store::failpoint!("K2");
            begin(ctx, woken, offer);
        }
        Ok(woken)
    }
    .instrument(span)
    .await
}

/// Like [`accept`], for a chat that another system kept before and that has no session here: the new session
/// begins with `imported`.
///
/// # Errors
/// Those of [`accept`].
pub async fn accept_imported(
    ctx: &Ctx,
    new: NewSession,
    message: NewMessage,
    imported: &Imported,
) -> Result<Woken, Refused> {
    accept_message(ctx, new, message, Some(imported)).await
}

async fn accept_message(
    ctx: &Ctx,
    new: NewSession,
    message: NewMessage,
    imported: Option<&Imported>,
) -> Result<Woken, Refused> {
    let _permit = ctx.intake.enter_line(&new.conversation_id).await?;
    let span = send_span(&new.conversation_id);
    async {
        let message = NewMessage { trace_context: telemetry::trace_context(), ..message };
        let mut offer = ctx.bus.notifier.offer(Kind::Step);
        let woken = match imported {
            Some(imported) => ctx.store.wake_imported(&new, &message, imported).await?,
            None => ctx.store.wake_for(&new, &message, offer.as_mut()).await?,
        };
        wakeful_store::failpoint!("K2");
        begin(ctx, &woken, offer);
        Ok(woken)
    }
    .instrument(span)
    .await
}

/// Commits `message` to the existing session `session_id`, and wakes it. When this returns `Ok`, the message
/// is durable.
///
/// # Errors
/// Those of [`wakeful_store::Store::send`]. [`Refused::Full`] when too many messages come in at once; nothing
/// was committed then.
pub async fn send(
    ctx: &Ctx,
    session_id: &str,
    conversation_id: &str,
    message: NewMessage,
) -> Result<Woken, Refused> {
    let _permit = ctx.intake.enter_line(conversation_id).await?;
    async {
        let message = NewMessage { trace_context: telemetry::trace_context(), ..message };
        let mut offer = ctx.bus.notifier.offer(Kind::Step);
        let woken = ctx.store.send_for(session_id, &message, offer.as_mut()).await?;
        wakeful_store::failpoint!("K2");
        begin(ctx, &woken, offer);
        Ok(woken)
    }
    .instrument(send_span(conversation_id))
    .await
}

/// Like [`accept`], for a mail; the same commit records the mail itself. The caller already holds a permit,
/// because it queried the database for the mail before this call.
///
/// # Errors
/// Those of [`wakeful_store::Store::accept_mail`].
pub async fn accept_mail(
    ctx: &Ctx,
    _permit: &Permit<'_>,
    mail: &NewMail,
    wakes: MailWakes<'_>,
    message: NewMessage,
) -> Result<Woken, Refused> {
    let span = send_span(&mail.conversation_id);
    async {
        let message = NewMessage { trace_context: telemetry::trace_context(), ..message };
        let woken = ctx.store.accept_mail(mail, wakes, &message).await?;
        wakeful_store::failpoint!("K2");
        announce(ctx, &woken);
        Ok(woken)
    }
    .instrument(span)
    .await
}

/// The span of a message on its way into the queue. The claim that works on the message links to this span.
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

/// Notifies workers and readers of a committed message, and adds session and run to its span. Does not notify
/// for a duplicate.
pub fn announce(ctx: &Ctx, woken: &Woken) {
    begin(ctx, woken, None);
}

/// Like [`announce`], but begins the job at once if it filled this process's offer.
fn begin(ctx: &Ctx, woken: &Woken, offer: Option<Offer>) {
    let span = Span::current();
    span.record(names::SESSION_ID, woken.session_id.as_str());
    span.record(names::RUN_ID, woken.run_id.as_str());
    let begun = offer.is_some_and(Offer::begin);
    ctx.metrics.message_came(woken.duplicate);
    if !woken.duplicate {
        // A message that waits in the inbox has no job of its own: the run's step takes it.
        if !begun && woken.outcome != Acceptance::Queued {
            ctx.bus.notifier.job(Kind::Step);
        }
        ctx.bus.notifier.session(&woken.session_id);
    }
}
