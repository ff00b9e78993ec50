//! The schema: each key, its default and its rule, in the order of the example file.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use wakeful_workflow::agent::{JournalLevel, Limits, OnEmptyReply, OnExpired, OnUncertain};
use wakeful_workflow::gate::GatePolicy;
use wakeful_workflow::strategy::{ContextPolicy, Strategy};

use super::price::Price;
use super::problem::Problem;
use super::read::{Notes, Section, narrow, recipients, spaces};
use super::tree::Table;
use super::{
    AgentSettings, Blobs, CloneFrom, Config, Database, ModelSettings, OnDelayed, Provider, Providers, Queue,
    Scripted, Workspace,
};

/// The providers of models that every program has.
const BUILT_IN: [&str; 3] = ["anthropic", "openai", "scripted"];

/// The providers of models that this program knows.
struct ModelNames<'a> {
    added: &'a [&'a str],
}

/// Reads everything. `added` names the providers that the program adds to the built-in ones. If it returns problems, the
/// configuration must not be used.
pub(super) fn read(table: Table, added: &[&str]) -> (Config, Vec<Problem>) {
    let names = ModelNames { added };
    let notes = Notes::default();
    let mut root = Section::root(table, &notes);
    let mut config = Config {
        server: super::server::read(root.section("server")),
        monitoring: super::server::monitoring(root.section("monitoring")),
        database: database(root.section("database")),
        queue: queue(root.section("queue")),
        gate: gate(root.section("gate")),
        agents: agents(&mut root, &names),
        models: models(&mut root, &names),
        providers: providers(root.section("providers")),
        scripted: scripted(root.section("scripted")),
        email: super::email::read(root.section("email")),
        chat: super::chat::read(root.section("chat")),
        messenger: super::messenger::read(root.section("messenger")),
        herald: super::herald::read(root.section("herald")),
        mcp: super::mcp::read(root.sections("mcp")),
        absurd: super::absurd::read(root.section("absurd")),
        schedules: BTreeMap::new(),
        workspace: workspace(root.section("workspace")),
        blobs: blobs(root.section("blobs")),
        web: super::web::read(root.section("web")),
        users: super::users::read(root.section("users")),
        retention: super::retention::read(root.section("retention")),
        encryption: None,
        notify: Vec::new(),
        fallback_model: None,
        file: None,
        warnings: Vec::new(),
        given: Vec::new(),
    };
    config.schedules = super::cron::read(&mut root, &config);
    config.encryption = super::encryption::read(root.section("encryption"), &config.agent_names());
    config.notify = super::notify::read(&mut root, config.server.public_url.is_some());
    root.finish();
    let routes = notes.routes.take();
    notes.problems.borrow_mut().extend(routes.iter().filter_map(|route| route.problem(&config)));
    config.given = notes.given.into_inner();
    config.given.sort();
    (config, notes.problems.into_inner())
}

fn database(mut section: Section<'_>) -> Database {
    let database = Database {
        url: section.secret("url", |url| {
            let postgres = url.starts_with("postgres://") || url.starts_with("postgresql://");
            (!postgres).then_some("must begin with postgres://")
        }),
        max_connections: narrow(section.number("max_connections", 7..=1000), 8),
    };
    section.finish();
    database
}

/// What `queue.lease_s` and `queue.heartbeat_s` may be. Below half a second, one slow statement loses a lease.
const LEASE: RangeInclusive<Duration> = Duration::from_millis(500)..=Duration::from_secs(3600);
const HEARTBEAT: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(1800);

/// What `queue.drain_s` may be: a model call takes 900 s at most by default.
const DRAIN: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(3600);

/// What `queue.database_faults_s` may be.
const DATABASE_FAULTS: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(86_400);

fn queue(mut section: Section<'_>) -> Queue {
    let (lease, heartbeat) = (section.origin("lease_s"), section.origin("heartbeat_s"));
    let lease_given = section.seconds("lease_s", LEASE);
    let lease_length = lease_given.unwrap_or(Queue::LEASE);
    let heartbeat_given = section.seconds("heartbeat_s", HEARTBEAT);
    // If the lease is shortened, the default of the heartbeat is shortened too.
    let heartbeat_interval = heartbeat_given.unwrap_or_else(|| default_heartbeat(lease_length));
    let queue = Queue {
        lease: lease_length,
        heartbeat: heartbeat_interval,
        drain: section.seconds("drain_s", DRAIN).unwrap_or(Duration::from_secs(20)),
        poll_ms: narrow(section.number("poll_ms", 10..=3_600_000), 1_000),
        concurrency: narrow(section.number("concurrency", 1..=1024), 64),
        slice_steps: narrow(section.number("slice_steps", 1..=10_000), 8),
        heal_s: narrow(section.number("heal_s", 1..=86_400), 30),
        search_s: narrow(section.number("search_s", 1..=86_400), 2),
        database_faults: section
            .seconds("database_faults_s", DATABASE_FAULTS)
            .unwrap_or(Duration::from_secs(900)),
        warm_mb: narrow(section.number("warm_mb", 0..=1_048_576), 64),
    };
    // A value that was refused has its own line already. The default in its place must not cause a second
    // one.
    let usable = lease.is_some() == lease_given.is_some() && heartbeat.is_some() == heartbeat_given.is_some();
    if let Some(origin) = heartbeat.or(lease)
        && usable
        && queue.heartbeat * 2 > queue.lease
    {
        let text = format!(
            "queue.heartbeat_s = {} must be at most half of queue.lease_s = {}, or one late beat loses the lease",
            queue.heartbeat.as_secs_f64(),
            queue.lease.as_secs_f64()
        );
        section.problem(origin, text);
    }
    section.finish();
    queue
}

