//! Optional encryption of what people and models wrote, so that erasing a key also erases backups and WAL.
//!
//! Each conversation has a data key of its own (AES-256-GCM). Its id stands in the rows of the conversation and of its sessions,
//! from their beginning: a conversation that began in clear stays in clear. A fork has the key of its parent, because it begins
//! with the same sealed rows; an erasure of the parent takes its forks too. The data keys are wrapped by a master key and kept
//! outside the database of the texts (`keys`): there, a deleted key would live on in WAL and backups.
//!
//! Rust code seals before it writes and opens after it has read. SQL sees sealed values only, and copies and joins them as any
//! other text. Only the leaves are sealed (`fields`), so what SQL asks of a row's structure stays answerable.
//!
//! | sealed | in |
//! |---|---|
//! | messages: texts, arguments and results of tools, blocks of providers, names of files | `conversation_records`, `session_inbox`, `session_seed_messages` |
//! | outgoing messages: texts and subjects | `deliveries` |
//! | outcomes of calls, streamed text | `tool_calls`, `generation_chunks` |
//! | files that came with messages, packs of workspaces, outputs that are too long for a message, snapshots of the state | `sealed_blobs` |
//! | state, where replies go, why it failed or is cancelled, the key by which it was begun anew | `conversation_sessions` |
//! | errors; receipts, decisions of people, what did not arrive | `session_runs`, `jobs`, `deliveries`, `tool_calls` |
//! | the journal's words: reasons, errors, what a person was told, values of the state | `session_events` |
//! | keys of messages, subjects of mails, why an audited act was done | `session_inbox`, `mails`, `audit_log` |
//! | answers that name an encrypted session | `idempotency_keys` |
//!
//! A row of several conversations says `[sealed]` in place of their words: `run_failures` and the groups of errors, batches, gates.
//!
//! Not sealed: the agents' prompts and tools (a prefix is shared by sessions), `schedules`, filters, reasons and decisions of batches, of holds and of pauses,
//! addresses and ids of people, names of tools, times, sizes, hashes of arguments and requests, and tasks of Absurd. Equal texts of one conversation
//! are equal when sealed, and a sealed text shows its length.
//!
//! A process keeps up to `KEYS` data keys in memory, each for at most `KEPT`. A key store that cannot be reached is an outage
//! ([`Outage::KeysAway`](crate::Outage::KeysAway)): work waits for it.

mod fields;
mod identity;
mod keys;
mod master;
mod ready;
mod seal;
mod status;
mod token;
mod within;

pub use identity::PRUNED_AFTER;
pub(crate) use seal::{SEALED, Seal};
pub use status::Status;
pub(crate) use token::hide;
pub(crate) use within::{has_words, reason_of_act, seal_in, seal_in_conversation};

use crate::{Error, Result, Store};
use aws_lc_rs::rand;
use keys::KeyStore;
use master::{Master, no_random};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use sqlx::PgConnection;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use token::{DataKey, ID_CHARS, MARK};

/// The most data keys in a process's memory, and for how long one stays there.
const KEYS: usize = 4096;
const KEPT: Duration = Duration::from_secs(300);

/// How long a caller waits for one key, and for a statement over many. A key store that hangs counts as away. Some callers have
/// a transaction open meanwhile, and the server ends one that rests for three seconds (`pool/server.rs`).
const CALL: Duration = Duration::from_secs(2);
const WHOLE: Duration = Duration::from_secs(60);
/// How long a key store that failed to answer is not asked again.
const REST: Duration = Duration::from_millis(500);

/// For how many sessions a process remembers which key they have.
const SESSIONS: usize = 16_384;

/// What `[encryption]` says.
pub struct Settings {
    /// Where the data keys are: `postgres://…`, or a directory.
    pub keys: String,
    /// The agents whose new conversations are encrypted. `None`: all.
    pub agents: Option<Vec<String>>,
    /// It wraps the data keys.
    pub master: [u8; 32],
    /// An earlier master key, which still opens the keys that it wrapped.
    pub old_master: Option<[u8; 32]>,
}

/// A data key as it is kept.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Wrapped {
    key_id: String,
    owner_sha256: String,
    master_id: String,
    #[serde(with = "hexadecimal")]
    wrapped: Vec<u8>,
}

