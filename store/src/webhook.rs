//! Tokens of webhooks whose signature covers a token and not the body. Each token belongs to one body.

use crate::{Result, Store};
use std::time::Duration;

/// The result of using a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenUse {
    First,
    /// It was used with the same body before: the request was sent twice.
    Again,
    /// It was used with another body: someone saw a signed request and put another body under its signature.
    Stolen,
}

impl Store {
    /// Records that `token` of `source` came with the content that `digest` hashes. The record stays for at
    /// least `keep`. Callers refuse older signatures, so deleting it later is safe.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn use_token(
        &self,
        source: &str,
        token: &str,
        digest: &[u8],
        keep: Duration,
    ) -> Result<TokenUse> {
        let keep_s = i32::try_from(keep.as_secs()).unwrap_or(i32::MAX);
        // Each call deletes a few expired tokens, so no cleanup job is needed.
        sqlx::query!(
            "delete from webhook_tokens
            where (source, token) in (
                select source, token
                from webhook_tokens
                where expires_at < now()
                limit 20
                for update skip locked
            )"
        )
        .execute(&self.intake)
        .await?;
        // The update changes nothing. It makes `returning` give the row that existed before.
        let row = sqlx::query!(
            r#"insert into webhook_tokens (source, token, digest, expires_at)
            values ($1, $2, $3, now() + make_interval(secs => $4::int))
            on conflict (source, token) do update set source = excluded.source
            returning digest, (xmax = 0) as "first!""#,
            source,
            token,
            digest,
            keep_s,
        )
        .fetch_one(&self.intake)
        .await?;
        Ok(match (row.first, row.digest == digest) {
            (true, _) => TokenUse::First,
            (false, true) => TokenUse::Again,
            (false, false) => TokenUse::Stolen,
        })
    }
}
