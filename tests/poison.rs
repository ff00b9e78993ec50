//! Steps that kill or hang their worker (K36): they fail after their attempts, and harm no other session.

use crate::support::checker::{Traces, check};
use crate::support::client::texts;
use crate::support::model::turns_since_user;
use crate::support::world::wake;
use crate::support::{Answer, Database, ModelServer, Options, Process, eventually};
use futures::StreamExt;
use futures::future::join_all;
use serde_json::{Value, json};
use std::process::ExitStatus;
use std::time::Duration;
use wakeful_store::Store;

/// A database and a model. When a message says `poison MODE`, the model calls `charge`, then `misbehave`,
/// then replies.
struct Ward {
    database: Database,
    model: ModelServer,
    options: Options,
    store: Store,
}

impl Ward {
    async fn new(limits: &str) -> Ward {
        let model = ModelServer::start(|body, _| {
            let messages = body["messages"].as_array().unwrap();
            let last = messages.iter().rev().find(|message| message["role"] == "user").unwrap();
            match (last["content"].as_str().unwrap().strip_prefix("poison "), turns_since_user(body)) {
                (Some(_), 0) => Answer::call("charge", json!({"cents": 5})),
                (Some(mode), 1) => Answer::call("misbehave", json!({ "mode": mode })),
                (Some(_), _) => Answer::text("That went well."),
                (None, _) => Answer::text("Fine."),
            }
        })
        .await;
        let config = format!(
            "[agents.default]\nsystem_prompt = \"You are a test.\"\nmodel = \"openai/test\"\n\
             tools = [\"charge\", \"misbehave\"]\n[agents.default.limits]\n{limits}"
        );
        // A life may end before it has its liveness lock. Then the next one waits for the lease.
        let options = Options::new().short_lease().config(&config).env("OPENAI_BASE_URL", &model.url);
        let database = Database::new().await;
        let store = database.store().await;
        Ward { database, model, options, store }
    }

    async fn wake(&self, conversation: &str, text: &str) -> String {
        wake(&self.store, conversation, "openai/test", text).await
    }

    /// Starts a process that must not end by itself.
    async fn serve(&self) -> Process {
        self.options.serve(&self.database).await
    }

    /// Starts a process and waits until its work kills it.
    async fn life(&self) -> (ExitStatus, Process) {
        self.options.spawn(&self.database.url).ended().await
    }

    fn effects(&self, tool: &str, session_id: &str) -> usize {
        let of = format!("{tool} {session_id} ");
        self.options.effects().iter().filter(|line| line.starts_with(&of)).count()
    }

    fn mend(&self) {
        std::fs::write(self.options.path("hold-mended"), "").unwrap();
    }
}

/// The reasons in the session's journal for its transitions to `failed`.
async fn told(database: &Database, session_id: &str) -> Vec<Value> {
    let traces = Traces::of(database, session_id).await;
    let moved = traces.journal("state_transition").into_iter();
    moved.filter(|payload| payload["to_state"] == "failed").cloned().collect()
}

