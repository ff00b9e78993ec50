//! Intake under load: each message is taken once or refused with a time to retry, and nothing else is held
//! up.

use crate::support::client::texts;
use crate::support::{Answer, Client, Database, ModelServer, Options, eventually, within};
use futures::future::join_all;
use reqwest::StatusCode;
use reqwest::header::RETRY_AFTER;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::watch;

const SENDERS: usize = 40;
const MESSAGES: usize = 10;

/// The answers that the storm got.
#[derive(Default)]
struct Tally {
    taken: AtomicUsize,
    duplicates: AtomicUsize,
    refused: AtomicUsize,
    /// How many were answered and not refused. Each of them leaves room for another.
    answered: watch::Sender<usize>,
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn in_a_storm_each_message_is_taken_once_or_refused_and_a_senders_stay_in_order() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, _| Answer::text("Heard.")).await;
    // Two connections write, and four times as many messages as the intake limit arrive at once.
    let options = options(&model)
        .config("[database]\nmax_connections = 8")
        .server("ingest_concurrency = 25\ningest_wait_ms = 500");
    // No worker runs: accepted messages wait in the database.
    let api = options.clone().arg("--roles=api").serve(&database).await;
    let client = api.client();
    let tally = Arc::new(Tally::default());
    let looked = look_on(client.clone());
    join_all((0..SENDERS).map(|sender| storm(client.clone(), sender, Arc::clone(&tally)))).await;
    let looks = looked.await;

    let count = |of: &AtomicUsize| of.load(Ordering::SeqCst);
    let (taken, refused) = (count(&tally.taken), count(&tally.refused));
    assert_eq!(taken, SENDERS * MESSAGES, "each message was taken by one of its posts");
    assert!(refused > 0, "more came than could be taken");
    assert!(looks > 0, "and who only looks was served all along");
    assert!(count(&tally.duplicates) <= SENDERS * MESSAGES);
    let jobs: i64 = database.value("select count(*) from jobs where kind = 'step' and $1 <> ''", "all").await;
    assert_eq!(jobs as usize, SENDERS);

    let worker = options.clone().arg("--roles=worker").spawn(&database.url);
    eventually("every job to end", || async {
        let jobs: i64 = database.value("select count(*) from jobs where $1 <> ''", "all").await;
        (jobs == 0).then_some(())
    })
    .await;
    let said: Vec<(String, String)> = sqlx::query_as(
        "select conversation_id, content #>> '{0,text}' from conversation_records
        where role = 'user'
        order by conversation_id, message_number",
    )
    .fetch_all(&database.pool)
    .await
    .unwrap();
    let mut expected = Vec::new();
    for sender in 0..SENDERS {
        expected
            .extend((0..MESSAGES).map(|number| (format!("default/s{sender:03}"), format!("m{number:02}"))));
    }
    assert_eq!(said, expected, "each once, and in the order in which its sender sent them");
    let runs: i64 = database.value("select count(*) from session_runs where $1 <> ''", "all").await;
    assert_eq!(runs as usize, SENDERS, "they were one run each when the worker came");
    assert!(worker.terminate().success());
    assert!(api.terminate().success());
}

/// Sends one sender's messages, each one after the previous one was accepted. Sends each a second time in the
/// background.
async fn storm(client: Client, sender: usize, tally: Arc<Tally>) {
    let mut again = Vec::new();
    for number in 0..MESSAGES {
        post(&client, sender, number, &tally).await;
        // Acts as a sender that lost the first answer: the copies come in any order, among the newer
        // messages.
        let (client, tally) = (client.clone(), Arc::clone(&tally));
        again.push(tokio::spawn(async move { post(&client, sender, number, &tally).await }));
    }
    for one in again {
        one.await.unwrap();
    }
}

/// Posts one message until it is accepted.
async fn post(client: &Client, sender: usize, number: usize, tally: &Tally) {
    let body = json!({"text": format!("m{number:02}"), "client_key": format!("k{number}"), "user_id": "ann"});
    let path = format!("/v1/chat/s{sender:03}/messages");
    loop {
        let mut answered = tally.answered.subscribe();
        let answer = client.post_request(&path).body(body.to_string()).send().await.unwrap();
        match answer.status() {
            StatusCode::ACCEPTED => {
                tally.taken.fetch_add(1, Ordering::SeqCst);
                tally.answered.send_modify(|count| *count += 1);
                return;
            }
            StatusCode::OK => {
                tally.duplicates.fetch_add(1, Ordering::SeqCst);
                tally.answered.send_modify(|count| *count += 1);
                return;
            }
            StatusCode::TOO_MANY_REQUESTS => {
                assert!(answer.headers().contains_key(RETRY_AFTER));
                tally.refused.fetch_add(1, Ordering::SeqCst);
                // An impatient client retries as soon as one of those that had the room is answered, and not when `Retry-After` asks.
                within("room", answered.changed()).await.expect("the tally is there");
            }
            other => panic!("{other}: {}", answer.text().await.unwrap_or_default()),
        }
    }
}

/// Reads during the storm, and returns how many reads succeeded. A read that fails panics.
fn look_on(client: Client) -> impl Future<Output = usize> {
    let looking = tokio::spawn(async move {
        let mut looks = 0;
        let mut seen = 0;
        while seen < SENDERS {
            let (status, page) = client.get("/v1/sessions?limit=500").await;
            assert_eq!(status, StatusCode::OK, "{page}");
            seen = page["items"].as_array().unwrap().len();
            looks += 1;
        }
        looks
    });
    async move { looking.await.unwrap() }
}

