//! A server with fewer connections than the fleet wants. What a process cannot get it does without, slower.

use crate::awake::one_connection;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, Server, eventually};
use futures::StreamExt;
use futures::future::join_all;
use futures::stream;
use reqwest::StatusCode;
use reqwest::header::RETRY_AFTER;
use serde_json::json;

/// Processes on one server that takes `connections` in all.
async fn every_run_completes(workers: usize, connections: u32, runs: usize) {
    let most = connections.to_string();
    let server = Server::with(&[("max_connections", &most)]).await;
    let mut database = Database::on(&server.url(), "pg_default").await;
    // A pool of several would open another connection where the first is on its way back, and get none.
    database.pool = one_connection(&database).await;
    let model = ModelServer::start(|_, _| Answer::text("Heard.")).await;
    // The default lease. With the short one of other tests, jobs of a slow worker would change hands.
    let options = Options::new()
        .model("openai/test")
        .env("OPENAI_BASE_URL", &model.url)
        .env("WAKEFUL_QUEUE__LEASE_S", "30")
        .env("WAKEFUL_QUEUE__HEARTBEAT_S", "10");
    let api = options.clone().arg("--roles=api").serve(&database).await;
    let mut fleet: Vec<Process> =
        (0..workers).map(|_| options.clone().arg("--roles=worker").spawn(&database.url)).collect();
    let client = api.client();
    stream::iter(0..runs).for_each_concurrent(8, |number| post(&client, number)).await;
    let completed = "select count(*) from session_runs where status = $1";
    eventually("every run to complete", || async {
        (database.value::<i64>(completed, "completed").await == runs as i64).then_some(())
    })
    .await;
    assert_eq!(database.value::<i64>(completed, "failed").await, 0);
    eventually("every job to end", || async {
        (database.value::<i64>("select count(*) from jobs where kind <> $1", "none").await == 0).then_some(())
    })
    .await;
    for worker in &mut fleet {
        assert!(!worker.has_ended(), "{}", worker.log());
    }
    let own: i64 =
        database.value("select count(*) from pg_stat_activity where application_name = $1", "wakeful").await;
    assert!(own <= i64::from(connections), "{own}");
    for worker in fleet {
        assert!(worker.terminate().success());
    }
    assert!(api.terminate().success());
}

/// Sends a message until it is taken. A sender tries again when it is told to.
async fn post(client: &Client, number: usize) {
    let body = json!({"text": "Hello.", "client_key": "k", "user_id": "ann"});
    eventually("a message to be taken", || async {
        let (status, _) = client.post(&format!("/v1/chat/c{number}/messages"), &body).await;
        status.is_success().then_some(())
    })
    .await;
}

#[tokio::test]
async fn four_workers_and_an_api_finish_every_run_on_27_connections() {
    every_run_completes(4, 27, 100).await;
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn sixteen_workers_finish_every_run_on_100_connections() {
    every_run_completes(16, 100, 1000).await;
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn four_workers_and_an_api_finish_a_thousand_runs_on_27_connections() {
    every_run_completes(4, 27, 1000).await;
}

/// A whole process opens at most as many connections as the configuration says, also under load.
#[tokio::test]
async fn a_process_opens_at_most_eight_connections() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, _| Answer::text("Heard.")).await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    process.wait_for_log("Took the liveness lock").await;
    let client = process.client();
    let count = "select count(*) from pg_stat_activity where datname = $1 and application_name = 'wakeful'";
    let mut most = 0;
    let mut posts =
        std::pin::pin!(stream::iter(0..60).for_each_concurrent(16, |number| post(&client, number)));
    loop {
        let open: i64 = database.value(count, &database.name).await;
        most = most.max(open);
        assert!(open <= 8, "{open} connections");
        if futures::poll!(posts.as_mut()).is_ready() {
            break;
        }
    }
    let done = "select count(*) from session_runs where status = $1";
    eventually("every run to complete", || async {
        let open: i64 = database.value(count, &database.name).await;
        assert!(open <= 8, "{open} connections");
        (database.value::<i64>(done, "completed").await == 60).then_some(())
    })
    .await;
    assert!(most >= 5, "{most}: LISTEN, heartbeat, lock, a lane, a statement");
    assert!(process.terminate().success());
}

/// Asks, and says how it was answered and whether it may ask again later.
async fn ask(client: Client, path: String, body: serde_json::Value) -> (StatusCode, bool) {
    let answer = client.post_request(&path).body(body.to_string()).send().await.unwrap();
    (answer.status(), answer.headers().contains_key(RETRY_AFTER))
}

/// A person holds the rows of one session in a transaction of their own.
#[tokio::test]
async fn a_session_that_another_transaction_holds_takes_no_connection_from_the_others() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, _| Answer::text("Heard.")).await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    let client = process.client();
    model.hold();
    let session = client.chat("held", "Hello.").await["session_id"].as_str().unwrap().to_owned();
    model.asked(1).await;
    let mut person = database.pool.begin().await.unwrap();
    let lock = "select from conversation_counters c
        join conversation_sessions s using (conversation_id)
        where conversation_id = 'default/held' for update";
    sqlx::query(lock).execute(&mut *person).await.unwrap();
    model.release();

    let say = |number: usize| json!({"text": "Hello?", "client_key": format!("k{number}"), "user_id": "ann"});
    let messages =
        (0..50).map(|number| ask(client.clone(), "/v1/chat/held/messages".to_owned(), say(number)));
    let acts = (0..2).map(|_| ask(client.clone(), format!("/v1/sessions/{session}/cancel"), json!({})));
    let refused = tokio::spawn(join_all(messages.collect::<Vec<_>>()));
    let refused_acts = tokio::spawn(join_all(acts.collect::<Vec<_>>()));
    eventually("statements to wait for the lock", || async {
        let waiting = "select count(*) from pg_stat_activity where datname = $1 and wait_event_type = 'Lock'";
        (database.value::<i64>(waiting, &database.name).await >= 2).then_some(())
    })
    .await;
    // All this while they wait.
    for number in 0..3 {
        let other = client.chat(&format!("other{number}"), "Hello.").await;
        let path = format!("/v1/sessions/{}", other["session_id"].as_str().unwrap());
        eventually("another session's run to complete", || async {
            let (status, session) = client.get(&path).await;
            assert_eq!(status, StatusCode::OK, "{session}");
            (session["status"] == "completed").then_some(())
        })
        .await;
        let (ready, said) = client.get("/readyz").await;
        assert_eq!(ready, StatusCode::OK, "{said}");
    }
    for (status, later) in refused.await.unwrap().into_iter().chain(refused_acts.await.unwrap()) {
        assert!(later && (status == 503 || status == 429), "{status}");
    }
    process.wait_for_log("The commit failed; trying again").await;
    person.rollback().await.unwrap();

    for number in 0..50 {
        let answer = ask(client.clone(), "/v1/chat/held/messages".to_owned(), say(number)).await;
        assert_eq!(answer.0, StatusCode::ACCEPTED, "nothing of it was taken before");
    }
    client.wait_for(&session, "completed").await;
    let ended = "select count(*) from session_runs where status <> 'completed' and $1 <> ''";
    eventually("every run to complete", || async {
        (database.value::<i64>(ended, "all").await == 0).then_some(())
    })
    .await;
    assert!(process.terminate().success());
}
