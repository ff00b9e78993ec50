//! Batches: make, preview, list, pause, resume, cancel. See [`wakeful_store::batch`].

pub mod resolve;

use super::sessions::{Answer, limit, next_page, page};
use crate::access::Caller;
use crate::body::{Body, Id, REASON_BYTES, Reason, check_cursor, check_text, check_word, key_of, parse};
use crate::openapi::{Operation, either, of};
use crate::problem::Problem;
use crate::search::{Refused, Search};
use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use std::ops::RangeInclusive;
use std::sync::Arc;
use wakeful_engine::ctx::Ctx;
use wakeful_store::audit::act;
use wakeful_store::batch::{Batch, Chosen, NewBatch, Steer, Verb};
use wakeful_store::batch::{EffectsPreview, Member, OUTCOMES, Preview, RESULTS, STATUSES};
use wakeful_store::fork::Model;
use wakeful_store::session::SessionFilter;
use wakeful_store::space::{Scope, within};

/// Members a second, if nothing else is said.
pub const RATE: f64 = 20.0;
/// The lowest and the highest rate.
const RATES: RangeInclusive<f64> = 0.001..=1000.0;
/// The most members that are tried dry.
const PROVE_LIMIT: i32 = 1000;
/// The most stages of a canary.
const STAGES: usize = 10;

/// The body of `POST /v1/batches`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "NewBatch")]
pub struct Input {
    pub verb: Verb,
    pub filter: Option<Search>,
    pub session_ids: Option<Vec<String>>,
    pub reason: Option<String>,
    #[serde(default)]
    pub dry_run: bool,
    pub rate: Option<f64>,
    pub prove: Option<i32>,
    pub model: Option<String>,
    pub canary: Option<Vec<i32>>,
    pub stop_share: Option<f64>,
    pub client_key: Option<String>,
}

impl Input {
    /// Checks what the command line and the API check alike, and makes the batch of it. `filter`: `self.filter` for the store, or
    /// all that the caller reaches. `model`: the model that `self.model` names, if the program knows it.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn batch(
        &self,
        space_id: Option<String>,
        filter: SessionFilter,
        model: Option<Model>,
    ) -> Result<NewBatch, Refused> {
        let wrong = |said: &str| Err(Refused::Wrong(said.to_owned()));
        let chosen = match (&self.filter, &self.session_ids) {
            (Some(search), None) if search.is_empty() => {
                return wrong("an empty filter would take every session: say which, such as status=failed");
            }
            (Some(search), None) if search.cursor.is_some() || search.limit.is_some() => {
                return wrong("a batch takes all that its filter finds: it has no `cursor` and no `limit`");
            }
            (Some(_), None) => Chosen::Filter(Box::new(filter)),
            (None, Some(ids)) if !ids.is_empty() => {
                for id in ids {
                    check_text("session id", Some(id), 256)
                        .map_err(|problem| Refused::Wrong(problem.to_string()))?;
                }
                Chosen::Sessions { ids: ids.clone(), within: Box::new(filter) }
            }
            (_, _) => return wrong("one of a filter and sessions' ids is needed"),
        };
        if self.verb == Verb::Resolve {
            return wrong("a resolve takes effects, and not sessions");
        }
        let is_one = self.session_ids.as_ref().is_some_and(|ids| ids.len() == 1);
        check_reason(self.reason.as_deref(), self.client_key.as_deref(), is_one || self.dry_run, "session")?;
        let rate = self.rate.unwrap_or(RATE);
        if !RATES.contains(&rate) {
            return wrong("`rate` is members a second: from 0.001 to 1000");
        }
        let prove = self.prove.unwrap_or(0);
        if !(0..=PROVE_LIMIT).contains(&prove) {
            return wrong("`prove` is how many sessions are tried dry: at most 1000");
        }
        let canary = self.canary.clone().unwrap_or_default();
        if canary.len() > STAGES || canary.iter().any(|size| *size < 1) {
            return wrong("`canary` has the sizes of up to 10 stages, each 1 or more, such as 1,10,100");
        }
        if self.stop_share.is_some_and(|share| !(0.0..=1.0).contains(&share)) {
            return wrong("`stop_share` is from 0 to 1: 0.2 stops when more than a fifth fails again");
        }
        let only_retry = prove > 0 || self.model.is_some() || !canary.is_empty() || self.stop_share.is_some();
        if only_retry && self.verb != Verb::Retry {
            return wrong("`prove`, `model`, `canary` and `stop_share` are for a retry");
        }
        if self.model.is_some() && prove == 0 {
            return wrong("`model` is the one that is asked by dry tries: it needs `prove`");
        }
        Ok(NewBatch {
            space_id,
            verb: self.verb,
            chosen,
            filter: self.shown(),
            decision: None,
            reason: self.reason.clone(),
            rate,
            prove,
            model,
            canary,
            stop_share: self.stop_share,
            client_key: self.client_key.clone(),
        })
    }

    /// What was asked for, as it is shown: long lists of ids by their number.
    fn shown(&self) -> Value {
        match (&self.filter, &self.session_ids) {
            (Some(search), _) => json!(search),
            (None, Some(ids)) if ids.len() <= 100 => json!({"session_ids": ids}),
            (None, ids) => json!({"session_ids": ids.as_ref().map_or(0, Vec::len)}),
        }
    }
}

