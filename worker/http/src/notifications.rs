//! Notifications: list, show and send again.

use crate::access::Caller;
use crate::body::{Body, Id, Reason, check_cursor, check_text};
use crate::object;
use crate::openapi::{Operation, both, of as shape_of};
use crate::problem::Problem;
use crate::sessions::{Answer, limit, next_page, page};
use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use wakeful_engine::ctx::Ctx;
use wakeful_store::Error;
use wakeful_store::audit::act::because;
use wakeful_store::notify::outbox::{Notification, NotificationFilter, STATUSES, Told, statuses};
use wakeful_store::outbox::WAITING;
use wakeful_store::space::{Scope, within};

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    /// A status, or `waiting` for what is still to be sent.
    #[schemars(extend("enum" = [&[WAITING], STATUSES.as_slice()].concat()))]
    status: Option<String>,
    rule: Option<String>,
    cursor: Option<String>,
    limit: Option<i64>,
}

/// What the caller sees: the notifications of the space, and for a token of the installation those of several spaces too.
fn of(caller: &Caller) -> (Scope, NotificationFilter) {
    let scope = if caller.everywhere { Scope::All } else { Scope::of(caller.space()) };
    let filter = NotificationFilter {
        space_id: Some(caller.space().to_owned()),
        of_installation: caller.everywhere,
        limit: 1,
        ..NotificationFilter::default()
    };
    (scope, filter)
}

/// Notifications, newest first.
pub(super) async fn list(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Answer {
    let Query(query) = query?;
    check_text("rule", query.rule.as_deref(), 64)?;
    check_cursor(query.cursor.as_deref(), "ntf")?;
    let limit = limit(query.limit)?;
    let (scope, filter) = of(&caller);
    let filter = NotificationFilter {
        statuses: query.status.as_deref().map(statuses).transpose().map_err(Problem::bad_request)?,
        rule: query.rule,
        before: query.cursor,
        limit,
        ..filter
    };
    let items = within(scope, ctx.store.notifications(&filter)).await?;
    let next = next_page(&items, limit, |last| json!(last.notification_id));
    page(&items, next)
}

async fn one(ctx: &Ctx, caller: &Caller, id: &str) -> Result<Notification, Problem> {
    let (scope, filter) = of(caller);
    let filter = NotificationFilter { notification_id: Some(id.to_owned()), ..filter };
    let found = within(scope, ctx.store.notifications(&filter)).await?.pop();
    Ok(found.ok_or_else(|| Error::NotFound { what: "notification", id: id.to_owned() })?)
}

/// One notification with the transitions that it tells.
pub(super) async fn show(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
) -> Result<Json<Value>, Problem> {
    let found = one(&ctx, &caller, &id).await?;
    let told = within(of(&caller).0, ctx.store.told_by(&id)).await?;
    let mut shown = serde_json::to_value(&found).unwrap_or_default();
    shown["items"] = json!(told);
    Ok(Json(shown))
}

/// Sends again a notification that failed, or that may not have been sent.
pub(super) async fn resend(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    body: Body,
) -> Result<(StatusCode, Json<Notification>), Problem> {
    because(Reason::of(&body?)?.as_deref());
    let before = one(&ctx, &caller, &id).await?;
    if !within(of(&caller).0, ctx.store.resend_notification(&id)).await? {
        let detail = format!(
            "notification {id} is {}: only a failed or an uncertain one is sent again",
            before.status
        );
        return Err(Problem::new(StatusCode::CONFLICT, detail));
    }
    Ok((StatusCode::ACCEPTED, Json(one(&ctx, &caller, &id).await?)))
}

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get("/v1/notifications", "What people were told, newest first")
            .query::<ListQuery>()
            .lists::<Notification>(),
        Operation::get("/v1/notifications/{id}", "A notification with what it told").answers(
            StatusCode::OK,
            "as described",
            both(shape_of::<Notification>(), object!("items": Vec<Told>)),
        ),
        Operation::post("/v1/notifications/{id}/resend", "Sends a notification again that was not sent")
            .body_if_any::<Reason>()
            .answers(StatusCode::ACCEPTED, "queued", shape_of::<Notification>()),
    ]
}
