//! Every door by which a person's words, a model's, a provider's or an operator's reach the database, with encryption on.

use super::{
    IN_CLEAR, MARK, MASTER, around, bytes_below, files_of_keys, folder_of_keys, found, options, planted, run,
    served, server_of_its_own, shown,
};
use crate::support::client::texts;
use crate::support::{Answer, Client, Database, ModelServer, Options, eventually};
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;

const WHO: &str = "ann@example.com";

/// The planted texts of this test, and where each is planted.
const KEY_OF_MESSAGE: usize = 20;
const MESSAGE: usize = 21;
const FILE_NAME: usize = 22;
const FILE: usize = 23;
const UNKNOWN_TOOL: usize = 24;
const QUOTED_BY_PROVIDER: usize = 25;
const RETRY_REASON: usize = 26;
const QUOTED_WHILE_AWAY: usize = 27;
const REPLY: usize = 28;
const CANCEL_REASON: usize = 29;
const RESOLVED_AS: usize = 30;
const RESOLVE_REASON: usize = 31;
const ARCHIVE_REASON: usize = 32;
const NOTICE_TITLE: usize = 33;
const NOTICE: usize = 34;
const SUBJECT: usize = 35;
const KEY_OF_NEW: usize = 36;
const FORKED_WITH: usize = 37;
const SAID_LATER: usize = 38;
const ALL: std::ops::RangeInclusive<usize> = KEY_OF_MESSAGE..=SAID_LATER;

/// A model that writes a file, asks for a tool that is not there, and whose provider quotes the prompt when it fails.
async fn model() -> ModelServer {
    ModelServer::start(|body, number| {
        let all = body.to_string();
        let last = body["messages"].as_array().unwrap().last().unwrap();
        let asks = last["role"] == "user";
        match crate::support::model::turns_since_user(body) {
            _ if all.contains("In clear") => Answer::text("In clear."),
            _ if asks && last.to_string().contains("Charge me.") => {
                Answer::call("charge", json!({"cents": 5}))
            }
            _ if all.contains("Charge me.") => Answer::text("Charged."),
            _ if asks && last.to_string().contains(&planted(SAID_LATER)) => Answer::text(&planted(REPLY)),
            0 if all.contains(&planted(MESSAGE)) => Answer::call(
                "write_file",
                json!({"path": format!("{}.txt", planted(FILE_NAME)), "content": planted(FILE).repeat(400)}),
            ),
            1 => Answer::call("no_such_tool", json!({"of": planted(UNKNOWN_TOOL)})),
            2 if number == 2 => Answer::Refused(503, format!("no room for {}", planted(QUOTED_WHILE_AWAY))),
            2 if number == 3 => {
                Answer::Refused(400, format!("the prompt {} is refused", planted(QUOTED_BY_PROVIDER)))
            }
            _ => Answer::text(&planted(REPLY)),
        }
    })
    .await
}

async fn post(client: &Client, path: &str, body: Value) -> Value {
    let (status, answer) = client.post(path, &body).await;
    assert!(status.is_success(), "{path}: {answer}");
    answer
}

fn id_of(woken: &Value) -> String {
    woken["session_id"].as_str().unwrap_or_else(|| panic!("{woken}")).to_owned()
}

