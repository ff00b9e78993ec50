//! Failed runs in groups: list, show, mute, note. See [`wakeful_store::failure`].

use super::sessions::{Answer, limit, page};
use crate::access::Caller;
use crate::body::{Body, Id, NO_CURSOR, REASON_BYTES, check_text, check_word, parse, parse_if_any};
use crate::openapi::Operation;
use crate::openapi::{both, of};
use crate::problem::Problem;
use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use wakeful_engine::ctx::Ctx;
use wakeful_store::failure::{ErrorFilter, ErrorGroup};
use wakeful_store::space::{Scope, within};
use wakeful_workflow::failure::KINDS;

/// The longest time that a group is muted for: ten years. Without a time it is muted for good.
pub const LONGEST_S: u64 = 10 * 366 * 24 * 3600;

/// Which groups are listed by whether they are muted.
const MUTED: [&str; 3] = ["true", "false", "all"];

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    /// `false` is the default.
    #[schemars(extend("enum" = MUTED))]
    muted: Option<String>,
    text: Option<String>,
    #[schemars(extend("enum" = KINDS))]
    kind: Option<String>,
    #[serde(default, deserialize_with = "crate::times::usual")]
    #[schemars(with = "Option<DateTime<Utc>>")]
    since: Option<DateTime<Utc>>,
    space: Option<String>,
    cursor: Option<String>,
    limit: Option<i64>,
}

/// Groups of failed runs, the newest failure first.
pub(super) async fn list(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Answer {
    let Query(query) = query?;
    check_text("text", query.text.as_deref(), 256)?;
    check_word("kind", query.kind.as_deref(), &KINDS)?;
    let space = caller.asked_space(query.space.as_deref())?;
    check_word("muted", query.muted.as_deref(), &MUTED)?;
    let muted = match query.muted.as_deref() {
        Some("all") => None,
        muted => Some(muted == Some("true")),
    };
    let limit = limit(query.limit)?;
    let filter = ErrorFilter {
        space_id: Some(space.to_owned()),
        muted,
        text: query.text,
        kind: query.kind,
        since: query.since,
        before: query.cursor.as_deref().map(cursor).transpose()?,
        limit,
        ..ErrorFilter::default()
    };
    let items = within(Scope::of(space), ctx.store.error_groups(&filter)).await?;
    let next = items.last().filter(|_| items.len() as i64 == limit);
    let next = next.map(|last| format!("{}~{}", last.last_at.timestamp_micros(), last.fingerprint));
    page(&items, json!(next))
}

/// The place of the page before: the time in microseconds, and the fingerprint.
fn cursor(text: &str) -> Result<(DateTime<Utc>, String), Problem> {
    let parts = text.split_once('~').and_then(|(at, fingerprint)| {
        let at = DateTime::from_timestamp_micros(at.parse().ok()?)?;
        (fingerprint.len() <= 16).then(|| (at, fingerprint.to_owned()))
    });
    parts.ok_or_else(|| Problem::bad_request(NO_CURSOR))
}

/// One group, with how many of its sessions are still failed.
pub(super) async fn show(State(ctx): State<Arc<Ctx>>, caller: Caller, Id(id): Id) -> Answer {
    let group = ctx.store.error_group(Some(caller.space()), &id).await?;
    let failed_now = ctx.store.failed_now(Some(caller.space()), &id).await?;
    Ok(Json(detail(&group, failed_now)))
}

/// The result of `GET /v1/errors/{id}` and `wakeful errors show`.
pub fn detail(group: &ErrorGroup, failed_now: i64) -> Value {
    let mut body = json!(group);
    body["failed_now"] = json!(failed_now);
    body
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Mute {
    reason: Option<String>,
    for_s: Option<u64>,
}

/// Mutes a group, or ends that.
pub(super) async fn mute(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    body: Body,
) -> Result<Json<ErrorGroup>, Problem> {
    let given: Mute = parse_if_any(&body?)?;
    check_text("reason", given.reason.as_deref(), REASON_BYTES)?;
    if given.for_s.is_some_and(|seconds| seconds > LONGEST_S) {
        return Err(Problem::bad_request(
            "`for_s` is at most ten years; without it the group is muted for good",
        ));
    }
    let length = given.for_s.map(Duration::from_secs);
    ctx.store.mute_errors(Some(caller.space()), &id, length, given.reason.as_deref()).await?;
    Ok(Json(ctx.store.error_group(Some(caller.space()), &id).await?))
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Note {
    note: String,
}

/// Writes the group's note.
pub(super) async fn note(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    body: Body,
) -> Result<Json<ErrorGroup>, Problem> {
    let given: Note = parse(&body?)?;
    if !given.note.is_empty() {
        check_text("note", Some(&given.note), REASON_BYTES)?;
    }
    ctx.store.note_errors(Some(caller.space()), &id, &given.note).await?;
    Ok(Json(ctx.store.error_group(Some(caller.space()), &id).await?))
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get("/v1/errors", "Failed runs in groups, the newest last failure first")
            .query::<ListQuery>()
            .lists::<ErrorGroup>(),
        Operation::get("/v1/errors/{id}", "One group; the id is its fingerprint").answers(
            StatusCode::OK,
            "the group, and how many of its sessions are still failed",
            both(of::<ErrorGroup>(), crate::object! {"failed_now": i64}),
        ),
        Operation::post("/v1/errors/{id}/mute", "Leaves a group out of the list, or ends that")
            .body_if_any::<Mute>()
            .shows::<ErrorGroup>(),
        Operation::post("/v1/errors/{id}/note", "Writes the group's note")
            .body::<Note>()
            .shows::<ErrorGroup>(),
    ]
}
