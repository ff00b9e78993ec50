//! The configuration: defaults, `wakeful.toml`, and the environment.
//!
//! This crate is internal and not stable. Programs use the crate `wakeful`.
//!
//! Precedence, strongest first: variables with names of their own (`ANTHROPIC_API_KEY`, `ANTHROPIC_BASE_URL`,
//! `OPENAI_API_KEY`, `OPENAI_BASE_URL`, `DATABASE_URL`, `WAKEFUL_TOKEN`), `WAKEFUL_SECTION__KEY` (two
//! underscores between the levels, in any case), the file, the defaults. A secret can come from a file
//! instead: add `_FILE` to the variable, or `_file` to the key. `wakeful.example.toml` shows every key.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use secrecy::SecretString;
use wakeful_workflow::agent::{JournalLevel, Limits, OnEmptyReply, OnExpired, OnUncertain};
use wakeful_workflow::gate::GatePolicy;
use wakeful_workflow::policy::WebPolicy;
use wakeful_workflow::strategy::ContextPolicy;

pub mod absurd;
pub mod address;
mod agents;
pub mod chat;
mod check;
pub mod cron;
pub mod email;
pub mod email_providers;
pub mod encryption;
mod files;
pub mod herald;
pub mod mail_out;
pub mod mailboxes;
pub mod mcp;
pub mod messenger;
pub mod notify;
mod price;
mod problem;
mod read;
pub mod retention;
mod routes;
mod schema;
mod server;
mod shown;
#[cfg(test)]
mod tests;
mod tree;
pub mod users;
pub mod web;
pub mod webhook;

pub use files::{Blobs, CloneFrom};
pub use price::Price;
pub use problem::ConfigError;
use problem::{Origin, Problem};
pub use server::{Monitoring, Server};

/// The agent of a request that names none.
pub const DEFAULT_AGENT: &str = "default";

/// The deployment of a process that names none.
pub const DEFAULT_DEPLOYMENT: &str = "default";

/// The tools of an agent whose configuration lists none. Sending mail is not among them, because it reaches
/// the outside world.
const DEFAULT_TOOLS: [&str; 6] =
    ["current_time", "read_file", "write_file", "read_output", "read_attachment", "ask_user"];

/// The context window of a model whose configuration gives none, in tokens.
const CONTEXT_WINDOW: u64 = 128_000;

/// The prompt of an agent that has none.
const DEFAULT_PROMPT: &str = "You are a friendly assistant. Answer briefly and truthfully. Use your tools where \
                                  they help, and ask when something is unclear.";

/// The file that is read when none is named.
const DEFAULT_FILE: &str = "wakeful.toml";

const ANTHROPIC_MODEL: &str = "anthropic/claude-sonnet-5";
const OPENAI_MODEL: &str = "openai/gpt-5";

/// An error in a configuration that loads but cannot be used: for example, an agent has a tool that does not
/// exist, or a sender has no address.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(pub String);

/// A whole configuration. Its `Debug` form shows no secret.
#[derive(Clone, Debug)]
pub struct Config {
    pub server: Server,
    pub monitoring: Monitoring,
    pub database: Database,
    pub queue: Queue,
    /// When the gates of the providers shut and open.
    pub gate: GatePolicy,
    /// As configured. [`Config::agent`] fills in the defaults.
    pub agents: BTreeMap<String, AgentSettings>,
    /// By `provider/model`.
    pub models: BTreeMap<String, ModelSettings>,
    pub providers: Providers,
    pub scripted: Scripted,
    pub email: email::Email,
    pub chat: chat::Chat,
    pub messenger: messenger::Messenger,
    pub herald: herald::Herald,
    /// By name.
    pub mcp: BTreeMap<String, mcp::Mcp>,
    pub absurd: absurd::Absurd,
    /// By name.
    pub schedules: BTreeMap<String, cron::Schedule>,
    pub workspace: Workspace,
    pub blobs: Blobs,
    pub web: web::Web,
    pub users: users::Users,
    pub retention: retention::Retention,
    /// `None`: everything is stored in clear.
    pub encryption: Option<encryption::Encryption>,
    /// The rules of notifications.
    pub notify: Vec<notify::Notify>,
    /// The model for agents without one while no provider has a key. `wakeful dev` sets it, `serve` does not.
    pub fallback_model: Option<String>,
    /// The file that was read.
    pub file: Option<PathBuf>,
    /// Warnings for the log, which does not exist yet while the configuration loads.
    pub warnings: Vec<String>,
    /// Every key that the file or the environment gives, by key.
    pub given: Vec<Given>,
}

