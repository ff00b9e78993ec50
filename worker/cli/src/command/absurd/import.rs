//! `wakeful absurd import`: makes a session of each task that is over. Sends and runs nothing.

use super::super::output::{Tone, count};
use super::progress::Progress;
use super::scan::megabytes;
use super::{Desk, Exit, Reasons, Shapes};
use futures::future::try_join_all;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Interval, MissedTickBehavior};
use wakeful_store::absurd::{Found, Gained, Import, Imported, May, Outcome, Source, Wanted};
use wakeful_store::{Error, Store};
use wakeful_workflow::absurd::opening::Opening;
use wakeful_workflow::absurd::shape::Shape;
use wakeful_workflow::absurd::{TRIGGER_PREFIX, TaskState};

const PAGE: i64 = 200;
/// Pause of `--follow` between two looks.
const FOLLOWS: Duration = Duration::from_secs(2);

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Only tasks of this name. May be given several times.
    #[arg(long = "task", value_name = "NAME")]
    names: Vec<String>,
    /// How many tasks are imported at the same time.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=64))]
    parallel: u64,
    /// Import at most this many tasks a second.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    rate: Option<u64>,
    /// Absurd's workers are stopped for good: import pending, sleeping and waiting tasks too. They go on here as soon as a
    /// worker runs here.
    #[arg(long)]
    stopped: bool,
    /// Go on and import each task when it is over, until interrupted.
    #[arg(long)]
    follow: bool,
}

/// The report of an import.
#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    pub imported: i64,
    pub already: i64,
    pub messages: i64,
    pub steps: i64,
    pub by_status: BTreeMap<&'static str, i64>,
    /// Tasks that Absurd still has.
    pub open: i64,
    pub running: i64,
    pub cannot_come: Reasons,
    pub seconds: f64,
    pub gained: BTreeMap<String, Gained>,
}

pub(super) async fn import(desk: &Desk<'_>, args: &Args) -> anyhow::Result<Exit> {
    let parallel = usize::try_from(args.parallel).unwrap_or(1);
    let store = desk.store(parallel).await?;
    let mut sources = sources(desk, parallel).await?;
    let Some(first) = sources.first_mut() else { return Ok(Exit::Failed) };
    let queues = desk.queues(first).await?;
    let mut total = 0;
    for queue in &queues {
        let counts = first.counts(queue).await?;
        let wanted = counts.iter().filter(|count| args.names.is_empty() || args.names.contains(&count.name));
        total += wanted.map(|count| count.tasks).sum::<i64>();
    }
    let progress = Progress::new("importing", total.unsigned_abs());
    let importer =
        Importer { desk, store: &store, stopped: args.stopped, progress: &progress, limit: limit(args.rate) };
    let mut report = Report::default();
    loop {
        for queue in &queues {
            importer.queue(&mut sources, queue, &args.names, &mut report).await?;
        }
        if !args.follow {
            break;
        }
        let open = std::mem::take(&mut report.open) + std::mem::take(&mut report.running);
        eprintln!(
            "imported {}, {} here before, {open} still open in Absurd",
            report.imported, report.already
        );
        report.already = 0;
        tokio::time::sleep(FOLLOWS).await;
    }
    report.seconds = progress.end().as_secs_f64();
    for queue in &queues {
        if let Some(source) = sources.first_mut()
            && let Some(gained) = store.absurd_gained(source, desk.space(), queue).await?
        {
            report.gained.insert(queue.clone(), gained);
        }
    }
    store.close().await;
    desk.output.one(&report, || text(desk, &report))?;
    Ok(if report.cannot_come.tasks() == 0 { Exit::Ok } else { Exit::Failed })
}

pub(super) async fn sources(desk: &Desk<'_>, parallel: usize) -> anyhow::Result<Vec<Source>> {
    let mut sources = Vec::with_capacity(parallel);
    for _ in 0..parallel {
        sources.push(desk.source(May::Read).await?);
    }
    Ok(sources)
}

