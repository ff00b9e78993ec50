//! The command line, with one file per noun. stdout is data; stderr is progress and logs.

mod absurd;
mod audit;
mod batch;
mod blobs;
mod config;
mod conversation;
mod delivery;
mod demo;
mod dev;
mod doctor;
mod effect;
mod encryption;
mod erase;
mod errors;
mod mail;
mod manual;
mod mcp;
mod meter;
mod migrate;
mod notification;
mod output;
mod pause;
mod person;
mod preflight;
mod printable;
mod queue;
mod ready;
mod replay;
mod report;
mod retention;
mod schedule;
mod serve;
mod session;
mod space;
mod token;
mod trigger;
mod worker;

use crate::App;
use crate::serve::CannotListen;
use anyhow::Context as _;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use secrecy::ExposeSecret;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use wakeful_config::{Config, ConfigError, Invalid};
use wakeful_store::{Outage, Store};

/// Connect timeout of interactive commands.
const CONNECT: Duration = Duration::from_secs(5);

/// Exit status of a command, for scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Ok = 0,
    Failed = 1,
    /// Bad usage, or a bad configuration.
    Usage = 2,
    NotFound = 3,
    /// Not possible in the current status.
    Conflict = 4,
    Auth = 5,
    /// What the command needs is away, full or unfit: the database, its schema, the server, a key store, a blob store, a port.
    Unavailable = 6,
    /// Not all of several things went well, or a batch waits for a person.
    Partial = 7,
    /// Two things that must be equal differ, such as a cache and the log that it derives from, or a replay
    /// and its source.
    Divergence = 8,
    /// `doctor` found a problem.
    Doctor = 9,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(exit as u8)
    }
}

/// Runs LLM agents durably on Postgres: crash anywhere, wake where you were.
#[derive(Debug, Parser)]
#[command(name = "wakeful", version, propagate_version = true)]
struct Cli {
    /// The configuration file; without it ./wakeful.toml, if present.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Who acts, for the audit and the journal; without it the system's user.
    #[arg(long = "as", global = true, value_name = "NAME")]
    actor: Option<String>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run everything with a Postgres of its own, and send sample messages of every kind.
    Dev(dev::Args),
    /// Kill a worker in the middle of a chat, and watch another one go on. Needs no setup and leaves nothing
    /// behind.
    Demo,
    /// Run in production. DATABASE_URL is required.
    Serve(serve::Args),
    /// Bring the database's schema up to this binary's.
    Migrate(migrate::Args),
    /// Check this host, its configuration, the database and the workers.
    Doctor(doctor::Args),
    /// Say whether the process of this configuration is ready, for a container's health check: exit status 0, or 6.
    Ready(ready::Args),
    /// List, show and control sessions.
    Session(session::Args),
    /// Show what a conversation did: its sessions, its mails, its tools, its replies.
    Conversation(conversation::Args),
    /// Erase what a person left, or hold it.
    Person(person::Args),
    /// List and show outgoing messages, and send again what failed.
    Delivery(delivery::Args),
    /// List effects whose end is unknown, of all sessions, and say of many how they ended.
    Effect(effect::Args),
    /// Show the keys of encrypted conversations, and wrap them by a new master key.
    Encryption(encryption::Args),
    /// List and show what people were told by the rules of [[notify]], and send it again.
    Notification(notification::Args),
    /// Run a session again, or a folder of exported ones, and compare the result with the original. Sends and
    /// writes nothing, unless you pass --tools live. Exit status 8 when they differ.
    Replay(Box<replay::Args>),
    /// List, create and control schedules.
    Schedule(schedule::Args),
    /// Send a running server an event as an outside sender would: a mail, a chat message, a schedule's
    /// firing, a messenger's message, a notice.
    Trigger(trigger::Args),
    /// Make, list and revoke tokens of the HTTP interface.
    Token(token::Args),
    /// List who did what: every write by the API and the command line, and refused requests.
    Audit(audit::Args),
    /// Delete what ended longer ago than `[retention]` keeps it.
    Retention(retention::Args),
    /// Collect and check the bytes that rows point at: files, outputs, attachments.
    Blobs(blobs::Args),
    /// Show, pause, resume and cancel batches, which `session retry`, `effect resolve` and their like make.
    Batch(batch::Args),
    /// Show failed runs in groups; mute and note them.
    Errors(errors::Args),
    /// Show the job queue.
    Queue(queue::Args),
    /// Leave Absurd: bring its tasks over, prove it, and take it back.
    Absurd(absurd::Args),
    /// List the worker processes, and drain them.
    Worker(worker::Args),
    /// List the mails that came in, and what became of each.
    Mail(mail::Args),
    /// List the tools of MCP servers, and ask the servers for them.
    Mcp(mcp::Args),
    /// Show what is configured, and where.
    Config(config::Args),
    /// Print a script that completes commands in a shell: `wakeful completions bash > /etc/bash_completion.d/wakeful`.
    Completions(manual::CompletionsArgs),
    /// Write a manual page for each command into a directory.
    Man(manual::ManArgs),
    /// Say which open sessions cannot go on under another configuration or program, before it is deployed.
    Preflight(preflight::Args),
    /// Pause an agent, a tool, a provider, a conversation, a schedule, a space, a type of trigger, or the whole queue.
    Pause(pause::Args),
}

