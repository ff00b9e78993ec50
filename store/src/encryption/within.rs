//! Sealing inside a transaction, and opening what stands in a row of several conversations.
//!
//! A function that writes into a session inside its caller's transaction (a journal entry, a decision) has a connection and no
//! [`Store`]. It asks here: the vaults of this process are known, as `[encryption]` is the process's. Without one nothing is
//! asked.

use super::token::MARK;
use super::{Inner, SEALED, Seal, Vault, fields, hide};
use crate::{Error, Result, Store};
use serde_json::Value;
use sqlx::PgConnection;
use std::sync::{OnceLock, PoisonError, RwLock, Weak};
use wakeful_workflow::event::Event;

/// The vaults of this process: one, except in tests.
static VAULTS: RwLock<Vec<Weak<OnceLock<Inner>>>> = RwLock::new(Vec::new());

/// Makes a vault known.
pub(super) fn announce(vault: &Vault) {
    let mut vaults = VAULTS.write().unwrap_or_else(PoisonError::into_inner);
    vaults.retain(|vault| vault.strong_count() > 0);
    vaults.push(std::sync::Arc::downgrade(&vault.0));
}

fn vaults() -> Vec<Vault> {
    let vaults = VAULTS.read().unwrap_or_else(PoisonError::into_inner);
    vaults.iter().filter_map(Weak::upgrade).map(Vault).collect()
}

/// What seals under this key. `None`: it is in clear.
async fn seal(vaults: &[Vault], key_id: Option<&str>) -> Result<Seal> {
    let Some(key_id) = key_id else { return Ok(Seal::default()) };
    let mut failed = None;
    for vault in vaults {
        match vault.seal(Some(key_id)).await {
            Ok(seal) => return Ok(seal),
            Err(error) => failed = Some(error),
        }
    }
    Err(failed.unwrap_or_else(|| Error::Keys { reason: "this process has no [encryption]".to_owned() }))
}

/// What seals the texts of a session, asked for inside a transaction.
///
/// # Errors
/// [`Error::Keys`], [`Error::Database`].
pub(crate) async fn seal_in(tx: &mut PgConnection, session_id: &str) -> Result<Seal> {
    let vaults = vaults();
    if vaults.is_empty() {
        return Ok(Seal::default());
    }
    let known = vaults.iter().find_map(|vault| vault.known(session_id).filter(Seal::is_on));
    if let Some(seal) = known {
        return Ok(seal);
    }
    let key_id =
        sqlx::query_scalar!("select data_key from conversation_sessions where session_id = $1", session_id)
            .fetch_optional(tx)
            .await?
            .flatten();
    seal(&vaults, key_id.as_deref()).await
}

/// Like [`seal_in`], for what belongs to a conversation.
///
/// # Errors
/// [`Error::Keys`], [`Error::Database`].
pub(crate) async fn seal_in_conversation(tx: &mut PgConnection, conversation_id: &str) -> Result<Seal> {
    let vaults = vaults();
    if vaults.is_empty() {
        return Ok(Seal::default());
    }
    let key_id = sqlx::query_scalar!(
        "select data_key from conversation_counters where conversation_id = $1",
        conversation_id
    )
    .fetch_optional(tx)
    .await?
    .flatten();
    seal(&vaults, key_id.as_deref()).await
}

/// Returns whether one of these entries has words that an encrypted session would have to seal.
pub(crate) fn has_words(events: &[Event]) -> bool {
    events.iter().any(|event| {
        let (kind, payload) = event.to_row();
        fields::has_words(&kind, &payload)
    })
}

/// Why an audited act was done, as it is written: sealed if the act is about an encrypted conversation.
///
/// # Errors
/// A [`sqlx::Error`]. A key that cannot be had keeps the words away, and the act goes on.
pub(crate) async fn reason_of_act(
    connection: &mut PgConnection,
    target: Option<&str>,
    reason: Option<String>,
) -> std::result::Result<Option<String>, sqlx::Error> {
    let (vaults, Some(target), Some(reason)) = (vaults(), target, reason.as_deref()) else {
        return Ok(reason);
    };
    if vaults.is_empty() {
        return Ok(Some(reason.to_owned()));
    }
    let key_id = key_of_target(connection, target).await?;
    Ok(Some(match seal(&vaults, key_id.as_deref()).await {
        Ok(seal) => seal.text(reason).into_owned(),
        Err(_) => SEALED.to_owned(),
    }))
}