/// Plants the texts. Returns the sessions, and what the processes logged.
async fn planted_everywhere(
    options: &Options,
    database: &Database,
    model: &ModelServer,
) -> (Vec<String>, String) {
    let (process, client) = served(options, database).await;
    // A chat whose model works with a file, whose provider fails, and that is retried, cancelled and begun anew.
    let message = json!({"text": planted(MESSAGE), "user_id": WHO, "client_key": planted(KEY_OF_MESSAGE)});
    let first = id_of(&post(&client, "/v1/chat/d1/messages", message.clone()).await);
    let failed = client.wait_for(&first, "failed").await;
    assert!(failed["error"].to_string().contains(&planted(QUOTED_BY_PROVIDER)), "{failed}");
    let again = post(&client, "/v1/chat/d1/messages", message).await;
    assert_eq!(id_of(&again), first, "the same key again is the same message");
    let retry = client.post_request(&format!("/v1/sessions/{first}/retry")).header("idempotency-key", "r1");
    let retried = retry.json(&json!({"reason": planted(RETRY_REASON)})).send().await.unwrap();
    assert!(retried.status().is_success());
    let shown = client.wait_for(&first, "completed").await;
    assert!(texts(&shown, "assistant").contains(&planted(REPLY)), "{shown}");
    let asked = model.bodies().len();
    model.hold_from(asked);
    let later = json!({"text": planted(SAID_LATER), "user_id": WHO});
    post(&client, "/v1/chat/d1/messages", later).await;
    model.asked(asked + 1).await;
    post(&client, &format!("/v1/sessions/{first}/cancel"), json!({"reason": planted(CANCEL_REASON)})).await;
    client.wait_for(&first, "cancelled").await;
    model.release();
    let fork = json!({"at": 2, "text": planted(FORKED_WITH), "client_key": "f1", "start": true});
    let forked = id_of(&post(&client, &format!("/v1/sessions/{first}/fork"), fork).await);
    client.wait_for(&forked, "completed").await;
    let new = json!({"client_key": planted(KEY_OF_NEW)});
    let fresh = id_of(&post(&client, "/v1/conversations/d1/new", new.clone()).await);
    assert_eq!(id_of(&post(&client, "/v1/conversations/d1/new", new).await), fresh);
    // A notice of another system.
    let notice = json!({"notice": {"title": planted(NOTICE_TITLE), "body": planted(NOTICE)}, "conversation_id": "d1",
        "user_id": WHO, "client_key": "notice-1"});
    let told = id_of(&post(&client, "/v1/triggers/herald", notice).await);
    client.wait_for(&told, "completed").await;
    // A mail.
    let mail = format!(
        "From: Ann <{WHO}>\r\nTo: agent@example.org\r\nSubject: {}\r\nMessage-ID: <d1@example.com>\r\n\r\nHello.\r\n",
        planted(SUBJECT)
    );
    let mail =
        client.post_request("/v1/triggers/email/raw").header("content-type", "message/rfc822").body(mail);
    let mailed = id_of(&mail.send().await.unwrap().json().await.unwrap());
    client.wait_for(&mailed, "completed").await;
    // A guarded call whose worker dies, and what an operator says of it.
    std::fs::write(options.path("hold-charge"), "").unwrap();
    let charged = json!({"text": "Charge me.", "user_id": WHO});
    let charged = id_of(&post(&client, "/v1/chat/d2/messages", charged).await);
    options.has_effects(1).await;
    let mut log = process.log();
    process.kill();
    std::fs::remove_file(options.path("hold-charge")).unwrap();
    let (process, client) = served(options, database).await;
    let asks = client.wait_for(&charged, "needs_attention").await;
    let call = asks["tool_calls"][0]["call_id"].as_str().unwrap_or_else(|| panic!("{asks}"));
    let happened = json!({"call_id": call, "outcome": "happened", "result": planted(RESOLVED_AS),
        "reason": planted(RESOLVE_REASON)});
    post(&client, &format!("/v1/sessions/{charged}/resolve"), happened.clone()).await;
    post(&client, &format!("/v1/sessions/{charged}/resolve"), happened).await;
    client.wait_for(&charged, "completed").await;
    let archived = json!({"reason": planted(ARCHIVE_REASON)});
    post(&client, &format!("/v1/sessions/{charged}/archive"), archived).await;
    log.push_str(&process.log());
    (vec![first, forked, told, mailed, charged], log)
}

/// A dump of all tables.
async fn dump(database: &Database) -> String {
    let tables = "select tablename::text from pg_tables where schemaname = 'public'";
    let tables: Vec<String> = sqlx::query_scalar(tables).fetch_all(&database.pool).await.unwrap();
    let mut all = String::new();
    for table in tables {
        let rows = AssertSqlSafe(format!("select coalesce(string_agg(t::text, '\n'), '') from {table} t"));
        let rows: String = sqlx::query_scalar(rows).fetch_one(&database.pool).await.unwrap();
        all.push_str(&format!("\n## {table}\n{rows}"));
    }
    all
}

