//! Messages that come in.

use super::*;
use futures::StreamExt;
use std::collections::HashSet;

#[tokio::test]
async fn what_is_forged_stale_cut_or_signed_by_another_secret_is_refused_before_it_is_read() {
    let desk = Desk::new().await;
    let process = desk.serve().await;
    let client = process.client();
    let now = chrono::Utc::now().timestamp();
    let good = [SLACK_SECRET, TELEGRAM_SECRET, WEBHOOK_SECRET];
    let bad = ["wrong", "wrong", "whsec_d3Jvbmd3cm9uZ3dyb25nd3Jvbmd3cm9uZ3dy"];
    for medium in ALL {
        // Not JSON: a handler that parses before it checks the signature answers 400.
        let garbage = Post { medium, id: "msg_1".to_owned(), body: "{not json".to_owned() };
        let (status, text) = refused(garbage.signed(&client, now, bad)).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED, "{medium:?}: {text}");
        let (status, text) = refused(garbage.signed(&client, now, good)).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{medium:?}: {text}");

        let post = Post::new(medium, 1, 1, "Hello");
        assert_eq!(refused(post.signed(&client, now, bad)).await.0, StatusCode::UNAUTHORIZED);
        if medium != Medium::Telegram {
            // Correctly signed, but too old, too new, or cut short.
            for at in [now - 400, now + 400] {
                assert_eq!(refused(post.signed(&client, at, good)).await.0, StatusCode::UNAUTHORIZED);
            }
            let cut = post.body[..post.body.len() - 1].to_owned();
            let cut = post.signed(&client, now, good).body(cut);
            assert_eq!(refused(cut).await.0, StatusCode::UNAUTHORIZED);
        }
        let bare = match medium {
            Medium::Slack => "slack",
            Medium::Telegram => "telegram",
            Medium::Webhook => "webhook",
        };
        let bare = client.post_request(&format!("/v1/triggers/messenger/{bare}")).body(post.body.clone());
        assert_eq!(refused(bare).await.0, StatusCode::UNAUTHORIZED);
    }
    assert_eq!(desk.taken().await, (0, 0, 0));
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_stranger_who_sends_forgeries_without_end_does_not_fill_the_log() {
    let desk = Desk::new().await;
    let process = desk.serve().await;
    let client = process.client();
    let (now, bad) =
        (chrono::Utc::now().timestamp(), ["wrong", "wrong", "whsec_d3Jvbmd3cm9uZ3dyb25nd3Jvbmd3cm9uZ3dy"]);
    for _ in 0..30 {
        let post = Post::new(Medium::Slack, 1, 1, "Hello");
        assert_eq!(refused(post.signed(&client, now, bad)).await.0, StatusCode::UNAUTHORIZED);
    }
    process.wait_for_log("claims to be from Slack").await;
    let lines = process.log().matches("claims to be from Slack").count();
    assert!(lines < 10, "{lines} lines: {}", process.log());
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_door_that_is_not_set_up_says_which_section_opens_it() {
    let desk = Desk::new().await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &desk.model.url);
    let process = options.serve(&desk.database).await;
    for (door, section) in [
        ("slack", "[messenger.slack]"),
        ("telegram", "[messenger.telegram]"),
        ("webhook", "[messenger.webhook]"),
    ] {
        let path = format!("/v1/triggers/messenger/{door}");
        let (status, problem) = process.client().post(&path, &json!({})).await;
        assert_eq!(status, StatusCode::NOT_FOUND, "{problem}");
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.contains("is not set up here: set `") && detail.ends_with(section), "{detail}");
    }
    assert!(process.terminate().success());
}

/// If an app does not answer within three seconds, Slack counts that as a failure. After a 503 it sends the
/// message again.
#[tokio::test]
async fn slack_is_answered_while_its_message_still_waits_for_the_database_and_gets_it_taken_once() {
    let desk = Desk::new().await;
    let process = desk.serve().await;
    let client = process.client();
    Post::new(Medium::Slack, 1, 1, "<@UBOT> one").send(&client).await;
    let mut held = desk.database.pool.begin().await.unwrap();
    sqlx::query("select 1 from conversation_sessions for update").execute(&mut *held).await.unwrap();

    let late = Post::new(Medium::Slack, 1, 2, "<@UBOT> two");
    let response = late.request(&client).send().await.unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(response.headers().contains_key("retry-after"));
    let waiting = "select count(*) from pg_stat_activity where datname = $1 and wait_event_type = 'Lock'";
    let waiting: i64 = desk.database.value(waiting, &desk.database.name).await;
    assert!(waiting > 0, "the first write still waits, and the database has not given it up");
    held.commit().await.unwrap();

    late.send(&client).await;
    assert_eq!(desk.taken().await.1, 2, "each message once");
    assert!(process.terminate().success());
}