/// What the times of `gate` may be.
const GATE_TIMES: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(3600);

fn gate(mut section: Section<'_>) -> GatePolicy {
    let default = GatePolicy::default();
    let ms = |given: Option<Duration>, default: i64| {
        given.map_or(default, |given| i64::try_from(given.as_millis()).unwrap_or(default))
    };
    let gate = GatePolicy {
        faults: section.number("faults", 1..=1000).unwrap_or(default.faults),
        probe_ms: ms(section.seconds("probe_s", GATE_TIMES), default.probe_ms),
        probe_max_ms: ms(section.seconds("probe_max_s", GATE_TIMES), default.probe_max_ms),
        wave_ms: ms(section.seconds("wave_s", GATE_TIMES), default.wave_ms),
        silent_ms: ms(section.seconds("silent_s", GATE_TIMES), default.silent_ms),
    };
    section.finish();
    gate
}

/// The heartbeat of a lease whose heartbeat is not configured: whole seconds, at most a third of the lease, and at most 10 s.
/// A lease under 3 s is too short for that and beats at half its length, at most every second.
fn default_heartbeat(lease: Duration) -> Duration {
    let third = Duration::from_secs(lease.as_secs() / 3).min(Queue::HEARTBEAT);
    third.max((lease / 2).min(Duration::from_secs(1)))
}

fn agents(root: &mut Section<'_>, names: &ModelNames<'_>) -> BTreeMap<String, AgentSettings> {
    let mut agents = BTreeMap::new();
    for (name, origin, mut section) in root.sections("agents") {
        if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_') {
            let text = format!("agents.{name:?}: an agent's name has letters, digits, - and _ only");
            section.problem(origin, text);
        }
        let tools = section.list("tools");
        let settings = AgentSettings {
            system_prompt: section.text("system_prompt", "must be text", |text| Some(text.to_owned())),
            model: section.text("model", &names.rule(), |text| names.has(text).then(|| text.to_owned())),
            fallback: fallback(&mut section, names),
            approve: super::agents::approve(&mut section, tools.as_deref()),
            tools,
            on_uncertain: section
                .text("on_uncertain", "must be tell_model or needs_attention", on_uncertain)
                .unwrap_or_default(),
            on_empty_reply: section
                .text("on_empty_reply", "must be ask_again or accept", on_empty_reply)
                .unwrap_or_default(),
            journal: section.text("journal", "must be checkpoint or full", journal).unwrap_or_default(),
            limits: limits(section.section("limits")),
            context: context(section.section("context")),
            recipients: recipients(&mut section),
            web: super::web::policy(&mut section).unwrap_or_default(),
            clone_from: seed(section.section("workspace")),
            spaces: spaces(&mut section),
            ask_expires_s: section.number("ask_expires_s", 1..=31_536_000).map(i64::unsigned_abs),
            on_ask_expired: section
                .text("on_ask_expired", "must be tell_model or fail", on_ask_expired)
                .unwrap_or_default(),
            on_failed: notice(&mut section, "on_failed"),
            on_delayed: on_delayed(&mut section),
            shared: section.text("participants", "must be owner or anyone", participants).unwrap_or(false),
        };
        section.finish();
        agents.insert(name, settings);
    }
    agents
}

/// What `on_delayed.after_s` may be.
const DELAYED: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(31_536_000);

fn notice(section: &mut Section<'_>, key: &str) -> Option<String> {
    section.text(key, "must be text", |text| (!text.trim().is_empty()).then(|| text.to_owned()))
}

fn on_delayed(section: &mut Section<'_>) -> Option<OnDelayed> {
    let origin = section.origin("on_delayed")?;
    let name = section.full("on_delayed");
    let mut delayed = section.section("on_delayed");
    let (after, text) = (delayed.seconds("after_s", DELAYED), notice(&mut delayed, "text"));
    delayed.finish();
    let both = after.zip(text);
    if both.is_none() {
        section.problem(origin, format!("{name} needs after_s, in seconds, and text"));
    }
    both.map(|(after, text)| OnDelayed { after, text })
}

