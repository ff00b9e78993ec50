//! Forks: a session that begins with the messages of another one.
//!
//! One transaction creates the whole fork, and it locks no row of the parent. Messages and journal are
//! append-only, a session's beginning never changes, and the parent's end is read once. So a fork of a
//! running session waits for no lock and leaves the parent unchanged. Only an erasure of the parent's conversation and its
//! forks exclude each other, by an advisory lock: else a fork that commits late would keep what was erased.
//!
//! Messages are copied inside the database under new ids. Blobs are shared by hash and never copied. Effects
//! stay with the parent: the fork gets no ledger, no deliveries, no steps and no sums.

mod copy;

pub(crate) use copy::hold_off_forks;

use crate::encryption::Vault;
use crate::error::CANNOT_CONTINUE;
use crate::run::{self, Wakes};
use crate::steer::steered;
use crate::wake::{NewMessage, put_in_inbox};
use crate::{Error, Result, Store, new_id};
use copy::{Child, Parent};
use serde::{Deserialize, Serialize};
use sha2::Digest;
use sqlx::PgConnection;
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::blob::Blob;
use wakeful_workflow::event::Event;
use wakeful_workflow::fork::{Cut, CutPoint, SystemPromptPatch};
use wakeful_workflow::policy::{Answers, Replay, SessionPolicy, ToolMode};
use wakeful_workflow::session::SessionStatus;
use wakeful_workflow::strategy::Rebase;
use wakeful_workflow::workspace::Snapshot;

/// What to fork, where to cut it, and what to change.
#[derive(Clone, Debug)]
pub struct ForkRequest {
    pub parent_session_id: String,
    pub at: CutPoint,
    pub purpose: Purpose,
    /// Replaces the parent's model.
    pub model: Option<Model>,
    pub system_prompt: Option<SystemPromptPatch>,
    /// Replaces the parent's tools, with the definitions that the caller knows.
    pub tools: Option<Vec<ToolDefinition>>,
    /// Replaces the text of the user's message at the cut. That message is then not copied.
    pub text: Option<String>,
    /// One more message of the user, after the copied ones.
    pub prompt: Option<String>,
    /// Whether tool calls take effect. `None` keeps the parent's mode.
    pub tool_mode: Option<ToolMode>,
    /// The rules of a replay; the fork fills in its cut. `None` with recorded tools means that the parent's
    /// results are used.
    pub replay: Option<Replay>,
    /// Name of the one process that may run the fork. That process claims jobs under this name. Empty means
    /// any deployed worker.
    pub runner: String,
    /// Whether the fork belongs to the user of the parent's conversation, who then sees it among his own. Otherwise it
    /// belongs to no user: what an operator tries is not shown to the people whose words it begins with.
    pub for_user: bool,
    /// Whether to open a run. Otherwise the fork waits for a message.
    pub start: bool,
    /// The caller's idempotency key among the forks of this parent.
    pub client_key: Option<String>,
    /// W3C traceparent of the request.
    pub trace_context: Option<String>,
}

/// Why a fork is made. The word is also its trigger type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// Someone wants to continue from the cut.
    Fork,
    /// Someone runs the session again, to compare.
    Replay,
}

/// A model, and the size of its context window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// `provider/model`.
    pub id: String,
    pub context_window: i32,
}

/// The answer to a fork.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Forked {
    pub session_id: String,
    /// Without the space, as in the API.
    pub conversation_id: String,
    pub parent_session_id: String,
    /// The requested message.
    pub asked_message_number: i64,
    /// The last message that was copied, or the number before the first one if none was.
    pub at_message_number: i64,
    /// Why the cut is not at the requested place.
    pub moved: Option<String>,
    /// The run that was opened.
    pub run_id: Option<String>,
    /// Whether the key was used before. Then this is the first answer again.
    #[serde(skip)]
    pub duplicate: bool,
}

impl Purpose {
    fn as_str(self) -> &'static str {
        match self {
            Purpose::Fork => "fork",
            Purpose::Replay => "replay",
        }
    }
}

impl ForkRequest {
    /// A fork of the unchanged parent up to `at`, with a run. [`Store::fork`] refuses it if there is nothing
    /// to answer.
    pub fn new(parent_session_id: &str, at: CutPoint) -> ForkRequest {
        ForkRequest {
            parent_session_id: parent_session_id.to_owned(),
            at,
            purpose: Purpose::Fork,
            model: None,
            system_prompt: None,
            tools: None,
            text: None,
            prompt: None,
            tool_mode: None,
            replay: None,
            runner: String::new(),
            for_user: false,
            start: true,
            client_key: None,
            trace_context: None,
        }
    }

