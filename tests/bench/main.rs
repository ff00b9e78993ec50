//! What Wakeful costs, next to pgbench and next to others: `make bench`, `make bench-compare`. `RESULTS.md` has figures.
//!
//! Absolute rates say more about the machine than about Wakeful. So every rate is also a ratio to the floor, measured in
//! turns within one run: pgbench with one autocommit statement a step that leaves the same rows. None of this is a test: a
//! slow machine fails nothing. What must not grow is counted by `make bench-smoke`.

mod commits;
mod contestant;
mod files;
mod fixture;
mod lists;
mod long;
#[path = "../support/long.rs"]
mod made;
mod peers;
mod pgbench;
mod policies;
mod process;
mod provider;
mod readers;
mod reads;
mod report;
mod server;
mod soak;
mod wire;
mod worker;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use commits::Shape;
use contestant::Contestant;
use fixture::{Database, Held};
use pgbench::Pgbench;
use report::{Progress, Report};
use server::Server;
use std::path::PathBuf;
use std::process::ExitCode;
use wakeful_store::Store;
use wakeful_store::encryption::Settings;

/// Sessions that are stepped at the same time.
const SESSIONS: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The step's commit and the tool turn, at 1 and 16 sessions.
    Commit,
    /// The same commits in the role of `serve` with and without row-level security.
    Policies,
    /// Processes of the release binary drain a backlog.
    Worker,
    /// From a posted message to its first step and to the model's request, and from a kill to the next claim.
    Wake,
    /// Start, memory and CPU of an idle process.
    Idle,
    /// Live streams that have nothing to show.
    Readers,
    /// Hydration by length, and claims by length of the queue.
    Reads,
    /// Claims after many jobs have ended.
    Claims,
    /// Long sessions: hydrate, fork, export, import, replay.
    Long,
    /// Files of sessions: a snapshot of one change beside a tar of all, a restore beside a hydration.
    Files,
    /// Lists, searches and pages of an installation of 1,000,000 sessions. Only on request.
    Lists,
    /// Half the peak for `--minutes`: memory, dead rows, waits. Only on request.
    Soak,
    /// The same steps with other systems. Only on request.
    Compare,
}

#[derive(Parser)]
#[command(about = "What Wakeful costs, next to pgbench and next to others")]
struct Arguments {
    /// Less of everything: three minutes on a machine with nothing else to do.
    #[arg(long)]
    quick: bool,
    /// Only these parts, separated by commas. Without it: all but `lists`, `soak` and `compare`.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Seconds of one round of one contestant.
    #[arg(long)]
    seconds: Option<u32>,
    /// Rounds. Every contestant runs once in each.
    #[arg(long)]
    rounds: Option<u32>,
    /// Kills of the part `wake`.
    #[arg(long)]
    kills: Option<usize>,
    /// Minutes of the part `soak`.
    #[arg(long, default_value_t = 60.0)]
    minutes: f64,
    /// A server in memory and without fsync, instead of on the disk with it.
    #[arg(long)]
    tmpfs: bool,
    /// Writes the figures into this file too.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Writes the figures into this file too, as Markdown.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Draws the rates into this SVG file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Arguments {
    fn has(&self, part: Part) -> bool {
        let on_request = [Part::Lists, Part::Soak, Part::Compare];
        if self.only.is_empty() { !on_request.contains(&part) } else { self.only.contains(&part) }
    }

    fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 2 } else { 4 })
    }

    fn seconds(&self) -> f64 {
        f64::from(self.seconds.unwrap_or(if self.quick { 2 } else { 3 }))
    }

    /// Sessions of a backlog: so many that a drain takes about as long as a round of pgbench. A short drain is slower, because each
    /// connection prepares its statements at first.
    fn backlog(&self) -> usize {
        if self.quick { 150 } else { (self.seconds() * BACKLOG_PER_SECOND) as usize }
    }
}

/// Sessions of five steps that a worker drained in a second on a fast day of a machine of two cores.
const BACKLOG_PER_SECOND: f64 = 500.0;

