//! Amazon SES through SNS: incoming mail, and bounces and complaints of mail that we sent.

use super::bounced::{Bounce, delivery_of, status_in};
use super::sns::{Envelope, Kind};
use super::{Arrived, Notice, ProviderState, SNS_LIMIT, answer, not_set_up};
use crate::email::body::BodyGate;
use crate::email::bounce::is_delivery;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::{Extension, Json};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use tracing::{error, info, warn};
use wakeful_engine::ctx::Ctx;
use wakeful_http::problem::Problem;
use wakeful_workflow::mail::auth::Dmarc;

static GATE: BodyGate = BodyGate::new();

/// The error for a notification that does not contain the mail.
const NO_CONTENT: &str = "the notification has no mail in it: the receipt rule's action must be SNS with the whole mail \
                          (encoding Base64), not S3, and a mail of more than 150 KB does not fit into it";

/// `POST /v1/triggers/email/ses`.
pub(super) async fn receive(
    State(ctx): State<Arc<Ctx>>,
    Extension(state): Extension<Arc<ProviderState>>,
    request: Request,
) -> Result<Json<Value>, Problem> {
    accept(&ctx, &state, request).await.map_err(|problem| match problem.status() {
        // SNS drops a message that is answered with 4xx, even 429. So a temporary refusal becomes 503:
        // <https://docs.aws.amazon.com/sns/latest/dg/SendMessageToHttp.prepare.html>.
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => {
            problem.with_status(StatusCode::SERVICE_UNAVAILABLE)
        }
        _ => problem,
    })
}

async fn accept(ctx: &Ctx, state: &ProviderState, request: Request) -> Result<Json<Value>, Problem> {
    let topic_arns = state.providers.ses.as_ref().map(|ses| &ses.topic_arns[..]).unwrap_or_default();
    if topic_arns.is_empty() {
        return Err(not_set_up("SES", "email.ses.topic_arns"));
    }
    let (head, body) = request.into_parts();
    if head.headers.contains_key("x-amz-sns-rawdelivery") {
        return Err(super::unauthorized(
            "raw message delivery is not signed: turn it off at the subscription",
        ));
    }
    let received = GATE.receive(&head.headers, body, SNS_LIMIT).await?;
    let envelope =
        Envelope::prove(&received.bytes, topic_arns, &state.certificates, chrono::Utc::now()).await?;
    match envelope.kind {
        Kind::SubscriptionConfirmation => {
            let (status, _) = state.certificates.fetch(&envelope.confirmation()?).await?;
            if !status.is_success() {
                return Err(Problem::unavailable(
                    format!("SNS does not confirm the subscription: {status}"),
                    5,
                ));
            }
            info!(topic = envelope.topic_arn, "The subscription to a topic is confirmed");
            Ok(Json(json!({ "confirmed": envelope.topic_arn })))
        }
        Kind::UnsubscribeConfirmation => {
            warn!(
                topic = envelope.topic_arn,
                "The subscription to a topic has ended: its mail no longer arrives"
            );
            Ok(Json(json!({ "ignored": "the subscription has ended" })))
        }
        Kind::Notification => {
            let notice = translate(&envelope.message).inspect_err(|problem| {
                error!(sns.message_id = envelope.message_id, %problem, "A notification of SES was refused for good");
            })?;
            // SNS stops retrying at any 4xx.
            answer(ctx, notice, StatusCode::UNPROCESSABLE_ENTITY).await
        }
    }
}