/// A key that was configured, as text for people. Holds no secret.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Given {
    /// Such as `queue.lease_s`.
    pub key: String,
    /// The value as TOML, cut if it is long.
    pub value: String,
    /// A file and a line, or a variable.
    pub origin: String,
}

#[derive(Clone, Debug)]
pub struct Database {
    /// `postgres://…`. Secret, because it may hold a password.
    pub url: Option<SecretString>,
    /// The most connections that one process opens in all.
    pub max_connections: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queue {
    /// How long a claim holds without a heartbeat. At least twice `heartbeat`.
    pub lease: Duration,
    pub heartbeat: Duration,
    /// How long after a signal the running steps may go on. Then they are dropped, and others go on with them.
    pub drain: Duration,
    /// How often to look for work when no notification came.
    pub poll_ms: u64,
    /// How many steps one process runs at a time.
    pub concurrency: usize,
    /// How many steps a session runs before it lets other sessions go first.
    pub slice_steps: u32,
    /// How often a worker looks for sessions that stopped and that no job would continue.
    pub heal_s: u64,
    /// How often a worker fills the search and counts failures.
    pub search_s: u64,
    /// For how long the database may fail one step, again and again, before the session waits for an operator.
    pub database_faults: Duration,
    /// The memory, in megabytes, for what a worker keeps of sessions between their turns. 0: it keeps nothing.
    pub warm_mb: usize,
}

/// A worker with this heartbeat counts as silent after so many seconds without one.
pub fn silent_after_s(heartbeat: Duration) -> f64 {
    heartbeat.as_secs_f64() * 3.0
}

impl Queue {
    /// [`silent_after_s`] of this heartbeat.
    pub fn silent_after_s(&self) -> f64 {
        silent_after_s(self.heartbeat)
    }

    /// The defaults of `lease` and `heartbeat`.
    pub const LEASE: Duration = Duration::from_secs(30);
    pub const HEARTBEAT: Duration = Duration::from_secs(10);
}

/// `[agents.NAME]` as written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AgentSettings {
    pub system_prompt: Option<String>,
    /// `provider/model`.
    pub model: Option<String>,
    /// The models that are called, the first of them that can be, while the provider of `model` fails.
    pub fallback: Vec<String>,
    /// `None` means `DEFAULT_TOOLS`; an empty list means no tools.
    pub tools: Option<Vec<String>>,
    /// Those of them whose calls wait for a person's approval.
    pub approve: Vec<String>,
    pub on_uncertain: OnUncertain,
    pub on_empty_reply: OnEmptyReply,
    pub journal: JournalLevel,
    pub limits: Limits,
    /// `[agents.NAME.context]`.
    pub context: ContextPolicy,
    /// The addresses that the agent may mail. `None`: only the participants of its session.
    pub recipients: Option<Vec<String>>,
    /// The hosts that its tools may contact.
    pub web: WebPolicy,
    /// What its sessions' workspaces begin with a copy of.
    pub clone_from: Option<CloneFrom>,
    /// The only spaces whose sessions may use it. `None`: all.
    pub spaces: Option<Vec<String>>,
    /// How long the agent's question waits for an answer. `None`: without limit.
    pub ask_expires_s: Option<u64>,
    pub on_ask_expired: OnExpired,
    /// What the person is told when a run fails for good.
    pub on_failed: Option<String>,
    /// What the person is told when a run takes long.
    pub on_delayed: Option<OnDelayed>,
    /// `participants = "anyone"`: users other than a conversation's first may write in it.
    pub shared: bool,
}

/// `[agents.NAME] on_delayed`.
#[derive(Clone, Debug, PartialEq)]
pub struct OnDelayed {
    /// How long the run may take before.
    pub after: Duration,
    pub text: String,
}

