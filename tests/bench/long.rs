//! What long sessions cost: hydrate, fork, export, import and replay of 10 to 10,000 steps. The rival
//! keeps a checkpoint of all messages for every step, in the same database and run.

use crate::fixture::Database;
use crate::made::Long;
use crate::reads::median;
use crate::report::{Paint, Progress};
use anyhow::{Context, Result, ensure};
use sqlx::PgConnection;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use wakeful::App;
use wakeful::internal::replay::{self, Observer, ReplayEnd};
use wakeful_config::Config;
use wakeful_engine::ctx::Ctx;
use wakeful_store::Store;
use wakeful_store::fork::ForkRequest;
use wakeful_store::replay::Progress as Turns;
use wakeful_workflow::bundle::Limits;
use wakeful_workflow::diff::diff;
use wakeful_workflow::fork::CutPoint;
use wakeful_workflow::policy::{Answers, ToolMode};

/// A replay of the next length is left out when one took longer than this: its time may grow with the square of the steps.
const PATIENCE_MS: f64 = 8000.0;
const MESSAGE_BYTES: usize = 2048;
/// A longer session is not replayed, because to make its hashes takes minutes, and the rival does not have it, because its rows take
/// tens of gigabytes.
const COMPARED_STEPS: usize = 3000;
/// Messages that a rebase keeps.
const SHOWN: i64 = 20;

/// What one length costs. Times are medians, in milliseconds.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Cost {
    pub steps: usize,
    pub hydrate_ms: f64,
    /// By the worker of the turn before, which has kept its copy.
    pub hydrate_warm_ms: f64,
    /// By a worker that has no copy, when the context begins at the last message but twenty.
    pub hydrate_tail_ms: f64,
    pub fork_ms: f64,
    pub export_ms: f64,
    pub import_ms: f64,
    /// A fork and a replay of every step from recorded answers and results. Each request is built and hashed,
    /// so this part grows with the square of the steps, as the bytes sent to a provider do.
    pub replay_ms: f64,
    /// The text of all messages.
    pub said_bytes: i64,
    /// All rows of the session, compressed as they are stored.
    pub kept_bytes: i64,
    /// Rows of `session_steps` alone: the cached results.
    pub steps_bytes: i64,
    pub bundle_bytes: usize,
    /// Blobs that the fork added.
    pub fork_blobs: i64,
    pub rival: Rival,
}

/// One row per step with all messages so far. For a long session only every tenth row is written and counted
/// ten times, because writing all takes minutes.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Rival {
    pub kept_bytes: f64,
    /// Time to read the last checkpoint and parse it.
    pub rebuild_ms: f64,
    /// Time to write all rows, copied from rows that are already in the database. An estimate if only every
    /// tenth row was written.
    pub write_ms: f64,
}

pub async fn measure(database: &Database, lengths: &[usize], progress: &mut Progress) -> Result<Vec<Cost>> {
    let store = database.store(4).await?;
    let mut connection = database.connect().await?;
    let folder = tempfile::tempdir()?;
    let config = folder.path().join("wakeful.toml");
    std::fs::write(&config, "")?;
    let ctx = App::new().context(Config::load(Some(&config), std::iter::empty())?, &database.url).await?;
    let mut costs = Vec::new();
    for steps in lengths.iter().copied() {
        let mut cost = Cost { steps, ..Cost::default() };
        let replays =
            cost.is_compared() && costs.last().is_none_or(|last: &Cost| last.replay_ms < PATIENCE_MS);
        progress.say(&format!("a session of {steps} steps"));
        // Only a replay compares the hashes, and they take minutes for the longest session.
        let long = Long { steps, message_bytes: MESSAGE_BYTES, hashes: replays };
        let session_id = long.make(&store, &format!("long-{steps}")).await;
        sqlx::query("vacuum analyze").execute(&mut connection).await?;
        let times = if steps < 1000 { 21 } else { 7 };
        progress.say(&format!("hydrate, fork, export and import of {steps} steps"));
        cost.weigh(&mut connection, &session_id).await?;
        cost.time(&store, &mut connection, &session_id, folder.path(), times).await?;
        if replays {
            progress.say(&format!("a replay of {steps} recorded steps"));
            cost.replay(&ctx, &session_id, if steps < 1000 { 5 } else { 1 }).await?;
        } else {
            cost.replay_ms = f64::NAN;
        }
        if cost.is_compared() {
            progress.say(&format!("a checkpoint of all messages for each of {steps} steps"));
            cost.rival = rival(&mut connection, &session_id, steps, times).await?;
        } else {
            cost.rival = Rival { kept_bytes: f64::NAN, rebuild_ms: f64::NAN, write_ms: f64::NAN };
        }
        progress.say(&format!("the next turn after {steps} steps"));
        cost.next_turn(&store, long, &session_id, times).await?;
        cost.tail(&store, &mut connection, &session_id, times).await?;
        costs.push(cost);
    }
    ctx.shutdown.draining.cancel();
    ctx.shutdown.abort.cancel();
    ctx.store.close().await;
    store.close().await;
    Ok(costs)
}

