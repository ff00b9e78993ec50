//! The application: the tools, models, channels and routes that a program registers before it runs.

use crate::Process;
use secrecy::ExposeSecret as _;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use wakeful_config::notify::To;
use wakeful_config::{Config, ConfigError, Invalid};
use wakeful_engine::cancels::Cancels;
use wakeful_engine::capabilities::capabilities;
use wakeful_engine::channel::Channel;
use wakeful_engine::ctx::{Bus, Ctx, Plugins, Shutdown};
use wakeful_engine::gates::Gates;
use wakeful_engine::identity::Identity;
use wakeful_engine::ingest::Intake;
use wakeful_engine::model::renderings::Renderings;
use wakeful_engine::model::{Model, Models};
use wakeful_engine::outlines::Outlines;
use wakeful_engine::pauses::Pauses;
use wakeful_engine::perform::{Chunks, CutCalls};
use wakeful_engine::replay::Recordings;
use wakeful_engine::telemetry::Metrics;
use wakeful_engine::tool::Tool;
use wakeful_engine::tool::registry::Registry;
use wakeful_engine::warm::WarmSessions;
use wakeful_engine::watchdog::Watchdog;
use wakeful_engine::web::Web;
use wakeful_engine::workspace::{Settings, Workspaces};
use wakeful_store::Store;
use wakeful_store::queue::{News, Notifier};
use wakeful_store::schema::Fit;
use wakeful_workflow::fault::Fault;
use wakeful_workflow::preflight::Capabilities;

/// Builds extra routes that use the process.
type Routes = Arc<dyn Fn(Process) -> axum::Router + Send + Sync>;

/// A worker with a program's own tools, models, channels and triggers, added to the built-in ones.
#[derive(Clone, Default)]
pub struct App {
    tools: Vec<Arc<dyn Tool>>,
    providers: Vec<(String, wakeful_engine::model::Factory)>,
    channels: Vec<Arc<dyn Channel>>,
    routes: Vec<Routes>,
}

impl App {
    /// Creates an application that has the built-in parts only.
    pub fn new() -> App {
        App::default()
    }

    /// Adds a tool. Agents use it when their `tools` name it.
    #[must_use]
    pub fn tool(mut self, tool: impl Tool + 'static) -> App {
        self.tools.push(Arc::new(tool));
        self
    }

    /// Adds a provider of models, or replaces the built-in one of that name: `factory` gets the part of the model's name after the
    /// slash.
    #[must_use]
    pub fn provider(
        mut self,
        name: &str,
        factory: impl Fn(&str) -> Result<Arc<dyn Model>, Fault> + Send + Sync + 'static,
    ) -> App {
        self.providers.push((name.to_owned(), Arc::new(factory)));
        self
    }

    /// Adds a channel for outgoing messages, or replaces the built-in one of that name.
    #[must_use]
    pub fn channel(mut self, channel: impl Channel + 'static) -> App {
        self.channels.push(Arc::new(channel));
        self
    }

    /// Adds a trigger: routes that verify a request, translate it, and call [`Process::accept`]. They are mounted
    /// next to `/v1` and its token does not guard them, so they must check access themselves.
    #[must_use]
    pub fn routes(mut self, routes: impl Fn(Process) -> axum::Router + Send + Sync + 'static) -> App {
        self.routes.push(Arc::new(routes));
        self
    }

    /// Runs `wakeful`'s command line with everything that was added, on this process's arguments.
    pub fn main(self) -> ExitCode {
        crate::command::main(self)
    }

    /// Returns every tool: the built-in ones, those that were added, and the pinned ones of the configuration's MCP servers.
    ///
    /// # Errors
    /// When two tools have the same name, a schema is invalid, or the file of a server's tools is missing.
    pub(crate) fn registry(&self, config: &Config) -> anyhow::Result<Registry> {
        let mut registry = Registry::built_in()?;
        for tool in &self.tools {
            registry.register(Arc::clone(tool))?;
        }
        for server in config.mcp.values() {
            let of_server = |error: &dyn std::fmt::Display| Invalid(format!("mcp.{}: {error}", server.name));
            for tool in wakeful_mcp::tools(server).map_err(|error| of_server(&error))? {
                let registered = registry.register(tool);
                registered
                    .map_err(|error| of_server(&format!("{}: {error}", server.definitions.display())))?;
            }
        }
        Ok(registry)
    }

    /// Returns every provider of models: the built-in ones and those that were added.
    ///
    /// # Errors
    /// When the HTTP client cannot be built, or two providers were added under one name.
    pub(crate) fn models(&self, config: &Config) -> anyhow::Result<Models> {
        once("provider", self.providers.iter().map(|(name, _)| name.as_str()))?;
        let mut models = Models::built_in(config)?;
        for (name, factory) in &self.providers {
            let factory = Arc::clone(factory);
            models.add(name, move |model| factory(model));
        }
        Ok(models)
    }