/// Telegram sends a bot its updates one by one. If the bot refuses one, Telegram holds back all later ones.
#[tokio::test]
async fn in_a_chat_that_is_full_the_sender_is_told_once_a_minute_and_the_bots_other_chats_go_on() {
    let desk = Desk::new().await;
    let api = desk.options.clone().arg("--roles=api").serve(&desk.database).await;
    let client = api.client();
    Post::new(Medium::Telegram, 1, 1, "one").send(&client).await;
    let session_id = desk.session("default/telegram/4242/1").await;
    sqlx::query(
        "insert into session_inbox (space_id, session_id, client_key, content, content_sha256, run_id, outcome)
        select i.space_id, $1, 'filled-' || n, 'x', '', i.run_id, 'queued'
        from generate_series(1, 1000) n, session_inbox i
        where i.session_id = $1",
    )
    .bind(&session_id)
    .execute(&desk.database.pool)
    .await
    .unwrap();
    let before = desk.taken().await;
    for number in [2, 3, 2] {
        Post::new(Medium::Telegram, 1, number, "is not taken").send(&client).await;
    }
    assert_eq!(desk.taken().await, before, "none of them is in the inbox");
    let told = desk.count("select count(*) from deliveries where $1 = ''").await;
    // One notice, or two if the clock passed a full minute in between.
    assert!((1..=2).contains(&told), "{told}");
    Post::new(Medium::Telegram, 2, 1, "elsewhere").send(&client).await;
    // The API refuses with 429 instead: its clients can retry later, and a retry blocks no one else.
    let body = json!({"text": "x"});
    let path = format!("/v1/sessions/{session_id}/messages");
    let (status, problem) = client.post(&path, &body).await;
    assert_eq!((status, &problem["pending"]), (StatusCode::TOO_MANY_REQUESTS, &json!(1000)), "{problem}");

    let worker = desk.options.clone().arg("--roles=worker").spawn(&desk.database.url);
    desk.messengers.has(told as usize).await;
    let is_told = |sent: &[crate::support::messengers::Sent]| {
        sent.iter().any(|sent| sent.place == "1" && sent.text.contains("did not take yours"))
    };
    desk.messengers.until("the sender to be told, in the chat", is_told).await;
    assert!(worker.terminate().success());
    assert!(api.terminate().success());
}

