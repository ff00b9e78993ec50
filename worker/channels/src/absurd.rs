//! What an application gave to Absurd's `spawn`: a task that begins here.
//!
//! A switch in front of `spawn` sends it here, task name by task name. `wakeful absurd import` and `take` bring the tasks that
//! Absurd has already; the idempotency keys of those are known here, so a spawn that comes twice, once there and once here,
//! begins one session.

use crate::cron::definition::shown;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use axum::{Json, Router};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;
use sha2::Digest;
use std::sync::Arc;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::{ingest, new_session};
use wakeful_http::access::Caller;
use wakeful_http::body::{Body, accepted, check_text, key_of, message_text, parse};
use wakeful_http::openapi::{Operation, of};
use wakeful_http::problem::Problem;
use wakeful_store::wake::{Continues, NewMessage, NewSession, Woken};
use wakeful_store::{Error, new_id};
use wakeful_workflow::absurd::TRIGGER_PREFIX;
use wakeful_workflow::absurd::opening::Opening;
use wakeful_workflow::absurd::rows::seeds;
use wakeful_workflow::absurd::shape::Shape;
use wakeful_workflow::record::Role;

/// Longest name of a queue in Absurd.
const QUEUE_BYTES: usize = 57;

/// `/v1/triggers/absurd`.
pub(super) fn routes() -> Router<Arc<Ctx>> {
    Router::new().route("/triggers/absurd", post(accept))
}

/// The body of `POST /v1/triggers/absurd`: the arguments of `spawn`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Spawned {
    #[serde(alias = "taskName", alias = "name")]
    task_name: String,
    #[serde(default)]
    params: Value,
    #[serde(default)]
    options: Options,
}

/// The options of `spawn`. Headers, attempts, retries and rules of cancellation mean nothing here.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "SpawnOptions")]
struct Options {
    queue: Option<String>,
    #[serde(alias = "idempotencyKey")]
    idempotency_key: Option<String>,
    #[serde(rename = "headers")]
    _headers: Option<Value>,
    #[serde(rename = "max_attempts", alias = "maxAttempts")]
    _max_attempts: Option<Value>,
    #[serde(rename = "retry_strategy", alias = "retryStrategy")]
    _retry_strategy: Option<Value>,
    #[serde(rename = "cancellation")]
    _cancellation: Option<Value>,
}

/// Accepts a task: 202, or 200 with the first answer when its idempotency key was used before, here or in Absurd.
async fn accept(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<Woken>), Problem> {
    let spawned: Spawned = parse(&body?)?;
    check_text("task_name", Some(&spawned.task_name), 256)?;
    let queue = spawned.options.queue.as_deref().unwrap_or("default");
    check_text("options.queue", Some(queue), QUEUE_BYTES)?;
    let given = key_of("options.idempotency_key", spawned.options.idempotency_key.clone(), &headers)?;
    let settings = ctx.config.absurd.task(&spawned.task_name);
    let declared = match &settings.shape {
        Some(Shape::Declared(declared)) => Some(&**declared),
        Some(Shape::AgentLoop | Shape::NewMessages | Shape::MessageLog) | None => None,
    };
    if spawned.params.is_null() {
        return Err(Problem::bad_request(format!(
            "`params` is {}: there is no message in it",
            shown(&spawned.params)
        )));
    }
    let opening = Opening::of(&spawned.params, declared);
    let only_agent = caller.reach.agent.is_some();
    if only_agent && (opening.system.is_some() || !opening.history.is_empty()) {
        let detail = "this token is for one agent as it is configured: `params` cannot bring a system prompt or earlier messages";
        return Err(Problem::new(StatusCode::FORBIDDEN, detail.to_owned()));
    }
    let key = given.unwrap_or_else(|| new_id("key"));
    let digest = hex::encode(sha2::Sha256::digest(format!("{queue}\n{key}").as_bytes()));
    let conversation = opening.conversation.clone().unwrap_or_else(|| format!("absurd-{}", &digest[..20]));
    let conversation_id = caller.conversation(&conversation)?;
    if only_agent {
        let _permit = ctx.intake.enter().await?;
        let latest = ctx.store.latest_trigger(&conversation_id).await?;
        if latest.is_some() || opening.conversation.is_some() {
            caller.enters(&conversation_id, latest.as_ref().map(|(_, agent)| agent.as_str()))?;
        }
    }
    let agent = caller.agent(settings.agent.as_deref())?;
    let new = new_session::of_chat(&ctx.config, &ctx.plugins.tools, conversation_id, agent)?;
    let trigger_type = format!("{TRIGGER_PREFIX}{queue}");
    if let Some((woken, of)) = ctx.store.absurd_by_key(&new.space_id, &trigger_type, &key).await? {
        if caller.reach.agent.as_deref().is_some_and(|own| own != of) {
            return Err(Error::NotFound { what: "task", id: key }.into());
        }
        return Ok(accepted(woken));
    }
    let prompt = new.seeds.iter().find(|seed| seed.role == Role::System).map_or("", |seed| &seed.content);
    let new = NewSession {
        seeds: seeds(&opening, prompt, false),
        trigger_type,
        trigger_id: key.clone(),
        continues: Continues::Trigger,
        only_agent,
        ..new
    };
    let message = NewMessage {
        client_key: Some(key),
        text: message_text(opening.prompt)?,
        sender: None,
        trace_context: None,
        attachments: Vec::new(),
    };
    Ok(accepted(ingest::accept(&ctx, new, message).await?))
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::post("/v1/triggers/absurd", "What Absurd's `spawn` was given begins a session")
            .body::<Spawned>()
            .answers(StatusCode::ACCEPTED, "accepted", of::<Woken>())
            .answers(StatusCode::OK, "the first answer to this key, here or in Absurd", of::<Woken>())
            .refuses(&[StatusCode::NOT_FOUND]),
    ]
}