/// What SES publishes: a receipt rule's notification, an identity's (`notificationType`), or a configuration set's event
/// (`eventType`). <https://docs.aws.amazon.com/ses/latest/dg/receiving-email-notifications-contents.html>
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Published {
    notification_type: Option<String>,
    event_type: Option<String>,
    mail: Mail,
    receipt: Receipt,
    content: Option<String>,
    bounce: BounceOf,
    complaint: Complaint,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Mail {
    source: Option<String>,
    headers: Vec<Header>,
    common_headers: CommonHeaders,
    tags: BTreeMap<String, Vec<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Header {
    name: String,
    value: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct CommonHeaders {
    message_id: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Receipt {
    recipients: Vec<String>,
    spam_verdict: Verdict,
    virus_verdict: Verdict,
    dmarc_verdict: Verdict,
    action: Action,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Verdict {
    status: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Action {
    encoding: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct BounceOf {
    bounce_type: String,
    bounced_recipients: Vec<Recipient>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Complaint {
    complained_recipients: Vec<Recipient>,
    complaint_feedback_type: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Recipient {
    email_address: String,
    status: Option<String>,
    diagnostic_code: Option<String>,
}

/// Parses a notification.
///
/// # Errors
/// 422 if it is not a notification of SES, or if it does not contain the mail.
fn translate(message: &str) -> Result<Notice, Problem> {
    let refused = |detail: String| Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail);
    let published: Published = match serde_json::from_str(message) {
        Ok(published) => published,
        // SES tests a new topic with a plain sentence.
        Err(_) if !message.trim_start().starts_with('{') => {
            return Ok(Notice::Irrelevant {
                reason: "a message that is not a notification of SES".to_owned(),
            });
        }
        Err(error) => return Err(refused(format!("the message is not a notification of SES: {error}"))),
    };
    let kind = published.notification_type.as_deref().or(published.event_type.as_deref()).unwrap_or_default();
    match kind {
        "Received" => mail(published).map_err(refused),
        "Bounce" => Ok(bounce(published)),
        "Complaint" => Ok(complaint(published)),
        other => Ok(Notice::Irrelevant { reason: format!("a notification of the type {other:?}") }),
    }
}

fn mail(published: Published) -> Result<Notice, String> {
    let receipt = published.receipt;
    let verdicts = [("a virus", &receipt.virus_verdict), ("spam", &receipt.spam_verdict)];
    let failed = verdicts.iter().find(|(_, verdict)| verdict.status == "FAIL");
    let unwanted = failed.map(|(what, _)| format!("SES takes it for {what}"));
    let content = published.content.filter(|content| !content.is_empty());
    let Some(content) = content else {
        // SNS leaves out a large mail. This one is unwanted anyway, so the operator need not change the
        // receipt rule.
        return unwanted.map(|reason| Notice::Irrelevant { reason }).ok_or_else(|| NO_CONTENT.into());
    };
    let is_base64 = receipt.action.encoding.is_some_and(|encoding| encoding.eq_ignore_ascii_case("BASE64"));
    let raw = if is_base64 {
        STANDARD.decode(content.as_bytes()).map_err(|error| format!("`content` is not base64: {error}"))?
    } else {
        content.into_bytes()
    };
    // SES reports a DMARC result for each mail it receives.
    let dmarc = Some(match receipt.dmarc_verdict.status.as_str() {
        "PASS" => Dmarc::Passed,
        "FAIL" => Dmarc::Failed,
        _ => Dmarc::Unknown,
    });
    let (mail_from, recipients) = (published.mail.source, receipt.recipients);
    Ok(Notice::Mail(Arrived { raw: Bytes::from(raw), mail_from, recipients, dmarc, unwanted }))
}

/// The delivery that a notification is about. SES replaces the Message-ID when it sends; the original is
/// among the original headers. Mail sent by our SES channel also has the delivery id as a tag.
fn delivery(mail: &Mail) -> Option<String> {
    let tag = mail.tags.get("delivery_id").and_then(|values| values.first()).filter(|id| is_delivery(id));
    let headers = mail.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("Message-ID"));
    let written =
        headers.map(|header| header.value.as_str()).chain(mail.common_headers.message_id.as_deref());
    tag.cloned().or_else(|| written.into_iter().find_map(delivery_of))
}

fn bounce(published: Published) -> Notice {
    let Some(delivery_id) = delivery(&published.mail) else {
        return Notice::Irrelevant { reason: "a bounce that names no delivery of ours".to_owned() };
    };
    let for_good = published.bounce.bounce_type == "Permanent";
    let of = |recipient: Recipient| {
        let diagnostic = recipient.diagnostic_code.unwrap_or_default();
        let status = status_in(recipient.status.as_ref().unwrap_or(&diagnostic), for_good);
        // SES reports a transient bounce only after it gave up, so the bounce is final for us too.
        let permanent = true;
        Bounce {
            delivery_id: delivery_id.clone(),
            recipient: recipient.email_address,
            status,
            diagnostic,
            permanent,
        }
    };
    Notice::Bounced(published.bounce.bounced_recipients.into_iter().map(of).collect())
}

fn complaint(published: Published) -> Notice {
    let Some(delivery_id) = delivery(&published.mail) else {
        return Notice::Irrelevant { reason: "a complaint that names no delivery of ours".to_owned() };
    };
    let kind = published.complaint.complaint_feedback_type.unwrap_or_else(|| "complaint".to_owned());
    let of = |recipient: Recipient| Bounce {
        delivery_id: delivery_id.clone(),
        recipient: recipient.email_address,
        // "Delivery not authorized": the recipient does not want such mail.
        status: "5.7.1".to_owned(),
        diagnostic: format!("the recipient complained: {kind}"),
        permanent: true,
    };
    Notice::Bounced(published.complaint.complained_recipients.into_iter().map(of).collect())
}

#[cfg(test)]
#[path = "ses_tests.rs"]
mod tests;