#[tokio::test]
async fn when_no_turn_comes_in_time_a_message_is_refused_and_readers_and_the_health_are_not() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, _| Answer::text("Heard.")).await;
    let options = options(&model)
        .config("[database]\nmax_connections = 8")
        .server("ingest_concurrency = 4\ningest_wait_ms = 300");
    let api = options.arg("--roles=api").serve(&database).await;
    let client = api.client();
    for conversation in ["held", "held-too"] {
        client.chat(conversation, "one").await;
    }
    let free = client.chat("free", "one").await;
    let id = free["session_id"].as_str().unwrap().to_owned();

    // Both intake connections wait for sessions that the test has locked. Messages of one session would take only one.
    let mut lock = database.pool.begin().await.unwrap();
    sqlx::query("select 1 from conversation_sessions for update").execute(&mut *lock).await.unwrap();
    let held: Vec<_> = ["held", "held-too"].map(|conversation| spawn(&client, conversation, "two")).into();
    lock_waiters(&database, 2).await;

    // The next two pass the first check and get no connection in time. All others fail the first check.
    let late: Vec<(StatusCode, Option<String>, Value)> = join_all((0..8).map(|at| {
        let client = client.clone();
        async move {
            let path = format!("/v1/chat/other{at}/messages");
            let answer = client.post_request(&path).body(r#"{"text": "x"}"#).send().await.unwrap();
            let retry = answer.headers().get(RETRY_AFTER).map(|value| value.to_str().unwrap().to_owned());
            (answer.status(), retry, answer.json().await.unwrap())
        }
    }))
    .await;
    for (status, retry, problem) in late {
        assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{problem}");
        assert_eq!(retry.as_deref(), Some("1"));
        assert!(problem["detail"].as_str().unwrap().contains("nothing was taken"), "{problem}");
    }
    // Another endpoint shares the same connections.
    let body = json!({"text": "x"});
    let (status, problem) = client.post(&format!("/v1/sessions/{id}/messages"), &body).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{problem}");
    assert_eq!(client.session(&id).await["status"], "queued");
    assert_eq!(client.get("/readyz").await.0, StatusCode::OK);
    let sessions: i64 =
        database.value("select count(*) from conversation_sessions where $1 <> ''", "all").await;
    assert_eq!(sessions, 3, "refused messages left no row");

    lock.commit().await.unwrap();
    for one in held {
        assert_eq!(one.await.unwrap(), StatusCode::ACCEPTED, "messages that had a connection were taken");
    }
    client.chat("other0", "x").await;
    assert!(api.terminate().success());
}

#[tokio::test]
async fn a_large_body_is_refused_before_it_is_read_while_nothing_can_be_taken() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, _| Answer::text("Heard.")).await;
    let options = options(&model).server("ingest_concurrency = 1\ningest_wait_ms = 60000");
    let api = options.arg("--roles=api").serve(&database).await;
    let client = api.client();
    client.chat("held", "one").await;
    let mut lock = database.pool.begin().await.unwrap();
    sqlx::query("select 1 from conversation_sessions for update").execute(&mut *lock).await.unwrap();
    let held = spawn(&client, "held", "two");
    lock_waiters(&database, 1).await;

    // The body never ends, so an answer proves that the server did not wait for it.
    let endless = futures::stream::pending::<Result<Vec<u8>, std::io::Error>>();
    let request = client.post_request("/v1/chat/other/messages").body(reqwest::Body::wrap_stream(endless));
    assert_eq!(request.send().await.unwrap().status(), StatusCode::TOO_MANY_REQUESTS);
    lock.commit().await.unwrap();
    assert_eq!(held.await.unwrap(), StatusCode::ACCEPTED);
    assert!(api.terminate().success());
}

#[tokio::test]
async fn readers_that_hold_every_connection_of_theirs_keep_no_message_out() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, _| Answer::text("Heard.")).await;
    let options = options(&model).config("[database]\nmax_connections = 8");
    let api = options.clone().arg("--roles=api").serve(&database).await;
    let client = api.client();
    client.chat("c1", "one").await;

    // A reader of steps waits for a table that the test has locked. Taking a message does not need that
    // table.
    let mut lock = database.pool.begin().await.unwrap();
    sqlx::query("lock table session_steps in access exclusive mode").execute(&mut *lock).await.unwrap();
    let id = client.chat("c2", "one").await["session_id"].as_str().unwrap().to_owned();
    let readers: Vec<_> = (0..6)
        .map(|_| {
            let (client, id) = (client.clone(), id.clone());
            tokio::spawn(async move { client.get(&format!("/v1/sessions/{id}/steps")).await.0 })
        })
        .collect();
    lock_waiters(&database, 2).await;
    assert_eq!(client.chat("c2", "two").await["outcome"], "queued");
    lock.commit().await.unwrap();
    for reader in readers {
        assert_eq!(reader.await.unwrap(), StatusCode::OK);
    }
    let worker = options.clone().arg("--roles=worker").spawn(&database.url);
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "user"), ["one", "two"]);
    assert!(worker.terminate().success());
    assert!(api.terminate().success());
}

fn spawn(client: &Client, conversation: &str, text: &str) -> tokio::task::JoinHandle<StatusCode> {
    let (client, path) = (client.clone(), format!("/v1/chat/{conversation}/messages"));
    let body = json!({"text": text});
    tokio::spawn(async move { client.post(&path, &body).await.0 })
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

trait ServerOptions {
    /// Adds keys to the existing table `[server]`.
    fn server(self, keys: &str) -> Self;
}

impl ServerOptions for Options {
    fn server(self, keys: &str) -> Options {
        keys.lines().fold(self, |options, line| {
            let (key, value) = line.split_once(" = ").unwrap();
            options.env(&format!("WAKEFUL_SERVER__{}", key.to_uppercase()), value)
        })
    }
}
