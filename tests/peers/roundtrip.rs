//! A mail's way there and back between third-party servers: Python's smtplib (or Postfix) hands a mail over
//! by LMTP, and PyPI's aiosmtpd receives the answer. Python's `email` parses the mails and writes the answers
//! to them.

use super::email_out::Aiosmtpd;
use super::mail::{Postfix, queued};
use crate::support::model::turns_since_user;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, eventually, timeout};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::process::Stdio;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

const DESK: &str = "desk@example.org";
const SUPPORT: &str = "support@example.org";

/// Wakeful between two servers: mail comes in at `lmtp`, and goes out to `out`.
struct Post {
    process: Process,
    out: Aiosmtpd,
    database: Database,
    lmtp: u64,
}

impl Post {
    async fn new(model: &ModelServer) -> Post {
        let (database, out) = (Database::new().await, Aiosmtpd::start("starttls").await);
        let process = Options::new()
            .model("openai/test")
            .config(&out.config("starttls", "sesame", "rsa"))
            .config(&format!("[email.mailboxes.support]\naddress = \"{SUPPORT}\""))
            .env("OPENAI_BASE_URL", &model.url)
            .env("WAKEFUL_EMAIL__THREAD_SECRET", "a secret of the tests")
            .env("WAKEFUL_EMAIL__LMTP_LISTEN", "127.0.0.1:0")
            .serve(&database)
            .await;
        let line: Value = serde_json::from_str(&process.wait_for_log("\"Listening for LMTP\"").await)
            .expect("logs are JSON");
        let lmtp = line["listen"].as_str().and_then(|at| at.rsplit_once(':')?.1.parse().ok());
        Post { process, out, database, lmtp: lmtp.expect("a port") }
    }

    fn client(&self) -> Client {
        self.process.client()
    }

    /// Hands a mail over by LMTP, and returns what smtplib reports.
    async fn post(&self, mail: Value) -> Value {
        post("lmtp", self.lmtp, mail).await
    }

    /// Like `post`, for a mail that must be accepted.
    async fn taken(&self, mail: Value) {
        let said = self.post(mail).await;
        assert_eq!((&said["error"], &said["refused"]), (&Value::Null, &json!({})), "{said}");
    }

    /// Waits until aiosmtpd has `count` mails. Returns the last: as it came, and as Python parses it.
    async fn received(&self, count: usize) -> (Value, Value) {
        let all = eventually(&format!("mail {count} at aiosmtpd"), || async {
            let mails = self.out.mails.lock().unwrap().clone();
            (mails.len() >= count).then_some(mails)
        })
        .await;
        assert_eq!(all.len(), count, "{all:#?}");
        let came = all[count - 1].clone();
        let read = python("read", json!({"mail": came["mail"]})).await;
        (came, read)
    }

    /// (session, conversation, run) of the mail with this Message-ID.
    async fn woken_by(&self, id: &str) -> (String, String, String) {
        sqlx::query_as(
            "select m.session_id, m.conversation_id, i.run_id from mails m
            join session_inbox i on i.session_id = m.session_id and i.client_key = m.message_id
            where m.message_id = $1",
        )
        .bind(id)
        .fetch_one(&self.database.pool)
        .await
        .expect("the mail woke a session")
    }

    async fn count(&self, sql: &'static str) -> i64 {
        self.database.value(sql, "").await
    }
}