impl Cost {
    fn is_compared(&self) -> bool {
        self.steps <= COMPARED_STEPS
    }

    async fn weigh(&mut self, connection: &mut PgConnection, session_id: &str) -> Result<()> {
        (self.said_bytes, self.steps_bytes, self.kept_bytes) = sqlx::query_as(
            "with steps as (select coalesce(sum(pg_column_size(t.*)), 0)::bigint as bytes from session_steps t where session_id = $1)
            select
                (select sum(octet_length(content::text)) from conversation_records where session_id = $1),
                (select bytes from steps),
                ((select bytes from steps)
                    + (select sum(pg_column_size(r.*)) from conversation_records r where session_id = $1)
                    + (select sum(pg_column_size(e.*)) from session_events e where session_id = $1)
                    + (select coalesce(sum(pg_column_size(c.*)), 0) from tool_calls c where session_id = $1)
                    + (select sum(pg_column_size(s.*)) from conversation_sessions s where session_id = $1))::bigint",
        )
        .bind(session_id)
        .fetch_one(connection)
        .await?;
        Ok(())
    }

    async fn time(
        &mut self,
        store: &Store,
        connection: &mut PgConnection,
        session_id: &str,
        folder: &Path,
        times: usize,
    ) -> Result<()> {
        let blobs = "select count(*) from blobs";
        let (mut hydrate, mut fork, mut export, mut import) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let before: i64 = sqlx::query_scalar(blobs).fetch_one(&mut *connection).await?;
        for _ in 0..times {
            let began = Instant::now();
            let session = store.hydrate(session_id).await?;
            hydrate.push(since(began));
            ensure!(session.totals.turns as usize == self.steps, "{} turns", session.totals.turns);
            let request = ForkRequest {
                start: false,
                ..ForkRequest::new(session_id, CutPoint::Step(self.steps as i64 / 2))
            };
            let began = Instant::now();
            store.fork(&request).await?;
            fork.push(since(began));
        }
        self.fork_blobs = sqlx::query_scalar::<_, i64>(blobs).fetch_one(&mut *connection).await? - before;
        let file = folder.join(format!("{}.json", self.steps));
        for _ in 0..times.div_ceil(3) {
            let began = Instant::now();
            let mut bundle = Vec::new();
            let mut lines = store.export(session_id, false).await?;
            while let Some(chunk) = lines.next().await? {
                bundle.extend(chunk);
            }
            export.push(since(began));
            self.bundle_bytes = bundle.len();
            std::fs::write(&file, &bundle)?;
            let began = Instant::now();
            store.import(&file, "bench", Limits::default(), |_| {}).await?;
            import.push(since(began));
        }
        self.hydrate_ms = median(&hydrate);
        self.fork_ms = median(&fork);
        self.export_ms = median(&export);
        self.import_ms = median(&import);
        Ok(())
    }

    /// What the next turn reads, if the worker has the copy of the one before.
    async fn next_turn(&mut self, store: &Store, long: Long, session_id: &str, times: usize) -> Result<()> {
        let copy = store.hydrate_to_keep(session_id).await?.keep().context("nothing is sealed")?;
        long.go_on(store, session_id).await;
        let mut hydrate = Vec::new();
        for _ in 0..times {
            let copy = copy.clone();
            let began = Instant::now();
            let hydrated = store.catch_up(copy).await?.context("nothing was lost")?;
            hydrate.push(since(began));
            ensure!(hydrated.session.totals.turns as usize == self.steps + 1, "the turn is read");
        }
        self.hydrate_warm_ms = median(&hydrate);
        Ok(())
    }

