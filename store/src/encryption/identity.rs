//! Whose keys a key store has: it names the installation of one database.
//!
//! A store is refused if it names another installation, or if it names none and lacks the keys of encrypted conversations. A
//! refused store takes no new key and deletes none. So a disk that is not mounted, or a wrong path, does not become a second key
//! store.

use super::{CALL, Inner, WHOLE, in_time};
use crate::{Error, Result, Store};
use sqlx::PgConnection;
use std::time::Duration;

/// How old an unused key must be before it is pruned. A key is written before the row of its conversation commits: that takes as
/// long as a transaction, or as an import of a large bundle.
pub const PRUNED_AFTER: Duration = Duration::from_secs(24 * 3600);

impl Inner {
    /// The id of this database's installation.
    pub(super) async fn installation(&self, connection: &mut PgConnection) -> Result<String> {
        if let Some(known) = self.installation.get() {
            return Ok(known.clone());
        }
        let id =
            sqlx::query_scalar!("select installation_id from installation").fetch_one(connection).await?;
        Ok(self.installation.get_or_init(|| id).clone())
    }

    /// Returns this installation's id if the key store is its own. A store without an owner becomes this installation's if it has the
    /// keys of its conversations, or if there are neither keys nor encrypted conversations.
    ///
    /// # Errors
    /// [`Error::Keys`] for another store.
    pub(super) async fn is_ours(&self, connection: &mut PgConnection) -> Result<String> {
        let own = self.installation(&mut *connection).await?;
        let owner = match in_time(CALL, self.store.owner()).await? {
            Some(owner) => owner,
            None => {
                let used = sqlx::query_scalar!("select some_data_key()").fetch_one(connection).await?;
                let fits = match used {
                    Some(key_id) => in_time(CALL, self.store.get(key_id)).await?.is_some(),
                    None => in_time(WHOLE, self.store.ids()).await?.is_empty(),
                };
                if fits {
                    in_time(CALL, self.store.claim(own.clone())).await?
                } else {
                    // Another process of this installation may have claimed it meanwhile, and made the first key.
                    in_time(CALL, self.store.owner()).await?.ok_or_else(|| {
                        refused("it lacks the keys of the encrypted conversations, or has those of another database")
                    })?
                }
            }
        };
        if owner == own { Ok(own) } else { Err(refused("it has the keys of another database")) }
    }
}

fn refused(why: &str) -> Error {
    Error::Keys { reason: format!("{why}: this is the wrong key store, so it takes no key and deletes none") }
}

impl Store {
    /// Deletes the data keys that no conversation has and that are older than [`PRUNED_AFTER`], or only returns them.
    ///
    /// # Errors
    /// [`Error::Keys`], also for the key store of another database; [`Error::Database`].
    pub async fn prune_keys(&self, dry_run: bool) -> Result<Vec<String>> {
        let inner = self
            .vault
            .inner()
            .ok_or_else(|| Error::Keys { reason: "this process has no [encryption]".to_owned() })?;
        let mut connection = self.pool.acquire().await?;
        inner.is_ours(&mut connection).await?;
        // First the keys, then the rows: a key whose row commits in between is too young.
        let old = in_time(WHOLE, inner.store.older_than(PRUNED_AFTER)).await?;
        let unused = sqlx::query_scalar!(r#"select unused_data_keys($1) as "key!" order by 1"#, &old)
            .fetch_all(&mut *connection)
            .await?;
        drop(connection);
        if !dry_run && !unused.is_empty() {
            self.vault.delete(&unused).await?;
        }
        Ok(unused)
    }
}
