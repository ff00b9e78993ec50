//! A process that takes mail from all three providers, and requests as each provider signs them.

use crate::support::{Answer, Client, Database, ModelServer, Options, Process, eventually};
use axum::Router;
use axum::extract::{Request, State};
use axum::response::IntoResponse;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use rcgen::{CertificateParams, KeyPair, PKCS_RSA_SHA256, SigningKey};
use reqwest::{RequestBuilder, StatusCode, header};
use serde_json::{Value, json};
use sha2::Sha256;
use std::sync::{Arc, Mutex};

pub(super) const TOPIC: &str = "arn:aws:sns:eu-central-1:123456789012:mail";
pub(super) const HOST: &str = "https://sns.eu-central-1.amazonaws.com";
pub(super) const CERTIFICATE: &str = "/SimpleNotificationService-9c6465fa7f48f5cacd23014631ec1136.pem";

pub(super) const POSTMARK: &str = "/v1/triggers/email/postmark";
pub(super) const MAILGUN: &str = "/v1/triggers/email/mailgun";
pub(super) const SES: &str = "/v1/triggers/email/ses";

pub(super) const MAIL: &str = "From: Ann <ann@example.com>\r\nTo: agent@example.org\r\nSubject: A question\r\n\
                    Message-ID: <one@example.com>\r\nDate: Sun, 22 Nov 2026 08:00:00 +0000\r\n\r\nWhat time is it?\r\n";

pub(super) struct World {
    pub(super) database: Database,
    pub(super) sns: Sns,
    pub(super) client: Client,
    pub(super) process: Process,
    pub(super) model: ModelServer,
}

impl World {
    pub(super) async fn new() -> World {
        World::with("", |options| options).await
    }

    /// A world with additional configuration, and options changed by `set`.
    pub(super) async fn with(more: &str, set: impl FnOnce(Options) -> Options) -> World {
        World::on(Database::new().await, Sns::start().await, more, set).await
    }

    pub(super) async fn on(
        database: Database,
        sns: Sns,
        more: &str,
        set: impl FnOnce(Options) -> Options,
    ) -> World {
        let model = model().await;
        let config = format!(
            "[email.postmark]\nuser = \"wakeful\"\npasswords = [\"postmark-old\", \"postmark-secret\"]\n\
             [email.mailgun]\nsigning_keys = [\"signing-key\"]\n\
             [email.ses]\ntopic_arns = [\"{TOPIC}\"]\nsns_url = \"{}\"\n{more}",
            sns.url
        );
        // The token guards the rest of /v1. The providers' endpoints have checks of their own.
        let options = options(&model).config(&config).env("WAKEFUL_TOKEN", super::TOKEN);
        let process = set(options).serve(&database).await;
        let client = process.client();
        World { database, sns, client, process, model }
    }

    pub(super) async fn completes(&self, session_id: &str) {
        eventually("the session to complete", || async {
            let status: String = self
                .database
                .value("select status from conversation_sessions where session_id = $1", session_id)
                .await;
            (status == "completed").then_some(())
        })
        .await;
    }

    /// The same mail from every provider, in each of its formats. Tokens begin at `token`.
    pub(super) fn mails(&self, token: u32) -> Vec<(&'static str, RequestBuilder)> {
        let client = &self.client;
        let signed = |n: u32| mailgun_signature("signing-key", now(), &format!("{:050}", token + n));
        let fields = [("recipient", "agent@example.org"), ("sender", "ann@example.com"), ("body-mime", MAIL)];
        let fields = fields.into_iter().map(|(name, value)| (name, value.to_owned())).chain(signed(2));
        let pairs = fields.map(|(name, value)| {
            format!("{name}={}", value.bytes().map(|byte| format!("%{byte:02x}")).collect::<String>())
        });
        let urlencoded = client
            .post_request("/v1/triggers/email/mailgun/mime")
            .header(header::CONTENT_TYPE, "application/x-www-form-urlencoded")
            .body(pairs.collect::<Vec<_>>().join("&"));
        vec![
            (
                "Postmark",
                client
                    .post_request(POSTMARK)
                    .basic_auth("wakeful", Some("postmark-secret"))
                    .body(postmark_mail()),
            ),
            ("Mailgun", mailgun_form(client, MAILGUN, signed(1), MAIL)),
            ("Mailgun, urlencoded", urlencoded),
            ("SES", client.post_request(SES).body(self.sns.sign(notification(MAIL)).to_string())),
        ]
    }
}

pub(super) async fn model() -> ModelServer {
    ModelServer::turns(vec![Answer::text("It is late.")]).await
}

pub(super) fn options(model: &ModelServer) -> Options {
    Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url)
}

pub(super) fn now() -> i64 {
    chrono::Utc::now().timestamp()
}

pub(super) fn timestamp(in_s: i64) -> String {
    (chrono::Utc::now() + chrono::TimeDelta::seconds(in_s))
        .to_rfc3339_opts(chrono::SecondsFormat::Millis, true)
}