/// Runs a poisoned step of one mode until it fails, with a new neighbour in each life, and then retries it.
async fn k36(mode: &str, last_words: &str) {
    eprintln!("{mode}");
    let ward = Ward::new("attempts = 5\ntool_s = 1").await;
    let poisoned = ward.wake("poisoned", &format!("poison {mode}")).await;
    let mut neighbours = Vec::new();
    // The first life commits the turn with the call. The next four make no progress.
    for life in 1..=5 {
        neighbours.push(ward.wake(&format!("neighbour{life}"), "Hello.").await);
        let (status, process) = ward.life().await;
        let log = process.log();
        assert!(log.contains(last_words), "{mode}: {log}");
        assert_eq!(status.success(), mode == "exit", "{mode}: {status}");
        if mode == "spin" {
            let line = log.lines().find(|line| line.contains(last_words)).unwrap();
            let named =
                ["tool misbehave", "call call_", poisoned.as_str()].iter().all(|name| line.contains(name));
            assert!(named, "{line}");
        }
        assert_eq!(ward.effects("misbehave", &poisoned), life, "{mode}");
        // From the second death on, the log names the tool.
        let warned = log
            .lines()
            .any(|line| line.contains("Workers died at this step") && line.contains("misbehave (call_"));
        assert_eq!(warned, life > 2, "{mode} {life}: {log}");
    }
    let process = ward.serve().await;
    let client = process.client();
    let failed = client.wait_for(&poisoned, "failed").await;
    let error = failed["error"].as_str().unwrap();
    assert!(
        error.contains("no progress in 5 attempts: its worker died each time, while it ran misbehave (call_"),
        "{error}"
    );
    assert!(error.contains("Remedy: read"), "{error}");
    for neighbour in &neighbours {
        client.wait_for(neighbour, "completed").await;
        check(&ward.database, neighbour, &[]).await;
    }
    assert_eq!(ward.effects("charge", &poisoned), 1, "{mode}: the guarded effect is not repeated");
    assert_eq!(told(&ward.database, &poisoned).await.len(), 1);

    // Once the tool is mended, the retry continues where the run stopped.
    let asked = ward.model.bodies().iter().filter(|body| body.contains("poison")).count();
    assert_eq!(asked, 2, "{mode}: the two turns before");
    ward.mend();
    ward.store.retry(&poisoned, None).await.unwrap();
    client.wait_for(&poisoned, "completed").await;
    assert_eq!(ward.effects("charge", &poisoned), 1);
    assert_eq!(ward.effects("misbehave", &poisoned), 6);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn k36_a_tool_that_ends_its_process_fails_its_run_and_not_its_neighbours() {
    let table = [
        ("abort", ""),
        ("exit", ""),
        ("overflow", "overflowed its stack"),
        ("allocate", "memory allocation of"),
    ];
    join_all(table.map(|(mode, last_words)| k36(mode, last_words))).await;
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn k36_a_tool_that_never_yields_is_ended_by_the_watchdog_and_fails_its_run_alone() {
    k36("spin", "has kept its thread for").await;
}

#[tokio::test]
async fn k36_a_tool_that_hangs_or_panics_and_yields_costs_no_process() {
    let ward = Ward::new("attempts = 3\ntool_s = 1").await;
    let process = ward.serve().await;
    let client = process.client();
    for (mode, told) in [("yield", "did not finish within 1 seconds"), ("panic", "failed inside: ")] {
        let session_id = ward.wake(mode, &format!("poison {mode}")).await;
        client.wait_for(&session_id, "completed").await;
        let bodies = ward.model.bodies();
        let last = bodies.last().unwrap();
        assert!(last.contains(told) && last.contains("made twice with one idempotency key"), "{bodies:?}");
        assert_eq!(ward.effects("misbehave", &session_id), 2, "it is idempotent, so it was made once more");
        assert_eq!(ward.effects("charge", &session_id), 1);
    }
    assert!(process.terminate().success());
}

#[tokio::test]
async fn an_idempotent_call_whose_answer_is_lost_is_made_again_by_the_worker_under_its_own_key() {
    let ward = Ward::new("attempts = 3\ntool_s = 1").await;
    let process = ward.serve().await;
    let client = process.client();
    let session_id = ward.wake("late", "poison late").await;
    client.wait_for(&session_id, "completed").await;
    let bodies = ward.model.bodies();
    assert!(bodies.last().unwrap().contains("It has happened already."), "{bodies:?}");
    let effects = ward.options.effects();
    assert_eq!(effects.len(), 2 + ward.effects("charge", &session_id), "{effects:?}");
    let tries: Vec<_> = effects.iter().filter(|line| line.starts_with("misbehave ")).collect();
    assert!(tries.len() == 2 && tries[0] == tries[1], "one key: {tries:?}");
    let log = process.log();
    assert!(log.contains("An idempotent call is made again, with its key"), "{log}");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_call_that_its_host_cannot_carry_out_waits_and_is_told_to_operators_only() {
    let ward = Ward::new("attempts = 1").await;
    let process = ward.serve().await;
    let client = process.client();
    let session_id = ward.wake("host", "poison host").await;
    process.wait_for_log("the printer of this host is gone").await;
    // A step that fails would have had its one attempt.
    eventually("a second try", || async { (ward.effects("misbehave", &session_id) > 1).then_some(()) }).await;
    ward.mend();
    let session = client.wait_for(&session_id, "completed").await;
    assert!(texts(&session, "tool").contains(&"Behaved.".to_owned()), "{session}");
    assert!(ward.model.bodies().iter().all(|body| !body.contains("printer")), "{session}");
    assert_eq!((ward.model.bodies().len(), ward.effects("charge", &session_id)), (3, 1));
    check(&ward.database, &session_id, &ward.options.effects()).await;
    assert!(process.terminate().success());
}

#[tokio::test]
async fn k36_a_process_that_is_about_to_abort_lets_the_others_of_the_same_claim_end() {
    let (answer, answers) = tokio::sync::watch::channel(false);
    let model = ModelServer::start(move |body, _| {
        match (body.to_string().contains("poison"), turns_since_user(body)) {
            (true, 0) => Answer::call("misbehave", json!({"mode": "spin"})),
            (true, _) => Answer::text("That went well."),
            (false, _) => Answer::Late(answers.clone(), "It took long.".to_owned()),
        }
    })
    .await;
    let mut ward = Ward::new("attempts = 3\ntool_s = 1").await;
    ward.options = ward.options.env("OPENAI_BASE_URL", &model.url);
    // Both wait before the process starts, so one statement claims them.
    let neighbour = ward.wake("neighbour", "Something slow, please.").await;
    let poisoned = ward.wake("poisoned", "poison spin").await;
    let process = ward.serve().await;
    process.wait_for_log("This process first ends its other work").await;
    answer.send(true).unwrap();
    let (status, _) = process.ended().await;
    assert!(!status.success());
    ward.mend();
    let process = ward.serve().await;
    process.client().wait_for(&poisoned, "completed").await;
    process.client().wait_for(&neighbour, "completed").await;
    let slow = model.bodies().iter().filter(|body| body.contains("Something slow")).count();
    assert_eq!(slow, 1, "its reply, which is paid for, was committed before the end");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn k36_code_that_takes_every_thread_ends_the_process_too() {
    let ward = Ward::new("attempts = 8\ntool_s = 1").await;
    // More sessions than threads, on any machine. Then neither timers nor the heartbeat run.
    let threads = std::thread::available_parallelism().unwrap().get();
    let mut sessions = Vec::new();
    for number in 0..=threads {
        sessions.push(ward.wake(&format!("poisoned{number}"), "poison spin").await);
    }
    let (status, process) = ward.life().await;
    assert!(!status.success());
    let log = process.log();
    assert!(log.contains("has kept its thread for"), "{log}");
    let last = log.lines().find(|line| line.contains("Aborting. On the threads: ")).unwrap();
    // Each thread runs one of the sessions. On a busy machine the watchdog may act before all threads have
    // begun.
    let named: Vec<&String> = sessions.iter().filter(|id| last.contains(id.as_str())).collect();
    assert!((1..=threads).contains(&named.len()), "{log}");
    // Nothing of their work is lost.
    ward.mend();
    let process = ward.serve().await;
    for session_id in &sessions {
        process.client().wait_for(session_id, "completed").await;
        // A session without a thread may have been cut off inside its charge. Then the charge is not repeated.
        let charges = ward.effects("charge", session_id);
        assert!(
            charges == 1 || charges == 0 && !named.contains(&session_id),
            "{charges}, {session_id}: {last}"
        );
    }
    assert!(process.terminate().success());
}

#[tokio::test]
async fn k36_a_process_that_was_stopped_for_long_is_not_taken_for_one_that_hangs() {
    let mut ward = Ward::new("attempts = 3\ntool_s = 1").await;
    ward.options = ward.options.env("WAKEFUL_QUEUE__LEASE_S", "60").env("WAKEFUL_QUEUE__HEARTBEAT_S", "1");
    let process = ward.serve().await;
    let session_id = ward.wake("blocked", "poison block").await;
    ward.options.has_effects(1).await;
    process.signal(libc::SIGSTOP);
    // Stop the process for longer than the six seconds that a call may keep its thread. The time of the stop
    // must not count.
    tokio::time::sleep(Duration::from_secs(8)).await;
    process.signal(libc::SIGCONT);
    // Nothing may happen at the watchdog's next two checks: it sleeps before each, and at the first of these three pauses it may have
    // been on its way. The server is not asked meanwhile: the blocked thread may be the one that would answer.
    let before = process.pauses_of("watchdog");
    eventually("two checks of the watchdog", || async {
        (process.pauses_of("watchdog") >= before + 3).then_some(())
    })
    .await;
    ward.mend();
    process.client().wait_for(&session_id, "completed").await;
    assert_eq!(ward.effects("misbehave", &session_id), 1);
    assert!(!process.log().contains("has kept its thread"), "{}", process.log());
    assert!(process.terminate().success());
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn k36_the_user_is_told_once_though_the_failing_commit_is_killed_before_and_after() {
    // A run fails only after a minimum number of deaths, because a neighbour may have caused some. `attempts`
    // is below that minimum, so the minimum applies.
    let ward = Ward::new("attempts = 1\ntool_s = 1").await;
    let poisoned = ward.wake("poisoned", "poison abort").await;
    for _ in 1..=5 {
        let (status, _) = ward.life().await;
        assert!(!status.success());
    }
    for failpoint in ["K5=1*return", "K22=1*return"] {
        let options = ward.options.clone().env("FAILPOINTS", failpoint);
        let (status, process) = options.spawn(&ward.database.url).ended().await;
        assert!(!status.success() && process.log().contains("failpoint"), "{}", process.log());
        let times = usize::from(failpoint.starts_with("K22"));
        assert_eq!(told(&ward.database, &poisoned).await.len(), times, "{failpoint}");
    }
    let process = ward.serve().await;
    let client = process.client();
    let failed = client.wait_for(&poisoned, "failed").await;
    assert!(failed["error"].as_str().unwrap().contains("its worker died each time"), "{failed}");
    // A reader of the whole stream sees the failure once, and then everything up to the end of the next run.
    client.chat("poisoned", "Are you there?").await;
    let mut frames = client.stream(&poisoned, None).await;
    let mut told = Vec::new();
    loop {
        let frame = frames.next().await.expect("the stream stays open");
        let data: Value = serde_json::from_str(&frame.data).unwrap();
        let to = data["payload"]["to_state"].as_str().unwrap_or_default();
        match to {
            "failed" => told.push(data["payload"]["reason"].clone()),
            "completed" => break,
            _ => {}
        }
    }
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].as_str().unwrap().contains("Remedy: "), "{told:?}");
    assert_eq!(ward.effects("charge", &poisoned), 1);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_commit_that_is_refused_again_and_again_pays_for_no_endless_calls() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, _| Answer::text("Fine.")).await;
    model.hold();
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    process.client().chat("c1", "Hello.").await;
    model.asked(1).await;
    // Somebody has written into the job's row, and the fence of its commits misses from now on.
    sqlx::query("update jobs set space_id = 'other'").execute(&database.pool).await.unwrap();
    model.release();
    let said = eventually("the claim to end", || async {
        let said = "select last_error from jobs where last_error is not null and $1 <> ''";
        sqlx::query_scalar::<_, String>(said).bind("any").fetch_optional(&database.pool).await.unwrap()
    })
    .await;
    assert!(said.contains("refused although"), "{said}");
    assert!(model.bodies().len() <= 2, "{} calls were paid", model.bodies().len());
    process.kill();
}

#[tokio::test]
async fn a_model_whose_code_panics_is_named_in_the_error_and_in_the_log() {
    let options = Options::new().model("panics/always").config("[agents.default.limits]\nattempts = 2");
    let database = Database::new().await;
    let process = options.serve(&database).await;
    let client = process.client();
    let answer = client.chat("c1", "Hello.").await;
    let session = client.wait_for(answer["session_id"].as_str().unwrap(), "failed").await;
    const SAID: &str = "the code of model panics/always panicked: the index is out of bounds";
    assert!(session["error"].as_str().is_some_and(|error| error.contains(SAID)), "{session}");
    assert!(process.log().contains(SAID), "{}", process.log());
    assert!(process.terminate().success());
}
