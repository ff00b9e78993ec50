//! How a program uses Wakeful inside its own process: it drives sessions, accepts messages and runs workers.

use crate::session::{SessionError, SessionHandle};
use crate::trigger::{Refused, Woken};
use std::sync::Arc;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::jobs::pool;
use wakeful_engine::{ingest, new_session};
use wakeful_store::wake::NewMessage;
use wakeful_workflow::id::stored_conversation_id;
use wakeful_workflow::policy::ReplyRoute;

/// A program's connection to Wakeful's database, with the [`App`](crate::App)'s tools, models and channels.
///
/// Cloning it is cheap; all clones share one pool of connections. [`App::connect`](crate::App::connect) creates
/// it for a program that drives sessions, and [`App::routes`](crate::App::routes) passes it to a trigger.
#[derive(Clone)]
pub struct Process {
    pub(crate) ctx: Arc<Ctx>,
}

impl Process {
    /// Returns a handle without a session. [`SessionHandle::start`] starts one.
    pub fn session(&self) -> SessionHandle {
        SessionHandle::new(Arc::clone(&self.ctx))
    }

    /// Returns a handle for an existing session. A program uses it to continue after a crash. The handle
    /// passes the session's whole journal to the program again.
    ///
    /// # Errors
    /// [`SessionError::Store`]: the session does not exist, or the database failed.
    pub async fn attach(&self, session_id: &str) -> Result<SessionHandle, SessionError> {
        SessionHandle::attach(Arc::clone(&self.ctx), session_id).await
    }

    /// Commits a message to the latest session of its conversation and wakes that session. Creates a session
    /// if the conversation has none. When this returns `Ok`, the message is durable. Runs no agent: a worker
    /// does that, in this process or in another.
    ///
    /// # Errors
    /// [`Refused`]. Nothing was committed then. After [`Refused::Full`] the sender may try again in
    /// [`RETRY_AFTER_S`](crate::trigger::RETRY_AFTER_S) seconds. After a database fault the message may have
    /// been committed: with the same [`Incoming::key`], sending it again is safe.
    pub async fn accept(&self, incoming: Incoming) -> Result<Woken, Refused> {
        let conversation_id = stored_conversation_id(&incoming.conversation_id)?;
        let agent = incoming.agent.as_deref();
        let (config, tools) = (&self.ctx.config, &self.ctx.plugins.tools);
        let new = new_session::of_message(config, tools, conversation_id, agent, incoming.reply)?;
        let message = NewMessage {
            client_key: incoming.key,
            text: incoming.text,
            sender: incoming.sender,
            trace_context: None,
            attachments: Vec::new(),
        };
        ingest::accept(&self.ctx, new, message).await
    }

    /// Runs workers in this process until [`Process::drain`] is called: steps of every session of the database,
    /// and deliveries. Without them, a `wakeful serve` on the same database runs the sessions.
    ///
    /// If the future is dropped, the jobs that it ran are lost to this process; other workers claim them when
    /// their leases end.
    ///
    /// # Errors
    /// When the job queue fails.
    pub async fn work(&self) -> anyhow::Result<()> {
        pool::run(Arc::clone(&self.ctx), self.ctx.bus.news.clone()).await
    }

    /// Tells [`Process::work`] to claim no more jobs, to finish the steps that run, and to return.
    pub fn drain(&self) {
        self.ctx.shutdown.draining.cancel();
    }
}

/// A message that a trigger has verified and translated.
#[derive(Clone, Debug)]
pub struct Incoming {
    conversation_id: String,
    text: String,
    key: Option<String>,
    sender: Option<String>,
    agent: Option<String>,
    reply: Option<ReplyRoute>,
}

impl Incoming {
    /// Creates a message for a conversation. `conversation_id` is the trigger's own id, of 1 to 256 bytes
    /// without control characters; a prefix keeps the ids of several triggers apart.
    pub fn new(conversation_id: impl Into<String>, text: impl Into<String>) -> Incoming {
        Incoming {
            conversation_id: conversation_id.into(),
            text: text.into(),
            key: None,
            sender: None,
            agent: None,
            reply: None,
        }
    }

    /// Sets the idempotency key. A message with a key that the conversation has seen is answered as a duplicate,
    /// so the sender may repeat it. Without a key, each call is a new message.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Incoming {
        self.key = Some(key.into());
        self
    }

    /// Sets the sender, in the words of the trigger.
    #[must_use]
    pub fn sender(mut self, sender: impl Into<String>) -> Incoming {
        self.sender = Some(sender.into());
        self
    }

    /// Sets the agent of a new conversation. The default is the agent `default`.
    #[must_use]
    pub fn agent(mut self, name: impl Into<String>) -> Incoming {
        self.agent = Some(name.into());
        self
    }

    /// Sends the agent's answers through a [`Channel`](crate::Channel). `to` is the address in the channel's own
    /// words; the channel finds it in the delivery's content.
    #[must_use]
    pub fn reply_by(mut self, channel: impl Into<String>, to: serde_json::Value) -> Incoming {
        self.reply = Some(ReplyRoute { channel: channel.into(), to, split_at: None });
        self
    }
}