fn limit(rate: Option<u64>) -> Option<tokio::sync::Mutex<Interval>> {
    rate.map(|rate| {
        let mut interval = tokio::time::interval(Duration::from_secs_f64(1.0 / rate as f64));
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        tokio::sync::Mutex::new(interval)
    })
}

/// Imports pages of tasks with several connections.
pub(super) struct Importer<'a> {
    pub desk: &'a Desk<'a>,
    pub store: &'a Store,
    pub stopped: bool,
    pub progress: &'a Progress,
    pub limit: Option<tokio::sync::Mutex<Interval>>,
}

impl Importer<'_> {
    async fn queue(
        &self,
        sources: &mut [Source],
        queue: &str,
        names: &[String],
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let mut shapes = Shapes::new(self.desk, queue);
        let mut after = None::<String>;
        loop {
            let Some(first) = sources.first_mut() else { return Ok(()) };
            let wanted = Wanted { names, after: after.as_deref(), limit: PAGE, parked: false };
            let page = first.tasks(queue, &wanted).await?;
            let Some(last) = page.last() else { return Ok(()) };
            after = Some(last.task_id.clone());
            self.page(sources, queue, page, &mut shapes, report).await?;
        }
    }

    /// Imports these tasks. Those of one conversation come one after the other, in the order in which they were spawned.
    pub async fn page(
        &self,
        sources: &mut [Source],
        queue: &str,
        page: Vec<Found>,
        shapes: &mut Shapes<'_>,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let ids: Vec<String> = page.iter().map(|found| found.task_id.clone()).collect();
        let name = format!("{TRIGGER_PREFIX}{queue}");
        let known = self.store.absurd_known(self.desk.space(), &name, &ids).await?;
        let mut groups: BTreeMap<String, Vec<(Found, Option<String>)>> = BTreeMap::new();
        for found in page {
            if known.contains(&found.task_id) {
                report.already += 1;
                self.progress.step();
                continue;
            }
            match found.state {
                TaskState::Running => {
                    report.running += 1;
                    self.progress.step();
                    continue;
                }
                TaskState::Pending | TaskState::Sleeping if !found.parked && !self.stopped => {
                    report.open += 1;
                    self.progress.step();
                    continue;
                }
                TaskState::Pending
                | TaskState::Sleeping
                | TaskState::Completed
                | TaskState::Failed
                | TaskState::Cancelled => {}
            }
            if let Some(first) = sources.first_mut() {
                shapes.tell(first, &found.name).await?;
            }
            let declared = match shapes.of(&found.name).and_then(|told| told.shape.as_ref()) {
                Some(Shape::Declared(declared)) => Some(&**declared),
                _ => None,
            };
            // Large params are read later, so their tasks wait for each other.
            let conversation = found.params.as_ref().map(|params| Opening::of(params, declared).conversation);
            let group = match &conversation {
                Some(Some(id)) => format!("of {id}"),
                Some(None) => found.task_id.clone(),
                None => String::new(),
            };
            groups.entry(group).or_default().push((found, conversation.flatten()));
        }
        let waiting: Mutex<VecDeque<_>> = Mutex::new(groups.into_values().collect());
        let (shapes, waiting) = (&*shapes, &waiting);
        let work = sources.iter_mut().map(|source| async move {
            let mut done = Vec::new();
            loop {
                let group = waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                let Some(group) = group else { return anyhow::Ok(done) };
                for (found, conversation) in group {
                    if let Some(limit) = &self.limit {
                        limit.lock().await.tick().await;
                    }
                    let outcome = self.one(source, queue, &found, conversation.as_deref(), shapes).await?;
                    self.progress.step();
                    done.push((found.task_id, outcome));
                }
            }
        });
        for (task_id, outcome) in try_join_all(work).await?.into_iter().flatten() {
            report.add(&task_id, outcome);
        }
        Ok(())
    }

    async fn one(
        &self,
        source: &mut Source,
        queue: &str,
        found: &Found,
        conversation: Option<&str>,
        shapes: &Shapes<'_>,
    ) -> anyhow::Result<Outcome> {
        let Some(told) = shapes.of(&found.name) else { return Ok(Outcome::Open) };
        let mut named = conversation.map(str::to_owned);
        if found.params.is_none() {
            named = match source.look_opening(queue, &found.task_id, told.shape.as_ref()).await? {
                Some(opening) => opening.conversation,
                None => None,
            };
        }
        let new = self.desk.new_session(told, &found.task_id, named.as_deref(), queue)?;
        let import = Import {
            new: &new,
            queue,
            task_id: &found.task_id,
            shape: told.shape.as_ref(),
            records_sql: &told.settings.records_sql,
            stopped: self.stopped,
        };
        match self.store.absurd_import(source, &import).await {
            Ok(outcome) => Ok(outcome),
            Err(error @ Error::Corrupt { .. }) => Ok(Outcome::Cannot(error.to_string())),
            Err(error) => Err(error.into()),
        }
    }
}

