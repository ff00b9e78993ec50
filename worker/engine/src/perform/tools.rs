//! Hop 5: the tool calls of one turn. They run concurrently, and each does what its ledger row allows.

mod effect;
mod files;
mod ledger;

use super::Unperformed;
use super::cut::RunningTool;
use super::recorded::{self, Recorded};
use crate::ctx::Ctx;
use crate::telemetry::{self, names};
use crate::tool::read_output::StoredOutputs;
use crate::tool::{ToolCallContext, ToolError, ToolErrorKind, ToolOutput, not_carried_out};
use crate::workspace::Held;
use futures::FutureExt;
use futures::future::join_all;
use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::OnceCell;
use tracing::{Instrument, info_span};
use wakeful_store::ledger::Started;
use wakeful_store::queue::{Lease, Term};
use wakeful_workflow::advance::{CallEnd, EndedCall, Performed};
use wakeful_workflow::agent::Agent;
use wakeful_workflow::effect::Effect;
use wakeful_workflow::id::CallId;
use wakeful_workflow::plan::{How, PlannedCall};
use wakeful_workflow::policy::ToolMode;
use wakeful_workflow::record::ToolCall;
use wakeful_workflow::session::{CallOutcome, CallStatus, Session};

/// Idempotent calls that a commit started, with the rights to run them. Each right saves a statement, and is used once.
#[derive(Debug, Default)]
pub struct StartedCalls {
    term: Option<Term>,
    rights: Mutex<HashMap<CallId, Started>>,
}

impl StartedCalls {
    /// `rights` are those that a commit gives. They end with `term`, the lease's end as it was before that commit.
    pub(crate) fn new(term: Term, rights: HashMap<CallId, Started>) -> StartedCalls {
        StartedCalls { term: Some(term), rights: Mutex::new(rights) }
    }

    fn take(&self, call_id: &CallId) -> Option<(Started, Term)> {
        let started = self.rights.lock().unwrap_or_else(PoisonError::into_inner).remove(call_id)?;
        Some((started, self.term?))
    }

    /// Takes the rights that were not used, so that no call runs by them any more.
    pub fn take_unused(&self) -> Vec<Started> {
        let mut rights = self.rights.lock().unwrap_or_else(PoisonError::into_inner);
        rights.drain().map(|(_, started)| started).collect()
    }
}

/// Performs the planned calls and returns how each ended. The ledger keeps the outcome of each settled call
/// with effects, so such a call does not run again after a crash. Only the outcome of the last call to end is left to the
/// commit of the turn, which follows at once.
pub(super) async fn call_tools(
    ctx: &Ctx,
    lease: &Lease,
    session: &Session,
    agent: &Agent,
    calls: Vec<PlannedCall>,
    started: &StartedCalls,
) -> Result<Performed, Unperformed> {
    let tool_run = ToolRun::new(ctx, lease, session, agent, started, calls.len());
    // Wait for every call, even if another one fails: dropping a guarded call half-way would make its outcome
    // uncertain without need.
    let ended = join_all(calls.into_iter().map(|planned| tool_run.perform(planned))).await;
    tool_run.leave_files_to_lost_calls();
    if ended.iter().any(Result::is_err) {
        // No commit follows, so the outcome that was left to it is recorded now.
        tool_run.settle_left().await?;
    }
    let mut ended = ended.into_iter().collect::<Result<Vec<_>, _>>()?;
    if tool_run.may_have_changed.load(Ordering::Relaxed) {
        // Storing the files may take seconds, and a cancel or a crash in that time would lose the outcome.
        tool_run.settle_left().await?;
    }
    let snapshot = tool_run.store_files(&mut ended).await?;
    // In a replay, results follow the source's order. The sort is stable, so other calls keep their own
    // order.
    ended.sort_by_key(|(_, source_number)| *source_number);
    let ended = ended.into_iter().map(|(call, _)| call).collect();
    Ok(match snapshot {
        Some(snapshot) => Performed::CalledAndChanged(ended, snapshot),
        None => Performed::Called(ended),
    })
}

struct ToolRun<'a> {
    ctx: &'a Ctx,
    lease: &'a Lease,
    session: &'a Session,
    agent: &'a Agent,
    started: &'a StartedCalls,
    /// How many calls the turn has, and how many of them still run.
    calls: usize,
    running: AtomicUsize,
    /// The outcome of the call that ended last. The turn's commit records it.
    left: Mutex<Option<UnrecordedOutcome>>,
    /// The session's folder, since the first call that asked for it.
    files: OnceCell<Arc<Held>>,
    /// Why the URL that the files begin with does not answer, since the first call that met it.
    seed_away: OnceLock<String>,
    /// A call that may change the files has begun.
    may_have_changed: AtomicBool,
    /// Such a call returned nothing, so it may still change them.
    may_still_change: AtomicBool,
}

/// An outcome that is not in the ledger yet.
struct UnrecordedOutcome {
    call: ToolCall,
    started: Started,
    status: CallStatus,
    outcome: CallOutcome,
}

