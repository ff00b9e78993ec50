//! The worker of `wakeful dev`. It is a process of its own, so that a person can kill it and see another one go on.

use super::{Args, configure};
use crate::App;
use crate::command::Exit;
use crate::dev::{Child, Home, Style};
use crate::serve::{self, Listeners, Role};
use anyhow::{Context as _, bail};
use std::io::{PipeWriter, Read as _, Write as _};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio_util::sync::CancellationToken;
use wakeful_config::Config;
use wakeful_engine::telemetry;

/// A worker that ends by itself sooner than this did not get to its work.
const YOUNG: Duration = Duration::from_secs(3);

/// So many young ones in a row, and `wakeful dev` gives up.
const YOUNG_AT_MOST: usize = 3;

/// A worker ends its drain long before. One that does not is killed.
const DRAIN: Duration = Duration::from_secs(60);

/// Waits do not end by time where a process is expected to end.
const EVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// Runs the worker that [`Workers`] starts.
pub(super) async fn run(app: App, mut config: Config, args: &Args, home: Home) -> anyhow::Result<Exit> {
    let url = std::env::var("DATABASE_URL").context("`wakeful dev` starts its worker itself")?;
    let open = Arc::new(AtomicBool::new(false));
    let screen = telemetry::Screen { color: Style::of(&std::io::stderr()).color, open: Arc::clone(&open) };
    let telemetry = telemetry::init_dev(&super::log_settings(), home.open_log()?, screen);
    // The other end says with one byte that the banner is on the screen.
    std::thread::Builder::new().name("screen".into()).spawn(move || {
        if std::io::stdin().read_exact(&mut [0]).is_ok() {
            open.store(true, Ordering::Relaxed);
        }
    })?;
    configure(&mut config, &app, &home, &url, !args.no_samples)?;
    config.check_serve(false, true)?;
    let ctx = app.context(config, &url).await?;
    serve::run(&app, ctx, &[Role::Worker], Listeners::default()).await?;
    drop(telemetry);
    Ok(Exit::Ok)
}

/// One worker after the other.
pub(super) struct Workers {
    url: String,
    /// The pid of the present one.
    pid: watch::Sender<Option<i32>>,
    /// The banner is on the screen, and log lines may follow it.
    shown: watch::Receiver<bool>,
}

impl Workers {
    pub fn new(url: &str, shown: watch::Receiver<bool>) -> Workers {
        Workers { url: url.to_owned(), pid: watch::Sender::new(None), shown }
    }

    pub fn pid(&self) -> watch::Receiver<Option<i32>> {
        self.pid.subscribe()
    }

    /// Starts a worker, and another one when it ends, until `draining` fires. Then it lets the worker drain. A second signal is
    /// passed on.
    ///
    /// # Errors
    /// When workers end again and again before they work.
    pub async fn keep(mut self, draining: &CancellationToken) -> anyhow::Result<()> {
        let mut young = 0;
        loop {
            let (worker, mut screen) = self.start()?;
            let began = Instant::now();
            let worker = Arc::new(worker);
            self.pid.send_replace(Some(worker.pid()));
            let watched = Arc::clone(&worker);
            let mut end = spawn_blocking(move || watched.wait(EVER));
            let ended = loop {
                tokio::select! {
                    ended = &mut end => break ended?,
                    () = draining.cancelled() => return drain(&worker, end).await,
                    // The sender lives as long as the banner's task, which sends at most once.
                    Ok(_) = self.shown.wait_for(|shown| *shown), if screen.is_some() => {
                        // It fails if the worker has ended, and then another one starts.
                        let _ = screen.take().map(|mut pipe| pipe.write_all(b"\n"));
                    }
                }
            };
            let status =
                ended.map_or_else(|| "with an unknown status".to_owned(), |status| status.to_string());
            young = if began.elapsed() < YOUNG { young + 1 } else { 0 };
            if young == YOUNG_AT_MOST {
                bail!("worker {} ended ({status}), and so did the ones before it", worker.pid());
            }
            eprintln!(
                "Worker {} ended ({status}). Another one starts and goes on where it stood.",
                worker.pid()
            );
        }
    }

    /// Starts this program again, with the same options.
    fn start(&self) -> anyhow::Result<(Child, Option<PipeWriter>)> {
        let (stdin, screen) = std::io::pipe()?;
        let mut command = Command::new(std::env::current_exe().context("The path of this program")?);
        command
            .args(std::env::args_os().skip(1))
            .arg("--as-worker")
            .env("DATABASE_URL", &self.url)
            .stdin(stdin)
            .stdout(Stdio::null());
        // Ctrl-C at the terminal must reach only this process, which then lets the worker drain.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        Ok((Child::spawn(command, libc::SIGKILL)?, Some(screen)))
    }
}

async fn drain(worker: &Child, mut end: JoinHandle<Option<ExitStatus>>) -> anyhow::Result<()> {
    // They hear signals from now on, so not the one that began the drain.
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let limit = Instant::now() + DRAIN;
    let mut killed = false;
    worker.signal(libc::SIGTERM);
    loop {
        tokio::select! {
            ended = &mut end => return Ok(ended.map(drop)?),
            _ = interrupt.recv() => worker.signal(libc::SIGTERM),
            _ = terminate.recv() => worker.signal(libc::SIGTERM),
            () = tokio::time::sleep_until(limit.into()), if !killed => {
                killed = true;
                worker.signal(libc::SIGKILL);
            }
        }
    }
}
