//! Many sessions and several processes: each step is committed once, and work changes hands without being lost.

use crate::support::checker::check;
use crate::support::world::wake;
use crate::support::{Database, Options, World, eventually};
use futures::stream::{self, StreamExt};
use serde_json::Value;
use std::time::Instant;

const SESSIONS: i64 = 2000;

/// Four turns with a tool call, then the reply: five steps.
const FIVE_STEPS: &str = r#"
[[turn]]

[[turn.reply]]
text = "First."
tool_calls = [{ name = "current_time", arguments = {} }]

[[turn.reply]]
tool_calls = [{ name = "current_time", arguments = {} }]

[[turn.reply]]
tool_calls = [{ name = "current_time", arguments = {} }]

[[turn.reply]]
tool_calls = [{ name = "current_time", arguments = {} }]

[[turn.reply]]
text = "That was the fifth step."
"#;

#[tokio::test]
#[ignore = "slow: make soak"]
async fn two_processes_drain_2000_sessions_of_5_steps_each_step_once() {
    let database = Database::new().await;
    let options = Options::new().model("scripted/five").arg("--concurrency").arg("8");
    let scenarios = options.path("scenarios");
    std::fs::create_dir(&scenarios).unwrap();
    std::fs::write(scenarios.join("five.toml"), FIVE_STEPS).unwrap();
    let options = options.config(&format!("[scripted]\ndir = {:?}", scenarios.display().to_string()));

    // Logging every step would be a large part of the work.
    let options = options.env("WAKEFUL_LOG", "warn,wakeful::serve=info");

    let began = Instant::now();
    let processes = [options.serve(&database).await, options.serve(&database).await];
    let store = database.store().await;
    let sessions: Vec<String> = stream::iter(0..SESSIONS)
        .map(|n| {
            let store = store.clone();
            async move { wake(&store, &format!("c{n}"), "scripted/five", "Take five steps.").await }
        })
        .buffer_unordered(8)
        .collect()
        .await;
    for committed in 1..=10 {
        eventually("more steps", || async {
            let sql = "select count(*) from session_steps where $1 <> ''";
            let steps: i64 = database.value(sql, "all").await;
            (steps >= committed * SESSIONS / 2).then_some(())
        })
        .await;
    }
    eventually("the queue to be empty", || async {
        let jobs: i64 = database.value("select count(*) from jobs where $1 <> ''", "all").await;
        (jobs == 0).then_some(())
    })
    .await;
    let took = began.elapsed().as_secs_f64();
    eprintln!("{} steps in {took:.1} s: {:.0} a second", SESSIONS * 5, (SESSIONS * 5) as f64 / took);

    let found: Value = database
        .value(
            "select json_build_object(
                'sessions', (select count(*) from conversation_sessions where status = 'completed'),
                'runs', (select count(*) from session_runs where status = 'completed' and steps = 5),
                'steps', (select count(*) from session_steps),
                'messages', (select count(*) from conversation_records),
                'workers', (select count(distinct worker_id) from session_steps))
            where $1 <> ''",
            "all",
        )
        .await;
    let messages = SESSIONS * 10;
    let expected = serde_json::json!({"sessions": SESSIONS, "runs": SESSIONS, "steps": SESSIONS * 5,
        "messages": messages, "workers": 2});
    assert_eq!(found, expected);
    let wrong: Value = database
        .value(
            "select json_build_object(
                'stepped by two at a time', (select count(*) from session_steps a join session_steps b
                    on a.session_id = b.session_id and a.step_number < b.step_number and a.lease <> b.lease
                    where b.started_at < a.committed_at),
                'totals', (select count(*) from conversation_sessions s
                    join lateral (select count(*) as turns, sum(input_tokens) as input, sum(output_tokens) as output,
                            sum(cost_micros) as cost
                        from session_steps t where t.session_id = s.session_id) of_steps on true
                    where (s.total_turns, s.total_input_tokens, s.total_output_tokens, s.total_cost_micros)
                        is distinct from (of_steps.turns, of_steps.input, of_steps.output, of_steps.cost)),
                'journals', (select count(*) from conversation_sessions s
                    where s.last_event_seq <> (select count(*) from session_events e
                        where e.session_id = s.session_id)),
                'in flight', (select count(*) from generations))
            where $1 <> ''",
            "all",
        )
        .await;
    assert!(wrong.as_object().unwrap().values().all(|count| count == 0), "{wrong}");
    for session in sessions.iter().step_by(100) {
        check(&database, session, &[]).await;
    }
    for process in processes {
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn a_worker_that_is_gone_is_not_said_to_drain() {
    let (database, options) =
        (Database::new().await, Options::new().model("openai/test").env("OPENAI_API_KEY", "k"));
    let gone = options.serve(&database).await;
    let client = gone.client();
    let name = eventually("the first heartbeat", || async {
        let (_, workers) = client.get("/v1/workers").await;
        workers["items"][0]["worker_id"].as_str().map(str::to_owned)
    })
    .await;
    gone.kill();
    sqlx::query("update workers set beat_at = clock_timestamp() - interval '10 minutes'")
        .execute(&database.pool)
        .await
        .unwrap();
    let drain = ["worker", "drain", &name, "--wait"];
    let ran = crate::cli::run(&options, &database.url, &drain).await;
    assert_eq!((ran.code, ran.out.as_str()), (0, "There is no worker to drain.\n"), "{}", ran.err);
    assert!(
        ran.err.contains(&format!("{name} sends no heartbeat any more, and holds nothing")),
        "{}",
        ran.err
    );
    let api = options.clone().arg("--roles=api").serve(&database).await;
    let (status, said) =
        api.client().post(&format!("/v1/workers/{name}/drain"), &serde_json::json!({})).await;
    assert_eq!((status.as_u16(), &said["state"]), (202, &serde_json::json!("gone")), "{said}");
    assert!(api.terminate().success());
}

#[tokio::test]
async fn k37_a_drain_lets_the_step_in_hand_end_and_hands_the_run_over() {
    let mut world = World::new("drained", &["reserve"]).await;
    world.model.hold();
    let process = world.serve().await;
    world.begin(&process.client()).await;
    world.model.asked(1).await;
    process.signal(libc::SIGTERM);
    process.wait_for_log("Draining").await;
    world.model.release();
    let (status, process) = process.ended().await;
    assert!(status.success(), "{}", process.log());
    let steps: i64 = world
        .database
        .value("select count(*) from session_steps where session_id = $1", &world.session_id)
        .await;
    assert_eq!(steps, 1, "the step that was in hand, and no other one");
    assert_eq!(
        job(&world).await,
        serde_json::json!({"stuck": 0, "attempt": 0, "held": false, "ready": true})
    );

    let process = world.serve().await;
    world.finish(&process.client()).await;
    assert_eq!(world.model.bodies(), World::undisturbed(&["reserve"]).await);
}

#[tokio::test]
async fn k37_a_run_that_a_draining_process_hands_over_goes_on_at_once_in_another() {
    let mut world = World::new("handed over", &["reserve"]).await;
    // It looks for work when it is told of some, and not for an hour otherwise.
    world.options = world.options.env("WAKEFUL_QUEUE__POLL_MS", "3600000");
    world.model.hold();
    let first = world.serve().await;
    world.begin(&first.client()).await;
    world.model.asked(1).await;
    // Its second run keeps the first process alive: the end of a process would make others look.
    first.client().chat("another", "A table for three, please.").await;
    world.model.asked(2).await;
    let second = world.serve().await;
    first.signal(libc::SIGTERM);
    first.wait_for_log("Draining").await;
    world.model.hold_from(1);
    world.model.asked(3).await;
    let steps = "select count(*) from session_steps where session_id = $1";
    assert_eq!(world.database.value::<i64>(steps, &world.session_id).await, 1, "the first process made one");
    world.model.release();
    let (status, first) = first.ended().await;
    assert!(status.success(), "{}", first.log());
    world.finish(&second.client()).await;
}

#[tokio::test]
async fn k37_a_second_signal_gives_the_step_back_at_once_and_counts_no_attempt() {
    let mut world = World::new("given back", &["reserve"]).await;
    world.model.hold();
    let process = world.serve().await;
    world.begin(&process.client()).await;
    world.model.asked(1).await;
    process.signal(libc::SIGTERM);
    process.wait_for_log("Draining").await;
    process.signal(libc::SIGTERM);
    let (status, process) = process.ended().await;
    assert!(status.success(), "{}", process.log());
    assert_eq!(
        job(&world).await,
        serde_json::json!({"stuck": 0, "attempt": 0, "held": false, "ready": true})
    );

    world.model.release();
    let process = world.serve().await;
    let traces = world.finish(&process.client()).await;
    assert!(traces.steps.iter().all(|step| step["attempt"] == 1), "{:?}", traces.steps);
    assert_eq!(traces.journal("GEN_RESUMED").len(), 1, "the call that was given up is journalled");
}

/// The session's job as the next worker finds it.
async fn job(world: &World) -> Value {
    let sql = "select json_build_object('stuck', stuck, 'attempt', attempt, 'held', lease is not null,
        'ready', run_at <= clock_timestamp()) from jobs where session_id = $1";
    world.database.value(sql, &world.session_id).await
}