#[tokio::test]
async fn slack_is_answered_its_challenge_and_an_older_secret_is_as_good() {
    let desk = Desk::new().await;
    let process = desk.serve().await;
    let body = json!({"type": "url_verification", "challenge": "3eZbrw1a", "token": "ignored"}).to_string();
    let challenge = Post { medium: Medium::Slack, id: String::new(), body };
    let now = chrono::Utc::now().timestamp();
    let request = challenge.signed(&process.client(), now, ["an older one", "", WEBHOOK_SECRET]);
    let (status, text) = refused(request).await;
    assert_eq!((status, text.as_str()), (StatusCode::OK, r#"{"challenge":"3eZbrw1a"}"#));
    assert!(process.terminate().success());
}

#[tokio::test]
async fn no_webhook_is_answered_before_its_message_is_committed() {
    let desk = Desk::new().await;
    let options = desk.options.clone().arg("--roles=api");
    let process = options.serve(&desk.database).await;
    let client = process.client();
    for medium in ALL {
        let before = desk.taken().await.1;
        // While the test holds this lock, no message can be written.
        let mut holder = desk.database.pool.begin().await.unwrap();
        sqlx::query("lock table session_inbox in exclusive mode").execute(&mut *holder).await.unwrap();
        let post = Post::new(medium, 1, 1, "Hello");
        let request = post.request(&client);
        let answer = tokio::spawn(async move { request.send().await.unwrap().status() });
        eventually("it to wait for its turn to write", || async {
            let sql = "select count(*) from pg_locks
                where not granted and relation = 'session_inbox'::regclass and $1 = ''";
            (desk.count(sql).await > 0).then_some(())
        })
        .await;
        assert_eq!(client.get("/healthz").await.0, StatusCode::OK);
        let early = answer.is_finished();
        holder.rollback().await.unwrap();
        let status = answer.await.unwrap();
        if medium == Medium::Slack && status == StatusCode::SERVICE_UNAVAILABLE {
            // Slack does not wait for long, so on a busy machine it is told to send the message again.
            post.send(&client).await;
        } else {
            assert!(!early && status.is_success(), "{medium:?} was answered {status}");
        }
        assert_eq!(desk.taken().await.1, before + 1, "{medium:?}");
    }
    assert!(process.terminate().success());
}

/// Sends 200 messages 50 times each, shuffled, 100 at a time. Every second copy of a Slack message has
/// another event id.
#[tokio::test]
#[ignore = "slow: make soak"]
async fn ten_thousand_duplicate_and_reordered_webhooks_are_one_run_each_message() {
    let desk = Desk::new().await;
    let process = desk.serve().await;
    let client = process.client();
    let mut posts = Vec::new();
    for (medium, conversations) in [(Medium::Slack, 100), (Medium::Telegram, 50), (Medium::Webhook, 50)] {
        for conversation in 1..=conversations {
            let post = Post::new(medium, conversation, 1, &format!("<@UBOT> {medium:?} {conversation}"));
            let mut twin = post.clone();
            if medium == Medium::Slack {
                let text = format!("<@UBOT> {medium:?} {conversation}");
                let mut event = slack_event(conversation, 1, &text);
                event["event_id"] = json!(format!("Twin{conversation}"));
                twin.body = event.to_string();
            }
            posts.extend((0..50).map(|n| if n % 2 == 0 { post.clone() } else { twin.clone() }));
        }
    }
    assert_eq!(posts.len(), 10_000);
    // A shuffle that is the same in each run.
    let mut random = 7_u64;
    for at in (1..posts.len()).rev() {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        posts.swap(at, (random >> 33) as usize % (at + 1));
    }
    let client = &client;
    futures::stream::iter(&posts).for_each_concurrent(100, |post| post.send(client)).await;
    assert_eq!(desk.taken().await, (200, 200, 200));

    desk.messengers.has(200).await;
    desk.is_done().await;
    let sent = desk.messengers.sent();
    assert_eq!(sent.len(), 200);
    let places: HashSet<(&str, &str)> =
        sent.iter().map(|sent| (sent.messenger, sent.place.as_str())).collect();
    assert_eq!(places.len(), 200, "each conversation has its own answer");
    for sent in sent.iter().filter(|sent| sent.messenger == "slack") {
        let conversation = sent.place.split('/').next().unwrap().trim_start_matches('C');
        assert_eq!(sent.text, format!("Re: @UBOT Slack {conversation}"));
    }
    assert_eq!(desk.messengers.too_many(), 0, "the limits are kept by ourselves");
    assert_eq!(desk.taken().await, (200, 200, 200));
    assert_eq!(desk.model.bodies().len(), 200);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_thread_whose_messages_come_in_any_order_and_again_has_each_of_them_once() {
    let desk = Desk::new().await;
    desk.model.hold();
    let options = desk.options.clone().env("WAKEFUL_MESSENGER__SLACK__ANSWERS", "everything");
    let process = options.serve(&desk.database).await;
    let client = process.client();
    for number in [7, 3, 3, 9, 1, 5, 2, 1, 8, 7, 4, 6, 10, 9] {
        Post::new(Medium::Slack, 1, number, &format!("Part {number}")).send(&client).await;
    }
    assert_eq!(desk.taken().await, (1, 10, 1));
    let session_id = desk.session("default/slack/T1/C1/1.000001").await;
    desk.model.release();
    client.wait_for(&session_id, "completed").await;
    let session = client.session(&session_id).await;
    let mut said = crate::support::client::texts(&session, "user");
    said.sort();
    let mut expected: Vec<String> = (1..=10).map(|number| format!("Part {number}")).collect();
    expected.sort();
    assert_eq!(said, expected);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn in_a_channel_only_what_mentions_the_agent_is_taken_and_then_its_whole_thread() {
    let desk = Desk::new().await;
    let process = desk.serve().await;
    let client = process.client();
    let plain = |conversation, number, text: &str| Post {
        medium: Medium::Slack,
        id: String::new(),
        body: slack_event(conversation, number, text).to_string(),
    };
    plain(1, 1, "Lunch?").send(&client).await;
    plain(1, 2, "Yes.").send(&client).await;
    assert_eq!(desk.taken().await, (0, 0, 0));
    plain(2, 1, "<@UBOT> lunch?").send(&client).await;
    plain(2, 2, "Where?").send(&client).await;
    assert_eq!(desk.taken().await.1, 2);
    let mut direct = slack_event(3, 1, "Between us");
    direct["event"]["channel"] = json!("D3");
    direct["event"]["channel_type"] = json!("im");
    Post { medium: Medium::Slack, id: String::new(), body: direct.to_string() }.send(&client).await;
    assert_eq!(desk.taken().await.1, 3);
    desk.session("default/slack/T1/D3").await;
    // Slack sends the agent's own message back as a bot's event. It must not become a message.
    let mut own = slack_event(2, 3, "Re: Where?");
    own["event"]["bot_id"] = json!("B1");
    Post { medium: Medium::Slack, id: String::new(), body: own.to_string() }.send(&client).await;
    assert_eq!(desk.taken().await.1, 3);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn whoever_is_not_allowed_is_not_heard() {
    let desk = Desk::new().await;
    let options = desk.options.clone().env("WAKEFUL_MESSENGER__SLACK__ALLOW_USERS", "U1");
    let options = options.env("WAKEFUL_MESSENGER__SLACK__ALLOW_CHANNELS", "C1,C2");
    let process = options.serve(&desk.database).await;
    let client = process.client();
    let mut stranger: Value = serde_json::from_str(&Post::new(Medium::Slack, 1, 1, "Hello").body).unwrap();
    stranger["event"]["user"] = json!("U2");
    Post { medium: Medium::Slack, id: String::new(), body: stranger.to_string() }.send(&client).await;
    Post::new(Medium::Slack, 3, 1, "Hello").send(&client).await;
    let mut stranger: Value = serde_json::from_str(&Post::new(Medium::Telegram, 1, 1, "Hello").body).unwrap();
    stranger["message"]["from"]["id"] = json!(6);
    Post { medium: Medium::Telegram, id: String::new(), body: stranger.to_string() }.send(&client).await;
    assert_eq!(desk.taken().await, (0, 0, 0));
    Post::new(Medium::Slack, 2, 1, "Hello").send(&client).await;
    Post::new(Medium::Telegram, 1, 1, "Hello").send(&client).await;
    assert_eq!(desk.taken().await.1, 2);
    assert!(process.terminate().success());

    // Anyone can find a bot, so the configuration has to list whom it answers.
    let nobody = Options::new().model("openai/test").config(&format!(
        "[messenger.telegram]\ntoken = \"{TELEGRAM_TOKEN}\"\nwebhook_secrets = [\"{TELEGRAM_SECRET}\"]"
    ));
    let (status, process) =
        nobody.env("OPENAI_BASE_URL", &desk.model.url).spawn(&desk.database.url).ended().await;
    assert_eq!(status.code(), Some(2), "{}", process.log());
    let said = format!("{}{}", process.log(), process.output());
    assert!(said.contains("allow_users") && !said.contains(TELEGRAM_TOKEN), "{said}");
}

#[tokio::test]
async fn a_webhook_says_its_first_answer_again_and_names_no_address_for_replies() {
    let desk = Desk::new().await;
    let process = desk.serve().await;
    let client = process.client();
    let post = Post::new(Medium::Webhook, 1, 1, "Hello");
    let (first, text) = refused(post.request(&client)).await;
    assert_eq!(first, StatusCode::ACCEPTED, "{text}");
    let (second, again) = refused(post.request(&client)).await;
    assert_eq!((second, again), (StatusCode::OK, text));
    // Webhook conversations have a prefix of their own, so a webhook cannot write into another user's chat.
    desk.session("default/webhook/w1").await;
    let mut other = Post::new(Medium::Webhook, 1, 1, "Something else");
    let (status, text) = refused(other.request(&client)).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(text.contains("webhook-id") && !text.contains("client_key"), "{text}");
    other.body = json!({"conversation_id": "w1", "text": "x", "more": 1}).to_string();
    let (_, text) = refused(other.request(&client)).await;
    assert!(text.contains("unknown field") && !text.contains("reply_url"), "{text}");
    other.body = json!({"conversation_id": "w1", "text": "x", "reply_url": "http://10.0.0.1/"}).to_string();
    let (status, text) = refused(other.request(&client)).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(text.contains("messenger.webhook.reply_url"), "{text}");
    for body in [
        json!([]),
        json!({"conversation_id": "", "text": "x"}),
        json!({"conversation_id": "w1", "text": " "}),
        json!({"conversation_id": "w1", "text": "x", "agent": "nobody"}),
        json!({"conversation_id": "w1", "text": "x", "more": 1}),
    ] {
        other.body = body.to_string();
        assert_eq!(refused(other.request(&client)).await.0, StatusCode::BAD_REQUEST, "{body}");
    }
    assert_eq!(desk.taken().await, (1, 1, 1));
    assert!(process.terminate().success());
}
