//! How most messages come in: one statement reads, and one writes.
//!
//! The read takes no lock. What it saw decides what the message becomes, by the same rules as with locks. The write
//! repeats what the decision rests on, as conditions on the rows that it updates. If a condition misses, or if a row of
//! the same key exists already, nothing is written. Then the message takes the way with locks
//! ([`put_in_inbox`](super::put_in_inbox)), which decides anew. Everything that is rare goes that way too: files, answers to
//! questions, reports about mail, a conversation that another session's run holds.

mod write;

use super::{INBOX_LIMIT, NewMessage, Woken, acceptance_of, identity};
use crate::audit::act;
use crate::create::begins::may_begin;
use crate::create::{Continues, NewSession, admits, is_of_agent};
use crate::encryption::{Seal, Vault};
use crate::error::missed_fence;
use crate::queue::Offer;
use crate::{Error, Result};
use sqlx::PgConnection;
use wakeful_workflow::inbox::{self, Arrival};
use wakeful_workflow::session::SessionStatus;
use wakeful_workflow::trigger::{copies_notice_texts, separate_session_type};

/// Which session gets the message.
#[derive(Clone, Copy, Debug)]
pub(super) enum To<'a> {
    /// The session that this trigger continues, or a new one.
    Trigger(&'a NewSession),
    Session(&'a str),
}

/// What the read saw, in one snapshot. Without a session or a conversation its columns are `None`.
#[derive(Debug)]
struct Seen {
    session_id: Option<String>,
    conversation_id: Option<String>,
    last_message_number: Option<i64>,
    open_run_id: Option<String>,
    owner: Option<String>,
    conversation_of_session: Option<String>,
    agent: Option<String>,
    trigger_type: Option<String>,
    trigger_id: Option<String>,
    status: Option<String>,
    last_step_number: Option<i64>,
    wake_seq: Option<i64>,
    cancel_requested: Option<bool>,
    runner: Option<String>,
    redacted: Option<bool>,
    superseded: Option<bool>,
    data_key: Option<String>,
    had_run: bool,
    newest_run_id: Option<String>,
    pending: i64,
    asks: bool,
    /// The agent is to be told of mail that did not arrive.
    reports: bool,
    /// The earlier message of this key.
    first_sha256: Option<String>,
    first_run_id: Option<String>,
    first_outcome: Option<String>,
    /// The number of the inbox row, if the write follows. Numbers of one session follow the order of its commits,
    /// because the write demands that nothing woke the session since.
    inbox_id: i64,
}

/// Selects what a wake decides on: of the session that `$find` selects, and of the conversation `$conversation`.
macro_rules! seen {
    ($find:literal, $conversation:literal, $($parameter:expr),+) => {
        sqlx::query_as!(
            Seen,
            r#"select s.session_id as "session_id?", c.conversation_id as "conversation_id?",
                c.last_message_number as "last_message_number?", c.open_run_id,
                c.user_id as owner, s.conversation_id as "conversation_of_session?", s.agent as "agent?", s.trigger_type as "trigger_type?",
                s.trigger_id as "trigger_id?", s.status as "status?", s.last_step_number as "last_step_number?",
                s.wake_seq as "wake_seq?", s.cancel_requested as "cancel_requested?", s.runner as "runner?",
                s.imported_from ->> 'redacted' = 'true' as "redacted?", s.superseded as "superseded?", s.data_key,
                s.forked_at_message_number is not null
                    or exists (select from session_runs r
                        where r.session_id = s.session_id and r.started_at is not null) as "had_run!",
                (select r.run_id from session_runs r where r.session_id = s.session_id
                    order by r.created_at desc limit 1) as newest_run_id,
                (select count(*) from session_inbox p
                    where p.session_id = s.session_id and p.status = 'pending') as "pending!",
                exists (select from tool_calls t
                    where t.session_id = s.session_id and t.status = 'waiting'
                        and t.result_message_number is null) as "asks!",
                exists (select from deliveries d
                    where d.conversation_id = c.conversation_id and d.untold
                        and d.status not in ('queued', 'sending')) as "reports!",
                first.content_sha256 as "first_sha256?", first.run_id as "first_run_id?",
                first.outcome as "first_outcome?",
                nextval('session_inbox_inbox_id_seq') as "inbox_id!"
            from (select "# + $find + " as session_id) found
            left join conversation_sessions s on s.session_id = found.session_id
            left join conversation_counters c on c.conversation_id = " + $conversation + "
            left join session_inbox first on first.session_id = s.session_id and first.client_key = $1",
            $($parameter),+
        )
    };
}

/// Accepts the message. If it opens a run, its job fills `offer`. `None`: nothing was written, and the message takes the way with locks.
///
/// # Errors
/// [`Error::KeyReused`], [`Error::OfAnotherUser`], [`Error::OfAUser`], [`Error::OfASchedule`], [`Error::NotFound`] for a conversation
/// that the sender may not know of, [`Error::Keys`], [`Error::Corrupt`], [`Error::Database`].
pub(super) async fn wake(
    connection: &mut PgConnection,
    vault: &Vault,
    expected: &Seal,
    to: To<'_>,
    message: &NewMessage,
    offer: Option<&mut Offer>,
) -> Result<Option<Woken>> {
    let (client_key, sha256) = identity(message)?;
    let seen = look(connection, to, &expected.text(&client_key)).await?;
    let seal = vault.seal(seen.data_key.as_deref()).await?;
    if seen.session_id.is_some() && seal.key_id() != expected.key_id() {
        // The session has another key than expected: its conversation began after that key was looked up, or the trigger has its
        // session in another conversation.
        return Ok(None);
    }
    let sha256 = seal.hash(sha256);
    let known = seen.session_id.is_some();
    let is_refused = seen.runner.as_deref() != Some("") || seen.redacted == Some(true);
    if known && (seen.conversation_of_session != seen.conversation_id || is_refused) {
        return Ok(None);
    }
    // A user who has the conversation keeps it, so a refusal needs no lock.
    if let (To::Trigger(new), Some(_)) = (to, &seen.conversation_id)
        && !admits(new, seen.owner.as_deref())?
    {
        return Ok(None);
    }
    if let To::Trigger(new) = to {
        // If another session becomes the latest one before the write, the write's fence misses.
        is_of_agent(new, seen.agent.as_deref())?;
    }
    if let Some(woken) = seen.first(&client_key, &sha256)? {
        return Ok(Some(woken));
    }
    if !message.attachments.is_empty() {
        return Ok(None);
    }
    let stored_key = seal.text(&client_key).into_owned();
    let mut arrived = Arrived { message, client_key: stored_key, sha256, inbox_id: seen.inbox_id, seal };
    let written = match (to, seen.way(to)) {
        (_, Some(Way::Joins)) => write::join_run(connection, &seen, &arrived).await,
        (_, Some(Way::Opens)) => write::open_run(connection, &seen, &arrived, offer).await,
        (To::Trigger(new), None)
            if !known && seen.conversation_id.is_none() && !copies_notice_texts(&new.trigger_type, false) =>
        {
            may_begin(&mut *connection, new).await?;
            let data_key = vault.begin(&mut *connection, &new.agent, &new.conversation_id).await?;
            arrived.seal = vault.seal(data_key.as_deref()).await?;
            arrived.sha256 = arrived.seal.hash(arrived.sha256);
            arrived.client_key = arrived.seal.text(&client_key).into_owned();
            write::first_message(connection, vault, new, &arrived, offer).await
        }
        (_, None) => return Ok(None),
    };
    match written {
        // A condition missed, or another message of the same key or another first message was faster.
        Err(Error::Database(error)) if missed_fence(&error) || is_taken(&error) => Ok(None),
        Ok(Some(woken)) => {
            act::is_written();
            Ok(Some(woken))
        }
        written => written,
    }
}

/// Returns whether a unique index refused a row.
fn is_taken(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(sqlx::error::DatabaseError::is_unique_violation)
}

async fn look(connection: &mut PgConnection, to: To<'_>, client_key: &str) -> Result<Seen> {
    let seen = match to {
        To::Session(session_id) => {
            seen!("$2::text", "s.conversation_id", client_key, session_id).fetch_one(connection).await
        }
        To::Trigger(new) => match new.continues {
            Continues::Trigger => {
                seen!(
                    "(select session_id from conversation_sessions
                    where space_id = $3 and mailbox_id = $4 and trigger_type = $5 and trigger_id = $6)",
                    "$2",
                    client_key,
                    new.conversation_id,
                    new.space_id,
                    new.mailbox_id,
                    new.trigger_type,
                    new.trigger_id
                )
                .fetch_one(connection)
                .await
            }
            // The session that got this message before, else the latest.
            Continues::Conversation => {
                seen!(
                    "coalesce(
                        (select b.session_id from conversation_sessions b
                            join session_inbox i on i.session_id = b.session_id and i.client_key = $1
                            where b.conversation_id = $2
                            order by b.ordinal
                            limit 1),
                        (select session_id from conversation_sessions
                            where conversation_id = $2
                            order by ordinal desc
                            limit 1))",
                    "$2",
                    client_key,
                    new.conversation_id
                )
                .fetch_one(connection)
                .await
            }
        },
    };
    Ok(seen?)
}

