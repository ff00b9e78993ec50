//! `POST /v1/triggers/email/raw`.

use super::{
    FAILED, PROVED, SUPPORT, count, mail, now, options, policy, post, request, request_to, says, sent,
    sessions, signature, taken,
};
use crate::support::client::texts;
use crate::support::model::turns_since_user;
use crate::support::{Answer, Client, Database, ModelServer};
use reqwest::StatusCode;
use serde_json::json;

/// A mail with an envelope, posted unsigned because no signature covers the envelope.
fn unsigned(client: &Client, query: &str, text: &str) -> reqwest::RequestBuilder {
    client
        .post_request(&format!("/v1/triggers/email/raw{query}"))
        .header("content-type", "message/rfc822")
        .body(text.to_owned())
}

#[tokio::test]
async fn a_mail_becomes_a_session_that_replies_to_its_sender() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let session_id =
        taken(&client, mail("m1@example.com", "Lunch", "Cc: bob@example.com\r\n", "Shall we?")).await;
    let session = client.wait_for(&session_id, "completed").await;
    assert_eq!(
        texts(&session, "user"),
        [
            "From: Ann <ann@example.com>\nTo: support@example.org\nCc: bob@example.com\nDate: 2026-01-31T12:00:00Z\n\
          Subject: Lunch\n\nShall we?"
        ]
    );
    let delivery: serde_json::Value = database
        .value("select content from deliveries where session_id = $1 and channel = 'email'", &session_id)
        .await;
    assert_eq!((&delivery["type"], &delivery["text"]), (&json!("reply"), &json!("Gladly.")));
    let to = &delivery["to"];
    assert_eq!(to["to"], json!(["ann@example.com"]));
    assert_eq!((&to["from"], &to["subject"]), (&json!(SUPPORT), &json!("Re: Lunch")));
    assert_eq!(
        (&to["in_reply_to"], &to["references"]),
        (&json!("m1@example.com"), &json!(["m1@example.com"]))
    );
    assert!(to["reply_to"].as_str().unwrap().starts_with("support+"), "{to}");
    let policy = policy(&database, &session_id).await;
    // The sender is not proved, so the other addresses may be anyone's.
    assert_eq!(policy["participants"], json!(["ann@example.com"]));
    assert!(process.terminate().success());
}

#[tokio::test]
async fn the_same_mail_again_is_a_duplicate_by_either_proof() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).env("WAKEFUL_TOKEN", "the token of the tests").serve(&database).await;
    let client = process.client();
    let text = mail("m1@example.com", "Lunch", "", "Shall we?");
    let (status, first) = post(&client, text.clone()).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{first}");
    let (status, again) = post(&client, text.clone()).await;
    assert_eq!((status, &again["duplicate"]), (StatusCode::OK, &json!(true)));
    assert_eq!(first["session_id"], again["session_id"]);
    // The mail as a server hands it over a second time: with one more trace line.
    let traced = client
        .post_request("/v1/triggers/email/raw")
        .header("content-type", "message/rfc822")
        .header("authorization", "Bearer the token of the tests")
        .body(format!("Received: from a by b; Sat, 31 Jan 2026 12:00:00 +0000\r\n{text}"));
    let (status, again) = sent(traced).await;
    assert_eq!((status, &again["session_id"]), (StatusCode::OK, &first["session_id"]));
    assert_eq!(sessions(&database).await, 1);
    // The other mailbox gets a session of its own.
    let sales = unsigned(&client, "", &text).header("rcpt", "sales@example.org");
    let (status, other) = sent(sales.header("authorization", "Bearer the token of the tests")).await;
    assert_eq!(status, StatusCode::ACCEPTED);
    assert_ne!(other["session_id"], first["session_id"]);
    let rules = policy(&database, other["session_id"].as_str().unwrap()).await;
    assert_eq!(rules["recipients"], json!(["*@example.com"]));
    assert_eq!(rules["web"], json!({"allow": ["example.com"]}));
}

