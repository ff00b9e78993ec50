//! A session as people see it: its parts, its runs, its totals, and the messages that its reader is not
//! shown.

use crate::support::client::texts;
use crate::support::model::turns_since_user;
use crate::support::{Answer, Database, ModelServer, Options};
use reqwest::StatusCode;
use serde_json::{Value, json};
use wakeful_store::Store;
use wakeful_store::wake::{Continues, NewMessage, NewSession};
use wakeful_workflow::policy::SessionPolicy;
use wakeful_workflow::record::Role;
use wakeful_workflow::seed::Seed;
use wakeful_workflow::session::DebugMeta;

fn options(model: &ModelServer) -> Options {
    Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url)
}

fn id(answer: &Value) -> String {
    answer["session_id"].as_str().expect("an id").to_owned()
}

#[tokio::test]
async fn a_session_shows_what_it_is_made_of_and_each_of_its_runs() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| {
        let messages = body["messages"].as_array().expect("messages");
        match messages.last().and_then(|last| last["content"].as_str()) {
            Some("A table, please.") => Answer::call("reserve", json!({"persons": 2})),
            Some("fail") => Answer::Error(400),
            _ => Answer::text("Reserved."),
        }
    })
    .await;
    let options = options(&model).config("[models.\"openai/test\"]\ncontext_window = 64000");
    let process = options.serve(&database).await;
    let client = process.client();
    let body = json!({"user_id": "ann", "text": "A table, please.", "repository_id": "github.com/a/b"});
    let (_, answer) = client.post("/v1/chat/c1/messages", &body).await;
    let id = id(&answer);
    client.wait_for(&id, "completed").await;
    client.chat("c1", "fail").await;
    let session = client.wait_for(&id, "failed").await;

    for (field, value) in [
        ("space_id", json!("default")),
        ("agent", json!("default")),
        ("trigger_type", json!("chat")),
        ("trigger_id", json!("c1")),
        ("trigger_source", json!("user")),
        ("repository_id", json!("github.com/a/b")),
        ("parent_session_id", Value::Null),
        ("forked_from_message_id", Value::Null),
        ("parent_conversation_id", Value::Null),
        ("model_id", json!("openai/test")),
        ("model_context_window", json!(64000)),
        ("policy", json!({})),
        ("seed_message_count", json!(1)),
        ("base_message_number", json!(1)),
        ("last_message_number", json!(6)),
        ("to_message_number", json!(5)),
    ] {
        assert_eq!(session[field], value, "{field}: {session}");
    }
    let tools: Vec<&str> =
        session["tool_names"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    assert!(tools.is_sorted() && tools.contains(&"reserve") && tools.len() == 7, "{tools:?}");
    assert_eq!(session["prefix_sha256"].as_str().unwrap().len(), 64);
    assert!(
        session["completed_at"].is_string() && session["error"].as_str().unwrap().contains("400"),
        "{session}"
    );

    let runs = session["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 2);
    for (run, status, prompt, number, steps, tokens, calls) in [
        (&runs[0], "completed", "A table, please.", 2, 2, (200, 20), 1),
        (&runs[1], "failed", "fail", 6, 0, (0, 0), 0),
    ] {
        assert_eq!((&run["status"], &run["prompt"]), (&json!(status), &json!(prompt)));
        assert_eq!((&run["prompt_message_number"], &run["steps"]), (&json!(number), &json!(steps)));
        assert_eq!((&run["input_tokens"], &run["output_tokens"]), (&json!(tokens.0), &json!(tokens.1)));
        assert_eq!(run["tool_calls"], calls);
        assert!(run["started_at"].is_string() && run["completed_at"].is_string(), "{run}");
    }
    assert_eq!(runs[0]["run_id"], answer["run_id"]);
    assert_eq!(runs[0]["error"], Value::Null);
    assert!(runs[1]["error"].as_str().unwrap().contains("Remedy:"), "{}", runs[1]);
    assert_eq!(client.get("/v1/sessions").await.1["items"][0]["trigger_source"], "user", "a list has it too");
}

#[tokio::test]
async fn every_run_of_a_long_session_is_in_a_page() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, _| Answer::text("Heard.")).await;
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let id = id(&client.chat("c1", "Hello.").await);
    client.wait_for(&id, "completed").await;
    sqlx::query(
        "insert into session_runs
        select (jsonb_populate_record(r, jsonb_build_object('run_id', 'run_' || lpad(n::text, 4, '0'), 'created_at',
            r.created_at - make_interval(secs => n / 2)))).*
        from session_runs r, generate_series(1, 60) n",
    )
    .execute(&database.pool)
    .await
    .unwrap();
    let session = client.session(&id).await;
    assert_eq!(session["runs"].as_array().unwrap().len(), 50);
    let ids = |runs: &Value| -> Vec<String> {
        runs.as_array().unwrap().iter().map(|run| run["run_id"].as_str().unwrap().to_owned()).collect()
    };
    let (mut pages, mut cursor) = (vec![ids(&session["runs"])], session["runs_before"].clone());
    while let Some(before) = cursor.as_str() {
        let (status, page) = client.get(&format!("/v1/sessions/{id}/runs?limit=7&cursor={before}")).await;
        assert_eq!(status, StatusCode::OK, "{page}");
        pages.push(ids(&page["items"]));
        cursor = page["next"].clone();
        assert!(pages.len() < 10, "{pages:?}");
    }
    pages.reverse();
    let (_, whole) = client.get(&format!("/v1/sessions/{id}/runs?limit=500")).await;
    assert_eq!(whole["next"], Value::Null);
    assert_eq!((pages.concat(), ids(&whole["items"]).len()), (ids(&whole["items"]), 61));
    let (status, told) = client.get(&format!("/v1/sessions/{id}/runs?cursor=7")).await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{told}");
}