/// `[agents.NAME.workspace]`.
fn seed(mut section: Section<'_>) -> Option<CloneFrom> {
    let clone = section.path_or_url("clone");
    section.finish();
    clone
}

fn fallback(section: &mut Section<'_>, names: &ModelNames<'_>) -> Vec<String> {
    let origin = section.origin("fallback");
    let models = section.list("fallback").unwrap_or_default();
    for wrong in models.iter().filter(|model| !names.has(model)) {
        if let Some(origin) = origin.clone() {
            let text = format!("{} has {wrong:?}: each {}", section.full("fallback"), names.rule());
            section.problem(origin, text);
        }
    }
    models
}

fn on_uncertain(text: &str) -> Option<OnUncertain> {
    match text {
        "tell_model" => Some(OnUncertain::TellModel),
        "needs_attention" => Some(OnUncertain::NeedsAttention),
        _ => None,
    }
}

fn on_empty_reply(text: &str) -> Option<OnEmptyReply> {
    match text {
        "ask_again" => Some(OnEmptyReply::AskAgain),
        "accept" => Some(OnEmptyReply::Accept),
        _ => None,
    }
}

fn on_ask_expired(text: &str) -> Option<OnExpired> {
    match text {
        "tell_model" => Some(OnExpired::TellModel),
        "fail" => Some(OnExpired::Fail),
        _ => None,
    }
}

/// Whether users other than a conversation's first may write in it.
fn participants(text: &str) -> Option<bool> {
    match text {
        "owner" => Some(false),
        "anyone" => Some(true),
        _ => None,
    }
}

fn journal(text: &str) -> Option<JournalLevel> {
    match text {
        "checkpoint" => Some(JournalLevel::Checkpoint),
        "full" => Some(JournalLevel::Full),
        _ => None,
    }
}

/// What `limits.outage_s` may be: up to 30 days.
const OUTAGE: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(2_592_000);

fn limits(mut section: Section<'_>) -> Limits {
    let default = Limits::default();
    let limits = Limits {
        steps: section.number("steps", 1..=10_000).unwrap_or(default.steps),
        tokens: section.number("tokens", 1..=1_000_000_000_000).unwrap_or(default.tokens),
        attempts: section.number("attempts", 1..=100).unwrap_or(default.attempts),
        outage_ms: section
            .seconds("outage_s", OUTAGE)
            .map_or(default.outage_ms, |outage| u64::try_from(outage.as_millis()).unwrap_or(u64::MAX)),
        tool_s: narrow(section.number("tool_s", 1..=3600), default.tool_s),
    };
    section.finish();
    limits
}

fn context(mut section: Section<'_>) -> ContextPolicy {
    let default = ContextPolicy::default();
    let (high_at, low_at) = (section.origin("high"), section.origin("low"));
    let rule = "must be full, sliding_window, trim_tool_results or compaction";
    let (high_given, low_given) =
        (section.number("high", 2..=1_000_000), section.number("low", 1..=1_000_000));
    let high = high_given.unwrap_or(default.high);
    // If the high mark is lowered, the default of the low mark is lowered too.
    let low = low_given.unwrap_or(default.low.min(high * 2 / 3).max(1));
    let policy = ContextPolicy {
        strategy: section.text("strategy", rule, Strategy::parse).unwrap_or_default(),
        high,
        low,
        keep_results: section.number("keep_results", 0..=1_000_000).unwrap_or(default.keep_results),
        trim_at_bytes: section
            .number("trim_at_bytes", 1..=1_000_000_000_000)
            .unwrap_or(default.trim_at_bytes),
        compact_at_percent: section
            .number("compact_at_percent", 10..=95)
            .unwrap_or(default.compact_at_percent),
    };
    // A value that was refused has its own line already. The default in its place must not cause a second
    // one.
    let usable = high_at.is_some() == high_given.is_some() && low_at.is_some() == low_given.is_some();
    if let Some(origin) = low_at.or(high_at)
        && usable
        && low >= high
    {
        let (low_key, high_key) = (section.full("low"), section.full("high"));
        let text = format!(
            "{low_key} = {low} must be less than {high_key} = {high}, or every call would cut the window"
        );
        section.problem(origin, text);
    }
    section.finish();
    policy
}

