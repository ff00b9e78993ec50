//! `wakeful demo`: kills a worker in the middle of a chat, and shows how another one goes on. [`crate::dev::demo`] plays it.

use super::Exit;
use crate::dev::{Style, Throwaway, demo};
use anyhow::{Context as _, bail};
use std::sync::Arc;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::spawn_blocking;

/// Plays the demo. Its processes and files are gone when this returns, however the demo ended.
pub(super) async fn run() -> anyhow::Result<Exit> {
    let mut interrupt = signal(SignalKind::interrupt()).context("no signal handler")?;
    let mut terminate = signal(SignalKind::terminate()).context("no signal handler")?;
    let style = Style::of(&std::io::stdout());
    demo::title(style);
    // Finish starting even after a signal: cleaning up needs the started cluster.
    let throwaway = Arc::new(spawn_blocking(Throwaway::start).await??);
    let played = tokio::select! {
        played = demo::play(&throwaway, style) => Some(played),
        _ = interrupt.recv() => None,
        _ = terminate.recv() => None,
    };
    spawn_blocking(move || drop(throwaway)).await?;
    let Some(played) = played else { bail!("stopped by a signal; its processes and files are gone") };
    Ok(if played? { Exit::Ok } else { Exit::Failed })
}
