//! Where a process listens, and what it lets through.

use super::read::{Section, narrow};
use secrecy::SecretString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;
use wakeful_workflow::bundle;

#[derive(Clone, Debug)]
pub struct Server {
    pub listen: SocketAddr,
    /// The admin token of the configuration. With it, `/v1` asks for a token.
    pub token: Option<SecretString>,
    /// Tokens for the header `X-Internal-Token`; several, for rotation.
    pub internal_tokens: Vec<SecretString>,
    /// The most connections at a time. There are fewer if the process may not open so many descriptors.
    pub connections: usize,
    /// The longest wait for a request's whole head, and how long a kept connection may be silent.
    pub head_timeout: Duration,
    /// How much of unanswered requests' bodies is held in memory: of callers with the token, and again of
    /// strangers.
    pub held_mb: usize,
    /// The most streams of events at a time.
    pub streams: usize,
    /// The most of them that one user's tokens get.
    pub user_streams: usize,
    /// How many messages one user's tokens may send in a minute. One more gets 429.
    pub user_messages: usize,
    /// How often an idle stream of events sends a sign of life.
    pub sse_heartbeat_s: u64,
    /// The largest bundle that is imported, unpacked.
    pub import_limit_mb: u64,
    /// How many messages are accepted at once. One more gets 429.
    pub ingest_concurrency: usize,
    /// How long a message waits for a permit to be written.
    pub ingest_wait_ms: u64,
    /// The name of this deployment, if several share a database.
    pub deployment: String,
    /// Serves the console next to the API.
    pub console: bool,
    /// The path below which a proxy serves all this, without a slash at its end; empty for none.
    pub base_path: String,
    /// The address under which people reach this server, without a slash at its end, for links in messages.
    pub public_url: Option<String>,
    /// How long after a signal the API still takes connections. `/readyz` says at once that it drains, but load balancers learn of it
    /// only at their next check.
    pub drain_delay: Duration,
}

impl Server {
    /// The size limits of an imported bundle.
    pub fn import_limits(&self) -> bundle::Limits {
        bundle::Limits { bytes: self.import_limit_mb << 20, ..bundle::Limits::default() }
    }
}

/// What a monitoring system asks of a process of any role.
#[derive(Clone, Debug, Default)]
pub struct Monitoring {
    /// Where the process answers `/healthz`, `/readyz` and `/metrics`, without a token. The API has the first two itself.
    pub listen: Option<SocketAddr>,
}

const LISTEN: &str = "must be an address and a port, such as 127.0.0.1:7070 or [::]:7070";

pub(super) fn read(mut section: Section<'_>) -> Server {
    let listen = section.text("listen", LISTEN, |text| text.parse().ok());
    let server = Server {
        listen: listen.unwrap_or(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 7070)),
        token: section.secret("token", |_| None),
        internal_tokens: section.secrets("internal_tokens"),
        connections: narrow(section.number("connections", 16..=1_000_000), 4096),
        head_timeout: Duration::from_secs(narrow(section.number("head_timeout_s", 1..=3600), 10)),
        // A mail of 40 MB in base64 has to find room.
        held_mb: narrow(section.number("held_mb", 64..=65_536), 64),
        streams: narrow(section.number("streams", 1..=1_000_000), 1000),
        user_streams: narrow(section.number("user_streams", 1..=1_000_000), 16),
        user_messages: narrow(section.number("user_messages", 1..=1_000_000), 60),
        sse_heartbeat_s: section.number("sse_heartbeat_s", 1..=3600).unwrap_or(15).unsigned_abs(),
        import_limit_mb: section.number("import_limit_mb", 1..=65_536).unwrap_or(256).unsigned_abs(),
        ingest_concurrency: narrow(section.number("ingest_concurrency", 1..=10_000), 64),
        ingest_wait_ms: narrow(section.number("ingest_wait_ms", 10..=60_000), 2_000),
        deployment: section
            .text("deployment", "must be a name of 1 to 64 letters, digits, - and _", |name| {
                let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
                ((1..=64).contains(&name.len()) && name.bytes().all(plain)).then(|| name.to_owned())
            })
            .unwrap_or_else(|| super::DEFAULT_DEPLOYMENT.to_owned()),
        console: section.flag("console").unwrap_or(true),
        base_path: section
            .text(
                "base_path",
                "must be a path such as /wakeful: letters, digits, - _ . and /, no slash at its end",
                |path| {
                    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_./".contains(&b);
                    let is_path = path.starts_with('/') && !path.ends_with('/') && !path.contains("//");
                    (is_path && path.bytes().all(plain)).then(|| path.to_owned())
                },
            )
            .unwrap_or_default(),
        public_url: section.text(
            "public_url",
            "must be the http:// or https:// address under which people reach this server, without a path",
            |text| {
                let url: url::Url = text.parse().ok()?;
                let plain =
                    matches!(url.scheme(), "http" | "https") && url.path() == "/" && url.query().is_none();
                plain.then(|| text.trim_end_matches('/').to_owned())
            },
        ),
        drain_delay: Duration::from_secs(
            section.number("drain_delay_s", 0..=600).unwrap_or(0).unsigned_abs(),
        ),
    };
    section.finish();
    server
}

pub(super) fn monitoring(mut section: Section<'_>) -> Monitoring {
    let monitoring = Monitoring { listen: section.text("listen", LISTEN, |text| text.parse().ok()) };
    section.finish();
    monitoring
}
