//! Messages that arrive while a session is busy, waits, rests or has ended: none is lost, and each is
//! answered in turn.

use crate::support::checker::check;
use crate::support::client::{numbers, texts};
use crate::support::model::turns_since_user;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, World, eventually};
use reqwest::StatusCode;
use serde_json::{Value, json};

#[tokio::test]
async fn follow_ups_while_queued_and_running_are_one_step_in_their_order() {
    let database = Database::new().await;
    let model = echo().await;
    let options = options(&model);
    // Queued: a process with the API alone takes messages and runs nothing.
    let api = options.clone().arg("--roles=api").serve(&database).await;
    let client = api.client();
    let first = client.chat("c1", "one").await;
    let second = client.chat("c1", "two").await;
    assert_eq!((&first["outcome"], &second["outcome"]), (&json!("new_run"), &json!("queued")));
    assert_eq!(first["run_id"], second["run_id"]);
    let id = id(&first);
    assert_eq!(client.session(&id).await["status"], "queued");

    // Running: the model is held in the middle of its answer.
    model.hold();
    let worker = worker(&options, &database).await;
    model.asked(1).await;
    assert_eq!(client.session(&id).await["status"], "running");
    for text in ["three", "four", "five"] {
        let answer = client.chat("c1", text).await;
        assert_eq!((&answer["outcome"], &answer["run_id"]), (&json!("queued"), &first["run_id"]));
    }
    model.release();

    let session = client.wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "user"), ["one", "two", "three", "four", "five"]);
    assert_eq!(texts(&session, "assistant"), ["You said: one, two.", "You said: three, four, five."]);
    assert_eq!(model.bodies().len(), 2, "three follow-ups are one model call");
    assert_eq!(session["steps"].as_array().unwrap().len(), 2);
    assert_eq!(numbers(&session), [2, 3, 4, 5, 6, 7, 8]);
    assert!(worker.terminate().success());
    assert!(api.terminate().success());
}

// The commit of the tool's result records the intent of the next model call, and then finds that a message
// arrived. The request must have the message, so that call is not made.
#[tokio::test]
async fn a_message_while_a_tool_runs_is_in_the_next_request_and_no_call_looks_interrupted() {
    let mut world = World::new("during", &["reserve"]).await;
    let hold = world.options.path("hold-reserve");
    std::fs::write(&hold, "").unwrap();
    let process = world.serve().await;
    let client = process.client();
    world.begin(&client).await;
    world.has_effect("reserve").await;
    client.chat("during", "For four, please.").await;
    std::fs::remove_file(&hold).unwrap();
    client.wait_for(&world.session_id, "completed").await;
    assert!(process.terminate().success());
    let traces = world.check().await;
    assert!(world.model.bodies()[1].contains("For four, please."));
    assert!(traces.journal("GEN_RESUMED").is_empty());
    assert!(traces.journal("LLM_CALLED").iter().all(|called| called["attempt"] == 1));
    assert_eq!(traces.journal("LLM_CALLED").len(), world.model.bodies().len());
}

#[tokio::test]
async fn a_message_during_the_last_answer_keeps_the_answer_and_is_answered() {
    let database = Database::new().await;
    let model = echo().await;
    let process = options(&model).serve(&database).await;
    let client = process.client();
    model.hold();
    let first = client.chat("c1", "one").await;
    let id = id(&first);
    model.asked(1).await;
    let before = wake_seq(&database, &id).await;
    let second = client.chat("c1", "two").await;
    assert_eq!(second["outcome"], "queued");
    assert!(wake_seq(&database, &id).await > before, "wake_seq has moved, so the commit sees the message");
    model.release();

    let session = client.wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "assistant"), ["You said: one.", "You said: two."]);
    assert_eq!(session["total_turns"], 2);
    assert_eq!(runs(&database, &id).await, 1, "the run went on");
    assert_eq!(transitions(&client, &id).await, ["queued", "running", "completed"]);
}

