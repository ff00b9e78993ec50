//! The data keys of what is erased: see [`crate::encryption`].

use super::blobs::lock_from_writers;
use super::{Erasure, Subject};
use crate::{Error, Result, Store};
use sqlx::PgConnection;

/// The data keys of these conversations that no other conversation has.
pub(super) async fn only_of(tx: &mut PgConnection, conversations: &[String]) -> Result<Vec<String>> {
    Ok(sqlx::query_scalar!(
        r#"select distinct c.data_key as "data_key!" from conversation_counters c
        where c.conversation_id = any($1) and c.data_key is not null
            and not exists (
                select from conversation_counters other
                where other.data_key = c.data_key and other.conversation_id <> all($1))
        order by 1"#,
        conversations
    )
    .fetch_all(tx)
    .await?)
}

/// The data keys of these conversations, also those that another one has.
pub(super) async fn all_of(tx: &mut PgConnection, conversations: &[String]) -> Result<Vec<String>> {
    Ok(sqlx::query_scalar!(
        r#"select distinct data_key as "data_key!" from conversation_counters
        where conversation_id = any($1) and data_key is not null
        order by 1"#,
        conversations
    )
    .fetch_all(tx)
    .await?)
}

/// Deletes the sealed blobs of the keys that no conversation has any more. Returns how many.
pub(super) async fn delete_blobs(tx: &mut PgConnection, unused: &[String]) -> Result<i64> {
    let deleted = sqlx::query!("delete from sealed_blobs where data_key = any($1)", unused);
    Ok(deleted.execute(tx).await?.rows_affected() as i64)
}

/// Deletes the sealed blobs of the keys `shared` that no row under the key names and that were not stored for a session that
/// stays: its commit may be about to name them. Returns how many. Waits for a vacuum of the blobs, so the transaction holds
/// nothing that others wait for.
pub(super) async fn delete_unnamed_blobs(
    tx: &mut PgConnection,
    shared: &[String],
    erased: &[String],
) -> Result<i64> {
    // Who stores such a blob with the row that names it holds a lock that this waits for.
    lock_from_writers(&mut *tx, "sealed_blobs").await?;
    let unnamed = sqlx::query!(
        r#"delete from sealed_blobs
        where data_key = any($1)
            and (
                stored_for is null
                or stored_for = any($2)
                or not exists (select from conversation_sessions s where s.session_id = sealed_blobs.stored_for)
            )
            and (data_key, sha256) not in (
            select s.data_key, named[1]
            from conversation_sessions s
            cross join lateral (
                select concat(s.state::text, s.initial_state::text) as text
                union all
                select content::text from session_seed_messages where session_id = s.session_id
                union all
                select concat(content::text, details::text) from conversation_records where session_id = s.session_id
                union all
                select content::text from deliveries where session_id = s.session_id
                union all
                select payload::text from session_events where session_id = s.session_id
                union all
                select attachments::text from session_inbox where session_id = s.session_id and attachments is not null
                union all
                select concat(outcome::text, receipt::text) from tool_calls where session_id = s.session_id
            ) rows
            cross join lateral regexp_matches(rows.text, '[0-9a-f]{64}', 'g') as named
            where s.data_key = any($1)
        )"#,
        shared,
        erased
    );
    Ok(unnamed.execute(tx).await?.rows_affected() as i64)
}

/// Says that a data key stays although no other conversation had it when the erasure began.
pub(super) fn note_kept(erasure: &mut Erasure, data_keys: usize) {
    let erased = erasure.rows.get("data_keys").copied().unwrap_or_default();
    if erased < data_keys as i64 && !erasure.stays.iter().any(|line| line.starts_with(SHARED)) {
        erasure.stays.push(format!(
            "{SHARED}, because its conversation went on meanwhile: backups and WAL can be read until that is erased"
        ));
    }
}

/// How the line of a key that stays begins.
const SHARED: &str = "the data key of its texts";

/// Those of these keys that no row has any more. A conversation that went on meanwhile keeps its key.
pub(super) async fn unused(tx: &mut PgConnection, data_keys: &[String]) -> Result<Vec<String>> {
    Ok(sqlx::query_scalar!(
        r#"select key as "key!" from unnest($1::text[]) key
        where not exists (select from conversation_counters c where c.data_key = key)
        order by 1"#,
        data_keys
    )
    .fetch_all(tx)
    .await?)
}

/// What the receipt says of encrypted texts that stay.
pub(super) async fn notes(
    tx: &mut PgConnection,
    space: &str,
    subject: &Subject,
    conversations: &[String],
) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    let shared = sqlx::query_scalar!(
        r#"select distinct other.conversation_id
        from conversation_counters c
        join conversation_counters other on other.data_key = c.data_key and other.conversation_id <> all($1)
        where c.conversation_id = any($1)
        order by 1
        limit 100"#,
        conversations
    )
    .fetch_all(&mut *tx)
    .await?;
    notes.extend(shared.into_iter().map(|id| {
        format!("{SHARED}, because {id} has it too: backups and WAL can be read until that is erased")
    }));
    let keyed = sqlx::query_scalar!(
        r#"select exists (
            select from conversation_counters where conversation_id = any($1) and data_key is not null) as "keyed!""#,
        conversations
    )
    .fetch_one(&mut *tx)
    .await?;
    if keyed {
        notes.push(
            "in backups of the key store, the wrapped data keys: keep those short. A process may have a key in memory for \
             five minutes more"
                .to_owned(),
        );
    }
    if let Subject::Person { name, .. } = subject {
        let sealed = sqlx::query_scalar!(
            r#"select count(*) as "count!" from conversation_counters
            where space_id = $1 and data_key is not null and conversation_id <> all($2)"#,
            space,
            conversations
        )
        .fetch_one(&mut *tx)
        .await?;
        if sealed > 0 {
            notes.push(format!(
                "what others wrote of {name} in the {sealed} other encrypted conversations: their texts are not searched"
            ));
        }
    }
    Ok(notes)
}

impl Store {
    /// Refuses to erase texts whose keys this process cannot erase.
    pub(super) async fn can_erase(&self, tx: &mut PgConnection, data_keys: &[String]) -> Result<()> {
        if data_keys.is_empty() {
            return Ok(());
        }
        if self.vault.is_open() {
            // Another key store would have nothing to delete, and the texts would stay readable.
            return self.vault.is_ours(tx).await;
        }
        let reason =
            "its texts are encrypted, and without [encryption] in the configuration their key would stay";
        Err(Error::NotErased { reason: reason.to_owned() })
    }
}
