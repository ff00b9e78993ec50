//! Pauses: what operators switch off for a while. See [`wakeful_workflow::pause`].

use crate::access::Caller;
use crate::body::{REASON_BYTES, check_text, parse};
use crate::openapi::Operation;
use crate::openapi::of;
use crate::problem::Problem;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use wakeful_engine::ctx::Ctx;
use wakeful_store::pause::Pause;
use wakeful_store::space::{Scope, within};
use wakeful_workflow::pause::{Kind, LASTS_S, Subject};

/// The fastest rate, in sessions a second.
const FASTEST: f64 = 1000.0;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "NewPause")]
struct BeginInput {
    kind: String,
    name: Option<String>,
    reason: String,
    for_s: Option<u64>,
    rate: Option<f64>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "PauseEnd")]
struct EndInput {
    #[schemars(extend("enum" = Kind::ALL.map(Kind::as_str)))]
    kind: String,
    name: Option<String>,
    rate: Option<f64>,
}

/// Every pause. Only tokens of the whole installation may ask, so it counts what waits in all spaces.
pub(super) async fn list(State(ctx): State<Arc<Ctx>>) -> Result<Json<Value>, Problem> {
    Ok(Json(json!({"items": within(Scope::All, ctx.store.pauses()).await?})))
}

/// Pauses something, or changes its pause: 201.
    #[schemars(extend("enum" = Kind::ALL.map(Kind::as_str)))]
pub(super) async fn begin(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, Json<Pause>), Problem> {
    let asked: BeginInput = parse(&body?)?;
    let subject = Subject::named(kind(&asked.kind)?, asked.name.as_deref(), caller.space())
        .map_err(Problem::bad_request)?;
    if asked.reason.trim().is_empty() {
        return Err(Problem::bad_request("`reason` says why, for those who wait"));
    }
    check_text("reason", Some(&asked.reason), REASON_BYTES)?;
    if asked.for_s.is_some_and(|seconds| !LASTS_S.contains(&seconds)) {
        return Err(Problem::bad_request(format!("`for_s` is from 1 to {}", LASTS_S.end())));
    }
    let (lasts, rate) = (asked.for_s.map(Duration::from_secs), rate(asked.rate)?);
    let pause = within(Scope::All, ctx.store.pause(&subject, &asked.reason, lasts, rate)).await?;
    Ok((StatusCode::CREATED, Json(pause)))
}

/// Ends a pause: 202. What waits goes on at the rate.
pub(super) async fn end(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, Json<Value>), Problem> {
    let asked: EndInput = parse(&body?)?;
    let subjects = Subject::shown(kind(&asked.kind)?, asked.name.as_deref(), caller.space())
        .map_err(Problem::bad_request)?;
    let subject = ctx.store.resume_first(&subjects, rate(asked.rate)?).await?;
    Ok((StatusCode::ACCEPTED, Json(json!({"kind": subject.kind.as_str(), "name": subject.name}))))
}

fn kind(word: &str) -> Result<Kind, Problem> {
    let kinds = || Kind::ALL.map(Kind::as_str).join(", ");
    Kind::parse(word).ok_or_else(|| Problem::bad_request(format!("`kind` is one of {}", kinds())))
}

fn rate(rate: Option<f64>) -> Result<Option<f64>, Problem> {
    match rate {
        Some(rate) if !(rate > 0.0 && rate <= FASTEST) => {
            Err(Problem::bad_request(format!("`rate` is above 0 and at most {FASTEST} sessions a second")))
        }
        rate => Ok(rate),
    }
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get("/v1/pauses", "What is paused").answers(
            StatusCode::OK,
            "every pause",
            crate::object! {"items": Vec<Pause>},
        ),
        Operation::post("/v1/pauses", "Pauses something, or changes its pause").body::<BeginInput>().answers(
            StatusCode::CREATED,
            "paused",
            of::<Pause>(),
        ),
        Operation::post("/v1/pauses/end", "Ends a pause: what waits goes on")
            .body::<EndInput>()
            .answers(StatusCode::ACCEPTED, "ended", crate::object! {"kind": String, "name": String})
            .refuses(&[StatusCode::NOT_FOUND]),
    ]
}
