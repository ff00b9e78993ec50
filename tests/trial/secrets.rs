//! Forty planted texts, and all the places where they do not belong.

use super::is_whole;
use crate::support::checker::dump;
use crate::support::messengers::{slack_signature, webhook_signature};
use crate::support::{Answer, Client, Database, ModelServer, Options, eventually};
use axum::Router;
use axum::body::Bytes;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Planted text number `number`.
fn planted(number: usize) -> String {
    format!("planted{number:02}x7Qm3vTz")
}

/// A secret of Standard Webhooks.
fn whsec(number: usize) -> String {
    format!("whsec_{}", STANDARD.encode(format!("{}-and-more-bytes", planted(number))))
}

/// The configuration's secrets are 1 to 16, and credentials that strangers tried are 17 to 20: they belong nowhere. The rest
/// is what people, models and tools said.
const SAID: usize = 21;
const ALL: usize = 40;

/// The tables that hold what was said.
const OF_TEXTS: [&str; 12] = [
    // The user that a conversation belongs to.
    "conversation_counters",
    "conversation_records",
    "session_seed_messages",
    "session_inbox",
    "session_events",
    "conversation_sessions",
    "session_runs",
    "tool_calls",
    "deliveries",
    "mails",
    "blobs",
    "schedules",
];

/// A collector of traces that keeps all that it gets.
fn collector() -> (String, Arc<Mutex<Vec<u8>>>) {
    let listener = crate::support::servers::listen();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let kept: Arc<Mutex<Vec<u8>>> = Arc::default();
    let into = Arc::clone(&kept);
    let keep = move |body: Bytes| {
        into.lock().unwrap().extend_from_slice(&body);
        async {}
    };
    let router = Router::new().fallback(keep);
    drop(crate::support::servers::runtime().spawn(async move { axum::serve(listener, router).await }));
    (url, kept)
}

/// The forms in which a planted text could be found.
fn forms(number: usize) -> Vec<String> {
    let text = planted(number);
    vec![hex::encode(&text), STANDARD.encode(&text).trim_end_matches('=')[..12].to_owned(), text]
}

fn found_in(text: &str, numbers: std::ops::RangeInclusive<usize>) -> Vec<usize> {
    numbers.filter(|&number| forms(number).iter().any(|form| text.contains(form))).collect()
}

fn options(model: &ModelServer, traces: &str) -> Options {
    let config = format!(
        "[messenger.webhook]\nagent = \"default\"\n[messenger.slack]\ntoken = \"xoxb-{}\"\nbase_url = \"http://127.0.0.1:1\"\n\
         [messenger.telegram]\ntoken = \"1:{}\"\nallow_users = [\"*\"]\nbase_url = \"http://127.0.0.1:1\"\n\
         [email.postmark]\nuser = \"u\"\npasswords = [\"{}\"]\n[email.mailgun]\nsigning_keys = [\"{}\"]",
        planted(7),
        planted(8),
        planted(9),
        planted(10)
    );
    Options::new()
        .model("openai/test")
        .config(&config)
        .env("OPENAI_BASE_URL", &model.url)
        .env("OPENAI_API_KEY", planted(1))
        .env("ANTHROPIC_API_KEY", planted(2))
        .env("WAKEFUL_TOKEN", planted(3))
        .env("WAKEFUL_SERVER__INTERNAL_TOKENS", format!("{},{}", planted(4), planted(5)))
        .env("WAKEFUL_EMAIL__THREAD_SECRET", planted(6))
        .env("WAKEFUL_MESSENGER__SLACK__SIGNING_SECRETS", planted(11))
        .env("WAKEFUL_MESSENGER__TELEGRAM__WEBHOOK_SECRETS", planted(12))
        .env("WAKEFUL_MESSENGER__WEBHOOK__SECRETS", whsec(13))
        .env("WAKEFUL_EMAIL__RAW_SECRETS", format!("{},{}", whsec(14), whsec(15)))
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", traces)
}

