//! An operator resends a mail that was not sent. It keeps its id and its place in the order, it is sent once,
//! and the agent is told how it ended.

use super::{Post, TOLD};
use crate::support::eventually;
use serde_json::{Value, json};
use wakeful_store::resend::Resend;

impl Post {
    /// A mail to Ann that the server refused. Returns the session and the delivery.
    async fn with_a_refused_mail() -> (Post, String, String) {
        let post = Post::new().await;
        post.server.answers("RCPT", "550 5.1.1 No such user");
        let process = post.serve().await;
        let session = post.ask(&process.client(), "Mail ann@example.com").await;
        post.is_done().await;
        let (delivery, status, _) = post.outbox().await.remove(0);
        assert_eq!(status, "failed");
        let log = process.log();
        assert!(log.contains(&format!("wakeful delivery resend {delivery}")), "{log}");
        assert!(process.terminate().success());
        (post, session, delivery)
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.cli(args)).unwrap()
    }

    /// Exit status and stderr of a command that fails.
    fn refused(&self, args: &[&str]) -> (i32, String) {
        let output = self.run(args);
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    }

    async fn types(&self, session_id: &str) -> Vec<String> {
        let journal = self.journal(session_id).await;
        journal.iter().map(|event| event["type"].as_str().unwrap().to_owned()).collect()
    }
}

