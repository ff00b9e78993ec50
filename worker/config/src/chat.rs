//! `[chat]`: the cache of an older system that kept chats without sessions.

use super::read::Section;
use secrecy::SecretString;

#[derive(Clone, Debug, Default)]
pub struct Chat {
    pub legacy: Legacy,
}

/// `[chat.legacy]`: the Redis cache that kept chats before Wakeful had sessions.
#[derive(Clone, Debug)]
pub struct Legacy {
    /// `redis://…` or `rediss://…`. Secret, because it may hold a password. `None` if there is no such cache.
    pub redis_url: Option<SecretString>,
    /// The key of a chat. The message's values replace `{user}` and `{conversation}`.
    pub key: String,
    /// With `false` the cache is no longer read.
    pub enabled: bool,
    pub on_error: OnError,
    /// A larger entry is refused.
    pub max_kb: u64,
    /// The time limit of one read.
    pub timeout_ms: u64,
}

/// What happens to a chat's first message if its history cannot be read from the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnError {
    /// The message is refused and the sender retries. A session that starts without its history never gets it
    /// later.
    #[default]
    Refuse,
    /// The session starts without a history.
    Ignore,
}

impl Default for Legacy {
    fn default() -> Legacy {
        Legacy {
            redis_url: None,
            key: "chat:{user}:{conversation}".to_owned(),
            enabled: true,
            on_error: OnError::default(),
            max_kb: 4096,
            timeout_ms: 1000,
        }
    }
}

/// Reads the section.
pub(super) fn read(mut section: Section<'_>) -> Chat {
    let chat = Chat { legacy: legacy(section.section("legacy")) };
    section.finish();
    chat
}

fn legacy(mut section: Section<'_>) -> Legacy {
    let default = Legacy::default();
    let legacy = Legacy {
        redis_url: section.secret("redis_url", |url| {
            let redis = url.starts_with("redis://") || url.starts_with("rediss://");
            match redis {
                false => Some("must begin with redis:// or rediss://"),
                true if !cfg!(feature = "legacy-redis") => {
                    Some("cannot be used: this program was built without the feature legacy-redis")
                }
                true => None,
            }
        }),
        key: section
            .text("key", "must contain {conversation}", |key| {
                key.contains("{conversation}").then(|| key.to_owned())
            })
            .unwrap_or(default.key),
        enabled: section.flag("enabled").unwrap_or(default.enabled),
        on_error: section
            .text("on_error", "must be refuse or ignore", |text| match text {
                "refuse" => Some(OnError::Refuse),
                "ignore" => Some(OnError::Ignore),
                _ => None,
            })
            .unwrap_or_default(),
        max_kb: section.number("max_kb", 1..=65_536).map_or(default.max_kb, i64::unsigned_abs),
        timeout_ms: section.number("timeout_ms", 10..=60_000).map_or(default.timeout_ms, i64::unsigned_abs),
    };
    section.finish();
    legacy
}
