//! The Redis cache that kept chats before Wakeful had sessions. It is read once for each chat that has no
//! session, and never written. Its entries expire; once no chat is imported any more, an operator can turn it
//! off.
//!
//! The read happens before the wake's transaction and takes no lock. Two first messages at the same time may
//! both read the entry and still make one session: the wake takes the locks, and the second message finds the
//! session.

use super::reading::Chat;
use axum::http::StatusCode;
use std::collections::BTreeMap;
use tracing::{debug, error, info, warn};
use wakeful_config::Config;
use wakeful_config::chat::{Legacy, OnError};
use wakeful_engine::ctx::Ctx;
use wakeful_http::problem::Problem;
use wakeful_store::Error;
use wakeful_store::legacy::{CacheMiss, LegacyCount};
use wakeful_store::wake::NewSession;
use wakeful_workflow::access::Speaker;
use wakeful_workflow::id::DEFAULT_SPACE;

/// How many entries are read at once. Each may be as large as `max_kb` allows.
#[cfg(feature = "legacy-redis")]
const READERS: usize = 16;

/// The cached chat of a conversation that has no session yet, if there is one.
///
/// # Errors
/// 503 while the cache cannot be reached and 502 for an entry that cannot be read, unless `on_error =
/// "ignore"`. The store's errors, as problems.
pub(super) async fn find(
    ctx: &Ctx,
    cache: Option<&Cache>,
    new: &NewSession,
    user: Option<&str>,
) -> Result<Option<Chat>, Problem> {
    // Its keys know no space, so its chats are those of the default one.
    let Some(cache) = cache.filter(|_| new.space_id == DEFAULT_SPACE) else { return Ok(None) };
    {
        let _permit = ctx.intake.enter().await?;
        if ctx.store.has_session(&new.conversation_id).await? {
            return Ok(None);
        }
    }
    let conversation = new.trigger_id.as_str();
    let of_user = matches!(new.speaker, Some(Speaker::OwnToken { .. }));
    let Some(key) = key(&cache.settings.key, user, conversation) else {
        debug!(conversation, "This chat cannot have an entry in the old cache");
        return Ok(None);
    };
    let failed = match cache.read(&key).await {
        // The key does not say whose chat it is, so a user's own token must not take it. A token of the application may.
        Ok(Some(_)) if of_user && !cache.settings.key.contains("{user}") => {
            return Err(Error::NotFound { what: "conversation", id: conversation.to_owned() }.into());
        }
        Ok(Some(chat)) => {
            let (messages, left_out) = (chat.seeds.len(), chat.left_out);
            if left_out > 0 {
                warn!(
                    conversation,
                    messages,
                    left_out,
                    "An old chat has messages that are not the user's or the assistant's words: left out"
                );
            } else {
                info!(conversation, messages, "An old chat was found in the cache");
            }
            return Ok(Some(chat));
        }
        Ok(None) => {
            count(ctx, CacheMiss::Missed).await;
            return Ok(None);
        }
        Err(failed) => failed,
    };
    count(ctx, CacheMiss::Failed).await;
    error!(conversation, error = %failed, "The old chat of a conversation could not be read");
    match (cache.settings.on_error, failed) {
        (OnError::Ignore, _) => Ok(None),
        (OnError::Refuse, Failed::Unreachable(_)) => {
            let detail = "the chat's history cannot be reached just now; nothing was taken, send it again";
            Err(Problem::unavailable(detail, 2))
        }
        (OnError::Refuse, Failed::Unreadable(reason)) => {
            let detail = format!(
                "the chat's history cannot be read: {reason}. Nothing was taken. An operator can correct or delete the entry \
                 of this conversation in the old cache, or set chat.legacy.on_error to ignore"
            );
            Err(Problem::new(StatusCode::BAD_GATEWAY, detail))
        }
    }
}

/// Counts a lookup. A failed count is only logged: the message is still accepted.
async fn count(ctx: &Ctx, asked: CacheMiss) {
    if let Err(error) = ctx.store.count_legacy(asked).await {
        warn!(%error, "The lookup in the old cache could not be counted");
    }
}

