//! The key of a conversation, before a connection for its message is taken.
//!
//! A key store may hang. Few connections are for messages, so none of them waits for it: otherwise a few conversations that are
//! encrypted would keep every message out.

use super::{CALL, Inner, REST, Seal, Vault, in_time};
use crate::pool::Pool;
use crate::wake::NewSession;
use crate::{Error, Result, Store};
use std::time::{Duration, Instant};

/// How many keys may wait for their conversations. Those that are forgotten are pruned.
const MADE: usize = 1000;

/// How long a key waits for its conversation. Much later it may have been pruned.
const WAITS: Duration = Duration::from_secs(60);

impl Inner {
    /// Like [`Inner::is_ours`], and holds no connection while the key store is asked for its owner.
    async fn is_ours_too(&self, pool: &Pool) -> Result<String> {
        let own = match self.installation.get() {
            Some(own) => own.clone(),
            None => self.installation(&mut *pool.acquire().await?).await?,
        };
        if in_time(CALL, self.store.owner()).await?.as_ref() == Some(&own) {
            return Ok(own);
        }
        self.is_ours(&mut *pool.acquire().await?).await
    }

    /// Makes the key of a conversation, for [`Vault::begin`] to take.
    async fn make(&self, pool: &Pool, conversation_id: &str) -> Result<()> {
        if self.known().away.is_some_and(|at| at.elapsed() < REST) {
            return Err(Error::Keys { reason: "it did not answer a moment ago".to_owned() });
        }
        let made = async { self.new_key(self.is_ours_too(pool).await?, conversation_id).await };
        let made = made.await;
        let mut known = self.known();
        known.away = matches!(made, Err(Error::Keys { .. })).then(Instant::now);
        if known.made.len() >= MADE {
            known.made.clear();
        }
        known.made.insert(conversation_id.to_owned(), (made?, Instant::now()));
        Ok(())
    }
}

impl Vault {
    /// Takes the key that was made for this conversation.
    pub(super) fn take_made(&self, conversation_id: &str) -> Option<String> {
        let (key_id, since) = self.inner()?.known().made.remove(conversation_id)?;
        (since.elapsed() < WAITS).then_some(key_id)
    }
}

impl Store {
    /// Asks for the key of the conversation to which a message of `new` goes, and makes it for one that is about to begin. Call this
    /// before a connection for the message is taken.
    ///
    /// # Errors
    /// [`Error::Keys`], [`Error::Database`].
    pub(crate) async fn ready_key(&self, new: &NewSession) -> Result<Seal> {
        let Some(inner) = self.vault.inner() else { return Ok(Seal::default()) };
        let key_id = sqlx::query_scalar!(
            "select data_key from conversation_counters where conversation_id = $1",
            new.conversation_id
        )
        .fetch_optional(&self.pool)
        .await?;
        match key_id {
            Some(key_id) => self.vault.seal(key_id.as_deref()).await,
            None if self.vault.covers(&new.agent) => {
                inner.make(&self.pool, &new.conversation_id).await?;
                Ok(Seal::default())
            }
            None => Ok(Seal::default()),
        }
    }
}
