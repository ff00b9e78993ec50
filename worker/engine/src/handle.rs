//! The handle with which a program drives a session: start it, answer it, stop it.
//!
//! The session is an ordinary one (trigger type `api`). Any worker on the same database runs it, in this
//! process or in another. A handle keeps only the session's id and its position in the journal. If the
//! program crashes, the session goes on. The program then gets a new handle from `Process::attach`, which reads the
//! journal from the start.
//!
//! ```no_run
//! use std::sync::Arc;
//! use wakeful_engine::ctx::Ctx;
//! use wakeful_engine::jobs::pool;
//! use wakeful_engine::handle::{Pause, SessionHandle};
//!
//! # async fn example(ctx: Arc<Ctx>) -> anyhow::Result<()> {
//! // Run workers in this process too. Without them, a `wakeful serve` on the database runs the session.
//! let pool = tokio::spawn(pool::run(Arc::clone(&ctx), ctx.bus.news.clone()));
//!
//! let mut session = SessionHandle::new(Arc::clone(&ctx));
//! session.start("A table for tonight, please.", Some("You book tables.")).await?;
//! loop {
//!     match session.consume_until_pause(|entry| println!("{} {}", entry.seq, entry.kind)).await? {
//!         Pause::WaitingInput { question } => {
//!             println!("{question}");
//!             session.continue_with("For four, at eight.").await?;
//!         }
//!         Pause::Completed { result } => break println!("{result}"),
//!         Pause::Failed { error } => anyhow::bail!(error),
//!         Pause::NeedsAttention { reason } => anyhow::bail!("an operator has to look: {reason}"),
//!         other => anyhow::bail!("{other:?}"),
//!     }
//! }
//! ctx.shutdown.draining.cancel();
//! pool.await??;
//! # Ok(())
//! # }
//! ```
#![deny(missing_docs)]

use crate::ctx::Ctx;
use crate::{new_session, telemetry};
use std::sync::Arc;
use std::time::Duration;
use tracing::debug;
use wakeful_store::event::JournalEntry;
use wakeful_store::queue::heard;
use wakeful_store::session::SessionSummary;
use wakeful_store::wake::{NewMessage, NewSession};
use wakeful_store::{Error, new_id};
use wakeful_workflow::id::DEFAULT_SPACE;
use wakeful_workflow::record::Role;
use wakeful_workflow::seed::Seed;
use wakeful_workflow::session::SessionStatus;

/// Journal entries per query.
const BATCH: i64 = 200;
/// How many of the newest messages are searched for a finished run's result. Newer messages may already
/// follow it.
const NEWEST: i64 = 20;
/// How often the database is queried when no notification comes.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Drives one session at a time for a program.
pub struct SessionHandle {
    ctx: Arc<Ctx>,
    agent: Option<String>,
    active: Option<Active>,
}

/// The session that a handle drives.
struct Active {
    session_id: String,
    /// Number of the last journal entry passed to the caller.
    seen: i64,
    /// The session's status according to the journal entries passed so far.
    state: Option<String>,
}

/// Where a run stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pause {
    /// The agent asks the user a question. [`SessionHandle::continue_with`] answers it, and the same run goes on.
    WaitingInput {
        /// The text of the question.
        question: String,
    },
    /// The run is over.
    Completed {
        /// Text of the agent's last message.
        result: String,
    },
    /// The run failed, or its session was archived.
    Failed {
        /// Why, and where it helps, what to do.
        error: String,
    },
    /// Somebody cancelled the run.
    Cancelled,
    /// The run waits for an operator, who settles it with `wakeful session resolve` or `retry`.
    NeedsAttention {
        /// What the operator has to settle.
        reason: String,
    },
}

