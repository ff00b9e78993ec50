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
use crate::Ctx;
use crate::api::Problem;
use crate::config::email_providers::EmailProviders;
use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use axum::routing::post;
use axum::{Json, Router};
use bounced::Bounce;
use bytes::{Bytes, BytesMut};
use certificate::Certificates;
use futures::StreamExt;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::info;

/// A mail of 40 MB, in base64.
const MAIL_LIMIT: usize = 55_000_000;

/// A notification of SNS has at most 256 KB, written as a JSON text within JSON.
const SNS_LIMIT: usize = 2 << 20;

/// A body that grows beyond this waits for a place.
const SMALL: usize = 1 << 20;

/// Large bodies that are held at a time: whoever sends them proves nothing before the last byte is here.
const LARGE_AT_ONCE: usize = 4;

/// How long a body may take to come, and how long it waits for a place.
const BODY: Duration = Duration::from_secs(120);

/// What the doors of one process share.
struct Doors {
    providers: EmailProviders,
    large: Arc<Semaphore>,
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
    let large = Arc::new(Semaphore::new(LARGE_AT_ONCE));
    let doors = Arc::new(Doors { providers, large, certificates: Certificates::new(sns_url) });
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

/// A body, and its place among the large ones while it is held.
#[derive(Debug)]
struct Held {
    bytes: Bytes,
    _place: Option<OwnedSemaphorePermit>,
}

/// Takes the whole body, of at most `limit` bytes.
///
/// # Errors
/// 413 for a larger one, as soon as that is known; 408 for a slow one; 503 when there are too many large ones.
async fn hold(doors: &Doors, headers: &HeaderMap, body: Body, limit: usize) -> Result<Held, Problem> {
    let too_large =
        || Problem::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body is larger than {limit} bytes"));
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    if announced.is_some_and(|length: u64| length > limit as u64) {
        return Err(too_large());
    }
    let read = async {
        let mut chunks = body.into_data_stream();
        let mut bytes = BytesMut::new();
        let mut place = None;
        while let Some(chunk) = chunks.next().await {
            let chunk =
                chunk.map_err(|error| Problem::bad_request(format!("the body broke off: {error}")))?;
            if bytes.len() + chunk.len() > limit {
                return Err(too_large());
            }
            bytes.extend_from_slice(&chunk);
            if bytes.len() > SMALL && place.is_none() {
                // The semaphore is never closed.
                place = Arc::clone(&doors.large).acquire_owned().await.ok();
            }
        }
        Ok(Held { bytes: bytes.freeze(), _place: place })
    };
    match tokio::time::timeout(BODY, read).await {
        Ok(held) => held,
        Err(_) if doors.large.available_permits() == 0 => {
            Err(Problem::unavailable("too many large mails come in at once; try again later", 5))
        }
        Err(_) => Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "the body did not come in time")),
    }
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
