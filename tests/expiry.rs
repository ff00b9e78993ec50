//! Questions without an answer: closed once after their agent's time limit, even if the worker dies during
//! it.

use crate::support::client::texts;
use crate::support::model::turns_since_user;
use crate::support::{Answer, Client, Database, ModelServer, Options, eventually};
use serde_json::{Value, json};
use wakeful_store::question::Patience;
use wakeful_workflow::agent::OnExpired;

/// Longer than any test runs. Time passes only where a test changes the rows.
const HOUR: &str = "ask_expires_s = 3600";

#[tokio::test]
async fn a_question_that_nobody_answers_is_closed_and_the_model_goes_on() {
    let database = Database::new().await;
    let model = asking().await;
    let process = options(&model).config("ask_expires_s = 1").serve(&database).await;
    let client = process.client();
    let id = ask(&client).await;
    let session = client.wait_for(&id, "completed").await;
    assert!(texts(&session, "tool")[0].starts_with("NO ANSWER. Nobody answered within 1 seconds"));
    assert_eq!(texts(&session, "assistant"), ["", "Then for two."]);
    assert_eq!(
        (session["total_turns"].as_i64(), model.bodies().len()),
        (Some(2), 2),
        "no turn is counted twice"
    );
    let entries = journal(&client, &id).await;
    let woken = entries.iter().find(|entry| {
        entry["type"] == "state_transition" && entry["payload"]["from_state"] == "waiting_input"
    });
    assert_eq!(woken.unwrap()["payload"]["reason"], "no answer came within 1 s");
    let result = entries.iter().find(|entry| entry["type"] == "TOOL_RESULT").unwrap();
    assert_eq!(result["payload"]["ok"], false);

    // After that, the user's text is a message, not an answer to the closed question.
    let late = client.chat("c1", "Four.").await;
    assert_eq!(late["outcome"], "new_run");
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "user"), ["A table, please.", "Four."]);
    assert!(database.store().await.verify(&id).await.unwrap().agrees);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_run_whose_agent_wants_that_is_cancelled_and_says_why() {
    let database = Database::new().await;
    let model = asking().await;
    let options = options(&model).config("ask_expires_s = 1\non_ask_expired = \"fail\"");
    let process = options.serve(&database).await;
    let client = process.client();
    let id = ask(&client).await;
    let session = client.wait_for(&id, "cancelled").await;
    assert_eq!(session["error"], "cancelled");
    assert_eq!(model.bodies().len(), 1, "the model was not asked again");
    let entries = journal(&client, &id).await;
    let failed = entries.iter().rev().find(|entry| entry["type"] == "state_transition").unwrap();
    assert_eq!(failed["payload"]["reason"], "cancelled: no answer came within 1 s");
    // The session can continue.
    client.chat("c1", "Four.").await;
    client.wait_for(&id, "completed").await;
    assert!(process.terminate().success());
}

#[tokio::test]
async fn without_a_limit_a_question_is_answered_days_later_by_another_host() {
    let database = Database::new().await;
    let model = asking().await;
    let options = options(&model);
    let process = options.serve(&database).await;
    let id = ask(&process.client()).await;
    assert!(process.terminate().success());
    pass(&database, "3 days").await;

    let process = options.serve(&database).await;
    let client = process.client();
    // Wait until the worker runs. It must leave the question open.
    process.wait_for_log("\"Working\"").await;
    assert_eq!(client.session(&id).await["status"], "waiting_input");
    assert_eq!(client.chat("c1", "Four.").await["outcome"], "delivered");
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "tool"), ["Four."]);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_worker_that_was_away_for_days_closes_what_expired_meanwhile() {
    let database = Database::new().await;
    let model = asking().await;
    let options = options(&model).config(HOUR);
    let process = options.serve(&database).await;
    let id = ask(&process.client()).await;
    assert!(process.terminate().success());
    pass(&database, "3 days").await;
    // Several workers look, and one closes it.
    let processes = [options.serve(&database).await, options.serve(&database).await];
    let session = processes[0].client().wait_for(&id, "completed").await;
    assert!(texts(&session, "tool")[0].starts_with("NO ANSWER"));
    assert_eq!(model.bodies().len(), 2);
}

