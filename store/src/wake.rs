//! A message wakes a session. Every trigger's message reaches its session here; [`crate::steer`] has what operators do.
//!
//! A message writes an inbox row and a journal entry, increments `wake_seq`, and opens a run if the session
//! needs one. Most messages need one statement that reads and one that writes (`at_once`). The others need a transaction with
//! locks. A worker runs the agent later. A duplicate message changes nothing and gets the first message's [`Woken`] again.

mod at_once;
mod files;

use crate::audit::act;
use crate::bounce;
use crate::create::find_or_create;
pub use crate::create::{Continues, NewSession};
use crate::encryption::{Seal, Vault};
use crate::error::CANNOT_CONTINUE;
use crate::pool::in_time;
use crate::queue::Offer;
use crate::run::{self, Locked, Opened, Wakes};
use crate::{Error, Result, Store, new_id};
use at_once::To;
use files::attach;
use serde::{Deserialize, Serialize};
use sqlx::PgConnection;
use wakeful_workflow::event::Event;
use wakeful_workflow::inbox::{self, Acceptance, Arrival};
use wakeful_workflow::trigger::separate_session_type;

/// How many messages may wait in one session, at most.
const INBOX_LIMIT: i64 = 1000;

/// A message for a session.
#[derive(Clone, Debug)]
pub struct NewMessage {
    /// The sender's idempotency key. Without one, the store makes one up.
    pub client_key: Option<String>,
    pub text: String,
    /// The sender, as the trigger names people: an address or a user id.
    pub sender: Option<String>,
    /// W3C traceparent of the trigger.
    pub trace_context: Option<String>,
    /// Files that came with the message. They are stored as blobs at once, and the message's record points at
    /// them.
    pub attachments: Vec<NewAttachment>,
}

/// A file that comes with a message.
#[derive(Clone, Debug)]
pub struct NewAttachment {
    pub file_name: String,
    pub media_type: String,
    pub bytes: Vec<u8>,
}

/// What the sender of a message gets back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Woken {
    /// The session that got the message.
    pub session_id: String,
    /// The run that will read it.
    pub run_id: String,
    /// What the message became.
    pub outcome: Acceptance,
    /// The key was used before, so this repeats what the first message got.
    #[serde(skip)]
    pub duplicate: bool,
}

/// What became of a chat message that names no agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatWoken {
    /// It was accepted.
    Accepted(Woken),
    /// It opens a chat about a notice, which has the notice's agent. Nothing was written, because the new session was for
    /// another agent.
    AboutNotice { agent: String },
}

/// Who sends a message, retries a run or approves a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    Anyone,
    /// The process that runs the replay.
    Replay,
}

