//! `POST /v1/triggers/email/raw`: a whole mail as the body of a request.

use super::body::BodyGate;
use super::incoming::{self, Accepted, Arrived};
use crate::signed::{is_fresh, standard_webhooks};
use axum::Json;
use axum::body::Body;
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::{DateTime, Utc};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use wakeful_engine::ctx::Ctx;
use wakeful_http::access::Caller;
use wakeful_http::guard::guard;
use wakeful_http::openapi::{Operation, Shape};
use wakeful_http::problem::Problem;
use wakeful_store::mail::{MailPlace, MailView};
use wakeful_workflow::mail::scan::MAIL_BYTES;

/// Maximum number of recipients of one mail.
const RECIPIENTS: usize = 100;

/// Two gates, so that a request that only claims to be signed cannot block a caller with the token.
static GUARDED: BodyGate = BodyGate::guarded();
static SIGNED: BodyGate = BodyGate::new();

const SIGNATURE: &str = "webhook-signature";

/// Lets a request pass if it has the bearer token, or a signature, which the handler checks with the body.
/// Checks everything about the signature that does not need the body.
pub(super) async fn door(ctx: State<Arc<Ctx>>, request: Request, next: Next) -> Response {
    if request.headers().contains_key(SIGNATURE) {
        let refused = if ctx.config.email.incoming.raw_secrets.is_empty() {
            Some(
                "signatures are not set up here: set email.raw_secrets, or send the token instead of a signature"
                    .to_owned(),
            )
        } else {
            is_fresh(request.headers(), Utc::now().timestamp()).err().map(|error| error.to_string())
        };
        return match refused {
            None => next.run(request).await,
            Some(detail) => Problem::new(StatusCode::UNAUTHORIZED, detail).into_response(),
        };
    }
    guard(ctx, request, next).await
}

/// Accepts a mail: 202 with the sessions that it woke, 200 if it woke none (a duplicate, or a dropped mail).
pub(super) async fn post(
    State(ctx): State<Arc<Ctx>>,
    headers: HeaderMap,
    Query(query): Query<Vec<(String, String)>>,
    body: Body,
) -> Result<Response, Problem> {
    let (mail_from, recipients) = envelope(&headers, query)?;
    let is_signed = headers.contains_key(SIGNATURE);
    // The signature covers only the body. Somebody who saw a signed request could otherwise send its mail to
    // another mailbox here.
    if is_signed && (mail_from.is_some() || !recipients.is_empty()) {
        let detail = "`rcpt` and `mail_from` are not signed: they need the token; leave them out, or send the token instead of a signature";
        return Err(Problem::bad_request(detail));
    }
    let media_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    if !media_type.split(';').next().unwrap_or("").trim().eq_ignore_ascii_case("message/rfc822") {
        let detail = "the body is a mail: send it as `Content-Type: message/rfc822`";
        return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, detail));
    }
    let gate = if is_signed { &SIGNED } else { &GUARDED };
    let received = gate.receive(&headers, body, MAIL_BYTES).await?;
    let raw = received.bytes.clone();
    if is_signed {
        let secrets = &ctx.config.email.incoming.raw_secrets;
        standard_webhooks(secrets, &headers, &raw, Utc::now().timestamp())
            .map_err(|error| Problem::new(StatusCode::UNAUTHORIZED, error.to_string()))?;
    }
    let arrived = Arrived { raw, mail_from, recipients, dmarc: None, unwanted: None };
    Ok(answer(incoming::accept(&ctx, arrived).await?))
}

/// The envelope: `mail_from`, and one `rcpt` per recipient, in the query or as headers.
fn envelope(
    headers: &HeaderMap,
    query: Vec<(String, String)>,
) -> Result<(Option<String>, Vec<String>), Problem> {
    let (mut mail_from, mut recipients) = (None, Vec::new());
    let text = |value: &axum::http::HeaderValue| {
        let text = std::str::from_utf8(value.as_bytes());
        text.map(str::to_owned).map_err(|_| Problem::bad_request("the envelope is not UTF-8"))
    };
    for name in ["mail_from", "mail-from"] {
        if let Some(value) = headers.get(name) {
            mail_from = Some(text(value)?);
        }
    }
    for value in headers.get_all("rcpt") {
        recipients.push(text(value)?);
    }
    for (name, value) in query {
        match name.as_str() {
            "mail_from" => mail_from = Some(value),
            "rcpt" => recipients.push(value),
            _ => {
                let detail = format!("the query takes mail_from and rcpt, not {name:?}");
                return Err(Problem::bad_request(detail));
            }
        }
    }
    let plain = |address: String| address.trim().trim_start_matches('<').trim_end_matches('>').to_owned();
    let (mail_from, recipients): (_, Vec<_>) =
        (mail_from.map(plain), recipients.into_iter().map(plain).collect());
    let mut all = mail_from.iter().chain(&recipients);
    if recipients.len() > RECIPIENTS || all.any(|one| one.len() > 320 || one.chars().any(char::is_control)) {
        let detail = format!("an envelope has at most {RECIPIENTS} recipients, each an address");
        return Err(Problem::bad_request(detail));
    }
    Ok((mail_from, recipients))
}