    /// What a worker reads of a session whose context begins near its end.
    async fn tail(
        &mut self,
        store: &Store,
        connection: &mut PgConnection,
        session_id: &str,
        times: usize,
    ) -> Result<()> {
        let rebase = "update conversation_sessions set rebase = jsonb_build_object('strategy', 'sliding_window',
                'at_message_number', last_message_number, 'keep_from_message_number', last_message_number - $2)
            where session_id = $1";
        sqlx::query(rebase).bind(session_id).bind(SHOWN).execute(connection).await?;
        let mut hydrate = Vec::new();
        for _ in 0..times {
            let began = Instant::now();
            let hydrated = store.hydrate_tail(session_id).await?;
            hydrate.push(since(began));
            let read = hydrated.session.records.len();
            ensure!(read <= SHOWN as usize + 2, "{read} messages were read");
        }
        self.hydrate_tail_ms = median(&hydrate);
        Ok(())
    }

    async fn replay(&mut self, ctx: &Arc<Ctx>, session_id: &str, times: usize) -> Result<()> {
        let request = replay::Request {
            source_session_id: session_id.into(),
            source_name: session_id.to_owned(),
            from_message: None,
            answers: Answers::Recorded,
            model: None,
            system_prompt: None,
            tool_mode: ToolMode::Recorded,
        };
        let mut replays = Vec::new();
        for _ in 0..times {
            let began = Instant::now();
            let replayed = replay::run(ctx, &request, true, &Nobody).await?;
            replays.push(since(began));
            ensure!(replayed.end == ReplayEnd::Over, "the replay ended as {:?}", replayed.end);
            let report =
                diff(&ctx.store.side(session_id).await?, &ctx.store.side(&replayed.session_id).await?);
            let equal = report.requests.equal;
            ensure!(equal == self.steps, "{equal} of {} requests are the source's", self.steps);
        }
        self.replay_ms = median(&replays);
        Ok(())
    }
}

/// Ignores the replay's progress.
struct Nobody;

impl Observer for Nobody {
    fn on_start(&self, _: &str, _: u64) {}

    fn on_progress(&self, _: u64, _: &Turns) {}
}

/// Stores the same session the rival's way.
async fn rival(connection: &mut PgConnection, session_id: &str, steps: usize, times: usize) -> Result<Rival> {
    sqlx::query("drop table if exists rival").execute(&mut *connection).await?;
    sqlx::query("create table rival (step_number bigint primary key, messages jsonb not null)")
        .execute(&mut *connection)
        .await?;
    let every: i64 = if steps > 100 { 10 } else { 1 };
    let began = Instant::now();
    sqlx::query(
        "insert into rival
        select t.step_number, m.messages
        from session_steps t
        cross join lateral (
            select jsonb_agg(jsonb_build_object('role', r.role, 'content', r.content) order by r.message_number) as messages
            from conversation_records r
            where r.session_id = t.session_id and r.message_number <= t.to_message_number
        ) m
        where t.session_id = $1 and t.step_number % $2 = 0",
    )
    .bind(session_id)
    .bind(every)
    .execute(&mut *connection)
    .await?;
    let write_ms = since(began) * every as f64;
    let written: i64 = sqlx::query_scalar("select sum(pg_column_size(messages))::bigint from rival")
        .fetch_one(&mut *connection)
        .await?;
    let mut rebuild = Vec::new();
    for _ in 0..times {
        let began = Instant::now();
        let text: String =
            sqlx::query_scalar("select messages::text from rival order by step_number desc limit 1")
                .fetch_one(&mut *connection)
                .await?;
        let messages: Vec<serde_json::Value> = serde_json::from_str(&text).context("a list")?;
        rebuild.push(since(began));
        ensure!(!messages.is_empty(), "a checkpoint holds messages");
    }
    sqlx::query("drop table rival").execute(&mut *connection).await?;
    Ok(Rival { kept_bytes: (written * every) as f64, rebuild_ms: median(&rebuild), write_ms })
}

fn since(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1e3
}

