//! Chats from before sessions existed: read once from their Redis cache, which is never written, with nothing
//! lost.

use crate::support::client::texts;
use crate::support::redis::Redis;
use crate::support::{Answer, Client, Database, ModelServer, Options, eventually};
use futures::future::join_all;
use reqwest::StatusCode;
use reqwest::header::RETRY_AFTER;
use serde_json::{Value, json};
use tokio::net::TcpListener;

#[tokio::test]
async fn a_chat_that_the_cache_knows_goes_on_where_it_was() {
    let database = Database::new().await;
    let model = echo().await;
    let redis = Redis::start().await;
    redis.put("chat:ann:c1", old_chat().to_string());
    let process = options(&model, &redis.url).serve(&database).await;
    let client = process.client();
    let (status, first) = say(&client, "c1", "And now?").await;
    assert_eq!((status, &first["outcome"]), (StatusCode::ACCEPTED, &json!("new_run")));
    let id = first["session_id"].as_str().unwrap();
    let session = client.wait_for(id, "completed").await;
    assert_eq!(session["state"]["name"], "Ann");
    assert_eq!(texts(&session, "user"), ["And now?"], "the old chat is a seed, not a message of the session");

    let body: Value = serde_json::from_str(&model.bodies()[0]).unwrap();
    let told: Vec<(String, String)> = body["messages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["role"].as_str().unwrap().to_owned(), one["content"].to_string()))
        .collect();
    let roles: Vec<&str> = told.iter().map(|(role, _)| role.as_str()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user"], "{told:?}");
    for (at, text) in [(0, "You are a test."), (1, "I am Ann."), (2, "Hello, Ann."), (3, "And now?")] {
        assert!(told[at].1.contains(text), "{told:?}");
    }
    let seeds: Vec<(String, bool, Option<i64>)> = sqlx::query_as(
        r#"select role, is_new, "timestamp" from session_seed_messages where session_id = $1 order by ordinal"#,
    )
    .bind(id)
    .fetch_all(&database.pool)
    .await
    .unwrap();
    assert_eq!(
        seeds,
        [
            ("system".to_owned(), true, None),
            ("user".to_owned(), false, Some(1_700_000_000_000)),
            ("assistant".to_owned(), false, None),
        ]
    );
    let report = database.store().await.verify(id).await.unwrap();
    assert!(report.agrees, "{report:?}");

    // From here on the session is the truth, and the cache is not read again.
    say(&client, "c1", "More.").await;
    client.wait_for(id, "completed").await;
    // A chat that is not in the cache begins without a history.
    let (_, other) = say(&client, "c2", "Hi.").await;
    let other = client.wait_for(other["session_id"].as_str().unwrap(), "completed").await;
    assert_eq!(other["seed_message_count"], 1);
    let keys: Vec<String> = redis.asked().iter().map(|asked| format!("{} {}", asked[0], asked[1])).collect();
    assert_eq!(keys, ["GETRANGE chat:ann:c1", "GETRANGE chat:ann:c2"], "read, and nothing but read");

    let (_, counts) = client.get("/v1/chat/legacy").await;
    let counted: Vec<(&str, i64, i64)> = counts["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| {
            (
                one["outcome"].as_str().unwrap(),
                one["chats"].as_i64().unwrap(),
                one["messages_left_out"].as_i64().unwrap(),
            )
        })
        .collect();
    assert_eq!(counted, [("imported", 1, 2), ("missed", 1, 0)]);
    assert!(counts["advice"].as_str().unwrap().contains("it can be turned off"), "{counts}");
    assert!(process.log().contains("left out"), "the log names entries that cannot become seeds");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_chat_of_another_space_takes_no_entry_of_the_cache() {
    let database = Database::new().await;
    let model = echo().await;
    let redis = Redis::start().await;
    redis.put("chat:ann:c1", old_chat().to_string());
    let process = options(&model, &redis.url).serve(&database).await;
    let client = process.client();
    let request = client.post_request("/v1/chat/c1/messages").header("x-wakeful-space", "acme");
    let body = json!({"text": "And now?", "user_id": "ann"}).to_string();
    let response = request.body(body).send().await.unwrap();
    assert_eq!(response.status(), StatusCode::ACCEPTED);
    let woken: Value = response.json().await.unwrap();
    let seeds: i64 = database
        .value(
            "select count(*) from session_seed_messages where session_id = $1",
            woken["session_id"].as_str().unwrap(),
        )
        .await;
    assert_eq!(seeds, 1, "the system prompt");
    assert!(redis.asked().is_empty(), "the keys of the cache know no space");
}

#[tokio::test]
async fn two_first_messages_at_once_make_one_session_of_one_import() {
    let database = Database::new().await;
    let model = echo().await;
    let redis = Redis::start().await;
    redis.put("chat:ann:c1", old_chat().to_string());
    let options = options(&model, &redis.url);
    let processes = [options.serve(&database).await, options.serve(&database).await];
    let clients = processes.each_ref().map(|process| process.client());
    let answers = join_all((0..8).map(|at| {
        let client = clients[at % 2].clone();
        async move { say(&client, "c1", &format!("m{at}")).await }
    }))
    .await;
    let id = answers[0].1["session_id"].as_str().unwrap().to_owned();
    for (status, answer) in &answers {
        assert_eq!((*status, &answer["session_id"]), (StatusCode::ACCEPTED, &json!(id)));
    }
    let session = clients[0].wait_for(&id, "completed").await;
    assert_eq!(session["seed_message_count"], 3);
    let imported: i64 =
        database.value("select chats from legacy_chat_counts where outcome = $1", "imported").await;
    assert_eq!(imported, 1);
    eventually("every message to be answered", || async {
        (texts(&clients[0].session(&id).await, "user").len() == 8).then_some(())
    })
    .await;
}

#[tokio::test]
async fn while_the_cache_cannot_be_asked_a_chats_first_message_is_refused_and_no_other() {
    let model = echo().await;
    // One server accepts connections and never answers. At the other address nothing listens.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    for url in [format!("redis://{}", silent.local_addr().unwrap()), format!("redis://{nobody}")] {
        let database = Database::new().await;
        let options = options(&model, &url).env("WAKEFUL_CHAT__LEGACY__TIMEOUT_MS", "300");
        // A chat that already has a session needs no cache.
        let off = options.clone().env("WAKEFUL_CHAT__LEGACY__ENABLED", "false").serve(&database).await;
        let id = off.client().chat("c1", "one").await["session_id"].as_str().unwrap().to_owned();
        off.client().wait_for(&id, "completed").await;
        assert!(off.terminate().success());

        let process = options.serve(&database).await;
        let client = process.client();
        say(&client, "c1", "two").await;
        client.wait_for(&id, "completed").await;
        let body = json!({"text": "Hi.", "user_id": "ann"});
        let request = client.post_request("/v1/chat/c2/messages").body(body.to_string());
        let refused = request.send().await.unwrap();
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(refused.headers().contains_key(RETRY_AFTER));
        let problem: Value = refused.json().await.unwrap();
        assert!(problem["detail"].as_str().unwrap().contains("nothing was taken"), "{problem}");
        let failed: i64 = database
            .value("select sum(chats)::bigint from legacy_chat_counts where outcome = $1", "failed")
            .await;
        assert!(failed > 0);
        assert!(process.terminate().success());

        // With this setting, a chat begins without a history while the cache fails.
        let ignoring = options.env("WAKEFUL_CHAT__LEGACY__ON_ERROR", "ignore").serve(&database).await;
        assert_eq!(say(&ignoring.client(), "c3", "Hi.").await.0, StatusCode::ACCEPTED);
        assert!(ignoring.terminate().success());
    }
}

#[tokio::test]
async fn an_entry_that_cannot_be_read_is_refused_in_words_that_do_not_quote_it() {
    let database = Database::new().await;
    let model = echo().await;
    let redis = Redis::start().await;
    redis.put("chat:ann:broken", "{\"messages\": [\"sesame\"");
    redis.put("chat:ann:odd", json!({"messages": {"sesame": 1}}).to_string());
    redis.put("chat:ann:large", "x".repeat(5 << 10));
    let options = options(&model, &redis.url).env("WAKEFUL_CHAT__LEGACY__MAX_KB", "4");
    let process = options.serve(&database).await;
    let client = process.client();
    for (conversation, reason) in [("broken", "no JSON"), ("odd", "no list"), ("large", "4 KiB")] {
        let (status, problem) = say(&client, conversation, "Hi.").await;
        assert_eq!(status, StatusCode::BAD_GATEWAY, "{problem}");
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.contains(reason) && detail.contains("on_error"), "{detail}");
        assert!(!detail.contains("sesame"), "{detail}");
    }
    let sessions: i64 =
        database.value("select count(*) from conversation_sessions where $1 <> ''", "all").await;
    assert_eq!(sessions, 0);
    // After a correction it is read.
    redis.put("chat:ann:broken", old_chat().to_string());
    let (_, answer) = say(&client, "broken", "Hi.").await;
    let session = client.wait_for(answer["session_id"].as_str().unwrap(), "completed").await;
    assert_eq!(session["seed_message_count"], 3);
    assert!(process.terminate().success());
}

pub fn old_chat() -> Value {
    json!({
        "messages": [
            {"role": "user", "content": "I am Ann.", "timestamp": 1_700_000_000},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "c"}]},
            {"role": "tool", "content": "42"},
            {"role": "assistant", "content": "Hello, Ann."},
        ],
        "state": {"name": "Ann"},
    })
}

pub async fn say(client: &Client, conversation: &str, text: &str) -> (StatusCode, Value) {
    let body = json!({"text": text, "user_id": "ann"});
    client.post(&format!("/v1/chat/{conversation}/messages"), &body).await
}

pub async fn echo() -> ModelServer {
    ModelServer::start(|_, _| Answer::text("Heard.")).await
}

pub fn options(model: &ModelServer, redis_url: &str) -> Options {
    Options::new()
        .model("openai/test")
        .env("OPENAI_BASE_URL", &model.url)
        .env("WAKEFUL_CHAT__LEGACY__REDIS_URL", redis_url)
}