fn models(root: &mut Section<'_>, names: &ModelNames<'_>) -> BTreeMap<String, ModelSettings> {
    let mut models = BTreeMap::new();
    for (name, origin, mut section) in root.sections("models") {
        if !names.has(&name) {
            section.problem(origin, format!("models.{name:?}: the name {}", names.rule()));
        }
        let tokens = |given: Option<i64>| given.map(i64::unsigned_abs);
        let (input, cached) = (section.usd("input_usd"), section.usd("cached_usd"));
        let (cache_write, output) = (section.usd("cache_write_usd"), section.usd("output_usd"));
        let priced = [input, cached, cache_write, output].iter().any(Option::is_some);
        let settings = ModelSettings {
            context_window: tokens(section.number("context_window", 1..=1_000_000_000)),
            max_output_tokens: tokens(section.number("max_output_tokens", 1..=1_000_000_000)),
            prefill: section.flag("prefill").unwrap_or(false),
            merge_turns: section.flag("merge_turns").unwrap_or(false),
            legacy_max_tokens: section.flag("legacy_max_tokens").unwrap_or(false),
            price: priced.then(|| Price::of(input, cached, cache_write, output)),
        };
        section.finish();
        models.insert(name, settings);
    }
    models
}

fn providers(mut section: Section<'_>) -> Providers {
    let providers = Providers {
        anthropic: provider(section.section("anthropic")),
        openai: provider(section.section("openai")),
    };
    section.finish();
    providers
}

fn provider(mut section: Section<'_>) -> Provider {
    let rule = "must begin with http:// or https:// and carry no user name or password";
    let provider = Provider {
        base_url: section.text("base_url", rule, base_url),
        api_key: section.secret("api_key", |key| {
            // Such a key cannot be sent in a header. Report it now, not at the first call.
            let sendable = key.bytes().all(|b| b.is_ascii_graphic());
            (!sendable).then_some("must be printable ASCII without spaces")
        }),
        connect_s: narrow(section.number("connect_s", 1..=600), 10),
        idle_s: narrow(section.number("idle_s", 1..=3600), 120),
        total_s: narrow(section.number("total_s", 1..=86_400), 900),
    };
    section.finish();
    provider
}

fn base_url(text: &str) -> Option<String> {
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"))?;
    let host = rest.split('/').next().unwrap_or_default();
    let plain = !host.is_empty() && !host.contains('@') && !text.contains(char::is_whitespace);
    plain.then(|| text.trim_end_matches('/').to_owned())
}

fn scripted(mut section: Section<'_>) -> Scripted {
    let scripted = Scripted { dir: section.path("dir") };
    section.finish();
    scripted
}

fn blobs(mut section: Section<'_>) -> Blobs {
    let rule = "must be postgres, an absolute folder, s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or gs://BUCKET/PREFIX, without credentials";
    let address = |text: &str| {
        let outside = ["s3://", "az://", "gs://"].iter().find_map(|scheme| text.strip_prefix(scheme));
        let is_plain = outside.is_none_or(|rest| !rest.is_empty() && !rest.contains(['@', '?', '#']));
        let known = text == "postgres" || text.starts_with('/') || outside.is_some();
        (known && is_plain).then(|| text.to_owned())
    };
    let store = section.text("store", rule, address).filter(|store| store != "postgres");
    let also = section.list("also").unwrap_or_default();
    // A move reads and writes within the minute that the database lets a transaction rest.
    let timeout = section.seconds("timeout_s", Duration::from_millis(100)..=Duration::from_secs(25));
    let blobs = Blobs { store, also, timeout: timeout.unwrap_or(Blobs::default().timeout) };
    section.finish();
    blobs
}

fn workspace(mut section: Section<'_>) -> Workspace {
    let default = Workspace::default();
    let seconds = |number: u64| Duration::from_secs(number);
    let workspace = Workspace {
        dir: section.path("dir"),
        max_files: narrow(section.number("max_files", 1..=10_000_000), default.max_files),
        max_bytes: narrow(section.number("max_bytes", 1..=1 << 40), default.max_bytes),
        snapshot: section.seconds("snapshot_s", seconds(1)..=seconds(3600)).unwrap_or(default.snapshot),
        leave_out: section.list("leave_out").unwrap_or(default.leave_out),
        keep: section.seconds("keep_s", seconds(0)..=seconds(365 * 86400)).unwrap_or(default.keep),
        keep_bytes: narrow(section.number("keep_bytes", 0..=1 << 50), default.keep_bytes),
    };
    section.finish();
    workspace
}

impl ModelNames<'_> {
    /// Returns whether this is `provider/model` with a known provider. Everything after the first slash is up
    /// to the provider.
    fn has(&self, text: &str) -> bool {
        let known = |provider: &str| BUILT_IN.contains(&provider) || self.added.contains(&provider);
        text.split_once('/').is_some_and(|(provider, model)| {
            known(provider)
                && !model.is_empty()
                && !model.contains(|c: char| c.is_whitespace() || c.is_control())
        })
    }

    /// The rule for a model's name, for error messages.
    fn rule(&self) -> String {
        let known = [&BUILT_IN[..], self.added].concat().join(", ");
        format!("must be provider/model with a provider of: {known}")
    }
}
