//! Mailgun: mail that a route forwards, and events of mail that we sent through it.
//!
//! Mailgun signs a timestamp and a token, but not the body. Somebody who sees one signed request could put
//! another body under its signature. So we store each token with a digest of its body, and accept the token
//! for that body only.
//!
//! Mailgun retries for eight hours and does not document whether it signs a retry again; some users see
//! retries with the first timestamp. So a signature stays valid for longer than that, and mail that arrives
//! late after an outage is not lost. An old signature does not help an attacker. While it is valid we
//! remember its token: the same body is a duplicate, and another body is refused.

use super::bounced::{Bounce, delivery_of, status_in};
use super::form::{self, Encoding, Field};
use super::rebuild::{File, Parts};
use super::{Arrived, MAIL_LIMIT, Notice, ProviderState, answer, forbidden, not_set_up, unauthorized};
use crate::email::body::BodyGate;
use crate::email::bounce::is_delivery;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::{Extension, Json};
use bytes::Bytes;
use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use wakeful_config::email_providers::Mailgun;
use wakeful_engine::ctx::Ctx;
use wakeful_http::problem::Problem;
use wakeful_store::webhook::TokenUse;
use wakeful_workflow::mail::auth::Dmarc;

static GATE: BodyGate = BodyGate::new();

/// How far Mailgun's clock may be ahead of ours, in seconds.
const AHEAD_S: i64 = 300;

/// Maximum size of a signed field, in bytes.
const SIGNED_BYTES: usize = 256;

/// `POST /v1/triggers/email/mailgun` and `…/mailgun/mime`.
pub(super) async fn receive(
    State(ctx): State<Arc<Ctx>>,
    Extension(state): Extension<Arc<ProviderState>>,
    request: Request,
) -> Result<Json<Value>, Problem> {
    let Some(mailgun) = &state.providers.mailgun else {
        return Err(not_set_up("Mailgun", "email.mailgun.signing_keys"));
    };
    let (head, body) = request.into_parts();
    let encoding = Encoding::of(&head.headers).ok_or_else(|| {
        let expected =
            "multipart/form-data, application/x-www-form-urlencoded or application/json is expected";
        Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, expected)
    })?;
    let received = GATE.receive(&head.headers, body, MAIL_LIMIT).await?;
    let signed = Signed::read(&encoding, &received.bytes).await?;
    signed.prove(mailgun, chrono::Utc::now().timestamp())?;
    // Mailgun stops retrying at 406.
    let (notice, digest) = translate(&encoding, &received.bytes)
        .await
        .map_err(|problem| problem.with_status(StatusCode::NOT_ACCEPTABLE))?;
    // Count from now, not from the signing, so that the signature expires before its token is forgotten.
    let keep = Duration::from_secs(mailgun.max_age_s + 2 * AHEAD_S.unsigned_abs());
    let used = {
        // Drop this permit before the mail takes its own.
        let _permit = ctx.intake.enter().await?;
        ctx.store.use_token("mailgun", &signed.token, &digest, keep).await?
    };
    match used {
        TokenUse::First | TokenUse::Again => {}
        TokenUse::Stolen => {
            return Err(forbidden(
                "this token was already used with another body: a signed request is valid for one body",
            ));
        }
    }
    answer(&ctx, notice, StatusCode::NOT_ACCEPTABLE).await
}

/// The fields that Mailgun signs.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Signed {
    timestamp: String,
    token: String,
    signature: String,
}

impl Signed {
    /// Reads these three fields and nothing else.
    async fn read(encoding: &Encoding, body: &Bytes) -> Result<Signed, Problem> {
        /// The body of an event; the other fields are skipped.
        #[derive(Deserialize)]
        struct Event {
            signature: Signed,
        }
        if let Encoding::Json = encoding {
            let event = serde_json::from_slice::<Event>(body);
            return event
                .map(|event| event.signature)
                .map_err(|error| unauthorized(format!("it is not signed: {error}")));
        }
        let is_signed = |name: &str| matches!(name, "timestamp" | "token" | "signature");
        let fields = form::fields(encoding, body, SIGNED_BYTES, is_signed)
            .await
            .map_err(|error| unauthorized(format!("it is not signed: {error}")))?;
        let mut signed = Signed::default();
        for field in fields {
            let place = match field.name.as_str() {
                "timestamp" => &mut signed.timestamp,
                "token" => &mut signed.token,
                _ => &mut signed.signature,
            };
            if !place.is_empty() {
                return Err(unauthorized(format!("`{}` is there twice", field.name)));
            }
            *place = String::from_utf8(field.bytes)
                .map_err(|_| unauthorized(format!("`{}` is no text", field.name)))?;
        }
        Ok(signed)
    }

