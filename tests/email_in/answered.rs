//! A question goes out by mail and is answered by mail. The agent's next mail belongs to the same thread,
//! after the answer.

use super::{PROVED, SUPPORT, mail, options, post, sent, taken};
use crate::support::model::turns_since_user;
use crate::support::smtp::Mail;
use crate::support::{Answer, Database, ModelServer, Process, SmtpServer};
use reqwest::StatusCode;
use serde_json::json;

/// Ann writes, the agent asks her, and someone answers. Returns the mail with the question, and the last
/// mail.
async fn exchange(answer: impl FnOnce(&Mail) -> (Option<String>, String)) -> (Mail, Mail) {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| match turns_since_user(body) {
        0 => Answer::call("ask_user", json!({"question": "For how many?"})),
        _ => Answer::text("Reserved."),
    })
    .await;
    let server = SmtpServer::start().await;
    let process = options(&model).config(&server.config()).serve(&database).await;
    let client = process.client();
    let asked = taken(&client, mail("m1@example.com", "Table", "", "A table, please.")).await;
    client.wait_for(&asked, "waiting_input").await;
    let question = server.has(1).await.remove(0);
    let (rcpt, text) = answer(&question);
    let (status, woken) = match rcpt {
        // A signature does not cover the envelope, so a mail with a `rcpt` header is posted unsigned.
        Some(rcpt) => {
            let request = client.post_request("/v1/triggers/email/raw");
            let request = request.header("content-type", "message/rfc822").header("rcpt", rcpt);
            sent(request.body(text)).await
        }
        None => post(&client, text).await,
    };
    assert_eq!((status, &woken["session_id"]), (StatusCode::ACCEPTED, &json!(asked)), "{woken}");
    client.wait_for(&asked, "completed").await;
    let reply = server.has(2).await.remove(1);
    assert_eq!(reply.body().trim(), "Reserved.");
    (question, reply)
}

#[tokio::test]
async fn what_follows_an_answer_by_mail_answers_it_in_the_same_thread() {
    let (question, reply) = exchange(|question| {
        let id = question.header("Message-ID").unwrap();
        let headers = format!("{PROVED}In-Reply-To: {id}\r\nReferences: <m1@example.com> {id}\r\n");
        (None, mail("m2@example.com", "Re: Table", &headers, "Four."))
    })
    .await;
    let id = question.header("Message-ID").unwrap();
    assert_eq!(question.header("References").unwrap(), "<m1@example.com>");
    assert_eq!(reply.header("In-Reply-To").unwrap(), "<m2@example.com>");
    assert_eq!(reply.header("References").unwrap(), format!("<m1@example.com> {id} <m2@example.com>"));
    assert_eq!(reply.header("Subject").unwrap(), "Re: Table");
    assert_eq!(reply.header("Reply-To"), question.header("Reply-To"));
    assert_eq!(reply.to, question.to, "it was the same person");
}

#[tokio::test]
async fn who_answers_is_answered_where_he_is_proved_and_nobody_else_is_added_by_a_header() {
    let plus = |question: &Mail| question.header("Reply-To").unwrap();
    let answer = |headers: &str| {
        mail("m2@example.com", "Re: Table", headers, "Four.")
            .replace("Ann <ann@example.com>", "bob@example.com")
    };
    // The answer has no thread headers. Its plus address names the question, so the agent's next mail still
    // has thread headers.
    let (question, reply) = exchange(|question| (Some(plus(question)), answer(PROVED))).await;
    let id = question.header("Message-ID").unwrap();
    assert_eq!(reply.header("References").unwrap(), format!("<m1@example.com> {id} <m2@example.com>"));
    assert_eq!(reply.header("To").unwrap(), "bob@example.com");
    assert_eq!(reply.header("Cc").unwrap(), "ann@example.com", "Ann, who asked, gets a copy");

    let forged = format!("Cc: eve@example.net, {SUPPORT}\r\nReply-To: mallory@example.com\r\n");
    let (question, reply) = exchange(|question| (Some(plus(question)), answer(&forged))).await;
    assert_eq!(reply.to, question.to);
    assert_eq!((reply.header("To").unwrap().as_str(), reply.header("Cc")), ("ann@example.com", None));
    assert_eq!(reply.header("In-Reply-To").unwrap(), "<m2@example.com>", "it is answered all the same");
}

/// A reply may be long on its way, and somebody may reply to one mail twice.
#[tokio::test]
async fn a_reply_to_an_earlier_question_does_not_answer_the_open_one() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| {
        let said = body["messages"].as_array().unwrap().last().unwrap()["content"].to_string();
        match turns_since_user(body) {
            _ if said.contains("Monday") => Answer::text("I am busy with your table."),
            0 => Answer::call("ask_user", json!({"question": "For how many?"})),
            1 => Answer::call("ask_user", json!({"question": "Shall I pay 500?"})),
            _ => Answer::text("Reserved."),
        }
    })
    .await;
    let server = SmtpServer::start().await;
    let process = options(&model).config(&server.config()).serve(&database).await;
    let client = process.client();
    let asked = taken(&client, mail("m1@example.com", "Table", "", "A table, please.")).await;
    let reply_to = |question: &Mail, id: &str, text: &str| {
        let to = question.header("Message-ID").unwrap();
        let headers = format!("{PROVED}In-Reply-To: {to}\r\nReferences: <m1@example.com> {to}\r\n");
        mail(id, "Re: Table", &headers, text)
    };
    let first = server.has(1).await.remove(0);
    client.wait_for(&asked, "waiting_input").await;
    let (_, woken) = post(&client, reply_to(&first, "m2@example.com", "Four.")).await;
    assert_eq!(woken["session_id"], json!(asked));
    let second = server.has(2).await.remove(1);
    client.wait_for(&asked, "waiting_input").await;

    let (status, woken) = post(&client, reply_to(&first, "m3@example.com", "Yes, on Monday.")).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{woken}");
    assert_ne!(woken["session_id"], json!(asked));
    let session = client.session(&asked).await;
    assert_eq!(
        (&session["status"], &session["question"]),
        (&json!("waiting_input"), &json!("Shall I pay 500?"))
    );

    let (_, woken) = post(&client, reply_to(&second, "m4@example.com", "Yes, pay.")).await;
    assert_eq!(woken["session_id"], json!(asked));
    client.wait_for(&asked, "completed").await;

    // Nor does it answer the question of a later session of the conversation.
    let (_, woken) = post(&client, reply_to(&second, "m5@example.com", "Another table.")).await;
    let later = woken["session_id"].as_str().unwrap();
    client.wait_for(later, "waiting_input").await;
    let (_, woken) = post(&client, reply_to(&first, "m6@example.com", "Yes, on Monday, I said.")).await;
    assert!(woken["session_id"] != json!(later) && woken["session_id"] != json!(asked), "{woken}");
    assert_eq!(client.session(later).await["status"], "waiting_input");
}