/// Why an entry was not read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failed {
    #[error("the cache cannot be reached: {0}")]
    Unreachable(String),
    #[error("{0}")]
    Unreadable(String),
}

/// The cache key of one chat. `None` if the pattern needs a user and none is named, or if another user's key
/// could be the same text.
fn key(pattern: &str, user: Option<&str>, conversation: &str) -> Option<String> {
    let mut fields = Vec::new();
    let mut rest = pattern;
    let mut key = String::new();
    while let Some((name, at)) = ["{user}", "{conversation}"]
        .into_iter()
        .filter_map(|name| rest.find(name).map(|at| (name, at)))
        .min_by_key(|(_, at)| *at)
    {
        let value = if name == "{user}" { user? } else { conversation };
        let after = &rest[at + name.len()..];
        fields.push((value, after.chars().next().filter(|_| after.contains('{'))));
        key.push_str(&rest[..at]);
        key.push_str(value);
        rest = after;
    }
    key.push_str(rest);
    // `a:b` and `c` give the same key as `a` and `b:c`, so such a user could read somebody else's entry.
    let ambiguous = fields.iter().any(|(value, next)| next.is_some_and(|next| value.contains(next)));
    (!ambiguous).then_some(key)
}

/// A client of the cache.
pub struct Cache {
    settings: Legacy,
    #[cfg(feature = "legacy-redis")]
    client: redis::Client,
    /// One shared connection, opened at first use and again after it broke.
    #[cfg(feature = "legacy-redis")]
    connection: tokio::sync::Mutex<Option<redis::aio::MultiplexedConnection>>,
    #[cfg(feature = "legacy-redis")]
    readers: tokio::sync::Semaphore,
}

#[cfg(feature = "legacy-redis")]
impl Cache {
    /// The cache of this configuration, if one is set and enabled. Does not connect yet.
    ///
    /// # Errors
    /// An invalid URL.
    pub fn of(config: &Config) -> anyhow::Result<Option<Cache>> {
        use secrecy::ExposeSecret;
        let settings = config.chat.legacy.clone();
        let Some(url) = settings.redis_url.clone().filter(|_| settings.enabled) else { return Ok(None) };
        // The crate's error may quote the URL, which may hold a password.
        let client = redis::Client::open(url.expose_secret()).map_err(|_| {
            wakeful_config::Invalid(
                "chat.legacy.redis_url is no address of a Redis (it is not shown)".to_owned(),
            )
        })?;
        let (connection, readers) = (tokio::sync::Mutex::new(None), tokio::sync::Semaphore::new(READERS));
        Ok(Some(Cache { settings, client, connection, readers }))
    }

    /// Reads the entry under `key` and changes nothing: the entry's expiry stays as it is.
    async fn read(&self, key: &str) -> Result<Option<Chat>, Failed> {
        let limit = usize::try_from(self.settings.max_kb << 10).unwrap_or(usize::MAX);
        let within = std::time::Duration::from_millis(self.settings.timeout_ms);
        let asked = async {
            let _reader =
                self.readers.acquire().await.map_err(|error| Failed::Unreachable(error.to_string()))?;
            self.ask(key, limit).await
        };
        let Ok(bytes) = tokio::time::timeout(within, asked).await else {
            // A connection that does not answer may be dead, so the next read opens a new one.
            if let Ok(mut connection) = self.connection.try_lock() {
                *connection = None;
            }
            return Err(Failed::Unreachable(format!("no answer within {} ms", self.settings.timeout_ms)));
        };
        let bytes = bytes?;
        match bytes.len() {
            0 => Ok(None),
            bytes if bytes > limit => {
                let reason = format!("it has more than {} KiB (chat.legacy.max_kb)", self.settings.max_kb);
                Err(Failed::Unreadable(reason))
            }
            _ => super::reading::read(&bytes).map(Some).map_err(Failed::Unreadable),
        }
    }