    /// The child's conversation, without its space. The same key gives the same conversation. Two requests
    /// with one key try to insert the same row, so only one of them makes a fork.
    fn conversation(&self) -> String {
        let purpose = self.purpose.as_str();
        match &self.client_key {
            Some(key) => {
                let named = format!("{}\n{key}", self.parent_session_id);
                let hash = hex::encode(sha2::Sha256::digest(named.as_bytes()));
                format!("{purpose}_{}", &hash[..32])
            }
            None => new_id(purpose),
        }
    }

    /// Hash of the request. Tools count by name, so that a deploy between two attempts does not change the
    /// hash.
    fn sha256(&self) -> Result<String> {
        let tools: Option<Vec<&str>> =
            self.tools.as_ref().map(|tools| tools.iter().map(|tool| tool.name.as_str()).collect());
        let asked = (
            (
                self.at.to_string(),
                self.purpose,
                self.model.as_ref().map(|model| &model.id),
                &self.system_prompt,
            ),
            (tools, &self.text, &self.prompt, self.tool_mode, &self.replay, &self.runner, self.start),
        );
        let mut asked = crate::json::to_json(&asked)?;
        // Requests from before there was a choice keep their hash.
        if self.for_user {
            asked.push_str(" for the user");
        }
        Ok(hex::encode(sha2::Sha256::digest(asked.as_bytes())))
    }

    /// The child's policy: its parent's, with the requested changes. The child replies as its parent does.
    fn policy(&self, parent: SessionPolicy, trigger_type: &str, cut: &Cut) -> SessionPolicy {
        let tool_mode = self.tool_mode.unwrap_or(parent.tool_mode);
        SessionPolicy {
            model: self.model.as_ref().map(|model| model.id.clone()).or(parent.model),
            tools: self
                .tools
                .as_ref()
                .map(|tools| tools.iter().map(|tool| tool.name.clone()).collect())
                .or(parent.tools),
            tool_mode,
            replay: self
                .replay
                .clone()
                .or_else(|| recorded_from_parent(&self.parent_session_id, tool_mode))
                .map(|replay| Replay { after_message_number: cut.at_message_number, ..replay }),
            // No reply route: the people in the parent's thread did not ask for the fork's replies.
            reply: None,
            participants: parent.participants,
            recipients: parent.recipients,
            web: parent.web,
            loop_suspicion: parent.loop_suspicion,
            replies_as: Some(parent.replies_as.unwrap_or_else(|| trigger_type.to_owned())),
            other: parent.other,
        }
    }

    fn refused(&self, reason: impl Into<String>) -> Error {
        Error::Refused { session_id: self.parent_session_id.clone(), reason: reason.into() }
    }
}

impl Store {
    /// Creates a session in a conversation of its own that begins with the parent's messages up to the cut.
    /// Creates all of it or nothing, and only reads the parent. Repeating the call with the same key gives
    /// the first answer.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Refused`] if it cannot be cut there or a run would have nothing to do,
    /// [`Error::KeyReused`], [`Error::Corrupt`], [`Error::Database`].
    pub async fn fork(&self, request: &ForkRequest) -> Result<Forked> {
        let forked = self.try_fork(request).await;
        self.note_refusal(forked)
    }

    /// The calls after the cut whose effects a live fork with a run may cause again, as `name (call id)`. Empty for any other
    /// fork. Only reads.
    ///
    /// # Errors
    /// As for [`Store::fork`].
    pub async fn effects_after_cut(&self, request: &ForkRequest) -> Result<Vec<String>> {
        let mut tx = self.pool.begin().await?;
        let parent = Parent::read(&mut tx, &request.parent_session_id, &request.at).await?;
        let cut = cut(request, &parent)?;
        let effects = match request.start && parent.mode_of(request).is_live() {
            true => parent.effects_after(&mut tx, &cut, request).await?,
            false => Vec::new(),
        };
        tx.rollback().await?;
        Ok(effects)
    }

