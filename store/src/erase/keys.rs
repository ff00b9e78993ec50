//! The data keys of what is erased: see [`crate::encryption`].

use super::Subject;
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
        format!("the data key of its texts, because {id} has it too: backups and WAL can be read until that is erased")
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
    pub(super) fn can_erase(&self, data_keys: &[String]) -> Result<()> {
        if data_keys.is_empty() || self.vault.is_open() {
            return Ok(());
        }
        let reason =
            "its texts are encrypted, and without [encryption] in the configuration their key would stay";
        Err(Error::NotErased { reason: reason.to_owned() })
    }
}
