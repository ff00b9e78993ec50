//! Chats on workers that keep what they have read of a session. A turn reads only what is new, and its model call shows all of it.

use crate::support::recorder::{Recorder, Sent};
use crate::support::world::{send, wake};
use crate::support::{Answer, Database, ModelServer, Options, Process, eventually};
use serde_json::Value;
use std::cell::Cell;
use wakeful_store::Store;
use wakeful_store::erase::Subject;

struct World {
    database: Database,
    store: Store,
    model: ModelServer,
    options: Options,
}

/// A worker, and what it sends to the database.
struct Worker {
    process: Process,
    recorder: Recorder,
    /// Of sessions that it has worked on.
    turns: Cell<usize>,
}

impl World {
    async fn new() -> World {
        let database = Database::new().await;
        let store = database.store().await;
        // The answer to the first message is "Answer 1.".
        let model = ModelServer::start(|body, _| {
            let said = body["messages"].as_array().unwrap();
            let asked = said.iter().filter(|message| message["role"] == "user").count();
            Answer::text(&format!("Answer {asked}."))
        })
        .await;
        let options =
            Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url).arg("--roles=worker");
        World { database, store, model, options }
    }

    async fn worker(&self) -> Worker {
        let recorder = Recorder::start(&self.database.url);
        let process = self.options.spawn(&recorder.url);
        process.wait_for_log("\"Working\"").await;
        Worker { process, recorder, turns: Cell::new(0) }
    }

    async fn begin(&self, worker: &Worker, conversation: &str) -> String {
        let session_id = wake(&self.store, conversation, "openai/test", "Message 1.").await;
        self.over(worker, &session_id).await;
        session_id
    }

    /// Says it, and has this worker answer.
    async fn say(&self, worker: &Worker, session_id: &str, number: usize) {
        send(&self.store, session_id, &format!("Message {number}.")).await;
        self.over(worker, session_id).await;
    }

    async fn over(&self, worker: &Worker, session_id: &str) {
        worker.turns.set(worker.turns.get() + 1);
        eventually("the turn to be over", || async {
            let status: String = self
                .database
                .value("select status from conversation_sessions where session_id = $1", session_id)
                .await;
            // The worker keeps its copy after the commit, and before it says this.
            let turns = worker.process.log().matches("The claim is over").count();
            (status == "completed" && turns >= worker.turns.get()).then_some(())
        })
        .await;
    }

    /// What the last request showed of the talk.
    fn shown(&self) -> Vec<String> {
        let body: Value = serde_json::from_str(self.model.bodies().last().unwrap()).unwrap();
        let said = body["messages"].as_array().unwrap().iter();
        said.filter(|message| message["role"] != "system")
            .map(|message| message["content"].as_str().unwrap().to_owned())
            .collect()
    }
}

/// A talk of so many messages, of which the last has no answer yet.
fn talk(messages: usize) -> Vec<String> {
    let said = (1..=messages).flat_map(|number| [format!("Message {number}."), format!("Answer {number}.")]);
    said.take(2 * messages - 1).collect()
}

impl Worker {
    /// How often a whole session was read since the last call, and how often only what was new of one.
    fn reads(&self) -> (usize, usize) {
        let sent = self.recorder.take();
        let reads = sent.iter().filter(|one| !one.is_ping && one.sql.contains("as changing"));
        let (new, whole): (Vec<&Sent>, Vec<&Sent>) =
            reads.partition(|one| one.sql.contains("m.message_number >= $2"));
        (whole.len(), new.len())
    }
}

#[tokio::test]
async fn a_chat_of_two_turns_on_one_worker_reads_its_session_once() {
    let world = World::new().await;
    let worker = world.worker().await;
    let session_id = world.begin(&worker, "c1").await;
    assert_eq!((worker.reads(), world.shown()), ((1, 0), talk(1)));
    world.say(&worker, &session_id, 2).await;
    assert_eq!((worker.reads(), world.shown()), ((0, 1), talk(2)));
    // Another session's first turn is read whole.
    world.begin(&worker, "c2").await;
    assert_eq!(worker.reads(), (1, 0));
    world.say(&worker, &session_id, 3).await;
    assert_eq!((worker.reads(), world.shown()), ((0, 1), talk(3)));
}

#[tokio::test]
async fn a_worker_that_is_to_keep_nothing_reads_each_turn_whole() {
    let mut world = World::new().await;
    world.options = world.options.config("[queue]\nwarm_mb = 0");
    let worker = world.worker().await;
    let session_id = world.begin(&worker, "c1").await;
    world.say(&worker, &session_id, 2).await;
    assert_eq!((worker.reads(), world.shown()), ((2, 0), talk(2)));
}

#[tokio::test]
async fn workers_that_take_turns_or_die_between_them_show_the_model_the_whole_talk() {
    let world = World::new().await;
    let one = world.worker().await;
    let session_id = world.begin(&one, "c1").await;
    assert_eq!(one.reads(), (1, 0));

    let other = world.worker().await;
    one.process.signal(libc::SIGSTOP);
    world.say(&other, &session_id, 2).await;
    assert_eq!((other.reads(), world.shown()), ((1, 0), talk(2)));

    // Its copy lacks the turn of the other.
    other.process.signal(libc::SIGSTOP);
    one.process.signal(libc::SIGCONT);
    world.say(&one, &session_id, 3).await;
    assert_eq!((one.reads(), world.shown()), ((0, 1), talk(3)));

    one.process.kill();
    other.process.signal(libc::SIGCONT);
    world.say(&other, &session_id, 4).await;
    assert_eq!((other.reads(), world.shown()), ((0, 1), talk(4)));

    other.process.kill();
    let next = world.worker().await;
    world.say(&next, &session_id, 5).await;
    assert_eq!((next.reads(), world.shown()), ((1, 0), talk(5)));
}

#[tokio::test]
async fn a_worker_shows_nothing_of_an_erased_chat_that_goes_on() {
    let world = World::new().await;
    world.database.with_roles().await;
    let worker = world.worker().await;
    let erased = world.begin(&worker, "c1").await;
    world.store.erase("default", &Subject::Conversation("default/c1".into())).await.unwrap();
    let session_id = world.begin(&worker, "c1").await;
    assert_ne!(session_id, erased);
    assert_eq!((worker.reads(), world.shown()), ((2, 0), talk(1)));
}
