//! Runs a hundred random talks under repeated `kill -9`, and the same hundred undisturbed. Both give the same
//! requests, byte for byte: the request before each answer, and the next one at the end of each session.

use crate::support::model::turns_since_user;
use crate::support::{Answer, Database, ModelServer, Options, world};
use serde_json::{Value, json};
use sqlx::postgres::PgListener;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;
use wakeful_store::Store;
use wakeful_store::wake::NewMessage;
use wakeful_workflow::context::full;
use wakeful_workflow::diff::{Level, diff};
use wakeful_workflow::record::Role;
use wakeful_workflow::session::{Session, SessionStatus};
use wakeful_workflow::wire::openai;

const HISTORIES: usize = 100;
/// Kills of the single worker.
const KILLS: usize = 16;
/// Another seed gives another hundred talks.
const SEED: u64 = 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
#[ignore = "slow: make soak"]
async fn a_hundred_random_histories_under_kill_9_have_the_contexts_of_those_that_never_died() {
    let (calm, killed) = tokio::join!(World::run(0), World::run(KILLS));
    assert_eq!((calm.killed, killed.killed), (0, KILLS));
    // Otherwise no kill fell into a model call, and the test would have shown nothing.
    let (asked, asked_again) = (calm.asked, killed.asked);
    assert!(asked_again > asked, "{asked} model calls, and {asked_again} under the kills");
    let mut compared = 0;
    for (one, other) in calm.ids.iter().zip(&killed.ids) {
        let (left, right) =
            (calm.store.hydrate(one).await.unwrap(), killed.store.hydrate(other).await.unwrap());
        let (requests, beside) = (requests(&left), requests(&right));
        assert_eq!(requests.len(), beside.len(), "{one} and {other}");
        for (request, beside) in requests.iter().zip(&beside) {
            assert_eq!(request, beside, "{one} and {other}");
        }
        compared += requests.len();
        let report = diff(&calm.store.side(one).await.unwrap(), &killed.store.side(other).await.unwrap());
        assert_eq!((report.verdict, report.requests.differ), (Level::Equal, 0), "{report:#?}");
    }
    assert!(compared > 3 * HISTORIES, "{compared} contexts");
    println!(
        "{compared} contexts of {HISTORIES} histories, {KILLS} kills, {asked} and {asked_again} model calls"
    );
}

/// The request that the model would get at the end, and the one before each of its answers.
fn requests(session: &Session) -> Vec<String> {
    let answers = session.records.iter().filter(|record| record.role == Role::Assistant);
    let cuts = answers.map(|record| record.message_number).chain([i64::MAX]);
    cuts.map(|cut| {
        let mut then = session.clone();
        then.records.retain(|record| record.message_number < cut);
        let request = openai::project(&full(&then, Vec::new()), &openai::Options::new("test", 8192));
        String::from_utf8(request.body).unwrap()
    })
    .collect()
}

/// A hundred talks that have ended.
struct World {
    store: Store,
    ids: Vec<String>,
    killed: usize,
    /// Number of model calls.
    asked: usize,
    _database: Database,
}

impl World {
    /// Runs the talks, while their worker is killed `kills` times.
    async fn run(kills: usize) -> World {
        let model = ModelServer::start(|body, _| answer(body)).await;
        model.pace(Duration::from_millis(2));
        // Deaths here are not the runs' fault, so no run may fail for too many attempts.
        let options = Options::new()
            .model("openai/test")
            .config("[agents.default.limits]\nattempts = 100")
            .env("OPENAI_BASE_URL", &model.url)
            .env("WAKEFUL_LOG", "warn")
            .arg("--roles=worker");
        let database = Database::new().await;
        let store = database.store().await;
        let mut ids = Vec::new();
        for history in 0..HISTORIES {
            let text = message(history, 0);
            ids.push(world::wake(&store, &format!("h{history}"), "openai/test", &text).await);
        }
        let mut news = PgListener::connect(&database.url).await.unwrap();
        news.listen("wakeful_sessions").await.unwrap();
        let mut talking = tokio::spawn(talk(store.clone(), ids.clone(), news));
        let (mut killed, mut talked) = (0, false);
        while killed < kills && !talked {
            let mut process = options.spawn(&database.url);
            // The next kill falls after this many more calls.
            let until = model.bodies().len() + 4 + below(killed as u64, 20);
            tokio::select! {
                ended = &mut talking => {
                    ended.unwrap();
                    talked = true;
                }
                () = model.asked(until) => {}
            }
            assert!(!process.has_ended(), "the worker ended by itself");
            process.kill();
            killed += 1;
        }
        let process = options.spawn(&database.url);
        if !talked {
            talking.await.unwrap();
        }
        assert!(process.terminate().success());
        World { store, ids, killed, asked: model.bodies().len(), _database: database }
    }
}