#[tokio::test]
async fn an_answer_in_the_same_instant_wins_or_is_a_message_of_its_own() {
    for answer_first in [true, false] {
        let database = Database::new().await;
        let model = asking().await;
        let process = options(&model).serve(&database).await;
        let client = process.client();
        let id = ask(&client).await;
        let store = database.store().await;
        // A worker may have looked at an earlier question of this session, so the age of the open question
        // decides.
        assert!(!store.expire_question(&id, HOUR_OF_DEFAULT, OnExpired::TellModel).await.unwrap());
        pass(&database, "3 days").await;

        // The test holds the lock on the conversation's row. Both calls wait for it and get it in order of
        // arrival.
        let mut lock = database.pool.begin().await.unwrap();
        sqlx::query("select 1 from conversation_counters for update").execute(&mut *lock).await.unwrap();
        let answer = || {
            let client = client.clone();
            tokio::spawn(async move { client.chat("c1", "Four.").await })
        };
        let expire = || {
            let (store, id) = (store.clone(), id.clone());
            tokio::spawn(
                async move { store.expire_question(&id, HOUR_OF_DEFAULT, OnExpired::TellModel).await },
            )
        };
        let (answer, expire) = if answer_first {
            let answer = answer();
            lock_waiters(&database, 1).await;
            (answer, expire())
        } else {
            let expire = expire();
            lock_waiters(&database, 1).await;
            (answer(), expire)
        };
        lock_waiters(&database, 2).await;
        lock.commit().await.unwrap();

        assert_eq!(expire.await.unwrap().unwrap(), !answer_first);
        let outcome = answer.await.unwrap()["outcome"].clone();
        let session = client.wait_for(&id, "completed").await;
        if answer_first {
            assert_eq!(outcome, "delivered");
            assert_eq!(texts(&session, "tool"), ["Four."]);
            assert_eq!(texts(&session, "user"), ["A table, please."]);
        } else {
            assert_ne!(outcome, "delivered");
            assert!(texts(&session, "tool")[0].starts_with("NO ANSWER"));
            assert_eq!(texts(&session, "user"), ["A table, please.", "Four."]);
        }
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn a_question_behind_another_sessions_run_is_closed_in_its_turn() {
    let database = Database::new().await;
    let model = asking().await;
    let api = options(&model).arg("--roles=api").serve(&database).await;
    let client = api.client();
    let worker = options(&model).arg("--roles=worker").spawn(&database.url);
    let id = ask(&client).await;
    assert!(worker.terminate().success());
    // Another session now has the conversation, and no worker runs.
    let (_, begun) = client.post("/v1/conversations/c1/new", &json!({})).await;
    let other = begun["session_id"].as_str().unwrap().to_owned();
    assert_eq!(client.chat("c1", "Something else.").await["session_id"], json!(other));
    pass(&database, "3 days").await;
    let store = database.store().await;
    let expire = || store.expire_question(&id, HOUR_OF_DEFAULT, OnExpired::TellModel);
    assert!(expire().await.unwrap());
    assert!(!expire().await.unwrap(), "once");
    assert_eq!(client.session(&id).await["status"], "queued");
    assert_eq!(client.session(&id).await["question"], Value::Null);
    // Sent after the question was closed and before the session's turn.
    let (_, late) = client.post(&format!("/v1/sessions/{id}/messages"), &json!({"text": "Four."})).await;
    assert_eq!(late["outcome"], "queued");

    let worker = options(&model).arg("--roles=worker").spawn(&database.url);
    let session = client.wait_for(&id, "completed").await;
    let order: Vec<&str> =
        session["messages"].as_array().unwrap().iter().map(|one| one["role"].as_str().unwrap()).collect();
    assert_eq!(order, ["user", "assistant", "tool", "user", "assistant"]);
    assert!(texts(&session, "tool")[0].starts_with("NO ANSWER"));
    assert!(worker.terminate().success());
}

#[tokio::test]
async fn k27_a_kill_around_the_closing_of_a_question_closes_it_once() {
    for failpoint in ["K27_expire=1*return", "K27_expired=1*return"] {
        let database = Database::new().await;
        let model = asking().await;
        let options = options(&model).config(HOUR);
        let process = options.serve(&database).await;
        let id = ask(&process.client()).await;
        assert!(process.terminate().success());
        pass(&database, "3 days").await;
        let killed = options.clone().arg("--roles=worker").env("FAILPOINTS", failpoint).spawn(&database.url);
        let (_, killed) = killed.ended().await;
        assert!(killed.log().contains("failpoint"), "{}", killed.log());

        let process = options.serve(&database).await;
        let client = process.client();
        let session = client.wait_for(&id, "completed").await;
        assert_eq!(texts(&session, "tool").len(), 1, "{failpoint}");
        let results = journal(&client, &id).await.into_iter().filter(|entry| entry["type"] == "TOOL_RESULT");
        assert_eq!((results.count(), model.bodies().len()), (1, 2), "{failpoint}");
        assert!(process.terminate().success());
    }
}

const HOUR_OF_DEFAULT: Patience<'static> = Patience { agent: "default", seconds: 3600 };

/// A model that asks one question, and continues with any result.
async fn asking() -> ModelServer {
    ModelServer::start(|body, _| {
        let asked = body["messages"].as_array().unwrap().iter().any(|one| one["role"] == "tool");
        match turns_since_user(body) {
            0 if !asked => Answer::call("ask_user", json!({"question": "For how many?"})),
            _ => Answer::text("Then for two."),
        }
    })
    .await
}

async fn ask(client: &Client) -> String {
    let answer = client.chat("c1", "A table, please.").await;
    let id = answer["session_id"].as_str().unwrap().to_owned();
    let asks = eventually("the question", || async {
        let entries = journal(client, &id).await;
        entries.iter().any(|entry| entry["payload"]["to_state"] == "waiting_input").then_some(())
    });
    asks.await;
    id
}

/// Makes everything in the database older by `time`.
async fn pass(database: &Database, time: &str) {
    let mut connection = database.pool.acquire().await.unwrap();
    // The journal is append-only. A replica role bypasses that.
    sqlx::query("set session_replication_role = replica").execute(&mut *connection).await.unwrap();
    for sql in [
        "update session_events set ts = ts - $1::interval",
        "update conversation_records set created_at = created_at - $1::interval",
    ] {
        sqlx::query(sql).bind(time).execute(&mut *connection).await.unwrap();
    }
    sqlx::query("set session_replication_role = origin").execute(&mut *connection).await.unwrap();
}

async fn journal(client: &Client, id: &str) -> Vec<Value> {
    client.get(&format!("/v1/sessions/{id}/events?limit=500")).await.1["items"].as_array().unwrap().clone()
}

/// Waits until `count` statements wait for a lock.
async fn lock_waiters(database: &Database, count: i64) {
    let waiting = "select count(*) from pg_stat_activity where datname = $1 and wait_event_type = 'Lock'";
    eventually(&format!("{count} to wait for the row"), || async {
        (database.value::<i64>(waiting, &database.name).await == count).then_some(())
    })
    .await;
}

fn options(model: &ModelServer) -> Options {
    Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url)
}