/// What a known session does with the message.
#[derive(Clone, Copy, Debug)]
enum Way {
    Joins,
    Opens,
}

impl Seen {
    /// What the earlier message of this key got.
    fn first(&self, client_key: &str, sha256: &str) -> Result<Option<Woken>> {
        let (Some(session_id), Some(first), Some(run_id), Some(outcome)) =
            (&self.session_id, &self.first_sha256, &self.first_run_id, &self.first_outcome)
        else {
            return Ok(None);
        };
        if first != sha256 {
            return Err(Error::KeyReused { client_key: client_key.to_owned() });
        }
        Ok(Some(Woken {
            session_id: session_id.clone(),
            run_id: run_id.clone(),
            outcome: acceptance_of(outcome)?,
            duplicate: true,
        }))
    }

    /// `None` for a rare case, or if the session does not exist yet.
    fn way(&self, to: To<'_>) -> Option<Way> {
        let trigger_type = self.trigger_type.as_deref()?;
        let opens_separate = match to {
            To::Trigger(new) if new.continues == Continues::Conversation => {
                separate_session_type(trigger_type, &new.trigger_type).is_some()
            }
            To::Trigger(_) | To::Session(_) => false,
        };
        if opens_separate || self.reports || self.pending >= INBOX_LIMIT {
            return None;
        }
        let status = SessionStatus::parse(self.status.as_deref()?)?;
        let at_rest = status.is_at_rest();
        match inbox::on_arrival(status, self.cancel_requested?, self.newest_run_id.is_some())? {
            Arrival::JoinsRun => Some(Way::Joins),
            Arrival::OpensRun
                if at_rest
                    && self.open_run_id.is_none()
                    && self.pending == 0
                    && !self.asks
                    && !copies_notice_texts(trigger_type, self.had_run) =>
            {
                Some(Way::Opens)
            }
            Arrival::OpensRun | Arrival::AnswersQuestion | Arrival::AwaitsNextRun => None,
        }
    }
}

/// A message with its key and its place.
struct Arrived<'m> {
    message: &'m NewMessage,
    /// As it is stored.
    client_key: String,
    sha256: String,
    inbox_id: i64,
    seal: Seal,
}