mod hexadecimal {
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex::encode(bytes))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        hex::decode(String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

/// The data keys of this process. Without `[encryption]` it is empty, and everything is in clear.
#[derive(Clone, Default)]
pub(crate) struct Vault(Arc<OnceLock<Inner>>);

struct Inner {
    store: Box<dyn KeyStore>,
    agents: Option<Vec<String>>,
    /// The one that wraps, then the one that still opens.
    masters: Vec<Master>,
    known: Mutex<Known>,
    /// The id of the database's installation.
    installation: OnceLock<String>,
}

/// What is remembered. All of it can be asked for again.
#[derive(Default)]
struct Known {
    keys: HashMap<String, (Arc<DataKey>, Instant)>,
    /// The key of each session; `None` for one in clear. It never changes.
    sessions: HashMap<String, Option<String>>,
    /// Keys that were made for conversations that are about to begin, and when.
    made: HashMap<String, (String, Instant)>,
    /// When the key store failed to answer. Right after that it is not asked again, so that a list waits for it once.
    away: Option<Instant>,
}

impl std::fmt::Debug for Vault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.get().is_some() { "Vault(open)" } else { "Vault(none)" })
    }
}

/// What the key store answers within `limit`.
async fn in_time<T>(limit: Duration, answer: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(limit, answer).await.unwrap_or_else(|_| {
        Err(Error::Keys { reason: format!("it has not answered within {} s", limit.as_secs()) })
    })
}

impl Inner {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn master(&self, id: &str) -> Result<&Master> {
        self.masters.iter().find(|master| master.id == id).ok_or_else(|| Error::Keys {
            reason: format!("a data key is wrapped by the master key {id}, which [encryption] does not have"),
        })
    }

    fn keep(&self, key: &Arc<DataKey>) {
        let mut known = self.known();
        if known.keys.len() >= KEYS {
            let now = Instant::now();
            known.keys.retain(|_, (_, since)| now.duration_since(*since) < KEPT / 2);
            if known.keys.len() >= KEYS {
                known.keys.clear();
            }
        }
        known.keys.insert(key.id.clone(), (Arc::clone(key), Instant::now()));
    }

    async fn key(&self, key_id: &str) -> Result<Arc<DataKey>> {
        if let Some((key, since)) = self.known().keys.get(key_id)
            && since.elapsed() < KEPT
        {
            return Ok(Arc::clone(key));
        }
        // A key store that lacks the key may be another one, or an older copy: work waits for the right one. An erasure takes the
        // rows before the key, so a worker never reads a session whose key was erased, except in a restored backup.
        if self.known().away.is_some_and(|at| at.elapsed() < REST) {
            return Err(Error::Keys { reason: "it did not answer a moment ago".to_owned() });
        }
        let answer = in_time(CALL, self.store.get(key_id.to_owned())).await;
        self.known().away = matches!(answer, Err(Error::Keys { .. })).then(Instant::now);
        let wrapped = answer?.ok_or_else(|| Error::Keys {
            reason: format!("it has no data key {key_id}: the key was erased, or this is another key store"),
        })?;
        let secret = self.master(&wrapped.master_id)?.unwrap(&wrapped)?;
        let key = Arc::new(DataKey::new(&wrapped, &secret)?);
        self.keep(&key);
        Ok(key)
    }

    /// Makes a data key of the installation `ours`.
    async fn new_key(&self, ours: String, conversation_id: &str) -> Result<String> {
        let (mut id, mut secret) = ([0; ID_CHARS / 2], [0; 32]);
        rand::fill(&mut id).map_err(|_| no_random())?;
        rand::fill(&mut secret).map_err(|_| no_random())?;
        let owner = hex::encode(Sha256::digest(conversation_id));
        let wrapped = self.masters[0].wrap(hex::encode(id), owner, &secret)?;
        let key = Arc::new(DataKey::new(&wrapped, &secret)?);
        let id = wrapped.key_id.clone();
        if !in_time(CALL, self.store.put(ours, wrapped)).await? {
            return Err(Error::Keys {
                reason: "it was replaced by another key store a moment ago".to_owned(),
            });
        }
        self.keep(&key);
        Ok(id)
    }
}

impl Vault {
    fn inner(&self) -> Option<&Inner> {
        self.0.get()
    }

    /// Returns whether this process has `[encryption]`.
    pub fn is_open(&self) -> bool {
        self.inner().is_some()
    }

    /// Whether a new conversation of this agent is encrypted.
    pub fn covers(&self, agent: &str) -> bool {
        self.inner().is_some_and(|inner| {
            inner.agents.as_ref().is_none_or(|agents| agents.iter().any(|one| one == agent))
        })
    }

    /// What texts that are compared across conversations leave in a row: a hash that only the master key makes. Without `[encryption]`
    /// the text as it is.
    pub fn mac(&self, text: &str) -> String {
        self.inner().map_or_else(|| text.to_owned(), |inner| inner.masters[0].mac(text))
    }

