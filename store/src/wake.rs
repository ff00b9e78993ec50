//! The one way in: what a trigger, a person or an operator does to a session.
//!
//! A wake writes a journal entry and an inbox row, bumps `wake_seq`, and sees to it that a job exists. It runs no
//! agent. Looked up first, a duplicate gets the first answer and changes nothing.

use crate::bounce;
use crate::create::find_or_create;
use crate::run::{self, Locked, Opened, Wakes};
use crate::{Error, Result, Store, new_id};
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::event::Event;
use wakeful_workflow::policy::SessionPolicy;
use wakeful_workflow::prefix::Prefix;
use wakeful_workflow::record::{Attachment, without_nul};
use wakeful_workflow::session::{Seed, SessionStatus};

/// At most so many messages may wait in one session.
pub const INBOX_LIMIT: i64 = 1000;

/// Which session a trigger goes on with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Continues {
    /// The one that the same trigger made before: an email or a schedule's firing has a session to itself.
    Trigger,
    /// The latest of its conversation, whatever made that one: a chat goes on where it was left, or forked to, or begun
    /// anew.
    Conversation,
}

/// What a session is made of, where there is none to go on with.
#[derive(Clone, Debug)]
pub struct NewSession {
    pub space_id: String,
    pub mailbox_id: String,
    /// As it is stored: `space/id`.
    pub conversation_id: String,
    pub trigger_type: String,
    /// With space, mailbox and type unique: the same trigger again finds this session.
    pub trigger_id: String,
    pub continues: Continues,
    pub agent: String,
    pub model_id: String,
    pub model_context_window: i32,
    /// The tools as its model is told of them: pinned, with the system prompt among the seeds.
    pub tools: Vec<ToolDefinition>,
    pub policy: SessionPolicy,
    /// The repository that the work is about, if it is about one.
    pub repository_id: Option<String>,
    /// What the model sees before the first message, rendered.
    pub seeds: Vec<Seed>,
}

/// A message for a session.
#[derive(Clone, Debug)]
pub struct NewMessage {
    /// The sender's own idempotency key; made up where there is none.
    pub client_key: Option<String>,
    pub text: String,
    /// Who sent it, as the trigger names people.
    pub sender: Option<String>,
    /// W3C traceparent of the trigger.
    pub trace_context: Option<String>,
    /// Files that came with it: blobs from the start, and pointers on its record.
    pub attachments: Vec<NewAttachment>,
}

/// A file that comes with a message.
#[derive(Clone, Debug)]
pub struct NewAttachment {
    pub file_name: String,
    pub media_type: String,
    pub bytes: Vec<u8>,
}

/// What the message did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Delivered {
    /// It waits in the inbox for the next step boundary.
    Queued,
    /// It answered the open question.
    Delivered,
    NewRun,
}

/// The answer to a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Woken {
    pub session_id: String,
    pub run_id: String,
    pub outcome: Delivered,
    /// The key was used before: this is the first answer again.
    #[serde(skip)]
    pub duplicate: bool,
}

/// Who asks something of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    Anyone,
    /// The process that runs the replay.
    Replay,
}

impl By {
    /// A message or a retry makes a job. Of a replay only its own process would take it, and that may be gone for good.
    pub(crate) fn may_wake(self, session: &Locked) -> Result<()> {
        if self == By::Replay || session.runner.is_empty() {
            return Ok(());
        }
        Err(Error::Refused {
            session_id: session.session_id.clone(),
            reason: "it belongs to a replay, and only the command that runs it goes on with it: cancel it, or fork it"
                .to_owned(),
        })
    }
}

impl Delivered {
    fn as_str(self) -> &'static str {
        match self {
            Delivered::Queued => "queued",
            Delivered::Delivered => "delivered",
            Delivered::NewRun => "new_run",
        }
    }

    pub(crate) fn parse(word: &str) -> Result<Delivered> {
        match word {
            "queued" => Ok(Delivered::Queued),
            "delivered" => Ok(Delivered::Delivered),
            "new_run" => Ok(Delivered::NewRun),
            _ => Err(Error::corrupt("inbox outcome", word)),
        }
    }
}

