//! The tokens of webhooks that sign a token and not their body: one token, one body.

use crate::{Result, Store};
use std::time::Duration;

/// What became of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenUse {
    First,
    /// It was used for the same before: a request that was sent twice.
    Again,
    /// It was used for something else: somebody saw a signed request, and put another body under its signature.
    Stolen,
}

impl Store {
    /// Notes that `token` of `source` came with what `digest` is of. It is remembered for `keep` at least; whoever asks
    /// refuses older signatures, so nothing is lost by forgetting it then.
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
        // A few at a time: whoever comes pays for those that went.
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
        // The update changes nothing. It is there so that the row comes back that was there before.
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
