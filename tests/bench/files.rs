//! Files of sessions: what a snapshot costs by the change, beside a tar of everything; and a restore beside a hydration.

use crate::fixture::{self, Database, Held};
use crate::reads::median;
use crate::report::{Progress, Report};
use crate::server::Server;
use anyhow::{Context, Result, anyhow, bail};
use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use wakeful_engine::workspace::{Limits, NotReady, Settings, Workspaces};
use wakeful_store::Store;
use wakeful_workflow::advance::{Next, Transition};
use wakeful_workflow::session::Session;
use wakeful_workflow::workspace::Snapshot;

/// What the files are.
#[derive(Clone, Copy, Debug)]
struct Size {
    files: usize,
    bytes: usize,
}

/// One session's files, all of them and one that changed.
#[derive(Clone, Debug)]
struct Snapshots {
    /// Milliseconds.
    first: f64,
    first_bytes: u64,
    of_one_change: Vec<f64>,
    bytes_of_one_change: Vec<f64>,
    /// A turn that changed nothing.
    of_no_change: Vec<f64>,
    tar: Vec<f64>,
    tar_bytes: u64,
    /// How much larger the process was at most than before.
    peak_mb: Option<f64>,
    /// A restore of all of it on a host that has nothing, in milliseconds, and what the process grew by meanwhile.
    restored: f64,
    restored_peak_mb: Option<f64>,
}

/// A restore on a host that has nothing, a hydration, and both at once. Milliseconds.
#[derive(Clone, Debug)]
struct Restores {
    restore: Vec<f64>,
    hydrate: Vec<f64>,
    both: Vec<f64>,
    peak_mb: Option<f64>,
}

impl Restores {
    /// What both took, as a multiple of the slower of the two.
    fn beside(&self) -> f64 {
        median(&self.both) / median(&self.restore).max(median(&self.hydrate))
    }
}

/// Measures snapshots and restores of sessions' files.
pub async fn measure(
    quick: bool,
    server: &Server,
    report: &mut Report,
    progress: &mut Progress,
) -> Result<()> {
    let rounds = if quick { 3 } else { 5 };
    let (all, some) = if quick {
        (Size { files: 2_000, bytes: 64 << 20 }, Size { files: 200, bytes: 10 << 20 })
    } else {
        (Size { files: 20_000, bytes: 1 << 30 }, Size { files: 2_000, bytes: 100 << 20 })
    };
    let said = |size: Size| format!("{} MB in {} files", size.bytes >> 20, size.files);
    progress.say("snapshots");
    let database = Database::create(server.url(), "files").await?;
    let measured = snapshots(&database, all, rounds).await?;
    let section = "Files of a session";
    report.add(section, format!("first snapshot, {}", said(all)), "ms", &[measured.first]);
    report.add(section, "first snapshot: stored", "MB", &[measured.first_bytes as f64 / 1e6]);
    if let Some(peak) = measured.peak_mb {
        report.add(section, "first snapshot: memory on top of the process, at most", "MB", &[peak]);
    }
    report.add(section, "snapshot after one file changed", "ms", &measured.of_one_change);
    report.add(
        section,
        "snapshot after one file changed: stored",
        "kB",
        &per_thousand(&measured.bytes_of_one_change),
    );
    report.add(section, "look after nothing changed", "ms", &measured.of_no_change);
    report.add(section, "tar of all", "ms", &measured.tar);
    report.add(section, "tar of all: written", "MB", &[measured.tar_bytes as f64 / 1e6]);
    report.add(section, format!("restore, {}", said(all)), "ms", &[measured.restored]);
    if let Some(peak) = measured.restored_peak_mb {
        report.add(section, "that restore: memory on top of the process, at most", "MB", &[peak]);
    }
    progress.say("restores");
    let measured = restores(&database, some, if quick { 100 } else { 1000 }, rounds).await?;
    report.add(section, format!("restore, {}", said(some)), "ms", &measured.restore);
    report.add(section, "hydration beside it, alone", "ms", &measured.hydrate);
    report.add(section, "both at once", "ms", &measured.both);
    report.add(section, "both at once, as a multiple of the slower one", "", &[measured.beside()]);
    if let Some(peak) = measured.peak_mb {
        report.add(section, "restores: memory on top of the process, at most", "MB", &[peak]);
    }
    database.remove().await
}