// The arguments of a noun whose only options are `-o` and `--space`. Not a doc comment, because clap could show it in the help.
#[derive(Debug, clap::Args)]
struct Noun<V: Subcommand> {
    #[command(flatten)]
    output: output::OutputArgs,
    #[command(flatten)]
    space: space::Space,
    #[command(subcommand)]
    verb: V,
}

/// A usage error that clap cannot see.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Usage(pub String);

pub(crate) fn main(app: App) -> ExitCode {
    #[cfg(feature = "failpoints")]
    let _scenario = fail::FailScenario::setup();
    let parsed = Cli::command()
        .try_get_matches()
        .and_then(|matches| Cli::from_arg_matches(&matches).map(|cli| (cli, matches)));
    let (cli, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => {
            // clap prints help and version to stdout with status 0, and everything else to stderr with 2.
            let _ = error.print();
            return if error.use_stderr() { Exit::Usage.into() } else { Exit::Ok.into() };
        }
    };
    // `dev` and `demo` use a database of their own, which `doctor` does not look at.
    let help = match &cli.command {
        Command::Dev(_) | Command::Demo => None,
        Command::Absurd(_) => Some(
            "check --from (or ABSURD_DATABASE_URL); `wakeful doctor` says more of Wakeful's own database",
        ),
        _ => Some("`wakeful doctor` says more"),
    };
    match run(app, cli, &matches) {
        Ok(exit) => exit.into(),
        Err(error) => {
            eprintln!("wakeful: {}", printable::printable_lines(&causes(&error)));
            if let Some(help) = help.filter(|_| is_of_database(&error)) {
                eprintln!("wakeful: {help}");
            }
            exit_of(&error).into()
        }
    }
}