    /// The entry's bytes, at most `limit + 1` of them; empty if there is no entry.
    async fn ask(&self, key: &str, limit: usize) -> Result<Vec<u8>, Failed> {
        let mut connection = self.connection().await?;
        let mut command = redis::cmd("GETRANGE");
        command.arg(key).arg(0).arg(limit);
        match command.query_async(&mut connection).await {
            Ok(bytes) => Ok(bytes),
            Err(error) if error.code() == Some("WRONGTYPE") => {
                Err(Failed::Unreadable("it is no string".to_owned()))
            }
            Err(error) => {
                *self.connection.lock().await = None;
                Err(Failed::Unreachable(error.category().to_owned()))
            }
        }
    }

    async fn connection(&self) -> Result<redis::aio::MultiplexedConnection, Failed> {
        let mut connection = self.connection.lock().await;
        if let Some(connection) = &*connection {
            return Ok(connection.clone());
        }
        // The caller has a timeout that covers connecting as well.
        let settings =
            redis::AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
        let made = self.client.get_multiplexed_async_connection_with_config(&settings).await;
        // The crate's error may name the user in the URL.
        let made = made.map_err(|error| Failed::Unreachable(error.category().to_owned()))?;
        Ok(connection.insert(made).clone())
    }
}

#[cfg(not(feature = "legacy-redis"))]
impl Cache {
    /// Always `None`: this program was built without Redis, and its configuration refuses a `redis_url`.
    ///
    /// # Errors
    /// Never.
    pub fn of(_: &Config) -> anyhow::Result<Option<Cache>> {
        Ok(None)
    }

    #[expect(clippy::unused_async, reason = "the build with Redis awaits the cache here")]
    async fn read(&self, _: &str) -> Result<Option<Chat>, Failed> {
        Ok(None)
    }
}

/// Sums up the counts in a sentence, for an operator who asks whether the cache is still needed.
pub fn advice(settings: &Legacy, counts: &[LegacyCount]) -> String {
    if settings.redis_url.is_none() {
        return "no old cache is configured".to_owned();
    }
    let mut totals: BTreeMap<&str, i64> = BTreeMap::new();
    for count in counts {
        *totals.entry(count.outcome.as_str()).or_default() += count.chats;
    }
    let of = |outcome: &str| totals.get(outcome).copied().unwrap_or(0);
    let last = counts.iter().filter(|count| count.outcome == "imported").map(|count| count.last_at).max();
    let summary = format!(
        "in 30 days {} chats imported, {} not in it, {} could not be read",
        of("imported"),
        of("missed"),
        of("failed")
    );
    if !settings.enabled {
        return format!("turned off; {summary}");
    }
    match last {
        Some(last) => {
            let last = last.format("%Y-%m-%d %H:%M UTC");
            format!(
                "{summary}; the last import was at {last}: a day (its entries' lifetime) after that it can be turned off (chat.legacy.enabled = false)"
            )
        }
        None if of("missed") > 0 => {
            format!("{summary}; no import in 30 days: it can be turned off (chat.legacy.enabled = false)")
        }
        None => format!("{summary}; no chat was looked up yet"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_user_reads_the_chat_of_another_one() {
        let pattern = "chat:{user}:{conversation}";
        assert_eq!(key(pattern, Some("ann"), "c1").as_deref(), Some("chat:ann:c1"));
        // The conversation is the last field, so it may contain the separator.
        assert_eq!(key(pattern, Some("ann"), "c:1").as_deref(), Some("chat:ann:c:1"));
        assert_eq!(key(pattern, Some("ann:c"), "1"), None);
        assert_eq!(key(pattern, None, "c1"), None);
        assert_eq!(key("old/{conversation}", None, "c1").as_deref(), Some("old/c1"));
        assert_eq!(key("{conversation}-{user}!", Some("a-b"), "c").as_deref(), Some("c-a-b!"));
        assert_eq!(key("{conversation}-{user}!", Some("b"), "c-a"), None);
        // A value that looks like a placeholder is not replaced again.
        assert_eq!(key(pattern, Some("{conversation}"), "c").as_deref(), Some("chat:{conversation}:c"));
    }
}