#[tokio::test]
async fn a_run_that_answers_each_of_many_messages_meets_no_limit() {
    // Each answer costs 110 tokens.
    for limits in ["limits = { steps = 2 }", "limits = { tokens = 200 }"] {
        let database = Database::new().await;
        let model = ModelServer::start(|_, number| Answer::text(&format!("Answer {number}."))).await;
        model.hold();
        let process = options(&model).config(limits).serve(&database).await;
        let client = process.client();
        let id = id(&client.chat("c1", "Message 0").await);
        for number in 1..5 {
            model.asked(number).await;
            client.chat("c1", &format!("Message {number}")).await;
            model.hold_from(number);
        }
        model.release();
        let session = client.wait_for(&id, "completed").await;
        assert_eq!(texts(&session, "assistant").len(), 5, "{limits}: {session}");
        assert_eq!(runs(&database, &id).await, 1, "one run answered them all");
        check(&database, &id, &[]).await;
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn no_message_is_lost_in_the_instant_of_completion() {
    let database = Database::new().await;
    let model = echo().await;
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let mut sent = Vec::new();
    let mut session_id = String::new();
    // Post each message as soon as the answer to the previous one is visible. The run closes at that moment.
    for turn in 0..60 {
        let text = format!("m{turn}");
        let body = json!({"user_id": "ann", "text": text, "client_key": text});
        let (status, answer) = client.post("/v1/chat/c1/messages", &body).await;
        assert_eq!(status, StatusCode::ACCEPTED, "{answer}");
        session_id = id(&answer);
        sent.push(text);
        if turn % 3 != 0 {
            model.asked_about(&format!("m{turn}")).await;
        }
    }
    let session = eventually("every message to be answered", || async {
        let session = client.session(&session_id).await;
        let items = all_messages(&client, &session_id).await;
        let said: String = items.iter().filter(|one| one["role"] == "assistant").map(text).collect();
        let all = sent
            .iter()
            .all(|text| said.contains(&format!(" {text},")) || said.contains(&format!(" {text}.")));
        (all && session["status"] == "completed").then_some(items)
    })
    .await;
    let heard: Vec<String> = session.iter().filter(|one| one["role"] == "user").map(text).collect();
    assert_eq!(heard, sent, "each once and in order");
    let open: i64 = sqlx::query_scalar("select count(*) from jobs").fetch_one(&database.pool).await.unwrap();
    assert_eq!(open, 0);
}

#[tokio::test]
async fn the_answer_to_a_question_is_its_result_whichever_process_hears_it() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| match turns_since_user(body) {
        0 => Answer::call("ask_user", json!({"question": "For how many?"})),
        _ => Answer::text("Reserved."),
    })
    .await;
    let options = options(&model);
    let process = options.serve(&database).await;
    let client = process.client();
    let first = client.chat("c1", "A table, please.").await;
    let id = id(&first);
    let session = client.wait_for(&id, "waiting_input").await;
    assert_eq!(session["question"], "For how many?");
    assert!(process.terminate().success());

    // A waiting question exists only in the database, so the next process finds it unchanged.
    let process = options.serve(&database).await;
    let client = process.client();
    assert_eq!(client.session(&id).await["status"], "waiting_input");
    let answer = client.chat("c1", "Four.").await;
    assert_eq!((&answer["outcome"], &answer["run_id"]), (&json!("delivered"), &first["run_id"]));
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "tool"), ["Four."]);
    assert_eq!(texts(&session, "user"), ["A table, please."]);
    assert_eq!(texts(&session, "assistant"), ["", "Reserved."]);
    assert_eq!(session["question"], Value::Null);
    assert_eq!(runs(&database, &id).await, 1);
    let asked = &serde_json::from_str::<Value>(&model.bodies()[1]).unwrap()["messages"];
    assert_eq!(asked[3]["role"], "tool");
    assert_eq!(asked[3]["content"], "Four.");
}

#[tokio::test]
async fn people_read_the_question_of_a_tool_and_not_the_models_words_for_it() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| match turns_since_user(body) {
        0 => Answer::call("confirm", json!({"order": "7", "question": "May I say hello?"})),
        _ => Answer::text("Paid."),
    })
    .await;
    let agent =
        "[agents.default]\nsystem_prompt = \"You pay.\"\nmodel = \"openai/test\"\ntools = [\"confirm\"]";
    let process = Options::new().config(agent).env("OPENAI_BASE_URL", &model.url).serve(&database).await;
    let client = process.client();
    let id = id(&client.chat("c1", "Buy it.").await);
    let session = client.wait_for(&id, "waiting_input").await;
    assert_eq!(session["question"], "Pay 40 euros for order 7?");
    client.chat("c1", "Yes.").await;
    let session = client.wait_for(&id, "completed").await;
    assert_eq!((&session["question"], texts(&session, "tool")), (&Value::Null, vec!["Yes.".to_owned()]));
}

