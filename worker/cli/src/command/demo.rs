//! `wakeful demo`.

use super::Exit;
use crate::dev::{Style, Throwaway, demo};
use anyhow::{Context as _, bail};
use std::sync::Arc;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::spawn_blocking;

/// Plays the demo. However it ends, its processes and its files are gone when this returns.
pub(super) async fn run() -> anyhow::Result<Exit> {
    let mut interrupt = signal(SignalKind::interrupt()).context("no signal handler")?;
    let mut terminate = signal(SignalKind::terminate()).context("no signal handler")?;
    let style = Style::of(&std::io::stdout());
    demo::title(style);
    // Waited for even when a signal came: only what was started can be removed.
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