/// `[models."provider/model"]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelSettings {
    /// Tokens that the model can see.
    pub context_window: Option<u64>,
    /// Tokens that one reply may have.
    pub max_output_tokens: Option<u64>,
    /// The model can continue a text that ends the request.
    pub prefill: bool,
    /// The server wants user and assistant to take turns, so messages of one role in a row are sent as one.
    pub merge_turns: bool,
    /// The server knows the limit of a reply only as `max_tokens`.
    pub legacy_max_tokens: bool,
    /// `None`: no price is configured.
    pub price: Option<Price>,
}

#[derive(Clone, Debug)]
pub struct Providers {
    pub anthropic: Provider,
    pub openai: Provider,
}

/// How to reach one provider.
#[derive(Clone, Debug)]
pub struct Provider {
    /// Without a trailing slash. `None`: the provider's own address.
    pub base_url: Option<String>,
    pub api_key: Option<SecretString>,
    /// The limit for opening a connection.
    pub connect_s: u64,
    /// The longest silence before or during a reply.
    pub idle_s: u64,
    /// The limit for a whole call.
    pub total_s: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scripted {
    /// The folder with `NAME.toml` for the model `scripted/NAME`.
    pub dir: Option<PathBuf>,
}

/// The sessions' files on this host, and what of them is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workspace {
    /// The folder with one folder per session.
    pub dir: Option<PathBuf>,
    /// Maximum number of files and links of a session, and again of its folders.
    pub max_files: u64,
    /// Maximum size of a session's files together.
    pub max_bytes: u64,
    /// How long it may take to look through them.
    pub snapshot: Duration,
    /// Patterns of names that are never stored.
    pub leave_out: Vec<String>,
    /// How long the files of a session that rests stay on this host.
    pub keep: Duration,
    /// How much room the files of all sessions may take on this host.
    pub keep_bytes: u64,
}

impl Default for Workspace {
    fn default() -> Self {
        Workspace {
            dir: None,
            max_files: 50_000,
            max_bytes: 2 << 30,
            snapshot: Duration::from_secs(120),
            leave_out: Vec::new(),
            keep: Duration::from_secs(24 * 3600),
            keep_bytes: 20 << 30,
        }
    }
}

impl Workspace {
    /// The folder that holds one folder per session: `dir`, or `workspaces` in the working folder.
    pub fn folder(&self) -> &Path {
        self.dir.as_deref().unwrap_or(Path::new("workspaces"))
    }
}

/// Why an agent cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AgentError {
    #[error("there is no agent {name:?}; the configuration has: {known}")]
    Unknown { name: String, known: String },
    #[error(
        "agent {name:?} has no model: set agents.{name}.model to provider/model, or ANTHROPIC_API_KEY or OPENAI_API_KEY"
    )]
    NoModel { name: String },
    #[error("agent {name:?} begins with a git bundle, and this host has no git")]
    NoGit { name: String },
}

impl Config {
    /// Reads the configuration.
    ///
    /// `path` is `--config`; without it `WAKEFUL_CONFIG` of `env` counts. A file that is named must exist;
    /// `./wakeful.toml` may be missing. Relative paths in the file start from its folder, and paths in the
    /// environment from the working folder.
    ///
    /// # Errors
    /// [`ConfigError`] with every problem at once: unknown keys, wrong types, values out of range, secrets
    /// given twice or in unreadable files.
    pub fn load(
        path: Option<&Path>,
        env: impl Iterator<Item = (String, String)>,
    ) -> Result<Config, ConfigError> {
        Config::load_with_providers(path, env, &[])
    }

    /// Reads the configuration of a program that adds `providers` of models to the built-in ones. Otherwise
    /// like [`Config::load`].
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn load_with_providers(
        path: Option<&Path>,
        env: impl Iterator<Item = (String, String)>,
        providers: &[&str],
    ) -> Result<Config, ConfigError> {
        let env: BTreeMap<String, String> = env.collect();
        let from_env = env.get("WAKEFUL_CONFIG").filter(|path| !path.trim().is_empty());
        let (file, named_by) = match (path, from_env) {
            (Some(path), _) => (path.to_owned(), Some("--config")),
            (None, Some(path)) => (PathBuf::from(path), Some("WAKEFUL_CONFIG")),
            (None, None) => (PathBuf::from(DEFAULT_FILE), None),
        };
        let failed = |text: String| ConfigError::new(vec![Problem::new(Origin::Nowhere, text)]);
        let (text, file) = match (std::fs::read_to_string(&file), named_by) {
            (Ok(text), _) => (text, Some(file)),
            (Err(error), None) if error.kind() == std::io::ErrorKind::NotFound => (String::new(), None),
            (Err(error), Some(by)) => {
                return Err(failed(format!("cannot read {} ({by}): {error}", file.display())));
            }
            (Err(error), None) => return Err(failed(format!("cannot read {}: {error}", file.display()))),
        };
        Config::parse(&text, file, &env, providers)
    }