impl Store {
    /// Takes a message: creates the session when there is none to go on with, and wakes it. One transaction; when this
    /// returns, the message is durable.
    ///
    /// # Errors
    /// [`Error::KeyReused`], [`Error::InboxFull`], [`Error::Conflict`] for an archived or terminated session,
    /// [`Error::Database`].
    pub async fn wake(&self, new: &NewSession, message: &NewMessage) -> Result<Woken> {
        let woken = self.try_wake(new, message).await;
        self.noted(woken)
    }

    async fn try_wake(&self, new: &NewSession, message: &NewMessage) -> Result<Woken> {
        let mut tx = self.intake.begin().await?;
        let session = find_or_create(&mut tx, new, message.client_key.as_deref()).await?;
        By::Anyone.may_wake(&session)?;
        let woken = deliver(&mut tx, session, message).await?;
        crate::failpoint!("K1");
        tx.commit().await?;
        Ok(woken)
    }

    /// The same for a session that exists.
    ///
    /// # Errors
    /// Those of [`Store::wake`], [`Error::NotFound`], and [`Error::Refused`] for a replay's session.
    pub async fn send(&self, session_id: &str, message: &NewMessage) -> Result<Woken> {
        let woken = self.try_send(session_id, message, By::Anyone).await;
        self.noted(woken)
    }

    pub(crate) async fn try_send(&self, session_id: &str, message: &NewMessage, by: By) -> Result<Woken> {
        let mut tx = self.intake.begin().await?;
        let session = run::lock(&mut tx, session_id).await?;
        by.may_wake(&session)?;
        let woken = deliver(&mut tx, session, message).await?;
        tx.commit().await?;
        Ok(woken)
    }

    /// Answers the session's open question, and does nothing where none is open.
    ///
    /// # Errors
    /// Those of [`Store::send`]; [`Error::Conflict`] also where the session waits for no answer.
    pub async fn answer(&self, session_id: &str, message: &NewMessage) -> Result<Woken> {
        let woken = self.try_answer(session_id, message).await;
        self.noted(woken)
    }

    async fn try_answer(&self, session_id: &str, message: &NewMessage) -> Result<Woken> {
        let mut tx = self.intake.begin().await?;
        let session = run::lock(&mut tx, session_id).await?;
        By::Anyone.may_wake(&session)?;
        let refused = conflict(session.clone(), "an answer");
        let woken = deliver(&mut tx, session, message).await?;
        if !woken.duplicate && woken.outcome != Delivered::Delivered {
            return Err(refused);
        }
        tx.commit().await?;
        Ok(woken)
    }

    /// Continues a failed run, or one that needs attention, from its last commit; `reason` goes into the journal. Gives
    /// the run's id.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Conflict`] in any other status, [`Error::Refused`] for a replay's session,
    /// [`Error::Database`].
    pub async fn retry(&self, session_id: &str, reason: Option<&str>) -> Result<String> {
        self.try_retry(session_id, reason, By::Anyone).await
    }

    pub(crate) async fn try_retry(&self, session_id: &str, reason: Option<&str>, by: By) -> Result<String> {
        let mut tx = self.pool.begin().await?;
        let session = run::lock(&mut tx, session_id).await?;
        by.may_wake(&session)?;
        if !matches!(session.status, SessionStatus::Failed | SessionStatus::NeedsAttention) {
            return Err(conflict(session, "retry"));
        }
        let Some(run_id) = run::newest(&mut tx, session_id).await? else {
            return Err(conflict(session, "retry"));
        };
        let conversation = run::lock_conversation(&mut tx, &session.conversation_id).await?;
        clear_cancel(&mut tx, session_id).await?;
        run::open(&mut tx, &conversation, &session, &run_id, None, reason).await?;
        tx.commit().await?;
        Ok(run_id)
    }

