//! Mail providers that hand mail over by HTTP: Postmark, Mailgun, and Amazon SES by SNS.
//!
//! Each request proves where it comes from before anything that it brought is parsed. Then it is translated: into a mail
//! as it arrived, or into bounces of mail that we sent.

mod bounced;
mod certificate;
mod form;
mod mailgun;
mod postmark;
mod rebuild;
mod ses;
mod sns;

use super::incoming::{self, Arrived, Taken};
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Json, Router};
use bounced::Bounce;
use certificate::Certificates;
use serde_json::{Value, json};
use std::sync::Arc;
use tracing::info;
use wakeful_config::email_providers::EmailProviders;
use wakeful_engine::ctx::Ctx;
use wakeful_http::problem::Problem;

/// A mail of 40 MB, in base64.
const MAIL_LIMIT: usize = 55_000_000;

/// A notification of SNS has at most 256 KB, written as a JSON text within JSON.
const SNS_LIMIT: usize = 2 << 20;

/// What the doors of one process share.
struct Doors {
    providers: EmailProviders,
    certificates: Certificates,
}

/// What a provider says, once it is sure who says it.
#[derive(Debug)]
enum Notice {
    Mail(Arrived),
    Bounced(Vec<Bounce>),
    /// It is of no concern to any session.
    Nothing {
        reason: String,
    },
}

/// `/email/postmark`, `/email/mailgun`, `/email/mailgun/mime` and `/email/ses`.
pub(super) fn webhooks(ctx: &Arc<Ctx>) -> Router<Arc<Ctx>> {
    let providers = ctx.config.email.providers.clone();
    let sns_url = providers.ses.as_ref().and_then(|ses| ses.sns_url.clone());
    let doors = Arc::new(Doors { providers, certificates: Certificates::new(sns_url) });
    Router::new()
        .route("/email/postmark", post(postmark::receive))
        .route("/email/mailgun", post(mailgun::receive))
        // Mailgun sends the mail as it is to addresses that end in "mime" only.
        .route("/email/mailgun/mime", post(mailgun::receive))
        .route("/email/ses", post(ses::receive))
        .layer(axum::Extension(doors))
}

/// 404 that says how to change it.
fn not_set_up(provider: &str, keys: &str) -> Problem {
    Problem::new(StatusCode::NOT_FOUND, format!("{provider} is not set up here: set {keys}"))
}

/// Who sent it is not proved.
fn unproved(detail: impl Into<String>) -> Problem {
    Problem::new(StatusCode::UNAUTHORIZED, detail)
}

/// What is proved, and not let in.
fn forbidden(detail: impl Into<String>) -> Problem {
    Problem::new(StatusCode::FORBIDDEN, detail)
}

/// Sees to it that what was said is durable, and answers 200.
///
/// Providers try again what is answered otherwise. `give_up` is the status at which this one stops, for what would be
/// refused the next time as well.
async fn answer(ctx: &Ctx, notice: Notice, give_up: StatusCode) -> Result<Json<Value>, Problem> {
    let said = match notice {
        Notice::Mail(arrived) => mail(ctx, arrived).await,
        Notice::Bounced(bounces) => bounced(ctx, &bounces).await,
        Notice::Nothing { reason } => {
            info!(reason, "A webhook told of nothing for a session");
            Ok(json!({ "ignored": reason }))
        }
    };
    said.map(Json).map_err(|problem| {
        let status = problem.status();
        let for_good = matches!(
            status,
            StatusCode::BAD_REQUEST
                | StatusCode::NOT_FOUND
                | StatusCode::GONE
                | StatusCode::PAYLOAD_TOO_LARGE
                | StatusCode::UNPROCESSABLE_ENTITY
        );
        if for_good { problem.under(give_up) } else { problem }
    })
}

async fn mail(ctx: &Ctx, arrived: Arrived) -> Result<Value, Problem> {
    let (mut sessions, mut dropped, mut duplicate) = (Vec::new(), Vec::new(), true);
    for taken in incoming::take(ctx, arrived).await? {
        match taken {
            Taken::Woke(woken) => {
                duplicate &= woken.duplicate;
                sessions.push(woken);
            }
            Taken::Dropped { reason } => {
                info!(reason, "A mail was kept from the agents");
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
