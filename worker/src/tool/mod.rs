//! Tools: one trait, one file a tool.

use async_trait::async_trait;
use serde_json::Value;
use std::path::PathBuf;
use tokio_util::sync::CancellationToken;
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::id::{CallId, SessionId};

pub mod ask_user;
pub mod compose_email;
pub mod current_time;
pub mod files;

/// Something that a model can call.
#[async_trait]
pub trait Tool: Send + Sync {
    /// Name, description, JSON schema of the arguments, and effect. The effect decides what a crash may do: see
    /// [`wakeful_workflow::effect::Effect`].
    fn definition(&self) -> ToolDefinition;

    /// Runs one call. `arguments` have been validated against the schema.
    ///
    /// An idempotent tool passes `call.call_id` on as its idempotency key. The future is dropped when the call's
    /// time limit ends or its lease is lost; what it does then must be what its effect promises.
    ///
    /// # Errors
    /// [`ToolError`]: the model is told its text, the run goes on.
    async fn call(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError>;
}

/// What a tool may know of the call it runs for.
#[derive(Clone, Debug)]
pub struct ToolCallContext {
    pub session_id: SessionId,
    /// Unique within the session and the same in every attempt: the idempotency key.
    pub call_id: CallId,
    /// The session's own folder, and whether it must exist already (this session has written there before).
    pub workspace: Workspace,
    /// Cancelled when the lease is lost or the run is cancelled.
    pub cancelled: CancellationToken,
}

/// The folder of one session.
#[derive(Clone, Debug)]
pub struct Workspace {
    pub path: PathBuf,
    /// The session has files: a missing folder means that they are on another host, which is an error and never
    /// an empty folder.
    pub expected: bool,
}

/// What a tool gives back.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ToolOutput {
    /// For the model.
    pub content: String,
    /// For `wakeful_workflow::derive` and for operators: an object with a `type`.
    pub details: Option<Value>,
    /// A question to the user: the run pauses, and the answer becomes this call's result.
    pub question: Option<String>,
}

impl ToolOutput {
    /// Plain text for the model.
    pub fn text(content: impl Into<String>) -> Self {
        ToolOutput { content: content.into(), ..ToolOutput::default() }
    }
}

/// What the model is told when a call fails: a plain sentence, and what it could do instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ToolError(pub String);