/// Checks the reason and the key of a batch. `may_lack`: it needs no reason. `what` are its members.
fn check_reason(
    reason: Option<&str>,
    client_key: Option<&str>,
    may_lack: bool,
    what: &str,
) -> Result<(), Refused> {
    if reason.is_none() && !may_lack {
        let said = format!("a reason is needed for more than one {what}: the journal and the audit keep it");
        return Err(Refused::Wrong(said));
    }
    check_text("reason", reason, REASON_BYTES)
        .and(check_text("client_key", client_key, 256))
        .map_err(|problem| Refused::Wrong(problem.to_string()))
}

/// The part of a body that says which of the two it is.
#[derive(Deserialize)]
struct Kind {
    verb: Option<Value>,
}

/// The body of `POST /v1/batches`, for its document.
#[derive(JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "NewBatchOfAnyKind")]
#[expect(dead_code, reason = "only its schema is used")]
enum AnyInput {
    Sessions(Box<Input>),
    Effects(Box<resolve::Input>),
}

/// Makes a batch: 201, or 200 with the first answer. With `dry_run`, says what it would do: 200.
pub(super) async fn create(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<Value>), Problem> {
    let body = body?;
    let kind: Kind = parse(&body)?;
    if kind.verb.is_some_and(|verb| verb == Verb::Resolve.as_str()) {
        let mut input: resolve::Input = parse(&body)?;
        input.client_key = key_of("client_key", input.client_key, &headers)?;
        return resolve::create(&ctx, &caller, input).await;
    }
    let mut input: Input = parse(&body)?;
    input.client_key = key_of("client_key", input.client_key, &headers)?;
    let search = input.filter.clone().unwrap_or(Search { all: true, ..Search::default() });
    let filter = search.filter_for(&ctx.store, &caller).await?;
    let model = match &input.model {
        Some(model) => Some(crate::fork::known_model(&ctx, model.clone())?),
        None => None,
    };
    if let (Some(model), false) = (&input.model, caller.everywhere) {
        crate::fork::has_model(&ctx, caller.space(), model)?;
    }
    // The batch belongs to the space whose sessions it takes, so that the people who work there see it.
    let space = filter.space_id.clone().unwrap_or_else(|| caller.space().to_owned());
    let scope = Scope::of(&space);
    let new = input.batch(Some(space), filter, model)?;
    if input.dry_run {
        let preview = within(scope, ctx.store.preview_batch(&new)).await?;
        act::only_looks();
        return Ok((StatusCode::OK, Json(json!(preview))));
    }
    let (batch, is_duplicate) = within(scope, ctx.store.create_batch(&new)).await?;
    let status = if is_duplicate { StatusCode::OK } else { StatusCode::CREATED };
    Ok((status, Json(json!(batch))))
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ListQuery {
    #[schemars(extend("enum" = STATUSES))]
    status: Option<String>,
    cursor: Option<String>,
    limit: Option<i64>,
}

/// Batches, newest first.
pub(super) async fn list(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Answer {
    let Query(query) = query?;
    check_word("status", query.status.as_deref(), &STATUSES)?;
    check_cursor(query.cursor.as_deref(), "batch")?;
    let limit = limit(query.limit)?;
    let items = ctx
        .store
        .batches(Some(caller.space()), query.status.as_deref(), query.cursor.as_deref(), limit)
        .await?;
    let next = next_page(&items, limit, |last| json!(last.batch_id));
    page(&items, next)
}

/// One batch.
pub(super) async fn show(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
) -> Result<Json<Batch>, Problem> {
    Ok(Json(ctx.store.batch(Some(caller.space()), &id).await?))
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct MembersQuery {
    #[schemars(extend("enum" = OUTCOMES))]
    outcome: Option<String>,
    #[schemars(extend("enum" = RESULTS))]
    result: Option<String>,
    cursor: Option<i32>,
    limit: Option<i64>,
}

/// A batch's members, in their order.
pub(super) async fn members(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    Id(id): Id,
    query: Result<Query<MembersQuery>, QueryRejection>,
) -> Answer {
    let Query(query) = query?;
    check_word("outcome", query.outcome.as_deref(), &OUTCOMES)?;
    check_word("result", query.result.as_deref(), &RESULTS)?;
    ctx.store.batch(Some(caller.space()), &id).await?;
    let limit = limit(query.limit)?;
    let (outcome, result) = (query.outcome.as_deref(), query.result.as_deref());
    let items =
        ctx.store.batch_members(Some(caller.space()), &id, outcome, result, query.cursor, limit).await?;
    let next = next_page(&items, limit, |last| json!(last.ordinal));
    page(&items, next)
}

type Steered = Result<(StatusCode, Json<Batch>), Problem>;

pub(super) async fn pause(State(ctx): State<Arc<Ctx>>, caller: Caller, Id(id): Id, body: Body) -> Steered {
    steer(&ctx, &caller, &id, &body?, Steer::Pause).await
}

pub(super) async fn resume(State(ctx): State<Arc<Ctx>>, caller: Caller, Id(id): Id, body: Body) -> Steered {
    steer(&ctx, &caller, &id, &body?, Steer::Resume).await
}

pub(super) async fn cancel(State(ctx): State<Arc<Ctx>>, caller: Caller, Id(id): Id, body: Body) -> Steered {
    steer(&ctx, &caller, &id, &body?, Steer::Cancel).await
}

async fn steer(ctx: &Ctx, caller: &Caller, id: &str, body: &[u8], steer: Steer) -> Steered {
    let reason = Reason::of(body)?;
    let batch = ctx.store.steer_batch(Some(caller.space()), id, steer, reason.as_deref()).await?;
    Ok((StatusCode::ACCEPTED, Json(batch)))
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::post("/v1/batches", "Makes a batch; with `dry_run`, says what it would do")
            .body::<AnyInput>()
            .answers(StatusCode::CREATED, "made", of::<Batch>())
            .answers(
                StatusCode::OK,
                "with `dry_run` what it would do, else the first answer to this key",
                either(either(of::<Preview>(), of::<EffectsPreview>()), of::<Batch>()),
            )
            .refuses(&[StatusCode::NOT_FOUND]),
        Operation::get("/v1/batches", "Batches, newest first").query::<ListQuery>().lists::<Batch>(),
        Operation::get("/v1/batches/{id}", "A batch").shows::<Batch>(),
        Operation::get("/v1/batches/{id}/members", "A batch's members, in their order")
            .query::<MembersQuery>()
            .lists::<Member>(),
        steering("/v1/batches/{id}/pause", "Pauses a batch"),
        steering("/v1/batches/{id}/resume", "Goes on with a batch"),
        steering("/v1/batches/{id}/cancel", "Ends a batch: members that were acted on stay as they are"),
    ]
}

fn steering(path: &'static str, summary: &'static str) -> Operation {
    Operation::post(path, summary).body_if_any::<Reason>().answers(
        StatusCode::ACCEPTED,
        "the batch",
        of::<Batch>(),
    )
}