    fn parse(
        text: &str,
        file: Option<PathBuf>,
        env: &BTreeMap<String, String>,
        providers: &[&str],
    ) -> Result<Config, ConfigError> {
        let path = file.as_deref().unwrap_or(Path::new(DEFAULT_FILE));
        let mut table = tree::parse(text, path).map_err(ConfigError::new)?;
        let warnings = tree::overlay(&mut table, env);
        let (mut config, problems) = schema::read(table, providers);
        if !problems.is_empty() {
            return Err(ConfigError::new(problems));
        }
        config.file = file;
        config.warnings = warnings;
        for (name, model) in &config.models {
            let of_protocol = [
                ("prefill", model.prefill, "anthropic/", "Anthropic's"),
                ("merge_turns", model.merge_turns, "openai/", "OpenAI's"),
                ("legacy_max_tokens", model.legacy_max_tokens, "openai/", "OpenAI's"),
            ];
            for (key, given, prefix, whose) in of_protocol {
                if given && !name.starts_with(prefix) {
                    let text = format!("models.{name:?}.{key} has no effect: only {whose} protocol takes it");
                    config.warnings.push(text);
                }
            }
        }
        Ok(config)
    }

    /// A commented file that shows every key and loads unchanged: `wakeful.example.toml`.
    pub fn example() -> &'static str {
        include_str!("../../../wakeful.example.toml")
    }

    /// The age after which an unsent message of this channel is no longer sent. `None`: no limit.
    pub fn max_age(&self, channel: &str) -> Option<Duration> {
        match channel {
            "email" => self.email.max_age_s.map(Duration::from_secs),
            "slack" | "telegram" | "webhook" => Some(self.messenger.max_age),
            _ => None,
        }
    }

    /// Returns what a person must do so that workers send by this channel.
    pub fn how_to_enable(&self, channel: &str) -> String {
        match channel {
            "email" => "configure a way out for mail ([email]) on one of the workers".to_owned(),
            "slack" | "telegram" | "webhook" => {
                format!("configure [messenger.{channel}] on one of the workers")
            }
            _ => "start a worker that registers it by `App::channel`".to_owned(),
        }
    }

    fn model_of_keys(&self) -> Option<String> {
        if self.providers.anthropic.api_key.is_some() {
            Some(ANTHROPIC_MODEL.to_owned())
        } else if self.providers.openai.api_key.is_some() {
            Some(OPENAI_MODEL.to_owned())
        } else {
            self.fallback_model.clone()
        }
    }

    /// The context window of `model`, in tokens.
    pub fn context_window(&self, model: &str) -> i64 {
        let configured = self.models.get(model).and_then(|settings| settings.context_window);
        i64::try_from(configured.unwrap_or(CONTEXT_WINDOW)).unwrap_or(i64::MAX)
    }

    /// The price of `model`; zero if none is configured. [`Config::has_price`] tells the two cases apart.
    pub fn price(&self, model: &str) -> Price {
        self.models.get(model).and_then(|settings| settings.price).unwrap_or_default()
    }

    /// Returns whether the configuration gives a price for `model`.
    pub fn has_price(&self, model: &str) -> bool {
        self.models.get(model).is_some_and(|settings| settings.price.is_some())
    }

    /// Returns the variable of the key that `model` needs and this configuration does not have.
    pub fn missing_key(&self, model: &str) -> Option<&'static str> {
        let (provider, variable) = match model.split_once('/')?.0 {
            "anthropic" => (&self.providers.anthropic, "ANTHROPIC_API_KEY"),
            "openai" => (&self.providers.openai, "OPENAI_API_KEY"),
            _ => return None,
        };
        // A private compatible server may need no key.
        (provider.api_key.is_none() && provider.base_url.is_none()).then_some(variable)
    }
}