#[tokio::test]
async fn a_message_that_races_the_question_answers_it_in_either_order() {
    for message_first in [true, false] {
        let database = Database::new().await;
        let model = ModelServer::start(|body, _| match turns_since_user(body) {
            0 => Answer::call("ask_user", json!({"question": "For how many?"})),
            _ => Answer::text("Reserved."),
        })
        .await;
        let process = options(&model).serve(&database).await;
        let client = process.client();
        model.hold();
        let id = id(&client.chat("c1", "A table, please.").await);
        model.asked(1).await;

        // The test holds the lock on the session's row. Both sides wait for it and get it in order of
        // arrival.
        let mut lock = database.pool.begin().await.unwrap();
        sqlx::query("select 1 from conversation_sessions for update").execute(&mut *lock).await.unwrap();
        let post = || {
            let client = client.clone();
            tokio::spawn(async move { client.chat("c1", "Four.").await })
        };
        let answer = if message_first {
            let answer = post();
            lock_waiters(&database, 1).await;
            model.release();
            answer
        } else {
            model.release();
            lock_waiters(&database, 1).await;
            post()
        };
        lock_waiters(&database, 2).await;
        lock.commit().await.unwrap();

        // The question's commit gives up its place in a lane after 250 ms, so the message may overtake it.
        let outcome = answer.await.unwrap()["outcome"].clone();
        assert!(outcome == "queued" || (!message_first && outcome == "delivered"), "{outcome}");
        let session = client.wait_for(&id, "completed").await;
        assert_eq!(texts(&session, "tool"), ["Four."]);
        assert_eq!(texts(&session, "assistant"), ["", "Reserved."]);
        assert_eq!(texts(&session, "user"), ["A table, please."]);
        let waited = transitions(&client, &id).await.contains(&"waiting_input".to_owned());
        assert_eq!(waited, outcome == "delivered");
    }
}

#[tokio::test]
async fn a_message_after_the_end_is_a_new_run_of_the_same_session() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| match last_text(body).as_str() {
        "fail" => Answer::Error(400),
        text => Answer::text(&format!("You said: {text}.")),
    })
    .await;
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let first = client.chat("c1", "one").await;
    let id = id(&first);
    client.wait_for(&id, "completed").await;

    let second = client.chat("c1", "fail").await;
    assert_eq!((&second["outcome"], &second["session_id"]), (&json!("new_run"), &first["session_id"]));
    assert_ne!(second["run_id"], first["run_id"]);
    let session = client.wait_for(&id, "failed").await;
    assert!(session["error"].as_str().unwrap().contains("Remedy:"), "{session}");

    let third = client.chat("c1", "three").await;
    assert_eq!(third["outcome"], "new_run");
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(session["error"], Value::Null);
    assert_eq!(texts(&session, "user"), ["one", "fail", "three"]);
    assert_eq!(texts(&session, "assistant"), ["You said: one.", "You said: three."]);
    assert_eq!(runs(&database, &id).await, 3);
}

#[tokio::test]
async fn a_message_for_a_session_that_needs_attention_waits_for_the_person() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| {
        let messages = body["messages"].as_array().unwrap();
        match messages.iter().any(|one| one["role"] == "tool") {
            false => Answer::call("charge", json!({"cents": 500})),
            true => Answer::text("The outcome is unknown."),
        }
    })
    .await;
    let options = options(&model).config("on_uncertain = \"needs_attention\"");
    std::fs::write(options.path("hold"), "").unwrap();
    let process = options.serve(&database).await;
    let client = process.client();
    let first = client.chat("c1", "Charge me.").await;
    let id = id(&first);
    options.has_effects(1).await;
    process.kill();
    std::fs::remove_file(options.path("hold")).unwrap();
    let process = options.serve(&database).await;
    let client = process.client();
    client.wait_for(&id, "needs_attention").await;

    let answer = client.chat("c1", "Well?").await;
    assert_eq!((&answer["outcome"], &answer["run_id"]), (&json!("queued"), &first["run_id"]));
    let session = client.session(&id).await;
    assert_eq!(session["status"], "needs_attention");
    assert_eq!(texts(&session, "user"), ["Charge me."]);

    let (status, retried) = client.post(&format!("/v1/sessions/{id}/retry"), &json!({})).await;
    assert_eq!((status, &retried["run_id"]), (StatusCode::ACCEPTED, &first["run_id"]));
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "user"), ["Charge me.", "Well?"]);
    assert!(texts(&session, "tool")[0].starts_with("OUTCOME UNKNOWN"));
    assert_eq!(options.effects().len(), 1, "nothing was charged again");
}