/// The key of what an act is about: a session, a delivery or a conversation.
async fn key_of_target(
    connection: &mut PgConnection,
    target: &str,
) -> std::result::Result<Option<String>, sqlx::Error> {
    let key_id = sqlx::query_scalar!(
        r#"select data_key as "data_key?" from conversation_sessions where session_id = $1
        union all
        select s.data_key from deliveries d join conversation_sessions s on s.session_id = d.session_id
        where d.delivery_id = $1
        union all
        select c.data_key from conversation_counters c where c.conversation_id = $1
        limit 1"#,
        target
    )
    .fetch_optional(connection)
    .await?;
    Ok(key_id.flatten())
}

impl Store {
    /// What the log says in place of words that may quote an encrypted session: `session_id`, or any for `None`. The session's journal and
    /// row have them.
    pub fn in_log<'t>(&self, session_id: Option<&str>, words: &'t str) -> &'t str {
        let sealed = match session_id {
            Some(session_id) => self.vault.known(session_id).is_none_or(|seal| seal.is_on()),
            None => self.vault.is_open(),
        };
        if sealed { SEALED } else { words }
    }

    /// Opens the words in a row of a list, by the key of the session that the row belongs to. Never by the key that a sealed value
    /// names: a person with a sealed value out of a backup could put it into a text of their own, and read it here. A value that does not
    /// open is shown as a word.
    pub(crate) async fn reveal(&self, session_id: Option<&str>, text: String) -> String {
        if !text.contains(MARK) {
            return text;
        }
        let seal = self.seal_of_list(session_id).await;
        hide(&seal.open(text.clone()).unwrap_or(text))
    }

    /// Like [`Store::reveal`], for JSON.
    pub(crate) async fn reveal_value(&self, session_id: Option<&str>, value: Value) -> Value {
        if !value.to_string().contains(MARK) {
            return value;
        }
        let seal = self.seal_of_list(session_id).await;
        let open = seal.open_value(value.clone()).unwrap_or(value);
        serde_json::from_str(&hide(&open.to_string())).unwrap_or_default()
    }

    /// Like [`Store::reveal`], for a text that may be missing.
    pub(crate) async fn reveal_some(&self, session_id: Option<&str>, text: Option<String>) -> Option<String> {
        match text {
            Some(text) => Some(self.reveal(session_id, text).await),
            None => None,
        }
    }

    /// Like [`Store::reveal_some`], for a reason that [`reason_of_act`] has written.
    pub(crate) async fn reveal_reason(&self, target: Option<&str>, reason: Option<String>) -> Option<String> {
        let reason = reason?;
        if !reason.contains(MARK) {
            return Some(reason);
        }
        let seal = match (self.pool.of_installation().acquire().await, target) {
            (Ok(mut connection), Some(target)) => match key_of_target(&mut connection, target).await {
                Ok(key_id) => self.vault.seal(key_id.as_deref()).await.unwrap_or_default(),
                Err(_) => Seal::default(),
            },
            _ => Seal::default(),
        };
        Some(hide(&seal.open(reason.clone()).unwrap_or(reason)))
    }

    /// What opens the words of this session; nothing, if its key cannot be had.
    async fn seal_of_list(&self, session_id: Option<&str>) -> Seal {
        match session_id {
            Some(session_id) => self.seal_of(session_id).await.unwrap_or_default(),
            None => Seal::default(),
        }
    }

    /// An error of a job as it is written to the job's row: sealed by the key of its conversation. Where that key cannot be had, the
    /// row says so instead.
    pub(crate) async fn sealed_for_job(&self, job_id: i64, error: &str) -> Result<String> {
        let error = crate::error::bounded(error);
        if !self.vault.is_open() {
            return Ok(error);
        }
        let key_id = sqlx::query_scalar!(
            "select c.data_key from jobs j join conversation_counters c on c.conversation_id = j.conversation_id
            where j.job_id = $1",
            job_id
        )
        .fetch_optional(&self.pool)
        .await?
        .flatten();
        Ok(match self.vault.seal(key_id.as_deref()).await {
            Ok(seal) => seal.text(&error).into_owned(),
            Err(away) => away.to_string(),
        })
    }
}