    /// What [`Vault::mac`] may have left of `text` in a row: by each master key, and before `[encryption]` was set.
    pub fn macs(&self, text: &str) -> Vec<String> {
        let masters = self.inner().map(|inner| &*inner.masters).unwrap_or_default();
        masters.iter().map(|master| master.mac(text)).chain([text.to_owned()]).collect()
    }

    /// Makes the data key of a conversation that is about to begin, or takes the one that [`Store::ready_key`] has made. `None`:
    /// it is to be in clear.
    ///
    /// # Errors
    /// [`Error::Keys`].
    pub async fn begin(
        &self,
        connection: &mut PgConnection,
        agent: &str,
        conversation_id: &str,
    ) -> Result<Option<String>> {
        match self.inner() {
            Some(inner) if self.covers(agent) => {
                if let Some(made) = self.take_made(conversation_id) {
                    return Ok(Some(made));
                }
                let ours = inner.is_ours(connection).await?;
                inner.new_key(ours, conversation_id).await.map(Some)
            }
            Some(_) | None => Ok(None),
        }
    }

    /// What seals and opens the texts of a row that has this key.
    ///
    /// # Errors
    /// [`Error::Keys`], also for a key that the key store lacks, and if this process has no `[encryption]`.
    pub async fn seal(&self, key_id: Option<&str>) -> Result<Seal> {
        let Some(key_id) = key_id else { return Ok(Seal::default()) };
        let Some(inner) = self.inner() else {
            let reason = "the conversation is encrypted, and this process has no [encryption]".to_owned();
            return Err(Error::Keys { reason });
        };
        Ok(Seal(Some(inner.key(key_id).await?)))
    }

    /// What is known of a session without a question. `None`: nothing.
    pub fn known(&self, session_id: &str) -> Option<Seal> {
        let Some(inner) = self.inner() else { return Some(Seal::default()) };
        let known = inner.known();
        match known.sessions.get(session_id)? {
            None => Some(Seal::default()),
            Some(key_id) => {
                let (key, since) = known.keys.get(key_id)?;
                (since.elapsed() < KEPT).then(|| Seal(Some(Arc::clone(key))))
            }
        }
    }

    /// Remembers which key a session has.
    pub fn learn(&self, session_id: &str, key_id: Option<&str>) {
        let Some(inner) = self.inner() else { return };
        let mut known = inner.known();
        if known.sessions.len() >= SESSIONS {
            known.sessions.clear();
        }
        if !known.sessions.contains_key(session_id) {
            known.sessions.insert(session_id.to_owned(), key_id.map(str::to_owned));
        }
    }

    /// Returns whether the key store is this database's. Without `[encryption]` there is none to ask.
    ///
    /// # Errors
    /// [`Error::Keys`] for another one, [`Error::Database`].
    pub async fn is_ours(&self, connection: &mut PgConnection) -> Result<()> {
        match self.inner() {
            Some(inner) => inner.is_ours(connection).await.map(drop),
            None => Ok(()),
        }
    }

    /// Deletes data keys, and returns how many there were. The caller has asked whether the store is this database's.
    ///
    /// # Errors
    /// [`Error::Keys`], also if this process has no `[encryption]`.
    pub async fn delete(&self, key_ids: &[String]) -> Result<u64> {
        if key_ids.is_empty() {
            return Ok(0);
        }
        let Some(inner) = self.inner() else {
            let reason = "data keys are to be erased, and this process has no [encryption]".to_owned();
            return Err(Error::Keys { reason });
        };
        let erased = in_time(WHOLE, inner.store.delete(key_ids.to_vec())).await?;
        let mut known = inner.known();
        for key_id in key_ids {
            known.keys.remove(key_id);
        }
        Ok(erased)
    }
}

impl Store {
    /// Turns encryption on for this process. Call it right after [`Store::connect`].
    ///
    /// # Errors
    /// [`Error::Keys`] for a place that cannot hold keys.
    pub fn encrypt(&self, settings: Settings) -> Result<()> {
        let masters = std::iter::once(settings.master).chain(settings.old_master);
        let inner = Inner {
            store: keys::open(&settings.keys)?,
            agents: settings.agents,
            masters: masters.map(|secret| Master::new(&secret)).collect::<Result<_>>()?,
            known: Mutex::default(),
            installation: OnceLock::new(),
        };
        self.vault.0.set(inner).map_err(|_| Error::Keys { reason: "encryption is on already".to_owned() })?;
        within::announce(&self.vault);
        Ok(())
    }