#[tokio::test]
async fn a_session_that_was_put_away_takes_no_message_and_says_what_is_possible() {
    let database = Database::new().await;
    let model = echo().await;
    let process = options(&model).serve(&database).await;
    let client = process.client();
    for (conversation, verb, status, valid) in
        [("c1", "archive", "archived", json!(["terminate"])), ("c2", "terminate", "terminated", json!([]))]
    {
        let id = id(&client.chat(conversation, "one").await);
        client.wait_for(&id, "completed").await;
        let (code, put) = client.post(&format!("/v1/sessions/{id}/{verb}"), &json!({})).await;
        assert_eq!((code, &put["status"]), (StatusCode::ACCEPTED, &json!(status)));
        let (code, problem) =
            client.post(&format!("/v1/chat/{conversation}/messages"), &json!({"text": "two"})).await;
        assert_eq!(code, StatusCode::CONFLICT, "{problem}");
        assert_eq!((&problem["session_status"], &problem["valid"]), (&json!(status), &valid));
        assert!(problem["detail"].as_str().unwrap().contains("/v1/conversations/{id}/new"), "{problem}");
        assert_eq!(texts(&client.session(&id).await, "user"), ["one"]);
    }
    let waiting: i64 = sqlx::query_scalar("select count(*) from session_inbox where status = 'pending'")
        .fetch_one(&database.pool)
        .await
        .unwrap();
    assert_eq!(waiting, 0);
}

/// A model that repeats what was said since its last answer.
async fn echo() -> ModelServer {
    ModelServer::start(|body, _| {
        let messages = body["messages"].as_array().unwrap();
        let since = messages.iter().rposition(|one| one["role"] == "assistant").map_or(0, |at| at + 1);
        let said: Vec<String> =
            messages[since..].iter().filter(|one| one["role"] == "user").flat_map(said).collect();
        Answer::text(&format!("You said: {}.", said.join(", ")))
    })
    .await
}

/// The texts of one user message: the projection may have merged several messages into it.
fn said(message: &Value) -> Vec<String> {
    match &message["content"] {
        Value::String(text) => text.split("\n\n").map(str::to_owned).collect(),
        parts => {
            parts.as_array().unwrap().iter().map(|part| part["text"].as_str().unwrap().to_owned()).collect()
        }
    }
}

fn last_text(body: &Value) -> String {
    said(body["messages"].as_array().unwrap().last().unwrap()).pop().unwrap()
}

fn options(model: &ModelServer) -> Options {
    Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url)
}

async fn worker(options: &Options, database: &Database) -> Process {
    let worker = options.clone().arg("--roles=worker").spawn(&database.url);
    worker.wait_for_log("\"Working\"").await;
    worker
}

fn id(answer: &Value) -> String {
    answer["session_id"].as_str().expect("a session").to_owned()
}

fn text(message: &Value) -> String {
    message["text"].as_str().expect("text").to_owned()
}

async fn wake_seq(database: &Database, id: &str) -> i64 {
    database.value("select wake_seq from conversation_sessions where session_id = $1", id).await
}

/// Waits until `count` statements wait for a lock.
async fn lock_waiters(database: &Database, count: i64) {
    let waiting = "select count(*) from pg_stat_activity where datname = $1 and wait_event_type = 'Lock'";
    eventually(&format!("{count} to wait for the row"), || async {
        (database.value::<i64>(waiting, &database.name).await == count).then_some(())
    })
    .await;
}

async fn runs(database: &Database, id: &str) -> i64 {
    database.value("select count(*) from session_runs where session_id = $1", id).await
}

async fn journal(client: &Client, id: &str) -> Vec<Value> {
    let (status, page) = client.get(&format!("/v1/sessions/{id}/events?limit=500")).await;
    assert_eq!(status, StatusCode::OK, "{page}");
    page["items"].as_array().unwrap().clone()
}

async fn all_messages(client: &Client, id: &str) -> Vec<Value> {
    let (_, page) = client.get(&format!("/v1/sessions/{id}/messages?limit=500")).await;
    page["items"].as_array().unwrap().clone()
}

/// The statuses that the session went through.
async fn transitions(client: &Client, id: &str) -> Vec<String> {
    let entries = journal(client, id).await;
    let moved = entries.iter().filter(|entry| entry["type"] == "state_transition");
    moved.map(|entry| entry["payload"]["to_state"].as_str().unwrap().to_owned()).collect()
}
