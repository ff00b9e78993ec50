//! `wakeful dev`: runs everything with a Postgres of its own, and sends sample messages of every kind.

mod worker;

use super::{Exit, Usage};
use crate::App;
use crate::dev::{Banner, Cluster, DATABASE, Home, Options, Style, samples};
use crate::serve::{self, Listeners, Role};
use anyhow::Context as _;
use secrecy::ExposeSecret as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use wakeful_config::{AgentSettings, Config, DEFAULT_AGENT, DEFAULT_DEPLOYMENT, Queue};
use wakeful_engine::ctx::Ctx;
use wakeful_engine::telemetry::{self, Format};
use wakeful_store::Store;
use wakeful_workflow::session::SessionStatus;
use worker::Workers;

/// Longest time that the banner waits for the samples. A real model may be slow.
const SAMPLES_REST: Duration = Duration::from_secs(90);

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    verb: Option<Verb>,
    /// Where the data is kept [default: $XDG_DATA_HOME/wakeful/dev, or ~/.local/share/wakeful/dev]. When root
    /// starts it, Postgres runs as another user. If that user cannot reach this directory, one in /var/tmp is
    /// used instead.
    #[arg(long, value_name = "DIR", global = true)]
    data_dir: Option<PathBuf>,
    /// The address of the HTTP interface [default: 127.0.0.1:7070].
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// Send no samples.
    #[arg(long)]
    no_samples: bool,
    /// Empty the data first.
    #[arg(long)]
    fresh: bool,
    /// Stop when the samples are done, with status 1 if one failed.
    #[arg(long)]
    once: bool,
    /// Be the worker of the `wakeful dev` that starts this.
    #[arg(long, hide = true)]
    as_worker: bool,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Print the DATABASE_URL of the running `wakeful dev`.
    Url,
    /// Stop the running `wakeful dev`.
    Stop,
    /// Empty the data.
    Reset,
}

pub(super) async fn run(app: App, config: Config, args: Args) -> anyhow::Result<Exit> {
    let home = Home::at(args.data_dir.as_deref())?;
    if args.as_worker {
        return worker::run(app, config, &args, home).await;
    }
    let Some(verb) = &args.verb else { return start(app, config, args, home).await };
    if args.listen.is_some() || args.no_samples || args.fresh || args.once {
        return Err(Usage("`wakeful dev url`, `stop` and `reset` take --data-dir only".to_owned()).into());
    }
    match verb {
        Verb::Url => url(home, &data_dir_option(&args)).await,
        Verb::Stop => stop(home).await,
        Verb::Reset => reset(home, &data_dir_option(&args)).await,
    }
}

async fn url(home: Home, place: &str) -> anyhow::Result<Exit> {
    let dir = home.dir().to_owned();
    let Some(cluster) = spawn_blocking(move || Cluster::running(&dir)).await?? else {
        let shown = home.dir().display();
        match home.holder()? {
            Some(_) => eprintln!(
                "wakeful: `wakeful dev` runs in {shown}, but no Postgres of its own answers there. It may be starting, or use the database of a DATABASE_URL. Otherwise stop it with `wakeful dev{place} stop` and start it again"
            ),
            None => eprintln!(
                "wakeful: nothing runs in {shown}: start `wakeful dev{place}` first, or name the --data-dir of one that runs"
            ),
        }
        return Ok(Exit::Unavailable);
    };
    println!("{}", cluster.url(DATABASE));
    Ok(Exit::Ok)
}

async fn stop(home: Home) -> anyhow::Result<Exit> {
    let shown = home.dir().display().to_string();
    match spawn_blocking(move || home.stop()).await?? {
        Some(pid) => eprintln!("stopped process {pid}; the data in {shown} stays"),
        None => eprintln!("nothing runs in {shown}"),
    }
    Ok(Exit::Ok)
}