#[tokio::main]
async fn main() -> ExitCode {
    match run(&Arguments::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: &Arguments) -> Result<()> {
    let mut progress = Progress::default();
    progress.say("starting a server");
    let mut server = Server::launch(arguments.tmpfs).await?;
    let mut report = Report::new(server.describe().await?);
    // A part that fails does not lose the figures of the parts before it.
    let measured = measure(arguments, &mut server, &mut report, &mut progress).await;
    process::remove_sites();
    progress.clear();
    report.print();
    if let Some(file) = &arguments.json {
        report.write_json(file)?;
    }
    if let Some(file) = &arguments.markdown {
        report.write_markdown(file)?;
    }
    if let Some(file) = &arguments.plot {
        report.write_plot(file)?;
    }
    measured
}

async fn measure(
    arguments: &Arguments,
    server: &mut Server,
    report: &mut Report,
    progress: &mut Progress,
) -> Result<()> {
    if [Part::Commit, Part::Worker, Part::Compare].into_iter().any(|part| arguments.has(part)) {
        rates(arguments, server, report, progress).await?;
    }
    if arguments.has(Part::Policies) {
        policies::measure(server, arguments.quick, report, progress).await?;
    }
    if arguments.has(Part::Wake) {
        progress.say("picking up");
        let waits = worker::pick_ups(server, if arguments.quick { 30 } else { 200 }).await?;
        report.add_percentiles("Waking", "message posted to first step, idle process", "ms", &waits);
        let waits = worker::first_bytes(server, if arguments.quick { 30 } else { 200 }).await?;
        let name = "message posted to first byte at the provider, idle process";
        report.add_percentiles("Waking", name, "ms", &waits);
        progress.say("killing workers");
        let kills = arguments.kills.unwrap_or(if arguments.quick { 1 } else { 5 });
        let waits = worker::takeovers(server, kills).await?;
        report.add_percentiles("Waking", "kill -9 to next claim, default settings", "s", &waits);
    }
    if arguments.has(Part::Idle) {
        progress.say("an idle process");
        let resting = if arguments.quick { 2_000 } else { 10_000 };
        let idle = worker::idle(server, resting, if arguments.quick { 3 } else { 9 }).await?;
        report.add("One idle process", "start of serve to ready", "ms", &idle.ready_ms);
        report.add("One idle process", "resident memory", "MB", &[idle.resident_mb]);
        report.add("One idle process", "CPU", "% of a core", &[idle.cpu_percent]);
        let name = format!("resident memory, {} sessions at rest", idle.resting);
        report.add("One idle process", name, "MB", &[idle.resident_with_resting_mb]);
    }
    if arguments.has(Part::Readers) {
        progress.say("idle readers");
        let idle = readers::idle(server, if arguments.quick { 1_000 } else { 10_000 }).await?;
        let section = "Live streams that have nothing to show";
        let name = |what: &str| format!("{} readers: {what}", idle.readers);
        report.add(section, "resident memory of the process without readers", "MB", &[idle.mb_before]);
        report.add(section, name("resident memory"), "MB", &[idle.mb]);
        report.add(section, name("CPU"), "% of a core", &[idle.cpu_percent]);
        report.add(section, name("statements a second"), "", &[idle.statements_per_s]);
    }
    if arguments.has(Part::Reads) {
        let mut databases = Vec::new();
        for purpose in ["hydrate", "queue_small", "queue_large"] {
            databases.push(Database::create(server.url(), purpose).await?);
        }
        progress.say("hydration");
        for read in
            reads::hydrate(&databases[0], &[10, 100, 1000], if arguments.quick { 20 } else { 60 }).await?
        {
            report.add("Hydration", format!("{} messages", read.size), "ms", &[read.microseconds / 1e3]);
        }
        progress.say("claims");
        let times = if arguments.quick { 100 } else { 300 };
        for read in reads::claim(&databases[1], &databases[2], [2_000, 20_000], times).await? {
            report.add(
                "Claim of one job",
                format!("{} jobs wait", read.size),
                "ms",
                &[read.microseconds / 1e3],
            );
        }
        for database in databases {
            database.remove().await?;
        }
    }
    if arguments.has(Part::Claims) {
        let finished = if arguments.quick { 150_000 } else { 1_500_000 };
        for (finished, reader) in [(0, false), (finished, false), (finished, true)] {
            progress.say(&format!("claims after {finished} jobs"));
            let times = reads::claim_after(server, finished, reader).await?;
            let name = match reader {
                true => format!("after {finished} jobs, a reader holds an old snapshot"),
                false => format!("after {finished} jobs"),
            };
            report.add("Claim of one job", name, "ms", &times);
        }
    }
    if arguments.has(Part::Soak) {
        soak::soak(server, arguments.minutes, report, progress).await?;
    }
    if arguments.has(Part::Long) {
        let database = Database::create(server.url(), "long").await?;
        let steps: &[usize] = if arguments.quick { &[10, 100] } else { &[10, 100, 1000, 3000, 10_000] };
        report.long = long::measure(&database, steps, progress).await?;
        database.remove().await?;
    }
    if arguments.has(Part::Files) {
        files::measure(arguments.quick, server, report, progress).await?;
    }
    if arguments.has(Part::Lists) {
        let (sessions, times) = if arguments.quick { (20_000, 10) } else { (1_000_000, 40) };
        report.lists = lists::measure(server, sessions, times, progress).await?;
    }
    Ok(())
}

/// What one round of one contestant gave.
#[derive(Clone, Copy, Debug)]
struct Sample {
    steps: f64,
    seconds: f64,
    spent: server::Spent,
    own_cpu_s: Option<f64>,
}

/// Measures everything that has a rate, in turns.
async fn rates(
    arguments: &Arguments,
    server: &mut Server,
    report: &mut Report,
    progress: &mut Progress,
) -> Result<()> {
    let mut contestants = vec![Contestant::Floor(Shape::Step, SESSIONS)];
    if arguments.has(Part::Commit) {
        contestants.push(Contestant::Floor(Shape::Step, 1));
        contestants.extend([SESSIONS, 1].map(|clients| Contestant::Floor(Shape::Turn, clients)));
        for shape in [Shape::Step, Shape::Turn] {
            for clients in [SESSIONS, 1] {
                let kinds = [Contestant::Commit, Contestant::Sealed];
                contestants.extend(kinds.map(|kind| kind(shape, clients)));
            }
        }
    }
    if arguments.has(Part::Worker) {
        contestants.extend([1, 2, 4].map(Contestant::Worker));
    } else if arguments.has(Part::Compare) {
        contestants.push(Contestant::Worker(1));
    }
    if arguments.has(Part::Compare) {
        contestants.extend(peers::Peer::installed().map(Contestant::Peer));
    }
    let mut stage = Stage::set(server).await?;
    let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); contestants.len()];
    for round in 0..arguments.rounds() {
        let mut order: Vec<usize> = (0..contestants.len()).collect();
        // A later contestant meets larger tables and a warmer machine, so the order alternates.
        if round % 2 == 1 {
            order.reverse();
        }
        for at in order {
            let sample = stage.round(server, contestants[at], arguments).await?;
            progress.say(&format!(
                "round {} of {}: {}, {:.0} steps/s",
                round + 1,
                arguments.rounds(),
                contestants[at].name(),
                sample.steps / sample.seconds
            ));
            samples[at].push(sample);
        }
    }
    let rate = |sample: &Sample| sample.steps / sample.seconds;
    let floors = |floor: Contestant| -> Vec<f64> {
        let at = contestants.iter().position(|one| *one == floor);
        at.map_or(Vec::new(), |at| samples[at].iter().map(rate).collect())
    };
    for (one, samples) in contestants.iter().zip(&samples) {
        let rates: Vec<f64> = samples.iter().map(rate).collect();
        report.add_ratio("Steps a second", one.name(), "steps/s", &rates, &floors(one.floor()));
    }
    let mut costs = |name: &'static str, unit: &'static str, of: &dyn Fn(&Sample) -> Option<f64>| {
        for (one, samples) in contestants.iter().zip(&samples) {
            let values: Vec<f64> = samples.iter().filter_map(|one| Some(of(one)? / one.steps)).collect();
            if !values.is_empty() {
                report.add(name, one.name(), unit, &values);
            }
        }
    };
    costs("Statements a step", "", &|one| one.spent.statements);
    costs("WAL a step, with whole-page images", "bytes", &|one| Some(one.spent.wal_bytes));
    costs("CPU of Postgres a step", "ms", &|one| Some(one.spent.cpu_s * 1e3));
    costs("CPU of the worker a step", "ms", &|one| Some(one.own_cpu_s? * 1e3));
    if arguments.has(Part::Commit) {
        progress.say("counting");
        for shape in [Shape::Step, Shape::Turn] {
            let sent = server::traffic(&stage.step, &mut stage.free.sixteen, shape).await?;
            let name = Contestant::Commit(shape, SESSIONS).name();
            report.add("On the wire, a step", format!("{name}: round trips"), "", &[sent.round_trips]);
            report.add("On the wire, a step", format!("{name}: sent"), "bytes", &[sent.bytes]);
        }
        let (average, most) = server.step_row_bytes(&stage.step).await?;
        report.add("On the wire, a step", "row of session_steps", "bytes", &[average, f64::from(most)]);
    }
    stage.clear().await
}

