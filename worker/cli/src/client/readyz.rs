//! `/readyz` of the server that listens here: what it says of its database.

use super::address::{self, Address};
use serde_json::Value;
use std::time::Duration;
use wakeful_config::Config;
use wakeful_engine::web::{self, Reach};

/// How long a server may take to answer a command that has failed already.
const ANSWER: Duration = Duration::from_secs(3);

/// Returns status and body, or `None` if the connection is refused.
pub async fn ask(server: &str) -> Result<Option<(u16, Value)>, reqwest::Error> {
    // Most likely a local address: ignore a proxy set in the environment.
    let url = format!("{}/readyz", server.trim_end_matches('/'));
    let client = web::client(Reach::Named(&[&url])).no_proxy().build()?;
    match client.get(&url).send().await {
        Ok(response) => {
            let status = response.status().as_u16();
            Ok(Some((status, response.json().await.unwrap_or_default())))
        }
        Err(error) if error.is_connect() => Ok(None),
        Err(error) => Err(error),
    }
}

/// The connections that the server has lost, with their times, as it says it.
pub fn lost(body: &Value) -> Option<&str> {
    body["checks"]["connections"].as_str().filter(|said| *said != "ok")
}

/// What the server says of its database.
pub fn said(body: &Value) -> String {
    let database = body["checks"]["database"].as_str().unwrap_or("it says nothing of its database");
    lost(body).map_or_else(|| database.to_owned(), |lost| format!("{database}; {lost}"))
}

/// What the server of this host says while it has no database: since when, and which of its connections. `None`: no server answers,
/// or its database is there.
pub async fn of_an_outage(config: &Config) -> Option<String> {
    let given = std::env::var(address::VARIABLE).ok();
    let Address { url, .. } = address::server(given.as_deref(), config)?;
    let (status, body) = tokio::time::timeout(ANSWER, ask(&url)).await.ok()?.ok()??;
    let shown = url.split_once("://").map_or(url.as_str(), |(_, rest)| rest).trim_end_matches('/');
    (status == 503 && body["checks"]["database"] != "ok" && body["checks"].is_object())
        .then(|| format!("the server on {shown} says: {}", said(&body)))
}