/// Posts each talk's next message after the previous one is answered, until all talks end.
async fn talk(store: Store, ids: Vec<String>, mut news: PgListener) {
    let mut said = vec![1; ids.len()];
    loop {
        let mut open = 0;
        for (history, id) in ids.iter().enumerate() {
            let status = store.session(None, id).await.unwrap().status;
            assert_ne!(status, SessionStatus::Failed.as_str(), "{id}");
            if status != SessionStatus::Completed.as_str() {
                open += 1;
            } else if said[history] < messages(history) {
                let text = message(history, said[history]);
                let message = NewMessage {
                    client_key: None,
                    text,
                    sender: None,
                    trace_context: None,
                    attachments: Vec::new(),
                };
                store.send(id, &message).await.unwrap();
                said[history] += 1;
                open += 1;
            }
        }
        if open == 0 {
            return;
        }
        // A worker that is killed after a commit tells nobody of it.
        let _ = tokio::time::timeout(Duration::from_secs(1), news.recv()).await;
    }
}

fn messages(history: usize) -> usize {
    1 + below(history as u64, 3)
}

fn message(history: usize, number: usize) -> String {
    format!("history {history}, message {number} of seed {SEED}")
}

/// The model's answer depends only on the user's message and on the number of turns since, so it is the same
/// in both worlds. All tools that it calls are safe to repeat.
fn answer(body: &Value) -> Answer {
    let messages = body["messages"].as_array().unwrap();
    let asked = messages.iter().rev().find(|message| message["role"] == "user").unwrap();
    let turn = turns_since_user(body);
    let dice = |what: &str, sides: usize| {
        let mut hasher = DefaultHasher::new();
        (asked["content"].to_string(), what).hash(&mut hasher);
        below(hasher.finish(), sides)
    };
    if turn >= dice("turns", 4) {
        let words = [
            "Done.",
            "That is it.",
            "Done, as you asked: \u{e4}\u{1f600}.",
            "A longer reply, of some words.",
        ];
        return Answer::text(words[dice(&format!("end {turn}"), words.len())]);
    }
    let calls = (0..1 + dice(&format!("calls {turn}"), 3)).map(|call| {
        let number = dice(&format!("arguments {turn} {call}"), 1000);
        let (name, arguments) = match dice(&format!("tool {turn} {call}"), 4) {
            0 => ("reserve", json!({"persons": number + 1})),
            1 => (
                "write_file",
                json!({"path": format!("notes/{}.md", number % 3), "content": format!("{number}\n")}),
            ),
            2 => (
                "compose_email",
                json!({"to": ["ann@example.org"], "subject": format!("{number}"), "body": "It is yours."}),
            ),
            _ => ("read_file", json!({"path": format!("never/{number}.md")})),
        };
        (name.to_owned(), arguments.to_string())
    });
    Answer::Calls(calls.collect())
}

/// A number below `limit`. The same number and seed always give the same result.
fn below(number: u64, limit: usize) -> usize {
    let mut hasher = DefaultHasher::new();
    (SEED, number).hash(&mut hasher);
    (hasher.finish() % limit as u64) as usize
}
