//! Step commits per second next to pgbench: `make bench`.
//!
//! Absolute rates say more about the machine than about Wakeful. So every figure that matters is a ratio of
//! two things, measured in turns within one run. None of this is a test: a slow machine fails nothing.

mod commits;
mod fixture;
mod long;
#[path = "../support/long.rs"]
mod made;
mod pgbench;
mod reads;
mod report;
mod server;
mod wire;

use anyhow::{Context, Result};
use clap::Parser;
use commits::Shape;
use fixture::Database;
use pgbench::Pgbench;
use report::{Contestant, Progress, Report, Sample};
use server::Server;
use std::process::ExitCode;

/// Sessions that are stepped at the same time.
const SESSIONS: usize = 16;

#[derive(Parser)]
#[command(about = "Step commits per second next to pgbench, and the cost of hydration and claims")]
struct Arguments {
    /// Seconds of one round of one contestant.
    #[arg(long, default_value_t = 3)]
    seconds: u32,
    /// Rounds. Every contestant runs once in each.
    #[arg(long, default_value_t = 4)]
    rounds: u32,
    /// Measure only long sessions.
    #[arg(long)]
    long: bool,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

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
    let url = std::env::var("WAKEFUL_TEST_DATABASE_URL")
        .context("no Postgres: run this by `make bench`, or under the program `with_postgres`")?;
    let mut progress = Progress::default();
    progress.say("making databases");
    let mut databases = Vec::new();
    for purpose in ["step", "pgbench", "hydrate", "queue_small", "queue_large", "long"] {
        databases.push(Database::create(&url, purpose).await?);
    }
    let measured = measure(arguments, &databases, &mut progress).await;
    for database in &databases {
        database.remove().await?;
    }
    progress.clear();
    let report = measured?;
    if arguments.long {
        report.print_long();
        return Ok(());
    }
    report.print();
    report.keep()
}

async fn measure(arguments: &Arguments, databases: &[Database], progress: &mut Progress) -> Result<Report> {
    let [step, rival, hydrate, small, large, long] = databases else { unreachable!("six are made") };
    let mut server = Server::connect(&step.url).await?;
    let mut report = Report::new(server.describe().await?, arguments.seconds, arguments.rounds);

    report.long = long::measure(long, progress).await?;
    if arguments.long {
        return Ok(report);
    }
    progress.say("hydration");
    report.hydrate = reads::hydrate(hydrate, &[10, 100, 1000], 60).await?;
    progress.say("claims");
    report.claim = reads::claim(small, large, [2_000, 20_000], 300).await?;

    let store = step.store(SESSIONS as u32).await?;
    let mut held = fixture::hold_sessions(&store, SESSIONS).await?;
    let rival_store = rival.store(SESSIONS as u32).await?;
    let pgbench = Pgbench::new(rival, &rival_store, SESSIONS).await?;
    rival_store.close().await;
    let seconds = f64::from(arguments.seconds);
    progress.say("warming up");
    pgbench.round(1.0).await?;
    for shape in [Shape::Step, Shape::Turn] {
        commits::round(&store, &mut held, shape, 0.5).await?;
    }
    for round in 0..arguments.rounds {
        let mut order = Contestant::ALL;
        // A later contestant meets larger tables and a warmer machine, so the order alternates.
        if round % 2 == 1 {
            order.reverse();
        }
        for contestant in order {
            let before = server.wal_bytes().await?;
            let round_of = match contestant {
                Contestant::Pgbench => pgbench.round(seconds).await?,
                Contestant::Step => commits::round(&store, &mut held, Shape::Step, seconds).await?,
                Contestant::Turn => commits::round(&store, &mut held, Shape::Turn, seconds).await?,
            };
            let sample = Sample {
                per_second: round_of.steps as f64 / round_of.seconds,
                wal_bytes: (server.wal_bytes().await? - before) as f64 / round_of.steps.max(1) as f64,
            };
            progress.say(&format!(
                "round {} of {}: {} {:.0} steps/s",
                round + 1,
                arguments.rounds,
                contestant.name(),
                sample.per_second
            ));
            report.add(contestant, sample);
        }
    }
    progress.say("counting");
    for shape in [Shape::Step, Shape::Turn] {
        report.traffic.push(server::traffic(step, &mut held, shape).await?);
    }
    drop(held);
    store.close().await;
    report.tables = server.tables().await?;
    Ok(report)
}
