//! Forks of a session, and the tree of forks.

use crate::access::Caller;
use crate::body::{Body, Id, check_text, key_of, message_text, parse};
use crate::openapi::Operation;
use crate::openapi::of;
use crate::problem::Problem;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use tracing::{Instrument, Span};
use wakeful_engine::ctx::Ctx;
use wakeful_engine::ingest::send_span;
use wakeful_engine::telemetry::{self, names};
use wakeful_store::fork::{ForkRequest, Forked, Model};
use wakeful_store::session::SessionSummary;
use wakeful_store::tree::Branch;
use wakeful_workflow::agent::{Agent, ToolDefinition};
use wakeful_workflow::fork::{CutPoint, SystemPromptPatch};
use wakeful_workflow::policy::ToolMode;

/// The body of `POST /v1/sessions/{id}/fork`. An empty body means all defaults.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Fork {
    at: Option<Place>,
    /// Means the same as a number in `at`.
    at_message_number: Option<i64>,
    model: Option<String>,
    system_prompt_patch: Option<SystemPromptPatch>,
    tools: Option<Vec<String>>,
    text: Option<String>,
    prompt: Option<String>,
    /// The parent's mode unless given. A console suggests `dry`: a live fork may make again what the parent did after the cut.
    tool_mode: Option<ToolMode>,
    /// Whether the fork belongs to the user of the parent's conversation. Otherwise it belongs to no user.
    #[serde(default)]
    for_user: bool,
    #[serde(default = "yes")]
    start: bool,
    client_key: Option<String>,
}

fn yes() -> bool {
    true
}

/// A message's number, or a named place.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
enum Place {
    Number(i64),
    Word(String),
}

/// Forks the session: 201, or 200 with the first answer when its `client_key` was used before.
pub(super) async fn fork(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<Forked>), Problem> {
    let body = body?;
    let given: Fork = if body.is_empty() { Fork { start: true, ..Fork::default() } } else { parse(&body)? };
    let client_key = key_of("client_key", given.client_key.clone(), &headers)?;
    let parent = ctx.store.session_within(&caller.reach, &id).await?;
    if let Some(own) = &caller.reach.agent {
        within_agent(&ctx, own, &given, &parent)?;
    } else if !caller.everywhere {
        within_space(&ctx, caller.space(), &given)?;
    }
    let request = ForkRequest {
        at: given.place()?,
        model: given.model.map(|model| known_model(&ctx, model)).transpose()?,
        system_prompt: given.system_prompt_patch.map(prompt).transpose()?,
        tools: given.tools.map(|names| known_tools(&ctx, &names)).transpose()?,
        text: given.text.map(message_text).transpose()?,
        prompt: given.prompt.map(message_text).transpose()?,
        tool_mode: given.tool_mode,
        for_user: given.for_user,
        start: given.start,
        client_key,
        ..ForkRequest::new(&id, CutPoint::End)
    };
    // A run that the fork opens is linked to this trace, like a run of any trigger.
    let span = if request.start { send_span(&parent.conversation_id) } else { Span::none() };
    make(&ctx, request).instrument(span).await
}

async fn make(ctx: &Ctx, request: ForkRequest) -> Result<(StatusCode, Json<Forked>), Problem> {
    let request = ForkRequest { trace_context: telemetry::trace_context(), ..request };
    let forked = ctx.store.fork(&request).await?;
    let span = Span::current();
    span.record(names::SESSION_ID, forked.session_id.as_str());
    if let Some(run_id) = &forked.run_id {
        span.record(names::RUN_ID, run_id.as_str());
        if !forked.duplicate {
            ctx.bus.notifier.job(wakeful_store::queue::Kind::Step);
            ctx.bus.notifier.session(&forked.session_id);
        }
    }
    let status = if forked.duplicate { StatusCode::OK } else { StatusCode::CREATED };
    Ok((status, Json(forked)))
}

/// The sessions of this session's tree. Each is followed by its forks.
pub(super) async fn tree(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
) -> Result<Json<Value>, Problem> {
    ctx.store.session_within(&caller.reach, &id).await?;
    let items = ctx.store.tree(&id).await?;
    Ok(Json(json!({"items": items, "next": null})))
}

impl Fork {
    /// The cut. By default the end of the session, or the message whose text is replaced.
    fn place(&self) -> Result<CutPoint, Problem> {
        match (&self.at, self.at_message_number) {
            (Some(_), Some(_)) => {
                Err(Problem::bad_request("`at` and `at_message_number` say the same: give one"))
            }
            (Some(Place::Number(number)), None) => Ok(CutPoint::Message(*number)),
            (None, Some(number)) => Ok(CutPoint::Message(number)),
            (Some(Place::Word(word)), None) => {
                word.parse().map_err(|error| Problem::bad_request(format!("`at`: {error}")))
            }
            (None, None) if self.text.is_some() => Ok(CutPoint::LastUser),
            (None, None) => Ok(CutPoint::End),
        }
    }
}