/// The databases, sessions and programs of the rounds.
struct Stage {
    step: Database,
    floor: Database,
    free: Committers,
    /// Of encrypted conversations.
    sealed: Committers,
    /// Their keys.
    _keys: tempfile::TempDir,
    pgbench: Pgbench,
}

/// A store, and the sessions that it commits.
struct Committers {
    store: Store,
    sixteen: Vec<Held>,
    one: Vec<Held>,
}

impl Committers {
    async fn new(store: Store, first: usize) -> Result<Committers> {
        let mut sixteen = fixture::hold_sessions(&store, first, SESSIONS + 1).await?;
        let one = sixteen.split_off(SESSIONS);
        Ok(Committers { store, sixteen, one })
    }

    async fn round(&mut self, shape: Shape, count: usize, seconds: f64) -> Result<commits::Round> {
        let held = if count == 1 { &mut self.one } else { &mut self.sixteen };
        commits::round(&self.store, held, shape, seconds).await
    }
}

impl Stage {
    async fn set(server: &Server) -> Result<Stage> {
        let step = Database::create(server.url(), "step").await?;
        let floor = Database::create(server.url(), "floor").await?;
        let free = Committers::new(step.store(SESSIONS as u32).await?, 0).await?;
        let keys = tempfile::tempdir()?;
        let sealed = step.store(SESSIONS as u32).await?;
        sealed.encrypt(Settings {
            keys: keys.path().display().to_string(),
            agents: None,
            master: [7; 32],
            old_master: None,
        })?;
        let sealed = Committers::new(sealed, SESSIONS + 1).await?;
        let floor_store = floor.store(SESSIONS as u32).await?;
        let pgbench = Pgbench::new(&floor, &floor_store, SESSIONS).await?;
        floor_store.close().await;
        let mut stage = Stage { step, floor, free, sealed, _keys: keys, pgbench };
        // Warm up.
        for shape in [Shape::Step, Shape::Turn] {
            stage.pgbench.round(shape, SESSIONS, 1.0).await?;
            for committers in [&mut stage.free, &mut stage.sealed] {
                committers.round(shape, SESSIONS, 0.5).await?;
            }
        }
        Ok(stage)
    }