    async fn try_fork(&self, request: &ForkRequest) -> Result<Forked> {
        let seal = self.own_seal_of(&request.parent_session_id).await?;
        let mut tx = self.pool.begin().await?;
        copy::hold_off_erasure(&mut tx, &request.parent_session_id).await?;
        let parent = Parent::read(&mut tx, &request.parent_session_id, &request.at).await?;
        let conversation = request.conversation();
        let conversation_id = match parent.conversation_id.split_once('/') {
            Some((space, _)) => format!("{space}/{conversation}"),
            None => return Err(Error::corrupt("conversation id", &parent.conversation_id)),
        };
        if let Some(first) = first_answer(&mut tx, request, &conversation_id).await? {
            return Ok(first);
        }
        runs_what_is_there(request, &parent)?;
        let cut = cut(request, &parent)?;
        // The live agent would believe that a rehearsed call was really made, and would never make it.
        if request.tool_mode == Some(ToolMode::Live)
            && let Some(number) = parent.rehearsed(&mut tx, &cut).await?
        {
            return Err(request.refused(format!(
                "message {number} reports a call that was only rehearsed: cut before that message, or fork it not live"
            )));
        }
        if !copy::take_conversation(&mut tx, &parent, &conversation_id, &cut, request.for_user).await? {
            // Another request with the same key came at the same time, and has committed by now.
            let first = first_answer(&mut tx, request, &conversation_id).await?;
            return first.ok_or_else(|| Error::corrupt("fork", format!("{conversation_id} has no session")));
        }
        let session_id = new_id("sess");
        let child =
            Child { session_id: &session_id, conversation_id: &conversation_id, trigger_id: &conversation };
        let state = copy::state(&mut tx, &seal, &parent, &cut).await?;
        // The fork's context begins where the parent's did at the cut, so that the provider's cache covers
        // the first request.
        let rebase = rebase_at(&mut tx, &parent.session_id, cut.at_message_number).await?;
        let state_sha256 = Blob::of_state(&state).sha256;
        copy::session(&mut tx, &seal, request, &parent, &cut, &child, (&state, rebase.as_ref())).await?;
        copy::records(&mut tx, &parent, &cut, &child).await?;
        crate::failpoint!("K29");
        let mut events = vec![Event::SessionForked {
            parent_session_id: request.parent_session_id.as_str().into(),
            parent_conversation_id: parent.conversation_id.as_str().into(),
            at_message_number: cut.at_message_number,
            asked_message_number: cut.asked_message_number,
            moved: cut.moved.clone(),
            request_sha256: request.sha256()?,
        }];
        events.extend(steered("fork", None));
        events.extend(rebase.map(Event::ContextRebased));
        let files = crate::workspace::newest(&mut tx, &parent.session_id, cut.at_message_number).await?;
        // The fork begins with these files, whatever becomes of its parent's journal.
        events.extend(files.map(|snapshot| {
            Event::WorkspaceSnapshot(Snapshot { message_number: cut.at_message_number, ..snapshot })
        }));
        // From here on the journal contains the state. No entry has changed it yet.
        events.push(Event::Checkpoint {
            step_number: cut.last_step_number,
            to_message_number: cut.at_message_number,
            lifecycle_state: SessionStatus::Created.as_str().to_owned(),
            state_sha256,
        });
        run::append_events(&mut tx, &session_id, None, None, Wakes::Planner, &events).await?;
        let run_id =
            if request.start { Some(start(&mut tx, &self.vault, request, &session_id).await?) } else { None };
        tx.commit().await?;
        Ok(Forked {
            session_id,
            conversation_id: conversation,
            parent_session_id: request.parent_session_id.clone(),
            asked_message_number: cut.asked_message_number,
            at_message_number: cut.at_message_number,
            moved: cut.moved,
            run_id,
            duplicate: false,
        })
    }
}

/// Where recorded results come from by default: the session that is forked.
fn recorded_from_parent(parent_session_id: &str, tool_mode: ToolMode) -> Option<Replay> {
    match tool_mode {
        ToolMode::Recorded => Some(Replay {
            source_session_id: parent_session_id.into(),
            // The fork fills in its cut.
            after_message_number: 0,
            fed: false,
            answers: Answers::Live,
        }),
        ToolMode::Live | ToolMode::Dry => None,
    }
}

/// The rebase in force for the parent's requests after `message_number`.
async fn rebase_at(tx: &mut PgConnection, session_id: &str, message_number: i64) -> Result<Option<Rebase>> {
    let rebase = crate::outputs::newest_rebase(tx, session_id, message_number).await?;
    rebase.map(serde_json::from_value).transpose().map_err(|error| Error::corrupt("rebase", error))
}