pub(super) fn with(mut message: Value, key: &str, value: &str) -> Value {
    message[key] = json!(value);
    message
}

pub(super) fn postmark_mail() -> String {
    json!({
        "From": "ann@example.com", "FromFull": {"Email": "ann@example.com", "Name": "Ann"}, "OriginalRecipient": "agent@example.org",
        "ToFull": [{"Email": "agent@example.org", "Name": ""}], "Subject": "A question", "Headers": [], "TextBody": "What time is it?",
        "RawEmail": MAIL,
    })
    .to_string()
}

pub(super) fn mailgun_signature(key: &str, at: i64, token: &str) -> Vec<(&'static str, String)> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key.as_bytes()).unwrap();
    mac.update(format!("{at}{token}").as_bytes());
    let signature = hex(&mac.finalize().into_bytes());
    vec![("timestamp", at.to_string()), ("token", token.to_owned()), ("signature", signature)]
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A form with a new boundary each time. The signature comes last, because fields may come in any order.
pub(super) fn mailgun_form(
    client: &Client,
    path: &str,
    signed: Vec<(&'static str, String)>,
    mail: &str,
) -> RequestBuilder {
    let boundary = wakeful_store::new_id("boundary");
    let fields = [("recipient", "agent@example.org"), ("sender", "ann@example.com"), ("body-mime", mail)];
    let mut body = String::new();
    for (name, value) in fields.into_iter().chain(signed.iter().map(|(name, value)| (*name, value.as_str())))
    {
        body +=
            &format!("--{boundary}\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
    }
    body += &format!("--{boundary}--\r\n");
    let form = format!("multipart/form-data; boundary={boundary}");
    client.post_request(path).header(header::CONTENT_TYPE, form).body(body)
}

/// A mail in a notification of SES, in a message of SNS that is not signed yet.
pub(super) fn notification(mail: &str) -> Value {
    let published = json!({
        "notificationType": "Received",
        "mail": {"source": "ann@example.com", "destination": ["agent@example.org"], "messageId": "o3vrnil0e2ic28tr"},
        "receipt": {
            "recipients": ["agent@example.org"], "spamVerdict": {"status": "PASS"}, "virusVerdict": {"status": "PASS"},
            "dmarcVerdict": {"status": "PASS"}, "action": {"type": "SNS", "topicArn": TOPIC, "encoding": "BASE64"}
        },
        "content": STANDARD.encode(mail)
    });
    json!({
        "Type": "Notification", "MessageId": "22b80b92-fdea-4c2c-8f9d-bdfb0c7bf324", "TopicArn": TOPIC,
        "Subject": "Amazon SES Email Receipt Notification", "Message": published.to_string(), "Timestamp": timestamp(-5),
        "SignatureVersion": "2", "SigningCertURL": format!("{HOST}{CERTIFICATE}")
    })
}

/// A fake SNS: it signs, serves its certificate, and records the requests it gets.
pub(super) struct Sns {
    pub(super) url: String,
    pub(super) key: KeyPair,
    pub(super) asked: Arc<Mutex<Vec<String>>>,
    pub(super) server: tokio::task::JoinHandle<()>,
}

impl Sns {
    pub(super) async fn start() -> Sns {
        let key = KeyPair::generate_for(&PKCS_RSA_SHA256).unwrap();
        let pem = CertificateParams::new(["sns.amazonaws.com".to_owned()])
            .unwrap()
            .self_signed(&key)
            .unwrap()
            .pem();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let router = Router::new().fallback(answer).with_state((Arc::clone(&asked), pem));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Sns { url, key, asked, server }
    }

    pub(super) fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }

    pub(super) fn sign(&self, mut message: Value) -> Value {
        let names: &[&str] = match message["Type"].as_str() {
            Some("Notification") => &["Message", "MessageId", "Subject", "Timestamp", "TopicArn", "Type"],
            _ => &["Message", "MessageId", "SubscribeURL", "Timestamp", "Token", "TopicArn", "Type"],
        };
        let text: String =
            names.iter().filter_map(|name| Some(format!("{name}\n{}\n", message[*name].as_str()?))).collect();
        message["Signature"] = json!(STANDARD.encode(self.key.sign(text.as_bytes()).unwrap()));
        message
    }
}

impl Drop for Sns {
    fn drop(&mut self) {
        self.server.abort();
    }
}

pub(super) async fn answer(
    State((asked, pem)): State<(Arc<Mutex<Vec<String>>>, String)>,
    request: Request,
) -> axum::response::Response {
    let path = request.uri().to_string();
    asked.lock().unwrap().push(path.clone());
    if path == CERTIFICATE {
        pem.into_response()
    } else if path.starts_with("/?Action=ConfirmSubscription") {
        "<ConfirmSubscriptionResponse/>".into_response()
    } else {
        StatusCode::NOT_FOUND.into_response()
    }
}
