//! Tokens of the HTTP interface: made, found, listed, revoked; and the key that signs the tokens of users.
//!
//! A token is `wkt_`, its public id, `_`, and 256 random bits in hex. Only the SHA-256 of those bits is stored. A request
//! costs one read by the primary key, so a revoked token is refused at once by every process.

mod user;

pub(crate) use user::Key;
pub use user::{UserClaims, UserToken, is_user_token};

use crate::audit::act;
use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;
use sha2::Digest;
use std::time::Duration;
use tokio::sync::Semaphore;
use tracing::debug;
use wakeful_workflow::access::Scope;

/// What every token begins with.
pub const PREFIX: &str = "wkt_";
/// The public part of a token has this many hexadecimal digits.
const ID_DIGITS: usize = 16;
/// How exact the time of the last use is: a request writes it only if what is stored is older than this.
const USE_EVERY: Duration = Duration::from_secs(60);

/// How long a request waits until its token is looked up.
const WAITS: Duration = Duration::from_secs(2);

/// Bounds how many tokens are looked up at once. Strangers can send as many forged ones as they like, and must not take
/// the connections that workers and readers need.
#[derive(Debug)]
pub(crate) struct Lookups(Semaphore);

impl Lookups {
    /// Up to half of the connections that statements may have.
    pub(crate) fn new(connections: usize) -> Lookups {
        Lookups(Semaphore::new((connections / 2).max(1)))
    }
}

/// A token as it is shown: everything but its secret.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Token {
    /// Public; the token itself begins with `wkt_` and the digits of this id.
    pub token_id: String,
    pub name: Option<String>,
    pub scope: Scope,
    /// `None`: a token of the whole installation.
    pub space_id: Option<String>,
    pub agent: Option<String>,
    pub created_at: DateTime<Utc>,
    pub expires_at: Option<DateTime<Utc>>,
    pub revoked_at: Option<DateTime<Utc>>,
    /// To the minute.
    pub last_used_at: Option<DateTime<Utc>>,
}

/// A token to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewToken {
    pub scope: Scope,
    pub space_id: Option<String>,
    pub agent: Option<String>,
    pub name: Option<String>,
    pub expires_in: Option<Duration>,
}

/// What a presented token is.
#[derive(Clone, Debug, PartialEq)]
pub enum Presented {
    Valid(Token),
    /// It was valid once.
    Expired,
    Revoked,
    /// No token has this id and this secret.
    Unknown,
}

struct Row {
    token_id: String,
    name: Option<String>,
    scope: String,
    space_id: Option<String>,
    agent: Option<String>,
    created_at: DateTime<Utc>,
    expires_at: Option<DateTime<Utc>>,
    revoked_at: Option<DateTime<Utc>>,
    last_used_at: Option<DateTime<Utc>>,
}

impl Row {
    fn token(self) -> Result<Token> {
        Ok(Token {
            scope: Scope::parse(&self.scope).ok_or_else(|| Error::corrupt("token scope", &self.scope))?,
            token_id: self.token_id,
            name: self.name,
            space_id: self.space_id,
            agent: self.agent,
            created_at: self.created_at,
            expires_at: self.expires_at,
            revoked_at: self.revoked_at,
            last_used_at: self.last_used_at,
        })
    }
}

/// The token's columns of a row that has others too.
macro_rules! token_row {
    ($row:ident) => {
        Row {
            token_id: $row.token_id,
            name: $row.name,
            scope: $row.scope,
            space_id: $row.space_id,
            agent: $row.agent,
            created_at: $row.created_at,
            expires_at: $row.expires_at,
            revoked_at: $row.revoked_at,
            last_used_at: $row.last_used_at,
        }
    };
}

