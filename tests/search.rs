//! Search: sessions are found by what was said, who said it, with which tool, error and cost; and every list comes from an index.

mod lists;
mod looks;
mod plans;

use crate::support::{Answer, Client, Database, ModelServer, Options, eventually};
use reqwest::StatusCode;
use serde_json::{Value, json};
use wakeful_store::Store;
use wakeful_store::erase::Subject;
use wakeful_store::session::SessionFilter;
use wakeful_store::wake::{Continues, NewMessage, NewSession};
use wakeful_workflow::policy::SessionPolicy;

/// Brings the search up to date.
pub async fn index(store: &Store) {
    while store.index_sessions().await.unwrap().more {}
}

/// A session with one message, which no worker runs.
async fn said(store: &Store, conversation: &str, sender: Option<&str>, text: &str) -> String {
    let new = NewSession {
        space_id: "default".into(),
        mailbox_id: "default".into(),
        conversation_id: format!("default/{conversation}"),
        trigger_type: "chat".into(),
        trigger_id: conversation.into(),
        continues: Continues::Trigger,
        agent: "default".into(),
        model_id: "test/test".into(),
        model_context_window: 1000,
        tools: Vec::new(),
        policy: SessionPolicy::default(),
        repository_id: None,
        only_agent: false,
        speaker: None,
        seeds: Vec::new(),
    };
    let message = NewMessage {
        client_key: None,
        text: text.into(),
        sender: sender.map(str::to_owned),
        trace_context: None,
        attachments: Vec::new(),
    };
    store.wake(&new, &message).await.unwrap().session_id
}

async fn found(store: &Store, filter: SessionFilter) -> Vec<String> {
    let filter = SessionFilter { limit: 50, ..filter };
    store.sessions(&filter).await.unwrap().into_iter().map(|session| session.session_id).collect()
}

#[tokio::test]
async fn words_senders_and_further_messages_are_found_and_an_erasure_takes_them() {
    let database = Database::new().await;
    database.with_roles().await;
    let store = database.store().await;
    let table =
        said(&store, "c1", Some("ann@example.com"), "A table for two at the Löwen, please\u{1}.").await;
    let room =
        said(&store, "c2", Some("bob@example.com"), "A room for two, number 4711: wks1 in the plan.").await;
    let mail =
        said(&store, "c3", None, "Mail Ann@example.com, or see https://example.com/lakeside-1. 3.50 each.")
            .await;
    index(&store).await;
    let text = |text: &str| SessionFilter { text: Some(text.to_owned()), ..SessionFilter::default() };
    for (words, expected) in [
        // What an address or a path is made of is found, and the whole of it.
        ("ann@example.com", vec![&mail]),
        ("lakeside", vec![&mail]),
        ("https://example.com/lakeside-1", vec![&mail]),
        ("com.example", vec![]),
        ("3.50 o'brien\\ or 'each", vec![&mail]),
        ("mail -ann@example.com", vec![]),
        ("two", vec![&room, &table]),
        ("TABLE löwen", vec![&table]),
        ("\"for two\" -room", vec![&table]),
        ("4711 or löwen", vec![&room, &table]),
        // It begins as a sealed value does, and this session is in clear.
        ("wks1", vec![&room]),
        ("table room", vec![]),
        ("tab", vec![]),
    ] {
        assert_eq!(
            found(&store, text(words)).await,
            expected.into_iter().cloned().collect::<Vec<_>>(),
            "{words}"
        );
    }
    let from = |who: &str| SessionFilter { from: Some(who.to_owned()), ..SessionFilter::default() };
    assert_eq!(found(&store, from("ann@example.com")).await, [table.as_str()]);

    // What is said later is found too. Nothing is read twice.
    let more = NewMessage {
        client_key: None,
        text: "And a parking place.".into(),
        sender: Some("cid@example.com".into()),
        trace_context: None,
        attachments: Vec::new(),
    };
    store.send(&table, &more).await.unwrap();
    sqlx::query("update search_sessions set due_at = now() where due_at is not null")
        .execute(&database.pool)
        .await
        .unwrap();
    index(&store).await;
    assert_eq!(found(&store, from("cid@example.com")).await, [table.as_str()]);
    let parts: i64 =
        database.value("select count(*) from search_documents where session_id = $1", &table).await;
    assert_eq!(parts, 1, "the new message is in the inbox, and no record yet");

    // What was said in a later look is in a row of its own.
    sqlx::query("insert into search_documents values ($1, 2, 'default', to_tsvector('simple', 'cancelled'))")
        .bind(&table)
        .execute(&database.pool)
        .await
        .unwrap();
    for (words, expected) in
        [("two -cancelled", vec![&room]), ("-cancelled", vec![&mail, &room]), ("-", vec![])]
    {
        let expected: Vec<String> = expected.into_iter().cloned().collect();
        assert_eq!(found(&store, text(words)).await, expected, "{words}");
    }

    let behind = store.search_behind().await.unwrap();
    assert_eq!(behind.waiting, 0, "{behind:?}");

    // An erasure takes the words too.
    store.cancel(&room, None).await.unwrap();
    sqlx::query("delete from jobs where session_id = $1").bind(&room).execute(&database.pool).await.unwrap();
    sqlx::query("update conversation_sessions set status = 'failed' where session_id = $1")
        .bind(&room)
        .execute(&database.pool)
        .await
        .unwrap();
    sqlx::query("update conversation_counters set open_run_id = null where conversation_id = 'default/c2'")
        .execute(&database.pool)
        .await
        .unwrap();
    store.erase("default", &Subject::Conversation("default/c2".into())).await.unwrap();
    index(&store).await;
    assert_eq!(found(&store, text("4711")).await, [""; 0]);
    let left: i64 = database
        .value(
            "select (select count(*) from search_documents where session_id = $1)
                + (select count(*) from search_sessions where session_id = $1)",
            &room,
        )
        .await;
    assert_eq!(left, 0);
}

