//! Replays: a session is forked, and the fork runs the same loop again beside its source.
//!
//! The fork is an ordinary session, and what works on it is the ordinary step pool, with its queue and its leases, under a
//! name of its own. So a replay that is killed goes on where it stood, as any run does.
//!
//! This is one replay, from its fork to its end: made or found again, fed with its source's messages, and waited for.

use anyhow::Context as _;
use sha2::Digest;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::jobs::pool;
use wakeful_engine::replay::give;
use wakeful_store::fork::{ForkRequest, Model, Purpose};
use wakeful_store::replay::{Progress, Unfinished};
use wakeful_workflow::fork::{At, Line, SystemPromptPatch, cut};
use wakeful_workflow::id::SessionId;
use wakeful_workflow::policy::{Answers, Replay, ToolMode};
use wakeful_workflow::record::{Record, Role};
use wakeful_workflow::replay::{self, Recording};
use wakeful_workflow::session::{Session, SessionStatus};

/// News of a session may be missed: so often its row is looked at without any.
const LOOK: Duration = Duration::from_secs(1);

/// What is to be run again, and how.
#[derive(Clone, Debug)]
pub struct Request {
    pub source_session_id: SessionId,
    /// What the source is to whoever asks: the session's id, or the hash of the file that it was imported from.
    pub source_name: String,
    /// Its messages up to this one are kept. `None`: from scratch.
    pub from_message: Option<i64>,
    pub answers: Answers,
    /// In place of the source's; with recorded answers there is no choice.
    pub model: Option<String>,
    /// In place of the source's.
    pub system_prompt: Option<String>,
    pub tool_mode: ToolMode,
}

/// How a replay ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// Every message of the source was given, and the replay rests.
    Over,
    /// Its run failed, or waits for an operator.
    Failed(String),
    /// The process is to end. The same request goes on with it.
    Interrupted,
}

/// A replay that came to its end.
#[derive(Clone, Debug)]
pub struct Replayed {
    pub session_id: String,
    /// It was begun by an earlier process.
    pub resumed: bool,
    pub end: End,
    /// Why the copied messages end earlier than was asked for.
    pub moved: Option<String>,
    /// Calls of tools that the source has no result for, where recorded ones were asked for.
    pub unrecorded: Vec<String>,
}

/// What a replay tells as it goes.
pub trait Observer: Send + Sync {
    /// It was begun by an earlier command, and is gone on with.
    fn finds(&self, _: &Unfinished) {}

    /// Another process holds it, or held it when it was killed, for so many seconds from now.
    fn waits(&self, _session_id: &str, _seconds: i64) {}

    /// It is about to run; its source has so many answers of the model after the cut.
    fn begins(&self, session_id: &str, answers: u64);

    /// So many of its turns are committed.
    fn moves(&self, answers: u64, progress: &Progress);
}

impl Request {
    /// The name under which the replay's process claims its jobs, and by which it finds a replay that was cut off: the same
    /// request has the same.
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

/// Runs a replay to its end, or until `ctx.shutdown.draining` fires. One that was cut off goes on where it stood, unless it is to be
/// `fresh`.
///
/// # Errors
/// When there is no such source, it cannot be cut there, or the database fails for good.
pub async fn run(
    ctx: &Arc<Ctx>,
    request: &Request,
    fresh: bool,
    observer: &dyn Observer,
) -> anyhow::Result<Replayed> {
    let runner = request.runner();
    let mut unfinished = ctx.store.unfinished_replays(&runner).await?.into_iter();
    let newest = if fresh { None } else { unfinished.next() };
    // This process would work on their jobs as well, for nobody.
    for older in unfinished {
        ctx.store.abandon_replay(&older.session_id, "another replay was begun in its place").await?;
    }
    let (session_id, moved, resumed) = match newest {
        Some(found) => {
            observer.finds(&found);
            resume(ctx, &found.session_id).await?;
            (found.session_id, None, true)
        }
        None => fork(ctx, request, &runner).await?,
    };
    if let Some(seconds) = ctx.store.held_for_s(&session_id).await? {
        observer.waits(&session_id, seconds);
    }
    ctx.bus.notifier.job();
    let stop = ctx.shutdown.draining.child_token();
    let pool = tokio::spawn(pool::run_steps(Arc::clone(ctx), runner.into(), stop.clone()));
    // Whoever drops this ends its pool as well.
    let guard = stop.clone().drop_guard();
    let driven = drive(ctx, &session_id, observer, &stop).await;
    drop(guard);
    pool.await.context("the replay's pool")??;
    let end = driven?;
    let unrecorded = unrecorded(ctx, &session_id).await?;
    Ok(Replayed { session_id, resumed, end, moved, unrecorded })
}

/// A run that failed goes on where it stood, as `session retry` would have it.
async fn resume(ctx: &Ctx, session_id: &str) -> anyhow::Result<()> {
    let session = ctx.store.hydrate(session_id).await?;
    let stands = matches!(session.status, SessionStatus::Failed | SessionStatus::NeedsAttention);
    if stands && !is_at_the_end(ctx, &session).await? {
        ctx.store.retry_replay(session_id, "the replay was asked for again").await?;
    }
    Ok(())
}

async fn fork(ctx: &Ctx, request: &Request, runner: &str) -> anyhow::Result<(String, Option<String>, bool)> {
    let before = ctx.store.finished_replay(runner).await?;
    let source = &request.source_session_id;
    let recording = ctx.store.recording(source.as_str()).await?;
    let at = request.from_message.map_or(At::Start, At::Message);
    let session = &recording.session;
    // Only a message that waits for an answer begins a run; else the next one of the source does.
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
        // Named in the replay's own policy, for the configuration here may have another agent of that name, or none.
        tools: session.prefix.as_ref().map(|prefix| prefix.tools.clone()),
        tool_mode: Some(request.tool_mode),
        replay: Some(Replay {
            source_session_id: source.clone(),
            // The fork writes down where it was cut.
            after_message_number: 0,
            fed: true,
            answers: request.answers,
        }),
        runner: runner.to_owned(),
        // Two processes that begin at once make one replay.
        client_key: Some(format!("{runner}/{}", before.as_deref().unwrap_or_default())),
        start,
        ..ForkRequest::new(source.as_str(), at)
    };
    let forked = ctx.store.fork(&fork).await?;
    Ok((forked.session_id, forked.moved, forked.duplicate))
}

