//! A session in the hands of a program: start it, go on with it, stop it.
//!
//! The session is an ordinary one (trigger type `api`), and the workers on the database run it: those of this process,
//! or of any other. A runner holds nothing but the session's id and how much of the journal it has given out, so it may
//! die like everything else; [`Runner::attach`] goes on where it was.
//!
//! ```no_run
//! use std::sync::Arc;
//! use wakeful::config::Config;
//! use wakeful::jobs::pool;
//! use wakeful::runner::{Pause, Runner};
//!
//! # async fn example() -> anyhow::Result<()> {
//! let config = Config::load(None, std::env::vars())?;
//! let ctx = wakeful::App::new().context(config, "postgres://localhost/wakeful").await?;
//! // This process works as well. Without it, any `wakeful serve` on the database does.
//! let pool = tokio::spawn(pool::run(Arc::clone(&ctx), ctx.bus.news.clone()));
//!
//! let mut runner = Runner::new(Arc::clone(&ctx));
//! runner.start("A table for tonight, please.", Some("You book tables.")).await?;
//! loop {
//!     match runner.consume_until_pause(|entry| println!("{} {}", entry.seq, entry.kind)).await? {
//!         Pause::WaitingInput { question } => {
//!             println!("{question}");
//!             runner.continue_with("For four, at eight.").await?;
//!         }
//!         Pause::Completed { result } => break println!("{result}"),
//!         Pause::Failed { error } => anyhow::bail!(error),
//!         Pause::NeedsAttention { reason } => anyhow::bail!("an operator has to look: {reason}"),
//!     }
//! }
//! ctx.shutdown.draining.cancel();
//! pool.await??;
//! # Ok(())
//! # }
//! ```

use crate::ctx::Ctx;
use crate::{origin, telemetry};
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
use wakeful_workflow::session::{Seed, SessionStatus};

/// Journal entries read at once.
const BATCH: i64 = 200;
/// Messages among which a finished run's result is looked for: it is the last one, but for what came in after it.
const NEWEST: i64 = 20;
/// Looks at the database this often when no notification comes.
const LOOK: Duration = Duration::from_secs(1);

/// Runs one session at a time for a program.
pub struct Runner {
    ctx: Arc<Ctx>,
    agent: Option<String>,
    active: Option<Active>,
}

/// The session that a runner has.
struct Active {
    session_id: String,
    /// The last journal entry that was given out.
    seen: i64,
    /// The status that the entries given out so far lead to.
    state: Option<String>,
}

/// Where a run stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pause {
    /// It asks the user, and [`Runner::continue_with`] answers. The answer goes on with the same run.
    WaitingInput {
        question: String,
    },
    Completed {
        /// The last thing that the agent said.
        result: String,
    },
    Failed {
        error: String,
    },
    /// It waits for an operator, who settles it with `wakeful session resolve` or `retry`.
    NeedsAttention {
        reason: String,
    },
}

