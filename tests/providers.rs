//! Mail from Postmark, Mailgun and Amazon SES: its proof, its refusal, and its result.

mod bounces;
mod killed;
mod refused;
mod world;

use crate::support::{Database, Server, eventually};
use reqwest::{RequestBuilder, StatusCode, header};
use serde_json::{Value, json};
use world::*;

/// The bearer token of the server.
const TOKEN: &str = "the token of the tests";

#[tokio::test]
async fn what_is_not_proved_is_refused_and_nothing_is_written() {
    let world = World::new().await;
    let before = world.database.rows().await;
    let (client, sns) = (&world.client, &world.sns);
    let stranger = Sns::start().await;
    let postmark =
        |user: &str, password: &str| client.post_request(POSTMARK).basic_auth(user, Some(password));
    let mail = postmark_mail();
    let token = |n: u32| format!("{n:050}");
    let form = |signed: Vec<(&'static str, String)>| mailgun_form(client, MAILGUN, signed, MAIL);
    let signed = |key: &str, ago_s: i64, n: u32| mailgun_signature(key, now() - ago_s, &token(n));
    let with = |key: &str, value: &str| with(notification(MAIL), key, value);
    let ses = |message: Value| client.post_request(SES).body(sns.sign(message).to_string());
    let whole = sns.sign(notification(MAIL)).to_string();
    let mut forged = sns.sign(notification(MAIL));
    forged["Message"] = notification("From: eve@example.com\r\n\r\nPay me")["Message"].clone();
    let mut half = signed("signing-key", 0, 5);
    half.pop();
    let mut short = signed("signing-key", 0, 6);
    short[2].1.truncate(32);
    let signature = |n: u32, key: &str| -> serde_json::Map<String, Value> {
        signed(key, 0, n).into_iter().map(|(name, value)| (name.to_owned(), json!(value))).collect()
    };
    let unread = signature(8, "other-key");
    let event = |n: u32, key: &str| {
        let signature = signature(n, key);
        client.post_request(MAILGUN).json(&json!({"signature": signature, "event-data": {"event": "failed"}}))
    };

    let cases: Vec<(&str, RequestBuilder, u16, &str)> = vec![
        ("Postmark: nothing", client.post_request(POSTMARK).body(mail.clone()), 401, "basic auth"),
        ("Postmark: a wrong password", postmark("wakeful", "wrong").body(mail.clone()), 401, "basic auth"),
        ("Postmark: a part of it", postmark("wakeful", "postmark-").body(mail.clone()), 401, "basic auth"),
        ("Postmark: another user", postmark("eve", "postmark-secret").body(mail.clone()), 401, "basic auth"),
        (
            "Postmark: a token",
            client.post_request(POSTMARK).bearer_auth("postmark-secret").body(mail),
            401,
            "basic",
        ),
        // A stranger is not even told whether the body can be parsed.
        ("Postmark: no JSON of a stranger", postmark("wakeful", "wrong").body("{"), 401, "basic auth"),
        ("Mailgun: nothing", form(vec![]), 401, "needed"),
        ("Mailgun: another key", form(signed("other-key", 0, 1)), 401, "signing_keys"),
        ("Mailgun: thirteen hours old", form(signed("signing-key", 46_800, 2)), 401, "43200 seconds"),
        ("Mailgun: six minutes ahead", form(signed("signing-key", -360, 3)), 401, "300 seconds"),
        ("Mailgun: no signature", form(half), 401, "signing_keys"),
        ("Mailgun: half a signature", form(short), 401, "signing_keys"),
        ("Mailgun: an event of another key", event(7, "other-key"), 401, "signing_keys"),
        // A stranger is not even told whether the body can be parsed.
        (
            "Mailgun: no event, of another key",
            client.post_request(MAILGUN).json(&json!({"signature": unread, "event-data": 5})),
            401,
            "signing_keys",
        ),
        ("Mailgun: JSON without one", client.post_request(MAILGUN).json(&json!({})), 401, "not signed"),
        (
            "Mailgun: broken JSON",
            client.post_request(MAILGUN).header("content-type", "application/json").body("{"),
            401,
            "not signed",
        ),
        ("Mailgun: no form", client.post_request(MAILGUN).body("x"), 415, "expected"),
        ("SES: nothing", client.post_request(SES), 401, "no signed message"),
        ("SES: half of it", client.post_request(SES).body(whole[..whole.len() / 2].to_owned()), 401, "EOF"),
        ("SES: another message", client.post_request(SES).body(forged.to_string()), 401, "signature"),
        (
            "SES: another signer",
            client.post_request(SES).body(stranger.sign(notification(MAIL)).to_string()),
            401,
            "signature",
        ),
        (
            "SES: not signed",
            client.post_request(SES).body(notification(MAIL).to_string()),
            401,
            "no signed message",
        ),
        ("SES: version 1", ses(with("SignatureVersion", "1")), 403, "SignatureVersion"),
        ("SES: another topic", ses(with("TopicArn", "arn:aws:sns:eu-central-1:1:evil")), 403, "topic_arns"),
        ("SES: two hours old", ses(with("Timestamp", &timestamp(-7200))), 401, "5400 seconds"),
        (
            "SES: another host",
            ses(with("SigningCertURL", &format!("https://sns.example.com{CERTIFICATE}"))),
            403,
            "certificate",
        ),
        (
            "SES: this machine",
            ses(with("SigningCertURL", &format!("{}{CERTIFICATE}", stranger.url))),
            403,
            "certificate",
        ),
        (
            "SES: no such certificate",
            ses(with("SigningCertURL", &format!("{HOST}/SimpleNotificationService-00.pem"))),
            401,
            "404",
        ),
        (
            "SES: raw delivery",
            client.post_request(SES).header("x-amz-sns-rawdelivery", "true").body(MAIL),
            401,
            "raw message",
        ),
    ];
    for (what, request, status, says) in cases {
        let answer = request.send().await.unwrap();
        let is = answer.status().as_u16();
        let kind = answer.headers()[header::CONTENT_TYPE].to_str().unwrap().to_owned();
        let asks = answer.headers().contains_key(header::WWW_AUTHENTICATE);
        let text = answer.text().await.unwrap();
        assert_eq!((is, kind.as_str()), (status, "application/problem+json"), "{what}: {text}");
        assert!(text.contains(says), "{what}: {text}");
        assert_eq!(asks, what.starts_with("Postmark"), "{what}");
    }
    assert_eq!(world.database.rows().await, before);
    assert!(stranger.asked().is_empty(), "only SNS gets requests");

    // The same requests with valid proof pass, so only the missing proof was refused.
    for (what, request) in world.mails(10) {
        let status = request.send().await.unwrap().status();
        assert!(!matches!(status.as_u16(), 401 | 403 | 404 | 415), "{what}: {status}");
    }
}

#[tokio::test]
async fn a_signed_request_of_mailgun_is_good_for_one_body() {
    let world = World::new().await;
    let signed = || mailgun_signature("signing-key", now(), "sametoken");
    let fixed = signed();
    let send = |text: &'static str, path: &'static str| {
        let request = mailgun_form(&world.client, path, fixed.clone(), text);
        async move { request.send().await.unwrap() }
    };
    let first = send(MAIL, MAILGUN).await.status();
    assert_ne!(first, StatusCode::FORBIDDEN);
    // Mailgun sends it again after a lost answer.
    assert_ne!(send(MAIL, MAILGUN).await.status(), StatusCode::FORBIDDEN);
    for path in [MAILGUN, "/v1/triggers/email/mailgun/mime"] {
        let stolen = send("From: eve@example.com\r\n\r\nPay me", path).await;
        assert_eq!(stolen.status(), StatusCode::FORBIDDEN);
        assert!(stolen.text().await.unwrap().contains("one body"));
    }
    let tokens: i64 =
        world.database.value("select count(*) from webhook_tokens where token = $1", "sametoken").await;
    assert_eq!(tokens, 1);
}

#[tokio::test]
async fn a_subscription_is_confirmed_for_our_topic_and_asks_sns_alone() {
    let world = World::new().await;
    let confirm = |url: String| {
        let mut message = notification(MAIL);
        message.as_object_mut().unwrap().remove("Subject");
        message["Type"] = json!("SubscriptionConfirmation");
        message["Token"] = json!("2336412f37");
        message["SubscribeURL"] = json!(url);
        let body = world.sns.sign(message).to_string();
        let request = world.client.post_request(SES).body(body);
        async move { request.send().await.unwrap() }
    };
    let query = format!("/?Action=ConfirmSubscription&TopicArn={TOPIC}&Token=2336412f37");
    let elsewhere = confirm(format!("https://example.com{query}")).await;
    assert_eq!(elsewhere.status(), StatusCode::FORBIDDEN);
    assert_eq!(world.sns.asked(), [CERTIFICATE]);
    let confirmed = confirm(format!("{HOST}{query}")).await;
    assert_eq!(confirmed.status(), StatusCode::OK);
    assert_eq!(confirmed.json::<Value>().await.unwrap(), json!({"confirmed": TOPIC}));
    // The certificate is fetched only once.
    assert_eq!(world.sns.asked(), [CERTIFICATE, &query]);
}

#[tokio::test]
async fn notifications_that_are_no_mail_are_answered_and_change_nothing() {
    let world = World::new().await;
    let before = world.database.rows().await;
    let published = |message: &Value| {
        let message = with(notification(MAIL), "Message", &message.to_string());
        world.client.post_request(SES).body(world.sns.sign(message).to_string())
    };
    let mut elsewhere: Value = serde_json::from_str(notification(MAIL)["Message"].as_str().unwrap()).unwrap();
    elsewhere.as_object_mut().unwrap().remove("content");
    let postmark = |body: Value| {
        world.client.post_request(POSTMARK).basic_auth("wakeful", Some("postmark-secret")).json(&body)
    };
    let cases = [
        ("mail in S3", published(&elsewhere), 422, "not S3"),
        ("a delivery", published(&json!({"eventType": "Delivery"})), 200, "Delivery"),
        (
            "a bounce of a stranger's mail",
            published(&json!({"notificationType": "Bounce"})),
            200,
            "no delivery",
        ),
        ("an opened mail", postmark(json!({"RecordType": "Open"})), 200, "Open"),
        ("no webhook", postmark(json!({})), 400, "`From`"),
        ("a deep one", postmark(Value::Null).body("[".repeat(1_000_000)), 400, "no webhook"),
    ];
    for (what, request, status, says) in cases {
        let answer = request.send().await.unwrap();
        let is = answer.status().as_u16();
        let text = answer.text().await.unwrap();
        assert!(is == status && text.contains(says), "{what}: {is} {text}");
    }
    assert_eq!(world.database.rows().await, before);
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_refused_before_it_is_whole() {
    let world = World::new().await;
    // Without a length, and only one byte too long: a client that keeps writing might miss the answer.
    let chunks = |bytes: usize| {
        let sizes = (0..bytes).step_by(1 << 20).map(move |at| (bytes - at).min(1 << 20));
        reqwest::Body::wrap_stream(futures::stream::iter(
            sizes.map(|size| Ok::<_, std::io::Error>(vec![b' '; size])),
        ))
    };
    let postmark = || world.client.post_request(POSTMARK).basic_auth("wakeful", Some("postmark-secret"));
    let limits = [(postmark(), 55_000_000), (world.client.post_request(SES), 2 << 20)];
    for (request, limit) in limits {
        let answer = request.body(chunks(limit + 1)).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::PAYLOAD_TOO_LARGE);
        assert!(answer.text().await.unwrap().contains(&format!("{limit} bytes")));
    }
    // A body within the limit is read to its end, and then refused for its content.
    let answer = postmark().body(chunks(55_000_000)).send().await.unwrap();
    assert_eq!(answer.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_door_that_is_not_set_up_says_how() {
    let (database, model) = (Database::new().await, model().await);
    let process = options(&model).serve(&database).await;
    for (path, key) in [
        (POSTMARK, "email.postmark.user"),
        (MAILGUN, "email.mailgun.signing_keys"),
        (SES, "email.ses.topic_arns"),
    ] {
        let answer = process.client().post_request(path).json(&json!({})).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::NOT_FOUND, "{path}");
        assert!(answer.text().await.unwrap().contains(key), "{path}");
    }
}

#[tokio::test]
async fn a_mail_of_each_provider_wakes_a_session_and_again_is_a_duplicate() {
    let world = World::new().await;
    for (number, (what, request)) in world.mails(20).into_iter().enumerate() {
        let again = request.try_clone().unwrap();
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK, "{what}");
        let answer: Value = answer.json().await.unwrap();
        // The mail is the same one, whichever provider brings it.
        assert_eq!(answer["duplicate"], number > 0, "{what}: {answer}");
        let session_id = answer["sessions"][0]["session_id"].as_str().unwrap();
        world.completes(session_id).await;
        let again: Value = again.send().await.unwrap().json().await.unwrap();
        assert_eq!(again["duplicate"], true, "{what}: {again}");
        assert_eq!(again["sessions"][0]["session_id"], session_id, "{what}");
    }
}

#[tokio::test]
async fn a_mail_that_cannot_be_taken_now_is_answered_so_that_its_provider_sends_it_again() {
    let mut server = Server::start().await;
    let database = Database::on(&server.url(), "pg_default").await;
    let world = World::on(database, Sns::start().await, "", |options| options).await;
    let mails = world.mails(30);
    server.stop().await;
    for (what, request) in &mails {
        let status = request.try_clone().unwrap().send().await.unwrap().status();
        assert!(status.is_server_error(), "{what}: {status}");
    }
    server.start_again().await;
    for (what, request) in &mails {
        eventually("the mail to be taken", || async {
            let answer = request.try_clone().unwrap().send().await.unwrap();
            let status = answer.status();
            assert!(status == StatusCode::OK || status.is_server_error(), "{what}: {status}");
            (status == StatusCode::OK).then_some(())
        })
        .await;
    }
}