#[tokio::test]
async fn a_run_that_has_not_begun_shows_the_message_that_waits_for_it() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
    let process = options(&model).arg("--roles=api").serve(&database).await;
    let client = process.client();
    let first = id(&client.chat("c1", "one").await);
    client.post("/v1/conversations/c1/new", &json!({})).await;
    let second = id(&client.chat("c1", "two").await);
    assert_ne!(second, first);
    let run = client.session(&second).await["runs"][0].clone();
    assert_eq!((&run["status"], &run["prompt"]), (&json!("queued"), &json!("two")));
    assert_eq!((&run["prompt_message_number"], &run["started_at"]), (&Value::Null, &Value::Null));
}

#[tokio::test]
async fn debug_meta_is_the_sum_of_the_steps_after_tools_retries_and_a_kill() {
    let database = Database::new().await;
    // The model's second call fails once. Then the process dies in the middle of an answer.
    let model = ModelServer::start(|body, number| match (turns_since_user(body), number) {
        (0, _) => Answer::call("reserve", json!({"persons": 2})),
        (1, 1) => Answer::Error(503),
        (1, _) => Answer::call(
            "compose_email",
            json!({"to": ["ann@example.com"], "subject": "Table", "body": "For two."}),
        ),
        (_, _) => Answer::text("Reserved, and written to Ann."),
    })
    .await;
    let price = "[models.\"openai/test\"]\ninput_usd = 3.0\ncached_usd = 0.3\noutput_usd = 15.0";
    let options = options(&model).config(price);
    let process = options.clone().env("FAILPOINTS", "K10=2*off->1*return").serve(&database).await;
    let id = id(&process.client().chat("c1", "A table for two, please.").await);
    process.ended().await;
    let process = options.serve(&database).await;
    let client = process.client();
    let session = client.wait_for(&id, "completed").await;
    client.chat("c1", "Thanks!").await;
    let again = client.wait_for(&id, "completed").await;
    assert!(model.bodies().len() > 6, "a call failed, and one was cut off: {}", model.bodies().len());

    let steps: (i64, i64, i64, i64, i64, i64) = sqlx::query_as(
        "select count(*), sum(input_tokens), sum(output_tokens), sum(cached_tokens), sum(cache_write_tokens),
            sum(cost_micros)::bigint
        from session_steps where session_id = $1",
    )
    .bind(&id)
    .fetch_one(&database.pool)
    .await
    .unwrap();
    let (turns, input_tokens, output_tokens, cached_tokens, cache_write_tokens, cost_micros) = steps;
    let summed = DebugMeta {
        turns,
        input_tokens,
        output_tokens,
        cached_tokens,
        cache_write_tokens,
        total_tokens: input_tokens + output_tokens,
        cost_micros,
        cost_cents: (cost_micros + 5_000) / 10_000,
    };
    assert_eq!(serde_json::from_value::<DebugMeta>(again["debug_meta"].clone()).unwrap(), summed);
    assert_eq!(summed.turns, 6, "three steps per run");
    assert!(summed.cost_micros > 0 && summed.cached_tokens > 0, "{summed:?}");
    assert_eq!(again["total_cost_cents"], summed.cost_cents, "rounded as the database rounds");
    assert!(session["debug_meta"]["turns"] == 3);
    // A freshly hydrated session has the same totals.
    let store = database.store().await;
    assert_eq!(store.hydrate(&id).await.unwrap().debug_meta(), summed);
    assert!(store.verify(&id).await.unwrap().agrees);
}

