//! Imports a chat that is older than sessions and is stored only in a cache. The chat becomes the beginning
//! of a session, once.

use crate::create::find_or_create;
use crate::encryption::seal_in;
use crate::run::{self, Wakes};
use crate::wake::{NewMessage, NewSession, Woken, put_in_inbox};
use crate::{Result, Store, sealed_blob};
use chrono::{DateTime, NaiveDate, Utc};
use serde::Serialize;
use sqlx::PgConnection;
use wakeful_workflow::blob::Blob;
use wakeful_workflow::event::Event;
use wakeful_workflow::session::SessionStatus;
use wakeful_workflow::state::State;

/// The cached data of a chat without its messages, which become seeds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Imported {
    /// The chat's state. The session's state starts from it.
    pub state: State,
    /// When each of the session's seeds was said, in milliseconds since 1970.
    pub said_at: Vec<Option<i64>>,
    /// Number of messages in the cache that cannot become seeds.
    pub left_out: i64,
}

/// Why the cache gave no chat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMiss {
    /// The cache did not know the chat.
    Missed,
    /// The cache could not be reached, or its data could not be read.
    Failed,
}

/// One day's count of one outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LegacyCount {
    pub day: NaiveDate,
    /// `imported`, `missed` or `failed`.
    pub outcome: String,
    pub chats: i64,
    /// Messages that cannot become seeds, such as tool messages.
    pub messages_left_out: i64,
    pub last_at: DateTime<Utc>,
}

impl Store {
    /// Returns whether the conversation has a session. `conversation_id` is `space/id`, as stored.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn has_session(&self, conversation_id: &str) -> Result<bool> {
        Ok(sqlx::query_scalar!(
            r#"select exists (select from conversation_sessions where conversation_id = $1) as "exists!""#,
            conversation_id
        )
        .fetch_one(&self.intake)
        .await?)
    }

    /// [`Store::wake`] for a chat that the cache knew: the seeds of `new` contain its messages. If another
    /// process has created the conversation's session meanwhile, the message goes to that session and nothing
    /// is imported again. The transaction of an import also counts it.
    ///
    /// # Errors
    /// Those of [`Store::wake`].
    pub async fn wake_imported(
        &self,
        new: &NewSession,
        message: &NewMessage,
        imported: &Imported,
    ) -> Result<Woken> {
        let woken = self.try_wake_imported(new, message, imported).await;
        self.note_refusal(woken)
    }

    async fn try_wake_imported(
        &self,
        new: &NewSession,
        message: &NewMessage,
        imported: &Imported,
    ) -> Result<Woken> {
        self.ready_key(new).await?;
        let mut tx = self.intake.begin().await?;
        let session = find_or_create(&mut tx, &self.vault, new, message.client_key.as_deref()).await?;
        let made = adopt(&mut tx, &session.session_id, new, imported).await?;
        let woken = put_in_inbox(&mut tx, &self.vault, session, message).await?;
        if made {
            // Do this last, to hold the lock on the counter's row as briefly as possible.
            count(&mut tx, "imported", imported.left_out).await?;
        }
        crate::failpoint!("K1");
        tx.commit().await?;
        Ok(woken)
    }

    /// Counts a lookup in the cache that led to no import.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn count_legacy(&self, asked: CacheMiss) -> Result<()> {
        let mut connection = self.intake.acquire().await?;
        let outcome = match asked {
            CacheMiss::Missed => "missed",
            CacheMiss::Failed => "failed",
        };
        count(&mut connection, outcome, 0).await
    }

    /// The counts of the last 30 days, newest first.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn legacy_counts(&self) -> Result<Vec<LegacyCount>> {
        Ok(sqlx::query_as!(
            LegacyCount,
            "select day, outcome, chats, messages_left_out, last_at from legacy_chat_counts
            where day > (clock_timestamp() at time zone 'utc')::date - 30
            order by day desc, outcome"
        )
        .fetch_all(&self.pool)
        .await?)
    }
}

async fn count(tx: &mut PgConnection, outcome: &str, left_out: i64) -> Result<()> {
    sqlx::query!(
        "insert into legacy_chat_counts (day, outcome, chats, messages_left_out)
        values ((clock_timestamp() at time zone 'utc')::date, $1, 1, $2)
        on conflict (day, outcome) do update set chats = legacy_chat_counts.chats + 1,
            messages_left_out = legacy_chat_counts.messages_left_out + excluded.messages_left_out,
            last_at = clock_timestamp()",
        outcome,
        left_out
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// Gives a session that this transaction created its state, and its seeds their times. Returns `false` if the
/// session existed before.
async fn adopt(
    tx: &mut PgConnection,
    session_id: &str,
    new: &NewSession,
    imported: &Imported,
) -> Result<bool> {
    let seal = seal_in(&mut *tx, session_id).await?;
    let state = serde_json::Value::Object(seal.state(imported.state.clone()));
    // The session has no events yet, and no restart made it: a restart has a trigger type of its own.
    let adopted = sqlx::query!(
        "update conversation_sessions
        set initial_state = $2, state = $2
        where session_id = $1 and status = 'created' and last_event_seq = 0 and trigger_type = $3",
        session_id,
        state,
        new.trigger_type
    )
    .execute(&mut *tx)
    .await?;
    if adopted.rows_affected() == 0 {
        return Ok(false);
    }
    sqlx::query!(
        r#"update session_seed_messages m
        set "timestamp" = said.at
        from unnest($2::bigint[]) with ordinality as said (at, ordinal)
        where m.session_id = $1 and m.ordinal = said.ordinal - 1"#,
        session_id,
        &imported.said_at as &[Option<i64>]
    )
    .execute(&mut *tx)
    .await?;
    if !imported.state.is_empty() {
        let snapshot = Blob::of_state(&imported.state);
        sealed_blob::keep(&mut *tx, &seal, &new.space_id, &snapshot).await?;
        // From here on the journal contains the state.
        let checkpoint = Event::Checkpoint {
            step_number: 0,
            to_message_number: new.seeds.len() as i64,
            lifecycle_state: SessionStatus::Created.as_str().to_owned(),
            state_sha256: snapshot.sha256,
        };
        run::append_events(tx, session_id, None, None, Wakes::Planner, &[checkpoint]).await?;
    }
    Ok(true)
}