/// Everything comes in that can come in. Returns what the server answered to bad requests.
async fn happen(client: &Client, database: &Database) -> String {
    let bearer = planted(3);
    let post = |path: &str, body: String| client.post_request(path).bearer_auth(&bearer).body(body);
    let mut answers = String::new();
    // What was said, by every way in.
    let chat = json!({"text": planted(21), "user_id": planted(22), "client_key": planted(23)}).to_string();
    let mail = format!(
        "From: {} <ann@example.com>\r\nTo: agent@example.org\r\nSubject: {}\r\nMessage-ID: <p@example.com>\r\nX-Odd: {}\r\n\
         MIME-Version: 1.0\r\nContent-Type: multipart/mixed; boundary=x\r\n\r\n--x\r\nContent-Type: text/plain\r\n\r\n{}\r\n\
         --x\r\nContent-Type: text/plain\r\nContent-Disposition: attachment; filename=\"{}.txt\"\r\n\r\n{}\r\n--x--\r\n",
        planted(29),
        planted(30),
        planted(31),
        planted(32),
        planted(33),
        planted(34)
    );
    let at = chrono::Utc::now().timestamp().to_string();
    let hook = json!({"conversation_id": "w1", "text": planted(35), "sender": "ann"}).to_string();
    let slack = json!({"type": "event_callback", "team_id": "T1", "event_id": "E1", "authorizations": [{"user_id": "UB"}],
        "event": {"type": "message", "channel": "C1", "channel_type": "im", "user": "U1", "text": planted(36), "ts": "1.2"}})
    .to_string();
    let telegram = json!({"update_id": 1, "message": {"message_id": 1, "date": 1, "text": planted(37),
        "from": {"id": 5, "is_bot": false}, "chat": {"id": 7, "type": "private"}}})
    .to_string();
    let notice =
        json!({"notice": {"title": planted(38), "body": planted(39)}, "conversation_id": "n1"}).to_string();
    let schedule = json!({"name": "s", "cron": "0 0 1 1 *", "prompt": planted(40)}).to_string();
    let signed = |path: &str, body: &str, secret: &str, id: &str| {
        client
            .post_request(path)
            .header("content-type", "message/rfc822")
            .header("webhook-signature", webhook_signature(secret, id, &at, body))
            .header("webhook-timestamp", &at)
            .header("webhook-id", id)
            .body(body.to_owned())
    };
    let good = vec![
        post("/v1/chat/c1/messages", chat.clone()),
        signed("/v1/triggers/email/raw", &mail, &whsec(14), "m1"),
        signed("/v1/triggers/messenger/webhook", &hook, &whsec(13), "m2"),
        client
            .post_request("/v1/triggers/messenger/slack")
            .header("X-Slack-Signature", slack_signature(&planted(11), &at, &slack))
            .header("X-Slack-Request-Timestamp", &at)
            .body(slack),
        client
            .post_request("/v1/triggers/messenger/telegram")
            .header("X-Telegram-Bot-Api-Secret-Token", planted(12))
            .body(telegram),
        post("/v1/triggers/herald", notice),
        post("/v1/schedules", schedule),
    ];
    for (number, request) in good.into_iter().enumerate() {
        let answer = request.send().await.unwrap();
        let (status, text) = (answer.status(), answer.text().await.unwrap());
        assert!(status.is_success(), "way {number}: {status} {text}");
        answers.push_str(&text);
    }
    // Credentials that do not fit, and bodies that cannot be read.
    let bad = vec![
        client.post_request("/v1/chat/c1/messages").bearer_auth(planted(17)).body(chat),
        client.get_request("/v1/sessions/sess_none/export").header("X-Internal-Token", planted(18)),
        client
            .post_request("/v1/triggers/messenger/telegram")
            .header("X-Telegram-Bot-Api-Secret-Token", planted(19))
            .body("{}"),
        signed("/v1/triggers/email/raw", &mail, &whsec(20), "m3"),
        post("/v1/chat/c1/messages", format!("{{\"text\": \"{}\", ", planted(21))),
        post("/v1/sessions/import", format!("{{\"{}\": 1}}\n", planted(21))),
        post("/v1/schedules", json!({"name": "s2", "cron": planted(40), "prompt": "p"}).to_string()),
    ];
    for (number, request) in bad.into_iter().enumerate() {
        let answer = request.send().await.unwrap();
        assert!(answer.status().is_client_error(), "bad request {number}: {}", answer.status());
        answers.push_str(&answer.text().await.unwrap());
    }
    eventually("all runs to end", || async {
        let open: i64 = database
            .value(
                "select count(*) from session_runs where status not in ('completed', 'failed') and $1 <> ''",
                "x",
            )
            .await;
        (open == 0).then_some(())
    })
    .await;
    answers
}

