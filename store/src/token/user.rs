//! Tokens of users: short-lived, signed, and kept nowhere.
//!
//! The key is a row of `signing_keys`, made when it is first needed. So every process of the installation has the same key
//! without a setting, and no setting has to be kept secret twice. A role that can read that row can read every session too;
//! `wakeful_reader` cannot read it.

use super::random;
use crate::{Error, Result, Store};
use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use std::sync::OnceLock;

/// What every token of a user begins with.
const PREFIX: &str = "wku_";
/// The row of the key.
const PURPOSE: &str = "user tokens";

/// What a token of a user says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserClaims {
    #[serde(rename = "space")]
    pub space_id: String,
    #[serde(rename = "user")]
    pub user_id: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub agent: Option<String>,
    /// Seconds since 1970.
    #[serde(rename = "exp")]
    pub expires_at: i64,
    /// The token of the application that asked for it. It ends with that token. `None`: the configuration's.
    #[serde(rename = "by", skip_serializing_if = "Option::is_none", default)]
    pub issuer: Option<String>,
    /// The fingerprint of the configuration's token, if that asked for it: see [`Store::fingerprint`].
    #[serde(rename = "cfg", skip_serializing_if = "Option::is_none", default)]
    pub configured: Option<String>,
}

/// What a presented token of a user is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UserToken {
    Valid(UserClaims),
    Expired,
    /// The token of the application that asked for it was revoked, or has expired.
    Revoked,
    Unknown,
}

/// The key of this process, once it is read.
#[derive(Debug, Default)]
pub(crate) struct Key(OnceLock<hmac::Key>);

impl Store {
    /// Signs a token for a user.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn sign_user_token(&self, claims: &UserClaims) -> Result<String> {
        let claims = serde_json::to_vec(claims).map_err(|error| Error::corrupt("user token", error))?;
        let body = BASE64_URL_SAFE_NO_PAD.encode(claims);
        let signature = hmac::sign(self.user_key().await?, body.as_bytes());
        Ok(format!("{PREFIX}{body}.{}", BASE64_URL_SAFE_NO_PAD.encode(signature.as_ref())))
    }

    /// Looks at what a caller presents. The signature decides first; then one read by a primary key, which says whether
    /// the application's own token is in force.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn find_user_token(&self, presented: &str) -> Result<UserToken> {
        let Some((body, signature)) = presented.strip_prefix(PREFIX).and_then(|rest| rest.split_once('.'))
        else {
            return Ok(UserToken::Unknown);
        };
        let Ok(signature) = BASE64_URL_SAFE_NO_PAD.decode(signature) else { return Ok(UserToken::Unknown) };
        if hmac::verify(self.user_key().await?, body.as_bytes(), &signature).is_err() {
            return Ok(UserToken::Unknown);
        }
        let decoded = BASE64_URL_SAFE_NO_PAD.decode(body).ok();
        let Some(claims) = decoded.and_then(|claims| serde_json::from_slice::<UserClaims>(&claims).ok())
        else {
            return Ok(UserToken::Unknown);
        };
        if claims.expires_at <= Utc::now().timestamp() {
            return Ok(UserToken::Expired);
        }
        if let Some(issuer) = &claims.issuer
            && !self.token_in_force(issuer).await?
        {
            return Ok(UserToken::Revoked);
        }
        Ok(UserToken::Valid(claims))
    }

    /// What tokens of users say of the configuration's token. It tells nothing of that token without this installation's key,
    /// because users can read their own tokens.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn fingerprint(&self, configured: &str) -> Result<String> {
        // No token's body has a NUL, so no token has this signature.
        let text = [b"configured token\0", configured.as_bytes()].concat();
        let signature = hmac::sign(self.user_key().await?, &text);
        Ok(BASE64_URL_SAFE_NO_PAD.encode(&signature.as_ref()[..16]))
    }

    async fn user_key(&self) -> Result<&hmac::Key> {
        if let Some(key) = self.user_key.0.get() {
            return Ok(key);
        }
        let made = random::<32>()?;
        // Of two processes that need the first key at once, one makes it, and both read that one.
        sqlx::query!(
            "insert into signing_keys (purpose, key) values ($1, $2) on conflict (purpose) do nothing",
            PURPOSE,
            &made
        )
        .execute(&self.pool.of_installation())
        .await?;
        let key = sqlx::query_scalar!("select key from signing_keys where purpose = $1", PURPOSE)
            .fetch_one(&self.pool.of_installation())
            .await?;
        Ok(self.user_key.0.get_or_init(|| hmac::Key::new(hmac::HMAC_SHA256, &key)))
    }
}

impl UserClaims {
    /// When the token expires.
    pub fn expires(&self) -> DateTime<Utc> {
        DateTime::from_timestamp(self.expires_at, 0).unwrap_or(DateTime::<Utc>::MIN_UTC)
    }
}

/// Whether a text looks like a token of a user.
pub fn is_user_token(text: &str) -> bool {
    text.starts_with(PREFIX)
}