#[tokio::test]
async fn what_is_not_signed_is_refused_before_it_is_read() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).env("WAKEFUL_TOKEN", "the token of the tests").serve(&database).await;
    let client = process.client();
    // This body gets 422 if it is read, so 401 shows that it was not.
    let body = b"\r\n".to_vec();
    let (status, _) = post(&client, body.clone()).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    let good = signature("msg_1", now(), &body);
    let signed = |time: i64, signature: &str| {
        client
            .post_request("/v1/triggers/email/raw")
            .header("content-type", "message/rfc822")
            .header("webhook-id", "msg_1")
            .header("webhook-timestamp", time.to_string())
            .header("webhook-signature", signature)
            .body(body.clone())
    };
    for (what, request) in [
        ("with nothing but a signature", {
            let request = client.post_request("/v1/triggers/email/raw");
            request.header("content-type", "message/rfc822").header("webhook-signature", &good).body("x")
        }),
        ("forged", signed(now(), "v1,AAAA")),
        ("truncated", signed(now(), &good[..good.len() - 9])),
        ("stale", signed(now() - 400, &signature("msg_1", now() - 400, &body))),
        ("early", signed(now() + 400, &signature("msg_1", now() + 400, &body))),
        ("of another body", signed(now(), &signature("msg_1", now(), b"x"))),
        ("without a signature", {
            client.post_request("/v1/triggers/email/raw").header("content-type", "message/rfc822").body("x")
        }),
        ("with another token", {
            let request =
                client.post_request("/v1/triggers/email/raw").header("content-type", "message/rfc822");
            request.header("authorization", "Bearer x").body("x")
        }),
    ] {
        let (status, answer) = sent(request).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED, "{what}: {answer}");
    }
    assert_eq!(count(&database, "select count(*) from mails where $1 = ''").await, 0);
}

#[tokio::test]
async fn an_envelope_that_no_signature_covers_is_refused() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).env("WAKEFUL_TOKEN", "the token of the tests").serve(&database).await;
    let client = process.client();
    let text = mail("m1@example.com", "Lunch", "", "Shall we?");
    for request in [
        request_to(&client, "?rcpt=sales@example.org", text.clone()),
        request_to(&client, "?mail_from=", text.clone()),
        request(&client, text.clone()).header("rcpt", "sales@example.org"),
        request(&client, text.clone()).header("mail-from", "ann@example.com"),
    ] {
        let (status, answer) = sent(request).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
        assert!(answer["detail"].as_str().unwrap().contains("token"), "{answer}");
    }
    assert_eq!(sessions(&database).await, 0);
}

#[tokio::test]
async fn a_forged_mail_does_not_take_the_place_of_the_true_one() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let text = mail("m1@example.com", "Lunch", "", "Shall we?");
    let forged = taken(&client, text.replace("ann@example.com", "eve@example.net")).await;
    let other_text = taken(&client, text.replace("Shall we?", "Never.")).await;
    let genuine = taken(&client, text.clone()).await;
    assert!(forged != genuine && other_text != genuine && forged != other_text);
    let (status, again) = post(&client, text).await;
    assert_eq!((status, &again["session_id"]), (StatusCode::OK, &json!(genuine)));
}

