//! Mail goes out by SMTP: what arrives, what is refused, what stays uncertain, and what bounces. K12 to K15
//! of the crash matrix for a channel without idempotency keys.

mod resend;

use crate::support::checker::Traces;
use crate::support::smtp::Mail;
use crate::support::world::tools;
use crate::support::{
    Answer, Client, Database, ModelServer, Options, Process, Program, SmtpServer, eventually,
};
use serde_json::{Value, json};
use wakeful_channels::email::bounce;
use wakeful_store::Store;
use wakeful_store::bounce::Noted;
use wakeful_store::wake::{Continues, NewMessage, NewSession};
use wakeful_workflow::policy::{ReplyRoute, SessionPolicy};
use wakeful_workflow::record::Role;
use wakeful_workflow::seed::Seed;

/// A world whose mail goes out by an SMTP server. A chat message that begins with `Mail ` makes the agent
/// compose a mail to the addresses in it. A session opened by a mail replies by its reply route.
struct Post {
    database: Database,
    model: ModelServer,
    server: SmtpServer,
    options: Options,
}

impl Post {
    async fn new() -> Post {
        let model = ModelServer::start(|body, _| {
            let messages = body["messages"].as_array().unwrap();
            // In the request, a note about the agent's mail may follow the user's message. Skip such notes.
            let said = messages.iter().rev().filter(|message| message["role"] == "user");
            let mut said = said.map(|message| message["content"].as_str().unwrap());
            let asked = said.find(|text| !text.starts_with(TOLD)).unwrap();
            match asked.strip_prefix("Mail ") {
                Some(to) if crate::support::model::turns_since_user(body) == 0 => {
                    let to: Vec<&str> = to.split(' ').collect();
                    let mail = json!({"to": to, "subject": "Grüße", "body": "As asked.\n.\nBye"});
                    Answer::call("compose_email", mail)
                }
                _ => Answer::text("It is on its way."),
            }
        })
        .await;
        let server = SmtpServer::start().await;
        let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
        let options = options.config(&server.config());
        Post { database: Database::new().await, model, server, options }
    }

    async fn serve(&self) -> Process {
        self.options.serve(&self.database).await
    }

    /// Asks for a mail by chat, and waits for the run's end.
    async fn ask(&self, client: &Client, text: &str) -> String {
        let answer = client.chat("office", text).await;
        let id = answer["session_id"].as_str().unwrap().to_owned();
        client.wait_for(&id, "completed").await;
        id
    }

    /// Ann's mail arrives, in a session of its own in the conversation `thread`.
    async fn mail_comes_in(&self, store: &Store, number: usize, text: &str) -> String {
        let (mail, before) = (format!("<m{number}@example.com>"), format!("<m{}@example.com>", number - 1));
        let to = json!({
            "from": "Front Desk <front@example.org>", "to": ["ann@example.com"], "cc": ["bob@example.com"],
            "subject": "Re: Your table", "in_reply_to": mail, "references": [before, mail],
            "reply_to": "front+t1.sig@example.org",
        });
        let policy = SessionPolicy {
            reply: Some(ReplyRoute { channel: "email".to_owned(), to, split_at: None }),
            ..SessionPolicy::default()
        };
        let new = NewSession {
            space_id: "default".to_owned(),
            mailbox_id: "default".to_owned(),
            conversation_id: "default/thread".to_owned(),
            trigger_type: "email".to_owned(),
            trigger_id: mail,
            continues: Continues::Trigger,
            agent: "default".to_owned(),
            model_id: "openai/test".to_owned(),
            model_context_window: 128_000,
            tools: tools(),
            policy,
            repository_id: None,
            seeds: vec![Seed { role: Role::System, content: "You are a test.".to_owned(), is_new: true }],
        };
        let message = NewMessage {
            client_key: None,
            text: text.to_owned(),
            sender: Some("ann@example.com".to_owned()),
            trace_context: None,
            attachments: Vec::new(),
        };
        store.wake(&new, &message).await.unwrap().session_id
    }

