//! Kills where a message comes in, where a job is taken, and where a run waits for a person.

use super::{BOTH, GUARDED};
use crate::support::client::texts;
use crate::support::model::turns_since_user;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, World, eventually};
use reqwest::StatusCode;
use serde_json::{Value, json};

/// Posts the world's first message under a key of its own. Returns `None` if the process died during the
/// request.
async fn post(client: &Client) -> Option<(StatusCode, Value)> {
    let body = json!({"user_id": "ann", "text": "A table for two, please.", "client_key": "k1"});
    let request = client.post_request("/v1/chat/killed/messages").body(body.to_string());
    let answer = request.send().await.ok()?;
    let status = answer.status();
    Some((status, answer.json().await.ok()?))
}

/// Kills the API while it takes a message, and returns the world it left behind.
async fn killed_over_a_message(failpoint: &str) -> World {
    let world = World::new("killed", BOTH).await;
    let api = world.options.clone().arg("--roles=api").env("FAILPOINTS", failpoint);
    let api = api.serve(&world.database).await;
    assert!(post(&api.client()).await.is_none(), "nothing is acknowledged");
    let (_, process) = api.ended().await;
    assert!(process.log().contains("failpoint"), "{}", process.log());
    world
}

/// Posts the message again to a new process, twice, and finishes the conversation.
async fn post_again(mut world: World, first: StatusCode) {
    let process = world.serve().await;
    let client = process.client();
    let (status, answer) = post(&client).await.unwrap();
    assert_eq!(status, first, "{answer}");
    let (status, again) = post(&client).await.unwrap();
    assert_eq!((status, &again), (StatusCode::OK, &answer), "the same key is the same message");
    world.session_id = answer["session_id"].as_str().unwrap().to_owned();
    let traces = world.finish(&client).await;
    assert_eq!(traces.journal("MESSAGE_RECEIVED").len(), 2, "the message and the one after it");
    let seeds: i64 = world
        .database
        .value("select count(*) from session_seed_messages where session_id = $1", &world.session_id)
        .await;
    assert_eq!(seeds, 1);
    let sessions: i64 =
        world.database.value("select count(*) from conversation_sessions where $1 <> ''", "all").await;
    assert_eq!(sessions, 1);
    assert_eq!(world.model.bodies(), World::undisturbed(BOTH).await);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn k01_a_message_that_was_not_committed_is_not_there_and_is_one_when_it_is_posted_again() {
    let world = killed_over_a_message("K1=1*return").await;
    assert!(nothing(&world.database).await);
    post_again(world, StatusCode::ACCEPTED).await;
}

#[tokio::test]
async fn k02_a_message_of_which_no_worker_was_told_is_found_by_looking() {
    let world = World::new("killed", BOTH).await;
    // The worker is up before the message arrives. The API dies before it notifies, so only polling can find
    // the message.
    let worker = world.options.clone().arg("--roles=worker").spawn(&world.database.url);
    worker.wait_for_log("\"Working\"").await;
    let api = world.options.clone().arg("--roles=api").env("FAILPOINTS", "K2=1*return");
    let api = api.serve(&world.database).await;
    assert!(post(&api.client()).await.is_none(), "nothing is acknowledged");
    let (_, process) = api.ended().await;
    assert!(process.log().contains("failpoint"), "{}", process.log());

    eventually("the reply", || async {
        let sql = "select count(*) from conversation_sessions where status = 'completed' and $1 <> ''";
        let completed: i64 = world.database.value(sql, "any").await;
        (completed == 1).then_some(())
    })
    .await;
    assert_eq!(world.model.bodies().len(), 2, "one reply, after one turn of calls");
    assert!(worker.terminate().success());
    post_again(world, StatusCode::OK).await;
}

#[tokio::test]
async fn k01_k02_a_message_to_a_session_that_was_not_acknowledged_is_one_when_it_comes_again() {
    for (failpoint, first) in [("K1=1*return", StatusCode::ACCEPTED), ("K2=1*return", StatusCode::OK)] {
        let database = Database::new().await;
        let model = ModelServer::turns(vec![Answer::text("Noted.")]).await;
        let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
        let process = options.serve(&database).await;
        let client = process.client();
        let session_id = client.chat("c1", "Hello.").await["session_id"].as_str().unwrap().to_owned();
        client.wait_for(&session_id, "completed").await;
        assert!(process.terminate().success());

        let path = format!("/v1/sessions/{session_id}/messages");
        let message = json!({"text": "And a table for two.", "client_key": "k1"});
        let api = options.clone().arg("--roles=api").env("FAILPOINTS", failpoint).serve(&database).await;
        let request = api.client().post_request(&path).body(message.to_string());
        assert!(request.send().await.is_err(), "{failpoint}: nothing is acknowledged");
        let (_, process) = api.ended().await;
        assert!(process.log().contains("failpoint"), "{}", process.log());

        let process = options.serve(&database).await;
        let client = process.client();
        let (status, answer) = client.post(&path, &message).await;
        assert_eq!(status, first, "{failpoint}: {answer}");
        let (status, again) = client.post(&path, &message).await;
        assert_eq!(
            (status, &again),
            (StatusCode::OK, &answer),
            "{failpoint}: the same key is the same message"
        );
        let session = client.wait_for(&session_id, "completed").await;
        assert_eq!(texts(&session, "user"), ["Hello.", "And a table for two."], "{failpoint}");
        assert_eq!(texts(&session, "assistant"), ["Noted.", "Noted."], "{failpoint}");
        assert_eq!(model.bodies().len(), 2, "{failpoint}: one call for each message");
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn k04_a_session_is_created_whole_or_not_at_all() {
    let world = killed_over_a_message("K4=1*return").await;
    assert!(nothing(&world.database).await);
    post_again(world, StatusCode::ACCEPTED).await;
}

/// Returns whether every table is empty.
async fn nothing(database: &Database) -> bool {
    database.rows().await == Database::new().await.rows().await
}

#[tokio::test]
async fn k24_of_three_workers_one_takes_the_job() {
    let mut world = World::new("raced", BOTH).await;
    world.model.hold();
    let processes: Vec<Process> = [world.serve().await, world.serve().await, world.serve().await].into();
    let client = processes[0].client();
    world.begin(&client).await;
    world.model.asked(1).await;
    // Every queue polls several times per second. Once every worker has sent a heartbeat more than a second
    // later, all have polled.
    // Listening comes before the first heartbeat.
    let at: String = eventually("three hearts to beat", || async {
        sqlx::query_scalar("select clock_timestamp()::text from workers having count(*) = 3")
            .fetch_optional(&world.database.pool)
            .await
            .unwrap()
    })
    .await;
    eventually("three hearts to beat again", || async {
        let sql = "select count(*) from workers where beat_at > $1::timestamptz + interval '1 s'";
        let beats: i64 = world.database.value(sql, &at).await;
        (beats == 3).then_some(())
    })
    .await;
    assert_eq!(world.model.bodies().len(), 1);
    let leases: i64 = world.database.value("select last_value from leases where $1 <> ''", "all").await;
    assert_eq!(leases, 1, "one lease was given");
    world.model.release();
    let traces = world.finish(&client).await;
    assert!(traces.steps.iter().all(|step| step["attempt"] == 1));
    assert_eq!(world.model.bodies(), World::undisturbed(BOTH).await);
}

#[tokio::test]
async fn k25_a_message_in_the_instant_of_completion_survives_a_kill_on_either_side_of_the_commit() {
    // One kill comes before the reply's commit, which loses the model's answer. The other comes right after
    // the commit.
    for (failpoint, replies) in [("K21=1*off->1*return", 1), ("K22=3*off->1*return", 2)] {
        let mut world = World::new("killed", GUARDED).await;
        world.model.hold_from(1);
        let process = world.serve_until(failpoint).await;
        let client = process.client();
        world.begin(&client).await;
        world.model.asked(2).await;
        let answer = client.chat("killed", "And one for tomorrow.").await;
        assert_eq!(answer["outcome"], "queued", "the run was not over when it came");
        world.model.release();
        let (_, process) = process.ended().await;
        assert!(process.log().contains("failpoint"), "{}", process.log());

        let process = world.serve().await;
        let client = process.client();
        let session = client.wait_for(&world.session_id, "completed").await;
        eventually("every job to end", || async {
            let jobs: i64 = world.database.value("select count(*) from jobs where $1 <> ''", "all").await;
            (jobs == 0).then_some(())
        })
        .await;
        assert_eq!(texts(&session, "user"), ["A table for two, please.", "And one for tomorrow."]);
        let traces = world.check().await;
        let said = texts(&session, "assistant").into_iter().filter(|text| !text.is_empty()).count();
        assert_eq!(said, replies, "{failpoint}: each reply that was committed stays");
        assert!(traces.journal("TOOL_FAILED_UNCERTAIN").is_empty());
        assert_eq!(world.effects("charge"), 2);
    }
}

#[tokio::test]
async fn k27_a_question_is_answered_on_another_host_with_its_files() {
    for same_host in [true, false] {
        let database = Database::new().await;
        let model = ModelServer::start(|body, _| match turns_since_user(body) {
            0 => Answer::call("write_file", json!({"path": "notes.md", "content": "A table for Ann."})),
            1 => Answer::call("ask_user", json!({"question": "For how many?"})),
            2 => Answer::call("read_file", json!({"path": "notes.md"})),
            _ => Answer::text("Reserved."),
        })
        .await;
        let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
        let process = options.serve(&database).await;
        let first = process.client().chat("c1", "A table, please.").await;
        let id = first["session_id"].as_str().unwrap().to_owned();
        process.client().wait_for(&id, "waiting_input").await;
        process.kill();

        let mut other = options.clone();
        if !same_host {
            let elsewhere = options.path("elsewhere").display().to_string();
            other = other.env("WAKEFUL_WORKSPACE__DIR", elsewhere);
        }
        let process = other.serve(&database).await;
        let client = process.client();
        let answer = client.chat("c1", "Four.").await;
        assert_eq!((&answer["outcome"], &answer["run_id"]), (&json!("delivered"), &first["run_id"]));
        let session = client.wait_for(&id, "completed").await;
        let results = texts(&session, "tool");
        assert_eq!(results[1], "Four.", "the answer is the question's result");
        assert!(results[2].contains("A table for Ann."), "its files: {results:?}");
        assert_eq!(texts(&session, "assistant").last().unwrap(), "Reserved.");
        assert_eq!(model.bodies().len(), 4, "no model call was made again");
        assert!(process.terminate().success());
    }
}
