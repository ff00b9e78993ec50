//! A worker at half of its peak, for as long as one likes: does its memory grow, do dead rows gather, do waits grow?
//!
//! The peak is measured at the beginning, while conversations come in as fast as the worker takes them: on a machine that
//! the server shares with the feeders, to let a conversation in costs nearly as much as its steps. Then new ones come in
//! at half that rate, each with the steps of the part `worker`. An hour leaves about 10 GB on the disk.

use crate::fixture::Database;
use crate::process::{self, STEPS, Site};
use crate::report::{Progress, Report};
use crate::server::Server;
use crate::worker;
use anyhow::{Context, Result, ensure};
use sqlx::{Connection, PgConnection};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use wakeful_store::Store;

const SECTION: &str = "Soak at half the peak";

/// While the peak is measured, so many conversations wait or are at work.
const OPEN: i64 = 256;

/// How long the worker warms up, and then how long its peak is measured.
const WARM_UP: Duration = Duration::from_secs(5);
const PEAK: Duration = Duration::from_secs(20);

/// Tasks that bring conversations in.
const FEEDERS: u64 = 4;

/// How many looks a soak takes. Each quarter of them is reported.
const LOOKS: u32 = 40;

/// A run that began this recently may not have begun its first step.
const SETTLES: Duration = Duration::from_secs(2);

/// What one look found.
#[derive(Clone, Copy, Debug)]
struct Look {
    resident_mb: f64,
    dead_rows: f64,
    /// Tables that hold only what is at work.
    live_tables_mb: f64,
    p50_ms: f64,
    p99_ms: f64,
    steps_per_s: f64,
}

/// Runs for `minutes`, and reports the quarters next to each other.
pub async fn soak(
    server: &mut Server,
    minutes: f64,
    report: &mut Report,
    progress: &mut Progress,
) -> Result<()> {
    progress.say("soak: the peak");
    let peak = peak(server).await?;
    progress.say(&format!("soak: {peak:.0} steps/s at the peak"));
    let rate = peak / 2.0 / STEPS as f64;
    let database = Database::create(server.url(), "soak").await?;
    let site = Arc::new(Site::new()?);
    let process = site.serve(&database.url, "worker").await?;
    let pid = process.pid()?;
    let fed = Arc::new(AtomicU64::new(0));
    let mut feeders = tokio::task::JoinSet::new();
    let began = Instant::now();
    for feeder in 0..FEEDERS {
        let (store, site, fed) = (database.store(2).await?, Arc::clone(&site), Arc::clone(&fed));
        feeders.spawn(feed(store, site, feeder, rate / FEEDERS as f64, fed));
    }
    let mut connection = database.connect().await?;
    let every = Duration::from_secs_f64((minutes * 60.0 / f64::from(LOOKS)).max(3.0));
    let mut looks = Vec::new();
    for number in 1..=LOOKS {
        tokio::select! {
            () = tokio::time::sleep(every) => {}
            ended = feeders.join_next() => ended.context("there are feeders")???,
        }
        let look = look(&mut connection, pid, (rate * every.as_secs_f64()) as i64, every).await?;
        progress.say(&format!(
            "soak {number} of {LOOKS}: {:.0} steps/s, {:.0} MB, {:.0} dead rows, p99 {:.1} ms",
            look.steps_per_s, look.resident_mb, look.dead_rows, look.p99_ms
        ));
        looks.push(look);
    }
    let fed_for = began.elapsed();
    feeders.shutdown().await;
    let (fed, due) = (fed.load(Ordering::Relaxed), rate * fed_for.as_secs_f64());
    worker::at_rest_again(&database, &process).await?;
    let sql = "select count(*) filter (where status = 'completed'), count(*) from session_runs";
    let (completed, runs): (i64, i64) = sqlx::query_as(sql).fetch_one(&mut connection).await?;
    ensure!(completed == runs, "{completed} of {runs} runs are completed; {fed} were brought in");
    process.kill().await?;
    connection.close().await?;
    database.remove().await?;
    report.add(SECTION, "the peak, while conversations come in", "steps/s", &[peak]);
    // Less than one: the tasks that bring them in came behind.
    report.add(SECTION, "conversations that came in, of those that were due", "", &[fed as f64 / due]);
    let quarter = looks.len() / 4;
    for (name, looks) in [
        ("first quarter", &looks[..quarter]),
        ("second quarter", &looks[quarter..2 * quarter]),
        ("third quarter", &looks[2 * quarter..3 * quarter]),
        ("last quarter", &looks[3 * quarter..]),
    ] {
        let mut add = |what: &str, unit, of: fn(&Look) -> f64| {
            let values: Vec<f64> = looks.iter().map(of).collect();
            report.add(SECTION, format!("{name}: {what}"), unit, &values);
        };
        add("steps a second", "steps/s", |look| look.steps_per_s);
        add("resident memory of the worker", "MB", |look| look.resident_mb);
        add("dead rows of all tables", "", |look| look.dead_rows);
        add("tables of what is at work", "MB", |look| look.live_tables_mb);
        add("message to first step, p50", "ms", |look| look.p50_ms);
        add("message to first step, p99", "ms", |look| look.p99_ms);
    }
    Ok(())
}