async fn reset(home: Home, place: &str) -> anyhow::Result<Exit> {
    if given_database_url(&home)?.is_some() {
        return Err(Usage(not_ours("reset")).into());
    }
    let Some(lock) = home.lock()? else { return occupied(&home, place) };
    let shown = home.dir().display().to_string();
    spawn_blocking(move || home.empty(&lock)).await??;
    eprintln!("emptied {shown}");
    Ok(Exit::Ok)
}

async fn start(app: App, mut config: Config, args: Args, home: Home) -> anyhow::Result<Exit> {
    let given = given_database_url(&home)?;
    if args.fresh && given.is_some() {
        return Err(Usage(not_ours("--fresh")).into());
    }
    let Some(mut lock) = home.lock()? else { return occupied(&home, &data_dir_option(&args)) };
    config.server.listen = args.listen.unwrap_or(config.server.listen);
    let listener = serve::bind(config.server.listen).await?;
    let listen = listener.local_addr()?;
    let listeners = Listeners { api: Some(listener), monitoring: serve::bind_monitoring(&config).await? };
    if args.fresh {
        let home = home.clone();
        lock = spawn_blocking(move || home.empty(&lock).map(|()| lock)).await??;
    }
    let screen = telemetry::Screen {
        color: Style::of(&std::io::stderr()).color,
        open: Arc::new(AtomicBool::new(false)),
    };
    home.listens(&lock, listen)?;
    let telemetry = telemetry::init_dev(&log_settings(), home.open_log()?, screen.clone());

    let (cluster, url) = database(&home, given.as_deref()).await?;
    configure(&mut config, &app, &home, &url, !args.no_samples)?;
    config.check_serve(true, true)?;
    let ctx = app.context(config, &url).await?;
    let (show_log, shown_yet) = watch::channel(false);
    let workers = Workers::new(&url, shown_yet);
    let worker = workers.pid();
    let working = async {
        let kept = workers.keep(&ctx.shutdown.draining).await;
        ctx.shutdown.draining.cancel();
        kept
    };
    let serving = async {
        let served = serve::run(&app, Arc::clone(&ctx), &[Role::Api, Role::Scheduler], listeners).await;
        // The server has ended, so the banner has nothing left to wait for.
        ctx.shutdown.draining.cancel();
        served
    };
    let showing = async {
        let shown = tokio::select! {
            shown = show(&ctx, listen, &args, &home, given.is_some(), worker) => shown.map(Some),
            () = ctx.shutdown.draining.cancelled() => Ok(None),
        };
        screen.open.store(!args.once, Ordering::Relaxed);
        show_log.send_replace(!args.once);
        if args.once || shown.is_err() {
            ctx.shutdown.draining.cancel();
        }
        shown
    };
    let (served, shown, worked) = tokio::join!(serving, showing, working);
    if let Some(cluster) = cluster {
        spawn_blocking(move || cluster.stop()).await??;
    }
    drop((telemetry, lock));
    served?;
    worked?;
    if !args.once {
        eprintln!("stopped; the data in {} stays", home.dir().display());
    }
    Ok(shown?.unwrap_or(Exit::Ok))
}

/// Returns a migrated database: our own cluster, unless DATABASE_URL names another one.
async fn database(home: &Home, given: Option<&str>) -> anyhow::Result<(Option<Cluster>, String)> {
    let began = Instant::now();
    let (cluster, url) = match given {
        Some(url) => (None, url.to_owned()),
        None => {
            let options = Options::new(home.dir());
            eprint!("Postgres in {} ", home.dir().display());
            let cluster =
                spawn_blocking(move || Cluster::start(options)).await?.inspect_err(|_| eprintln!())?;
            wakeful_store::create_database(&cluster.url("postgres"), DATABASE).await?;
            eprintln!("is up ({:.1} s)", began.elapsed().as_secs_f64());
            let url = cluster.url(DATABASE);
            (Some(cluster), url)
        }
    };
    let store = Store::connect(&url, 2, "wakeful dev").await;
    let store = if given.is_some() { store.context("the server of DATABASE_URL") } else { Ok(store?) }?;
    let applied = store.migrate(|_| {}).await?;
    if cluster.is_some() {
        // An erasure needs one of them. The server of a DATABASE_URL is not ours: its roles are for its operator to make.
        store.create_roles().await.context("the roles of the database")?;
    }
    store.close().await;
    if applied > 0 {
        eprintln!("{applied} migrations applied");
    }
    Ok((cluster, url))
}