/// Runs `mail_client.py`.
async fn python(command: &str, asked: Value) -> Value {
    let peers = std::env::var("WAKEFUL_PEERS").expect("WAKEFUL_PEERS is set by `make test-peers`");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/peers/mail_client.py");
    let mut child = Command::new(format!("{peers}/smtp/bin/python"))
        .args([script, command])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("scripts/setup peers has been run");
    let mut stdin = child.stdin.take().expect("piped");
    stdin.write_all(asked.to_string().as_bytes()).await.expect("it reads");
    drop(stdin);
    let output = tokio::time::timeout(timeout(), child.wait_with_output()).await.expect("it ends").unwrap();
    assert!(output.status.success(), "{command} {asked}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

async fn post(protocol: &str, port: u64, mut mail: Value) -> Value {
    (mail["protocol"], mail["port"]) = (json!(protocol), json!(port));
    python("post", mail).await
}

/// Checks everything that holds for each reply to Ann. Returns its Message-ID without brackets.
fn check(came: &Value, read: &Value, delivery_ids: &BTreeSet<String>) -> String {
    assert_eq!((&came["mail_from"], &came["to"]), (&json!(SUPPORT), &json!(["ann@example.com"])), "{came}");
    assert_eq!((&came["signed"], &came["verified"]), (&json!(true), &json!(true)), "{came}");
    assert_eq!(read["defects"], json!([]), "{came}");
    // The mailbox's address with the name from [email] from.
    assert_eq!(
        (&read["from"], &read["to"]),
        (&json!(format!("Desk <{SUPPORT}>")), &json!("ann@example.com"))
    );
    assert_eq!((&read["cc"], &read["auto_submitted"]), (&Value::Null, &json!("auto-replied")));
    assert_eq!(read["subject"], "Re: Ein Tisch für zwei");
    let token =
        read["reply_to"].as_str().and_then(|to| to.strip_prefix("support+")?.strip_suffix("@example.org"));
    let token = token.unwrap_or_else(|| panic!("no plus-address: {read}"));
    assert!(token.len() == 32 && token.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{token}");
    let sent = read["date"].as_f64().expect("a date");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
    assert!((now - 120.0..now + 2.0).contains(&sent), "{sent} of {now}");
    let id =
        read["message_id"].as_str().and_then(|id| id.strip_prefix('<')?.strip_suffix('>')).expect("an id");
    let delivery_id = id.strip_suffix("@example.org").expect("the mailbox's domain");
    assert!(delivery_id.starts_with("dlv_") && delivery_ids.contains(delivery_id), "{id}: {delivery_ids:?}");
    id.to_owned()
}

async fn delivery_ids(post: &Post) -> BTreeSet<String> {
    let sql = "select delivery_id from deliveries where channel = 'email'";
    sqlx::query_scalar::<_, String>(sql).fetch_all(&post.database.pool).await.unwrap().into_iter().collect()
}

fn ids(ids: &[&str]) -> Value {
    ids.iter().map(|id| format!("<{id}>")).collect()
}

fn trimmed(read: &Value) -> &str {
    read["text"].as_str().expect("a text").trim_end()
}

/// The messages of the last request, as (role, content).
fn last_request(model: &ModelServer) -> Vec<(String, String)> {
    let body: Value = serde_json::from_str(model.bodies().last().unwrap()).unwrap();
    let messages = body["messages"].as_array().unwrap().iter();
    messages
        .map(|one| {
            (one["role"].as_str().unwrap().to_owned(), one["content"].as_str().unwrap_or_default().to_owned())
        })
        .collect()
}

/// A model that numbers its answers by the user messages in its request.
async fn numbering() -> ModelServer {
    ModelServer::start(|body, _| {
        let users = body["messages"].as_array().unwrap().iter().filter(|one| one["role"] == "user").count();
        Answer::text(&format!("Grüße, Antwort {users}."))
    })
    .await
}

#[tokio::test]
#[ignore = "needs aiosmtpd: make test-peers"]
async fn a_mail_by_lmtp_is_answered_in_its_thread_and_so_is_every_answer_to_that() {
    let model = numbering().await;
    let post = Post::new(&model).await;
    post.taken(json!({"id": "m1@example.com", "rcpt": SUPPORT, "text": "Über Mittag?\n.\n..two"})).await;
    let (mut came, mut read) = post.received(1).await;
    let first = post.woken_by("m1@example.com").await;
    let mut thread = vec!["m1@example.com".to_owned()];
    let mut sessions = BTreeSet::from([first.0.clone()]);
    let plus = read["reply_to"].clone();
    for round in 1..=3 {
        let id = check(&came, &read, &delivery_ids(&post).await);
        assert_eq!(trimmed(&read), format!("Grüße, Antwort {round}."));
        assert_eq!(read["reply_to"], plus, "one address a conversation");
        let before: Vec<&str> = thread.iter().map(String::as_str).collect();
        assert_eq!(read["in_reply_to"], ids(&before[before.len() - 1..]), "round {round}");
        assert_eq!(read["references"], ids(&before), "round {round}");
        thread.push(id);
        if round == 3 {
            break;
        }
        // Ann answers as her mail program does: the text that she quotes is not new text.
        let next = format!("m{}@example.com", round + 1);
        post.taken(json!({"id": next, "answers": came["mail"], "text": format!("Frage {}?", round + 1)}))
            .await;
        thread.push(next.clone());
        (came, read) = post.received(round + 1).await;
        let (session, conversation, _) = post.woken_by(&next).await;
        assert_eq!(conversation, first.1, "it joins the conversation");
        assert!(sessions.insert(session), "as a session of its own");
    }
    let asked = last_request(&model);
    let roles: Vec<&str> = asked.iter().map(|(role, _)| role.as_str()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant", "user"]);
    assert!(asked[1].1.ends_with("\n\nÜber Mittag?\n.\n..two"), "{asked:?}");
    assert!(asked[5].1.ends_with("\n\nFrage 3?"), "quoted text is left out: {asked:?}");
    assert_eq!(post.count("select count(*) from conversation_sessions where $1 = ''").await, 3);
    assert!(post.process.terminate().success());
}

#[tokio::test]
#[ignore = "needs aiosmtpd: make test-peers"]
async fn a_question_goes_out_and_the_answer_to_its_plus_address_goes_on_with_the_same_run() {
    let model = ModelServer::start(|body, _| match turns_since_user(body) {
        0 => Answer::call("ask_user", json!({"question": "Für wie viele?"})),
        _ => Answer::text("Reserviert."),
    })
    .await;
    let post = Post::new(&model).await;
    post.taken(json!({"id": "m1@example.com", "rcpt": SUPPORT, "text": "Einen Tisch, bitte."})).await;
    let (question, read) = post.received(1).await;
    check(&question, &read, &delivery_ids(&post).await);
    assert_eq!(trimmed(&read), "Für wie viele?");
    assert_eq!(
        (&read["in_reply_to"], &read["references"]),
        (&ids(&["m1@example.com"]), &ids(&["m1@example.com"]))
    );
    let asking = post.woken_by("m1@example.com").await;
    post.client().wait_for(&asking.0, "waiting_input").await;

    post.taken(json!({"id": "m2@example.com", "answers": question["mail"], "text": "Für vier."})).await;
    let (reply, read) = post.received(2).await;
    check(&reply, &read, &delivery_ids(&post).await);
    assert_eq!(trimmed(&read), "Reserviert.");
    assert_eq!(read["references"][0], "<m1@example.com>", "it is of the thread");
    assert_eq!(post.woken_by("m2@example.com").await, asking, "the same session, conversation and run");
    let session = post.client().wait_for(&asking.0, "completed").await;
    let told = crate::support::client::texts(&session, "tool");
    assert!(told.len() == 1 && told[0].ends_with("\n\nFür vier."), "{told:?}");
    assert_eq!(post.count("select count(*) from conversation_sessions where $1 = ''").await, 1);
    assert!(post.process.terminate().success());
}

#[tokio::test]
#[ignore = "needs aiosmtpd: make test-peers"]
async fn machines_duplicates_and_strangers_cost_no_reply() {
    let model = numbering().await;
    let post = Post::new(&model).await;
    // Mail from a machine is accepted from its server, but never answered.
    for (at, headers) in [
        json!({"Auto-Submitted": "auto-replied"}),
        json!({"Auto-Submitted": "auto-generated; owner-email=\"ann@example.com\""}),
        json!({"Precedence": "bulk"}),
        json!({"List-Id": "<tables.example.com>"}),
    ]
    .into_iter()
    .enumerate()
    {
        let id = format!("machine{at}@example.com");
        post.taken(json!({"id": id, "rcpt": SUPPORT, "text": format!("Away {at}."), "headers": headers}))
            .await;
    }
    assert_eq!(post.count("select count(*) from mails where dropped is not null and $1 = ''").await, 4);
    // Mail for an unknown address is refused at RCPT, and smtplib reports that.
    for nobody in [DESK, "nobody@example.org", "support@example.com"] {
        let said = post.post(json!({"id": "x@example.com", "rcpt": nobody, "text": "Hello?"})).await;
        assert_eq!(said["error"], "SMTPRecipientsRefused", "{said}");
        assert_eq!(said["refused"], json!({nobody: [550, "5.1.1 There is no such mailbox here"]}));
    }
    // Send the same mail twice at once, and again after it was answered.
    let twice = json!({"id": "m1@example.com", "rcpt": SUPPORT, "text": "Once."});
    tokio::join!(post.taken(twice.clone()), post.taken(twice.clone()));
    let (came, read) = post.received(1).await;
    check(&came, &read, &delivery_ids(&post).await);
    post.taken(twice).await;
    // `Auto-Submitted: no` marks a person's mail, so it is answered. If one of the mails above had wrongly
    // started a run, that run would end before this one.
    let no = json!({"Auto-Submitted": "no"});
    post.taken(json!({"id": "m2@example.com", "rcpt": SUPPORT, "text": "Twice.", "headers": no})).await;
    eventually("nothing to be left to do", || async {
        (post.count("select count(*) from jobs where $1 = ''").await == 0).then_some(())
    })
    .await;
    let (came, read) = post.received(2).await;
    check(&came, &read, &delivery_ids(&post).await);
    assert_eq!(read["in_reply_to"], ids(&["m2@example.com"]));
    assert_eq!(post.count("select count(*) from deliveries where $1 = ''").await, 2);
    assert_eq!(
        post.count("select count(*) from mails where $1 = ''").await,
        6,
        "four machines' and two of Ann's"
    );
    assert_eq!(model.bodies().len(), 2, "the other mails caused no model call");
    assert!(post.process.terminate().success());
}

#[tokio::test]
#[ignore = "needs aiosmtpd, Postfix, and root: make test-peers"]
async fn a_mail_and_its_answer_go_through_postfix() {
    // SAFETY: geteuid takes no arguments.
    if unsafe { libc::geteuid() } != 0 {
        println!("Postfix's master needs root: the test was skipped");
        return;
    }
    let model = numbering().await;
    let post = Post::new(&model).await;
    let postfix = Postfix::start(&format!("[127.0.0.1]:{}", post.lmtp)).await;
    let smtp = u64::from(postfix.port);
    let said =
        self::post("smtp", smtp, json!({"id": "m1@example.com", "rcpt": SUPPORT, "text": "Mittags?"})).await;
    assert_eq!(said["error"], Value::Null, "{said}");
    let (came, read) = post.received(1).await;
    let reply = check(&came, &read, &delivery_ids(&post).await);
    assert_eq!(
        (&read["in_reply_to"], &read["references"]),
        (&ids(&["m1@example.com"]), &ids(&["m1@example.com"]))
    );
    // The signed plus address comes through Postfix unchanged.
    let answer = json!({"id": "m2@example.com", "answers": came["mail"], "text": "Um eins?"});
    let said = self::post("smtp", smtp, answer).await;
    assert_eq!((&said["error"], &said["rcpt"]), (&Value::Null, &read["reply_to"]), "{said}");
    let (came, read) = post.received(2).await;
    check(&came, &read, &delivery_ids(&post).await);
    assert_eq!(read["references"], ids(&["m1@example.com", &reply, "m2@example.com"]));
    let (first, second) = (post.woken_by("m1@example.com").await, post.woken_by("m2@example.com").await);
    assert!(first.1 == second.1 && first.0 != second.0, "{first:?} {second:?}");
    eventually("Postfix to keep none", || async { (queued(&postfix) == 0).then_some(()) }).await;
    assert!(post.process.terminate().success());
}
