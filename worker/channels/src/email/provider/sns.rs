//! Verifies messages of Amazon SNS.
//!
//! A message must belong to a configured topic, be at most an hour and a half old, and be signed with a
//! certificate from the one host that serves the topic's region. The rules:
//! <https://docs.aws.amazon.com/sns/latest/dg/sns-verify-signature-of-message.html>.

use super::certificate::Certificates;
use super::{forbidden, unauthorized};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use chrono::{DateTime, Utc};
use reqwest::Url;
use rustls::pki_types::CertificateDer;
use serde::Deserialize;
use wakeful_config::email_providers::topic_host;
use wakeful_http::problem::Problem;
use webpki::EndEntityCert;
use webpki::aws_lc_rs::RSA_PKCS1_2048_8192_SHA256;

/// SNS retries for an hour at most after the first failure. The message keeps the time of its publication.
const MAX_AGE_S: i64 = 5_400;

/// A message as SNS posts it.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Envelope {
    #[serde(rename = "Type")]
    pub kind: Kind,
    pub message_id: String,
    pub topic_arn: String,
    pub message: String,
    timestamp: String,
    signature_version: String,
    signature: String,
    #[serde(rename = "SigningCertURL")]
    signing_cert_url: String,
    subject: Option<String>,
    token: Option<String>,
    #[serde(rename = "SubscribeURL")]
    subscribe_url: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Kind {
    SubscriptionConfirmation,
    Notification,
    UnsubscribeConfirmation,
}

impl Kind {
    fn as_str(self) -> &'static str {
        match self {
            Kind::SubscriptionConfirmation => "SubscriptionConfirmation",
            Kind::Notification => "Notification",
            Kind::UnsubscribeConfirmation => "UnsubscribeConfirmation",
        }
    }
}

impl Envelope {
    /// Parses a message and verifies it. Does not look into `message`.
    ///
    /// # Errors
    /// 401 if the signature or the timestamp is not valid, 403 if its topic or its way of signing is not
    /// accepted, 503 when the certificate cannot be fetched now.
    pub async fn prove(
        body: &[u8],
        topic_arns: &[String],
        certificates: &Certificates,
        now: DateTime<Utc>,
    ) -> Result<Envelope, Problem> {
        let envelope: Envelope = serde_json::from_slice(body)
            .map_err(|error| unauthorized(format!("the body is no signed message of SNS: {error}")))?;
        let url = envelope.certificate_url(topic_arns, now)?;
        let certificate = certificates.get(&url).await?;
        envelope.verify(&certificate)?;
        Ok(envelope)
    }

    /// Checks all that needs no certificate, so that a certificate is fetched only for a plausible message.
    fn certificate_url(&self, topic_arns: &[String], now: DateTime<Utc>) -> Result<Url, Problem> {
        let host = topic_arns
            .iter()
            .find(|arn| **arn == self.topic_arn)
            .and_then(|arn| topic_host(arn))
            .ok_or_else(|| {
                forbidden(format!("email.ses.topic_arns does not list {:?}", short(&self.topic_arn)))
            })?;
        if self.signature_version != "2" {
            return Err(forbidden(
                "only SignatureVersion 2 (SHA-256) is taken: set the topic's attribute SignatureVersion to 2",
            ));
        }
        let sent = DateTime::parse_from_rfc3339(&self.timestamp)
            .map_err(|error| unauthorized(format!("`Timestamp` cannot be read: {error}")))?;
        if now.signed_duration_since(sent).num_seconds().abs() > MAX_AGE_S {
            return Err(unauthorized(format!("it was signed more than {MAX_AGE_S} seconds from now")));
        }
        let refused = || forbidden(format!("SigningCertURL is not a certificate of https://{host}"));
        let url = Url::parse(&self.signing_cert_url).map_err(|_| refused())?;
        let name =
            url.path().strip_prefix("/SimpleNotificationService-").and_then(|rest| rest.strip_suffix(".pem"));
        let is_name =
            |name: &str| (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_hexdigit());
        if is_of(&url, &host) && url.query().is_none() && name.is_some_and(is_name) {
            Ok(url)
        } else {
            Err(refused())
        }
    }

    /// # Errors
    /// 401 when the certificate's key did not make this signature.
    fn verify(&self, certificate: &CertificateDer<'_>) -> Result<(), Problem> {
        let refused = |why: &str| unauthorized(format!("the signature of SNS is not valid: {why}"));
        let signature = STANDARD.decode(&self.signature).map_err(|_| refused("it is not base64"))?;
        let certificate = EndEntityCert::try_from(certificate)
            .map_err(|error| refused(&format!("the certificate: {error}")))?;
        certificate
            .verify_signature(RSA_PKCS1_2048_8192_SHA256, self.signed().as_bytes(), &signature)
            .map_err(|error| refused(&error.to_string()))
    }

    /// The signed text: names and values, each on its own line, ordered by name.
    fn signed(&self) -> String {
        let or_none = |value: &Option<String>| value.clone();
        let of_notification = [
            ("Message", Some(self.message.clone())),
            ("MessageId", Some(self.message_id.clone())),
            ("Subject", or_none(&self.subject)),
            ("Timestamp", Some(self.timestamp.clone())),
            ("TopicArn", Some(self.topic_arn.clone())),
            ("Type", Some(self.kind.as_str().to_owned())),
        ];
        let of_confirmation = [
            ("Message", Some(self.message.clone())),
            ("MessageId", Some(self.message_id.clone())),
            ("SubscribeURL", or_none(&self.subscribe_url)),
            ("Timestamp", Some(self.timestamp.clone())),
            ("Token", or_none(&self.token)),
            ("TopicArn", Some(self.topic_arn.clone())),
            ("Type", Some(self.kind.as_str().to_owned())),
        ];
        let fields = match self.kind {
            Kind::Notification => &of_notification[..],
            Kind::SubscriptionConfirmation | Kind::UnsubscribeConfirmation => &of_confirmation[..],
        };
        fields.iter().filter_map(|(name, value)| Some(format!("{name}\n{}\n", value.as_ref()?))).collect()
    }

    /// The URL that confirms a subscription. Only for a verified message.
    ///
    /// # Errors
    /// 403 when it has another host, or does anything other than confirm.
    pub fn confirmation(&self) -> Result<Url, Problem> {
        let refused = || forbidden("SubscribeURL does not confirm this topic's subscription");
        let host = topic_host(&self.topic_arn).ok_or_else(refused)?;
        let url = self.subscribe_url.as_deref().and_then(|url| Url::parse(url).ok()).ok_or_else(refused)?;
        let says = |name: &str, value: &str| {
            url.query_pairs().filter(|(key, _)| key == name).all(|(_, is)| is == value)
        };
        let asked = |name: &str| url.query_pairs().filter(|(key, _)| key == name).count() == 1;
        let right = is_of(&url, &host)
            && url.path() == "/"
            && ["Action", "TopicArn", "Token"].into_iter().all(asked)
            && says("Action", "ConfirmSubscription")
            && says("TopicArn", &self.topic_arn)
            && says("Token", self.token.as_deref().unwrap_or_default());
        if right { Ok(url) } else { Err(refused()) }
    }
}

/// Returns whether the URL leads directly to that host.
fn is_of(url: &Url, host: &str) -> bool {
    url.scheme() == "https"
        && url.host_str() == Some(host)
        && url.port().is_none()
        && url.username().is_empty()
        && url.password().is_none()
        && url.fragment().is_none()
}

fn short(text: &str) -> String {
    text.chars().take(200).collect()
}

#[cfg(test)]
#[path = "sns_tests.rs"]
mod tests;