    /// Returns what this program can do under `config`, for `wakeful preflight`.
    ///
    /// # Errors
    /// Those of [`App::context`] about tools and channels.
    pub(crate) fn capabilities(&self, config: &Config) -> anyhow::Result<Capabilities> {
        let (tools, channels) = (self.registry(config)?, self.channels(config)?);
        let providers = self.providers.iter().map(|(name, _)| name.as_str());
        Ok(capabilities(config, &tools, providers, channels.keys().map(String::as_str)))
    }

    /// Reads the configuration, which may name this program's own providers.
    ///
    /// # Errors
    /// When the configuration is invalid.
    pub(crate) fn load(&self, path: Option<&Path>) -> Result<Config, ConfigError> {
        let providers: Vec<&str> = self.providers.iter().map(|(name, _)| name.as_str()).collect();
        Config::load_with_providers(path, std::env::vars(), &providers)
    }

    /// Connects a program that drives sessions itself. `config` is the path of a `wakeful.toml`; without it,
    /// the path in `WAKEFUL_CONFIG` or a `wakeful.toml` of the working directory is read. The environment
    /// overrides the file, as it does for the command line. `database_url` is a `postgres://` URL. Checks the
    /// schema, and starts only the tasks for NOTIFY and LISTEN: no worker, no server.
    ///
    /// # Errors
    /// When the configuration is invalid, the database is unreachable or has another schema, or an agent names
    /// a tool that does not exist.
    pub async fn connect(&self, config: Option<&Path>, database_url: &str) -> anyhow::Result<Process> {
        let config = self.load(config)?;
        Ok(Process { ctx: self.context(config, database_url).await? })
    }

    /// Connects to the database, checks its schema and builds the process's context. Starts only the tasks
    /// for NOTIFY and LISTEN. Only for this project's own tests: programs call [`App::connect`].
    ///
    /// # Errors
    /// When the database is unreachable or has another schema ([`wakeful_store::Error`] in the chain), or
    /// when an agent names a tool that does not exist.
    #[doc(hidden)]
    pub async fn context(&self, config: Config, url: &str) -> anyhow::Result<Arc<Ctx>> {
        let channels = self.channels(&config)?;
        self.connected(config, url, channels).await
    }

    /// Like [`App::context`], for a command that sends nothing: it has no channels, and asks for none of their
    /// settings.
    ///
    /// # Errors
    /// Those of [`App::context`].
    pub(crate) async fn dry_context(&self, config: Config, url: &str) -> anyhow::Result<Arc<Ctx>> {
        self.connected(config, url, BTreeMap::new()).await
    }

    async fn connected(
        &self,
        config: Config,
        url: &str,
        channels: BTreeMap<String, Arc<dyn Channel>>,
    ) -> anyhow::Result<Arc<Ctx>> {
        let tools = self.registry(&config)?;
        for name in config.agent_names() {
            if let Ok(agent) = config.agent(&name) {
                let known = tools.definitions(&agent.tools);
                known.map_err(|error| Invalid(format!("agents.{name}.tools: {error}")))?;
            }
        }
        let intake_wait = Duration::from_millis(config.server.ingest_wait_ms);
        let connections = config.database.max_connections.saturating_sub(wakeful_store::OWN_CONNECTIONS);
        let blobs = wakeful_engine::blobs::stores(&config.blobs).map_err(anyhow::Error::msg)?;
        let store = Store::connect(url, connections, wakeful_store::queue::APPLICATION).await?;
        let store = store.with_blob_stores(blobs);
        wakeful_engine::encryption::turn_on(&config, &store)?;
        if let fit @ Fit::Newer { .. } = store.check_schema().await? {
            tracing::warn!("A rolling deploy, or a rollback: {}", fit.said());
        }
        let models = self.models(&config)?;
        // This signal also ends the LISTEN task. After it the process only closes its connections.
        let abort = CancellationToken::new();
        // Report a wrong address of the old cache now, and not when the first chat comes.
        wakeful_channels::chat::legacy::Cache::of(&config)?;
        let news = News::listen(&store, abort.clone());
        let metrics = Metrics::new(channels.keys().map(String::as_str));
        Ok(Arc::new(Ctx {
            bus: Bus { notifier: Notifier::start(store.clone(), &news), news },
            intake: Intake::new(&store, config.server.ingest_concurrency, intake_wait, &metrics),
            cancels: Cancels::default(),
            gates: Gates::new(config.gate, config.queue.lease, config.queue.concurrency),
            pauses: Pauses::default(),
            chunks: Chunks::default(),
            cut: CutCalls::default(),
            watchdog: Watchdog::default(),
            recordings: Recordings::default(),
            renderings: Renderings::default(),
            warm: WarmSessions::new(config.queue.warm_mb),
            outlines: Outlines::default(),
            identity: Identity::of_this_process(),
            metrics,
            web: Web::new(&config.web)?,
            workspaces: Workspaces::new(Settings::of(&config.workspace)),
            shutdown: Shutdown { abort, ..Shutdown::default() },
            plugins: Plugins { tools, models, channels },
            store,
            config,
        }))
    }

