//! Tools: the trait, and one file per tool.
#![deny(missing_docs)]

use crate::web::Web;
pub use crate::workspace::FileUse;
use crate::workspace::Held;
use async_trait::async_trait;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::fmt::{Debug, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;
use wakeful_store::outputs::OutputSlice;
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::effect::Effect;
use wakeful_workflow::files::WrittenFile;
use wakeful_workflow::id::{CallId, SessionId};
use wakeful_workflow::policy::{SessionPolicy, ToolMode, may_write_to};
use wakeful_workflow::record::{Attachment, storable, without_nul};

/// What is kept of a tool's content. The model sees less of it: what is longer than 16 KiB is stored, and read in parts.
pub const MAX_CONTENT_BYTES: usize = 16 << 20;

/// The longest details, as JSON.
pub const MAX_DETAILS_BYTES: usize = 1 << 20;

pub mod ask_user;
pub mod compose_email;
pub mod current_time;
pub mod files;
mod paging;
pub mod read_attachment;
#[allow(missing_docs, reason = "not part of the library's front")]
pub mod read_output;
#[allow(missing_docs, reason = "not part of the library's front")]
pub mod registry;

/// A tool that a model can call.
#[async_trait]
pub trait Tool: Send + Sync {
    /// Returns name, description, JSON schema of the arguments, and effect. The effect decides what happens
    /// to a call after a crash: see [`wakeful_workflow::effect::Effect`].
    fn definition(&self) -> ToolDefinition;

    /// Runs one call. `arguments` have been validated against the schema.
    ///
    /// An idempotent tool passes `call.idempotency_key()` on. The future is dropped when the
    /// call's time limit ends, its lease is lost, its run is cancelled or the process drains. Whatever the
    /// tool did until then must match its declared effect.
    ///
    /// # Errors
    /// [`ToolError`]: the model gets its text, and the run goes on.
    async fn call(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError>;

    /// What the tool does with the session's files. Unless it says so, the files are not brought to this host for it,
    /// and what it writes into the folder is not kept. A tool that writes nothing outside the folder can be
    /// [`Effect::Idempotent`], even if it is not so by itself: after a crash it runs again on the files as they were
    /// before its turn.
    fn file_use(&self) -> FileUse {
        FileUse::None
    }

    /// Returns what the call would return, without acting on the outside world. Used in sessions whose tools
    /// are not live, such as replays. By default a pure tool runs, and any other says that it was not carried
    /// out. A tool that can predict its result should return that instead.
    ///
    /// # Errors
    /// Those of [`Tool::call`].
    async fn dry_run(&self, call: &ToolCallContext, arguments: Value) -> Result<ToolOutput, ToolError> {
        let definition = self.definition();
        match definition.effect {
            Effect::Pure => self.call(call, arguments).await,
            Effect::Idempotent | Effect::Guarded => Ok(not_carried_out(&definition.name)),
        }
    }

    /// Closes what the tool keeps open between its calls, such as a connection. A worker that drains awaits it after its last call.
    /// The future is dropped after ten seconds, or when the time for the drain is over. If the process is killed, `close` is not called. A
    /// call after `close` opens the connection again.
    async fn close(&self) {}
}

/// Returns the output of a call that has an effect and is only a dry run.
pub fn not_carried_out(tool: &str) -> ToolOutput {
    ToolOutput {
        content: format!("Dry run: {tool} was not carried out, and nothing was changed."),
        details: Some(serde_json::json!({ "type": "dryRun", "tool": tool })),
        question: None,
    }
}

/// Facts about the call that a tool runs for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ToolCallContext {
    /// The session whose model made the call.
    pub session_id: SessionId,
    /// Unique within the session, and the same in every attempt. For other services: [`ToolCallContext::idempotency_key`].
    pub call_id: CallId,
    /// The session's folder, and whether it must exist already.
    pub workspace: Workspace,
    /// `Live` in [`Tool::call`] of an ordinary session. In any other mode the tool must not act on the
    /// outside world.
    pub mode: ToolMode,
    /// The session's rules. The tool enforces them, whatever the model asks for.
    pub policy: Arc<SessionPolicy>,
    /// Fetches from the web, within the rules of the agent and of the session. A tool with an HTTP client of
    /// its own would reach the worker's private network.
    pub web: Web,
    /// Addresses that the session may send mail to: see [`ToolCallContext::may_write_to`].
    pub recipients: Vec<String>,
    /// Fires when the call is over for Wakeful: it returned, its time limit ended, its lease was lost, its
    /// run was cancelled, or the process drains. Tasks that the tool has spawned should stop then.
    pub cancelled: CancellationToken,
    /// The outputs of the session's earlier calls.
    pub outputs: Arc<dyn Outputs>,
}

impl ToolCallContext {
    /// Creates the facts of a call that belongs to no stored session, for a program's tests of its tools: live,
    /// with default rules, without recipients, files or earlier outputs.
    pub fn detached(call_id: impl Into<CallId>) -> ToolCallContext {
        ToolCallContext {
            session_id: SessionId::from("detached".to_owned()),
            call_id: call_id.into(),
            workspace: Workspace {
                path: PathBuf::new(),
                expected: false,
                inherited: None,
                rehearsed: None,
                _held: None,
            },
            mode: ToolMode::Live,
            policy: Arc::new(SessionPolicy::default()),
            web: Web::default(),
            recipients: Vec::new(),
            cancelled: CancellationToken::new(),
            outputs: Arc::new(NoOutputs),
        }
    }

    /// The key of this call for a service that takes idempotency keys: 64 hexadecimal digits, the same in every attempt, and another
    /// for each other call of any session. A call id alone is unique in its session only.
    pub fn idempotency_key(&self) -> String {
        hex::encode(Sha256::digest(format!("{}/{}", self.session_id, self.call_id)))
    }

    /// Returns whether the session may send mail to `address`.
    pub fn may_write_to(&self, address: &str) -> bool {
        may_write_to(&self.recipients, &self.policy.participants, address)
    }
}

/// The complete outputs of one session's tool calls, and its attachments.
#[async_trait]
pub trait Outputs: Send + Sync + Debug {
    /// Reads up to `bytes` of the output of `call_id`, from `offset` on. `None` if the session has no such
    /// call with a result.
    ///
    /// # Errors
    /// When they cannot be read now.
    async fn read(
        &self,
        call_id: &CallId,
        offset: usize,
        bytes: usize,
    ) -> Result<Option<OutputSlice>, ToolError>;

    /// Returns the files that came with the session's messages, in order.
    ///
    /// # Errors
    /// When they cannot be read now.
    async fn attachments(&self) -> Result<Vec<Attachment>, ToolError> {
        Ok(Vec::new())
    }

    /// Reads up to `bytes` of a file, from `offset` on, as text. `None` if the file is not one of this
    /// session, or is not UTF-8 there.
    ///
    /// # Errors
    /// When it cannot be read now.
    async fn attachment(
        &self,
        _file: &Attachment,
        _offset: usize,
        _bytes: usize,
    ) -> Result<Option<OutputSlice>, ToolError> {
        Ok(None)
    }
}

/// A session without earlier outputs.
#[derive(Debug)]
struct NoOutputs;

#[async_trait]
impl Outputs for NoOutputs {
    async fn read(&self, _: &CallId, _: usize, _: usize) -> Result<Option<OutputSlice>, ToolError> {
        Ok(None)
    }
}

/// The folder of one session.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Workspace {
    /// Where it is. It may not exist yet.
    pub path: PathBuf,
    /// The session has files, so a missing folder means that they are on another host. That is an error,
    /// never an empty folder.
    pub expected: bool,
    /// The files to create the folder from, if this is a fork whose folder does not exist yet.
    pub inherited: Option<Arc<[WrittenFile]>>,
    /// The session's files if its tools are not live: those that its messages say were written. No folder is
    /// read or created then.
    pub rehearsed: Option<Arc<[WrittenFile]>>,
    /// The claim's hold on the folder. A thread that works in the folder keeps a clone, so that the folder stays its
    /// claim's own until the thread ends.
    pub(crate) _held: Option<Arc<Held>>,
}

