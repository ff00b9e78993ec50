//! Cancel and retry, and the limits that end a run.

use crate::console::browser::Browser;
use crate::support::client::{numbers, texts};
use crate::support::model::turns_since_user;
use crate::support::{Answer, Client, Database, ModelServer, Options};
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

#[tokio::test]
async fn a_run_that_is_cancelled_in_the_queue_never_calls_the_model() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
    let options = options(&model);
    let api = options.clone().arg("--roles=api").serve(&database).await;
    let client = api.client();
    let first = client.chat("c1", "one").await;
    let id = id(&first);
    let (status, cancelled) =
        client.post(&format!("/v1/sessions/{id}/cancel"), &json!({"reason": "a test"})).await;
    assert_eq!((status, &cancelled["run_id"]), (StatusCode::ACCEPTED, &first["run_id"]));

    let worker = options.clone().arg("--roles=worker").spawn(&database.url);
    let session = client.wait_for(&id, "cancelled").await;
    assert_eq!(session["error"], "cancelled");
    assert_eq!(model.bodies().len(), 0);
    assert_eq!(texts(&session, "user"), ["one"]);

    // The session is still usable.
    assert_eq!(client.chat("c1", "two").await["outcome"], "new_run");
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "assistant"), ["Hello."]);
    assert!(worker.terminate().success());
}

#[tokio::test]
async fn a_message_after_the_cancel_is_for_the_next_run_and_is_answered() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
    let options = options(&model);
    let api = options.clone().arg("--roles=api").serve(&database).await;
    let client = api.client();
    let first = client.chat("c1", "one").await;
    let id = id(&first);
    // No worker runs yet: the cancel is requested, and the run has not ended.
    cancel(&client, &id).await;
    assert_eq!(client.session(&id).await["status"], "queued");
    let second = client.chat("c1", "two").await;
    let third = client.chat("c1", "three").await;
    assert_eq!((&second["outcome"], &third["outcome"]), (&json!("new_run"), &json!("new_run")));
    assert_ne!(second["run_id"], first["run_id"]);
    assert_eq!(second["run_id"], third["run_id"]);

    let worker = options.clone().arg("--roles=worker").spawn(&database.url);
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "user"), ["one", "two", "three"]);
    assert_eq!(texts(&session, "assistant"), ["Hello."]);
    assert_eq!(
        (session["messages"][3]["run_id"].clone(), runs(&database).await),
        (second["run_id"].clone(), 2)
    );
    assert!(worker.terminate().success());
}

#[tokio::test]
async fn a_run_that_is_cancelled_while_the_model_speaks_ends_without_it() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("A long answer.")]).await;
    let process = options(&model).serve(&database).await;
    let client = process.client();
    model.hold();
    let id = id(&client.chat("c1", "one").await);
    model.asked(1).await;
    cancel(&client, &id).await;
    // The model stays held in the middle of its answer.
    let session = client.wait_for(&id, "cancelled").await;
    assert_eq!(session["error"], "cancelled");
    assert_eq!(session["cancel_requested"], false);
    assert_eq!(texts(&session, "assistant"), [""; 0]);
    let kinds = journal(&client, &id).await;
    assert!(kinds.contains(&"LLM_CALLED".to_owned()), "the call was made and is on the record: {kinds:?}");
    let rows: i64 =
        sqlx::query_scalar("select count(*) from generations").fetch_one(&database.pool).await.unwrap();
    assert_eq!(rows, 0, "no call is in flight");
    let jobs: i64 = sqlx::query_scalar("select count(*) from jobs").fetch_one(&database.pool).await.unwrap();
    assert_eq!(jobs, 0);

    model.release();
    // Somebody wanted this end, so it is not a run to retry. A message goes on.
    let (status, refused) = client.post(&format!("/v1/sessions/{id}/retry"), &json!({})).await;
    assert_eq!((status, &refused["session_status"]), (StatusCode::CONFLICT, &json!("cancelled")));
    client.chat("c1", "Go on.").await;
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "assistant"), ["A long answer."]);
    assert_eq!(runs(&database).await, 2);
}