fn answer(accepted: Vec<Accepted>) -> Response {
    let mut woke = false;
    let mut first = None;
    let mut duplicate = false;
    let items: Vec<Value> = accepted
        .iter()
        .map(|one| match one {
            Accepted::Woke(woken) => {
                woke |= !woken.duplicate;
                duplicate |= woken.duplicate;
                first.get_or_insert(woken.session_id.clone());
                json!({
                    "session_id": woken.session_id,
                    "run_id": woken.run_id,
                    "outcome": woken.outcome,
                    "duplicate": woken.duplicate,
                })
            }
            Accepted::Dropped { reason } => json!({ "dropped": reason }),
        })
        .collect();
    let status = if woke { StatusCode::ACCEPTED } else { StatusCode::OK };
    let mut body = json!({ "items": items });
    if let Some(session_id) = first {
        body["session_id"] = session_id.into();
    }
    if duplicate && !woke {
        body["duplicate"] = true.into();
    }
    (status, Json(body)).into_response()
}

/// The filter of a list of mails.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Wanted {
    #[serde(default)]
    dropped: bool,
    cursor: Option<String>,
    #[serde(default = "usual")]
    limit: i64,
}

fn usual() -> i64 {
    50
}

/// `GET /v1/mails`: incoming mails, newest first, with the reason of each dropped one.
pub(super) async fn list(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    wanted: Result<Query<Wanted>, axum::extract::rejection::QueryRejection>,
) -> Result<Json<Value>, Problem> {
    let Query(wanted) = wanted?;
    if !(1..=500).contains(&wanted.limit) {
        return Err(Problem::bad_request("`limit` is from 1 to 500"));
    }
    let before = wanted.cursor.as_deref().map(place).transpose()?;
    let mails = ctx.store.mails(caller.space(), wanted.dropped, before.as_ref(), wanted.limit).await?;
    let next = mails.last().filter(|_| mails.len() as i64 == wanted.limit).map(cursor);
    Ok(Json(json!({ "items": mails, "next": next })))
}

/// The cursor of the mails before this one. Ids of mails have any characters, so it is encoded.
fn cursor(last: &MailView) -> String {
    let place = json!([last.received_at.timestamp_micros(), last.message_id, last.mailbox_id]);
    URL_SAFE_NO_PAD.encode(place.to_string())
}

fn place(cursor: &str) -> Result<MailPlace, Problem> {
    let read = || {
        let bytes = URL_SAFE_NO_PAD.decode(cursor).ok()?;
        let (at, message_id, mailbox_id): (i64, String, String) = serde_json::from_slice(&bytes).ok()?;
        let is_text = !message_id.contains('\0') && !mailbox_id.contains('\0');
        let received_at = DateTime::from_timestamp_micros(at).filter(|_| is_text)?;
        Some(MailPlace { received_at, message_id, mailbox_id })
    };
    let said = "`cursor` does not belong to this list: give the `next` of the previous page";
    read().ok_or_else(|| Problem::bad_request(said))
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::post(
            "/v1/triggers/email/raw",
            "A mail, as message/rfc822; the query or headers have its envelope",
        )
        .text("rcpt", "query", "A recipient; several may be given.")
        .text("mail_from", "query", "The sender of the envelope.")
        .bytes(&["message/rfc822"])
        .answers(StatusCode::ACCEPTED, "it woke sessions", items())
        .answers(StatusCode::OK, "it woke none: a duplicate, or a dropped mail", items())
        .refuses(&[StatusCode::UNSUPPORTED_MEDIA_TYPE]),
        Operation::get("/v1/mails", "Incoming mails, newest first, with the reason for each dropped one")
            .query::<Wanted>()
            .lists::<MailView>(),
    ]
}

fn items() -> Shape {
    wakeful_http::object! {"items": Vec<BTreeMap<String, Value>>}
}
