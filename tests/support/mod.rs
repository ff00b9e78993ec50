//! What the tests share: a database for each test, the real process, a model server that counts, and an HTTP
//! client.

pub mod checker;
pub mod client;
pub mod database;
pub mod long;
pub mod messengers;
pub mod model;
pub mod process;
pub mod program;
pub mod proxy;
pub mod raw;
#[cfg(feature = "legacy-redis")]
pub mod redis;
pub mod server;
pub mod servers;
pub mod smtp;
pub mod wire;
pub mod wire_rules;
pub mod world;

pub use client::Client;
pub use database::Database;
pub use model::{Answer, ModelServer};
pub use process::{Options, Process};
pub use program::Program;
pub use server::Server;
pub use smtp::SmtpServer;
pub use world::World;

use std::future::Future;
use std::time::{Duration, Instant};

/// How long a test waits before it fails. It is a limit only; no figure depends on it.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Calls `ask` again and again until it returns a value.
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut ask: impl FnMut() -> F) -> T {
    let began = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(began.elapsed() < TIMEOUT, "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