#[tokio::test]
async fn planted_secrets_are_only_where_they_belong() {
    let (database, (traces, kept)) = (Database::new().await, collector());
    let model = ModelServer::start(|body, _| match crate::support::model::turns_since_user(body) {
        0 => Answer::call(
            "write_file",
            json!({"path": format!("{}.txt", planted(24)), "content": planted(25)}),
        ),
        // It does not fit the schema.
        1 => Answer::call("reserve", json!({"persons": planted(26)})),
        2 => Answer::call("read_file", json!({"path": format!("{}/none", planted(27))})),
        _ => Answer::text(&format!("I say {}.", planted(28))),
    })
    .await;
    let mut url: reqwest::Url = database.url.parse().unwrap();
    url.set_password(Some(&planted(16))).unwrap();
    let options = options(&model, &traces);
    let process = options.spawn(url.as_str());
    process.wait_for_log("\"Listening\"").await;
    let client = process.client();
    let answers = happen(&client, &database).await;

    let tables: BTreeMap<String, Vec<Value>> = dump(&database).await;
    let text_of = |table: &str| tables[table].iter().map(ToString::to_string).collect::<String>();
    let all_tables: String = tables.keys().map(|table| text_of(table)).collect();
    // What was said is there, so the search finds what it looks for.
    let said = found_in(&all_tables, SAID..=ALL);
    assert!(said.len() >= 18, "only these were kept: {said:?}");
    assert_eq!(found_in(&all_tables, 1..=SAID - 1), Vec::<usize>::new(), "credentials in a table");
    for table in tables.keys().filter(|table| !OF_TEXTS.contains(&table.as_str())) {
        assert_eq!(found_in(&text_of(table), 1..=ALL), Vec::<usize>::new(), "in the table {table}");
    }
    assert_eq!(found_in(&answers, 1..=SAID - 1), Vec::<usize>::new(), "credentials in an answer: {answers}");

    let sessions = sqlx::query_scalar::<_, String>("select session_id from conversation_sessions");
    for id in sessions.fetch_all(&database.pool).await.unwrap() {
        let export = async |query: &str| {
            let request = client.get_request(&format!("/v1/sessions/{id}/export{query}"));
            request.header("X-Internal-Token", planted(4)).send().await.unwrap().text().await.unwrap()
        };
        assert_eq!(
            found_in(&export("").await, 1..=SAID - 1),
            Vec::<usize>::new(),
            "credentials in an export"
        );
        let redacted = export("?redact=true").await;
        assert!(redacted.contains("\"section\"") || redacted.len() > 500, "{redacted}");
        assert_eq!(found_in(&redacted, 1..=ALL), Vec::<usize>::new(), "in a redacted export of {id}");
        let shown = client.get_request(&format!("/v1/sessions/{id}")).bearer_auth(planted(3));
        let shown = shown.send().await.unwrap().text().await.unwrap();
        assert_eq!(found_in(&shown, 1..=SAID - 1), Vec::<usize>::new(), "credentials in an answer");
    }
    let doctor = Options { args: vec!["doctor".to_owned()], ..options.clone() }.spawn(url.as_str());
    let (_, doctor) = doctor.ended().await;
    let told = doctor.output() + &doctor.log();
    assert_eq!(found_in(&told, 1..=ALL), Vec::<usize>::new(), "doctor says {told}");

    is_whole(&process);
    let (log, output) = (process.log(), process.output());
    process.terminate();
    assert!(log.contains("c1") || log.len() > 1000, "the log is read");
    let lines: Vec<&str> = log.lines().filter(|line| !found_in(line, 1..=ALL).is_empty()).take(5).collect();
    assert!(lines.is_empty(), "in the log: {lines:#?}");
    assert_eq!(found_in(&output, 1..=ALL), Vec::<usize>::new(), "on stdout");
    let traced = String::from_utf8_lossy(&kept.lock().unwrap()).into_owned();
    assert!(traced.contains("execute_tool"), "the traces came");
    assert_eq!(found_in(&traced, 1..=ALL), Vec::<usize>::new(), "in a trace");
}