fn run(app: App, cli: Cli, matches: &clap::ArgMatches) -> anyhow::Result<Exit> {
    let act = audit::act_of(matches, cli.actor.as_deref())?;
    let config = match (app.load(cli.config.as_deref()), &cli.command) {
        (Ok(config), _) => config,
        (Err(error), Command::Doctor(args)) => return doctor::without_configuration(args, &error),
        (Err(error), _) => return Err(error.into()),
    };
    for warning in &config.warnings {
        eprintln!("wakeful: warning: {warning}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("no runtime")?;
    // `dev` sets up its own logging, because its log goes into the data directory.
    let mut settings = wakeful_engine::telemetry::Settings::from_env(std::env::vars());
    if std::env::var_os("WAKEFUL_LOG").is_none() {
        settings.filter = log_of(&cli.command, settings.filter);
    }
    let telemetry =
        (!matches!(cli.command, Command::Dev(_))).then(|| wakeful_engine::telemetry::init(&settings));
    let work = async {
        match cli.command {
            Command::Dev(args) => dev::run(app, config, args).await,
            Command::Demo => demo::run().await,
            Command::Serve(args) => serve::run(app, config, args).await,
            Command::Migrate(args) => migrate::run(config, args).await,
            Command::Doctor(args) => doctor::run(app, config, args).await,
            Command::Ready(args) => ready::run(config, args).await,
            Command::Session(args) => session::run(&app, config, args).await,
            Command::Conversation(args) => conversation::run(config, args).await,
            Command::Person(args) => person::run(config, args).await,
            Command::Delivery(args) => delivery::run(config, args).await,
            Command::Effect(args) => effect::run(config, args).await,
            Command::Encryption(args) => encryption::run(config, args).await,
            Command::Notification(args) => notification::run(config, args).await,
            Command::Replay(args) => replay::run(app, config, *args).await,
            Command::Schedule(args) => schedule::run(&app, config, args).await,
            Command::Token(args) => token::run(config, args).await,
            Command::Audit(args) => audit::run(config, args).await,
            Command::Retention(args) => retention::run(config, args).await,
            Command::Blobs(args) => blobs::run(config, args).await,
            Command::Batch(args) => batch::run(config, args).await,
            Command::Errors(args) => errors::run(config, args).await,
            Command::Queue(args) => queue::run(config, args).await,
            Command::Absurd(args) => absurd::run(&app, config, args).await,
            Command::Pause(args) => pause::run(&app, config, args).await,
            Command::Preflight(args) => preflight::run(&app, config, args).await,
            Command::Trigger(args) => trigger::run(config, args).await,
            Command::Worker(args) => worker::run(config, args).await,
            Command::Mail(args) => mail::run(config, args).await,
            Command::Mcp(args) => mcp::run(config, args).await,
            Command::Config(args) => config::run(&config, &args),
            Command::Completions(args) => manual::completions(&args),
            Command::Man(args) => manual::pages(&args),
        }
    };
    let exit = runtime.block_on(async {
        match act {
            Some(act) => wakeful_store::audit::act::acting(act, work).await.0,
            None => work.await,
        }
    });
    // A blocking task, such as a hanging file operation, must not keep the process alive.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    drop(telemetry);
    exit
}

/// What a command logs unless `WAKEFUL_LOG` says it. `usual` is what a server logs.
fn log_of(command: &Command, usual: String) -> String {
    match command {
        Command::Serve(_) | Command::Dev(_) | Command::Demo => usual,
        // `replay` shows each step as progress, and `doctor` reports what a start would warn of.
        Command::Replay(_) | Command::Doctor(_) => "error,rmcp=off".to_owned(),
        // The command itself says why an MCP server cannot be asked.
        _ => format!("{usual},rmcp=off"),
    }
}

/// Joins the error and its causes. The text of many errors already ends with the text of their cause; such a
/// cause is not repeated.
fn causes(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

fn is_of_database(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        matches!(cause.downcast_ref::<wakeful_store::Error>(), Some(wakeful_store::Error::Database(_)))
    })
}

/// Returns the exit status for a failure.
fn exit_of(error: &anyhow::Error) -> Exit {
    for cause in error.chain() {
        if cause.is::<ConfigError>() || cause.is::<Invalid>() || cause.is::<Usage>() {
            return Exit::Usage;
        }
        if cause.is::<CannotListen>() || cause.is::<serve::NoSession>() {
            return Exit::Unavailable;
        }
        if let Some(error) = cause.downcast_ref::<wakeful_store::Error>() {
            return match error {
                wakeful_store::Error::NotFound { .. } => Exit::NotFound,
                wakeful_store::Error::Conflict { .. }
                | wakeful_store::Error::Refused { .. }
                | wakeful_store::Error::Schedule { .. }
                | wakeful_store::Error::Batch { .. }
                | wakeful_store::Error::Link { .. }
                | wakeful_store::Error::Outdated { .. }
                | wakeful_store::Error::NotErased { .. }
                | wakeful_store::Error::KeyReused { .. } => Exit::Conflict,
                wakeful_store::Error::OfAnotherUser { .. }
                | wakeful_store::Error::OfAUser { .. }
                | wakeful_store::Error::OfASchedule { .. } => Exit::Auth,
                wakeful_store::Error::Schema(_) | wakeful_store::Error::InboxFull { .. } => Exit::Unavailable,
                wakeful_store::Error::Database(_)
                | wakeful_store::Error::Keys { .. }
                | wakeful_store::Error::BlobStore { .. } => Exit::Unavailable,
                wakeful_store::Error::Bundle(_)
                | wakeful_store::Error::File { .. }
                | wakeful_store::Error::Corrupt { .. } => Exit::Failed,
            };
        }
    }
    Exit::Failed
}

/// Checks that `path` is a regular file, because a bundle is read twice. Also, opening a pipe would block
/// until another process writes to it, and no signal could interrupt that.
///
/// # Errors
/// [`Usage`] when `path` exists and is not a regular file. A missing file is reported later, by the code that
/// opens it.
fn check_regular(path: &std::path::Path) -> Result<(), Usage> {
    match std::fs::metadata(path) {
        Ok(of) if !of.is_file() => Err(Usage(format!(
            "{} is not a regular file: a bundle is read twice, so save it to a file first",
            path.display()
        ))),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Says that there is no configuration file, for a command that would do something else with one.
fn say_without_file(config: &Config) {
    if config.file.is_none() {
        eprintln!("wakeful: no wakeful.toml here and no --config: this goes by the environment and defaults");
    }
}

/// Returns the configured database's URL.
fn database_url(config: &Config) -> anyhow::Result<String> {
    let url = config.database.url.as_ref().ok_or_else(|| {
        let text = "no database: set DATABASE_URL (`wakeful dev url` prints that of a running `wakeful dev`), or \
                    `[database] url` in wakeful.toml";
        Usage(text.to_owned())
    })?;
    Ok(url.expose_secret().to_owned())
}

/// Opens the configured database for a command that looks at sessions, after checking that it answers and has
/// this binary's schema.
async fn open_store(config: &Config, application: &str) -> anyhow::Result<Store> {
    let url = database_url(config)?;
    let blobs = wakeful_engine::blobs::stores(&config.blobs).map_err(Usage)?;
    if let Err(error) = wakeful_store::diagnosis::reach(&url, CONNECT).await {
        let address = wakeful_store::diagnosis::address(&url).unwrap_or_default();
        let said = match error.outage() {
            Some(away @ Outage::Away) => {
                // A server that runs here knows since when.
                let server = crate::client::readyz::of_an_outage(config).await;
                let server = server.map(|said| format!(" ({said})")).unwrap_or_default();
                format!("{address}: {}{server}", away.as_str())
            }
            Some(_) | None => address,
        };
        return Err(anyhow::Error::from(error).context(said));
    }
    let store = Store::connect(&url, 2, application).await?.with_blob_stores(blobs);
    wakeful_engine::encryption::turn_on(config, &store)?;
    store.check_schema().await?;
    Ok(store)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(arguments: &[&str]) -> String {
        log_of(&Cli::try_parse_from(arguments).unwrap().command, "info".to_owned())
    }

    #[test]
    fn a_report_has_no_warning_of_the_log_in_its_middle() {
        assert_eq!(log(&["wakeful", "serve"]), "info");
        assert_eq!(log(&["wakeful", "doctor"]), "error,rmcp=off");
        assert_eq!(log(&["wakeful", "mcp", "pull"]), "info,rmcp=off");
    }
}