/// Why a runner did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
pub enum RunnerError {
    /// Nothing was started, or it was stopped.
    #[error("No active process")]
    NoActiveProcess,
    /// It runs, or its run is over.
    #[error("Agent not waiting for input")]
    NotWaiting,
    /// The configuration has no such agent, or the agent has tools that this process has not.
    #[error(transparent)]
    CannotBegin(#[from] origin::CannotBegin),
    /// A message is some text, and has no NUL character.
    #[error("the message is empty, or has a NUL character")]
    NoMessage,
    /// This process ends. The session goes on elsewhere.
    #[error("this process ends")]
    Ending,
    #[error(transparent)]
    Store(#[from] Error),
}

impl Runner {
    /// A runner without a session, for the agent `default`.
    pub fn new(ctx: Arc<Ctx>) -> Runner {
        Runner { ctx, agent: None, active: None }
    }

    /// Starts sessions of that agent.
    #[must_use]
    pub fn agent(mut self, name: &str) -> Runner {
        self.agent = Some(name.to_owned());
        self
    }

    /// A runner that goes on with a session, whoever started it. It gives out the whole journal again.
    ///
    /// # Errors
    /// [`RunnerError::Store`]: no such session, or no database.
    pub async fn attach(ctx: Arc<Ctx>, session_id: &str) -> Result<Runner, RunnerError> {
        ctx.store.session(None, session_id).await?;
        let active = Active { session_id: session_id.to_owned(), seen: 0, state: None };
        Ok(Runner { ctx, agent: None, active: Some(active) })
    }

    /// The session that it has.
    pub fn session_id(&self) -> Option<&str> {
        self.active.as_ref().map(|active| active.session_id.as_str())
    }

    /// Starts a session in a conversation of its own. `system_prompt` takes the place of the agent's. When this returns,
    /// the prompt is durable; one that was started before is left to itself.
    ///
    /// # Errors
    /// [`RunnerError::CannotBegin`], [`RunnerError::NoMessage`], [`RunnerError::Store`].
    pub async fn start(&mut self, prompt: &str, system_prompt: Option<&str>) -> Result<(), RunnerError> {
        let ctx = &self.ctx;
        let conversation_id = format!("{}/{}", DEFAULT_SPACE, new_id("conv"));
        let new = origin::of_chat(&ctx.config, &ctx.plugins.tools, conversation_id, self.agent.as_deref())?;
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

    /// Answers the question that the session waits with. The same run goes on, wherever a worker is.
    ///
    /// # Errors
    /// [`RunnerError::NoActiveProcess`], [`RunnerError::NotWaiting`], [`RunnerError::NoMessage`], [`RunnerError::Store`].
    pub async fn continue_with(&mut self, user_message: &str) -> Result<(), RunnerError> {
        let active = self.active.as_ref().ok_or(RunnerError::NoActiveProcess)?;
        match self.ctx.store.answer(&active.session_id, &message(user_message)?).await {
            Ok(woken) => {
                self.tell(&woken.session_id);
                Ok(())
            }
            Err(Error::Conflict { .. }) => Err(RunnerError::NotWaiting),
            Err(error) => Err(error.into()),
        }
    }

    /// Gives every journal entry to `on_event`, in order and each once, until the run pauses or ends. A database that is
    /// away is waited for.
    ///
    /// # Errors
    /// [`RunnerError::NoActiveProcess`], [`RunnerError::Ending`], [`RunnerError::Store`].
    pub async fn consume_until_pause(
        &mut self,
        mut on_event: impl FnMut(&JournalEntry),
    ) -> Result<Pause, RunnerError> {
        let active = self.active.as_mut().ok_or(RunnerError::NoActiveProcess)?;
        let mut news = self.ctx.bus.news.sessions();
        loop {
            match look(&self.ctx, active, &mut on_event).await {
                Ok(Some(pause)) => return Ok(pause),
                Ok(None) => {}
                Err(error) if error.is_transient() => {
                    debug!(%error, "A runner could not look; it looks again")
                }
                Err(error) => return Err(error.into()),
            }
            tokio::select! {
                () = self.ctx.shutdown.abort.cancelled() => return Err(RunnerError::Ending),
                () = heard(&mut news, &active.session_id) => {}
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    }

    /// Ends what runs, and lets go of the session: it stays, and can be read. Stopping nothing is no error.
    ///
    /// # Errors
    /// [`RunnerError::Store`].
    pub async fn stop(&mut self) -> Result<(), RunnerError> {
        let Some(active) = &self.active else { return Ok(()) };
        match self.ctx.store.cancel(&active.session_id, Some("stopped by its runner")).await {
            Ok(_) => self.tell(&active.session_id),
            // It rests.
            Err(Error::Conflict { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        self.active = None;
        Ok(())
    }

    fn tell(&self, session_id: &str) {
        self.ctx.bus.notifier.job();
        self.ctx.bus.notifier.session(session_id);
    }
}

/// Gives out what is new. A pause, where the session rests and nothing has moved it since.
async fn look(
    ctx: &Ctx,
    active: &mut Active,
    on_event: &mut impl FnMut(&JournalEntry),
) -> wakeful_store::Result<Option<Pause>> {
    // Before the journal: the entries that led to it are among those that are read next, and if there are further ones it
    // speaks of the past.
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
        SessionStatus::Failed | SessionStatus::Archived | SessionStatus::Terminated => {
            Some(Pause::Failed { error })
        }
    })
}

fn message(text: &str) -> Result<NewMessage, RunnerError> {
    if text.trim().is_empty() || text.contains('\0') {
        return Err(RunnerError::NoMessage);
    }
    Ok(NewMessage {
        client_key: None,
        text: text.to_owned(),
        sender: None,
        trace_context: telemetry::trace_context(),
        attachments: Vec::new(),
    })
}
