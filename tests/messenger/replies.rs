//! Messages that go out.

use super::*;
use crate::support::messengers::Says;

/// Paragraphs of numbered words, at least 9,000 characters.
fn long_text() -> String {
    let paragraph = |n: usize| (0..20).map(|word| format!("word{n}x{word}")).collect::<Vec<_>>().join(" ");
    (0..60).map(paragraph).collect::<Vec<_>>().join("\n\n")
}

#[tokio::test]
async fn what_the_model_says_pings_nobody_and_forges_no_link() {
    let said = "<!everyone> <@U1> & <https://other.example|https://bank.example> @channel **bold**";
    let desk = Desk::whose_model(move |_| Answer::text(said)).await;
    let process = desk.serve().await;
    for medium in ALL {
        Post::new(medium, 1, 1, "Hello").send(&process.client()).await;
    }
    desk.messengers.has(3).await;
    for sent in desk.messengers.sent() {
        if sent.messenger == "slack" {
            assert!(!sent.text.contains(['<', '>']), "{}", sent.text);
            assert!(sent.text.ends_with("@channel *bold*"), "{}", sent.text);
            assert!(sent.text.starts_with("&lt;!everyone&gt; &lt;@U1&gt; &amp; "), "{}", sent.text);
            assert_eq!((&sent.body["parse"], &sent.body["link_names"]), (&json!("none"), &json!(false)));
            assert_eq!(
                (&sent.body["unfurl_links"], &sent.body["unfurl_media"]),
                (&json!(false), &json!(false))
            );
            assert_eq!(sent.place, "C1/1.000001", "into its thread");
        } else {
            assert_eq!(sent.text, said);
            assert!(sent.body.get("parse_mode").is_none());
        }
    }
    assert!(process.terminate().success());
}

