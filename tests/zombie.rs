//! A worker that is stopped past its lease and continues after another one has finished its work: it writes
//! no row and sends nothing.

use crate::awake::cut_lock;
use crate::support::checker::dump;
use crate::support::world::model;
use crate::support::{Client, ModelServer, Options, Process, World, eventually};
use reqwest::StatusCode;
use reqwest::header::RETRY_AFTER;
use serde_json::json;
use std::time::Duration;
use tokio::time::timeout;

const GUARDED: &[&str] = &["charge"];
const MAIL: &[&str] = &["compose_email"];

/// A process that holds a run, and everything it talks to.
struct Zombie {
    /// The database, and everything else that the other process uses.
    world: World,
    /// Only the zombie uses this model.
    model: ModelServer,
    process: Process,
}

impl Zombie {
    /// Starts it with options changed by `change`. Its model is held from answer `number` on. Then posts a
    /// message.
    async fn begin(tools: &[&str], number: usize, change: impl FnOnce(Options) -> Options) -> Zombie {
        let mut world = World::new("zombie", tools).await;
        let model = model(tools).await;
        model.hold_from(number);
        let options = world.options.clone().short_lease().env("OPENAI_BASE_URL", &model.url);
        // A second slot would claim the process's own job again, if a busy machine let its lease end.
        let options = options.arg("--concurrency").arg("1");
        let held = world.options.path("held").display().to_string();
        let process = change(options.env("FIXTURE_HOLD", held)).serve(&world.database).await;
        world.begin(&process.client()).await;
        Zombie { world, model, process }
    }

    async fn asks_the_model(&self, times: usize) {
        self.model.asked(times).await;
    }

    async fn has(&self, what: &'static str) {
        eventually(what, || async {
            let rows: i64 = self.world.database.value(what, &self.world.session_id).await;
            (rows == 1).then_some(())
        })
        .await;
    }

    /// Lets another process finish what this one began, including the last delivery.
    async fn replace(&self) -> Process {
        let other = self.world.serve().await;
        other.client().wait_for(&self.world.session_id, "completed").await;
        self.has("select 1 - least(count(*), 1) from jobs where $1 <> ''").await;
        other
    }

    /// Continues the zombie, and waits until it has noticed. Asserts that every row of the database, every
    /// mail, every effect and every model call is as before. Returns its log.
    async fn changes_nothing(self, other: Process, wake_up: impl FnOnce(&Zombie)) -> String {
        self.world.check().await;
        let before = dump(&self.world.database).await;
        let outside = self.outside();
        assert!(!self.process.log().contains("The claim is over"));
        wake_up(&self);
        self.process.wait_for_log("The claim is over").await;
        assert_eq!(dump(&self.world.database).await, before);
        assert_eq!(self.outside(), outside);

        let log = self.process.log();
        assert!(other.terminate().success());
        assert!(self.process.terminate().success(), "it is well otherwise");
        assert_eq!(dump(&self.world.database).await, before);
        log
    }

    /// Counts of model calls and mails, and the effects.
    fn outside(&self) -> (usize, usize, Vec<String>, usize) {
        let world = &self.world;
        (self.model.bodies().len(), world.model.bodies().len(), world.options.effects(), world.mails())
    }
}

#[tokio::test]
async fn k23_stopped_during_a_model_call_it_neither_writes_nor_sends() {
    for number in [0, 1] {
        let zombie = Zombie::begin(MAIL, number, |options| options).await;
        zombie.asks_the_model(number + 1).await;
        zombie.process.signal(libc::SIGSTOP);
        let other = zombie.replace().await;
        assert_eq!(zombie.world.mails(), 1);
        zombie
            .changes_nothing(other, |zombie| {
                zombie.model.release();
                zombie.process.signal(libc::SIGCONT);
            })
            .await;
    }
}

#[tokio::test]
async fn k23_stopped_before_a_guarded_effect_it_never_has_it() {
    // It stops here: the call is committed as started, and nothing has happened yet.
    let change = |options: Options| options.env("FAILPOINTS", "K18=1*return(stop)");
    let zombie = Zombie::begin(GUARDED, 9, change).await;
    zombie.has("select count(*) from tool_calls where session_id = $1 and status = 'started'").await;
    zombie.process.wait_for_log("failpoint K18: stopping").await;
    let other = zombie.replace().await;
    zombie.changes_nothing(other, |zombie| zombie.process.signal(libc::SIGCONT)).await;
}

#[tokio::test]
async fn k23_stopped_after_a_guarded_effect_it_does_not_report_it() {
    let zombie = Zombie::begin(GUARDED, 9, |options| {
        std::fs::write(options.path("held"), "").unwrap();
        options
    })
    .await;
    zombie.world.has_effect("charge").await;
    zombie.process.signal(libc::SIGSTOP);
    let other = zombie.replace().await;
    zombie
        .changes_nothing(other, |zombie| {
            std::fs::remove_file(zombie.world.options.path("held")).unwrap();
            zombie.process.signal(libc::SIGCONT);
        })
        .await;
}

#[tokio::test]
async fn k23_stopped_without_its_liveness_lock_it_does_not_report_its_effect() {
    let zombie = Zombie::begin(GUARDED, 9, |options| {
        std::fs::write(options.path("held"), "").unwrap();
        deaf(options)
    })
    .await;
    zombie.world.has_effect("charge").await;
    zombie.process.signal(libc::SIGSTOP);
    cut_lock(&zombie.world.database, &zombie.process).await;
    // The lease lasts an hour. Another worker takes the job, because the lock is free and stays so.
    let other = zombie.replace().await;
    zombie
        .changes_nothing(other, |zombie| {
            std::fs::remove_file(zombie.world.options.path("held")).unwrap();
            zombie.process.signal(libc::SIGCONT);
        })
        .await;
}

