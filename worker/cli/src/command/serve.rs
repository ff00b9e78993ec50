//! `wakeful serve`.

use super::Exit;
use crate::App;
use crate::serve::{self, Role};
use std::net::SocketAddr;
use wakeful_config::Config;

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
    let listener = if has(Role::Api) { Some(serve::bind(config.server.listen).await?) } else { None };
    let ctx = app.context(config, &url).await?;
    serve::run(&app, ctx, &args.roles, listener).await?;
    Ok(Exit::Ok)
}
