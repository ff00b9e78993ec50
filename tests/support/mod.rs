//! What the tests share: a database for each test, the real process, a model server that counts, and an HTTP
//! client.

pub mod captured;
pub mod checker;
pub mod client;
pub mod database;
pub mod documented;
pub mod end;
pub mod folder;
pub mod git;
mod git_identity;
pub mod long;
pub mod mcp;
pub mod messengers;
pub mod model;
pub mod payloads;
pub mod plans;
pub mod process;
pub mod program;
pub mod proxy;
pub mod raw;
pub mod received;
pub mod recorder;
#[cfg(feature = "legacy-redis")]
pub mod redis;
pub mod server;
pub mod servers;
pub mod smtp;
pub mod wire;
pub mod wire_rules;
pub mod world;

pub use client::{Client, http};
pub use database::Database;
pub use end::End;
pub use model::{Answer, ModelServer};
pub use process::{Options, Process};
pub use program::Program;
pub use server::Server;
pub use smtp::SmtpServer;
pub use world::World;

use std::future::Future;
use std::time::{Duration, Instant};

/// How long a test waits before it fails. It is a limit only, and costs nothing while tests pass.
const TIMEOUT: Duration = Duration::from_secs(150);

/// How long a test waits before it fails, unless `WAKEFUL_TEST_TIMEOUT_S` says something else: the slow tests keep a machine busy
/// for minutes.
pub fn timeout() -> Duration {
    let seconds = std::env::var("WAKEFUL_TEST_TIMEOUT_S").ok();
    seconds.map_or(TIMEOUT, |seconds| {
        Duration::from_secs(seconds.parse().expect("WAKEFUL_TEST_TIMEOUT_S in seconds"))
    })
}

/// Waits for something that comes by a signal.
pub async fn within<T>(what: &str, waited_for: impl Future<Output = T>) -> T {
    let waited_for = tokio::time::timeout(timeout(), waited_for).await;
    waited_for.unwrap_or_else(|_| panic!("waited in vain: {what}"))
}

/// Calls `ask` again and again until it returns a value. For what changes in a database, or in another process, and tells nobody. (A
/// session's stream would tell of it. But to read one changes what is tested: a worker writes chunks for those who read.)
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut ask: impl FnMut() -> F) -> T {
    let began = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(began.elapsed() < timeout(), "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Lets an outage last until the leases of all jobs have ended, and the process has tried once more after that. `failed` is what it
/// logs of a try that failed.
pub async fn outlast_the_leases(process: &Process, database: &Database, failed: &str) {
    let ended = "select coalesce(bool_and(run_at < clock_timestamp()), false) from jobs where $1 <> ''";
    eventually("the leases to end", || async { database.value::<bool>(ended, "all").await.then_some(()) })
        .await;
    let tries = || process.log().matches(failed).count();
    let before = tries();
    // One may have begun before.
    eventually("two more tries", || async { (tries() >= before + 2).then_some(()) }).await;
}