#[tokio::test]
async fn what_postgres_took_apart_is_found_by_words_addresses_hosts_and_decimals() {
    let database = Database::new().await;
    let store = database.store().await;
    let text = "Ann@example.com paid 3.50 at shop.example.org on 2026-11-25, see https://example.net/a-table for well-known.";
    let session_id = said(&store, "c1", None, text).await;
    index(&store).await;
    sqlx::query("update search_documents set words = to_tsvector('simple', $1)")
        .bind(text)
        .execute(&database.pool)
        .await
        .unwrap();
    let by = |words: &str| SessionFilter { text: Some(words.to_owned()), ..SessionFilter::default() };
    for words in
        ["paid", "ann@example.com", "3.50", "shop.example.org", "example.net/a-table", "well-known", "known"]
    {
        assert_eq!(found(&store, by(words)).await, [session_id.as_str()], "{words}");
    }
    // The CHANGELOG names these. In what is said now they are found.
    for words in ["2026-11-25", "https://example.net/a-table"] {
        assert_eq!(found(&store, by(words)).await, [""; 0], "{words}");
    }
}

#[tokio::test]
async fn a_large_message_is_compressed_with_lz4_where_the_server_has_it() {
    let database = Database::new().await;
    let store = database.store().await;
    let session_id = said(&store, "c1", None, &"A table for two, please. ".repeat(200)).await;
    index(&store).await;
    let has_lz4 = "select 'lz4' = any(enumvals) from pg_settings where name = $1";
    let expected = if database.value(has_lz4, "default_toast_compression").await { "lz4" } else { "pglz" };
    for sql in [
        "select pg_column_compression(content) from conversation_records where session_id = $1 and role = 'user'",
        "select pg_column_compression(content) from session_inbox where session_id = $1",
    ] {
        assert_eq!(database.value::<String>(sql, &session_id).await, expected, "{sql}");
    }
}

/// Searches as a client, until the search has caught up.
async fn comes(client: &Client, query: &str, expected: &[&str]) -> Value {
    eventually(query, || async {
        let (status, page) = client.get(&format!("/v1/sessions?{query}")).await;
        assert_eq!(status, StatusCode::OK, "{page}");
        let items = page["items"].as_array().unwrap();
        let found: Vec<&str> = items.iter().map(|one| one["conversation_id"].as_str().unwrap()).collect();
        (found == expected).then_some(page.clone())
    })
    .await
}