/// Refuses to run a session whose texts were redacted, because the model would be asked about hashes.
fn runs_what_is_there(request: &ForkRequest, parent: &Parent) -> Result<()> {
    let replays = request.purpose == Purpose::Replay || request.replay.is_some();
    if parent.redacted && (request.start || replays) {
        return Err(Error::without_texts(&request.parent_session_id, CANNOT_CONTINUE));
    }
    Ok(())
}

/// Finds the cut, or says why there is none.
fn cut(request: &ForkRequest, parent: &Parent) -> Result<Cut> {
    if let CutPoint::Event(seq) = request.at
        && seq > parent.last_event_seq
    {
        return Err(request.refused(format!("its journal ends with entry {}", parent.last_event_seq)));
    }
    let edited = request.text.is_some();
    let cut = wakeful_workflow::fork::cut(&parent.lines, parent.base_message_number, &request.at, edited)
        .map_err(|uncut| request.refused(uncut.to_string()))?;
    let message = edited || request.prompt.is_some();
    if message && !request.start {
        return Err(request.refused("a message begins a run: fork it without one, or start it"));
    }
    if request.start && !message && !cut.awaits_model {
        let number = cut.at_message_number;
        let reason = match cut.kept {
            0 => "nothing is copied, so there is nothing to answer: give a prompt, or do not start it"
                .to_owned(),
            _ => format!(
                "message {number} is the model's own, so there is nothing to answer: give a prompt, or do not start it"
            ),
        };
        return Err(request.refused(reason));
    }
    Ok(cut)
}

/// Opens the fork's first run, and gives it its messages. This transaction has created the conversation's
/// row.
async fn start(
    tx: &mut PgConnection,
    vault: &Vault,
    request: &ForkRequest,
    session_id: &str,
) -> Result<String> {
    let mut run_id = None;
    for text in [&request.text, &request.prompt].into_iter().flatten() {
        let message = NewMessage {
            client_key: None,
            text: text.clone(),
            sender: None,
            trace_context: request.trace_context.clone(),
            attachments: Vec::new(),
        };
        let session = run::lock_session(tx, session_id).await?;
        run_id = Some(put_in_inbox(tx, vault, session, &message).await?.run_id);
    }
    if let Some(run_id) = run_id {
        return Ok(run_id);
    }
    let session = run::lock_session(tx, session_id).await?;
    let conversation = run::lock_conversation(tx, &session.conversation_id).await?;
    let run_id = run::new_run_id();
    run::open(tx, &conversation, &session, &run_id, request.trace_context.as_deref(), None).await?;
    // The run answers a message from before it.
    sqlx::query!(
        "update session_runs
        set prompt_message_number = (
            select max(message_number) from conversation_records where session_id = $2 and role = 'user'
        )
        where run_id = $1",
        run_id,
        session_id
    )
    .execute(tx)
    .await?;
    Ok(run_id)
}

/// The first answer to the request that made this conversation, if there is one.
async fn first_answer(
    tx: &mut PgConnection,
    request: &ForkRequest,
    conversation_id: &str,
) -> Result<Option<Forked>> {
    let Some(client_key) = &request.client_key else { return Ok(None) };
    let Some(row) = sqlx::query!(
        r#"select s.session_id, s.trigger_id, e.type as kind, e.payload,
            (select r.run_id from session_runs r where r.session_id = s.session_id order by r.created_at limit 1) as run_id
        from conversation_sessions s
        join session_events e on e.session_id = s.session_id and e.seq = 1
        where s.conversation_id = $1 and s.parent_session_id = $2"#,
        conversation_id,
        request.parent_session_id
    )
    .fetch_optional(tx)
    .await?
    else {
        return Ok(None);
    };
    let event =
        Event::from_row(&row.kind, row.payload).map_err(|error| Error::corrupt("journal entry", error))?;
    let Event::SessionForked { at_message_number, asked_message_number, moved, request_sha256, .. } = event
    else {
        return Err(Error::corrupt("fork", format!("the journal of {} begins otherwise", row.session_id)));
    };
    if request_sha256 != request.sha256()? {
        return Err(Error::KeyReused { client_key: client_key.clone() });
    }
    Ok(Some(Forked {
        session_id: row.session_id,
        conversation_id: row.trigger_id,
        parent_session_id: request.parent_session_id.clone(),
        asked_message_number,
        at_message_number,
        moved,
        // A run that was opened later is not part of the answer.
        run_id: row.run_id.filter(|_| request.start),
        duplicate: true,
    }))
}