    async fn is_done(&self) {
        eventually("every job to end", || async {
            let jobs: i64 = self.database.value("select count(*) from jobs where $1 <> ''", "all").await;
            (jobs == 0).then_some(())
        })
        .await;
    }

    /// The outbox: (id, status, last_error), in order.
    async fn outbox(&self) -> Vec<(String, String, Option<String>)> {
        sqlx::query_as("select delivery_id, status, last_error from deliveries order by ordinal")
            .fetch_all(&self.database.pool)
            .await
            .unwrap()
    }

    async fn statuses(&self) -> Vec<String> {
        self.outbox().await.into_iter().map(|(_, status, _)| status).collect()
    }

    /// The journal's entries about deliveries.
    async fn journal(&self, session_id: &str) -> Vec<Value> {
        let traces = Traces::of(&self.database, session_id).await;
        traces.events.into_iter().filter(|event| event["payload"]["delivery_id"].is_string()).collect()
    }

    fn cli(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn run(&self, args: &[&str]) -> std::process::Output {
        let mut command = Program::command(self.options.dir.path());
        command.args(args).env("DATABASE_URL", &self.database.url).env("WAKEFUL_LOG", "error");
        command.output().unwrap()
    }

    /// The body of the last request to the model.
    fn last_request(&self) -> String {
        self.model.bodies().last().unwrap().clone()
    }
}

const TOLD: &str = "[A note of the system, not of a person]";

#[tokio::test]
async fn a_reply_arrives_in_its_thread_and_a_mail_to_somebody_else_outside_of_it() {
    let post = Post::new().await;
    let store = post.database.store().await;
    let process = post.serve().await;
    let session = post.mail_comes_in(&store, 2, "A table for two, please.").await;
    process.client().wait_for(&session, "completed").await;
    post.is_done().await;
    let [mail] = post.server.mails().try_into().unwrap();
    let (id, status, _) = post.outbox().await.remove(0);
    assert_eq!(status, "sent");
    assert_eq!(
        (mail.from.as_str(), mail.to.as_slice()),
        ("front@example.org", &["ann@example.com".to_owned(), "bob@example.com".to_owned()][..])
    );
    for (name, value) in [
        ("From", "\"Front Desk\" <front@example.org>"),
        ("To", "ann@example.com"),
        ("Cc", "bob@example.com"),
        ("Subject", "Re: Your table"),
        ("Message-ID", &format!("<{id}@example.org>")),
        ("In-Reply-To", "<m2@example.com>"),
        ("References", "<m1@example.com> <m2@example.com>"),
        ("Reply-To", "front+t1.sig@example.org"),
        ("Auto-Submitted", "auto-replied"),
    ] {
        assert_eq!(
            mail.header(name).as_deref().map(|text| text.replace('"', "")),
            Some(value.replace('"', "")),
            "{}",
            mail.data
        );
    }
    assert_eq!(mail.body().trim_end(), "It is on its way.");
    let shown = process.client().session(&session).await;
    assert!(shown["deliveries"][0]["receipt"]["smtp"].as_str().unwrap().starts_with("250"), "{shown}");

    // In Ann's thread, a mail to Eve does not belong to the thread.
    let session = post.mail_comes_in(&store, 3, "Mail eve@example.net").await;
    process.client().wait_for(&session, "completed").await;
    post.is_done().await;
    let mail = post.server.mails().into_iter().find(|mail| mail.to == ["eve@example.net"]).unwrap();
    assert_eq!((mail.header("References"), mail.header("Reply-To")), (None, None));
    assert_eq!(mail.header("Auto-Submitted").as_deref(), Some("auto-generated"));
    // A line with a single dot is text, not the end of the mail.
    assert!(decoded(&mail).contains("As asked.\r\n.\r\nBye"), "{}", mail.data);
    assert!(process.terminate().success());
}

/// The body, where it is quoted-printable of plain letters.
fn decoded(mail: &Mail) -> String {
    mail.body().replace("=\r\n", "").replace("=2E", ".")
}

#[tokio::test]
async fn k12_k13_k14_a_kill_around_a_send_sends_once_or_is_uncertain_and_never_twice() {
    // (failpoint, mails that arrived, how the delivery ends)
    let table = [
        ("K12_claim=1*return", 1, "sent"),
        ("K12=1*return", 0, "uncertain"),
        ("K13=1*return", 1, "uncertain"),
        ("K14=1*return", 1, "sent"),
    ];
    for (failpoint, arrived, status) in table {
        let post = Post::new().await;
        let process = post.options.clone().env("FAILPOINTS", failpoint).serve(&post.database).await;
        let answer = process.client().chat("office", "Mail ann@example.com").await;
        let id = answer["session_id"].as_str().unwrap().to_owned();
        let (ended, process) = process.ended().await;
        assert!(!ended.success() && process.log().contains("failpoint"), "{}", process.log());
        let process = post.serve().await;
        process.client().wait_for(&id, "completed").await;
        post.is_done().await;
        assert_eq!(post.server.mails().len(), arrived, "{failpoint}");
        assert_eq!(post.statuses().await, [status], "{failpoint}");
        // A later mail is sent. The one that was cut off is not sent again.
        post.ask(&process.client(), "Mail bob@example.com").await;
        post.is_done().await;
        let to: Vec<String> = post.server.mails().into_iter().flat_map(|mail| mail.to).collect();
        assert_eq!(to.iter().filter(|to| *to == "ann@example.com").count(), arrived, "{failpoint}: {to:?}");
        assert_eq!(to.last().unwrap(), "bob@example.com");
        assert!(process.terminate().success());
    }
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn a_kill_at_every_word_of_smtp_sends_at_most_once() {
    // (the line at which the server falls silent and the process dies, mails that arrived)
    for (line, arrived) in
        [("GREETING", 0), ("EHLO", 0), ("MAIL", 0), ("RCPT", 0), ("DATA", 0), (".", 1), ("QUIT", 1)]
    {
        let post = Post::new().await;
        post.server.answers(line, "hold");
        let process = post.serve().await;
        let answer = process.client().chat("office", "Mail ann@example.com").await;
        let id = answer["session_id"].as_str().unwrap().to_owned();
        post.server.wait_for_hold().await;
        process.kill();
        post.server.is_well();
        let process = post.serve().await;
        process.client().wait_for(&id, "completed").await;
        post.is_done().await;
        assert_eq!(post.server.mails().len(), arrived, "{line}");
        let statuses = post.statuses().await;
        // After the server's answer, the process may commit `sent` before it dies.
        assert!(
            statuses == ["uncertain"] || (line == "QUIT" && statuses == ["sent"]),
            "{line}: {statuses:?}"
        );
        let why = post.cli(&["session", "why", &id]);
        assert_eq!(
            why.contains("Nobody knows whether a message by email was sent"),
            statuses == ["uncertain"],
            "{why}"
        );
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn every_answer_of_the_server_is_one_outcome() {
    // (the line, its answer, how the delivery ends, the part of the answer that is kept, mails that arrive)
    let table = [
        ("MAIL", "550 5.7.1 Not from you", "failed", "550 5.7.1 Not from you", 0),
        ("RCPT", "550 5.1.1 No such user", "failed", "550 5.1.1 No such user", 0),
        ("DATA", "554 5.3.4 Too large", "failed", "554 5.3.4 Too large", 0),
        (".", "554 5.7.1 Spam", "failed", "554 5.7.1 Spam", 0),
        // The server took the mail, and its answer was lost.
        (".", "drop", "uncertain", "no answer came", 1),
    ];
    let post = Post::new().await;
    let process = post.serve().await;
    let client = process.client();
    for (place, (line, answer, status, words, arrived)) in table.into_iter().enumerate() {
        post.server.answers(line, answer);
        let before = post.server.mails().len();
        let id = post.ask(&client, "Mail ann@example.com").await;
        post.is_done().await;
        post.server.is_well();
        let (delivery, ended, error) = post.outbox().await.remove(place);
        assert_eq!(
            (ended.as_str(), post.server.mails().len() - before),
            (status, arrived),
            "{line} {answer}"
        );
        assert!(error.as_deref().unwrap_or_default().contains(words), "{line} {answer}: {error:?}");
        let last = post
            .journal(&id)
            .await
            .into_iter()
            .rfind(|event| event["payload"]["delivery_id"] == delivery.as_str());
        assert_eq!(last.unwrap()["payload"]["status"], status);
    }
    // The agent is told of failures once, with its next message. Uncertain mail is a question for an
    // operator.
    let told = post.last_request();
    assert_eq!(told.matches("was not sent to anybody").count(), 4, "{told}");
    assert!(told.contains("554 5.7.1 Spam"), "{told}");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn what_may_pass_is_tried_again_and_arrives_once() {
    for (line, answer) in [
        ("GREETING", "421 4.3.2 Too busy"),
        ("GREETING", "drop"),
        ("MAIL", "451 4.3.0 Later"),
        ("RCPT", "450 4.2.0 Greylisted"),
        ("DATA", "drop"),
        (".", "451 4.3.0 Later"),
    ] {
        let post = Post::new().await;
        post.server.answers(line, answer);
        let process = post.serve().await;
        let id = post.ask(&process.client(), "Mail ann@example.com").await;
        eventually("the first attempt to fail", || async {
            let sql = "select count(*) from jobs where kind = 'deliver' and last_error <> $1";
            (post.database.value::<i64>(sql, "").await == 1).then_some(())
        })
        .await;
        post.server.is_well();
        post.is_done().await;
        assert_eq!(post.statuses().await, ["sent"], "{line} {answer}");
        assert_eq!(post.server.mails().len(), 1, "{line} {answer}");
        let [sent] = post.journal(&id).await.try_into().unwrap();
        assert_eq!(sent["type"], "GEN_SENT");
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn whoever_is_refused_beside_others_is_shown_to_operator_and_agent() {
    let post = Post::new().await;
    post.server.answers("RCPT TO:<bob@example.com>", "550 5.1.1 No such user");
    let process = post.serve().await;
    let client = process.client();
    let id = post.ask(&client, "Mail ann@example.com bob@example.com").await;
    post.is_done().await;
    let [mail] = post.server.mails().try_into().unwrap();
    assert_eq!(mail.to, ["ann@example.com"]);
    assert_eq!(post.statuses().await, ["sent"]);
    let shown = client.session(&id).await;
    let delivery = &shown["deliveries"][0];
    assert_eq!(delivery["receipt"]["refused"][0]["address"], "bob@example.com", "{delivery}");
    assert_eq!(delivery["undelivered"][0]["reason"], "550 5.1.1 No such user", "{delivery}");
    let types: Vec<String> =
        post.journal(&id).await.iter().map(|event| event["type"].as_str().unwrap().to_owned()).collect();
    assert_eq!(types, ["GEN_SENT", "DELIVERY_BOUNCED"]);
    assert!(post.cli(&["session", "show", &id]).contains("bob@example.com refused (550 5.1.1 No such user)"));
    let why = post.cli(&["session", "why", &id]);
    assert!(why.contains("did not reach bob@example.com") && why.contains("Correct the address"), "{why}");

    // The agent is told with the next message, once.
    assert!(!post.last_request().contains(TOLD));
    post.ask(&client, "Hello?").await;
    let told = post.last_request();
    assert!(told.contains(TOLD) && told.contains("bob@example.com: refused by the mail server"), "{told}");
    post.ask(&client, "And now?").await;
    assert_eq!(post.last_request().matches(TOLD).count(), 1);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_bounce_twice_is_one_and_the_thread_s_next_run_knows_of_it() {
    let post = Post::new().await;
    let store = post.database.store().await;
    let process = post.serve().await;
    let client = process.client();
    let session = post.mail_comes_in(&store, 2, "A table for two, please.").await;
    client.wait_for(&session, "completed").await;
    post.is_done().await;
    let [mail] = post.server.mails().try_into().unwrap();
    let report = format!(
        "Content-Type: multipart/report; report-type=delivery-status; boundary=b\r\n\r\n--b\r\n\
         Content-Type: message/delivery-status\r\n\r\nReporting-MTA: dns; mx.example.net\r\n\r\n\
         Final-Recipient: rfc822; bob@example.com\r\nAction: failed\r\nStatus: 5.2.2\r\n\
         Diagnostic-Code: smtp; 552 5.2.2 Mailbox full\r\n\r\n--b\r\nContent-Type: message/rfc822\r\n\r\n{}\r\n--b--\r\n",
        mail.data
    );
    let [bounce] = bounce::read(report.as_bytes()).try_into().unwrap();
    assert_eq!(bounce.delivery_id, post.outbox().await[0].0);
    let note = |recipient: &'static str| {
        store.note_bounce(&bounce.delivery_id, recipient, &bounce.status, &bounce.diagnostic)
    };
    assert_eq!(note("bob@example.com").await.unwrap(), Noted::New { session_id: session.clone() });
    assert_eq!(note("Bob@Example.com").await.unwrap(), Noted::Known);
    assert_eq!(note("eve@example.net").await.unwrap(), Noted::NotOurs);
    assert_eq!(store.note_bounce("dlv_none", "bob@example.com", "5", "x").await.unwrap(), Noted::NotOurs);
    let bounced: Vec<Value> = post
        .journal(&session)
        .await
        .into_iter()
        .filter(|event| event["type"] == "DELIVERY_BOUNCED")
        .map(|event| event["payload"].clone())
        .collect();
    let expected = json!({"delivery_id": bounce.delivery_id, "channel": "email", "recipient": "bob@example.com",
        "how": "bounced", "status": "5.2.2", "reason": "552 5.2.2 Mailbox full"});
    assert_eq!(bounced, [expected]);
    assert!(post.cli(&["session", "why", &session]).contains("did not reach bob@example.com: it came back"));
    assert!(
        post.cli(&["session", "show", &session]).contains("bob@example.com bounced (552 5.2.2 Mailbox full)")
    );

    // Another mail of the thread opens another session of the same conversation. A bounce wakes no session.
    let runs: i64 =
        post.database.value("select count(*) from session_runs where session_id = $1", &session).await;
    assert_eq!(runs, 1);
    let next = post.mail_comes_in(&store, 3, "Thanks.").await;
    client.wait_for(&next, "completed").await;
    let told = post.last_request();
    assert!(told.contains("bob@example.com: came back (5.2.2)"), "{told}");
    let shown = client.session(&next).await;
    assert_eq!(shown["runs"][0]["prompt"], "Thanks.", "a note is not a run's prompt");

    // The chain's sessions, and its history with how each mail ended.
    let (_, sessions) = client.get("/v1/conversations/thread/sessions").await;
    assert_eq!(sessions["items"].as_array().unwrap().len(), 2);
    post.is_done().await;
    let (status, whole) = client.get("/v1/conversations/thread/history").await;
    assert_eq!(status.as_u16(), 200, "{whole}");
    let items = whole["items"].as_array().unwrap();
    let kinds = |kind: &str| items.iter().filter(|item| item["type"] == kind).count();
    assert_eq!(
        (kinds("session"), kinds("message"), kinds("reply"), kinds("delivery")),
        (2, 3, 2, 2),
        "{whole}"
    );
    let first = items.iter().rfind(|item| item["type"] == "delivery").unwrap();
    assert_eq!((&first["status"], &first["undelivered"][0]["how"]), (&json!("sent"), &json!("bounced")));
    let totals = &whole["totals"];
    assert_eq!(
        (&totals["sessions"], &totals["deliveries_sent"], &totals["deliveries_undelivered"]),
        (&json!(2), &json!(2), &json!(1))
    );
    // In pages the list is the same.
    let (mut paged, mut cursor) = (Vec::new(), String::new());
    loop {
        let (_, page) = client.get(&format!("/v1/conversations/thread/history?limit=2{cursor}")).await;
        paged.extend(page["items"].as_array().unwrap().clone());
        let Some(next) = page["next"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    assert_eq!(&paged, items);
    assert_eq!(client.get("/v1/conversations/thread/history?cursor=x").await.0.as_u16(), 400);
    assert_eq!(client.get("/v1/conversations/none/history").await.0.as_u16(), 404);
    let text = post.cli(&["conversation", "history", "thread"]);
    assert!(text.contains("bob@example.com bounced"), "{text}");
    let lines = post.cli(&["conversation", "-o", "json", "history", "thread"]);
    assert_eq!(
        serde_json::from_str::<Value>(&lines).unwrap().as_array().map(Vec::len),
        Some(items.len()),
        "{lines}"
    );
    assert!(post.cli(&["conversation", "sessions", "thread"]).contains(&next));
    assert_eq!(post.run(&["conversation", "history", "none"]).status.code(), Some(3));
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_bounce_is_heard_at_the_doors_of_mail_and_one_that_is_only_late_is_none() {
    let mut post = Post::new().await;
    let postmark = "\n[email.postmark]\nuser = \"wakeful\"\npasswords = [\"postmark-secret\"]\n";
    post.options = post.options.config(postmark);
    let process = post.serve().await;
    let client = process.client();
    post.ask(&client, "Mail ann@example.com bob@example.com").await;
    post.is_done().await;
    let (id, ..) = post.outbox().await.remove(0);
    let missed = async || -> Vec<String> {
        let sql = "select undelivered from deliveries where delivery_id = $1";
        let undelivered: Value = post.database.value(sql, &id).await;
        let each = undelivered.as_array().unwrap().iter();
        each.map(|one| one["recipient"].as_str().unwrap().to_owned()).collect()
    };
    let report = |action: &str| {
        let text = format!(
            "From: MAILER-DAEMON@example.net\r\nTo: front@example.org\r\nReturn-Path: <>\r\nMessage-ID: <{action}@example.net>\r\n\
             Content-Type: multipart/report; report-type=delivery-status; boundary=b\r\n\r\n--b\r\n\
             Content-Type: message/delivery-status\r\n\r\nReporting-MTA: dns; mx.example.net\r\n\r\n\
             Final-Recipient: rfc822; ann@example.com\r\nAction: {action}\r\nStatus: 5.2.2\r\n\r\n--b\r\n\
             Content-Type: message/rfc822\r\n\r\nMessage-ID: <{id}@example.org>\r\n\r\nHi\r\n--b--\r\n"
        );
        client.post_request("/v1/triggers/email/raw").header("content-type", "message/rfc822").body(text)
    };
    let told = |kind: &str| {
        let body = json!({"RecordType": "Bounce", "Type": kind, "Email": "bob@example.com",
            "Details": "550 5.1.1 No such user", "Metadata": {"delivery_id": id}});
        let request = client.post_request("/v1/triggers/email/postmark");
        request.basic_auth("wakeful", Some("postmark-secret")).json(&body)
    };
    for (request, wanted) in [
        (report("delayed"), &[][..]),
        (report("failed"), &["ann@example.com"]),
        (told("Transient"), &["ann@example.com"]),
        (told("HardBounce"), &["ann@example.com", "bob@example.com"]),
        (told("HardBounce"), &["ann@example.com", "bob@example.com"]),
    ] {
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status().as_u16(), 200, "{}", answer.text().await.unwrap());
        assert_eq!(missed().await, wanted);
    }
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_bounce_counts_only_for_a_mail_that_may_have_gone_out() {
    let post = Post::new().await;
    let store = post.database.store().await;
    let process = post.serve().await;
    let client = process.client();
    let table = [
        ("queued", false),
        // The bounce may come before our own commit, or instead of it. It proves that the mail went out.
        ("sending", true),
        ("sent", true),
        ("uncertain", true),
        ("failed", false),
        ("expired", false),
    ];
    for _ in table {
        post.ask(&client, "Mail ann@example.com").await;
    }
    post.is_done().await;
    assert!(process.terminate().success());
    for ((id, ..), (status, counts)) in post.outbox().await.into_iter().zip(table) {
        sqlx::query("update deliveries set status = $2 where delivery_id = $1")
            .bind(&id)
            .bind(status)
            .execute(&post.database.pool)
            .await
            .unwrap();
        let noted = store.note_bounce(&id, "ann@example.com", "5.1.1", "550 5.1.1 No such user").await;
        assert_eq!(matches!(noted.unwrap(), Noted::New { .. }), counts, "{status}");
    }
}

#[tokio::test]
async fn k15_what_is_too_old_is_never_sent_late() {
    let mut post = Post::new().await;
    post.options.env.insert("WAKEFUL_EMAIL__MAX_AGE_S".into(), "600".into());
    post.server.answers("MAIL", "451 4.3.0 Later");
    let process = post.serve().await;
    post.ask(&process.client(), "Mail ann@example.com").await;
    eventually("the first attempt", || async { post.outbox().await[0].2.is_some().then_some(()) }).await;
    sqlx::query("update deliveries set not_after = not_after - interval '1 hour'")
        .execute(&post.database.pool)
        .await
        .unwrap();
    post.server.is_well();
    post.is_done().await;
    assert_eq!(post.statuses().await, ["expired"]);
    assert!(post.server.mails().is_empty());
    assert!(process.terminate().success());
}

// Multi-threaded: the SMTP server must answer while the command blocks this thread.
#[tokio::test(flavor = "multi_thread")]
async fn doctor_asks_the_server_and_sends_nothing() {
    let post = Post::new().await;
    std::fs::write(post.options.path("wakeful.toml"), post.server.config()).unwrap();
    let output = post.run(&["doctor"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains(&format!("127.0.0.1:{} answers", post.server.port)), "{text}");
    assert_eq!((post.server.heard("EHLO"), post.server.heard("MAIL")), (1, 0));
    post.server.answers("GREETING", "554 5.7.1 Go away");
    let output = post.run(&["doctor"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(9), "{text}");
    assert!(text.contains("554 5.7.1 Go away") && text.contains("check [email.smtp]"), "{text}");
}

#[tokio::test]
async fn mail_goes_one_way_only_and_in_the_open_only_where_that_is_meant() {
    let post = Post::new().await;
    let refused = |toml: &str| {
        std::fs::write(post.options.path("wakeful.toml"), toml).unwrap();
        let output = post.run(&["session", "list"]);
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    let two = format!("{}\n", post.server.config()).replace("[email]\n", "[email]\nmaildir = \"mail\"\n");
    assert!(refused(&two).contains("email.maildir and email.smtp are both set"));
    let open = post.server.config().replace("127.0.0.1", "smtp.example.org");
    assert!(refused(&open).contains("allow_plain"));
    let nobody = post.server.config().replace("from =", "# from =");
    assert!(refused(&nobody).contains("email.smtp needs email.from"));
    let user = format!("{}user = \"desk\"\n", post.server.config());
    assert!(refused(&user).contains("email.smtp.user needs email.smtp.password"));
}
