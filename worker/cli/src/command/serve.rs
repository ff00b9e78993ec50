//! `wakeful serve`: checks the configuration and the database, and then runs the roles of a process.

use super::Exit;
use crate::App;
use crate::serve::{self, Listeners, Role};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{debug, info, warn};
use wakeful_config::Config;
use wakeful_engine::ctx::Ctx;
use wakeful_store::{Outage, diagnosis};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The roles of this process.
    #[arg(long, value_delimiter = ',', default_values = ["api", "worker", "scheduler"])]
    roles: Vec<Role>,
    /// Steps and deliveries to run at the same time; overrides the configuration.
    #[arg(long, value_name = "N")]
    concurrency: Option<usize>,
    /// The address of the HTTP interface; overrides the configuration.
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
}

pub(super) async fn run(app: App, mut config: Config, args: Args) -> anyhow::Result<Exit> {
    if let Some(concurrency) = args.concurrency {
        config.queue.concurrency = concurrency;
    }
    if let Some(listen) = args.listen {
        config.server.listen = listen;
    }
    let has = |role| args.roles.contains(&role);
    config.check_serve(has(Role::Api), has(Role::Worker))?;
    let url = super::database_url(&config)?;
    let listeners = Listeners {
        api: if has(Role::Api) { Some(serve::bind(config.server.listen).await?) } else { None },
        monitoring: serve::bind_monitoring(&config).await?,
    };
    require_session(&url).await?;
    let ctx = patiently(&app, &config, &url).await?;
    say_connections(&ctx, has(Role::Worker)).await;
    serve::run(&app, ctx, &args.roles, listeners).await?;
    Ok(Exit::Ok)
}

/// How long a notification may take. One that arrives takes milliseconds.
const NOTIFICATION: Duration = Duration::from_secs(3);

/// Behind a pooler in transaction mode, LISTEN hears nothing, the liveness lock belongs to another client, and
/// settings of a connection are lost.
#[derive(Debug, thiserror::Error)]
#[error(
    "the database's connections do not keep their session: a pooler in transaction mode is between. Connect to Postgres \
     directly, or set pool_mode = session for this database (PgBouncer)"
)]
pub(super) struct NoSession;

async fn require_session(url: &str) -> Result<(), NoSession> {
    match diagnosis::keeps_session(url, NOTIFICATION).await {
        Ok(true) => Ok(()),
        Ok(false) => Err(NoSession),
        Err(error) => {
            // What comes next waits for the database, and says what is wrong with it.
            debug!(%error, "The database's sessions could not be checked");
            Ok(())
        }
    }
}

/// How long a process waits for its first connection while others have them all. They close what they do not use.
const PATIENCE: Duration = Duration::from_secs(60);

async fn patiently(app: &App, config: &Config, url: &str) -> anyhow::Result<Arc<Ctx>> {
    let began = Instant::now();
    loop {
        let failed = match app.context(config.clone(), url).await {
            Ok(ctx) => return Ok(ctx),
            Err(error) => error,
        };
        let outage = failed.downcast_ref::<wakeful_store::Error>().and_then(wakeful_store::Error::outage);
        if outage != Some(Outage::Crowded) || began.elapsed() > PATIENCE {
            return Err(failed);
        }
        warn!(%failed, "The database has no connection left for this process; waiting for one");
    }
}

/// Says what the fleet wants of the server's connections.
async fn say_connections(ctx: &Ctx, works: bool) {
    match ctx.store.fleet_connections(works.then_some(ctx.config.database.max_connections)).await {
        Ok(connections) => match connections.shortage() {
            Some((said, remedy)) => warn!("{said}; {remedy}"),
            None => info!(?connections, "The server has enough connections"),
        },
        Err(error) => warn!(%error, "The server's connections could not be counted"),
    }
}