/// The tables in which planted texts stand.
fn tables_with_words(dump: &str) -> Vec<&str> {
    let tables = dump.split("\n## ").filter(|rows| !found(rows.as_bytes()).is_empty());
    tables.filter_map(|rows| rows.lines().next()).collect()
}

#[tokio::test]
async fn by_whatever_door_words_come_they_are_sealed_and_still_read() {
    let (server, database) = server_of_its_own().await;
    let model = model().await;
    let mut options = options(&model, "", MASTER);
    let keys = folder_of_keys(&options);
    options.config = options
        .config
        .replace("\"read_attachment\"", "\"read_attachment\", \"write_file\"")
        .replace("recipients", "on_uncertain = \"needs_attention\"\nrecipients");
    options = options.env("WAKEFUL_ENCRYPTION__KEYS", &keys);
    let (sessions, log) = planted_everywhere(&options, &database, &model).await;

    // People read them.
    let (process, client) = served(&options, &database).await;
    let mut told = shown(&client, &sessions).await;
    for path in ["/v1/audit", "/v1/mails", "/v1/errors"] {
        told.push_str(&client.get(path).await.1.to_string());
    }
    assert!(!told.contains(MARK), "nothing sealed is shown: {}", around(&told));
    let read = found(told.as_bytes());
    let unread: Vec<usize> = ALL.filter(|number| !read.contains(number)).collect();
    // Nothing shows the key of a restart, and a bundle has only its pointer at the file.
    assert_eq!(unread, [KEY_OF_NEW], "the others are read");
    for id in &sessions {
        let (status, verified, said) = run(&options, &database, &["session", "verify", id]).await;
        assert_eq!(status, Some(0), "{verified}{said}");
    }
    let (status, file, said) =
        run(&options, &database, &["session", "files", &sessions[0], "-o", "json"]).await;
    assert!(status == Some(0) && file.contains(&planted(FILE_NAME)), "{file}{said}");

    let (status, checked, said) = run(&options, &database, &["blobs", "verify", "-o", "json"]).await;
    assert_eq!(status, Some(0), "{checked}{said}");
    for id in &sessions {
        let file = options.path(&format!("{id}.jsonl")).display().to_string();
        let (_, _, said) = run(&options, &database, &["session", "export", id, "--file", &file]).await;
        let (status, _, told) = run(&options, &database, &["session", "import", &file]).await;
        assert_eq!(status, Some(0), "{said}{told}");
    }

    // The database does not.
    eventually("the failures to be counted", || async {
        let groups: i64 = database.value("select count(*) from error_groups where $1 <> ''", "x").await;
        (groups > 0).then_some(())
    })
    .await;
    let all = dump(&database).await;
    assert_eq!(tables_with_words(&all), [] as [&str; 0], "{:?}", found(all.as_bytes()));
    sqlx::query("checkpoint").execute(&database.pool).await.unwrap();
    assert_eq!(found(&bytes_below(server.dir())), [] as [usize; 0]);
    drop(process);
    assert!(log.contains("The step failed") && found(log.as_bytes()).is_empty(), "{log}");

    // Once her keys are gone, nothing opens a backup.
    assert!(files_of_keys(&keys) > 0);
    let erase = ["person", "erase", WHO, "--shared", "--yes", "-o", "json"];
    let (status, erased, said) = run(&options, &database, &erase).await;
    assert_eq!(status, Some(0), "{erased}{said}");
    assert_eq!(files_of_keys(&keys), 0, "{erased}");
    let (_process, client) = served(&options, &database).await;
    let (_, audit) = client.get("/v1/audit").await;
    assert!(audit.to_string().contains("[encrypted]"), "{audit}");
    assert_eq!(found(audit.to_string().as_bytes()), [] as [usize; 0]);
    let left = dump(&database).await;
    assert_eq!(found(left.as_bytes()), [] as [usize; 0]);
    assert_eq!(IN_CLEAR, [0]);
}