    /// Whether the session's open run is asked to end.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn cancel_requested(&self, session_id: &str) -> Result<bool> {
        Ok(sqlx::query_scalar!(
            "select cancel_requested from conversation_sessions where session_id = $1",
            session_id
        )
        .fetch_optional(&self.pool)
        .await?
        .unwrap_or(false))
    }

    /// Ends the open run: its holder closes it at the next look, or it is closed here when nobody may hold it. `reason`
    /// is journalled with the end. Gives the run's id.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Conflict`] when no run is open, [`Error::Database`].
    pub async fn cancel(&self, session_id: &str, reason: Option<&str>) -> Result<String> {
        let mut tx = self.pool.begin().await?;
        let session = run::lock(&mut tx, session_id).await?;
        let open = matches!(
            session.status,
            SessionStatus::Queued
                | SessionStatus::Running
                | SessionStatus::WaitingInput
                | SessionStatus::NeedsAttention
        );
        let run_id = match run::newest(&mut tx, session_id).await? {
            Some(run_id) if open => run_id,
            Some(_) | None => return Err(conflict(session, "cancel")),
        };
        sqlx::query!(
            "update conversation_sessions
            set cancel_requested = true, cancel_reason = coalesce($2, cancel_reason), wake_seq = wake_seq + 1
            where session_id = $1",
            session_id,
            reason
        )
        .execute(&mut *tx)
        .await?;
        match session.status {
            // Its calls have to be closed in words that the model sees, which the step job does.
            SessionStatus::WaitingInput | SessionStatus::NeedsAttention => {
                let conversation = run::lock_conversation(&mut tx, &session.conversation_id).await?;
                run::open(&mut tx, &conversation, &session, &run_id, None, reason).await?;
            }
            SessionStatus::Queued => {
                // One that was resumed and waits has calls to close as well, when it has the conversation.
                let unbegun = sqlx::query_scalar!(
                    r#"select status = 'queued' and started_at is null as "unbegun!" from session_runs where run_id = $1"#,
                    run_id
                )
                .fetch_one(&mut *tx)
                .await?;
                if unbegun {
                    close_queued(&mut tx, &session, &run_id, reason).await?;
                }
            }
            SessionStatus::Created
            | SessionStatus::Running
            | SessionStatus::Completed
            | SessionStatus::Failed
            | SessionStatus::Archived
            | SessionStatus::Terminated => {}
        }
        if !session.runner.is_empty() {
            hand_over(&mut tx, session_id).await?;
        }
        tx.commit().await?;
        Ok(run_id)
    }
}

/// Keeps a session's prefix under its hash, which it gives. Sessions that begin alike share it.
pub(crate) async fn pin(tx: &mut PgConnection, prefix: &Prefix) -> Result<String> {
    let blob = prefix.blob();
    sqlx::query!(
        "insert into blobs (sha256, size, media_type, bytes)
        values ($1, length($2::bytea), 'application/json', $2)
        on conflict (sha256) do nothing",
        blob.sha256,
        blob.bytes
    )
    .execute(tx)
    .await?;
    Ok(blob.sha256)
}

