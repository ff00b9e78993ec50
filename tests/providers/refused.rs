//! Mail that a provider posts and that no agent gets to see, that comes late, or that exceeds a limit.

use super::{
    MAIL, MAILGUN, POSTMARK, SES, TOKEN, World, mailgun_form, mailgun_signature, notification, now, with,
};
use crate::support::{Options, eventually};
use futures::future::select_all;
use futures::{StreamExt, stream};
use reqwest::{StatusCode, header};
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};

#[tokio::test]
async fn what_ses_takes_for_spam_or_a_virus_is_kept_from_the_agents_and_listed_with_the_reason() {
    let world = World::new().await;
    for (at, (verdict, reason)) in
        [("virusVerdict", "SES takes it for a virus"), ("spamVerdict", "SES takes it for spam")]
            .into_iter()
            .enumerate()
    {
        let mail = MAIL.replace("<one@", &format!("<{at}@"));
        let mut message: Value =
            serde_json::from_str(notification(&mail)["Message"].as_str().unwrap()).unwrap();
        message["receipt"][verdict]["status"] = json!("FAIL");
        let message = world.sns.sign(with(notification(&mail), "Message", &message.to_string()));
        for _ in 0..2 {
            let answer = world.client.post_request(SES).body(message.to_string()).send().await.unwrap();
            assert_eq!(answer.status(), StatusCode::OK);
            assert_eq!(answer.json::<Value>().await.unwrap()["dropped"], json!([reason]));
        }
        let listed = world.client.get_request("/v1/mails?dropped=true").bearer_auth(TOKEN);
        let listed: Value = listed.send().await.unwrap().json().await.unwrap();
        assert_eq!(listed["items"].as_array().unwrap().len(), at + 1, "{listed}");
        let newest = &listed["items"][0];
        assert_eq!(
            (&newest["dropped"], &newest["message_id"]),
            (&json!(reason), &json!(format!("{at}@example.com")))
        );
    }
    let sessions = "select count(*) from conversation_sessions where $1 <> ''";
    assert_eq!(world.database.value::<i64>(sessions, "any").await, 0);
}

#[tokio::test]
async fn strangers_who_hold_the_places_of_one_door_close_no_other() {
    let world = World::new().await;
    let client = &world.client;
    // A large body that never ends.
    let endless = || {
        let piece = stream::iter([Ok::<_, std::io::Error>(vec![b'x'; (1 << 20) + 1])]);
        let rest = stream::pending();
        reqwest::Body::wrap_stream(piece.chain(rest))
    };
    let stranger = |door: &'static str| {
        let request = client.post_request(door);
        let form = "multipart/form-data; boundary=x";
        request.header(header::CONTENT_TYPE, form).body(endless()).send()
    };
    let large = vec![b' '; (1 << 20) + 1];
    // Two of the three take all slots for large mails of that endpoint. The third is refused at once.
    let strangers = (0..3).map(|_| tokio::spawn(stranger(MAILGUN)));
    let (refused, _, places) = select_all(strangers).await;
    let refused = refused.unwrap().unwrap();
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(refused.headers().contains_key(header::RETRY_AFTER));
    assert!(refused.text().await.unwrap().contains("too many large mails"));
    let raw = client.post_request("/v1/triggers/email/raw").bearer_auth(TOKEN);
    let raw = raw.header(header::CONTENT_TYPE, "message/rfc822");
    let cases = [
        ("SES", client.post_request(SES), StatusCode::UNAUTHORIZED),
        (
            "Postmark",
            client.post_request(POSTMARK).basic_auth("wakeful", Some("postmark-secret")),
            StatusCode::BAD_REQUEST,
        ),
        ("raw", raw, StatusCode::UNPROCESSABLE_ENTITY),
    ];
    for (door, request, status) in cases {
        let answer = request.body(large.clone()).send().await.unwrap();
        assert_eq!(answer.status(), status, "{door} reads the body to its end, and names its fault");
    }
    places.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn a_mail_that_mailgun_tries_again_hours_later_comes_in() {
    let world = World::new().await;
    let first = mailgun_signature("signing-key", now() - 8 * 3_600, "firstattempt");
    for duplicate in [false, true] {
        let answer = mailgun_form(&world.client, MAILGUN, first.clone(), MAIL).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(answer.json::<Value>().await.unwrap()["duplicate"], duplicate);
    }
    let stolen = mailgun_form(&world.client, MAILGUN, first, "From: eve@example.com\r\n\r\nPay me");
    assert_eq!(stolen.send().await.unwrap().status(), StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn what_sns_brings_while_too_much_comes_in_is_answered_so_that_it_tries_again() {
    // Two chats hold both intake connections. They also take both intake slots, or two of three.
    for concurrency in ["2", "3"] {
        let busy = |options: Options| {
            options
                .env("WAKEFUL_SERVER__INGEST_WAIT_MS", "100")
                .env("WAKEFUL_SERVER__INGEST_CONCURRENCY", concurrency)
                .arg("--roles=api")
        };
        let world = World::with("[database]\nmax_connections = 8\n", busy).await;
        let mut lock = PgConnection::connect(&world.database.url).await.unwrap();
        let held = "begin; lock table conversation_sessions in access exclusive mode";
        sqlx::raw_sql(held).execute(&mut lock).await.unwrap();
        let chats: Vec<_> = ["one", "two"]
            .into_iter()
            .map(|conversation| {
                let path = format!("/v1/chat/{conversation}/messages");
                let request = world.client.post_request(&path).bearer_auth(TOKEN);
                tokio::spawn(request.json(&json!({"user_id": "ann", "text": "Hello?"})).send())
            })
            .collect();
        let message = world.sns.sign(notification(MAIL)).to_string();
        let sns = || {
            let request = world.client.post_request(SES).header("x-amz-sns-message-type", "Notification");
            request.body(message.clone()).send()
        };
        eventually("both connections to wait", || async {
            let waiting = "select count(*) from pg_stat_activity
                where datname = current_database() and wait_event_type = 'Lock' and $1 <> ''";
            (world.database.value::<i64>(waiting, "any").await >= 2).then_some(())
        })
        .await;
        let answer = sns().await.unwrap();
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE, "{concurrency}");
        assert!(answer.headers().contains_key(header::RETRY_AFTER), "{concurrency}");
        let text = answer.text().await.unwrap();
        assert!(text.contains("too many messages come in at once"), "{concurrency}: {text}");
        sqlx::raw_sql("commit").execute(&mut lock).await.unwrap();
        for chat in chats {
            assert_eq!(chat.await.unwrap().unwrap().status(), StatusCode::ACCEPTED);
        }
        assert_eq!(sns().await.unwrap().status(), StatusCode::OK);
    }
}
