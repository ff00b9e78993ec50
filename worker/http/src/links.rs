//! Links by which a person acts once, without a login: the token in the body is what permits the act. See
//! [`wakeful_store::notify::link`].
//!
//! Looking at a link changes nothing, so a mail scanner that opens every link does no harm. The token stands in the body and not
//! in the path, so it is in no log of this API.

use crate::audit;
use crate::body::{check_text, message_text, parse};
use crate::openapi::{Operation, Proof};
use crate::problem::Problem;
use axum::Json;
use axum::body::Bytes;
use axum::extract::{FromRequest, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Deserialize;
use std::sync::Arc;
use wakeful_engine::ctx::Ctx;
use wakeful_store::notify::link::{Act, Choice, Link, Way};
use wakeful_store::queue::Kind;
use wakeful_store::space::{Scope, within};
use wakeful_workflow::resolve::Resolution;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Given {
    token: String,
    /// The answer to a question.
    answer: Option<String>,
    /// Of an uncertain effect: `happened`, `did_not_happen` or `let_model_decide`. Of a call that waits for approval: `approved` or
    /// `declined`.
    outcome: Option<String>,
    /// The result of a call that happened, as the tool would have returned it.
    result: Option<String>,
}

async fn given(request: Request) -> Result<Given, Problem> {
    let body = Bytes::from_request(request, &()).await?;
    let given: Given = parse(&body)?;
    check_text("token", Some(&given.token), 256)?;
    Ok(given)
}

/// What a link would do. Changes nothing.
pub(super) async fn look(State(ctx): State<Arc<Ctx>>, request: Request) -> Result<Json<Link>, Problem> {
    let given = given(request).await?;
    Ok(Json(within(Scope::All, ctx.store.link(&given.token, Way::Link)).await?))
}

/// Acts by a link.
pub(super) async fn act(State(ctx): State<Arc<Ctx>>, request: Request) -> Response {
    let mut act = audit::act_of(&request, None);
    let by = act.address.clone().unwrap_or_else(|| "somebody".to_owned());
    (act.actor_kind, act.actor, act.verb) = ("link", format!("a link, from {by}"), "link.use".to_owned());
    let answer = async {
        match used(&ctx, request, &by).await {
            Ok(link) => Json(link).into_response(),
            Err(problem) => problem.into_response(),
        }
    };
    audit::carry_out(&ctx, act, answer).await
}

async fn used(ctx: &Ctx, request: Request, by: &str) -> Result<Link, Problem> {
    let given = given(request).await?;
    let link = within(Scope::All, ctx.store.link(&given.token, Way::Link)).await?;
    let choice = choice(&link.act, given.answer, given.outcome, given.result)?;
    let scope = Scope::of(&link.space_id);
    let acted = within(scope, ctx.store.act_by_link(&given.token, Way::Link, &choice, by)).await?;
    ctx.bus.notifier.any_job();
    ctx.bus.notifier.job(Kind::Deliver);
    ctx.bus.notifier.session(&acted.session_id);
    Ok(acted)
}

fn choice(
    act: &Act,
    answer: Option<String>,
    outcome: Option<String>,
    result: Option<String>,
) -> Result<Choice, Problem> {
    Ok(match act {
        Act::Retry | Act::Resend { .. } => Choice::Go,
        Act::Answer { .. } => {
            let answer =
                answer.ok_or_else(|| Problem::bad_request("`answer` is needed: the answer's text"))?;
            Choice::Answer(message_text(answer)?)
        }
        Act::Approve { .. } => Choice::Resolution(match outcome.as_deref() {
            Some("approved") => Resolution::Approved,
            Some("declined") => Resolution::Declined,
            _ => return Err(Problem::bad_request("`outcome` is needed: approved or declined")),
        }),
        Act::Resolve { .. } => Choice::Resolution(match outcome.as_deref() {
            Some("happened") => {
                let result = result.filter(|result| !result.trim().is_empty());
                Resolution::Happened { result: result.map(message_text).transpose()?.unwrap_or_default() }
            }
            Some("did_not_happen") => Resolution::DidNotHappen,
            Some("let_model_decide") => Resolution::LetModelDecide,
            _ => {
                let detail = "`outcome` is needed: happened, did_not_happen or let_model_decide";
                return Err(Problem::bad_request(detail));
            }
        }),
    })
}

pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::post("/v1/links/look", "What a link of a notification would do")
            .proved_by(Proof::Open)
            .body::<Given>()
            .shows::<Link>()
            .refuses(&[StatusCode::BAD_REQUEST, StatusCode::NOT_FOUND, StatusCode::SERVICE_UNAVAILABLE]),
        Operation::post("/v1/links/use", "Acts by a link of a notification, once")
            .proved_by(Proof::Open)
            .body::<Given>()
            .shows::<Link>()
            .refuses(&[StatusCode::BAD_REQUEST, StatusCode::NOT_FOUND, StatusCode::SERVICE_UNAVAILABLE]),
    ]
}
