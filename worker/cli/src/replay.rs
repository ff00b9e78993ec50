//! Replays: a fork of a session runs the same loop again and takes its inputs from its source.
//!
//! The fork is an ordinary session. An ordinary step pool runs it, with the same queue and leases, but claims
//! only jobs with the replay's own `runner` name. So a replay that is killed goes on where it stopped, as any
//! run does.
//!
//! This file runs one replay from its fork to its end. It makes the fork or finds an unfinished one, gives it
//! its source's messages, and waits for it.

use anyhow::Context as _;
use sha2::Digest;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::jobs::pool;
use wakeful_engine::model::host_of;
use wakeful_engine::replay::send_input;
use wakeful_store::fork::{ForkRequest, Model, Purpose};
use wakeful_store::replay::{Progress, Unfinished};
use wakeful_workflow::fork::{CutPoint, Line, SystemPromptPatch, cut};
use wakeful_workflow::id::SessionId;
use wakeful_workflow::policy::{Answers, Replay, ToolMode};
use wakeful_workflow::record::{Record, Role};
use wakeful_workflow::replay::{self, Follower, Recording};
use wakeful_workflow::session::{Session, SessionStatus};

/// Poll interval of the session's row: a notification may be lost.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The session to run again, and the options.
#[derive(Clone, Debug)]
pub struct Request {
    pub source_session_id: SessionId,
    /// The caller's name of the source: the session's id, or the hash of the file that it was imported from.
    pub source_name: String,
    /// Keep the messages up to this one. `None` runs everything again.
    pub from_message: Option<i64>,
    pub answers: Answers,
    /// Model to use instead of the source's. `None` with recorded answers.
    pub model: Option<String>,
    /// System prompt to use instead of the source's.
    pub system_prompt: Option<String>,
    pub tool_mode: ToolMode,
}

/// How a replay ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplayEnd {
    /// The replay got every message of the source, and rests.
    Over,
    /// Its run failed, or waits for an operator.
    Failed(String),
    /// The process is ending. The same request continues the replay later.
    Interrupted,
}

/// The result of a replay.
#[derive(Clone, Debug)]
pub struct Replayed {
    pub session_id: String,
    /// An earlier process started it.
    pub resumed: bool,
    pub end: ReplayEnd,
    /// Why fewer messages were copied than asked for.
    pub cut_note: Option<String>,
    /// Tool calls for which the source has no result, if recorded results were asked for.
    pub unrecorded: Vec<String>,
}

/// Receives the progress of a replay.
pub trait Observer: Send + Sync {
    /// An earlier command started this replay, and it is continued now.
    fn on_resume(&self, _: &Unfinished) {}

    /// Another process, perhaps a killed one, holds the replay's lease for `seconds` more.
    fn on_wait(&self, _session_id: &str, _seconds: i64) {}

    /// The replay calls this model, at this address if it is known.
    fn on_model(&self, _model: &str, _host: Option<&str>) {}

    /// The replay is about to run. Its source has `answers` replies of the model after the cut.
    fn on_start(&self, session_id: &str, answers: u64);

    /// The replay stands still, for this reason. Called again and again.
    fn on_blocked(&self, _why: &str) {}

    /// `answers` turns of the replay are committed.
    fn on_progress(&self, answers: u64, progress: &Progress);
}

impl Request {
    /// Returns the job runner's name of this replay. Equal requests have equal names, so a request finds its
    /// own unfinished replay.
    pub fn runner(&self) -> String {
        let asked = format!(
            "{:?}",
            (
                &self.source_name,
                self.from_message,
                self.answers,
                &self.model,
                &self.system_prompt,
                self.tool_mode.as_str()
            )
        );
        format!("replay-{}", &hex::encode(sha2::Sha256::digest(asked.as_bytes()))[..24])
    }
}

