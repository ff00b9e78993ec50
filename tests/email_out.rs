//! Mail goes out by SMTP: what arrives, what is refused, what stays uncertain, and what bounces. K12 to K15
//! of the crash matrix for a channel without idempotency keys.

mod bounces;
mod post;
mod resend;

use crate::support::eventually;
use crate::support::smtp::Mail;
use post::{Post, TOLD};

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

/// The decoded body. Handles only the quoted-printable that plain letters and full stops give.
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
            why.contains("It is not known whether a message by email was sent"),
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