#[tokio::test]
async fn what_is_said_of_an_email_is_marked_internal_where_replies_go_out_as_mail() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![
        Answer::call("compose_email", json!({"to": ["ann@example.com"], "subject": "Re", "body": "Yes."})),
        Answer::text("I have written to Ann."),
    ])
    .await;
    let store = database.store().await;
    // The worker dies right after the step that composed the email. Another one decides from the stored
    // transcript.
    let options = options(&model);
    let process =
        options.clone().arg("--roles=worker").env("FAILPOINTS", "K22=2*off->1*return").spawn(&database.url);
    let email = begin(&store, "email", "May we come?").await;
    process.ended().await;
    let process = options.serve(&database).await;
    let client = process.client();
    client.wait_for(&email, "completed").await;
    let marks = async |id: &str, query: &str| -> Vec<(String, bool)> {
        let (status, page) = client.get(&format!("/v1/sessions/{id}/messages{query}")).await;
        assert_eq!(status, StatusCode::OK, "{page}");
        let items = page["items"].as_array().unwrap().iter();
        items
            .map(|one| (one["role"].as_str().unwrap().to_owned(), one["internal"].as_bool().unwrap()))
            .collect()
    };
    let owned = |marks: &[(&str, bool)]| -> Vec<(String, bool)> {
        marks.iter().map(|(role, internal)| ((*role).to_owned(), *internal)).collect()
    };
    let all = [("user", false), ("assistant", false), ("tool", false), ("assistant", true)];
    assert_eq!(marks(&email, "").await, owned(&all));
    assert_eq!(marks(&email, "?internal=false").await, owned(&all[..3]));
    assert_eq!(marks(&email, "?internal=true").await, owned(&all[3..]));
    assert_eq!(marks(&email, "?internal=false&limit=1").await, owned(&all[2..3]));
    assert_eq!(
        client.get(&format!("/v1/sessions/{email}/messages?internal=maybe")).await.0,
        StatusCode::BAD_REQUEST
    );
    // The model has seen every message. An answer to the reader's own question is shown to the reader.
    let (_, answer) =
        client.post(&format!("/v1/sessions/{email}/messages"), &json!({"text": "And Bob?"})).await;
    assert_eq!(answer["outcome"], "new_run");
    let session = client.wait_for(&email, "completed").await;
    assert_eq!(texts(&session, "assistant").len(), 4);
    assert!(model.bodies().last().unwrap().contains("I have written to Ann."));

    let chat = id(&client.chat("c1", "May we come?").await);
    client.wait_for(&chat, "completed").await;
    assert!(marks(&chat, "").await.iter().all(|(_, internal)| !internal), "a chat's reader has it open");
}

/// A session as a trigger of this type would make it.
async fn begin(store: &Store, trigger_type: &str, text: &str) -> String {
    let new = NewSession {
        space_id: "default".to_owned(),
        mailbox_id: "default".to_owned(),
        conversation_id: format!("default/{trigger_type}"),
        trigger_type: trigger_type.to_owned(),
        trigger_id: "<1@example.com>".to_owned(),
        continues: Continues::Trigger,
        agent: "default".to_owned(),
        model_id: "openai/test".to_owned(),
        model_context_window: 128_000,
        tools: compose_email(),
        policy: SessionPolicy::default(),
        repository_id: None,
        speaker: None,
        only_agent: false,
        seeds: vec![Seed { role: Role::System, content: "You are a test.".to_owned(), is_new: true }],
    };
    let message = NewMessage {
        client_key: None,
        text: text.to_owned(),
        sender: None,
        trace_context: None,
        attachments: Vec::new(),
    };
    store.wake(&new, &message).await.expect("a message is taken").session_id
}

fn compose_email() -> Vec<wakeful_workflow::agent::ToolDefinition> {
    let registry = wakeful_engine::tool::registry::Registry::built_in().expect("the tools of the box");
    registry.definitions(&["compose_email".to_owned()]).expect("it is one of them")
}
