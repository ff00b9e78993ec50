//! Bounces of mail that went out: who reports them, which of them count, and how the agent is told.

use super::Post;
use serde_json::{Value, json};
use wakeful_channels::email::bounce;
use wakeful_store::bounce::Noted;

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