    async fn round(
        &mut self,
        server: &mut Server,
        contestant: Contestant,
        arguments: &Arguments,
    ) -> Result<Sample> {
        let seconds = arguments.seconds();
        let (round, spent) = match contestant {
            Contestant::Floor(shape, clients) => {
                let meter = server.start(&self.floor).await?;
                let round = self.pgbench.round(shape, clients, seconds).await?;
                (round, server.stop(&self.floor, meter).await?)
            }
            Contestant::Commit(shape, count) | Contestant::Sealed(shape, count) => {
                let committers = match contestant {
                    Contestant::Sealed(..) => &mut self.sealed,
                    _ => &mut self.free,
                };
                let meter = server.start(&self.step).await?;
                let round = committers.round(shape, count, seconds).await?;
                (round, server.stop(&self.step, meter).await?)
            }
            Contestant::Worker(processes) => {
                let drain = worker::drain(server, processes, arguments.backlog()).await?;
                return Ok(Sample {
                    steps: drain.steps,
                    seconds: drain.seconds,
                    spent: drain.spent,
                    own_cpu_s: Some(drain.worker_cpu_s),
                });
            }
            Contestant::Peer(peer) => {
                let drain = peers::drain(server, peer, arguments.backlog()).await?;
                return Ok(Sample {
                    steps: drain.steps,
                    seconds: drain.seconds,
                    spent: drain.spent,
                    own_cpu_s: Some(drain.worker_cpu_s),
                });
            }
        };
        Ok(Sample { steps: round.steps as f64, seconds: round.seconds, spent, own_cpu_s: None })
    }

    async fn clear(self) -> Result<()> {
        for Committers { store, sixteen, one } in [self.free, self.sealed] {
            drop((sixteen, one));
            store.close().await;
        }
        self.step.remove().await?;
        self.floor.remove().await
    }
}
