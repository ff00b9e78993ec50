//! `/v1/schedules`: schedules from the configuration and from the API. The path takes a schedule's name or
//! its id.

use super::definition::{ScheduleInput, read, session_of};
use super::view::{self, View};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::{get, post};
use axum::{Json, Router};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use tracing::Instrument;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::ingest::{announce, send_span};
use wakeful_engine::telemetry;
use wakeful_http::access::Caller;
use wakeful_http::body::{Body, Id, Reason, accepted, check_text, key_of, parse, parse_if_any};
use wakeful_http::etag::IfMatch;
use wakeful_http::openapi::{Operation, both, of, page_of};
use wakeful_http::problem::Problem;
use wakeful_http::sessions::limit as page_size;
use wakeful_store::audit::act;
use wakeful_store::schedule::Firing;
use wakeful_store::schedule::{FIRINGS_KEPT, Schedule};
use wakeful_store::wake::Woken;

pub(super) fn routes() -> Router<Arc<Ctx>> {
    Router::new()
        .route("/schedules", get(list).post(create))
        .route("/schedules/{id}", get(show).put(change).delete(remove))
        .route("/schedules/{id}/pause", post(pause))
        .route("/schedules/{id}/resume", post(resume))
        .route("/schedules/{id}/trigger", post(trigger))
        .route("/schedules/{id}/next", get(next))
        .route("/schedules/{id}/firings", get(firings))
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ListQuery {
    cursor: Option<String>,
    limit: Option<i64>,
}

async fn list(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Json<Value>, Problem> {
    let Query(query) = query?;
    check_text("cursor", query.cursor.as_deref(), 256)?;
    let limit = page_size(query.limit)?;
    let schedules = ctx.store.schedules_after(caller.space(), query.cursor.as_deref(), limit).await?;
    let next = schedules.last().filter(|_| schedules.len() as i64 == limit);
    let next = next.map(|last| last.definition.name.clone());
    let items: Vec<View> = schedules.into_iter().map(View::of).collect();
    Ok(Json(json!({"items": items, "next": next})))
}

async fn show(State(ctx): State<Arc<Ctx>>, caller: Caller, Id(id): Id) -> Result<Json<View>, Problem> {
    Ok(Json(View::of(ctx.store.schedule(caller.space(), &id).await?)))
}

/// 201, or 200 if the same schedule exists already. 409 if another schedule has the name.
async fn create(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    body: Body,
) -> Result<(StatusCode, Json<View>), Problem> {
    let asked: ScheduleInput = parse(&body?)?;
    let definition = read(asked, caller.space(), &ctx.config).map_err(Problem::bad_request)?;
    let (schedule, created) = ctx.store.create_schedule(caller.space(), &definition, None).await?;
    Ok((if created { StatusCode::CREATED } else { StatusCode::OK }, Json(View::of(schedule))))
}

/// Replaces a schedule's definition, except its name. A field that is left out gets the default of a new
/// schedule.
async fn change(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<View>, Problem> {
    let asked: ScheduleInput = parse(&body?)?;
    let name = ctx.store.schedule(caller.space(), &id).await?.definition.name;
    if !asked.name.is_empty() && asked.name != name {
        return Err(Problem::bad_request(
            "a schedule keeps its name: create another one, and delete this one",
        ));
    }
    let definition =
        read(ScheduleInput { name, ..asked }, caller.space(), &ctx.config).map_err(Problem::bad_request)?;
    let if_match = IfMatch::of(&headers);
    let is_it = |schedule: &Schedule| is_version(if_match.as_ref(), schedule);
    let changed = ctx.store.change_schedule(caller.space(), &definition, Some(&is_it), None).await?;
    Ok(Json(View::of(changed)))
}

async fn remove(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    headers: HeaderMap,
) -> Result<StatusCode, Problem> {
    let if_match = IfMatch::of(&headers);
    let is_it = |schedule: &Schedule| is_version(if_match.as_ref(), schedule);
    ctx.store.delete_schedule(caller.space(), &id, Some(&is_it)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Whether the schedule is the version that the request is for. Asked while its row is locked.
fn is_version(if_match: Option<&IfMatch>, schedule: &Schedule) -> bool {
    if_match.is_none_or(|if_match| if_match.is(&View::of(schedule.clone())))
}

async fn pause(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    body: Body,
) -> Result<Json<View>, Problem> {
    act::because(Reason::of(&body?)?.as_deref());
    Ok(Json(View::of(ctx.store.pause_schedule(caller.space(), &id).await?)))
}

async fn resume(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    body: Body,
) -> Result<Json<View>, Problem> {
    act::because(Reason::of(&body?)?.as_deref());
    Ok(Json(View::of(ctx.store.resume_schedule(caller.space(), &id, None).await?)))
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct TriggerBody {
    client_key: Option<String>,
}

/// Fires the schedule now: 202, or 200 with the first answer when its `client_key` was used before.
async fn trigger(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<Woken>), Problem> {
    let asked: TriggerBody = parse_if_any(&body?)?;
    let client_key = key_of("client_key", asked.client_key, &headers)?;
    let compose = |schedule: &Schedule| {
        session_of(&ctx.config, &ctx.plugins.tools, schedule).map_err(|cannot| cannot.to_string())
    };
    let conversation_id = ctx.store.schedule(caller.space(), &id).await?.definition.conversation_id;
    async {
        let trace_context = telemetry::trace_context();
        let woken = ctx
            .store
            .trigger_schedule(caller.space(), &id, client_key.as_deref(), None, trace_context, &compose)
            .await?;
        announce(&ctx, &woken);
        Ok(accepted(woken))
    }
    .instrument(send_span(&conversation_id))
    .await
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct NextQuery {
    count: Option<usize>,
}

/// The next ticks, counted from now. While the schedule's `state` is `paused`, none of them fires.
async fn next(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    query: Result<Query<NextQuery>, QueryRejection>,
) -> Result<Json<Value>, Problem> {
    let Query(query) = query?;
    let count = query.count.unwrap_or(5);
    if !(1..=view::NEXT_LIMIT).contains(&count) {
        return Err(Problem::bad_request(format!("`count` must be a number from 1 to {}", view::NEXT_LIMIT)));
    }
    let schedule = ctx.store.schedule(caller.space(), &id).await?;
    let now = ctx.store.now().await?;
    let items = view::next(&schedule, now, count);
    Ok(Json(json!({"items": items, "next": null, "state": View::of(schedule).state})))
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct FiringsQuery {
    cursor: Option<i64>,
    limit: Option<i64>,
}

/// The outcomes of past ticks, newest first.
async fn firings(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    query: Result<Query<FiringsQuery>, QueryRejection>,
) -> Result<Json<Value>, Problem> {
    let Query(query) = query?;
    // No more than that many are kept, so a larger page has all.
    let limit = page_size(query.limit.or(Some(FIRINGS_KEPT)))?.min(FIRINGS_KEPT);
    let items = ctx.store.firings(caller.space(), &id, query.cursor, limit).await?;
    let next = items.last().filter(|_| items.len() as i64 == limit).map(|last| last.firing_id);
    Ok(Json(json!({"items": items, "next": next})))
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get("/v1/schedules", "Schedules, by name").query::<ListQuery>().lists::<View>(),
        Operation::post("/v1/schedules", "Makes a schedule")
            .body::<ScheduleInput>()
            .answers(StatusCode::CREATED, "made", of::<View>())
            .answers(StatusCode::OK, "the same schedule exists already", of::<View>()),
        Operation::get("/v1/schedules/{id}", "A schedule; the id is its id or its name").shows::<View>(),
        Operation::put("/v1/schedules/{id}", "Replaces a schedule's definition, except its name")
            .body::<ScheduleInput>()
            .shows::<View>(),
        Operation::delete("/v1/schedules/{id}", "Deletes a schedule").answers_bytes(
            StatusCode::NO_CONTENT,
            "deleted",
            "",
        ),
        Operation::post("/v1/schedules/{id}/pause", "Pauses a schedule")
            .body_if_any::<Reason>()
            .shows::<View>(),
        Operation::post("/v1/schedules/{id}/resume", "Goes on with a schedule")
            .body_if_any::<Reason>()
            .shows::<View>(),
        Operation::post("/v1/schedules/{id}/trigger", "Fires a schedule now")
            .body_if_any::<TriggerBody>()
            .answers(StatusCode::ACCEPTED, "fired", of::<Woken>())
            .answers(StatusCode::OK, "the first answer to this key", of::<Woken>()),
        Operation::get("/v1/schedules/{id}/next", "The next firings, soonest first")
            .query::<NextQuery>()
            .answers(
                StatusCode::OK,
                "the firings",
                both(page_of::<view::Next>(), wakeful_http::object! {"state": String}),
            ),
        Operation::get("/v1/schedules/{id}/firings", "Past firings, newest first")
            .query::<FiringsQuery>()
            .lists::<Firing>(),
    ]
}