    /// # Errors
    /// 401 if no configured key made the signature, or if it is too old.
    fn prove(&self, mailgun: &Mailgun, now_unix_s: i64) -> Result<(), Problem> {
        let plain = |text: &str, bytes| {
            (1..=bytes).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric())
        };
        if !plain(&self.timestamp, 20) || !plain(&self.token, 128) {
            return Err(unauthorized(
                "`timestamp`, `token` and `signature` are needed, as Mailgun signs them",
            ));
        }
        let signature = hex::decode(&self.signature).unwrap_or_default();
        // Always try all keys, so that the time taken does not reveal which one fits.
        let fits = mailgun.signing_keys.iter().fold(false, |fits, key| fits | self.is_of(key, &signature));
        if !fits {
            return Err(unauthorized("no key of email.mailgun.signing_keys made this signature"));
        }
        let signed_at: i64 =
            self.timestamp.parse().map_err(|_| unauthorized("`timestamp` is not a number"))?;
        if signed_at > now_unix_s.saturating_add(AHEAD_S) {
            return Err(unauthorized(format!(
                "its timestamp is more than {AHEAD_S} seconds ahead of this machine's clock"
            )));
        }
        let max_age_s = mailgun.max_age_s;
        if signed_at.saturating_add_unsigned(max_age_s) < now_unix_s {
            return Err(unauthorized(format!(
                "it was signed more than {max_age_s} seconds ago (email.mailgun.max_age_s)"
            )));
        }
        Ok(())
    }

    fn is_of(&self, key: &SecretString, signature: &[u8]) -> bool {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(key.expose_secret().as_bytes()).expect("any length is a key");
        mac.update(self.timestamp.as_bytes());
        mac.update(self.token.as_bytes());
        mac.verify_slice(signature).is_ok()
    }
}

/// Parses the signed content, and returns it with a digest.
async fn translate(encoding: &Encoding, body: &Bytes) -> Result<(Notice, Vec<u8>), Problem> {
    match encoding {
        Encoding::Json => event(body),
        Encoding::Urlencoded | Encoding::Multipart { .. } => {
            let all = form::fields(encoding, body, MAIL_LIMIT, |_| true);
            let arrived = mail(all.await.map_err(Problem::bad_request)?)?;
            let mut digest = Sha256::new();
            for recipient in &arrived.recipients {
                digest.update(recipient.as_bytes());
                digest.update([0]);
            }
            digest.update(&arrived.raw);
            Ok((Notice::Mail(arrived), digest.finalize().to_vec()))
        }
    }
}

/// The fields that decide what arrived, and for which mailbox.
const DECISIVE: [&str; 3] = ["recipient", "body-mime", "message-headers"];

fn mail(fields: Vec<Field>) -> Result<Arrived, Problem> {
    // Mailgun also posts each header of the mail as a field of its name, and the sender chooses those names.
    for name in DECISIVE {
        if fields.iter().filter(|field| field.name == name).count() > 1 {
            return Err(Problem::bad_request(format!("the form has the field `{name}` twice")));
        }
    }
    let text = |name: &str| {
        let field = fields.iter().find(|field| field.name == name)?;
        Some(String::from_utf8_lossy(&field.bytes).into_owned())
    };
    let recipients = text("recipient").unwrap_or_default();
    let recipients =
        recipients.split(',').map(str::trim).filter(|one| !one.is_empty()).map(str::to_owned).collect();
    // Programs do write a header `sender`. With two fields it is unclear which one is the envelope's.
    let is_clear = fields.iter().filter(|field| field.name == "sender").count() == 1;
    let mail_from = text("sender").filter(|_| is_clear);
    let whole = fields.iter().find(|field| field.name == "body-mime");
    let raw = match whole {
        Some(whole) => Bytes::from(whole.bytes.clone()),
        None => rebuild(&text, &fields)?,
    };
    // Mailgun reports no DMARC result. If the mail has a header with one, the sender wrote it.
    Ok(Arrived { raw, mail_from, recipients, dmarc: Some(Dmarc::Unknown), unwanted: None })
}