fn per_thousand(values: &[f64]) -> Vec<f64> {
    values.iter().map(|value| value / 1e3).collect()
}

fn workspaces(folder: &Path) -> Workspaces {
    Workspaces::new(Settings {
        folder: folder.to_owned(),
        limits: Limits {
            files: 1_000_000,
            bytes: 16 << 30,
            time: Duration::from_secs(3600),
            leave_out: Vec::new(),
        },
        keep: Duration::from_secs(3600),
        keep_bytes: u64::MAX,
    })
}

fn failed(why: NotReady) -> anyhow::Error {
    match why {
        NotReady::Store(error) => error.into(),
        NotReady::SeedAway(why) | NotReady::Host(why) | NotReady::Refused(why) => anyhow!(why),
    }
}

/// Runs what a turn does that changes files, and returns the snapshot and the milliseconds that it took.
async fn turn(
    workspaces: &Workspaces,
    store: &Store,
    one: &Held,
    change: impl FnOnce(&Path) -> Result<()>,
) -> Result<(Option<Snapshot>, f64)> {
    let (held, _) = workspaces.ready(store, &one.session, one.job.lease.token, None).await.map_err(failed)?;
    workspaces.will_change(&one.session, &held).await.map_err(failed)?;
    change(&held.path)?;
    let began = Instant::now();
    let snapshot = workspaces.snapshot(store, &one.session, &held).await.map_err(failed)?;
    Ok((snapshot, milliseconds(began)))
}

fn milliseconds(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1e3
}

/// Bytes that no compression makes smaller. The same for the same number.
fn noise(number: usize, bytes: usize) -> Vec<u8> {
    let mut seed = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let words = std::iter::repeat_with(|| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed.to_le_bytes()
    });
    words.take(bytes.div_ceil(8)).flatten().take(bytes).collect()
}

fn fill(folder: &Path, size: Size) -> Result<()> {
    for number in 0..size.files {
        let below = folder.join(format!("part{:03}", number / 100));
        fs::create_dir_all(&below)?;
        fs::write(below.join(format!("{number}.bin")), noise(number, size.bytes / size.files))?;
    }
    Ok(())
}

/// Stores `size`, changes one file again and again, and makes a tar of all each time.
async fn snapshots(database: &Database, size: Size, rounds: usize) -> Result<Snapshots> {
    let store = database.store(4).await?;
    let mut held = fixture::hold_sessions(&store, 0, 1).await?;
    let one = held.first_mut().context("a session")?;
    let host = tempfile::tempdir()?;
    let workspaces = workspaces(&host.path().join("workspaces"));
    let files = host.path().join("workspaces").join(one.session.session_id.as_str());
    forget_peak();
    let before = memory("VmRSS:");
    let (snapshot, first) = turn(&workspaces, &store, one, |folder| fill(folder, size)).await?;
    let peak_mb = grown(before);
    let snapshot = snapshot.context("the first snapshot")?;
    let first_bytes = snapshot.packs.iter().map(|pack| pack.bytes).sum();
    one.session.workspace = Some(snapshot);
    let mut measured = Snapshots {
        first,
        first_bytes,
        of_one_change: Vec::new(),
        bytes_of_one_change: Vec::new(),
        of_no_change: Vec::new(),
        tar: Vec::new(),
        tar_bytes: 0,
        peak_mb,
        restored: 0.0,
        restored_peak_mb: None,
    };
    for round in 0..rounds {
        let before: HashSet<String> = packs(&one.session);
        let path = format!("part000/{}.bin", round % 100);
        let change = |folder: &Path| {
            Ok(fs::write(folder.join(path), noise(size.files + round, size.bytes / size.files))?)
        };
        let (snapshot, took) = turn(&workspaces, &store, one, change).await?;
        let snapshot = snapshot.context("a snapshot of the change")?;
        let new = snapshot.packs.iter().filter(|pack| !before.contains(&pack.sha256));
        measured.bytes_of_one_change.push(new.map(|pack| pack.bytes).sum::<u64>() as f64);
        measured.of_one_change.push(took);
        one.session.workspace = Some(snapshot);
        let (nothing, took) = turn(&workspaces, &store, one, |_| Ok(())).await?;
        anyhow::ensure!(nothing.is_none(), "nothing has changed");
        measured.of_no_change.push(took);
        let tar = host.path().join("all.tar");
        let began = Instant::now();
        let mut command = Command::new("tar");
        command.arg("-cf").arg(&tar).arg("-C").arg(&files).arg(".").stdin(Stdio::null());
        if !command.status().context("tar")?.success() {
            bail!("tar failed");
        }
        fs::File::open(&tar)?.sync_all()?;
        measured.tar.push(milliseconds(began));
        measured.tar_bytes = fs::metadata(&tar)?.len();
        fs::remove_file(&tar)?;
    }
    forget_peak();
    let before = memory("VmRSS:");
    measured.restored = restore(&store, one).await?.0;
    measured.restored_peak_mb = grown(before);
    store.close().await;
    Ok(measured)
}