/// The result of a tool call.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct ToolOutput {
    /// Text for the model.
    pub content: String,
    /// An object with a `type`, for `wakeful_workflow::derive` and for operators.
    pub details: Option<Value>,
    /// A question to the user: the run pauses, and the answer becomes this call's result.
    pub question: Option<String>,
}

impl ToolOutput {
    /// Creates an output of plain text for the model. More than 16 MiB are cut.
    pub fn text(content: impl Into<String>) -> Self {
        ToolOutput { content: content.into(), ..ToolOutput::default() }
    }

    /// Creates an output that asks the user `question`. The run pauses, and the answer becomes this call's
    /// result.
    pub fn question(question: impl Into<String>) -> Self {
        ToolOutput { question: Some(question.into()), ..ToolOutput::default() }
    }

    /// Adds details for operators: an object with a `type`, of at most 1 MiB. The model does not see them. Only built-in tools may
    /// return the types `sentEmail` and `fileWritten`: details of these types from any other tool are left out.
    #[must_use]
    pub fn with_details(self, details: Value) -> Self {
        ToolOutput { details: Some(details), ..self }
    }

    /// Cuts a content of more than [`MAX_CONTENT_BYTES`], with a last line that says so, and leaves details of more than
    /// [`MAX_DETAILS_BYTES`] out. The call has happened, so it does not fail for its size.
    pub fn bounded(mut self, tool: &str) -> Self {
        let bytes = self.content.len();
        if bytes > MAX_CONTENT_BYTES {
            self.content.truncate(self.content.floor_char_boundary(MAX_CONTENT_BYTES));
            let _ = write!(
                self.content,
                "\n[Cut here: the output has {bytes} bytes, of which {MAX_CONTENT_BYTES} are kept.]"
            );
            tracing::warn!(tool, bytes, "Cut a tool's output: it is longer than {MAX_CONTENT_BYTES} bytes");
        }
        let bytes = self.details.as_ref().map_or(0, |details| details.to_string().len());
        if bytes > MAX_DETAILS_BYTES {
            self.details = None;
            tracing::warn!(
                tool,
                bytes,
                "Left out a tool's details: they are longer than {MAX_DETAILS_BYTES} bytes"
            );
        }
        self
    }

