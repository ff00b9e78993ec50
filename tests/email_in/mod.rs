//! Mail comes in by HTTP and by LMTP. It reaches a session, is dropped, or is refused with a reason.

mod answered;
mod busy;
mod carried;
mod hostile;
mod killed;
mod lmtp;
mod raw;
mod spaces;
mod threads;
mod unproved;

use crate::support::{Answer, Client, Database, ModelServer, Options};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use reqwest::{RequestBuilder, StatusCode};
use serde_json::Value;
use sha2::Sha256;
use std::time::SystemTime;

/// The webhook secret of the configuration below.
const SECRET: &str = "whsec_YSBzZWNyZXQgb2YgdGhlIHRlc3RzIGFsb25l";
const SUPPORT: &str = "support@example.org";

/// `serve` with two mailboxes and every way in enabled, against this model.
fn options(model: &ModelServer) -> Options {
    Options::new()
        .env("OPENAI_BASE_URL", &model.url)
        .config(&format!(
            "[agents.default]\nsystem_prompt = \"You are a test.\"\nmodel = \"openai/test\"\n\
         tools = [\"compose_email\", \"ask_user\", \"read_attachment\"]\n\
         [email.mailboxes.support]\naddress = \"{SUPPORT}\"\n\
         [email.mailboxes.sales]\naddress = \"sales@example.org\"\nrecipients = [\"*@example.com\"]\n\
         web_allow = [\"example.com\"]"
        ))
        .env("WAKEFUL_EMAIL__RAW_SECRETS", SECRET)
        .env("WAKEFUL_EMAIL__THREAD_SECRET", "a secret of the tests")
        .env("WAKEFUL_EMAIL__TRUSTED_AUTHSERV", "mx.example.org")
        .env("WAKEFUL_EMAIL__LMTP_LISTEN", "127.0.0.1:0")
}

async fn says(text: &str) -> ModelServer {
    ModelServer::turns(vec![Answer::text(text)]).await
}

/// A mail from Ann to the support address.
fn mail(id: &str, subject: &str, headers: &str, body: &str) -> String {
    format!(
        "From: Ann <ann@example.com>\r\nTo: {SUPPORT}\r\nSubject: {subject}\r\nMessage-ID: <{id}>\r\n\
         Date: Sat, 31 Jan 2026 12:00:00 +0000\r\n{headers}\r\n{body}\r\n"
    )
}

/// A header in which the trusted server confirms that the mail is Ann's.
const PROVED: &str = "Authentication-Results: mx.example.org; dmarc=pass header.from=example.com\r\n";

/// A header in which it says that somebody else wrote the mail in Ann's name.
const FAILED: &str =
    "Authentication-Results: mx.example.org; spf=fail; dmarc=fail (p=reject) header.from=example.com\r\n";

fn now() -> i64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() as i64
}

fn signature(id: &str, time: i64, body: &[u8]) -> String {
    let key = STANDARD.decode(SECRET.strip_prefix("whsec_").unwrap()).unwrap();
    let mut mac = Hmac::<Sha256>::new_from_slice(&key).unwrap();
    mac.update(format!("{id}.{time}.").as_bytes());
    mac.update(body);
    format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
}

fn request(client: &Client, body: impl Into<Vec<u8>>) -> RequestBuilder {
    request_to(client, "", body)
}

/// Like [`request`], with `query` after the path.
fn request_to(client: &Client, query: &str, body: impl Into<Vec<u8>>) -> RequestBuilder {
    let body = body.into();
    let (id, time) = ("msg_1", now());
    client
        .post_request(&format!("/v1/triggers/email/raw{query}"))
        .header("content-type", "message/rfc822")
        .header("webhook-id", id)
        .header("webhook-timestamp", time.to_string())
        .header("webhook-signature", signature(id, time, &body))
        .body(body)
}

/// Posts a signed mail. Returns status and answer.
async fn post(client: &Client, body: impl Into<Vec<u8>>) -> (StatusCode, Value) {
    sent(request(client, body)).await
}

async fn sent(request: RequestBuilder) -> (StatusCode, Value) {
    let response = request.send().await.unwrap();
    let status = response.status();
    (status, response.json().await.unwrap())
}

/// Posts a mail that wakes one session, and returns that session's id.
async fn taken(client: &Client, body: impl Into<Vec<u8>>) -> String {
    let (status, answer) = post(client, body).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{answer}");
    answer["session_id"].as_str().unwrap().to_owned()
}

async fn conversation_of(client: &Client, session_id: &str) -> String {
    client.session(session_id).await["conversation_id"].as_str().unwrap().to_owned()
}

/// The session's policy as stored.
async fn policy(database: &Database, session_id: &str) -> Value {
    database.value("select policy from conversation_sessions where session_id = $1", session_id).await
}

async fn count(database: &Database, sql: &'static str) -> i64 {
    database.value(sql, "").await
}

async fn sessions(database: &Database) -> i64 {
    count(database, "select count(*) from conversation_sessions where $1 = ''").await
}