fn packs(session: &Session) -> HashSet<String> {
    session.workspace.iter().flat_map(|snapshot| &snapshot.packs).map(|pack| pack.sha256.clone()).collect()
}

/// Restores the session's files on a new host, and returns it with the milliseconds that it took: its files are removed when it
/// is dropped, and that is not part of the restore.
async fn restore(store: &Store, one: &Held) -> Result<(f64, TempDir)> {
    let host = tempfile::tempdir()?;
    let workspaces = workspaces(host.path());
    let began = Instant::now();
    let ready = workspaces.ready(store, &one.session, one.job.lease.token, None).await;
    let (held, _) = ready.map_err(failed)?;
    anyhow::ensure!(held.path.join("part000/0.bin").exists(), "the files are there");
    Ok((milliseconds(began), host))
}

/// Restores `size` on one new host after the other, hydrates a session of `messages`, and does both at once.
async fn restores(database: &Database, size: Size, messages: usize, rounds: usize) -> Result<Restores> {
    let store = database.store(8).await?;
    let mut held = fixture::hold_sessions(&store, 100, 1).await?;
    let one = held.first_mut().context("a session")?;
    while one.session.records.len() < messages {
        let transition = fixture::step(&one.session);
        let transition = Transition { step: None, next: Next::SameStep, ..transition };
        one.commit(&store, &transition).await?;
    }
    let origin = tempfile::tempdir()?;
    let (snapshot, _) = turn(&workspaces(origin.path()), &store, one, |folder| fill(folder, size)).await?;
    one.session.workspace = Some(snapshot.context("a snapshot")?);
    let mut measured = Restores { restore: Vec::new(), hydrate: Vec::new(), both: Vec::new(), peak_mb: None };
    let hydrate = async |one: &Held| {
        let began = Instant::now();
        store.hydrate(one.session.session_id.as_str()).await?;
        Ok::<_, anyhow::Error>(milliseconds(began))
    };
    forget_peak();
    let before = memory("VmRSS:");
    for _ in 0..rounds {
        measured.restore.push(restore(&store, one).await?.0);
        measured.hydrate.push(hydrate(one).await?);
        let began = Instant::now();
        let _both = tokio::try_join!(restore(&store, one), hydrate(one))?;
        measured.both.push(milliseconds(began));
    }
    measured.peak_mb = grown(before);
    store.close().await;
    Ok(measured)
}

/// Makes the kernel forget how large this process was at most.
fn forget_peak() {
    let _ = fs::write("/proc/self/clear_refs", "5");
}

/// The megabytes by which this process was larger at most than `before`, since [`forget_peak`].
fn grown(before: Option<f64>) -> Option<f64> {
    memory("VmHWM:").zip(before).map(|(peak, before)| (peak - before).max(0.0))
}

/// Megabytes of this process. `None` where the kernel does not say.
fn memory(name: &str) -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<f64>().ok()? / 1024.0)
}