impl Store {
    /// Makes a token. The text that is returned with it is kept nowhere.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn create_token(&self, new: &NewToken) -> Result<(Token, String)> {
        let (id, secret) = (hex::encode(random::<{ ID_DIGITS / 2 }>()?), hex::encode(random::<32>()?));
        let seconds = new.expires_in.map(|after| after.as_secs_f64());
        let mut tx = self.pool.begin().await?;
        let row = sqlx::query_as!(
            Row,
            "insert into api_tokens (token_id, name, scope, space_id, agent, secret_sha256, expires_at)
            values ($1, $2, $3, $4, $5, $6, now() + make_interval(secs => $7::float8))
            returning token_id, name, scope, space_id, agent, created_at, expires_at, revoked_at, last_used_at",
            format!("tok_{id}"),
            new.name,
            new.scope.as_str(),
            new.space_id,
            new.agent,
            hash(&secret),
            seconds
        )
        .fetch_one(&mut *tx)
        .await?;
        act::on(&row.token_id);
        tx.commit().await?;
        Ok((row.token()?, format!("{PREFIX}{id}_{secret}")))
    }

    /// Tokens, of all spaces or of one, newest first. `before` is the last token of the page before.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn tokens(&self, space: Option<&str>, before: Option<&str>, limit: i64) -> Result<Vec<Token>> {
        let rows = sqlx::query_as!(
            Row,
            "select token_id, name, scope, space_id, agent, created_at, expires_at, revoked_at, last_used_at
            from api_tokens
            where ($1::text is null or (created_at, token_id)
                    < (select b.created_at, b.token_id from api_tokens b where b.token_id = $1))
                and ($3::text is null or space_id = $3)
            order by created_at desc, token_id desc
            limit $2",
            before,
            limit,
            space
        )
        .fetch_all(&self.pool)
        .await?;
        rows.into_iter().map(Row::token).collect()
    }

    /// Revokes a token, of any space or of one: from now on every process refuses it. `false`: it was revoked before.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Database`].
    pub async fn revoke_token(&self, space: Option<&str>, token_id: &str) -> Result<(Token, bool)> {
        let mut tx = self.pool.begin().await?;
        let row = sqlx::query!(
            r#"with was as (
                select token_id, revoked_at is null as in_force from api_tokens
                where token_id = $1 and ($2::text is null or space_id = $2)
                for update
            )
            update api_tokens t
            set revoked_at = coalesce(t.revoked_at, clock_timestamp())
            from was
            where t.token_id = was.token_id
            returning t.token_id, t.name, t.scope, t.space_id, t.agent, t.created_at, t.expires_at, t.revoked_at,
                t.last_used_at, was.in_force as "in_force!""#,
            token_id,
            space
        )
        .fetch_optional(&mut *tx)
        .await?
        .ok_or_else(|| Error::NotFound { what: "token", id: token_id.to_owned() })?;
        tx.commit().await?;
        let token = token_row!(row);
        Ok((token.token()?, row.in_force))
    }

    /// Looks up what a caller presents. One read by the primary key.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn find_token(&self, presented: &str) -> Result<Presented> {
        let Some((id, secret)) = parts(presented) else { return Ok(Presented::Unknown) };
        let Some((token, given)) = self.token_row(&format!("tok_{id}")).await? else {
            return Ok(Presented::Unknown);
        };
        // Only the owner of the secret learns more than that the token is unknown.
        if aws_lc_rs::constant_time::verify_slices_are_equal(&given, &hash(secret)).is_err() {
            return Ok(Presented::Unknown);
        }
        let found = in_force(token);
        if let Presented::Valid(token) = &found {
            self.note_use(token).await;
        }
        Ok(found)
    }

    /// Whether a token is still in force, without its secret.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn token_in_force(&self, token_id: &str) -> Result<bool> {
        let found = self.token_row(token_id).await?;
        Ok(found.is_some_and(|(token, _)| matches!(in_force(token), Presented::Valid(_))))
    }

    /// Which of these tokens are in force. One statement for all of them.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn tokens_in_force(&self, token_ids: &[String]) -> Result<Vec<String>> {
        Ok(sqlx::query_scalar!(
            "select token_id from api_tokens
            where token_id = any($1) and revoked_at is null
                and (expires_at is null or expires_at > clock_timestamp())",
            token_ids
        )
        .fetch_all(&self.pool.of_installation())
        .await?)
    }

    async fn token_row(&self, token_id: &str) -> Result<Option<(Token, Vec<u8>)>> {
        let entered = tokio::time::timeout(WAITS, self.lookups.0.acquire()).await;
        let _entered =
            entered.map_err(|_| sqlx::Error::PoolTimedOut)?.map_err(|_| sqlx::Error::PoolClosed)?;
        let row = sqlx::query!(
            "select token_id, name, scope, space_id, agent, created_at, expires_at, revoked_at, last_used_at,
                secret_sha256
            from api_tokens
            where token_id = $1",
            token_id
        )
        .fetch_optional(&self.pool.of_installation())
        .await?;
        let Some(row) = row else { return Ok(None) };
        let token = token_row!(row);
        Ok(Some((token.token()?, row.secret_sha256)))
    }

    /// Notes the use of a token, at most once a minute. A failure is only logged: the request goes on.
    async fn note_use(&self, token: &Token) {
        let used = token.last_used_at.map_or(chrono::TimeDelta::MAX, |at| Utc::now() - at);
        if used.to_std().is_ok_and(|age| age < USE_EVERY) {
            return;
        }
        let noted = sqlx::query!(
            "update api_tokens
            set last_used_at = clock_timestamp()
            where token_id = $1
                and (last_used_at is null or last_used_at < clock_timestamp() - make_interval(secs => $2))",
            token.token_id,
            USE_EVERY.as_secs_f64()
        )
        .execute(&self.pool.of_installation())
        .await;
        if let Err(error) = noted {
            debug!(%error, token.id = token.token_id, "The use of a token could not be noted");
        }
    }
}

fn in_force(token: Token) -> Presented {
    if token.revoked_at.is_some() {
        Presented::Revoked
    } else if token.expires_at.is_some_and(|at| at <= Utc::now()) {
        Presented::Expired
    } else {
        Presented::Valid(token)
    }
}

/// The id's digits and the secret's digits of a well-formed token.
fn parts(token: &str) -> Option<(&str, &str)> {
    let (id, secret) = token.strip_prefix(PREFIX)?.split_once('_')?;
    let is_hex = |text: &str, digits| text.len() == digits && text.bytes().all(|b| b.is_ascii_hexdigit());
    (is_hex(id, ID_DIGITS) && is_hex(secret, 64)).then_some((id, secret))
}

fn hash(secret: &str) -> Vec<u8> {
    sha2::Sha256::digest(secret.as_bytes()).to_vec()
}

pub(crate) fn random<const BYTES: usize>() -> Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| Error::corrupt("random bytes", "the system gives none"))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_token_is_looked_up() {
        let token = format!("{PREFIX}{}_{}", "a".repeat(16), "0".repeat(64));
        assert!(parts(&token).is_some());
        for wrong in ["", "wkt_", "wkt_a_b", &token[1..], &token[..token.len() - 1], &format!("{token}0")] {
            assert_eq!(parts(wrong), None, "{wrong}");
        }
    }
}