/// Writes the times as one table.
pub fn write_markdown(text: &mut String, costs: &[Cost]) -> std::fmt::Result {
    if costs.is_empty() {
        return Ok(());
    }
    writeln!(
        text,
        "\n| Long sessions, ms | hydrate | hydrate, warm | hydrate after a rebase | fork at the middle | export | check and import | recorded replay |"
    )?;
    writeln!(text, "|---|---|---|---|---|---|---|---|")?;
    for cost in costs {
        let replay = measured(cost.replay_ms, &|ms| format!("{ms:.0}"));
        writeln!(
            text,
            "| {} steps | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {replay} |",
            cost.steps,
            cost.hydrate_ms,
            cost.hydrate_warm_ms,
            cost.hydrate_tail_ms,
            cost.fork_ms,
            cost.export_ms,
            cost.import_ms
        )?;
    }
    Ok(())
}

pub fn print(paint: &Paint, costs: &[Cost]) {
    if costs.is_empty() {
        return;
    }
    println!("\n  {}", paint.bold("Long sessions, two messages of 2 KB a step"));
    let head: Vec<String> =
        costs.iter().map(|cost| format!("{:>14}", format!("{} steps", cost.steps))).collect();
    println!("  {:<34}{}   {}", "", head.concat(), paint.dim("from one to the next"));
    let row = |name: &str, of: &dyn Fn(&Cost) -> f64, show: &dyn Fn(f64) -> String| {
        let values: Vec<f64> = costs.iter().map(of).collect();
        let cells: Vec<String> =
            values.iter().map(|value| format!("{:>14}", measured(*value, show))).collect();
        let growth: Vec<String> = values
            .windows(2)
            .map(|pair| measured(pair[1] / pair[0], &|growth| format!("×{growth:.1}")))
            .collect();
        println!("  {name:<34}{}   {}", cells.concat(), paint.dim(&growth.join("  ")));
    };
    let (ms, kb) = (|value: f64| format!("{value:.1} ms"), |value: f64| size(value));
    row("hydrate", &|cost| cost.hydrate_ms, &ms);
    row("hydrate, warm", &|cost| cost.hydrate_warm_ms, &ms);
    row("hydrate after a rebase", &|cost| cost.hydrate_tail_ms, &ms);
    row("fork at the middle", &|cost| cost.fork_ms, &ms);
    row("export", &|cost| cost.export_ms, &ms);
    row("check and import", &|cost| cost.import_ms, &ms);
    row("replay out of the recording", &|cost| cost.replay_ms, &ms);
    row("of that, a step", &|cost| cost.replay_ms / cost.steps as f64, &ms);
    row("what was said", &|cost| cost.said_bytes as f64, &kb);
    row("bundle", &|cost| cost.bundle_bytes as f64, &kb);
    row("all rows of the session", &|cost| cost.kept_bytes as f64, &kb);
    row("its cached step results", &|cost| cost.steps_bytes as f64, &kb);
    println!(
        "  {:<34}{}",
        "blobs that its forks added",
        costs.iter().map(|cost| format!("{:>14}", cost.fork_blobs)).collect::<String>()
    );
    println!("\n  {}", paint.bold("Beside a checkpoint of all messages for every step"));
    row("its rows", &|cost| cost.rival.kept_bytes, &kb);
    row("to rebuild from the last one", &|cost| cost.rival.rebuild_ms, &ms);
    row("to write them all, in SQL (about)", &|cost| cost.rival.write_ms, &ms);
    let most = costs.iter().map(ratio).fold(1.0, f64::max);
    for cost in costs.iter().filter(|cost| cost.is_compared()) {
        let name = format!("{} steps: its bytes are × ours", cost.steps);
        println!("  {name:<34}{:>9.1} {}", ratio(cost), paint.bar(ratio(cost) / most, 40));
    }
}

fn ratio(cost: &Cost) -> f64 {
    cost.rival.kept_bytes / cost.kept_bytes as f64
}

/// `NaN` stands for what was not measured.
fn measured(value: f64, show: &dyn Fn(f64) -> String) -> String {
    if value.is_nan() { "not measured".to_owned() } else { show(value) }
}

fn size(bytes: f64) -> String {
    match bytes {
        bytes if bytes < 1e6 => format!("{:.1} KB", bytes / 1e3),
        bytes if bytes < 1e9 => format!("{:.1} MB", bytes / 1e6),
        bytes => format!("{:.2} GB", bytes / 1e9),
    }
}