/// Why a handle's method failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionHandleError {
    /// The handle has no session: none was started, or it was stopped.
    #[error("this handle has no session: start one first")]
    NoActiveProcess,
    /// The session does not wait for an answer: its run is at work, or is over.
    #[error("the session does not wait for an answer")]
    NotWaiting,
    /// The configuration has no such agent, or the agent has a tool that this process lacks.
    #[error(transparent)]
    CannotBegin(#[from] new_session::CannotBegin),
    /// The message is empty, or contains a NUL character.
    #[error("the message is empty, or has a NUL character")]
    NoMessage,
    /// This process shuts down. The session goes on in another worker.
    #[error("this process ends")]
    Ending,
    /// The session does not exist, or the database failed.
    #[error(transparent)]
    Store(#[from] Error),
}

impl SessionHandle {
    /// Returns a handle without a session. It starts sessions of the agent `default`. Programs call
    /// `Process::session`.
    #[doc(hidden)]
    pub fn new(ctx: Arc<Ctx>) -> SessionHandle {
        SessionHandle { ctx, agent: None, active: None }
    }

    /// Sets the agent of the sessions that this handle starts.
    #[must_use]
    pub fn agent(mut self, name: &str) -> SessionHandle {
        self.agent = Some(name.to_owned());
        self
    }

    /// Returns a handle for an existing session, whichever program or trigger started it. The handle passes
    /// the whole journal to the caller again. Programs call `Process::attach`.
    ///
    /// # Errors
    /// [`SessionHandleError::Store`]: no such session, or no database.
    #[doc(hidden)]
    pub async fn attach(ctx: Arc<Ctx>, session_id: &str) -> Result<SessionHandle, SessionHandleError> {
        ctx.store.session(None, session_id).await?;
        let active = Active { session_id: session_id.to_owned(), seen: 0, state: None };
        Ok(SessionHandle { ctx, agent: None, active: Some(active) })
    }

    /// Returns the id of the handle's session.
    pub fn session_id(&self) -> Option<&str> {
        self.active.as_ref().map(|active| active.session_id.as_str())
    }

    /// Starts a session in a new conversation. `system_prompt` replaces the agent's own. When this returns
    /// `Ok`, the prompt is durable. If the handle had a session before, that session goes on without it.
    ///
    /// # Errors
    /// [`SessionHandleError::CannotBegin`], [`SessionHandleError::NoMessage`], [`SessionHandleError::Store`].
    pub async fn start(
        &mut self,
        prompt: &str,
        system_prompt: Option<&str>,
    ) -> Result<(), SessionHandleError> {
        let ctx = &self.ctx;
        let conversation_id = format!("{}/{}", DEFAULT_SPACE, new_id("conv"));
        let new =
            new_session::of_chat(&ctx.config, &ctx.plugins.tools, conversation_id, self.agent.as_deref())?;
        let seeds = match system_prompt {
            Some(prompt) => vec![Seed { role: Role::System, content: prompt.to_owned(), is_new: true }],
            None => new.seeds.clone(),
        };
        let new = NewSession { trigger_type: "api".to_owned(), seeds, ..new };
        let woken = ctx.store.wake(&new, &message(prompt)?).await?;
        self.tell(&woken.session_id);
        self.active = Some(Active { session_id: woken.session_id, seen: 0, state: None });
        Ok(())
    }

    /// Answers the open question of the session. The same run then goes on, in any worker.
    ///
    /// # Errors
    /// [`SessionHandleError::NoActiveProcess`], [`SessionHandleError::NotWaiting`], [`SessionHandleError::NoMessage`], [`SessionHandleError::Store`].
    pub async fn continue_with(&mut self, user_message: &str) -> Result<(), SessionHandleError> {
        let active = self.active.as_ref().ok_or(SessionHandleError::NoActiveProcess)?;
        match self.ctx.store.answer(&active.session_id, &message(user_message)?).await {
            Ok(woken) => {
                self.tell(&woken.session_id);
                Ok(())
            }
            Err(Error::Conflict { .. }) => Err(SessionHandleError::NotWaiting),
            Err(error) => Err(error.into()),
        }
    }

    /// Passes each new journal entry to `on_event`, in order and once, until the run pauses or ends. Waits
    /// while the database is away.
    ///
    /// # Errors
    /// [`SessionHandleError::NoActiveProcess`], [`SessionHandleError::Ending`], [`SessionHandleError::Store`].
    pub async fn consume_until_pause(
        &mut self,
        mut on_event: impl FnMut(&JournalEntry),
    ) -> Result<Pause, SessionHandleError> {
        let active = self.active.as_mut().ok_or(SessionHandleError::NoActiveProcess)?;
        let mut news = self.ctx.bus.news.sessions();
        loop {
            match look(&self.ctx, active, &mut on_event).await {
                Ok(Some(pause)) => return Ok(pause),
                Ok(None) => {}
                Err(error) if error.is_transient() => {
                    debug!(%error, "A handle could not read the session; trying again")
                }
                Err(error) => return Err(error.into()),
            }
            tokio::select! {
                () = self.ctx.shutdown.abort.cancelled() => return Err(SessionHandleError::Ending),
                () = heard(&mut news, &active.session_id) => {}
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
        }
    }

    /// Cancels the run and detaches from the session, which can still be read. Does nothing if the handle has
    /// no session.
    ///
    /// # Errors
    /// [`SessionHandleError::Store`].
    pub async fn stop(&mut self) -> Result<(), SessionHandleError> {
        let Some(active) = &self.active else { return Ok(()) };
        match self.ctx.store.cancel(&active.session_id, Some("stopped by its runner")).await {
            Ok(_) => self.tell(&active.session_id),
            // No run is open, so there is nothing to cancel.
            Err(Error::Conflict { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        self.active = None;
        Ok(())
    }

    fn tell(&self, session_id: &str) {
        self.ctx.bus.notifier.any_job();
        self.ctx.bus.notifier.session(session_id);
    }
}

/// Passes new journal entries to `on_event`. Returns the pause, if the run paused or ended and has not moved
/// since.
async fn look(
    ctx: &Ctx,
    active: &mut Active,
    on_event: &mut impl FnMut(&JournalEntry),
) -> wakeful_store::Result<Option<Pause>> {
    // Read the status before the journal: then the journal has every entry that led to it. If further entries
    // changed the status again, the comparison below notices, and the caller looks again.
    let session = ctx.store.session(None, &active.session_id).await?;
    loop {
        let entries = ctx.store.journal(&active.session_id, active.seen, BATCH).await?;
        for entry in &entries {
            active.seen = entry.seq;
            if entry.kind == "state_transition" {
                active.state = entry.payload["to_state"].as_str().map(str::to_owned);
            }
            on_event(entry);
        }
        if (entries.len() as i64) < BATCH {
            break;
        }
    }
    if active.state.as_ref().is_some_and(|state| *state != session.status) {
        return Ok(None);
    }
    pause(ctx, session).await
}

async fn pause(ctx: &Ctx, session: SessionSummary) -> wakeful_store::Result<Option<Pause>> {
    let Some(status) = SessionStatus::parse(&session.status) else { return Ok(None) };
    let error = session.error.unwrap_or_else(|| format!("the session is {}", session.status));
    Ok(match status {
        SessionStatus::Created | SessionStatus::Queued | SessionStatus::Running => None,
        SessionStatus::WaitingInput => {
            Some(Pause::WaitingInput { question: session.question.unwrap_or_default() })
        }
        SessionStatus::NeedsAttention => Some(Pause::NeedsAttention { reason: error }),
        SessionStatus::Completed => {
            let messages = ctx.store.messages(&session.session_id, None, NEWEST).await?;
            let last = messages.into_iter().rev().find(|one| one.role == Role::Assistant.as_str());
            Some(Pause::Completed { result: last.map(|one| one.text).unwrap_or_default() })
        }
        SessionStatus::Cancelled => Some(Pause::Cancelled),
        SessionStatus::Failed | SessionStatus::Archived | SessionStatus::Terminated => {
            Some(Pause::Failed { error })
        }
    })
}

fn message(text: &str) -> Result<NewMessage, SessionHandleError> {
    if text.trim().is_empty() || text.contains('\0') {
        return Err(SessionHandleError::NoMessage);
    }
    Ok(NewMessage {
        client_key: None,
        text: text.to_owned(),
        sender: None,
        trace_context: telemetry::trace_context(),
        attachments: Vec::new(),
    })
}