/// Makes the heartbeat so rare that the process does not notice its lost lease before it commits.
fn deaf(options: Options) -> Options {
    options.env("WAKEFUL_QUEUE__LEASE_S", "3600").env("WAKEFUL_QUEUE__HEARTBEAT_S", "1800")
}

/// Ends the lease early, as if its time had passed.
async fn end_lease(zombie: &Zombie) {
    let ended = sqlx::query("update jobs set run_at = clock_timestamp() where session_id = $1")
        .bind(&zombie.world.session_id)
        .execute(&zombie.world.database.pool)
        .await
        .expect("jobs");
    assert_eq!(ended.rows_affected(), 1);
}

#[tokio::test]
async fn k23_a_commit_under_a_lost_lease_writes_nothing() {
    // A turn with calls is a continuing commit, the reply a closing one.
    for number in [0, 1] {
        let zombie = Zombie::begin(MAIL, number, deaf).await;
        zombie.asks_the_model(number + 1).await;
        end_lease(&zombie).await;
        let other = zombie.replace().await;
        let log = zombie.changes_nothing(other, |zombie| zombie.model.release()).await;
        assert!(log.contains("Another worker has the session: nothing was written"), "{log}");
    }
}

#[tokio::test]
async fn a_call_is_neither_started_nor_settled_under_a_lost_lease() {
    let zombie = Zombie::begin(GUARDED, 9, |options| {
        std::fs::write(options.path("held"), "").unwrap();
        deaf(options)
    })
    .await;
    zombie.world.has_effect("charge").await;
    end_lease(&zombie).await;
    let other = zombie.replace().await;
    let held = zombie.world.options.path("held");
    zombie.changes_nothing(other, |_| std::fs::remove_file(held).unwrap()).await;

    // It stops between the commit that asks for the call and the one that starts it.
    let change = |options: Options| deaf(options).env("FAILPOINTS", "K17=1*return(stop)");
    let zombie = Zombie::begin(GUARDED, 9, change).await;
    zombie.has("select count(*) from tool_calls where session_id = $1 and status = 'invoked'").await;
    zombie.process.wait_for_log("failpoint K17: stopping").await;
    end_lease(&zombie).await;
    let other = zombie.replace().await;
    assert_eq!(
        zombie.world.effects("charge"),
        1,
        "the other one ran it, with the proof that this one had not"
    );
    zombie.changes_nothing(other, |zombie| zombie.process.signal(libc::SIGCONT)).await;
}

/// The server ends a transaction that rests long before a statement gives up at its limit of a minute.
const LONG_BEFORE: Duration = Duration::from_secs(30);

/// Reads the session until it is completed. Each read is answered.
async fn reads(client: &Client, session_id: &str) {
    eventually("the session to be completed", || async {
        let (status, session) = client.get(&format!("/v1/sessions/{session_id}")).await;
        assert_eq!(status, StatusCode::OK, "{session}");
        (session["status"] == "completed").then_some(())
    })
    .await;
}

#[tokio::test]
async fn k46_stopped_in_a_transaction_it_loses_its_locks_and_writes_nothing() {
    let change = |options: Options| options.env("FAILPOINTS", "K46=1*return(stop)");
    let zombie = Zombie::begin(MAIL, 1, change).await;
    zombie.asks_the_model(2).await;
    // A message during the last call: the close finds it, and decides again with the rows locked.
    zombie.process.client().chat("zombie", "And a glass of water.").await;
    zombie.model.release();
    zombie.process.wait_for_log("failpoint K46: stopping").await;

    let other = zombie.world.serve().await;
    let client = other.client();
    let posts = futures::future::join_all((0..4).map(|_| client.chat("zombie", "Are you there?")));
    let served = async { tokio::join!(posts, reads(&client, &zombie.world.session_id)) };
    timeout(LONG_BEFORE, served).await.expect("the locks of a stopped process are gone soon");
    zombie.has("select 1 - least(count(*), 1) from jobs where $1 <> ''").await;
    zombie.changes_nothing(other, |zombie| zombie.process.signal(libc::SIGCONT)).await;
}

#[tokio::test]
async fn k46_an_api_that_is_stopped_in_a_transaction_holds_up_no_worker() {
    let mut world = World::new("stopped", MAIL).await;
    world.model.hold();
    let worker = world.serve().await;
    let client = worker.client();
    world.begin(&client).await;
    world.model.asked(1).await;
    let options = world.options.clone().arg("--roles=api").env("FAILPOINTS", "K46=1*return(stop)");
    let api = options.serve(&world.database).await;
    let path = format!("/v1/sessions/{}/cancel", world.session_id);
    let cancel = tokio::spawn(api.client().post_request(&path).body(json!({}).to_string()).send());
    api.wait_for_log("failpoint K46: stopping").await;
    world.model.release();

    let done = timeout(LONG_BEFORE, reads(&client, &world.session_id)).await;
    done.expect("the locks of a stopped process are gone soon");
    api.signal(libc::SIGCONT);
    let refused = cancel.await.unwrap().unwrap();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(refused.headers().contains_key(RETRY_AFTER));
    let (again, _) = api.client().post(&path, &json!({})).await;
    assert_eq!(again, StatusCode::CONFLICT, "it was not cancelled, and the process is well");
    world.check().await;
    assert!(api.terminate().success());
    assert!(worker.terminate().success());
}
