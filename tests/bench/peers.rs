//! Other systems with the same work on the same server: five steps a task, two messages of 2 KB each, 16 tasks at a time.
//!
//! A peer is a program in `peers/`. It makes its backlog, prints `ready`, waits for a line, drains the backlog, and prints
//! the seconds that this took.

use crate::fixture::Database;
use crate::process::{self, STEPS};
use crate::server::Server;
use crate::worker::Drain;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    Absurd,
    Dbos,
    LangGraph,
    Apalis,
}

impl Peer {
    pub fn name(self) -> &'static str {
        match self {
            Peer::Absurd => "Absurd, 1 worker (npm absurd-sdk)",
            Peer::Dbos => "DBOS, 1 process (PyPI dbos)",
            Peer::LangGraph => "LangGraph's checkpointer, 1 process (PyPI)",
            Peer::Apalis => "apalis-postgres, 1 process (crate)",
        }
    }

    /// What `scripts/setup bench-peers` has installed. The others are left out, and the bench says so.
    pub fn installed() -> impl Iterator<Item = Peer> {
        [Peer::Absurd, Peer::Dbos, Peer::LangGraph, Peer::Apalis].into_iter().filter(|peer| {
            let is_there = match peer {
                Peer::Absurd => installed("absurd.sql"),
                Peer::Dbos | Peer::LangGraph => installed("python/bin/python"),
                Peer::Apalis => installed("apalis/release/apalis-steps"),
            }
            .exists();
            if !is_there {
                eprintln!("bench: {} is not installed: scripts/setup bench-peers", peer.name());
            }
            is_there
        })
    }

    fn command(self) -> Result<Command> {
        let script = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("peers").join(name);
        let python = |name: &str| {
            let mut command = Command::new(installed("python/bin/python"));
            command.arg(script(name));
            command
        };
        Ok(match self {
            Peer::Absurd => {
                // Node looks for packages beside the script.
                let copy = installed("absurd.mjs");
                std::fs::copy(script("absurd.mjs"), &copy)?;
                let mut command = Command::new("node");
                command.arg(copy);
                command
            }
            Peer::Dbos => python("dbos_steps.py"),
            Peer::LangGraph => python("langgraph_steps.py"),
            Peer::Apalis => Command::new(installed("apalis/release/apalis-steps")),
        })
    }
}

/// A path in the folder that `scripts/setup bench-peers` fills.
fn installed(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.peers/bench").join(name)
}

/// Lets a peer drain a backlog of `tasks`.
pub async fn drain(server: &mut Server, peer: Peer, tasks: usize) -> Result<Drain> {
    let database = Database::lasting_bare(server.url(), "peer").await?;
    let mut child = peer
        .command()?
        .env("BENCH_DATABASE_URL", &database.url)
        .env("BENCH_TASKS", tasks.to_string())
        .env("BENCH_STEPS", STEPS.to_string())
        .env("BENCH_TEXT", process::text())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("{} does not start", peer.name()))?;
    let mut input = child.stdin.take().context("piped")?;
    let mut lines = BufReader::new(child.stdout.take().context("piped")?).lines();
    let mut line = async |begins: &str| {
        while let Some(line) = lines.next_line().await? {
            if let Some(rest) = line.strip_prefix(begins) {
                return anyhow::Ok(rest.trim().to_owned());
            }
        }
        anyhow::bail!("{} ended early", peer.name())
    };
    line("ready").await?;
    let pid = child.id().context("it runs")? as i32;
    let meter = server.start(&database).await?;
    let before = process::cpu_seconds(pid);
    input.write_all(b"go\n").await?;
    let seconds: f64 = line("seconds ").await?.parse()?;
    let worker_cpu_s = process::cpu_seconds(pid) - before;
    let spent = server.stop(&database, meter).await?;
    input.write_all(b"end\n").await?;
    ensure!(seconds > 0.0, "{} took no time", peer.name());
    child.kill().await?;
    Ok(Drain { steps: (tasks * STEPS) as f64, seconds, worker_cpu_s, spent })
}
