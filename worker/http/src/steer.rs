//! An operator's commands to a session.

use crate::access::Caller;
use crate::body::{Body, Id, REASON_BYTES, Reason, check_text, message_text, parse, parse_if_any};
use crate::effects::EffectOutcome;
use crate::openapi::{Operation, Shape, of};
use crate::problem::Problem;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::telemetry;
use wakeful_store::audit::act::because;
use wakeful_store::heal::Healed;
use wakeful_store::resolve::{Decision, Effect, Resolved};
use wakeful_workflow::resolve::Resolution;

type Steered = Result<(StatusCode, Json<Value>), Problem>;

/// Continues a failed run where it stopped.
pub(super) async fn retry(State(ctx): State<Arc<Ctx>>, caller: Caller, Id(id): Id, body: Body) -> Steered {
    let reason = reason(&ctx, &caller, &id, &body?).await?;
    let run_id = ctx.store.retry(&id, reason.as_deref()).await?;
    Ok(accepted(&ctx, &id, json!({"session_id": id, "run_id": run_id})))
}

/// Asks the open run to end.
pub(super) async fn cancel(State(ctx): State<Arc<Ctx>>, caller: Caller, Id(id): Id, body: Body) -> Steered {
    let reason = reason(&ctx, &caller, &id, &body?).await?;
    let run_id = ctx.store.cancel(&id, reason.as_deref()).await?;
    Ok(accepted(&ctx, &id, json!({"session_id": id, "run_id": run_id})))
}

/// Makes the session continue, repairs its rows if needed, and reports what was wrong.
pub(super) async fn wake(State(ctx): State<Arc<Ctx>>, caller: Caller, Id(id): Id, body: Body) -> Steered {
    reason(&ctx, &caller, &id, &body?).await?;
    let healed = ctx.store.wake_session(&id).await?;
    Ok(accepted(&ctx, &id, json!({"session_id": id, "healed": healed})))
}

/// Archives the session.
pub(super) async fn archive(State(ctx): State<Arc<Ctx>>, caller: Caller, Id(id): Id, body: Body) -> Steered {
    let reason = reason(&ctx, &caller, &id, &body?).await?;
    ctx.store.archive(&id, reason.as_deref()).await?;
    Ok(accepted(&ctx, &id, json!({"session_id": id, "status": "archived"})))
}