/// Runs a replay to its end, or until `ctx.shutdown.draining` fires. A replay that was cut off continues
/// where it stopped, unless the request says `fresh`.
///
/// # Errors
/// When the source does not exist or cannot be cut there, or the database fails permanently.
pub async fn run(
    ctx: &Arc<Ctx>,
    request: &Request,
    fresh: bool,
    observer: &dyn Observer,
) -> anyhow::Result<Replayed> {
    let runner = request.runner();
    let mut unfinished = ctx.store.unfinished_replays(&runner).await?.into_iter();
    let newest = if fresh { None } else { unfinished.next() };
    // Abandon the older replays: this process would run their jobs too, although no command waits for them.
    for older in unfinished {
        ctx.store.abandon_replay(&older.session_id, "another replay was begun in its place").await?;
    }
    let (session_id, cut_note, resumed) = match newest {
        Some(found) => {
            observer.on_resume(&found);
            resume(ctx, &found.session_id).await?;
            (found.session_id, None, true)
        }
        None => fork(ctx, request, &runner).await?,
    };
    if let Some(seconds) = ctx.store.held_for_s(&session_id).await? {
        observer.on_wait(&session_id, seconds);
    }
    if request.answers == Answers::Live {
        let model = ctx.store.session(None, &session_id).await?.model_id;
        observer.on_model(&model, host_of(&ctx.config, &model).as_deref());
    }
    ctx.bus.notifier.any_job();
    let stop = ctx.shutdown.draining.child_token();
    let pool = tokio::spawn(pool::run_steps(Arc::clone(ctx), runner.into(), stop.clone()));
    // Stops the pool if this future is dropped.
    let guard = stop.clone().drop_guard();
    let driven = drive(ctx, &session_id, observer, &stop).await;
    drop(guard);
    pool.await.context("the replay's pool")??;
    let end = driven?;
    let unrecorded = unrecorded(ctx, &session_id).await?;
    Ok(Replayed { session_id, resumed, end, cut_note, unrecorded })
}

/// Retries a run that failed, from its last commit, as `session retry` would.
async fn resume(ctx: &Ctx, session_id: &str) -> anyhow::Result<()> {
    let session = ctx.store.hydrate(session_id).await?;
    if session.status.may_be_retried() && !is_at_the_end(ctx, &session).await? {
        ctx.store.retry_replay(session_id, "the replay was asked for again").await?;
    }
    Ok(())
}

async fn fork(ctx: &Ctx, request: &Request, runner: &str) -> anyhow::Result<(String, Option<String>, bool)> {
    let before = ctx.store.finished_replay(runner).await?;
    let source = &request.source_session_id;
    let recording = ctx.store.recording(source.as_str()).await?;
    let at = request.from_message.map_or(CutPoint::Start, CutPoint::Message);
    let session = &recording.session;
    // Start a run only if the copied messages end with one that awaits an answer; otherwise the source's next
    // message starts it.
    let lines: Vec<Line> =
        session.records.iter().map(|record| Line::of(record, String::new(), None)).collect();
    let start = cut(&lines, session.base_message_number, &at, false).is_ok_and(|cut| cut.awaits_model);
    let model = match &request.model {
        Some(model) => model.clone(),
        None => model_of(ctx, &recording).await?,
    };
    let fork = ForkRequest {
        purpose: Purpose::Replay,
        model: Some(Model {
            context_window: i32::try_from(ctx.config.context_window(&model)).unwrap_or(i32::MAX),
            id: model,
        }),
        system_prompt: request.system_prompt.clone().map(SystemPromptPatch::Replace),
        // Take the tools from the source: this configuration may have another agent of that name, or none.
        tools: session.prefix.as_ref().map(|prefix| prefix.tools.to_vec()),
        tool_mode: Some(request.tool_mode),
        replay: Some(Replay {
            source_session_id: source.clone(),
            // Set by the store when it makes the fork.
            after_message_number: 0,
            fed: true,
            answers: request.answers,
        }),
        runner: runner.to_owned(),
        // With this key, two processes that start at once make only one replay.
        client_key: Some(format!("{runner}/{}", before.as_deref().unwrap_or_default())),
        start,
        ..ForkRequest::new(source.as_str(), at)
    };
    let forked = ctx.store.fork(&fork).await?;
    Ok((forked.session_id, forked.moved, forked.duplicate))
}

/// Returns the model of the last reply, or the one that the session was created with.
async fn model_of(ctx: &Ctx, recording: &Recording) -> anyhow::Result<String> {
    if let Some((_, call)) = recording.calls.last_key_value() {
        return Ok(call.model.clone());
    }
    let session_id = recording.session.session_id.as_str();
    Ok(ctx.store.session(None, session_id).await?.model_id)
}