#[tokio::test]
async fn long_replies_come_in_parts_in_order_across_a_kill() {
    let text = long_text();
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    for (medium, limit, parts) in
        [(Medium::Slack, 4000, 3), (Medium::Telegram, 4096, 3), (Medium::Webhook, usize::MAX, 1)]
    {
        let reply = text.clone();
        let desk = Desk::whose_model(move |_| Answer::text(&reply)).await;
        // The process dies when the first part is out and written down.
        let dying = desk.serve_until("K14=1*return").await;
        Post::new(medium, 1, 1, "Tell me all.").send(&dying.client()).await;
        let (status, dying) = dying.ended().await;
        assert!(!status.success() && dying.log().contains("failpoint"), "{}", dying.log());
        assert_eq!(desk.messengers.sent().len(), 1, "{medium:?}");
        let process = desk.serve().await;
        // The messenger may send it again.
        Post::new(medium, 1, 1, "Tell me all.").send(&process.client()).await;
        desk.messengers.has(parts).await;
        desk.is_done().await;
        let sent = desk.messengers.sent();
        assert_eq!(sent.len(), parts, "{medium:?}");
        let said: Vec<String> = sent.iter().flat_map(|sent| words(&sent.text)).collect();
        assert_eq!(said, words(&text), "{medium:?}: nothing is lost, and the order is kept");
        assert!(sent.iter().all(|sent| sent.text.encode_utf16().count() <= limit));
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn a_question_goes_out_and_its_answer_comes_in_on_another_host() {
    for medium in ALL {
        let desk = Desk::whose_model(|body| {
            if crate::support::model::turns_since_user(body) > 0 || body.to_string().contains("tool_call_id")
            {
                return Answer::text("For four, then.");
            }
            Answer::call("ask_user", json!({"question": "For how many?"}))
        })
        .await;
        let process = desk.serve().await;
        Post::new(medium, 1, 1, "A table, please.").send(&process.client()).await;
        desk.messengers.has(1).await;
        desk.is_done().await;
        assert_eq!(desk.messengers.texts(), ["For how many?"], "{medium:?}");
        process.kill();

        let elsewhere = Options { dir: Options::new().dir, ..desk.options.clone() };
        let process = elsewhere.serve(&desk.database).await;
        Post::new(medium, 1, 2, "Four.").send(&process.client()).await;
        desk.messengers.has(2).await;
        desk.is_done().await;
        assert_eq!(desk.messengers.texts(), ["For how many?", "For four, then."], "{medium:?}");
        assert_eq!(desk.taken().await, (1, 2, 1), "the same run goes on");
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn many_threads_of_one_channel_keep_its_limit_and_none_of_them_uses_up_attempts() {
    let desk = Desk::new().await;
    let process = desk.serve().await;
    let client = process.client();
    for conversation in 1..=8 {
        let mut body: Value =
            serde_json::from_str(&Post::new(Medium::Slack, conversation, 1, "Hi").body).unwrap();
        body["event"]["channel"] = json!("C1");
        Post { medium: Medium::Slack, id: String::new(), body: body.to_string() }.send(&client).await;
    }
    desk.messengers.has(8).await;
    desk.is_done().await;
    assert_eq!(desk.messengers.too_many(), 0);
    assert_eq!(desk.messengers.asked(), 8, "a delivery that waits sends no request");
    let outbox = desk.outbox().await;
    assert!(outbox.iter().all(|(status, _, attempt)| status == "sent" && *attempt == 1), "{outbox:?}");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_messenger_that_takes_no_more_is_left_alone_for_as_long_as_it_asks() {
    let throttled = |status: u16, body: &str| {
        let mut says = Says::new(status, body);
        says.headers.push(("retry-after", "1".to_owned()));
        says
    };
    let told = r#"{"ok":false,"error_code":429,"description":"slow","parameters":{"retry_after":1}}"#;
    let table = [
        (Medium::Slack, throttled(429, "{}")),
        (Medium::Slack, throttled(200, r#"{"ok":false,"error":"ratelimited"}"#)),
        (Medium::Telegram, Says::new(429, told)),
        (Medium::Webhook, throttled(429, "")),
        (Medium::Webhook, throttled(503, "")),
    ];
    let each = table.into_iter().map(async |(medium, says)| {
        let desk = Desk::new().await;
        // Throttle more often than the limit of attempts, because a rate limit must not count as an attempt.
        for _ in 0..11 {
            desk.messengers.says(says.clone());
        }
        let process = desk.serve().await;
        Post::new(medium, 1, 1, "Hello").send(&process.client()).await;
        desk.messengers.has(1).await;
        desk.is_done().await;
        assert_eq!((desk.messengers.asked(), desk.messengers.too_early()), (12, 0), "{says:?}");
        let outbox = desk.outbox().await;
        assert_eq!((outbox[0].0.as_str(), outbox[0].2), ("sent", 1), "{outbox:?}");
        assert!(process.terminate().success());
    });
    futures::future::join_all(each).await;
}

#[tokio::test]
async fn a_messenger_that_never_takes_more_holds_its_conversation_for_five_hours_and_not_for_ever() {
    let desk = Desk::new().await;
    // It refuses for longer than the test takes.
    for _ in 0..200 {
        let mut says = Says::new(429, "");
        says.headers.push(("retry-after", "1".to_owned()));
        desk.messengers.says(says);
    }
    let process = desk.serve().await;
    Post::new(Medium::Webhook, 1, 1, "Hello").send(&process.client()).await;
    eventually("the first answer", || async { desk.outbox().await.first()?.1.clone() }).await;
    sqlx::query("update deliveries set tried_since = clock_timestamp() - interval '6 hours'")
        .execute(&desk.database.pool)
        .await
        .unwrap();
    desk.is_done().await;
    let (status, error, _) = desk.outbox().await.remove(0);
    assert_eq!(status, "failed", "{error:?}");
    assert!(error.as_deref().unwrap().contains("it was tried for 5 hours"), "{error:?}");
    assert!(desk.messengers.asked() >= 2 && desk.messengers.texts().is_empty());
    assert!(process.terminate().success());
}

#[tokio::test]
async fn while_a_messenger_wants_to_be_left_alone_no_other_conversation_asks_it() {
    for medium in ALL {
        let desk = Desk::new().await;
        let mut says = Says::new(429, "{}");
        says.headers.push(("retry-after", "5".to_owned()));
        let told = r#"{"ok":false,"error_code":429,"description":"slow","parameters":{"retry_after":5}}"#;
        desk.messengers.says(if medium == Medium::Telegram { Says::new(429, told) } else { says });
        let process = desk.serve().await;
        let client = process.client();
        Post::new(medium, 1, 1, "Hello").send(&client).await;
        desk.messengers.is_asked(1).await;
        let mut other = Post::new(medium, 2, 1, "And I");
        if medium == Medium::Telegram {
            // Telegram's wait applies to a chat, so send to another topic of the same chat.
            let mut body: Value = serde_json::from_str(&other.body).unwrap();
            body["message"]["message_id"] = json!(2);
            body["message"]["message_thread_id"] = json!(7);
            body["message"]["is_topic_message"] = json!(true);
            body["message"]["chat"]["id"] = json!(1);
            other.body = body.to_string();
        }
        other.send(&client).await;
        desk.messengers.has(2).await;
        desk.is_done().await;
        assert_eq!((desk.messengers.asked(), desk.messengers.too_early()), (3, 0), "{medium:?}");
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn a_telegram_chat_and_a_group_are_written_to_no_faster_than_telegram_takes() {
    let text = long_text();
    let desk = Desk::whose_model(move |_| Answer::text(&text)).await;
    let process = desk.serve().await;
    for chat in [1, -2] {
        let mut body: Value =
            serde_json::from_str(&Post::new(Medium::Telegram, 1, 1, "Tell me all.").body).unwrap();
        body["message"]["chat"]["id"] = json!(chat);
        Post { medium: Medium::Telegram, id: String::new(), body: body.to_string() }
            .send(&process.client())
            .await;
    }
    desk.messengers.has(6).await;
    desk.is_done().await;
    assert_eq!(desk.messengers.too_many(), 0);
    let outbox = desk.outbox().await;
    assert!(outbox.iter().all(|(status, _, attempt)| status == "sent" && *attempt == 1), "{outbox:?}");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn what_a_messenger_refuses_fails_with_a_remedy_and_what_it_cannot_do_now_is_tried_again() {
    // (medium, its answer, how the delivery ends, a word of the reason)
    let moved = || {
        let mut says = Says::new(302, "");
        says.headers.push(("location", "http://127.0.0.1:1/".to_owned()));
        says
    };
    let slack = |error: &str| Says::new(200, &format!(r#"{{"ok":false,"error":"{error}"}}"#));
    let telegram = |status, text: &str| {
        Says::new(status, &format!(r#"{{"ok":false,"error_code":{status},"description":"{text}"}}"#))
    };
    let table = [
        (Medium::Slack, slack("invalid_auth"), "failed", "messenger.slack.token"),
        (Medium::Slack, slack("channel_not_found"), "failed", "invite the app"),
        (Medium::Slack, slack("is_archived"), "failed", "archived"),
        (Medium::Slack, Says::new(503, "oops"), "sent", ""),
        (
            Medium::Telegram,
            telegram(403, "Forbidden: bot was blocked by the user"),
            "failed",
            "let it in again",
        ),
        (Medium::Telegram, telegram(404, "Not Found"), "failed", "messenger.telegram.token"),
        // It may have failed after it had taken the message, and cannot be asked.
        (Medium::Telegram, Says::new(500, "oops"), "uncertain", "500"),
        (Medium::Telegram, Says::new(503, "oops"), "sent", ""),
        (Medium::Telegram, Says::new(504, "oops"), "uncertain", "504"),
        (Medium::Webhook, Says::new(410, ""), "failed", "messenger.webhook.reply_url"),
        (Medium::Webhook, Says::new(400, ""), "failed", "400"),
        (Medium::Webhook, moved(), "failed", "no redirect"),
        (Medium::Webhook, Says::new(500, ""), "sent", ""),
        (Medium::Webhook, Says::new(504, ""), "sent", ""),
    ];
    let desk = Desk::new().await;
    let process = desk.serve().await;
    for (number, (medium, says, status, word)) in (1..).zip(table) {
        desk.messengers.says(says.clone());
        Post::new(medium, number, 1, "Hello").send(&process.client()).await;
        eventually("its end", || async {
            let outbox = desk.outbox().await;
            let (ended, error, _) = outbox.get(number as usize - 1)?.clone();
            (ended != "queued" && ended != "sending").then(|| {
                let error = error.unwrap_or_default();
                assert_eq!(ended, status, "{medium:?} {says:?}: {error}");
                assert!(error.contains(word), "{medium:?} {says:?}: {error}");
            })
        })
        .await;
    }
    assert!(process.terminate().success());
}

#[tokio::test]
async fn the_bots_token_is_in_no_log_and_in_no_reason() {
    let desk = Desk::new().await;
    // The port is closed. The connection error contains the address, and with it the token.
    let options = desk.options.clone().env("WAKEFUL_MESSENGER__TELEGRAM__BASE_URL", "http://127.0.0.1:9");
    let process = options.env("WAKEFUL_LOG", "debug").serve(&desk.database).await;
    Post::new(Medium::Telegram, 1, 1, "Hello").send(&process.client()).await;
    let reason = eventually("the first attempt", || async { desk.outbox().await.first()?.1.clone() }).await;
    assert!(reason.contains("Telegram did not answer"), "{reason}");
    let log = process.log();
    for secret in
        [TELEGRAM_TOKEN, "AAE-of_the_test", TELEGRAM_SECRET, SLACK_TOKEN, SLACK_SECRET, WEBHOOK_SECRET]
    {
        assert!(!log.contains(secret) && !reason.contains(secret), "{secret}");
    }
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_group_that_became_a_supergroup_gets_its_reply_under_its_new_id() {
    let desk = Desk::new().await;
    let moved = r#"{"ok":false,"error_code":400,"description":"Bad Request: group chat was upgraded to a supergroup chat",
        "parameters":{"migrate_to_chat_id":-1001}}"#;
    desk.messengers.says(Says::new(400, moved));
    let process = desk.serve().await;
    Post::new(Medium::Telegram, 1, 1, "Hello").send(&process.client()).await;
    desk.messengers.has(1).await;
    desk.is_done().await;
    let sent = desk.messengers.sent();
    assert_eq!((sent.len(), sent[0].place.as_str(), sent[0].text.as_str()), (1, "-1001", "Re: Hello"));
    assert_eq!(desk.outbox().await[0].0, "sent");
    assert!(process.terminate().success());
}