    /// Replaces every NUL, which Postgres text cannot hold, by U+FFFD: in the content, in the question, and
    /// in the strings and keys of the details.
    pub fn without_nul(self) -> Self {
        ToolOutput {
            content: without_nul(self.content),
            details: self.details.map(storable),
            question: self.question.map(without_nul),
        }
    }
}

/// Why a call failed. The model gets the text: a plain sentence, and what to do instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
#[non_exhaustive]
pub struct ToolError {
    /// What the model reads. If the kind is [`ToolErrorKind::Host`], operators read it, and the model does
    /// not.
    pub text: String,
    /// What follows from it.
    pub kind: ToolErrorKind,
}

/// What follows from a [`ToolError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ToolErrorKind {
    /// The call failed, and the model reads why.
    Failed,
    /// It is unknown whether the call took effect.
    OutcomeUnknown,
    /// The call had no effect, and the cause is this host. The step is tried again, here or on another worker's host.
    Host,
}

impl ToolError {
    /// The call failed and had no effect, or the text says which. `text` goes to the model.
    pub fn new(text: impl Into<String>) -> Self {
        ToolError { text: text.into(), kind: ToolErrorKind::Failed }
    }

    /// The call may have taken effect and may not have: for instance, its request was sent, and no answer came. `why` says so in
    /// words for the model. A [`Effect::Guarded`] call is then uncertain, as one whose worker died: it is not run again, and
    /// the agent's `on_uncertain` decides whether the model goes on or a person says what happened. A [`Effect::Idempotent`]
    /// call is made once more, with its key. Of a pure call this is an ordinary error.
    pub fn outcome_unknown(why: impl Into<String>) -> Self {
        ToolError { text: why.into(), kind: ToolErrorKind::OutcomeUnknown }
    }