/// Gives the replay its source's messages, one at a time, and waits until it rests after the last one.
async fn drive(
    ctx: &Ctx,
    session_id: &str,
    observer: &dyn Observer,
    stop: &CancellationToken,
) -> anyhow::Result<ReplayEnd> {
    let mut news = ctx.bus.news.sessions();
    let session = ctx.store.hydrate(session_id).await?;
    let Some(source) = ctx.recordings.of(&ctx.store, &session).await? else {
        anyhow::bail!("session {session_id} replays nothing");
    };
    let mut follower = Follower::default();
    let cut = source.rules.after_message_number;
    let answers = |records: &[Record]| {
        records.iter().filter(|one| one.message_number > cut && one.role == Role::Assistant).count() as u64
    };
    observer.on_start(session_id, answers(&source.recording.session.records));
    let mut before: Option<Progress> = None;
    loop {
        let progress = ctx.store.progress(session_id).await?;
        observer.on_progress(progress.turns.unsigned_abs(), &progress);
        match progress.status {
            SessionStatus::Queued | SessionStatus::Running => {
                // Only a replay that stands still is looked at.
                if before.as_ref() == Some(&progress)
                    && let Some(why) = why_blocked(ctx, session_id).await?
                {
                    observer.on_blocked(&why);
                }
            }
            SessionStatus::Created | SessionStatus::Completed | SessionStatus::WaitingInput => {
                let session = ctx.store.hydrate(session_id).await?;
                if session.status != progress.status {
                    // Another command drives the same replay, and has given it a message since.
                    continue;
                }
                let input = follower.follow(&session, &source.rules, &source.recording).next_input();
                match input {
                    Some(input) => {
                        send_input(&ctx.store, session_id, &input).await?;
                        ctx.bus.notifier.any_job();
                        continue;
                    }
                    None => return Ok(ReplayEnd::Over),
                }
            }
            SessionStatus::Failed | SessionStatus::NeedsAttention => {
                let session = ctx.store.hydrate(session_id).await?;
                if is_at_the_end(ctx, &session).await? {
                    return Ok(ReplayEnd::Over);
                }
                let status = progress.status.as_str();
                return Ok(ReplayEnd::Failed(
                    progress.error.unwrap_or_else(|| format!("its run is {status}")),
                ));
            }
            SessionStatus::Cancelled | SessionStatus::Archived | SessionStatus::Terminated => {
                return Ok(ReplayEnd::Failed(format!("the session is {}", progress.status.as_str())));
            }
        }
        before = Some(progress);
        tokio::select! {
            () = stop.cancelled() => return Ok(ReplayEnd::Interrupted),
            _ = news.recv() => {}
            () = tokio::time::sleep(POLL_INTERVAL) => {}
        }
    }
}

/// Why the replay's step waits. `None` while it runs, and before its first failure.
async fn why_blocked(ctx: &Ctx, session_id: &str) -> anyhow::Result<Option<String>> {
    let job = ctx.store.session(None, session_id).await?.job.unwrap_or_default();
    let error = job["last_error"].as_str().filter(|_| job["leased"] == false);
    let what = job["waits_for"].as_str().unwrap_or("its next attempt");
    Ok(error.map(|error| format!("waits for {what}: {error}")))
}

/// Returns whether a failed run failed only because its recording was used up.
async fn is_at_the_end(ctx: &Ctx, session: &Session) -> anyhow::Result<bool> {
    if !replay::has_recorded_replies(session) {
        return Ok(false);
    }
    let source = ctx.recordings.of(&ctx.store, session).await?;
    Ok(source.is_some_and(|source| {
        Follower::default().follow(session, &source.rules, &source.recording).is_at_the_end()
    }))
}

async fn unrecorded(ctx: &Ctx, session_id: &str) -> anyhow::Result<Vec<String>> {
    let session = ctx.store.hydrate(session_id).await?;
    if session.policy.tool_mode != ToolMode::Recorded {
        return Ok(Vec::new());
    }
    let Some(source) = ctx.recordings.of(&ctx.store, &session).await? else { return Ok(Vec::new()) };
    let mut follower = Follower::default();
    let calls = follower.follow(&session, &source.rules, &source.recording).unrecorded();
    Ok(calls.into_iter().map(|(number, call)| format!("{} in message {number}", call.name)).collect())
}
