//! Postmark: inbound mail, and bounces of mail that we sent through it.
//!
//! Postmark signs nothing. It proves itself by the user and password in the webhook's address, sent as basic
//! auth.

use super::bounced::{Bounce, delivery_of, status_in};
use super::rebuild::{File, Parts, mailbox};
use super::{Arrived, MAIL_LIMIT, Notice, ProviderState, answer, not_set_up, unauthorized};
use crate::email::body::BodyGate;
use crate::email::bounce::is_delivery;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use secrecy::ExposeSecret;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use subtle::ConstantTimeEq;
use wakeful_config::email_providers::Postmark;
use wakeful_engine::ctx::Ctx;
use wakeful_http::problem::Problem;
use wakeful_workflow::mail::auth::Dmarc;

static GATE: BodyGate = BodyGate::new();

/// The domain of Postmark's own addresses, to which an operator's mailbox may forward.
const FORWARDED_TO: &str = "@inbound.postmarkapp.com";

/// `POST /v1/triggers/email/postmark`.
pub(super) async fn receive(
    State(ctx): State<Arc<Ctx>>,
    Extension(state): Extension<Arc<ProviderState>>,
    request: Request,
) -> Response {
    match accept(&ctx, &state, request).await {
        Ok(said) => said.into_response(),
        Err(problem) => {
            let unauthorized = problem.status() == StatusCode::UNAUTHORIZED;
            let mut response = problem.into_response();
            if unauthorized {
                let basic = HeaderValue::from_static("Basic realm=\"wakeful\"");
                response.headers_mut().insert(header::WWW_AUTHENTICATE, basic);
            }
            response
        }
    }
}

async fn accept(ctx: &Ctx, state: &ProviderState, request: Request) -> Result<Json<Value>, Problem> {
    let Some(postmark) = &state.providers.postmark else {
        return Err(not_set_up("Postmark", "email.postmark.user and email.postmark.passwords"));
    };
    let (head, body) = request.into_parts();
    prove(postmark, &head.headers)?;
    let received = GATE.receive(&head.headers, body, MAIL_LIMIT).await?;
    // Postmark stops retrying at 403.
    answer(ctx, translate(&received.bytes)?, StatusCode::FORBIDDEN).await
}

/// # Errors
/// 401 if user and password are not the configured ones.
fn prove(postmark: &Postmark, headers: &HeaderMap) -> Result<(), Problem> {
    let refused =
        || unauthorized("basic auth is needed, with email.postmark.user and one of email.postmark.passwords");
    let given =
        headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).ok_or_else(refused)?;
    let (scheme, coded) = given.split_once(' ').ok_or_else(refused)?;
    if !scheme.eq_ignore_ascii_case("Basic") {
        return Err(refused());
    }
    let given = STANDARD.decode(coded.trim()).map_err(|_| refused())?;
    // Always try all passwords, so that the time taken does not reveal which one fits.
    let fits = postmark.passwords.iter().fold(subtle::Choice::from(0), |fits, password| {
        let wanted = format!("{}:{}", postmark.user, password.expose_secret());
        fits | wanted.as_bytes().ct_eq(&given)
    });
    if bool::from(fits) { Ok(()) } else { Err(refused()) }
}