/// Ends the session for good.
pub(super) async fn terminate(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    body: Body,
) -> Steered {
    let reason = reason(&ctx, &caller, &id, &body?).await?;
    ctx.store.terminate(&id, reason.as_deref()).await?;
    Ok(accepted(&ctx, &id, json!({"session_id": id, "status": "terminated"})))
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Resolution")]
struct Resolve {
    call_id: Option<String>,
    delivery_id: Option<String>,
    outcome: EffectOutcome,
    result: Option<String>,
    reason: Option<String>,
    by: Option<String>,
    #[serde(default)]
    tell: bool,
}

/// Records how an uncertain effect ended: 202, or 200 if it was recorded before.
pub(super) async fn resolve(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    body: Body,
) -> Result<(StatusCode, Json<Resolved>), Problem> {
    let given: Resolve = parse(&body?)?;
    check_text("reason", given.reason.as_deref(), REASON_BYTES)?;
    check_text("by", given.by.as_deref(), 256)?;
    let effect = match (given.call_id, given.delivery_id) {
        (Some(call_id), None) => Effect::Call(call_id),
        (None, Some(delivery_id)) => Effect::Delivery(delivery_id),
        (Some(_), Some(_)) | (None, None) => {
            return Err(Problem::bad_request("one of `call_id` and `delivery_id` is needed"));
        }
    };
    let (Effect::Call(effect_id) | Effect::Delivery(effect_id)) = &effect;
    check_text("the effect's id", Some(effect_id), 256)?;
    let resolution = match (given.outcome, given.result) {
        (EffectOutcome::Happened, Some(result)) => Resolution::Happened { result: message_text(result)? },
        // A delivery has no result to record.
        (EffectOutcome::Happened, None) if matches!(effect, Effect::Delivery(_)) => {
            Resolution::Happened { result: String::new() }
        }
        (EffectOutcome::Happened, None) => {
            return Err(Problem::bad_request("`result` is needed: what the call would have returned"));
        }
        (EffectOutcome::DidNotHappen, None) => Resolution::DidNotHappen,
        (EffectOutcome::LetModelDecide, None) => Resolution::LetModelDecide,
        (EffectOutcome::DidNotHappen | EffectOutcome::LetModelDecide, Some(_)) => {
            return Err(Problem::bad_request("`result` is only for an effect that happened"));
        }
    };
    ctx.store.session_within(&caller.reach, &id).await?;
    let decision = Decision {
        effect,
        resolution,
        by: given.by,
        reason: given.reason,
        args_sha256: None,
        tell: given.tell,
        trace_context: telemetry::trace_context(),
    };
    settle(&ctx, &id, &decision).await
}

async fn settle(ctx: &Ctx, id: &str, decision: &Decision) -> Result<(StatusCode, Json<Resolved>), Problem> {
    let resolved = ctx.store.resolve(id, decision).await?;
    ctx.bus.notifier.any_job();
    ctx.bus.notifier.session(id);
    let status = if resolved.duplicate { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((status, Json(resolved)))
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Approval {
    /// Not needed if one call of the session waits.
    call_id: Option<String>,
    /// The hash of the arguments that the person read: refused if the call has others.
    args_sha256: Option<String>,
    reason: Option<String>,
    by: Option<String>,
}

/// Lets a call run that waits for approval: 202, or 200 if it was approved before.
pub(super) async fn approve(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    body: Body,
) -> Result<(StatusCode, Json<Resolved>), Problem> {
    decide(&ctx, &caller, &id, &body?, Resolution::Approved).await
}

/// Closes such a call without running it.
pub(super) async fn decline(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    body: Body,
) -> Result<(StatusCode, Json<Resolved>), Problem> {
    decide(&ctx, &caller, &id, &body?, Resolution::Declined).await
}

async fn decide(
    ctx: &Ctx,
    caller: &Caller,
    id: &str,
    body: &[u8],
    resolution: Resolution,
) -> Result<(StatusCode, Json<Resolved>), Problem> {
    let given: Approval = parse_if_any(body)?;
    check_text("reason", given.reason.as_deref(), REASON_BYTES)?;
    check_text("by", given.by.as_deref(), 256)?;
    check_text("call_id", given.call_id.as_deref(), 256)?;
    check_text("args_sha256", given.args_sha256.as_deref(), 64)?;
    ctx.store.session_within(&caller.reach, id).await?;
    let call_id = match given.call_id {
        Some(call_id) => call_id,
        None => ctx.store.unapproved_call(id).await?,
    };
    let decision = Decision {
        effect: Effect::Call(call_id),
        resolution,
        by: given.by,
        reason: given.reason,
        args_sha256: given.args_sha256,
        tell: false,
        trace_context: telemetry::trace_context(),
    };
    settle(ctx, id, &decision).await
}

/// The reason in the body, if there is one. Fails if the session is not in the caller's space.
async fn reason(ctx: &Ctx, caller: &Caller, id: &str, body: &[u8]) -> Result<Option<String>, Problem> {
    let reason = Reason::of(body)?;
    ctx.store.session_within(&caller.reach, id).await?;
    because(reason.as_deref());
    Ok(reason)
}

fn accepted(ctx: &Ctx, id: &str, body: Value) -> (StatusCode, Json<Value>) {
    ctx.bus.notifier.any_job();
    ctx.bus.notifier.session(id);
    (StatusCode::ACCEPTED, Json(body))
}

fn run() -> Shape {
    crate::object! {"session_id": String, "run_id": Option<String>}
}

fn status() -> Shape {
    crate::object! {"session_id": String, "status": String}
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::post("/v1/sessions/{id}/retry", "Continues a failed run from its last commit")
            .body_if_any::<Reason>()
            .answers(StatusCode::ACCEPTED, "accepted", run()),
        Operation::post("/v1/sessions/{id}/cancel", "Ends the open run").body_if_any::<Reason>().answers(
            StatusCode::ACCEPTED,
            "accepted",
            run(),
        ),
        Operation::post("/v1/sessions/{id}/wake", "Heals the session, so that it does what is still open")
            .body_if_any::<Reason>()
            .answers(
                StatusCode::ACCEPTED,
                "accepted",
                crate::object! {"session_id": String, "healed": Vec<Healed>},
            ),
        Operation::post("/v1/sessions/{id}/archive", "Archives the session").body_if_any::<Reason>().answers(
            StatusCode::ACCEPTED,
            "accepted",
            status(),
        ),
        Operation::post("/v1/sessions/{id}/terminate", "Ends the session for good")
            .body_if_any::<Reason>()
            .answers(StatusCode::ACCEPTED, "accepted", status()),
        Operation::post("/v1/sessions/{id}/resolve", "Records how an uncertain call or delivery ended")
            .body::<Resolve>()
            .answers(StatusCode::ACCEPTED, "recorded", of::<Resolved>())
            .answers(StatusCode::OK, "it was recorded before", of::<Resolved>()),
        Operation::post("/v1/sessions/{id}/approve", "Lets a call run that waits for approval")
            .body_if_any::<Approval>()
            .answers(StatusCode::ACCEPTED, "approved", of::<Resolved>())
            .answers(StatusCode::OK, "it was approved before", of::<Resolved>()),
        Operation::post("/v1/sessions/{id}/decline", "Closes such a call without running it")
            .body_if_any::<Approval>()
            .answers(StatusCode::ACCEPTED, "declined", of::<Resolved>())
            .answers(StatusCode::OK, "it was declined before", of::<Resolved>()),
    ]
}
