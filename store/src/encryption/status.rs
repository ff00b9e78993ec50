//! What operators see of the data keys, and a new master key for them.

use super::{CALL, WHOLE, in_time};
use crate::{Error, Result, Store};
use serde::Serialize;
use std::collections::BTreeMap;

/// The data keys as `wakeful encryption status` shows them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Conversations whose texts are sealed, and all conversations.
    pub sealed_conversations: i64,
    pub conversations: i64,
    /// Data keys in the key store.
    pub keys: usize,
    /// How many of them each master key wraps, by its id.
    pub by_master: BTreeMap<String, usize>,
    /// The master key that wraps new ones.
    pub master_id: String,
    /// Keys of the database's rows that the key store lacks: their texts are lost.
    pub missing: Vec<String>,
    /// Keys that no conversation has: a conversation was not made after all, or a backup brought them back.
    pub unused: Vec<String>,
}

impl Store {
    /// The data keys, and how they fit the rows of the database.
    ///
    /// # Errors
    /// [`Error::Keys`], [`Error::Database`].
    pub async fn encryption_status(&self) -> Result<Status> {
        let counts = sqlx::query!(
            r#"select count(*) as "all!", count(data_key) as "sealed!" from conversation_counters"#
        )
        .fetch_one(&self.pool)
        .await?;
        let mut status =
            Status { sealed_conversations: counts.sealed, conversations: counts.all, ..Status::default() };
        let Some(inner) = self.vault.inner() else { return Ok(status) };
        status.master_id.clone_from(&inner.masters[0].id);
        let ids = in_time(WHOLE, inner.store.ids()).await?;
        status.keys = ids.len();
        for id in &ids {
            if let Some(key) = in_time(CALL, inner.store.get(id.clone())).await? {
                *status.by_master.entry(key.master_id).or_default() += 1;
            }
        }
        let used = sqlx::query_scalar!(
            r#"select distinct data_key as "data_key!" from conversation_counters where data_key is not null order by 1"#
        )
        .fetch_all(&self.pool)
        .await?;
        status.missing = used.iter().filter(|id| ids.binary_search(id).is_err()).cloned().collect();
        status.unused = ids.into_iter().filter(|id| used.binary_search(id).is_err()).collect();
        Ok(status)
    }

    /// Wraps every data key by the first master key. No row of the database changes. Returns how many were wrapped anew. Safe to
    /// repeat.
    ///
    /// # Errors
    /// [`Error::Keys`], [`Error::Corrupt`].
    pub async fn rotate_master_key(&self) -> Result<usize> {
        let inner = self
            .vault
            .inner()
            .ok_or_else(|| Error::Keys { reason: "this process has no [encryption]".to_owned() })?;
        let new = &inner.masters[0];
        let mut wrapped = 0;
        for id in in_time(WHOLE, inner.store.ids()).await? {
            let Some(key) = in_time(CALL, inner.store.get(id)).await? else { continue };
            if key.master_id != new.id {
                let secret = inner.master(&key.master_id)?.unwrap(&key)?;
                let again = new.wrap(key.key_id, key.owner_sha256, &secret)?;
                // An erasure may have deleted it meanwhile, and it must stay away.
                wrapped += usize::from(in_time(CALL, inner.store.replace(key.master_id, again)).await?);
            }
        }
        Ok(wrapped)
    }
}