/// The fields of all webhooks that Postmark posts: <https://postmarkapp.com/developer/webhooks>.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct Posted {
    /// Absent for incoming mail.
    record_type: Option<String>,
    from: String,
    from_full: Option<Address>,
    to_full: Vec<Address>,
    cc_full: Vec<Address>,
    original_recipient: Option<String>,
    subject: Option<String>,
    date: Option<String>,
    reply_to: Option<String>,
    text_body: Option<String>,
    html_body: Option<String>,
    headers: Vec<Header>,
    attachments: Vec<Attached>,
    raw_email: Option<String>,
    /// The kind of bounce.
    r#type: String,
    email: String,
    description: String,
    details: String,
    content: String,
    metadata: BTreeMap<String, Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct Address {
    email: String,
    name: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct Header {
    name: String,
    value: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct Attached {
    name: String,
    content: String,
    content_type: String,
    #[serde(rename = "ContentID")]
    content_id: Option<String>,
}

/// Parses a webhook of any kind.
///
/// # Errors
/// 400 if it is not a webhook of Postmark.
fn translate(body: &[u8]) -> Result<Notice, Problem> {
    let posted: Posted = serde_json::from_slice(body)
        .map_err(|error| Problem::bad_request(format!("the body is no webhook of Postmark: {error}")))?;
    match posted.record_type.as_deref() {
        None | Some("Inbound") => mail(posted).map(Notice::Mail),
        Some("Bounce" | "SpamComplaint") => Ok(bounce(&posted)),
        Some(other) => Ok(Notice::Irrelevant { reason: format!("a webhook of the type {other:?}") }),
    }
}

fn mail(posted: Posted) -> Result<Arrived, Problem> {
    // When a mailbox forwards to Postmark, the envelope names Postmark's own address instead of ours. Then
    // the header names the recipients.
    let recipients = posted
        .original_recipient
        .iter()
        .filter(|address| !address.is_empty() && !address.to_ascii_lowercase().ends_with(FORWARDED_TO))
        .cloned()
        .collect();
    // The delivering server puts its `Return-Path` above whatever the sender wrote.
    let mut return_paths =
        posted.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("Return-Path"));
    let mail_from = return_paths.next().map(|header| header.value.trim().trim_matches(['<', '>']).to_owned());
    let raw = match posted.raw_email.as_ref().filter(|raw| !raw.is_empty()) {
        Some(raw) => Bytes::from(raw.clone()),
        None => rebuild(posted)?,
    };
    // Postmark reports no DMARC result. If the mail has a header with one, the sender wrote it.
    Ok(Arrived { raw, mail_from, recipients, dmarc: Some(Dmarc::Unknown), unwanted: None })
}

fn rebuild(posted: Posted) -> Result<Bytes, Problem> {
    if posted.from.is_empty() && posted.from_full.is_none() {
        return Err(Problem::bad_request(
            "the webhook has neither `From` nor `RawEmail`: it is not an inbound mail",
        ));
    }
    let headers = posted.headers.into_iter().map(|header| (header.name, header.value)).collect();
    let mut parts = Parts { headers, ..Parts::default() };
    let list = |addresses: &[Address]| {
        addresses.iter().map(|one| mailbox(&one.name, &one.email)).collect::<Vec<_>>().join(", ")
    };
    let from = posted.from_full.map_or(posted.from, |from| mailbox(&from.name, &from.email));
    let top = [
        ("From", Some(from)),
        ("To", Some(list(&posted.to_full))),
        ("Cc", Some(list(&posted.cc_full))),
        ("Subject", posted.subject),
        ("Date", posted.date),
        ("Reply-To", posted.reply_to),
    ];
    for (name, value) in top {
        if let Some(value) = value.filter(|value| !value.is_empty())
            && !parts.has(name)
        {
            parts.headers.push((name.to_owned(), value));
        }
    }
    parts.text = posted.text_body.filter(|text| !text.is_empty());
    parts.html = posted.html_body.filter(|html| !html.is_empty());
    for attached in posted.attachments {
        let bytes = STANDARD.decode(attached.content.as_bytes()).map_err(|error| {
            Problem::bad_request(format!("the attachment {:?} is not base64: {error}", attached.name))
        })?;
        let content_id = attached
            .content_id
            .map(|id| id.trim().trim_start_matches("cid:").trim_matches(['<', '>']).to_owned());
        let (name, media_type) = (attached.name, attached.content_type);
        parts.files.push(File { name, media_type, content_id, bytes });
    }
    Ok(Bytes::from(parts.formatted()))
}

fn bounce(posted: &Posted) -> Notice {
    let is_complaint = posted.record_type.as_deref() == Some("SpamComplaint");
    let permanent = match posted.r#type.as_str() {
        "HardBounce"
        | "SoftBounce"
        | "Undeliverable"
        | "BadEmailAddress"
        | "SpamNotification"
        | "Blocked"
        | "DMARCPolicy"
        | "ManuallyDeactivated"
        | "VirusNotification"
        | "SMTPApiError"
        | "Unknown" => true,
        // Postmark tries it again.
        "Transient" | "DnsError" => false,
        _ if is_complaint => true,
        other => return Notice::Irrelevant { reason: format!("a bounce of the type {other:?}") },
    };
    // For mail sent by SMTP the key comes from a header's name, so its case may differ.
    let told = posted.metadata.iter().find(|(name, _)| name.eq_ignore_ascii_case("delivery_id"));
    let told = told.and_then(|(_, value)| value.as_str()).filter(|id| is_delivery(id));
    // With "include bounce content" Postmark returns the mail itself. Take only its Message-ID: its
    // References may name other deliveries.
    let quoted = || {
        let unfolded = posted.content.replace("\r\n", "\n").replace("\n ", " ");
        let ids = unfolded.lines().filter_map(|line| line.split_once(':'));
        let mut ids = ids.filter(|(name, _)| name.trim().eq_ignore_ascii_case("Message-ID"));
        ids.find_map(|(_, id)| delivery_of(id))
    };
    let Some(delivery_id) = told.map(str::to_owned).or_else(quoted) else {
        return Notice::Irrelevant { reason: "a bounce that names no delivery of ours".to_owned() };
    };
    let said = format!("{} {}", posted.details, posted.description);
    let diagnostic = [&posted.details, &posted.description].into_iter().find(|text| !text.is_empty());
    Notice::Bounced(vec![Bounce {
        delivery_id,
        recipient: posted.email.clone(),
        status: status_in(&said, permanent),
        diagnostic: diagnostic.cloned().unwrap_or_else(|| posted.r#type.clone()),
        permanent,
    }])
}

#[cfg(test)]
#[path = "postmark_tests.rs"]
mod tests;
