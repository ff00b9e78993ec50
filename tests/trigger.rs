//! `wakeful trigger`: sends a trigger by hand, signed as its real sender would sign it.

use crate::support::{Answer, Database, ModelServer, Options};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;

const TOKEN: &str = "the-token-of-the-tests";

/// A server that records each request and answers that it was accepted.
struct Recorder {
    url: String,
    requests: Arc<Mutex<Vec<Recorded>>>,
    server: tokio::task::JoinHandle<()>,
}

#[derive(Clone)]
struct Recorded {
    path: String,
    headers: HeaderMap,
    body: Bytes,
}

impl Recorded {
    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

impl Recorder {
    async fn start() -> Recorder {
        let requests: Arc<Mutex<Vec<Recorded>>> = Arc::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let record = async |State(requests): State<Arc<Mutex<Vec<Recorded>>>>,
                            uri: Uri,
                            headers: HeaderMap,
                            body: Bytes| {
            let path = uri.path().to_owned();
            let refused = path.contains("refused");
            let asked = path.split('/').find_map(|part| part.strip_prefix("answered-")?.parse::<u16>().ok());
            requests.lock().unwrap().push(Recorded { path, headers, body });
            match (refused, asked) {
                (true, _) => {
                    (StatusCode::NOT_FOUND, json!({"detail": "no such \u{1b}[31mschedule"}).to_string())
                }
                (false, Some(status)) => {
                    (StatusCode::from_u16(status).unwrap(), json!({"detail": "as told"}).to_string())
                }
                (false, None) => {
                    (StatusCode::ACCEPTED, json!({"session_id": "sess_1", "outcome": "new_run"}).to_string())
                }
            }
        };
        let router = Router::new().fallback(record).with_state(Arc::clone(&requests));
        let server = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Recorder { url, requests, server }
    }

