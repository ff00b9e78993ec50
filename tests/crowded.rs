//! A server with fewer connections than the fleet wants. What a process cannot get it does without, slower.

use crate::awake::one_connection;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, Server, eventually};
use futures::StreamExt;
use futures::stream;
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