#[tokio::test]
async fn a_guarded_call_that_is_cancelled_is_uncertain_and_never_repeated() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, number| match number {
        0 => Answer::call("charge", json!({"cents": 500})),
        _ => Answer::text("I cannot tell whether you were charged."),
    })
    .await;
    let options = options(&model);
    std::fs::write(options.path("hold"), "").unwrap();
    let process = options.serve(&database).await;
    let client = process.client();
    let id = id(&client.chat("c1", "Charge me.").await);
    options.has_effects(1).await;
    cancel(&client, &id).await;
    let session = client.wait_for(&id, "cancelled").await;
    assert_eq!(session["error"], "cancelled");
    assert_eq!(session["tool_calls"][0]["status"], "uncertain");
    let told = &texts(&session, "tool")[0];
    assert!(told.starts_with("OUTCOME UNKNOWN. The run was cancelled while the call ran."), "{told}");
    assert_eq!(session["tool_calls"][0]["reason"], "The run was cancelled while the call ran.");
    let page = Browser::new(&process.url()).open(&format!("/sessions/{id}")).await;
    assert!(page.html.contains("<p>The run was cancelled while the call ran. So it is not"), "{}", page.html);
    assert!(journal(&client, &id).await.contains(&"TOOL_FAILED_UNCERTAIN".to_owned()));

    std::fs::remove_file(options.path("hold")).unwrap();
    client.chat("c1", "Was I charged?").await;
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "assistant").last().unwrap(), "I cannot tell whether you were charged.");
    assert_eq!(options.effects().len(), 1);
    assert_eq!(session["tool_calls"][0]["status"], "uncertain", "it stays listed");
    let told = &body(&model, 1)["messages"];
    let result = told.as_array().unwrap().iter().find(|message| message["role"] == "tool").unwrap();
    assert!(result["content"].as_str().unwrap().contains("OUTCOME UNKNOWN"));
    assert_eq!(numbers(&session), [2, 3, 4, 5, 6]);
}

#[tokio::test]
async fn a_question_that_is_cancelled_is_closed_and_a_message_is_a_new_run() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| {
        let last = body["messages"].as_array().unwrap().last().unwrap();
        match last["content"].as_str().unwrap() {
            "one" => Answer::call("ask_user", json!({"question": "Which?"})),
            text => Answer::text(&format!("You said: {text}.")),
        }
    })
    .await;
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let first = client.chat("c1", "one").await;
    let id = id(&first);
    client.wait_for(&id, "waiting_input").await;
    cancel(&client, &id).await;
    let session = client.wait_for(&id, "cancelled").await;
    assert_eq!((&session["error"], &session["question"]), (&json!("cancelled"), &Value::Null));
    assert_eq!(session["tool_calls"][0]["status"], "abandoned");

    let second = client.chat("c1", "two").await;
    assert_eq!(second["outcome"], "new_run");
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "assistant"), ["", "You said: two."]);
}

#[tokio::test]
async fn a_retry_goes_on_from_the_last_commit() {
    let database = Database::new().await;
    let down = Arc::new(AtomicBool::new(true));
    let model = {
        let down = Arc::clone(&down);
        ModelServer::start(move |body, _| match turns_since_user(body) {
            0 => Answer::call("reserve", json!({"persons": 2})),
            _ if down.load(Ordering::SeqCst) => Answer::Error(500),
            _ => Answer::text("Your table is reserved."),
        })
        .await
    };
    // The second fault comes half a second after the first.
    let options = options(&model).config("limits = { outage_s = 0.2 }");
    let process = options.serve(&database).await;
    let client = process.client();
    let first = client.chat("c1", "A table for two.").await;
    let id = id(&first);
    let session = client.wait_for(&id, "failed").await;
    let error = session["error"].as_str().unwrap();
    assert!(error.contains("2 attempts") && error.contains("500") && error.contains("Remedy:"), "{error}");
    assert_eq!(session["total_turns"], 1, "the step before is kept");
    let asked = model.bodies();
    assert_eq!(asked.len(), 3, "one turn, and two attempts of the next");
    assert_eq!(asked[1], asked[2]);
    let calls = journal(&client, &id).await.iter().filter(|kind| *kind == "LLM_CALLED").count();
    assert_eq!(calls, 3, "each call that was made is on the record");

    down.store(false, Ordering::SeqCst);
    let (status, retried) = client.post(&format!("/v1/sessions/{id}/retry"), &json!({})).await;
    assert_eq!((status, &retried["run_id"]), (StatusCode::ACCEPTED, &first["run_id"]));
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(session["error"], Value::Null);
    assert_eq!(texts(&session, "assistant"), ["", "Your table is reserved."]);
    assert_eq!(numbers(&session), [2, 3, 4, 5]);
    assert_eq!(options.effects().len(), 1, "no step is repeated");
    let asked = model.bodies();
    assert_eq!(asked.len(), 4, "no earlier request is sent again");
    assert_eq!(asked[3], asked[1]);
    assert_eq!(runs(&database).await, 1);
}