    fn last(&self) -> Recorded {
        self.requests.lock().unwrap().last().cloned().expect("a request came")
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.server.abort();
    }
}

struct Ran {
    code: i32,
    out: String,
    err: String,
}

async fn run(options: &Options, url: &str, args: &[&str]) -> Ran {
    let mut command = options.clone().env("WAKEFUL_URL", url).env("WAKEFUL_TOKEN", TOKEN);
    command.args = ["trigger"].iter().chain(args).map(|&arg| arg.to_owned()).collect();
    let (status, process) = command.spawn("postgres://nobody@127.0.0.1:1/none").ended().await;
    Ran { code: status.code().unwrap(), out: process.output(), err: process.log() }
}

#[tokio::test]
async fn each_kind_goes_to_its_door_with_the_token_and_as_it_is() {
    let recorder = Recorder::start().await;
    let options = Options::new();
    let mail = b"From: ann@example.org\r\nSubject: Hi\r\n\r\nHello \xff.\r\n";
    std::fs::write(options.path("mail.eml"), mail).unwrap();
    std::fs::write(options.path("notice.json"), r#"{"notice": {"title": "T",  "body": "B"}}"#).unwrap();

    let ran = run(&options, &recorder.url, &["email", "mail.eml"]).await;
    assert_eq!((ran.code, ran.out.as_str()), (0, "sess_1\n"), "{}", ran.err);
    let sent = recorder.last();
    assert_eq!((sent.path.as_str(), &sent.body[..]), ("/v1/triggers/email/raw", &mail[..]));
    assert_eq!(sent.header("content-type"), "message/rfc822");
    assert_eq!(sent.header("authorization"), format!("Bearer {TOKEN}"));

    let chat = ["chat", "Hi", "--conversation", "a/b", "--user", "ann", "--client-key", "k", "-o", "json"];
    let ran = run(&options, &recorder.url, &chat).await;
    let told: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((ran.code, &told["outcome"]), (0, &json!("new_run")));
    let sent = recorder.last();
    assert_eq!(sent.path, "/v1/chat/a%2Fb/messages");
    let body: Value = serde_json::from_slice(&sent.body).unwrap();
    assert_eq!(body, json!({"text": "Hi", "user_id": "ann", "client_key": "k"}));

    assert_eq!(run(&options, &recorder.url, &["cron", "daily"]).await.code, 0);
    assert_eq!(recorder.last().path, "/v1/schedules/daily/trigger");

    assert_eq!(run(&options, &recorder.url, &["herald", "notice.json"]).await.code, 0);
    let sent = recorder.last();
    assert_eq!(sent.path, "/v1/triggers/herald");
    assert_eq!(&sent.body[..], &std::fs::read(options.path("notice.json")).unwrap()[..], "byte for byte");

    let ran = run(&options, &recorder.url, &["cron", "refused"]).await;
    assert_eq!(ran.code, 3, "{}", ran.err);
    assert!(
        ran.err.contains("404") && ran.err.contains("schedule") && !ran.err.contains('\u{1b}'),
        "{}",
        ran.err
    );
    assert!(ran.err.contains("`wakeful schedule list`"), "{}", ran.err);
    // No server listens there.
    let ran = run(&options, "http://127.0.0.1:1", &["cron", "daily"]).await;
    assert!(ran.code == 6 && ran.err.contains("--url or WAKEFUL_URL"), "{} {}", ran.code, ran.err);
    let ran = run(&options, &recorder.url, &["email", "nowhere.eml"]).await;
    assert!(ran.code == 2 && ran.err.contains("nowhere.eml cannot be read"), "{} {}", ran.code, ran.err);
    for (answer, code, remedy) in [
        (400, 2, ""),
        (401, 5, "WAKEFUL_TOKEN or --token-file"),
        (409, 4, ""),
        (422, 4, ""),
        (429, 6, "send it again"),
        (500, 1, "the server's log"),
        (503, 6, "send it again"),
    ] {
        let ran = run(&options, &recorder.url, &["cron", &format!("answered-{answer}")]).await;
        assert_eq!(ran.code, code, "{answer}: {}", ran.err);
        assert!(ran.err.contains(&answer.to_string()) && ran.err.contains(remedy), "{}", ran.err);
    }
    let help = run(&options, &recorder.url, &["--help"]).await;
    assert!(help.code == 0 && help.out.contains("Exit status:"), "{}", help.out);
    for args in
        [&["cron", "daily", "--url", "here"][..], &["message", "notice.json"], &["herald", "mail.eml"]]
    {
        assert_eq!(run(&options, &recorder.url, args).await.code, 2, "{args:?}");
    }
}

#[tokio::test]
async fn a_message_is_signed_as_its_messenger_signs_and_the_token_stays_at_home() {
    let recorder = Recorder::start().await;
    let key = b"a key of thirty-two bytes, long ";
    let secret = format!("whsec_{}", STANDARD.encode(key));
    let options = Options::new().env("WAKEFUL_TRIGGER_SECRET", &secret);
    std::fs::write(options.path("hello.txt"), "Hello\n").unwrap();
    std::fs::write(options.path("own.json"), r#"{"conversation_id":"c9",  "text":"As it is"}"#).unwrap();

    let ran =
        run(&options, &recorder.url, &["message", "hello.txt", "--conversation", "c1", "--id", "m1"]).await;
    assert_eq!(ran.code, 0, "{}", ran.err);
    let sent = recorder.last();
    assert_eq!(sent.path, "/v1/triggers/messenger/webhook");
    let body: Value = serde_json::from_slice(&sent.body).unwrap();
    assert_eq!(body, json!({"conversation_id": "c1", "text": "Hello", "sender": "you"}));
    let (id, at) = (sent.header("webhook-id"), sent.header("webhook-timestamp"));
    assert_eq!(id, "m1");
    let signed = [format!("{id}.{at}.").as_bytes(), &sent.body].concat();
    let signature = format!("v1,{}", STANDARD.encode(hmac(key, &signed)));
    assert_eq!(sent.header("webhook-signature"), signature);
    assert_eq!(sent.header("authorization"), "", "the server's token is not for its webhooks");

    run(&options, &recorder.url, &["message", "own.json"]).await;
    assert_eq!(&recorder.last().body[..], br#"{"conversation_id":"c9",  "text":"As it is"}"#);

    // Slack signs with the secret as written. The secret may be in a file.
    std::fs::write(options.path("secret"), "8f742231b10e\n").unwrap();
    let slack = ["message", "hello.txt", "--via", "slack", "--secret-file", "secret", "--conversation", "D1"];
    assert_eq!(run(&options, &recorder.url, &slack).await.code, 0);
    let sent = recorder.last();
    assert_eq!(sent.path, "/v1/triggers/messenger/slack");
    let at = sent.header("x-slack-request-timestamp");
    let signed = [format!("v0:{at}:").as_bytes(), &sent.body].concat();
    let signature = format!("v0={}", hex(&hmac(b"8f742231b10e", &signed)));
    assert_eq!(sent.header("x-slack-signature"), signature);
    let body: Value = serde_json::from_slice(&sent.body).unwrap();
    assert_eq!((&body["event"]["text"], &body["event"]["channel"]), (&json!("Hello"), &json!("D1")));

    let telegram =
        ["message", "hello.txt", "--via", "telegram", "--secret-file", "secret", "--conversation", "42"];
    assert_eq!(run(&options, &recorder.url, &telegram).await.code, 0);
    let sent = recorder.last();
    assert_eq!(sent.header("x-telegram-bot-api-secret-token"), "8f742231b10e");
    let body: Value = serde_json::from_slice(&sent.body).unwrap();
    assert_eq!((&body["message"]["chat"]["id"], &body["message"]["text"]), (&json!(42), &json!("Hello")));
}

#[tokio::test]
async fn whoever_waits_is_given_the_reply_or_the_question() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| {
        let messages = body["messages"].as_array().unwrap();
        match messages.last().unwrap()["content"].to_string() {
            text if text.contains("ask") => Answer::call("ask_user", json!({"question": "Which colour?"})),
            text if text.contains("fail") => Answer::Error(400),
            _ => Answer::text("Hello."),
        }
    })
    .await;
    let options =
        Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url).env("WAKEFUL_TOKEN", TOKEN);
    let process = options.serve(&database).await;
    let url = process.url();
    let ran = run(&options, &url, &["chat", "Hi", "--wait"]).await;
    assert_eq!((ran.code, ran.out.as_str()), (0, "Hello.\n"), "{}", ran.err);
    let ran = run(&options, &url, &["chat", "ask me", "--conversation", "c2", "--wait", "-o", "json"]).await;
    let told: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(told["sessions"][0]["status"], "waiting_input");
    assert_eq!(told["sessions"][0]["reply"], "Which colour?");
    let ran = run(&options, &url, &["chat", "fail", "--conversation", "c3", "--wait"]).await;
    assert_eq!(ran.code, 1, "{}", ran.err);
    assert!(ran.err.contains("failed"), "{}", ran.err);

    // The server dies while a command waits. The next one answers.
    model.hold();
    let waiting = {
        let (options, url) = (options.clone(), url.clone());
        tokio::spawn(
            async move { run(&options, &url, &["chat", "Hi", "--conversation", "c4", "--wait"]).await },
        )
    };
    let before = model.bodies().len();
    model.asked(before + 1).await;
    process.kill();
    model.release();
    let listen = url.strip_prefix("http://").unwrap();
    let again = options.clone().env("WAKEFUL_SERVER__LISTEN", listen).serve(&database).await;
    let ran = waiting.await.unwrap();
    assert_eq!((ran.code, ran.out.as_str()), (0, "Hello.\n"), "{}", ran.err);
    assert!(again.terminate().success());
}

/// HMAC-SHA256, RFC 2104, written out so that the test does not use the product's code.
fn hmac(key: &[u8], message: &[u8]) -> Vec<u8> {
    let mut block = [0u8; 64];
    block[..key.len()].copy_from_slice(key);
    let inner = Sha256::digest([&block.map(|byte| byte ^ 0x36), message].concat());
    Sha256::digest([&block.map(|byte| byte ^ 0x5c)[..], &inner].concat()).to_vec()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