/// Rebuilds a mail from its parts. Mailgun posts parts when the route's address does not end in "mime".
fn rebuild(text: &impl Fn(&str) -> Option<String>, fields: &[Field]) -> Result<Bytes, Problem> {
    let none =
        "the form has neither `body-mime` nor `message-headers`: it is not a mail that a route forwards";
    let headers = text("message-headers").ok_or_else(|| Problem::bad_request(none))?;
    let headers: Vec<(String, String)> = serde_json::from_str(&headers)
        .map_err(|error| Problem::bad_request(format!("`message-headers` cannot be read: {error}")))?;
    let mut parts = Parts { headers, ..Parts::default() };
    for (name, field) in [("From", "from"), ("Subject", "subject")] {
        if let Some(value) = text(field)
            && !parts.has(name)
        {
            parts.headers.push((name.to_owned(), value));
        }
    }
    parts.text = text("body-plain").filter(|text| !text.is_empty());
    parts.html = text("body-html").filter(|html| !html.is_empty());
    let ids = text("content-id-map").unwrap_or_default();
    let ids: BTreeMap<String, String> = serde_json::from_str(&ids).unwrap_or_default();
    for field in
        fields.iter().filter(|field| field.name.starts_with("attachment-") && field.file_name.is_some())
    {
        let id = ids.iter().find(|(_, name)| **name == field.name);
        parts.files.push(File {
            name: field.file_name.clone().unwrap_or_default(),
            media_type: field.media_type.clone().unwrap_or_default(),
            content_id: id.map(|(id, _)| id.trim_matches(['<', '>']).to_owned()),
            bytes: field.bytes.clone(),
        });
    }
    Ok(Bytes::from(parts.formatted()))
}

/// The fields of `event-data` that we use:
/// <https://documentation.mailgun.com/docs/mailgun/user-manual/events/event-structure>.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct Event {
    event: String,
    severity: Option<String>,
    reason: Option<String>,
    recipient: String,
    message: Message,
    delivery_status: DeliveryStatus,
    user_variables: Value,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Message {
    headers: BTreeMap<String, Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct DeliveryStatus {
    enhanced_code: Option<String>,
    message: Option<String>,
    description: Option<String>,
}

fn event(body: &[u8]) -> Result<(Notice, Vec<u8>), Problem> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct Posted {
        event_data: Value,
    }
    let bad = |error| Problem::bad_request(format!("the body is not an event of Mailgun: {error}"));
    let posted: Posted = serde_json::from_slice(body).map_err(bad)?;
    let digest = Sha256::digest(posted.event_data.to_string()).to_vec();
    let event: Event = serde_json::from_value(posted.event_data).map_err(bad)?;
    Ok((bounce(event), digest))
}

fn bounce(event: Event) -> Notice {
    match (event.event.as_str(), event.severity.as_deref()) {
        ("failed", Some("temporary")) => {
            return Notice::Irrelevant { reason: "a failure after which Mailgun goes on trying".to_owned() };
        }
        ("failed" | "complained" | "rejected", _) => {}
        (other, _) => return Notice::Irrelevant { reason: format!("an event of the type {other:?}") },
    }
    let message_id = event.message.headers.get("message-id").and_then(Value::as_str);
    let told =
        || event.user_variables["delivery_id"].as_str().filter(|id| is_delivery(id)).map(str::to_owned);
    let Some(delivery_id) = message_id.and_then(delivery_of).or_else(told) else {
        return Notice::Irrelevant { reason: "a bounce that names no delivery of ours".to_owned() };
    };
    let status = event.delivery_status;
    let said = [status.message, status.description, event.reason].into_iter().flatten();
    let diagnostic = said.into_iter().find(|text| !text.is_empty()).unwrap_or_else(|| event.event.clone());
    let code = status.enhanced_code.filter(|code| !code.is_empty()).unwrap_or_else(|| diagnostic.clone());
    let recipient = event.recipient;
    let status = status_in(&code, true);
    Notice::Bounced(vec![Bounce { delivery_id, recipient, status, diagnostic, permanent: true }])
}

#[cfg(test)]
#[path = "mailgun_tests.rs"]
mod tests;