impl Report {
    pub fn add(&mut self, task_id: &str, outcome: Outcome) {
        match outcome {
            Outcome::Imported(Imported { status, messages, steps, .. }) => {
                self.imported += 1;
                self.messages += messages;
                self.steps += steps;
                *self.by_status.entry(status.as_str()).or_default() += 1;
            }
            Outcome::Already => self.already += 1,
            Outcome::Open => self.open += 1,
            Outcome::Runs => self.running += 1,
            Outcome::Cannot(why) => self.cannot_come.add(&why, task_id),
        }
    }
}

fn text(desk: &Desk<'_>, report: &Report) -> String {
    let output = &desk.output;
    let statuses: Vec<String> =
        report.by_status.iter().map(|(status, tasks)| format!("{tasks} {status}")).collect();
    let of = if statuses.is_empty() { String::new() } else { format!(" ({})", statuses.join(", ")) };
    let mut text = output.block(
        &format!(
            "{} imported{of}: {}, {}, in {:.1} s",
            count(report.imported, "task"),
            count(report.messages, "message"),
            count(report.steps, "step"),
            report.seconds
        ),
        0,
    );
    if report.already > 0 {
        let _ = writeln!(text, "{} here before", count(report.already, "task"));
    }
    if report.open + report.running > 0 {
        let line = format!(
            "{} open in Absurd, {} of them running: `wakeful absurd take NAME` brings them over",
            count(report.open + report.running, "task"),
            report.running
        );
        text.push_str(&output.block(&line, 0));
    }
    if report.cannot_come.tasks() > 0 {
        let head = format!("{} cannot come:", count(report.cannot_come.tasks(), "task"));
        let _ = writeln!(text, "{}", output.paint(Tone::Bad, &head));
        text.push_str(&report.cannot_come.text(output));
    }
    for (queue, gained) in &report.gained {
        let _ = writeln!(text, "\n{}", output.paint(Tone::Head, &format!("both in figures, queue {queue}")));
        text.push_str(&output.block(&gains(gained), 2));
    }
    text
}

fn gains(gained: &Gained) -> String {
    format!(
        "stored: {} of checkpoints, {} of messages and pointers here\n\
         resume of the longest task ({} steps): {:.1} ms and {} there, {:.1} ms and {} here\n\
         log (WAL) of one step of that task: {} as one JSON, {} as messages and a pointer",
        megabytes(gained.checkpoint_bytes),
        megabytes(gained.record_bytes),
        gained.longest_steps,
        gained.absurd_resume_ms,
        megabytes(gained.absurd_resume_bytes),
        gained.hydrate_ms,
        megabytes(gained.hydrate_bytes),
        megabytes(gained.absurd_step_wal),
        megabytes(gained.step_wal)
    )
}
