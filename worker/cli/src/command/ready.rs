//! `wakeful ready`: the health check of a container without a shell.

use super::Exit;
use crate::client::{address, readyz};
use crate::dev::Home;
use secrecy::ExposeSecret as _;
use std::time::Duration;
use wakeful_config::Config;

/// Shorter than the time that health checks usually give a command.
const ANSWER: Duration = Duration::from_secs(5);

#[derive(Debug, clap::Args)]
pub(super) struct Args {}

/// Asks the process of this configuration on this host: at `[monitoring] listen`, or at `[server] listen` if that is not set. Opens
/// no connection to the database.
pub(super) async fn run(config: Config, Args {}: Args) -> anyhow::Result<Exit> {
    // Beside `wakeful dev` it is dev's process, which may listen on another port.
    let dev = config.database.url.as_ref().and_then(|url| Home::of_database(url.expose_secret()));
    let dev = dev.and_then(|home| home.address());
    let listen = config.monitoring.listen.or(dev).unwrap_or(config.server.listen);
    let url = format!("http://{}", address::reachable(listen));
    let said = match tokio::time::timeout(ANSWER, readyz::ask(&url)).await {
        Ok(Ok(Some((200, body)))) if body["checks"].is_object() => {
            println!("ready");
            return Ok(Exit::Ok);
        }
        Ok(Ok(Some((_, body)))) if body["checks"]["draining"] == "draining" => "it is draining".to_owned(),
        Ok(Ok(Some((503, body)))) => format!("it is not ready: {}", readyz::said(&body)),
        Ok(Ok(Some((status, _)))) => format!("{status} comes from there, and not from Wakeful"),
        Ok(Ok(None)) => "nothing listens there".to_owned(),
        Ok(Err(error)) => format!("it does not answer: {error}"),
        Err(_) => format!("it does not answer within {} s", ANSWER.as_secs()),
    };
    eprintln!("wakeful: {url}: {said}");
    Ok(Exit::Unavailable)
}