/// Puts the message into the inbox and does what the session's status asks for.
pub(crate) async fn deliver(tx: &mut PgConnection, session: Locked, message: &NewMessage) -> Result<Woken> {
    let client_key = match &message.client_key {
        Some(key) => key.clone(),
        None => new_id("key"),
    };
    let sha256 = {
        use sha2::Digest;
        let body = (&message.text, &message.sender);
        hex::encode(sha2::Sha256::digest(crate::step::to_json(&body)?.as_bytes()))
    };
    let first = sqlx::query!(
        "select content_sha256, run_id, outcome from session_inbox where session_id = $1 and client_key = $2",
        session.session_id,
        client_key
    )
    .fetch_optional(&mut *tx)
    .await?;
    if let Some(first) = first {
        if first.content_sha256 != sha256 {
            return Err(Error::KeyReused { client_key });
        }
        return Ok(Woken {
            session_id: session.session_id,
            run_id: first.run_id,
            outcome: Delivered::parse(&first.outcome)?,
            duplicate: true,
        });
    }
    if !session.status.takes_messages() {
        return Err(conflict(session, "message"));
    }
    let pending = sqlx::query_scalar!(
        r#"select count(*) as "count!" from session_inbox where session_id = $1 and status = 'pending'"#,
        session.session_id
    )
    .fetch_one(&mut *tx)
    .await?;
    if pending >= INBOX_LIMIT {
        return Err(Error::InboxFull { pending });
    }
    let newest = run::newest(tx, &session.session_id).await?;
    // A run that was asked to end takes nothing more: what comes now is for the run after it.
    let ending =
        session.cancel_requested && matches!(session.status, SessionStatus::Queued | SessionStatus::Running);
    let (outcome, run_id) = match (session.status, newest) {
        _ if ending => {
            let next = run::next_run(tx, &session.session_id).await?;
            (Delivered::NewRun, next.unwrap_or_else(run::new_run_id))
        }
        (SessionStatus::Queued | SessionStatus::Running | SessionStatus::NeedsAttention, Some(run_id)) => {
            (Delivered::Queued, run_id)
        }
        (SessionStatus::WaitingInput, Some(run_id)) => (Delivered::Delivered, run_id),
        (_, _) => (Delivered::NewRun, run::new_run_id()),
    };
    let attachments = attach(&mut *tx, &message.attachments).await?;
    let inbox_id = sqlx::query_scalar!(
        "insert into session_inbox
            (session_id, client_key, content, content_sha256, run_id, outcome, sender, attachments)
        values ($1, $2, $3, $4, $5, $6, $7, $8)
        returning inbox_id",
        session.session_id,
        client_key,
        message.text,
        sha256,
        run_id,
        outcome.as_str(),
        message.sender,
        attachments
    )
    .fetch_one(&mut *tx)
    .await?;
    let dedupe = format!("message/{client_key}");
    let event = Event::MessageReceived { inbox_id };
    run::journal(tx, &session.session_id, Some(&run_id), Some(&dedupe), Wakes::Planner, &[event]).await?;
    if let Some(notices) = bounce::take_notices(&mut *tx, &session.conversation_id).await? {
        bring_along(&mut *tx, &session.session_id, &run_id, outcome, &notices).await?;
    }
    match outcome {
        // The commit that closes the ending run opens the next one.
        Delivered::NewRun if ending => {}
        Delivered::Queued => {}
        Delivered::Delivered | Delivered::NewRun => {
            let conversation = run::lock_conversation(tx, &session.conversation_id).await?;
            if outcome == Delivered::NewRun {
                clear_cancel(tx, &session.session_id).await?;
            }
            // A run that has to wait for another session's is queued: the message is in its inbox.
            let _: Opened =
                run::open(tx, &conversation, &session, &run_id, message.trace_context.as_deref(), None)
                    .await?;
        }
    }
    Ok(Woken { session_id: session.session_id, run_id, outcome, duplicate: false })
}

/// Puts what the agent is to be told beside a message that has just been taken: after it, so that the message is what opens
/// the run, or answers the question.
async fn bring_along(
    tx: &mut PgConnection,
    session_id: &str,
    run_id: &str,
    outcome: Delivered,
    news: &str,
) -> Result<()> {
    use sha2::Digest;
    let client_key = new_id("news");
    let inbox_id = sqlx::query_scalar!(
        "insert into session_inbox (session_id, client_key, content, content_sha256, run_id, outcome, sender)
        values ($1, $2, $3, $4, $5, $6, $7)
        returning inbox_id",
        session_id,
        client_key,
        news,
        hex::encode(sha2::Sha256::digest(news.as_bytes())),
        run_id,
        outcome.as_str(),
        bounce::TELLER
    )
    .fetch_one(&mut *tx)
    .await?;
    let dedupe = format!("message/{client_key}");
    let event = Event::MessageReceived { inbox_id };
    run::journal(tx, session_id, Some(run_id), Some(&dedupe), Wakes::Planner, &[event]).await
}