#[tokio::test]
async fn a_copy_that_was_dropped_does_not_take_the_place_of_one_that_is_good() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).serve(&database).await;
    let client = process.client();
    for (id, by_another_way, dropped) in [
        ("list@example.com", "List-Id: <team.example.com>\r\n", "list-id"),
        ("forwarded@example.com", FAILED, "email.dmarc_fail"),
    ] {
        let bad = mail(id, "Lunch", by_another_way, "Shall we?");
        for _ in 0..2 {
            let (status, answer) = post(&client, bad.clone()).await;
            assert_eq!(status, StatusCode::OK, "{answer}");
            assert!(answer["items"][0]["dropped"].as_str().unwrap().contains(dropped), "{answer}");
        }
        let good = mail(id, "Lunch", PROVED, "Shall we?");
        let session_id = taken(&client, good.clone()).await;
        client.wait_for(&session_id, "completed").await;
        for again in [good, bad] {
            let (status, answer) = post(&client, again).await;
            assert_eq!((status, &answer["session_id"]), (StatusCode::OK, &json!(session_id)), "{answer}");
        }
    }
    assert_eq!(sessions(&database).await, 2);
    let (_, listed) = client.get("/v1/mails?dropped=true").await;
    assert_eq!(listed["items"], json!([]), "what an agent has seen is no dropped mail");
}

#[tokio::test]
async fn a_mail_for_nobody_here_is_refused_and_machine_mail_is_kept_from_the_agents() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let text = mail("m1@example.com", "Lunch", "", "Shall we?");
    let (status, answer) = sent(unsigned(&client, "?rcpt=x@example.org", &text)).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(answer["detail"].as_str().unwrap().contains("email.mailboxes"), "{answer}");
    for (at, (headers, reason)) in [
        ("Auto-Submitted: auto-replied\r\n", "auto-submitted"),
        ("Precedence: bulk\r\n", "precedence"),
        ("List-Unsubscribe: <mailto:x@y.de>\r\n", "list-unsubscribe"),
        ("Return-Path: <>\r\n", "return path"),
        ("X-Loop: support@example.org\r\n", "x-loop"),
    ]
    .into_iter()
    .enumerate()
    {
        let (status, answer) =
            post(&client, mail(&format!("a{at}@example.com"), "Away", headers, "I am away.")).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        assert!(answer["items"][0]["dropped"].as_str().unwrap().contains(reason), "{answer}");
    }
    let null = unsigned(&client, "?mail_from=", &mail("b@example.com", "Away", "", "x"));
    assert!(sent(null).await.1["items"][0]["dropped"].as_str().unwrap().contains("return path"));
    let (_, listed) = client.get("/v1/mails?dropped=true").await;
    assert_eq!(listed["items"].as_array().unwrap().len(), 6, "{listed}");
    assert_eq!(listed["items"][0]["from_address"], "ann@example.com");
    assert_eq!((sessions(&database).await, model.bodies().len()), (0, 0));
}

#[tokio::test]
async fn an_agent_reads_the_files_that_came_with_its_mail_and_no_others() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| match turns_since_user(body) {
        0 => Answer::call("read_attachment", json!({"file": "menu.txt"})),
        1 => Answer::call("read_attachment", json!({"file": "other.txt"})),
        _ => Answer::text("Read."),
    })
    .await;
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let with_file = |id: &str, name: &str, text: &str| {
        mail(
            id,
            "Files",
            "MIME-Version: 1.0\r\nContent-Type: multipart/mixed; boundary=b\r\n",
            &format!(
                "--b\r\nContent-Type: text/plain\r\n\r\nHere.\r\n--b\r\nContent-Type: text/plain\r\n\
                 Content-Disposition: attachment; filename=\"../{name}\"\r\n\r\n{text}\r\n--b--"
            ),
        )
    };
    taken(&client, with_file("m1@example.com", "other.txt", "Not yours.")).await;
    let session_id = taken(&client, with_file("m2@example.com", "menu.txt", "Soup and bread.")).await;
    let session = client.wait_for(&session_id, "completed").await;
    assert!(
        texts(&session, "user")[0].ends_with("Attachments:\n1. menu.txt (text/plain, 15 bytes)"),
        "{session}"
    );
    let results = texts(&session, "tool");
    assert_eq!(results[0], "Soup and bread.\n\n[menu.txt: bytes 0 to 15 of 15]");
    assert!(results[1].contains("There is no file \"other.txt\""), "{results:?}");
}
