//! `wakeful demo`: the sample chats on real processes, one of which is killed.
//!
//! The actors are an API process and two workers (`cast`). The demo talks to them only by HTTP and signals.
//! Everything that it shows (`timeline`) and checks (`verdict`) comes from committed rows in the database.
#![doc = include_str!("../demo.md")]

mod cast;
mod timeline;
mod verdict;

use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;
use wakeful_engine::web::{self, Reach};
use wakeful_store::Store;

use self::cast::{Cast, Role};
use self::timeline::{Chat, Timeline};
use super::samples::{self, Sample};
use super::{Style, Throwaway};

/// Interval between two reads of the database.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Longest wait for any single event. After that the demo fails.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Seconds without a heartbeat after which a worker loses its leases.
const LEASE_S: u64 = 3;

/// Prints what the demo is about to show.
pub fn title(style: Style) {
    println!(
        "{}\n\nThree chats on a throw-away Postgres, with a worker that is killed (kill -9) while the model speaks.\n",
        style.bold("wakeful demo")
    );
}

/// Plays the demo. Returns `false`, after printing the differences, if the result is not what Wakeful
/// promises.
pub async fn play(throwaway: &Throwaway, style: Style) -> Result<bool> {
    let dir = throwaway.dir().join("demo");
    std::fs::DirBuilder::new().mode(0o700).create(&dir).context("The demo's folder")?;
    let timeline = Timeline::begin(style);
    wakeful_store::create_database(&throwaway.cluster().url("postgres"), "wakeful").await?;
    let url = throwaway.cluster().url("wakeful");
    let store = Store::connect(&url, 4, "wakeful demo").await?;
    let migrations = store.migrate(|_| {}).await?;
    timeline.say("demo", &format!("Postgres is up, {migrations} migrations applied"));

    let mut play = Play { store, timeline, cast: Cast::new(&dir, &url)? };
    let killed = play.acts().await?;
    let verdict = verdict::of(&play.store, &play.timeline, &dir, &killed).await?;
    verdict.print(style);
    play.store.close().await;
    Ok(verdict.passed())
}

/// The step and the model call that the kill interrupted.
#[derive(Debug)]
pub(super) struct Killed {
    pub step_number: i64,
    pub generation_id: String,
}

struct Play {
    store: Store,
    timeline: Timeline,
    cast: Cast,
}

impl Play {
    async fn acts(&mut self) -> Result<Killed> {
        self.cast.start("api", Role::Api)?;
        self.cast.start("worker A", Role::Worker)?;
        let api = self.cast.ready("api").await?;
        self.timeline.say("api", &format!("process {} listens on {}", api.pid, api.detail));
        let worker = self.cast.ready("worker A").await?;
        self.timeline.name(worker.detail, "worker A");
        self.timeline.say("worker A", &format!("process {} waits for work", worker.pid));
        let api = format!("http://{}", api.detail);

        self.post(&api, samples::CLOCK, samples::CLOCK.text).await?;
        self.post(&api, samples::COLOUR, samples::COLOUR.text).await?;
        self.until("the first two chats rest", async |play| {
            let clock = play.status(samples::CLOCK).await?;
            let colour = play.status(samples::COLOUR).await?;
            Ok((clock == "completed" && colour == "waiting_input").then_some(()))
        })
        .await?;

        self.post(&api, samples::NOTE, samples::NOTE.text).await?;
        let killed = self.until("the model speaks for the second time", Play::speaks).await?;
        let pid = self.cast.kill("worker A")?;
        let left = self.lease_left_s().await?;
        self.timeline.follow(&self.store).await?;
        self.timeline.killed(samples::NOTE, killed.step_number, pid, left);
        self.cast.start("worker B", Role::Worker)?;
        let worker = self.cast.ready("worker B").await?;
        self.timeline.name(worker.detail, "worker B");
        self.timeline.say("worker B", &format!("process {} waits for work", worker.pid));
        self.until("the note is written and sent", async |play| {
            let sent = play.deliveries().await?.iter().all(|status| status == "sent");
            Ok((play.status(samples::NOTE).await? == "completed" && sent).then_some(()))
        })
        .await?;

        self.post(&api, samples::COLOUR, samples::ANSWER).await?;
        self.until("the colour is chosen", async |play| {
            Ok((play.status(samples::COLOUR).await? == "completed").then_some(()))
        })
        .await?;
        self.cast.end().await?;
        self.timeline.follow(&self.store).await?;
        Ok(killed)
    }

    async fn post(&mut self, api: &str, sample: Sample, text: &str) -> Result<()> {
        let url = format!("{api}/v1/chat/{}/messages", sample.conversation);
        let client = web::client(Reach::Named(&[&url])).build()?;
        let response = client.post(url).json(&json!({"text": text})).send().await?;
        let (status, body) = (response.status(), response.text().await?);
        if !status.is_success() {
            bail!("the API answered {status}: {body}");
        }
        let answer: serde_json::Value = serde_json::from_str(&body)?;
        let session_id = answer["session_id"].as_str().context("an answer without a session_id")?;
        self.timeline.chat(sample, session_id);
        Ok(())
    }

    /// Prints what happens in the sessions until `done` returns a value.
    async fn until<T>(
        &mut self,
        what: &str,
        done: impl AsyncFn(&mut Play) -> Result<Option<T>>,
    ) -> Result<T> {
        let began = Instant::now();
        loop {
            self.timeline.follow(&self.store).await?;
            if let Some(found) = done(self).await? {
                return Ok(found);
            }
            self.cast.check()?;
            if began.elapsed() > TIMEOUT {
                bail!("waited in vain: {what}");
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    fn of(&self, sample: Sample) -> Result<&Chat> {
        self.timeline.chat_of(sample).with_context(|| format!("{} was not sent", sample.conversation))
    }

    async fn status(&self, sample: Sample) -> Result<String> {
        Ok(self.store.session(None, &self.of(sample)?.session_id).await?.status)
    }

    async fn deliveries(&self) -> Result<Vec<String>> {
        let deliveries = self.store.deliveries(&self.of(samples::NOTE)?.session_id).await?;
        Ok(deliveries.into_iter().map(|delivery| delivery.status).collect())
    }

    /// Returns the model call of a step after the first, once it has streamed something. The first step is
    /// committed by then.
    async fn speaks(&mut self) -> Result<Option<Killed>> {
        let session_id = &self.of(samples::NOTE)?.session_id;
        let live = self.store.live_generation(session_id, None, 0).await?;
        if live.as_ref().is_some_and(|live| live.chunks.is_empty()) {
            // Workers write chunks only of sessions that somebody reads.
            self.store.reads(session_id).await?;
        }
        Ok(live
            .filter(|live| live.step_number > 1 && !live.chunks.is_empty())
            .map(|live| Killed { step_number: live.step_number, generation_id: live.generation_id }))
    }

    /// Returns how long the killed worker's lease still lasts.
    async fn lease_left_s(&self) -> Result<f64> {
        let session = self.store.session(None, &self.of(samples::NOTE)?.session_id).await?;
        let run_at = session.job.as_ref().and_then(|job| job["run_at"].as_str());
        let run_at = run_at.context("the session has no job")?;
        let ends = chrono::DateTime::parse_from_rfc3339(run_at).context("the lease's end")?;
        Ok((ends.to_utc() - chrono::Utc::now()).as_seconds_f64().max(0.0))
    }
}

/// The demo's Maildir.
fn maildir(dir: &Path) -> std::path::PathBuf {
    dir.join("mail")
}

fn workspaces(dir: &Path) -> std::path::PathBuf {
    dir.join("workspaces")
}