/// Keeps the files of a message as blobs, and gives what points at them.
async fn attach(tx: &mut PgConnection, files: &[NewAttachment]) -> Result<Option<serde_json::Value>> {
    use sha2::Digest;
    let named: Vec<(String, &NewAttachment)> =
        files.iter().map(|file| (hex::encode(sha2::Sha256::digest(&file.bytes)), file)).collect();
    // In one order everywhere: two messages with the same two files would wait for one another.
    let mut sorted: Vec<_> = named.iter().collect();
    sorted.sort_by(|a, b| a.0.cmp(&b.0));
    for (sha256, file) in sorted {
        sqlx::query!(
            "insert into blobs (sha256, size, media_type, bytes)
            values ($1, length($2::bytea), $3, $2)
            on conflict (sha256) do nothing",
            sha256,
            file.bytes,
            file.media_type
        )
        .execute(&mut *tx)
        .await?;
    }
    let attachments: Vec<Attachment> = named
        .into_iter()
        .map(|(sha256, file)| Attachment {
            file_name: without_nul(file.file_name.clone()),
            media_type: without_nul(file.media_type.clone()),
            bytes: file.bytes.len(),
            sha256,
        })
        .collect();
    if attachments.is_empty() {
        return Ok(None);
    }
    Ok(Some(serde_json::to_value(attachments).map_err(|error| Error::corrupt("attachments", error))?))
}

/// Gives a cancelled replay's job to the deployed workers, for its own process may be gone for good: all that is left to do
/// is to close the run, which calls nothing. The same command begins another replay then.
async fn hand_over(tx: &mut PgConnection, session_id: &str) -> Result<()> {
    sqlx::query!(
        "update conversation_sessions set replayed_at = coalesce(replayed_at, clock_timestamp())
        where session_id = $1",
        session_id
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!("update jobs set runner = '' where session_id = $1 and kind = 'step'", session_id)
        .execute(tx)
        .await?;
    Ok(())
}

/// Closes a run that never began, behind another one of its conversation.
async fn close_queued(
    tx: &mut PgConnection,
    session: &Locked,
    run_id: &str,
    reason: Option<&str>,
) -> Result<()> {
    let event = Event::StateTransition {
        from_state: session.status.as_str().to_owned(),
        to_state: SessionStatus::Failed.as_str().to_owned(),
        reason: Some(reason.map_or_else(|| "cancelled".to_owned(), |reason| format!("cancelled: {reason}"))),
    };
    let events = [event, Event::invocation_result(SessionStatus::Failed, Some("cancelled"))];
    run::journal(tx, &session.session_id, Some(run_id), None, Wakes::Planner, &events).await?;
    sqlx::query!(
        "update conversation_sessions
        set status = 'failed', error = 'cancelled', completed_at = clock_timestamp(), cancel_requested = false,
            cancel_reason = null
        where session_id = $1",
        session.session_id
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!(
        "update session_runs
        set status = 'failed', error = 'cancelled', completed_at = clock_timestamp()
        where run_id = $1",
        run_id
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!(
        "update conversation_counters set queued_runs = queued_runs - 1 where conversation_id = $1",
        session.conversation_id
    )
    .execute(&mut *tx)
    .await?;
    Ok(())
}

pub(crate) async fn clear_cancel(tx: &mut PgConnection, session_id: &str) -> Result<()> {
    sqlx::query!(
        "update conversation_sessions
        set cancel_requested = false, cancel_reason = null
        where session_id = $1 and (cancel_requested or cancel_reason is not null)",
        session_id
    )
    .execute(tx)
    .await?;
    Ok(())
}

pub(crate) fn conflict(session: Locked, wanted: &'static str) -> Error {
    Error::Conflict { session_id: session.session_id, status: session.status, wanted }
}
