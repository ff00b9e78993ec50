//! Mail providers that post mail over HTTP: Postmark, Mailgun, and Amazon SES through SNS.
//!
//! Each request proves its origin before its content is parsed. Then it becomes a mail that arrived, or
//! bounces of mail that we sent.
#![doc = include_str!("README.md")]

mod bounced;
mod certificate;
mod form;
mod mailgun;
mod postmark;
mod rebuild;
mod ses;
mod sns;

use super::incoming::{self, Accepted, Arrived};
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Json, Router};
use bounced::Bounce;
use certificate::Certificates;
use serde_json::{Value, json};
use std::sync::Arc;
use tracing::info;
use wakeful_config::email_providers::{EmailProviders, topic_host};
use wakeful_engine::ctx::Ctx;
use wakeful_http::openapi::{Operation, Proof, of};
use wakeful_http::problem::Problem;

/// Room for a mail of 40 MB in base64.
const MAIL_LIMIT: usize = 55_000_000;

/// An SNS notification has at most 256 KB; inside JSON as an escaped text it is longer.
const SNS_LIMIT: usize = 2 << 20;

/// State shared by the endpoints of one process.
struct ProviderState {
    providers: EmailProviders,
    certificates: Certificates,
}

/// What a provider reports, after it proved its identity.
#[derive(Debug)]
enum Notice {
    Mail(Arrived),
    Bounced(Vec<Bounce>),
    /// Nothing that concerns a session.
    Irrelevant {
        reason: String,
    },
}

/// `/email/postmark`, `/email/mailgun`, `/email/mailgun/mime` and `/email/ses`.
pub(super) fn webhooks(ctx: &Arc<Ctx>) -> Router<Arc<Ctx>> {
    let providers = ctx.config.email.providers.clone();
    let sns_url = providers.ses.as_ref().and_then(|ses| ses.sns_url.clone());
    // With `sns_url` its host stands in for Amazon's.
    let hosts: Vec<String> = providers
        .ses
        .iter()
        .flat_map(|ses| &ses.topic_arns)
        .filter_map(|arn| topic_host(arn))
        .map(|host| format!("https://{host}"))
        .chain(sns_url.iter().map(ToString::to_string))
        .collect();
    let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
    let state = Arc::new(ProviderState { providers, certificates: Certificates::new(sns_url, &hosts) });
    Router::new()
        .route("/email/postmark", post(postmark::receive))
        .route("/email/mailgun", post(mailgun::receive))
        // Mailgun posts the raw mail only to addresses that end in "mime".
        .route("/email/mailgun/mime", post(mailgun::receive))
        .route("/email/ses", post(ses::receive))
        .layer(axum::Extension(state))
}

/// 404 that names the keys to set.
fn not_set_up(provider: &str, keys: &str) -> Problem {
    Problem::new(StatusCode::NOT_FOUND, format!("{provider} is not set up here: set {keys}"))
}

/// 401: the sender did not prove its identity.
fn unauthorized(detail: impl Into<String>) -> Problem {
    Problem::new(StatusCode::UNAUTHORIZED, detail)
}

/// 403: the sender proved its identity but is not allowed.
fn forbidden(detail: impl Into<String>) -> Problem {
    Problem::new(StatusCode::FORBIDDEN, detail)
}

/// Handles the notice, and answers 200 once it is committed.
///
/// Providers retry after any other answer. `give_up` is the status at which this provider stops retrying; it
/// answers a notice that would be refused every time.
async fn answer(ctx: &Ctx, notice: Notice, give_up: StatusCode) -> Result<Json<Value>, Problem> {
    let answered = match notice {
        Notice::Mail(arrived) => mail(ctx, arrived).await,
        Notice::Bounced(bounces) => bounced(ctx, &bounces).await,
        Notice::Irrelevant { reason } => {
            info!(reason, "A webhook concerned no session");
            Ok(json!({ "ignored": reason }))
        }
    };
    answered.map(Json).map_err(|problem| {
        let status = problem.status();
        let for_good = matches!(
            status,
            StatusCode::BAD_REQUEST
                | StatusCode::NOT_FOUND
                | StatusCode::GONE
                | StatusCode::PAYLOAD_TOO_LARGE
                | StatusCode::UNPROCESSABLE_ENTITY
        );
        if for_good { problem.with_status(give_up) } else { problem }
    })
}

async fn mail(ctx: &Ctx, arrived: Arrived) -> Result<Value, Problem> {
    let (mut sessions, mut dropped, mut duplicate) = (Vec::new(), Vec::new(), true);
    for accepted in incoming::accept(ctx, arrived).await? {
        match accepted {
            Accepted::Woke(woken) => {
                duplicate &= woken.duplicate;
                sessions.push(woken);
            }
            Accepted::Dropped { reason } => {
                info!(reason, "Dropped a mail: no agent sees it");
                dropped.push(reason);
            }
        }
    }
    let duplicate = duplicate && !sessions.is_empty();
    Ok(json!({ "sessions": sessions, "dropped": dropped, "duplicate": duplicate }))
}

async fn bounced(ctx: &Ctx, bounces: &[Bounce]) -> Result<Value, Problem> {
    for bounce in bounces {
        bounced::note(ctx, bounce).await?;
    }
    Ok(json!({ "bounced": bounces.len() }))
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        provider(
            "/v1/triggers/email/postmark",
            "Postmark's webhooks: mail, bounces, complaints",
            &["application/json"],
        )
        .proved_by(Proof::Own(&["postmark"])),
        provider("/v1/triggers/email/mailgun", "Mailgun's webhooks; the body has its signature", FORMS),
        provider("/v1/triggers/email/mailgun/mime", "Mailgun's raw mails; the body has its signature", FORMS),
        provider(
            "/v1/triggers/email/ses",
            "Amazon SES by SNS; the body has its signature",
            &["text/plain", "application/json"],
        ),
    ]
}

const FORMS: &[&str] = &["multipart/form-data", "application/x-www-form-urlencoded", "application/json"];

fn provider(path: &'static str, summary: &'static str, media_types: &'static [&'static str]) -> Operation {
    Operation::post(path, summary)
        .bytes(media_types)
        .proved_by(Proof::Open)
        .answers(StatusCode::OK, "taken", of::<Value>())
        .refuses(&[
            StatusCode::BAD_REQUEST,
            StatusCode::UNAUTHORIZED,
            StatusCode::FORBIDDEN,
            StatusCode::NOT_FOUND,
            StatusCode::NOT_ACCEPTABLE,
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            StatusCode::SERVICE_UNAVAILABLE,
        ])
}