#[tokio::test]
async fn tools_errors_costs_and_users_are_found_while_workers_work_and_errors_stand_in_groups() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| {
        let messages = body["messages"].as_array().unwrap();
        let last = messages.last().unwrap();
        match (last["role"].as_str(), last["content"].as_str()) {
            (Some("tool"), _) => Answer::text("Reserved."),
            (_, Some("reserve")) => Answer::call("reserve", json!({"persons": 2})),
            (_, Some("fail")) => Answer::Error(400),
            _ => Answer::text("Hello."),
        }
    })
    .await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let options = options.config("[models.\"openai/test\"]\ninput_usd = 1000\noutput_usd = 1000");
    let process = options.serve(&database).await;
    let client = process.client();
    let mut ids = Vec::new();
    for (conversation, text, status) in [
        ("c1", "reserve", "completed"),
        ("c2", "fail", "failed"),
        ("c3", "fail", "failed"),
        ("c4", "hi", "completed"),
    ] {
        let body = json!({"text": text, "user_id": format!("user-of-{conversation}")});
        let (_, answer) = client.post(&format!("/v1/chat/{conversation}/messages"), &body).await;
        let id = answer["session_id"].as_str().unwrap().to_owned();
        client.wait_for(&id, status).await;
        ids.push(id);
    }
    comes(&client, "tool=reserve", &["c1"]).await;
    comes(&client, "steps_over=1", &["c1"]).await;
    comes(&client, "cost_over=0.15&agent=default", &["c1"]).await;
    comes(&client, "user=user-of-c4&trigger_type=chat", &["c4"]).await;
    let page = comes(&client, "status=failed&limit=1", &["c3"]).await;
    let cursor = page["next"].as_str().unwrap();
    comes(&client, &format!("status=failed&limit=1&cursor={cursor}"), &["c2"]).await;
    comes(&client, "since=2020-01-01T00:00:00Z&status=completed", &["c4", "c1"]).await;
    comes(&client, "until=2020-01-01T00:00:00Z", &[]).await;
    for wrong in ["cost_over=-1", "steps_over=x", "since=yesterday", "status=bad", "colour=red"] {
        assert_eq!(client.get(&format!("/v1/sessions?{wrong}")).await.0, StatusCode::BAD_REQUEST, "{wrong}");
    }

    // Both failures are one group.
    comes(&client, "error=refused", &["c3", "c2"]).await;
    let (_, page) = client.get("/v1/errors").await;
    assert_eq!(page["items"].as_array().unwrap().len(), 1, "{page}");
    let group = &page["items"][0];
    assert_eq!(
        (&group["count"], &group["kind"], &group["source"]),
        (&json!(2), &json!("refused"), &json!("openai"))
    );
    assert_eq!(group["sample"], json!([ids[2], ids[1]]));
    let fingerprint = group["fingerprint"].as_str().unwrap();
    comes(&client, &format!("error={fingerprint}"), &["c3", "c2"]).await;
    let path = format!("/v1/errors/{fingerprint}");
    assert_eq!(client.get(&path).await.1["failed_now"], 2);

    // A note, a mute, and the end of both.
    let (status, noted) = client.post(&format!("{path}/note"), &json!({"note": "ticket 311"})).await;
    assert_eq!(
        (status, &noted["note"], &noted["noted_by"]),
        (StatusCode::OK, &json!("ticket 311"), &json!("this machine"))
    );
    let (_, muted) = client.post(&format!("{path}/mute"), &json!({"reason": "known"})).await;
    assert_eq!(
        (&muted["muted"], &muted["muted_until"], &muted["mute_reason"]),
        (&json!(true), &Value::Null, &json!("known"))
    );
    assert_eq!(client.get("/v1/errors").await.1["items"], json!([]));
    assert_eq!(client.get("/v1/errors?muted=true").await.1["items"][0]["fingerprint"], fingerprint);
    let (_, heard) = client.post(&format!("{path}/mute"), &json!({"for_s": 0})).await;
    assert_eq!((&heard["muted"], &heard["muted_by"]), (&json!(false), &Value::Null));
    assert_eq!(client.post("/v1/errors/none/mute", &json!({})).await.0, StatusCode::NOT_FOUND);
    // A mute of no time is refused: it would end one, and not begin one.
    let mute = ["errors", "mute", fingerprint, "--for", "0s"];
    let refused = crate::cli::run(&options, &database.url, &mute).await;
    assert!(refused.code == 2 && refused.err.contains("--for is from 1s"), "{} {}", refused.out, refused.err);
    let (_, audit) = client.get("/v1/audit?verb=errors").await;
    let verbs: Vec<&str> =
        audit["items"].as_array().unwrap().iter().map(|row| row["verb"].as_str().unwrap()).collect();
    assert_eq!(verbs, ["errors.mute", "errors.mute", "errors.mute", "errors.note"], "{audit}");

    // A session that was retried and went on is no longer among them.
    let listed = crate::cli::run(&options, &database.url, &["errors", "list"]).await;
    assert!(listed.code == 0 && listed.out.contains(fingerprint), "{} {}", listed.out, listed.err);
    let shown = crate::cli::run(&options, &database.url, &["errors", "show", fingerprint]).await;
    assert!(shown.out.contains("2 sessions still failed"), "{}", shown.out);
    let list = ["session", "list", "--error", fingerprint, "--since", "1h", "-o", "json"];
    assert_eq!(crate::cli::run(&options, &database.url, &list).await.json().as_array().unwrap().len(), 2);
    let (_, behind) = client.get("/v1/search").await;
    assert!(behind["waiting"].is_i64() && behind["behind_s"].is_number(), "{behind}");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn those_active_most_recently_come_first_page_by_page_and_failed_calls_are_found() {
    let database = Database::new().await;
    let store = database.store().await;
    let mut sessions = Vec::new();
    for n in 0..4 {
        sessions.push(said(&store, &format!("c{n}"), Some("ann@example.com"), "Hello.").await);
    }
    // The oldest one goes on, and a tool failed in another.
    let more = NewMessage {
        client_key: None,
        text: "One more thing.".into(),
        sender: None,
        trace_context: None,
        attachments: Vec::new(),
    };
    store.send(&sessions[0], &more).await.unwrap();
    sqlx::query(
        "insert into tool_calls (space_id, session_id, call_id, run_id, step_number, message_number, name, args_sha256, effect, status)
        select space_id, session_id, 'call_1', 'run_1', 1, 1, 'charge', 'x', 'pure', 'failed'
        from conversation_sessions where session_id = $1",
    )
    .bind(&sessions[2])
    .execute(&database.pool)
    .await
    .unwrap();
    index(&store).await;
    let active = [&sessions[0], &sessions[3], &sessions[2], &sessions[1]].map(Clone::clone);
    let by_activity = || SessionFilter { by_activity: true, ..SessionFilter::default() };
    assert_eq!(found(&store, by_activity()).await, active);
    let mut pages = Vec::new();
    let mut filter = SessionFilter { limit: 2, ..by_activity() };
    loop {
        let (page, next) = store.sessions_page(&filter).await.unwrap();
        pages.extend(page.into_iter().map(|session| session.session_id));
        let Some(next) = next else { break };
        // The last one of the page moves to the top meanwhile.
        if pages.len() == 2 {
            store.send(&next.session_id, &more).await.unwrap();
            sqlx::query("update search_sessions set due_at = clock_timestamp()")
                .execute(&database.pool)
                .await
                .unwrap();
            index(&store).await;
        }
        filter.before = Some(next.session_id);
        filter.before_active_at = next.active_at;
    }
    assert_eq!(pages, active, "each once");
    let active = [&sessions[3], &sessions[0], &sessions[2], &sessions[1]].map(Clone::clone);
    let failed = SessionFilter { failed_calls: true, ..SessionFilter::default() };
    assert_eq!(found(&store, failed).await, [sessions[2].as_str()]);

    let options = crate::support::Options::new().model("scripted/demo");
    let cli = async |args: &[&str]| crate::cli::run(&options, &database.url, args).await;
    let listed = cli(&["session", "list", "--sort", "activity", "-o", "json"]).await.json();
    let ids: Vec<&str> =
        listed.as_array().unwrap().iter().map(|one| one["session_id"].as_str().unwrap()).collect();
    assert_eq!(ids, active);
    let listed = cli(&["session", "list", "--failed-calls", "-o", "json"]).await.json();
    assert_eq!(listed[0]["session_id"], sessions[2].as_str(), "{listed}");
    assert_eq!(cli(&["session", "list", "--sort", "cost"]).await.code, 2);
}
