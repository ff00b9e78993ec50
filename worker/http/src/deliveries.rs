//! Outgoing messages: list, show and resend.

use super::sessions::{Answer, limit, next_page, page};
use crate::access::Caller;
use crate::body::{Body, Id, REASON_BYTES, check_cursor, check_text, parse_if_any};
use crate::openapi::Operation;
use crate::openapi::of;
use crate::problem::Problem;
use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;
use std::sync::Arc;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::telemetry;
use wakeful_store::outbox::{Delivery, DeliveryFilter, STATUSES, WAITING, statuses};
use wakeful_store::resend::{Resend, Resent};

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    /// A status, or `waiting` for deliveries that are still to be sent.
    #[schemars(extend("enum" = [&[WAITING], STATUSES.as_slice()].concat()))]
    status: Option<String>,
    session_id: Option<String>,
    conversation_id: Option<String>,
    channel: Option<String>,
    /// Also those of replays and imports.
    #[serde(default)]
    all: bool,
    cursor: Option<String>,
    limit: Option<i64>,
}

/// Deliveries, newest first, without their content.
pub(super) async fn list(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Answer {
    let Query(query) = query?;
    check_text("session_id", query.session_id.as_deref(), 256)?;
    check_text("channel", query.channel.as_deref(), 256)?;
    check_cursor(query.cursor.as_deref(), "dlv")?;
    let limit = limit(query.limit)?;
    let filter = DeliveryFilter {
        space_id: Some(caller.space().to_owned()),
        only_live: !query.all && query.session_id.is_none() && query.conversation_id.is_none(),
        session_id: query.session_id,
        conversation_id: query.conversation_id.map(|id| caller.conversation(&id)).transpose()?,
        channel: query.channel,
        statuses: query.status.as_deref().map(statuses).transpose().map_err(Problem::bad_request)?,
        before: query.cursor,
        limit,
        ..DeliveryFilter::default()
    };
    let items = ctx.store.outbox(&filter).await?;
    let next = next_page(&items, limit, |last| json!(last.delivery_id));
    page(&items, next)
}

/// One delivery with its content.
pub(super) async fn show(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
) -> Result<Json<Delivery>, Problem> {
    Ok(Json(ctx.store.delivery(Some(caller.space()), &id).await?))
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ResendInput {
    reason: Option<String>,
    by: Option<String>,
}

/// Resends a delivery that was not sent: 202, or 200 if an earlier resend is still in progress.
pub(super) async fn resend(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    body: Body,
) -> Result<(StatusCode, Json<Resent>), Problem> {
    let asked: ResendInput = parse_if_any(&body?)?;
    check_text("reason", asked.reason.as_deref(), REASON_BYTES)?;
    check_text("by", asked.by.as_deref(), 256)?;
    let asked = Resend { by: asked.by, reason: asked.reason, trace_context: telemetry::trace_context() };
    let resent = ctx.store.resend(Some(caller.space()), &id, &asked).await?;
    ctx.bus.notifier.job(wakeful_store::queue::Kind::Deliver);
    ctx.bus.notifier.session(&resent.session_id);
    let status = if resent.duplicate { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((status, Json(resent)))
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get("/v1/deliveries", "Outgoing messages, newest first")
            .query::<ListQuery>()
            .lists::<Delivery>(),
        Operation::get("/v1/deliveries/{id}", "An outgoing message with its content").shows::<Delivery>(),
        Operation::post(
            "/v1/deliveries/{id}/resend",
            "Sends a failed or expired message again, under its id",
        )
        .body_if_any::<ResendInput>()
        .answers(StatusCode::ACCEPTED, "queued", of::<Resent>())
        .answers(StatusCode::OK, "an earlier resend has not ended yet", of::<Resent>()),
    ]
}