    /// What seals and opens the texts of a session. Without `[encryption]` this asks nothing, and everything is as it is stored.
    ///
    /// # Errors
    /// [`Error::Keys`], [`Error::Database`].
    pub(crate) async fn seal_of(&self, session_id: &str) -> Result<Seal> {
        if let Some(seal) = self.vault.known(session_id) {
            return Ok(seal);
        }
        let key = sqlx::query_scalar!(
            "select data_key from conversation_sessions where session_id = $1",
            session_id
        )
        .fetch_optional(&self.pool)
        .await?;
        // A session that does not exist may be made in a moment.
        let Some(key_id) = key else { return Ok(Seal::default()) };
        self.vault.learn(session_id, key_id.as_deref());
        self.vault.seal(key_id.as_deref()).await
    }

    /// Like [`Store::seal_of`], for one row of several: the key of one session must not keep the others from being shown. `None`: the
    /// key cannot be had.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub(crate) async fn seal_of_row(&self, session_id: &str) -> Result<Option<Seal>> {
        match self.seal_of(session_id).await {
            Ok(seal) => Ok(Some(seal)),
            Err(Error::Keys { .. } | Error::Corrupt { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the key of this session is lost: the key store is this database's, it answers, and it does not have the key. Then waiting
    /// brings nothing.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub(crate) async fn key_is_lost(&self, session_id: &str) -> Result<bool> {
        let Some(inner) = self.vault.inner() else { return Ok(false) };
        if inner.known().away.is_some() {
            return Ok(false);
        }
        let mut connection = self.pool.acquire().await?;
        let key = sqlx::query_scalar!(
            "select data_key from conversation_sessions where session_id = $1",
            session_id
        )
        .fetch_optional(&mut *connection)
        .await?;
        let Some(key_id) = key.flatten() else { return Ok(false) };
        let lost = async {
            inner.is_ours(&mut connection).await?;
            Ok(in_time(CALL, inner.store.get(key_id)).await?.is_none())
        };
        match lost.await {
            Err(Error::Keys { .. } | Error::Corrupt { .. }) => Ok(false),
            lost => lost,
        }
    }

    /// Like [`Store::seal_of`], and refuses an encrypted session if this process has no `[encryption]`: what it would derive from
    /// sealed texts would be wrong.
    ///
    /// # Errors
    /// [`Error::Keys`], [`Error::Database`].
    pub(crate) async fn own_seal_of(&self, session_id: &str) -> Result<Seal> {
        if self.vault.is_open() {
            return self.seal_of(session_id).await;
        }
        let key_id = sqlx::query_scalar!(
            "select data_key from conversation_sessions where session_id = $1",
            session_id
        )
        .fetch_optional(&self.pool)
        .await?;
        self.vault.seal(key_id.flatten().as_deref()).await
    }

    /// Like [`Store::seal_of`], for what belongs to a conversation.
    ///
    /// # Errors
    /// [`Error::Keys`], [`Error::Database`].
    pub(crate) async fn seal_of_conversation(&self, conversation_id: &str) -> Result<Seal> {
        if !self.vault.is_open() {
            return Ok(Seal::default());
        }
        let key_id = sqlx::query_scalar!(
            "select data_key from conversation_counters where conversation_id = $1",
            conversation_id
        )
        .fetch_optional(&self.pool)
        .await?
        .flatten();
        self.vault.seal(key_id.as_deref()).await
    }
}

/// Reads a master key: 32 bytes in base64.
///
/// # Errors
/// [`Error::Keys`] if `text` is not that.
pub fn master_key(text: &str) -> Result<[u8; 32]> {
    use base64::Engine;
    let bytes = base64::engine::general_purpose::STANDARD.decode(text.trim());
    let key = bytes.ok().and_then(|bytes| bytes.try_into().ok());
    key.ok_or_else(|| Error::Keys { reason: "the master key is not 32 bytes in base64".to_owned() })
}

/// A key store's place, as a hash under a master key.
///
/// # Errors
/// [`Error::Corrupt`] for a master key that cannot be used.
pub fn name_of_store(place: &str, master: &[u8; 32]) -> Result<String> {
    Ok(Master::new(master)?.mac(place.trim_end_matches('/')))
}

/// Returns whether a text may have sealed values in it.
pub(crate) fn may_be_sealed(text: &str) -> bool {
    text.contains(MARK)
}

#[cfg(test)]
#[path = "encryption/tests.rs"]
mod tests;