/// Fills in what production must choose itself, secrets included.
fn configure(
    config: &mut Config,
    app: &App,
    home: &Home,
    url: &str,
    with_samples: bool,
) -> anyhow::Result<()> {
    config.database.url = Some(url.into());
    apply_dev_defaults(config, app, home)?;
    if config.email.incoming.thread_secret.is_none() {
        config.email.incoming.thread_secret = Some(home.thread_secret()?);
    }
    if config.messenger.webhook.secrets.is_empty() {
        config.messenger.webhook.secrets.push(home.webhook_secret()?);
    }
    if with_samples {
        give_sample_schedule(config);
    }
    Ok(())
}

/// A configuration without schedules gets the sample's.
fn give_sample_schedule(config: &mut Config) {
    if config.schedules.is_empty() && config.agents.contains_key(DEFAULT_AGENT) {
        config.schedules.insert(samples::CRON.conversation.to_owned(), samples::schedule());
    }
}

/// Like [`apply_if_dev_database`], and with the sample's schedule, so that two configurations can be compared.
///
/// # Errors
/// Those of [`apply_if_dev_database`].
pub(super) fn apply_with_samples(config: &mut Config, app: &App) -> anyhow::Result<()> {
    if apply_if_dev_database(config, app)?.is_some() {
        give_sample_schedule(config);
    }
    Ok(())
}

/// Fills in a model, every tool, folders for mail and files, and a short lease. After `kill -9`, the short
/// lease lets the next start take over the killed process's jobs soon. Writes nothing.
fn apply_dev_defaults(config: &mut Config, app: &App, home: &Home) -> anyhow::Result<()> {
    if config.server.deployment == DEFAULT_DEPLOYMENT {
        // A deployment name of dev's own: on a shared database it leaves other deployments' schedules alone.
        config.server.deployment = "dev".to_owned();
    }
    config.fallback_model = Some("scripted/demo".to_owned());
    if config.agents.is_empty() {
        config.agents.insert(DEFAULT_AGENT.to_owned(), AgentSettings::default());
    }
    let tools = app.registry(config)?;
    if let Some(agent) = config.agents.get_mut(DEFAULT_AGENT)
        && agent.tools.is_none()
    {
        agent.tools = Some(tools.names().map(str::to_owned).collect());
    }
    if config.email.maildir.is_none() && config.email.smtp.is_none() {
        // All mail goes to a local folder, so agents may write to any address.
        for agent in config.agents.values_mut() {
            agent.recipients.get_or_insert_with(|| vec!["*".to_owned()]);
        }
        config.email.maildir = Some(home.mail());
    }
    config.workspace.dir.get_or_insert_with(|| home.workspaces());
    let Queue { lease, heartbeat, .. } = config.queue;
    if (lease, heartbeat) == (Queue::LEASE, Queue::HEARTBEAT) {
        config.queue =
            Queue { lease: Duration::from_secs(5), heartbeat: Duration::from_secs(1), ..config.queue };
    }
    Ok(())
}

/// Applies dev's defaults to a configuration whose database is dev's own, and then returns dev's directory.
/// Commands that run next to `wakeful dev` use it.
///
/// # Errors
/// When the program's tools cannot be registered.
pub(super) fn apply_if_dev_database(config: &mut Config, app: &App) -> anyhow::Result<Option<Home>> {
    let home = config.database.url.as_ref().and_then(|url| Home::of_database(url.expose_secret()));
    if let Some(home) = &home {
        apply_dev_defaults(config, app, home)?;
    }
    Ok(home)
}