/// The model that answered last, or the one that the session was made for.
async fn model_of(ctx: &Ctx, recording: &Recording) -> anyhow::Result<String> {
    if let Some((_, call)) = recording.calls.last_key_value() {
        return Ok(call.model.clone());
    }
    let session_id = recording.session.session_id.as_str();
    Ok(ctx.store.session(None, session_id).await?.model_id)
}

/// Gives the replay its source's messages and waits for what comes of them.
async fn drive(
    ctx: &Ctx,
    session_id: &str,
    observer: &dyn Observer,
    stop: &CancellationToken,
) -> anyhow::Result<End> {
    let mut news = ctx.bus.news.sessions();
    let session = ctx.store.hydrate(session_id).await?;
    let Some(source) = ctx.recordings.of(&ctx.store, &session).await? else {
        anyhow::bail!("session {session_id} replays nothing");
    };
    let cut = source.rules.after_message_number;
    let answers = |records: &[Record]| {
        records.iter().filter(|one| one.message_number > cut && one.role == Role::Assistant).count() as u64
    };
    observer.begins(session_id, answers(&source.recording.session.records));
    loop {
        let progress = ctx.store.progress(session_id).await?;
        observer.moves(progress.turns.unsigned_abs(), &progress);
        match progress.status {
            SessionStatus::Queued | SessionStatus::Running => {}
            SessionStatus::Created | SessionStatus::Completed | SessionStatus::WaitingInput => {
                let session = ctx.store.hydrate(session_id).await?;
                match replay::next_input(&session, &source.rules, &source.recording) {
                    Some(input) => {
                        give(&ctx.store, session_id, &input).await?;
                        ctx.bus.notifier.job();
                        continue;
                    }
                    None => return Ok(End::Over),
                }
            }
            SessionStatus::Failed | SessionStatus::NeedsAttention => {
                let session = ctx.store.hydrate(session_id).await?;
                if is_at_the_end(ctx, &session).await? {
                    return Ok(End::Over);
                }
                let status = progress.status.as_str();
                return Ok(End::Failed(progress.error.unwrap_or_else(|| format!("its run is {status}"))));
            }
            SessionStatus::Archived | SessionStatus::Terminated => {
                return Ok(End::Failed(format!("the session is {}", progress.status.as_str())));
            }
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(End::Interrupted),
            _ = news.recv() => {}
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}

/// Whether a run that ended only ended with its recording.
async fn is_at_the_end(ctx: &Ctx, session: &Session) -> anyhow::Result<bool> {
    if !replay::has_recorded_answers(session) {
        return Ok(false);
    }
    let source = ctx.recordings.of(&ctx.store, session).await?;
    Ok(source.is_some_and(|source| replay::is_at_the_end(session, &source.rules, &source.recording)))
}

async fn unrecorded(ctx: &Ctx, session_id: &str) -> anyhow::Result<Vec<String>> {
    let session = ctx.store.hydrate(session_id).await?;
    if session.policy.tool_mode != ToolMode::Recorded {
        return Ok(Vec::new());
    }
    let Some(source) = ctx.recordings.of(&ctx.store, &session).await? else { return Ok(Vec::new()) };
    let calls = replay::unrecorded(&session, &source.rules, &source.recording);
    Ok(calls.into_iter().map(|(number, call)| format!("{} in message {number}", call.name)).collect())
}
