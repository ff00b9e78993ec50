//! The first answer to each request with an idempotency key. Any process can repeat it.
//!
//! A request claims its key before it does anything, and writes its answer when it has one. An answer is not part of the
//! request's own commit. So if a process dies between the two, or answers with a fault of its own, the key is free again after
//! [`AT_WORK`], and the same request runs once more: what it does has to bear that, as it has to without a key. A request that
//! takes long keeps its key by renewing it.

use crate::{Result, Store, new_id};
use std::borrow::Cow;
use std::time::Duration;

/// For how long an answer is repeated.
pub const KEPT: Duration = Duration::from_secs(24 * 3600);
/// For how long a request that does not renew its key keeps it.
pub const AT_WORK: Duration = Duration::from_secs(120);
/// How often a request that is at work renews its key.
pub const RENEW: Duration = Duration::from_secs(30);
/// How many old keys one statement forgets.
const FORGOTTEN: i64 = 1000;

/// A request, by its key.
#[derive(Clone, Copy, Debug)]
pub struct Keyed<'a> {
    pub space_id: &'a str,
    pub principal: &'a str,
    pub key: &'a str,
    /// Method and path.
    pub request: &'a str,
    pub body_sha256: &'a [u8],
}

/// What is known of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyUse {
    /// It is this request's from now on.
    Claimed { claim: String },
    /// The same request was answered so.
    Answered { status: u16, answer: String },
    /// The same request is at work.
    AtWork,
    /// Another request has it.
    Other,
}

impl Store {
    /// Claims the key for this request, or says what is known of it.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn claim_key(&self, keyed: &Keyed<'_>) -> Result<KeyUse> {
        let claim = new_id("claim");
        // Two requests that come together meet at the row, and the second sees what the first has written.
        let claimed = sqlx::query_scalar!(
            "insert into idempotency_keys
                (space_id, principal, key, request, body_sha256, claim, claimed_until, expires_at)
            values ($1, $2, $3, $4, $5, $6, clock_timestamp() + make_interval(secs => $7),
                clock_timestamp() + make_interval(secs => $8))
            on conflict (space_id, principal, key) do update
            set request = excluded.request, body_sha256 = excluded.body_sha256, claim = excluded.claim,
                claimed_until = excluded.claimed_until, expires_at = excluded.expires_at, status = null, answer = null
            where idempotency_keys.expires_at < clock_timestamp()
                or idempotency_keys.status is null and idempotency_keys.claimed_until < clock_timestamp()
            returning claim",
            keyed.space_id,
            keyed.principal,
            keyed.key,
            keyed.request,
            keyed.body_sha256,
            claim,
            AT_WORK.as_secs_f64(),
            KEPT.as_secs_f64()
        )
        .fetch_optional(&self.pool)
        .await?;
        if let Some(claim) = claimed {
            return Ok(KeyUse::Claimed { claim });
        }
        let known = sqlx::query!(
            "select request, body_sha256, status, answer from idempotency_keys
            where space_id = $1 and principal = $2 and key = $3",
            keyed.space_id,
            keyed.principal,
            keyed.key
        )
        .fetch_optional(&self.pool)
        .await?;
        Ok(match known {
            // The first one was refused a moment ago and gave it back: the next try gets it.
            None => KeyUse::AtWork,
            Some(known) if known.request != keyed.request || known.body_sha256 != keyed.body_sha256 => {
                KeyUse::Other
            }
            Some(known) => match known.status.and_then(|status| u16::try_from(status).ok()) {
                Some(status) => {
                    let answer = known.answer.unwrap_or_default();
                    // A sealed answer stands behind the ids of the sessions that it names.
                    let answer = match answer.split_once(' ') {
                        Some((ids, sealed)) if ids.starts_with("sess_") => {
                            // It is sealed by the key of the first.
                            self.reveal(ids.split(',').next(), sealed.to_owned()).await
                        }
                        _ => answer,
                    };
                    KeyUse::Answered { status, answer }
                }
                None => KeyUse::AtWork,
            },
        })
    }

    /// Writes the answer, unless another request has taken the key over.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn answer_key(&self, keyed: &Keyed<'_>, claim: &str, status: u16, answer: &str) -> Result<()> {
        let answer = self.sealed_answer(keyed.request, answer).await?;
        sqlx::query!(
            "update idempotency_keys set status = $5, answer = $6
            where space_id = $1 and principal = $2 and key = $3 and claim = $4",
            keyed.space_id,
            keyed.principal,
            keyed.key,
            claim,
            i32::from(status),
            &*answer
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// The answer as it is kept: sealed by the key of the first encrypted session that the request or the answer names. The ids of such
    /// sessions stand before it, so that an erasure finds the row.
    async fn sealed_answer<'a>(&self, request: &str, answer: &'a str) -> Result<Cow<'a, str>> {
        if !self.vault.is_open() {
            return Ok(Cow::Borrowed(answer));
        }
        let named = sqlx::query!(
            r#"select distinct s.session_id, s.data_key as "data_key!"
            from regexp_matches($1, 'sess_[0-9a-f]+', 'g') as named
            join conversation_sessions s on s.session_id = named[1]
            where s.data_key is not null
            order by s.session_id
            limit 100"#,
            format!("{request} {answer}")
        )
        .fetch_all(&self.pool)
        .await?;
        let Some(first) = named.first() else { return Ok(Cow::Borrowed(answer)) };
        let seal = self.vault.seal(Some(&first.data_key)).await?;
        let ids: Vec<&str> = named.iter().map(|one| one.session_id.as_str()).collect();
        Ok(Cow::Owned(format!("{} {}", ids.join(","), seal.text(answer))))
    }

    /// Keeps the key for the request for longer.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn renew_key(&self, keyed: &Keyed<'_>, claim: &str) -> Result<()> {
        sqlx::query!(
            "update idempotency_keys set claimed_until = clock_timestamp() + make_interval(secs => $5)
            where space_id = $1 and principal = $2 and key = $3 and claim = $4",
            keyed.space_id,
            keyed.principal,
            keyed.key,
            claim,
            AT_WORK.as_secs_f64()
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Gives the key back: the request changed nothing.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn free_key(&self, keyed: &Keyed<'_>, claim: &str) -> Result<()> {
        sqlx::query!(
            "delete from idempotency_keys
            where space_id = $1 and principal = $2 and key = $3 and claim = $4 and status is null",
            keyed.space_id,
            keyed.principal,
            keyed.key,
            claim
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Forgets all keys whose time is over, of all spaces that the caller sees. Returns how many.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn forget_keys(&self) -> Result<u64> {
        let mut forgotten = 0;
        loop {
            let page = self.forget_some_keys().await?;
            forgotten += page;
            if page < FORGOTTEN as u64 {
                return Ok(forgotten);
            }
        }
    }

    async fn forget_some_keys(&self) -> Result<u64> {
        let forgotten = sqlx::query!(
            "delete from idempotency_keys
            where (space_id, principal, key) in (
                select space_id, principal, key from idempotency_keys
                where expires_at < now()
                limit $1
                for update skip locked
            )",
            FORGOTTEN
        )
        .execute(&self.pool)
        .await?;
        Ok(forgotten.rows_affected())
    }
}