#[tokio::test]
async fn a_mail_that_failed_is_sent_again_under_its_id_and_the_agent_hears_of_it() {
    let (post, session, delivery) = Post::with_a_refused_mail().await;
    let command = format!("wakeful delivery resend {delivery}");
    let why = post.cli(&["session", "why", &session]);
    let said = why.split_once("Why\n").unwrap().1.trim_start();
    assert!(said.starts_with("A message by email was not sent") && said.contains(&command), "{why}");
    assert!(!why.contains("Nothing holds it up"), "{why}");
    assert!(post.cli(&["session", "show", &session]).contains(&command));
    let failed = post.json(&["delivery", "list", "--status", "failed", "-o", "json"]);
    assert_eq!((&failed[0]["delivery_id"], failed.as_array().unwrap().len()), (&json!(delivery), 1));
    assert_eq!(post.json(&["delivery", "list", "--status", "waiting", "-o", "json"]), json!([]));
    let shown = post.cli(&["delivery", "show", &delivery]);
    assert!(shown.contains("550 5.1.1 No such user") && shown.contains(&command), "{shown}");

    let process = post.serve().await;
    let client = process.client();
    post.ask(&client, "Hello?").await;
    assert!(post.last_request().contains("was not sent to anybody"));
    post.server.is_well();
    let resend = ["delivery", "resend", &delivery, "--reason", "a new account", "--by", "bob", "-o", "json"];
    assert_eq!(post.json(&resend)[0]["status"], "queued");
    post.is_done().await;
    let [mail] = post.server.mails().try_into().unwrap();
    assert_eq!(mail.header("Message-ID"), Some(format!("<{delivery}@example.org>")));
    assert_eq!(post.outbox().await, [(delivery.clone(), "sent".to_owned(), None)], "no old error is left");
    assert_eq!(post.types(&session).await, ["DELIVERY_FAILED", "DELIVERY_RESENT", "GEN_SENT"]);
    let resent = &post.journal(&session).await[1]["payload"];
    assert_eq!((&resent["by"], &resent["reason"]), (&json!("bob"), &json!("a new account")));
    post.ask(&client, "And now?").await;
    let told = post.last_request();
    assert!(told.contains(&format!("({delivery}) has been sent after all.")), "{told}");
    post.ask(&client, "And then?").await;
    assert_eq!(post.last_request().matches("after all").count(), 1, "it is told once");
    assert!(post.cli(&["session", "why", &session]).contains("Nothing holds it up"));

    // A sent mail is not resent. A resend after a bounce would go to every recipient.
    let (code, said) = post.refused(&["delivery", "resend", &delivery]);
    assert!(code == 4 && said.contains("was sent: ask the agent for a new one"), "{said}");
    let store = post.database.store().await;
    store.note_bounce(&delivery, "ann@example.com", "5.2.2", "552 Mailbox full").await.unwrap();
    let path = format!("/v1/deliveries/{delivery}");
    let (status, problem) = client.post(&format!("{path}/resend"), &json!({})).await;
    assert_eq!(status.as_u16(), 409);
    assert!(problem["detail"].as_str().unwrap().contains("did not reach everybody"), "{problem}");
    assert_eq!(client.get(&path).await.1["content"]["to"][0], "ann@example.com");
    assert_eq!(post.refused(&["delivery", "resend", "dlv_none"]).0, 3);
    assert_eq!(client.post("/v1/deliveries/dlv_none/resend", &json!({})).await.0.as_u16(), 404);
    assert_eq!(client.get("/v1/deliveries?status=bogus").await.0.as_u16(), 400);
    let (code, said) = post.refused(&["delivery", "list", "--status", "bogus"]);
    assert!(code == 2 && said.contains("waiting, queued, sending"), "{said}");
    assert_eq!(post.server.mails().len(), 1);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn two_resends_at_once_give_one_and_what_fails_again_can_be_sent_again() {
    let (post, session, delivery) = Post::with_a_refused_mail().await;
    let (one, other) = (post.database.store().await, post.database.store().await);
    let asked = Resend::default();
    let (a, b) = tokio::join!(one.resend(None, &delivery, &asked), other.resend(None, &delivery, &asked));
    let (a, b) = (a.unwrap(), b.unwrap());
    assert_ne!(a.duplicate, b.duplicate, "{a:?} {b:?}");
    assert_eq!(post.types(&session).await, ["DELIVERY_FAILED", "DELIVERY_RESENT"]);
    let process = post.serve().await;
    post.is_done().await;
    assert_eq!(post.statuses().await, ["failed"], "the server refuses it as before");

    post.server.is_well();
    let path = format!("/v1/deliveries/{delivery}/resend");
    let (status, resent) = process.client().post(&path, &json!({"by": "bob"})).await;
    assert_eq!((status.as_u16(), &resent["session_id"]), (202, &json!(session)), "{resent}");
    post.is_done().await;
    assert_eq!((post.statuses().await, post.server.mails().len()), (vec!["sent".to_owned()], 1));
    let ends = ["DELIVERY_FAILED", "DELIVERY_RESENT", "DELIVERY_FAILED", "DELIVERY_RESENT", "GEN_SENT"];
    assert_eq!(post.types(&session).await, ends);
    // The agent had not heard of the failure yet. The mail is sent in the end, so there is nothing to tell.
    post.ask(&process.client(), "And now?").await;
    assert!(!post.last_request().contains(TOLD), "{}", post.last_request());
    assert!(process.terminate().success());
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn a_kill_between_a_resend_and_its_send_sends_once_or_is_uncertain() {
    // (failpoint, mails that arrive, how the delivery ends)
    for (failpoint, arrived, status) in
        [("K12_claim=1*return", 1, "sent"), ("K12=1*return", 0, "uncertain"), ("K14=1*return", 1, "sent")]
    {
        let (post, session, delivery) = Post::with_a_refused_mail().await;
        post.server.is_well();
        // No process runs during the resend. So the next process finds only what the command committed.
        post.cli(&["delivery", "resend", &delivery]);
        let options = post.options.clone().env("FAILPOINTS", failpoint);
        let (ended, process) = options.serve(&post.database).await.ended().await;
        assert!(!ended.success() && process.log().contains("failpoint"), "{}", process.log());
        let process = post.serve().await;
        post.is_done().await;
        assert_eq!(post.server.mails().len(), arrived, "{failpoint}");
        assert_eq!(post.statuses().await, [status], "{failpoint}");
        if status == "uncertain" {
            let (code, said) = post.refused(&["delivery", "resend", &delivery]);
            let command = format!("wakeful session resolve {session} {delivery} --happened ''");
            assert!(code == 4 && said.contains(&command), "{said}");
        }
        // The agent had not heard of the failure yet. It now hears only how the delivery ended.
        post.ask(&process.client(), "And now?").await;
        let told = post.last_request();
        assert_eq!(told.contains("may not have been sent"), status == "uncertain", "{failpoint}: {told}");
        assert_eq!(told.contains(TOLD), status == "uncertain", "{failpoint}: {told}");
        assert!(process.terminate().success());
    }
}

// Multi-threaded: the SMTP server must answer while a command blocks this thread.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_sent_again_goes_before_what_waits_which_says_what_holds_it_up() {
    let (post, session, first) = Post::with_a_refused_mail().await;
    post.server.is_well();
    post.server.answers("MAIL", "451 4.3.0 Later");
    let process = post.serve().await;
    post.ask(&process.client(), "Mail bob@example.com").await;
    eventually("its first attempt", || async { post.outbox().await.get(1)?.2.clone() }).await;
    let second = post.outbox().await.remove(1).0;
    let (code, said) = post.refused(&["delivery", "resend", &second]);
    assert!(code == 4 && said.contains("waits to be sent already"), "{said}");
    let listed = post.json(&["delivery", "list", "--status", "waiting", "-o", "json"]);
    assert_eq!((&listed[0]["delivery_id"], &listed[0]["held_up_by"]), (&json!(second), &json!(null)));
    let why = post.cli(&["session", "why", &session]);
    assert!(why.contains("is not sent yet") && why.contains("451 4.3.0 Later"), "{why}");

    post.cli(&["delivery", "resend", &first]);
    let listed = post.json(&["delivery", "list", "--status", "waiting", "-o", "json"]);
    assert_eq!((&listed[0]["delivery_id"], &listed[0]["held_up_by"]), (&json!(second), &json!(first)));
    let why = post.cli(&["session", "why", &session]);
    assert!(why.contains(&format!("held up by {first} since ")), "{why}");
    // The second mail may have been mid-send when the first was resent. From the first one's next attempt on,
    // the second waits behind it.
    eventually("the first one's attempt", || async {
        post.outbox().await[0].2.as_ref()?.contains("451 4.3.0 Later").then_some(())
    })
    .await;
    post.server.is_well();
    post.is_done().await;
    let to: Vec<String> = post.server.mails().into_iter().flat_map(|mail| mail.to).collect();
    assert_eq!(to, ["ann@example.com", "bob@example.com"]);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn what_was_too_late_is_sent_late_when_an_operator_asks_for_it() {
    let mut post = Post::new().await;
    post.options.env.insert("WAKEFUL_EMAIL__MAX_AGE_S".into(), "600".into());
    post.server.answers("MAIL", "451 4.3.0 Later");
    let process = post.serve().await;
    post.ask(&process.client(), "Mail ann@example.com").await;
    eventually("the first attempt", || async { post.outbox().await[0].2.clone() }).await;
    let later = "update deliveries set not_after = not_after - interval '1 hour',
        created_at = created_at - interval '1 hour'";
    sqlx::query(later).execute(&post.database.pool).await.unwrap();
    post.is_done().await;
    let (delivery, status, _) = post.outbox().await.remove(0);
    assert_eq!(status, "expired");
    post.server.is_well();
    post.cli(&["delivery", "resend", &delivery]);
    post.is_done().await;
    assert_eq!((post.statuses().await, post.server.mails().len()), (vec!["sent".to_owned()], 1));
    assert!(process.terminate().success());
}

#[tokio::test]
async fn what_came_in_a_bundle_is_never_sent() {
    let (post, session, _) = Post::with_a_refused_mail().await;
    let file = post.options.path("bundle");
    let file = file.to_str().unwrap();
    post.cli(&["session", "export", &session, "--file", file]);
    let imported = post.json(&["session", "import", file, "-o", "json"]);
    let copy = imported["session_id"].as_str().unwrap();
    let listed = post.json(&["delivery", "list", "--session", copy, "-o", "json"]);
    assert_eq!(listed[0]["status"], "failed");
    let ids = |listed: Value| {
        listed.as_array().unwrap().iter().map(|one| one["session_id"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(
        ids(post.json(&["delivery", "list", "-o", "json"])),
        [json!(session)],
        "no copy is in the list …"
    );
    assert_eq!(
        ids(post.json(&["delivery", "list", "--all", "-o", "json"])),
        [json!(copy), json!(session)],
        "… by itself"
    );
    let (code, said) = post.refused(&["delivery", "resend", listed[0]["delivery_id"].as_str().unwrap()]);
    assert!(code == 4 && said.contains("was imported"), "{said}");
    let why = post.cli(&["session", "why", copy]);
    assert!(!why.contains("delivery resend"), "{why}");
}

// Multi-threaded: the SMTP server must answer while the command blocks this thread.
#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_sees_what_failed_what_waits_and_an_open_lmtp() {
    let (post, _, first) = Post::with_a_refused_mail().await;
    post.server.is_well();
    post.server.answers("MAIL", "451 4.3.0 Later");
    let process = post.serve().await;
    post.ask(&process.client(), "Mail bob@example.com").await;
    let doctor = |toml: &str| {
        std::fs::write(post.options.path("wakeful.toml"), toml).unwrap();
        let text = String::from_utf8(post.run(&["doctor"]).stdout).unwrap();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let config = post.server.config();
    let text = doctor(&config);
    assert!(
        text.contains("1 failed, the oldest") && text.contains(&format!("delivery resend {first}")),
        "{text}"
    );
    assert!(!text.contains("wait to be sent") && !text.contains("lmtp"), "{text}");
    sqlx::query(
        "update deliveries set created_at = created_at - interval '3 hours' where status <> 'failed'",
    )
    .execute(&post.database.pool)
    .await
    .unwrap();
    let open = config.replace("[email]\n", "[email]\nlmtp_listen = \"0.0.0.0:2424\"\n");
    let text = doctor(&open);
    assert!(text.contains("1 wait to be sent, the oldest for 3h"), "{text}");
    assert!(text.contains("delivery list --status waiting"), "{text}");
    assert!(text.contains("warning lmtp [email] lmtp_listen = 0.0.0.0:2424 is open"), "{text}");
    assert!(
        !doctor(&config.replace("[email]\n", "[email]\nlmtp_listen = \"127.0.0.1:2424\"\n"))
            .contains("is open")
    );
    assert!(process.terminate().success());
}