/// Checks that a fork under a token of the agent `own` gets nothing beyond that agent's configuration, nor its parent's mode.
fn within_agent(ctx: &Ctx, own: &str, given: &Fork, parent: &SessionSummary) -> Result<(), Problem> {
    let agent = ctx.config.agent(own).map_err(|error| Problem::bad_request(error.to_string()))?;
    let was_live = parent.policy.get("tool_mode").is_none_or(|mode| *mode == json!(ToolMode::Live));
    let beyond = if given.tools.iter().flatten().any(|tool| !agent.tools.contains(tool)) {
        "tools that it has not"
    } else if given.model.as_ref().is_some_and(|id| !asks(&agent, id)) {
        "a model that is not its own"
    } else if given.system_prompt_patch.is_some() {
        "another system prompt"
    } else if given.tool_mode == Some(ToolMode::Live) && !was_live {
        "live tools after a rehearsal"
    } else {
        return Ok(());
    };
    let detail =
        format!("this token is for the agent {own} as it is configured: it cannot give a fork {beyond}");
    Err(Problem::new(StatusCode::FORBIDDEN, detail))
}

/// Checks that a fork under a token of one space gets no tool and no model that only agents of other spaces have: those act and pay
/// for others.
fn within_space(ctx: &Ctx, space: &str, given: &Fork) -> Result<(), Problem> {
    let agents = agents_in(ctx, space);
    let has_tool = |tool: &String| agents.iter().any(|agent| agent.tools.contains(tool));
    if let Some(tool) = given.tools.iter().flatten().find(|tool| !has_tool(tool)) {
        return Err(beyond_space(space, &format!("the tool `{tool}`")));
    }
    given.model.as_ref().map_or(Ok(()), |id| has_model(ctx, space, id))
}

/// Checks that an agent of this space has the model: a token of the space may ask no other.
pub(crate) fn has_model(ctx: &Ctx, space: &str, id: &str) -> Result<(), Problem> {
    let has = agents_in(ctx, space).iter().any(|agent| asks(agent, id));
    if has { Ok(()) } else { Err(beyond_space(space, &format!("the model `{id}`"))) }
}

fn asks(agent: &Agent, id: &str) -> bool {
    agent.model == id || agent.fallback.iter().any(|model| model == id)
}

fn agents_in(ctx: &Ctx, space: &str) -> Vec<Agent> {
    ctx.config.agent_names_in(space).iter().filter_map(|name| ctx.config.agent(name).ok()).collect()
}

fn beyond_space(space: &str, what: &str) -> Problem {
    let what: String = what.chars().take(300).collect();
    let detail = format!("this token is for the space {space}, and none of its agents has {what}");
    Problem::new(StatusCode::FORBIDDEN, detail)
}

pub(crate) fn known_model(ctx: &Ctx, id: String) -> Result<Model, Problem> {
    check_text("model", Some(&id), 256)?;
    ctx.plugins.models.get(&id).map_err(|fault| Problem::bad_request(format!("`model`: {fault}")))?;
    Ok(Model { context_window: i32::try_from(ctx.config.context_window(&id)).unwrap_or(i32::MAX), id })
}

fn known_tools(ctx: &Ctx, names: &[String]) -> Result<Vec<ToolDefinition>, Problem> {
    let tools = ctx
        .plugins
        .tools
        .definitions(names)
        .map_err(|error| Problem::bad_request(format!("`tools`: {error}")))?;
    // Without a channel for mail, the model would report mail that nobody ever sends.
    if tools.iter().any(|tool| tool.name == "compose_email") && !ctx.plugins.channels.contains_key("email") {
        return Err(Problem::bad_request("`tools` has compose_email, but nothing sends mail here"));
    }
    Ok(tools)
}

fn prompt(patch: SystemPromptPatch) -> Result<SystemPromptPatch, Problem> {
    let (SystemPromptPatch::Replace(text) | SystemPromptPatch::Append(text)) = &patch;
    if text.contains('\0') {
        return Err(Problem::bad_request("`system_prompt_patch` contains a NUL character"));
    }
    Ok(patch)
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::post("/v1/sessions/{id}/fork", "A new session that begins with this one's messages")
            .body_if_any::<Fork>()
            .answers(StatusCode::CREATED, "made", of::<Forked>())
            .answers(StatusCode::OK, "the first answer to this key", of::<Forked>()),
        Operation::get("/v1/sessions/{id}/tree", "The tree of forks, each session followed by its forks")
            .lists::<Branch>(),
    ]
}