/// Returns the steps a second of a worker that always has enough to do.
async fn peak(server: &Server) -> Result<f64> {
    let database = Database::create(server.url(), "peak").await?;
    let site = Arc::new(Site::new()?);
    let process = site.serve(&database.url, "worker").await?;
    let (has_room, room) = watch::channel(true);
    let mut feeders = tokio::task::JoinSet::new();
    for feeder in 0..FEEDERS {
        let (store, site) = (database.store(2).await?, Arc::clone(&site));
        let mut room = room.clone();
        feeders.spawn(async move {
            for number in 0_u64.. {
                room.wait_for(|has_room| *has_room).await?;
                worker::bring_in(&store, &site, &format!("peak-{feeder}-{number}")).await?;
            }
            anyhow::Ok(())
        });
    }
    let mut connection = database.connect().await?;
    let (began, mut before) = (Instant::now(), None);
    let steps = "select sum(last_step_number)::float8 from conversation_sessions";
    let peak = loop {
        let open: i64 = sqlx::query_scalar("select count(*) from jobs").fetch_one(&mut connection).await?;
        has_room.send_replace(open < OPEN);
        if before.is_none() && began.elapsed() > WARM_UP {
            let steps: f64 = sqlx::query_scalar(steps).fetch_one(&mut connection).await?;
            before = Some((Instant::now(), steps));
        }
        if let Some((since, before)) = before
            && since.elapsed() > PEAK
        {
            let now: f64 = sqlx::query_scalar(steps).fetch_one(&mut connection).await?;
            break (now - before) / since.elapsed().as_secs_f64();
        }
        // How often the number of open conversations is corrected.
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(20)) => {}
            ended = feeders.join_next() => ended.context("there are feeders")???,
        }
    };
    feeders.shutdown().await;
    process.kill().await?;
    connection.close().await?;
    database.remove().await?;
    Ok(peak)
}

/// Brings in `rate` conversations a second, until it is dropped. A feeder that is late catches up.
async fn feed(store: Store, site: Arc<Site>, feeder: u64, rate: f64, fed: Arc<AtomicU64>) -> Result<()> {
    let began = Instant::now();
    for number in 0_u64.. {
        let due = Duration::from_secs_f64(number as f64 / rate);
        tokio::time::sleep(due.saturating_sub(began.elapsed())).await;
        worker::bring_in(&store, &site, &format!("soak-{feeder}-{number}")).await?;
        fed.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// `runs`: how many runs came in since the last look.
async fn look(connection: &mut PgConnection, pid: i32, runs: i64, every: Duration) -> Result<Look> {
    let dead_rows = "select coalesce(sum(n_dead_tup), 0)::float8 from pg_stat_user_tables";
    let live_tables = "select sum(pg_total_relation_size(name))::float8 / 1048576
        from unnest(array['jobs', 'generations', 'generation_chunks']::regclass[]) as name";
    // Ids of runs grow with time, so this reads the newest ones by an index.
    let waits = "select coalesce(percentile_cont(0.5) within group (order by ms), 'NaN')::float8,
            coalesce(percentile_cont(0.99) within group (order by ms), 'NaN')::float8
        from (
            select extract(epoch from coalesce(step.started_at, clock_timestamp()) - run.created_at) * 1000 as ms
            from (select session_id, created_at from session_runs order by run_id desc limit $1) run
            left join session_steps step on step.session_id = run.session_id and step.step_number = 1
            where run.created_at < now() - make_interval(secs => $2)
        ) of_runs";
    // `now()` is the time at which the statement began. `clock_timestamp()` goes on while it runs, so a slower statement would count
    // fewer steps. And it looks for the steps of each session by key, so that it does not get slower as the tables grow.
    let steps = "select count(*)::float8
        from (select session_id from conversation_sessions order by session_id desc limit $2) recent
        cross join lateral (
            select from session_steps s
            where s.session_id = recent.session_id and s.committed_at > now() - make_interval(secs => $1) offset 0
        ) step";
    let (p50_ms, p99_ms): (f64, f64) =
        sqlx::query_as(waits).bind(runs).bind(SETTLES.as_secs_f64()).fetch_one(&mut *connection).await?;
    let within = every.as_secs_f64().min(10.0);
    let steps: f64 =
        sqlx::query_scalar(steps).bind(within).bind(runs * 2).fetch_one(&mut *connection).await?;
    Ok(Look {
        resident_mb: process::resident_mb(pid)?,
        dead_rows: sqlx::query_scalar(dead_rows).fetch_one(&mut *connection).await?,
        live_tables_mb: sqlx::query_scalar(live_tables).fetch_one(&mut *connection).await?,
        p50_ms,
        p99_ms,
        steps_per_s: steps / within,
    })
}