    /// This host cannot carry out the call now, and the call had no effect: the disk is full, or a device that the tool needs is
    /// gone. The model is not told. The step waits some seconds and is tried again, on any worker, until the call ends otherwise
    /// or the run is cancelled. `why` is for operators, so it holds nothing private: the log and `wakeful session why` show it.
    pub fn of_host(why: impl Into<String>) -> Self {
        ToolError { text: why.into(), kind: ToolErrorKind::Host }
    }

    /// Replaces every NUL by U+FFFD.
    pub fn without_nul(self) -> Self {
        ToolError { text: without_nul(self.text), ..self }
    }
}

/// Reads validated arguments into a tool's own struct.
fn parse_arguments<T: serde::de::DeserializeOwned>(arguments: Value) -> Result<T, ToolError> {
    serde_json::from_value(arguments)
        .map_err(|error| ToolError::new(format!("The arguments do not fit this tool's schema: {error}.")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    struct Counts(Effect, std::sync::atomic::AtomicU32);

    #[async_trait]
    impl Tool for Counts {
        fn definition(&self) -> ToolDefinition {
            let (name, description) = ("counts".to_owned(), String::new());
            ToolDefinition::new(name, description, json!({"type": "object"}), self.0)
        }

        async fn call(&self, _: &ToolCallContext, _: Value) -> Result<ToolOutput, ToolError> {
            self.1.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            Ok(ToolOutput::text("counted"))
        }
    }

    #[tokio::test]
    async fn a_tool_that_says_nothing_of_dry_runs_runs_only_if_it_is_pure() {
        for (effect, runs) in [(Effect::Pure, 1), (Effect::Idempotent, 0), (Effect::Guarded, 0)] {
            let counts = std::sync::Arc::new(Counts(effect, 0.into()));
            let mut registry = registry::Registry::new();
            registry.register(counts.clone()).unwrap();
            let mut call = files::tests::context(std::path::Path::new("none"), false);
            for mode in [ToolMode::Dry, ToolMode::Recorded] {
                call.mode = mode;
                let said = registry.run("counts", &call, json!({})).await.unwrap();
                assert_eq!(said.content.contains("was not carried out"), runs == 0, "{said:?}");
            }
            assert_eq!(counts.1.load(std::sync::atomic::Ordering::SeqCst), 2 * runs);
        }
    }

    /// Returns more than can be kept.
    struct Large;

    #[async_trait]
    impl Tool for Large {
        fn definition(&self) -> ToolDefinition {
            ToolDefinition::new("large", "", json!({"type": "object"}), Effect::Guarded)
        }

        async fn call(&self, _: &ToolCallContext, _: Value) -> Result<ToolOutput, ToolError> {
            let details = json!({"type": "rows", "rows": "r".repeat(MAX_DETAILS_BYTES)});
            Ok(ToolOutput::text("é".repeat(MAX_CONTENT_BYTES)).with_details(details))
        }
    }

    #[tokio::test]
    async fn what_is_too_large_to_keep_is_cut_and_the_call_counts() {
        let mut registry = registry::Registry::new();
        registry.register(Arc::new(Large)).unwrap();
        let call = files::tests::context(std::path::Path::new("none"), false);
        let output = registry.run("large", &call, json!({})).await.unwrap();
        assert_eq!(output.details, None);
        let (kept, said) = output.content.rsplit_once('\n').unwrap();
        assert_eq!(kept.len(), MAX_CONTENT_BYTES);
        assert_eq!(said, "[Cut here: the output has 33554432 bytes, of which 16777216 are kept.]");
    }

    #[test]
    fn a_nul_is_replaced_in_every_part_of_an_output() {
        let output = ToolOutput {
            content: "a\0b".into(),
            details: Some(json!({"type": "x", "k\0": ["\0", {"deep": "1\0x"}, 3]})),
            question: Some("\0?".into()),
        };
        let clean = output.without_nul();
        assert_eq!(clean.content, "a\u{fffd}b");
        assert_eq!(clean.question.as_deref(), Some("\u{fffd}?"));
        assert_eq!(
            clean.details,
            Some(json!({"type": "x", "k\u{fffd}": ["\u{fffd}", {"deep": "1\u{fffd}x"}, 3]}))
        );
    }
}