/// A call that runs. Dropping it says that the call has ended.
struct Running<'a>(&'a AtomicUsize);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How a tool's own code ended.
enum ToolEnd {
    Output(ToolOutput),
    Error(ToolError),
    /// This host cannot carry it out, and it had no effect. Why, for operators.
    Host(String),
    /// Nobody knows what the call did: it timed out or panicked, or the tool says so.
    Lost(String),
}

impl<'a> ToolRun<'a> {
    fn new(
        ctx: &'a Ctx,
        lease: &'a Lease,
        session: &'a Session,
        agent: &'a Agent,
        started: &'a StartedCalls,
        calls: usize,
    ) -> ToolRun<'a> {
        let (running, left) = (AtomicUsize::new(calls), Mutex::default());
        ToolRun {
            ctx,
            lease,
            session,
            agent,
            started,
            calls,
            running,
            left,
            files: OnceCell::new(),
            seed_away: OnceLock::new(),
            may_have_changed: AtomicBool::new(false),
            may_still_change: AtomicBool::new(false),
        }
    }

    /// Performs one call. Returns how it ended, and the message number of its result in a replay's source
    /// (`i64::MAX` if it has none).
    async fn perform(&self, PlannedCall { call, how }: PlannedCall) -> Result<(EndedCall, i64), Unperformed> {
        let running = Running(&self.running);
        let mut source_number = i64::MAX;
        let ending = match how {
            How::Reuse(status, outcome) => CallEnd::Settled(status, outcome),
            How::Uncertain { known } => CallEnd::Uncertain { known, why: None },
            How::Answer { inbox_id, text } => CallEnd::Answered { inbox_id, text },
            How::Abandon => CallEnd::Abandoned,
            How::Run => match self.session.policy.tool_mode {
                ToolMode::Live => self.run(&call, running).await?,
                ToolMode::Dry => self.rehearse(&call).await,
                ToolMode::Recorded => match recorded::result(self.ctx, self.session, &call.call_id).await? {
                    Recorded::Settled(ending, number) => {
                        source_number = number;
                        ending
                    }
                    Recorded::Asked | Recorded::Never => self.rehearse(&call).await,
                },
            },
        };
        Ok((EndedCall { call, ending }, source_number))
    }

    /// Makes a dry run of a call, which must have no effects. Its ledger row never becomes `started`, so
    /// after a crash the next claim repeats the dry run.
    async fn rehearse(&self, call: &ToolCall) -> CallEnd {
        // A replay in a developer's process may lack a tool that the deployed workers have.
        let offered = self.session.prefix.as_ref().is_some_and(|prefix| prefix.tool(&call.name).is_some());
        if offered && call.malformed.is_none() && self.ctx.plugins.tools.get(&call.name).is_none() {
            return end_of_output(not_carried_out(&call.name));
        }
        if let Some(refusal) = refusal(self.ctx, self.session, self.agent, call) {
            return failed(refusal.text);
        }
        match self.invoke(call).await {
            ToolEnd::Output(output) => end_of_output(output),
            ToolEnd::Error(error) => failed(error.text),
            ToolEnd::Host(reason) | ToolEnd::Lost(reason) => failed(reason),
        }
    }

    async fn run(&self, call: &ToolCall, running: Running<'_>) -> Result<CallEnd, Unperformed> {
        if let Some(refusal) = refusal(self.ctx, self.session, self.agent, call) {
            // An earlier attempt, under another configuration, may have run the call. Refusing it now does
            // not undo that.
            let may_have_run = self
                .session
                .call(&call.call_id)
                .is_some_and(|row| row.status.may_have_run() && row.outcome.is_none());
            return Ok(if may_have_run {
                CallEnd::Uncertain { known: false, why: None }
            } else {
                failed(refusal.text)
            });
        }
        let (effect, status) = match self.session.call(&call.call_id) {
            Some(row) => (row.effect, row.status),
            None => (Effect::Guarded, CallStatus::Invoked),
        };
        if let Some(refusal) = self.bring_files(call).await? {
            return Ok(failed(refusal.text));
        }
        match effect {
            Effect::Pure => Ok(match self.invoke(call).await {
                ToolEnd::Output(output) => end_of_output(output),
                ToolEnd::Error(error) => failed(error.text),
                ToolEnd::Host(why) => return Err(Unperformed::Host(why)),
                ToolEnd::Lost(reason) => failed(reason),
            }),
            Effect::Idempotent | Effect::Guarded => self.run_effect(call, effect, status, running).await,
        }
    }

    /// Runs the tool's code with the agent's time limit, and catches a panic.
    async fn invoke(&self, call: &ToolCall) -> ToolEnd {
        let limit = Duration::from_secs(self.agent.limits.tool_s);
        let cancelled = self.lease.lost().child_token();
        // Dropping this future cancels the token, so that tasks that the tool has spawned can stop.
        let _ended = cancelled.clone().drop_guard();
        let context = ToolCallContext {
            session_id: self.session.session_id.clone(),
            call_id: call.call_id.clone(),
            workspace: self.workspace(),
            mode: self.session.policy.tool_mode,
            policy: Arc::new(self.session.policy.clone()),
            recipients: self.agent.recipients.clone(),
            web: self.ctx.web.under(&self.agent.web, self.session.policy.web.as_ref()),
            cancelled,
            outputs: Arc::new(StoredOutputs::new(self.ctx.store.clone(), self.session.session_id.clone())),
        };
        let span = info_span!(
            "execute_tool",
            "otel.name" = names::execute_tool(&call.name),
            "otel.kind" = names::KIND_INTERNAL,
            { names::OPERATION_NAME } = names::OPERATION_EXECUTE_TOOL,
            { names::TOOL_NAME } = call.name,
            { names::TOOL_CALL_ID } = %call.call_id,
            { names::TOOL_TYPE } = names::TOOL_TYPE_FUNCTION,
            { names::SESSION_ID } = %self.session.session_id,
            { names::CONVERSATION_ID } = %self.session.conversation_id,
        );
        let running =
            AssertUnwindSafe(self.ctx.plugins.tools.run(&call.name, &context, call.arguments.clone()));
        let what =
            format!("tool {} (call {}) of session {}", call.name, call.call_id, self.session.session_id);
        let running = running.catch_unwind().instrument(span.clone());
        let watched = self.ctx.watchdog.watch(self.lease.job_id, what, limit, running);
        let mut cut = RunningTool {
            cut: &self.ctx.cut,
            lease: self.lease,
            session_id: &self.session.session_id,
            call_id: &call.call_id,
            is_over: false,
        };
        let began = Instant::now();
        let ran = tokio::time::timeout(limit, watched).await;
        cut.is_over = true;
        let returned = matches!(ran, Ok(Ok(_)));
        let (kind, ran) = match ran {
            Ok(Ok(Ok(output))) => {
                self.ctx.metrics.tool_ran(&call.name, "ok", began.elapsed());
                return ToolEnd::Output(output);
            }
            Ok(Ok(Err(error))) => match error.kind {
                ToolErrorKind::Failed => ("tool_error", ToolEnd::Error(error)),
                ToolErrorKind::OutcomeUnknown => ("outcome_unknown", ToolEnd::Lost(error.text)),
                ToolErrorKind::Host => ("host", ToolEnd::Host(error.text)),
            },
            Ok(Err(panic)) => {
                let text = panic_text(&*panic);
                (
                    "panic",
                    ToolEnd::Lost(format!("The tool failed inside: {text}. This is a defect of the tool.")),
                )
            }
            Err(_) => (
                "timeout",
                ToolEnd::Lost(format!("The tool did not finish within {} seconds.", limit.as_secs())),
            ),
        };
        telemetry::failed(&span, kind);
        self.ctx.metrics.tool_ran(&call.name, kind, began.elapsed());
        if !returned {
            self.note_lost(call);
        }
        ran
    }
}