/// A process with a mailbox, to which notices that ask have no signed address.
async fn desk(model: &ModelServer, database: &Database) -> (SmtpServer, Process) {
    let server = SmtpServer::start().await;
    let desk = "[email.mailboxes.desk]\naddress = \"desk@example.org\"";
    let config = format!("{}{desk}", server.config());
    let process = options(model).config(&config).serve(database).await;
    (server, process)
}

/// A notice's conversation belongs to no mailbox and has no signed address. So only a proved mail that names the question answers
/// it.
#[tokio::test]
async fn the_question_of_a_notice_is_answered_by_a_proved_mail_and_its_run_goes_on() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| match turns_since_user(body) {
        0 => Answer::call("ask_user", json!({"question": "Shall I clean db1?"})),
        _ => Answer::text("Cleaned."),
    })
    .await;
    let (server, process) = desk(&model, &database).await;
    let client = process.client();
    let notice = json!({"notice": "92 % of db1.", "mail_to": ["ann@example.com"]});
    let (status, heralded) = client.post("/v1/triggers/herald", &notice).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{heralded}");
    let asked = heralded["session_id"].as_str().unwrap();
    client.wait_for(asked, "waiting_input").await;
    let question = server.has(1).await.remove(0);
    let names = format!("In-Reply-To: {}\r\n", question.header("Message-ID").unwrap());
    let answer = |id: &str, headers: &str| {
        mail(id, "Re: 92 % of db1.", headers, "Yes, clean it.").replace(SUPPORT, "desk@example.org")
    };

    let unproved = taken(&client, answer("m1@example.com", &names)).await;
    assert_ne!(unproved, asked);
    client.wait_for(&unproved, "waiting_input").await;
    assert_eq!(client.session(asked).await["status"], "waiting_input");

    let (status, woken) = post(&client, answer("m2@example.com", &format!("{PROVED}{names}"))).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{woken}");
    assert_eq!(
        (&woken["session_id"], &woken["items"][0]["run_id"]),
        (&heralded["session_id"], &heralded["run_id"]),
        "the same run goes on"
    );
    client.wait_for(asked, "completed").await;
    let mails = server.has(3).await;
    let reply = mails.iter().find(|mail| mail.body().trim() == "Cleaned.").unwrap();
    assert_eq!(reply.header("In-Reply-To").unwrap(), "<m2@example.com>");
    assert_eq!(reply.header("To").unwrap(), "ann@example.com");
}

/// Notices to several people may share a conversation, and a mail with the question in it may be passed on.
#[tokio::test]
async fn the_question_of_a_notice_is_not_answered_by_whom_another_notice_of_the_conversation_addressed() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| {
        let messages = body["messages"].as_array().unwrap();
        let said = messages.iter().rfind(|message| message["role"] == "user").unwrap().to_string();
        match turns_since_user(body) {
            0 if said.contains("db1") => Answer::call("ask_user", json!({"question": "Shall I clean it?"})),
            0 => Answer::text("Seen."),
            _ => Answer::text("Cleaned."),
        }
    })
    .await;
    let (server, process) = desk(&model, &database).await;
    let client = process.client();
    let mut heralded = Vec::new();
    for (who, text, status) in
        [("bob", "92 % of db2.", "completed"), ("Ann", "92 % of db1.", "waiting_input")]
    {
        let notice =
            json!({"notice": text, "conversation_id": "disks", "mail_to": [format!("{who}@example.com")]});
        let (_, woken) = client.post("/v1/triggers/herald", &notice).await;
        let session_id = woken["session_id"].as_str().unwrap_or_else(|| panic!("{woken}")).to_owned();
        client.wait_for(&session_id, status).await;
        heralded.push(session_id);
    }
    let asked = &heralded[1];
    let question = server.has(2).await.remove(1);
    let headers = format!("{PROVED}In-Reply-To: {}\r\n", question.header("Message-ID").unwrap());
    let answer = |who: &str, id: &str| {
        let text = mail(id, "Re: The disks", &headers, "Yes, clean it.").replace(SUPPORT, "desk@example.org");
        text.replace("Ann <ann@example.com>", &format!("{who}@example.com"))
    };

    let bobs = taken(&client, answer("bob", "m1@example.com")).await;
    assert_ne!(&bobs, asked);
    client.wait_for(&bobs, "completed").await;
    assert_eq!(client.session(asked).await["status"], "waiting_input");

    assert_eq!(&taken(&client, answer("ANN", "m2@example.com")).await, asked);
    client.wait_for(asked, "completed").await;
}