/// Sends the samples if this is the first start, waits for them, and prints the banner.
async fn show(
    ctx: &Ctx,
    listen: SocketAddr,
    args: &Args,
    home: &Home,
    given: bool,
    mut worker: watch::Receiver<Option<i32>>,
) -> anyhow::Result<Exit> {
    let agent = ctx.config.agent(DEFAULT_AGENT);
    if !args.no_samples
        && let Ok(agent) = &agent
    {
        let sent = samples::send(ctx, listen, home).await?;
        if sent > 0 {
            eprintln!("{sent} samples sent to {}; waiting until they are done", agent.model);
        }
    }
    let began = Instant::now();
    let states = samples::wait(&ctx.store, SAMPLES_REST, |state| {
        // A session that rests at once rested in an earlier start, so do not report it.
        if began.elapsed() > Duration::from_millis(300) {
            let (conversation, status) = (state.conversation, state.status.as_str());
            eprintln!("  {conversation:<14} {status:<15} after {:.1} s", began.elapsed().as_secs_f64());
        }
    })
    .await?;
    let shown_path =
        |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
    let mail = match (&ctx.config.email.maildir, &ctx.config.email.smtp) {
        (None, Some(smtp)) => format!("by SMTP to {}:{}", smtp.host, smtp.port),
        (maildir, _) => shown_path(maildir),
    };
    let worker = *worker.wait_for(Option::is_some).await?;
    let banner = Banner {
        listen,
        worker,
        home,
        model: agent.as_ref().ok().map(|agent| agent.model.as_str()),
        given_database: given,
        mail: &mail,
        workspaces: &shown_path(&ctx.config.workspace.dir),
        guarded: ctx.config.server.token.is_some(),
        program: &std::env::args().next().unwrap_or_else(|| "wakeful".to_owned()),
        place: &data_dir_option(args),
        samples: &states,
        once: args.once,
        console: ctx.config.server.console.then_some(ctx.config.server.base_path.as_str()),
        style: Style::of(&std::io::stdout()),
    };
    println!("{banner}");
    let well = |status| matches!(status, SessionStatus::Completed | SessionStatus::WaitingInput);
    let failed = states.iter().any(|state| !state.rests || !well(state.status));
    Ok(if args.once && failed { Exit::Failed } else { Exit::Ok })
}

/// The options that make another command use the same data directory.
fn data_dir_option(args: &Args) -> String {
    args.data_dir.as_ref().map(|dir| format!(" --data-dir {}", dir.display())).unwrap_or_default()
}

/// Log settings for people: text, unless WAKEFUL_LOG_FORMAT asks for JSON.
fn log_settings() -> telemetry::Settings {
    let mut settings = telemetry::Settings::from_env(std::env::vars());
    let json = std::env::var("WAKEFUL_LOG_FORMAT").is_ok_and(|format| format.eq_ignore_ascii_case("json"));
    settings.format = if json { Format::Json } else { Format::Text { color: false } };
    settings
}

/// Returns `DATABASE_URL` if it names another database than dev's own. A user may have set it to the output
/// of `wakeful dev url`, which still means dev's own.
fn given_database_url(home: &Home) -> anyhow::Result<Option<String>> {
    let own = Cluster::future_url(home.dir(), DATABASE)?;
    Ok(std::env::var("DATABASE_URL").ok().filter(|url| !url.trim().is_empty() && *url != own))
}

fn not_ours(what: &str) -> String {
    format!("DATABASE_URL is set, and {what} never empties a database that is not dev's own: unset it")
}

fn occupied(home: &Home, place: &str) -> anyhow::Result<Exit> {
    let pid = home.holder()?.map(|pid| format!(" (process {pid})")).unwrap_or_default();
    eprintln!(
        "wakeful: `wakeful dev` runs in {} already{pid}: `wakeful dev{place} stop` ends it, --data-dir chooses another place",
        home.dir().display()
    );
    Ok(Exit::Conflict)
}