#[tokio::test]
async fn what_is_not_possible_now_is_refused_with_what_is() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let id = id(&client.chat("c1", "one").await);
    client.wait_for(&id, "completed").await;
    for verb in ["retry", "cancel"] {
        let (status, problem) = client.post(&format!("/v1/sessions/{id}/{verb}"), &json!({})).await;
        assert_eq!(status, StatusCode::CONFLICT, "{verb}: {problem}");
        assert_eq!(problem["session_status"], "completed");
        assert_eq!(problem["valid"], json!(["messages", "archive", "terminate"]));
        assert!(problem["detail"].as_str().unwrap().contains(verb), "{problem}");
    }
    assert_eq!(client.session(&id).await["status"], "completed");

    model.hold();
    client.chat("c1", "two").await;
    model.asked(2).await;
    let (status, problem) = client.post(&format!("/v1/sessions/{id}/retry"), &json!({})).await;
    assert_eq!((status, &problem["valid"]), (StatusCode::CONFLICT, &json!(["messages", "cancel"])));
    model.release();
    client.wait_for(&id, "completed").await;
}

#[tokio::test]
async fn limits_end_a_run_with_a_remedy_that_works() {
    // Each answer costs 110 tokens.
    for (limit, raised, names) in [
        ("limits = { steps = 2 }", "limits = { steps = 10 }", "limits.steps"),
        ("limits = { tokens = 200 }", "limits = { tokens = 5000 }", "limits.tokens"),
    ] {
        let database = Database::new().await;
        let call = || Answer::call("reserve", json!({"persons": 2}));
        let model = ModelServer::turns(vec![call(), call(), call(), Answer::text("Done.")]).await;
        let limited = options(&model).config(limit);
        let process = limited.serve(&database).await;
        let client = process.client();
        let first = client.chat("c1", "Loop.").await;
        let id = id(&first);
        let session = client.wait_for(&id, "failed").await;
        let error = session["error"].as_str().unwrap();
        assert!(error.contains("Remedy:") && error.contains(names), "{error}");
        assert_eq!(model.bodies().len(), 2);
        assert_eq!(session["total_turns"], 2);

        // Without the remedy the run fails again, and costs nothing more.
        client.post(&format!("/v1/sessions/{id}/retry"), &json!({})).await;
        client.wait_for(&id, "failed").await;
        assert_eq!(model.bodies().len(), 2);
        assert!(process.terminate().success());

        let process = Options { dir: Arc::clone(&limited.dir), ..options(&model).config(raised) }
            .serve(&database)
            .await;
        let client = process.client();
        let (status, retried) = client.post(&format!("/v1/sessions/{id}/retry"), &json!({})).await;
        assert_eq!((status, &retried["run_id"]), (StatusCode::ACCEPTED, &first["run_id"]));
        let session = client.wait_for(&id, "completed").await;
        assert_eq!(texts(&session, "assistant").last().unwrap(), "Done.");
        assert_eq!(session["total_turns"], 4);
        assert_eq!(model.bodies().len(), 4, "no turn is made twice");
        assert_eq!(limited.effects().len(), 3);
    }
}

#[tokio::test]
async fn a_session_that_cannot_be_read_fails_with_the_row_to_mend_and_goes_on_when_it_is_mended() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
    let options = options(&model);
    let api = options.clone().arg("--roles=api").serve(&database).await;
    let client = api.client();
    let id = id(&client.chat("c1", "one").await);
    set_state(&database, &id, "[]").await;

    let worker = options.clone().arg("--roles=worker").spawn(&database.url);
    let session = client.wait_for(&id, "failed").await;
    let error = session["error"].as_str().unwrap();
    assert!(error.contains("corrupt state") && error.contains("Remedy"), "{error}");
    assert_eq!(model.bodies().len(), 0);

    set_state(&database, &id, "{}").await;
    let (status, _) = client.post(&format!("/v1/sessions/{id}/retry"), &json!({})).await;
    assert_eq!(status, StatusCode::ACCEPTED);
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "assistant"), ["Hello."]);
    assert!(worker.terminate().success());
}

async fn set_state(database: &Database, id: &str, state: &str) {
    sqlx::query("update conversation_sessions set state = $2::jsonb where session_id = $1")
        .bind(id)
        .bind(state)
        .execute(&database.pool)
        .await
        .unwrap();
}

fn options(model: &ModelServer) -> Options {
    Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url)
}

fn id(answer: &Value) -> String {
    answer["session_id"].as_str().expect("a session").to_owned()
}

fn body(model: &ModelServer, number: usize) -> Value {
    serde_json::from_str(&model.bodies()[number]).expect("JSON")
}

async fn cancel(client: &Client, id: &str) {
    let (status, answer) = client.post(&format!("/v1/sessions/{id}/cancel"), &json!({})).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{answer}");
}

async fn runs(database: &Database) -> i64 {
    sqlx::query_scalar("select count(*) from session_runs").fetch_one(&database.pool).await.expect("runs")
}

async fn journal(client: &Client, id: &str) -> Vec<String> {
    let (_, page) = client.get(&format!("/v1/sessions/{id}/events?limit=500")).await;
    let items = page["items"].as_array().expect("items");
    items.iter().map(|entry| entry["type"].as_str().expect("a type").to_owned()).collect()
}