impl By {
    /// Checks that a message or a retry may create a job for this session. A session from a redacted bundle gets none, because
    /// its model would be asked about hashes. The session of a replay gets none from others: only the replay's own process
    /// takes its jobs, and that process may have ended.
    pub(crate) fn may_wake(self, session: &Locked) -> Result<()> {
        if session.redacted {
            return Err(Error::without_texts(&session.session_id, CANNOT_CONTINUE));
        }
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

impl Store {
    /// Accepts a message: finds or creates its session, puts the message into the inbox, and wakes the
    /// session. One statement that reads and one that writes, or one transaction. When this returns, the message is durable.
    ///
    /// # Errors
    /// [`Error::KeyReused`], [`Error::InboxFull`], [`Error::Conflict`] for an archived or terminated session,
    /// [`Error::Refused`] for a replay's session, [`Error::OfAnotherUser`], [`Error::OfAUser`], [`Error::OfASchedule`],
    /// [`Error::NotFound`] for a conversation that the sender may not know of, [`Error::Keys`], [`Error::Corrupt`], [`Error::Database`].
    pub async fn wake(&self, new: &NewSession, message: &NewMessage) -> Result<Woken> {
        self.wake_for(new, message, None).await
    }

    /// Like [`Store::wake`]. If the message opens a run, its job usually fills the offer. The caller then begins it
    /// ([`Offer::begin`]), or announces the job.
    ///
    /// # Errors
    /// Those of [`Store::wake`].
    pub async fn wake_for(
        &self,
        new: &NewSession,
        message: &NewMessage,
        offer: Option<&mut Offer>,
    ) -> Result<Woken> {
        let woken = self.try_wake(new, message, offer).await;
        // Remembers for the readiness check whether the database refuses writes. Returns `woken` unchanged.
        self.note_refusal(woken)
    }

    async fn try_wake(
        &self,
        new: &NewSession,
        message: &NewMessage,
        offer: Option<&mut Offer>,
    ) -> Result<Woken> {
        if let Some(woken) = self.wake_at_once(To::Trigger(new), message, offer).await? {
            return Ok(woken);
        }
        self.wake_locked(new, message).await
    }

    async fn wake_locked(&self, new: &NewSession, message: &NewMessage) -> Result<Woken> {
        let mut tx = self.intake.begin().await?;
        let session = find_or_create(&mut tx, &self.vault, new, message.client_key.as_deref()).await?;
        By::Anyone.may_wake(&session)?;
        let woken = put_in_inbox(&mut tx, &self.vault, session, message).await?;
        crate::failpoint!("K1");
        tx.commit().await?;
        Ok(woken)
    }

    /// Like [`Store::wake_for`], for a chat message that names no agent. `new.agent` answers it, unless the chat follows a notice of
    /// another agent: then this writes nothing and returns [`ChatWoken::AboutNotice`].
    ///
    /// # Errors
    /// Those of [`Store::wake`].
    pub async fn wake_chat(
        &self,
        new: &NewSession,
        message: &NewMessage,
        offer: Option<&mut Offer>,
    ) -> Result<ChatWoken> {
        let woken = self.try_wake_chat(new, message, offer).await;
        self.note_refusal(woken)
    }

    async fn try_wake_chat(
        &self,
        new: &NewSession,
        message: &NewMessage,
        offer: Option<&mut Offer>,
    ) -> Result<ChatWoken> {
        if let Some(woken) = self.wake_at_once(To::Trigger(new), message, offer).await? {
            return Ok(ChatWoken::Accepted(woken));
        }
        // A message that opens a chat about a notice always comes here.
        let latest = self.latest_trigger(&new.conversation_id).await?;
        if let Some((trigger_type, agent)) = latest
            && agent != new.agent
            && separate_session_type(&trigger_type, &new.trigger_type).is_some()
        {
            return Ok(ChatWoken::AboutNotice { agent });
        }
        Ok(ChatWoken::Accepted(self.wake_locked(new, message).await?))
    }

    async fn wake_at_once(
        &self,
        to: To<'_>,
        message: &NewMessage,
        offer: Option<&mut Offer>,
    ) -> Result<Option<Woken>> {
        // Ask the key store before a connection is taken and a row is locked. The data key is needed to look for an earlier message:
        // its client key is stored sealed.
        let seal = match to {
            _ if !self.vault.is_open() => Seal::default(),
            To::Session(session_id) => self.seal_of(session_id).await?,
            To::Trigger(new) => self.ready_key(new).await?,
        };
        let mut connection = self.intake.acquire().await?;
        let woken = at_once::wake(connection.sends(), &self.vault, &seal, to, message, offer);
        let woken = in_time(async { Ok(woken.await) }).await.unwrap_or_else(|late| Err(late.into()));
        match &woken {
            Err(Error::Database(error)) => connection.failed(error),
            Ok(_) | Err(_) => connection.answered(&Ok::<(), sqlx::Error>(())),
        }
        woken
    }

    /// Accepts a message for a session that exists.
    ///
    /// # Errors
    /// Those of [`Store::wake`], and [`Error::NotFound`] for a session that does not exist.
    pub async fn send(&self, session_id: &str, message: &NewMessage) -> Result<Woken> {
        self.send_for(session_id, message, None).await
    }

    /// Like [`Store::send`], with an offer as in [`Store::wake_for`].
    ///
    /// # Errors
    /// Those of [`Store::send`].
    pub async fn send_for(
        &self,
        session_id: &str,
        message: &NewMessage,
        offer: Option<&mut Offer>,
    ) -> Result<Woken> {
        let woken = self.try_send(session_id, message, By::Anyone, offer).await;
        self.note_refusal(woken)
    }

    pub(crate) async fn try_send(
        &self,
        session_id: &str,
        message: &NewMessage,
        by: By,
        offer: Option<&mut Offer>,
    ) -> Result<Woken> {
        if let Some(woken) = self.wake_at_once(To::Session(session_id), message, offer).await? {
            return Ok(woken);
        }
        let mut tx = self.intake.begin().await?;
        let session = run::lock(&mut tx, session_id).await?;
        by.may_wake(&session)?;
        let woken = put_in_inbox(&mut tx, &self.vault, session, message).await?;
        tx.commit().await?;
        Ok(woken)
    }

    /// Answers the session's open question. Writes nothing if no question is open.
    ///
    /// # Errors
    /// Those of [`Store::send`], and [`Error::Conflict`] if no question is open.
    pub async fn answer(&self, session_id: &str, message: &NewMessage) -> Result<Woken> {
        let woken = self.try_answer(session_id, message).await;
        self.note_refusal(woken)
    }

    async fn try_answer(&self, session_id: &str, message: &NewMessage) -> Result<Woken> {
        let mut tx = self.intake.begin().await?;
        let session = run::lock(&mut tx, session_id).await?;
        let woken = answer_in(&mut tx, &self.vault, session, message).await?;
        tx.commit().await?;
        Ok(woken)
    }
}

/// Answers a locked session's open question.
pub(crate) async fn answer_in(
    tx: &mut PgConnection,
    vault: &Vault,
    session: Locked,
    message: &NewMessage,
) -> Result<Woken> {
    By::Anyone.may_wake(&session)?;
    let refused = conflict(session.clone(), "an answer");
    let woken = put_in_inbox(tx, vault, session, message).await?;
    if !woken.duplicate && woken.outcome != Acceptance::Delivered {
        return Err(refused);
    }
    Ok(woken)
}

/// Returns the message's key, and the hash that a duplicate is compared with.
fn identity(message: &NewMessage) -> Result<(String, String)> {
    use sha2::Digest;
    let client_key = match &message.client_key {
        Some(key) => key.clone(),
        None => new_id("key"),
    };
    let body = (&message.text, &message.sender);
    let sha256 = hex::encode(sha2::Sha256::digest(crate::json::to_json(&body)?.as_bytes()));
    Ok((client_key, sha256))
}

/// Puts the message into the inbox, and opens or resumes a run if [`inbox::on_arrival`] says so.
pub(crate) async fn put_in_inbox(
    tx: &mut PgConnection,
    vault: &Vault,
    session: Locked,
    message: &NewMessage,
) -> Result<Woken> {
    let seal = &vault.seal(session.data_key.as_deref()).await?;
    let (client_key, sha256) = identity(message)?;
    let sha256 = seal.hash(sha256);
    let stored_key = seal.text(&client_key);
    if let Some(first) = first_of_key(tx, &session, &client_key, &stored_key, &sha256).await? {
        return Ok(first);
    }
    let newest = run::newest(tx, &session.session_id).await?;
    let Some(arrival) = inbox::on_arrival(session.status, session.cancel_requested, newest.is_some()) else {
        return Err(conflict(session, "send"));
    };
    check_room(tx, &session.session_id).await?;
    let run_id = match (arrival, newest) {
        (Arrival::JoinsRun | Arrival::AnswersQuestion, Some(run_id)) => run_id,
        (Arrival::AwaitsNextRun, _) => {
            run::next_run(tx, &session.session_id).await?.unwrap_or_else(run::new_run_id)
        }
        (Arrival::JoinsRun | Arrival::AnswersQuestion, None) | (Arrival::OpensRun, _) => run::new_run_id(),
    };
    act::on(&session.session_id);
    let outcome = arrival.acceptance();
    let text = seal.text(&message.text);
    let attachments = attach(&mut *tx, seal, &session.space_id, &message.attachments).await?;
    let inbox_id = sqlx::query_scalar!(
        "insert into session_inbox
            (session_id, client_key, content, content_sha256, run_id, outcome, sender, attachments, space_id)
        values ($1, $2, $3, $4, $5, $6, $7, $8, $9)
        returning inbox_id",
        session.session_id,
        &*stored_key,
        &*text,
        sha256,
        run_id,
        outcome.as_str(),
        message.sender,
        attachments,
        session.space_id
    )
    .fetch_one(&mut *tx)
    .await?;
    let dedupe = format!("message/{stored_key}");
    let event = Event::MessageReceived { inbox_id };
    run::append_events(tx, &session.session_id, Some(&run_id), Some(&dedupe), Wakes::Planner, &[event])
        .await?;
    if let Some(reports) = bounce::take_reports(&mut *tx, seal, &session.conversation_id).await? {
        add_reports(&mut *tx, seal, &session, &run_id, outcome, &reports).await?;
    }
    open_run(tx, &session, arrival, &run_id, message.trace_context.as_deref()).await?;
    Ok(Woken { session_id: session.session_id, run_id, outcome, duplicate: false })
}

/// Returns what the first message with this key got. `None`: this is the first one. `sha256` is the hash of this message.
///
/// # Errors
/// [`Error::KeyReused`] if the first message was another one.
async fn first_of_key(
    tx: &mut PgConnection,
    session: &Locked,
    client_key: &str,
    stored_key: &str,
    sha256: &str,
) -> Result<Option<Woken>> {
    let first = sqlx::query!(
        "select content_sha256, run_id, outcome from session_inbox where session_id = $1 and client_key = $2",
        session.session_id,
        stored_key
    )
    .fetch_optional(tx)
    .await?;
    let Some(first) = first else { return Ok(None) };
    if first.content_sha256 != sha256 {
        return Err(Error::KeyReused { client_key: client_key.to_owned() });
    }
    Ok(Some(Woken {
        session_id: session.session_id.clone(),
        run_id: first.run_id,
        outcome: acceptance_of(&first.outcome)?,
        duplicate: true,
    }))
}

/// Checks that one more message may wait in the session.
///
/// # Errors
/// [`Error::InboxFull`].
async fn check_room(tx: &mut PgConnection, session_id: &str) -> Result<()> {
    let pending = sqlx::query_scalar!(
        r#"select count(*) as "count!" from session_inbox where session_id = $1 and status = 'pending'"#,
        session_id
    )
    .fetch_one(tx)
    .await?;
    if pending >= INBOX_LIMIT {
        return Err(Error::InboxFull { pending });
    }
    Ok(())
}

/// Opens or resumes the run that reads the message, if the message is to do that.
async fn open_run(
    tx: &mut PgConnection,
    session: &Locked,
    arrival: Arrival,
    run_id: &str,
    trace_context: Option<&str>,
) -> Result<()> {
    match arrival {
        // `JoinsRun`: the open run reads it. `AwaitsNextRun`: the commit that closes the cancelled run opens
        // the next one.
        Arrival::AwaitsNextRun | Arrival::JoinsRun => {}
        Arrival::AnswersQuestion | Arrival::OpensRun => {
            // The caller has locked the conversation before the session; this reads its row.
            let conversation = run::lock_conversation(tx, &session.conversation_id).await?;
            if arrival == Arrival::OpensRun {
                run::clear_cancel(tx, &session.session_id).await?;
            }
            // `open` starts the run at once, or queues it while another session's run holds the conversation.
            let _: Opened = run::open(tx, &conversation, session, run_id, trace_context, None).await?;
        }
    }
    Ok(())
}

/// Puts reports about the agent's own mail (it bounced, or was not sent) into the inbox, after the message that
/// was just accepted. The order matters: the message, not the reports, must open the run or answer the question.
async fn add_reports(
    tx: &mut PgConnection,
    seal: &Seal,
    session: &Locked,
    run_id: &str,
    outcome: Acceptance,
    reports: &str,
) -> Result<()> {
    use sha2::Digest;
    let client_key = new_id("news");
    let text = seal.text(reports);
    let inbox_id = sqlx::query_scalar!(
        "insert into session_inbox (session_id, client_key, content, content_sha256, run_id, outcome, sender, space_id)
        values ($1, $2, $3, $4, $5, $6, $7, $8)
        returning inbox_id",
        session.session_id,
        client_key,
        &*text,
        seal.hash(hex::encode(sha2::Sha256::digest(reports.as_bytes()))),
        run_id,
        outcome.as_str(),
        bounce::TELLER,
        session.space_id
    )
    .fetch_one(&mut *tx)
    .await?;
    let dedupe = format!("message/{client_key}");
    let event = Event::MessageReceived { inbox_id };
    run::append_events(tx, &session.session_id, Some(run_id), Some(&dedupe), Wakes::Planner, &[event]).await
}

/// Reads a stored acceptance.
pub(crate) fn acceptance_of(word: &str) -> Result<Acceptance> {
    Acceptance::parse(word).ok_or_else(|| Error::corrupt("inbox outcome", word))
}

pub(crate) fn conflict(session: Locked, wanted: &'static str) -> Error {
    Error::Conflict { session_id: session.session_id, status: session.status, wanted }
}