    /// Returns the channels by name: the built-in ones that are configured, and those that were added.
    ///
    /// # Errors
    /// When one cannot be built, two were added under one name, or an agent may send mail and nothing does.
    pub(crate) fn channels(&self, config: &Config) -> anyhow::Result<BTreeMap<String, Arc<dyn Channel>>> {
        once("channel", self.channels.iter().map(|channel| channel.name()))?;
        let mut channels: BTreeMap<String, Arc<dyn Channel>> = BTreeMap::new();
        for channel in wakeful_channels::senders(config)?.iter().chain(&self.channels) {
            channels.insert(channel.name().to_owned(), Arc::clone(channel));
        }
        for one in &config.notify {
            let (name, to) = (&one.rule.name, one.to.as_str());
            if to != "webhook" && !channels.contains_key(to) {
                let text =
                    format!("notify {name:?} sends by {to}, and nothing does: {}", config.how_to_enable(to));
                return Err(Invalid(text).into());
            }
            let slack = &config.messenger.slack;
            let may_press = !slack.signing_secrets.is_empty() && slack.allow.users.is_some();
            if matches!(one.to, To::Slack { buttons: true, .. }) && !may_press {
                let text = format!(
                    "notify {name:?} has buttons: set signing_secrets and allow_users in [messenger.slack]"
                );
                return Err(Invalid(text).into());
            }
        }
        for name in config.agent_names() {
            // Without a sender, `compose_email` would tell the model that the mail is on its way, and no mail
            // would leave.
            if let Ok(agent) = config.agent(&name)
                && agent.tools.iter().any(|tool| tool == "compose_email")
                && !channels.contains_key("email")
            {
                let text = format!(
                    "agents.{name}.tools has compose_email, but nothing sends mail: set [email.smtp], or email.maildir \
                     (WAKEFUL_EMAIL__MAILDIR)"
                );
                return Err(Invalid(text).into());
            }
        }
        Ok(channels)
    }

    /// Returns the routes of the whole HTTP interface, the program's own included.
    ///
    /// # Errors
    /// A configuration that no channel's routes can be made of.
    pub(crate) fn router(&self, ctx: &Arc<Ctx>) -> anyhow::Result<axum::Router> {
        let own = self.routes.iter().map(|routes| routes(Process { ctx: Arc::clone(ctx) }));
        let (guarded, webhooks) = (wakeful_channels::guarded(ctx)?, wakeful_channels::webhooks(ctx));
        let own = own.fold(axum::Router::new(), axum::Router::merge);
        let door = wakeful_http::Door::new(Arc::clone(ctx));
        let api = wakeful_http::router(
            Arc::clone(ctx),
            guarded,
            webhooks,
            own,
            &door,
            wakeful_channels::operations,
        );
        let server = &ctx.config.server;
        let settings = wakeful_console::Settings {
            token: server.token.as_ref().map(|token| token.expose_secret().to_owned()),
            base_path: server.base_path.clone(),
            enabled: server.console,
        };
        Ok(wakeful_console::mount(api, settings, |pages| door.before(pages)))
    }
}

/// Refuses a name that a program has given twice: the second would silently take the place of the first.
fn once<'a>(what: &str, names: impl Iterator<Item = &'a str>) -> anyhow::Result<()> {
    let mut seen = BTreeSet::new();
    for name in names {
        if !seen.insert(name) {
            let text = format!(
                "this program registers two {what}s under the name {name:?}, and only one of them could be used: give one of them \
                 another name"
            );
            return Err(Invalid(text).into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use wakeful_engine::channel::{Outbound, SendError};

    struct Pigeon(&'static str);

    #[async_trait::async_trait]
    impl Channel for Pigeon {
        fn name(&self) -> &str {
            self.0
        }

        fn is_idempotent(&self) -> bool {
            false
        }

        async fn send(&self, _: &Outbound<'_>) -> Result<serde_json::Value, SendError> {
            Ok(serde_json::Value::Null)
        }
    }

    #[test]
    fn two_channels_or_providers_of_one_name_are_refused_in_words() {
        let config = Config::load_with_providers(None, std::iter::empty(), &[]).expect("a configuration");
        let sound = App::new().channel(Pigeon("pigeon")).channel(Pigeon("owl"));
        assert_eq!(sound.channels(&config).map(|all| all.len()).map_err(|error| error.to_string()), Ok(2));
        let twice = sound.channel(Pigeon("pigeon"));
        let refused =
            twice.channels(&config).map(|all| all.len()).expect_err("one would be lost").to_string();
        assert!(refused.contains("two channels under the name \"pigeon\""), "{refused}");

        let factory = |_: &str| Err(Fault::NotConfigured { message: "none".to_owned() });
        // One in the place of a built-in one is meant.
        let sound = App::new().provider("echo", factory).provider("openai", factory);
        assert!(sound.models(&config).is_ok());
        let refused = sound
            .provider("echo", factory)
            .models(&config)
            .map(|_| ())
            .expect_err("one would be lost")
            .to_string();
        assert!(refused.contains("two providers under the name \"echo\""), "{refused}");
    }
}