/// Returns why the call must not run, in words for the model. `None` if it may run.
pub(crate) fn refusal(ctx: &Ctx, session: &Session, agent: &Agent, call: &ToolCall) -> Option<ToolError> {
    if let Some(raw) = &call.malformed {
        let shown: String = raw.chars().take(500).collect();
        return Some(ToolError::new(format!(
            "The arguments were not a JSON object, were nested too deep, or had an integer beyond 64 bits, so the tool did not run. Call it again with valid JSON. Received: {shown}"
        )));
    }
    let prefix = session.prefix.as_ref();
    let definition = prefix.and_then(|prefix| prefix.tool(&call.name));
    // The agent may use it now, this process has it, and the pinned prefix (if any) defines it for the model.
    let is_there = |name: &str| {
        let is_pinned = prefix.is_none_or(|prefix| prefix.tool(name).is_some());
        is_pinned && ctx.plugins.tools.get(name).is_some()
    };
    if !agent.tools.contains(&call.name) || !is_there(&call.name) {
        let there: Vec<&str> = agent.tools.iter().map(String::as_str).filter(|name| is_there(name)).collect();
        let text = format!("There is no tool named {:?}. The tools are: {}.", call.name, there.join(", "));
        return Some(ToolError::new(text));
    }
    match definition {
        Some(definition) => ctx.plugins.tools.validate_as(definition, &call.arguments).err(),
        None => ctx.plugins.tools.validate(&call.name, &call.arguments).err(),
    }
}

/// Returns how a call with this output ended: the tool asks a question, or the call is done.
fn end_of_output(output: ToolOutput) -> CallEnd {
    match output.question {
        Some(question) => CallEnd::Asked(question),
        None => CallEnd::Settled(
            CallStatus::Done,
            CallOutcome { content: output.content, is_error: false, details: output.details },
        ),
    }
}

/// The text of a panic, at most 500 characters of it.
pub(super) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("it panicked").trim_end_matches('.').chars().take(500).collect()
}

fn failed(reason: String) -> CallEnd {
    CallEnd::Settled(CallStatus::Failed, CallOutcome { content: reason, is_error: true, details: None })
}
