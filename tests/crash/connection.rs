//! Connections that end: all at once, or a single one between a commit and its answer (K32).

use super::{BOTH, GUARDED, IDEMPOTENT, rows};
use crate::stream::Reader;
use crate::support::proxy::{CutAt, Proxy};
use crate::support::{Database, Process, World, eventually};
use futures::future::join_all;
use serde_json::json;

/// Which statement's connection is cut, and what must be left. A cut repeats no model call and no effect.
struct Cut {
    tools: &'static [&'static str],
    /// Part of the statement's text.
    statement: &'static str,
    at: CutAt,
    /// Guarded calls whose outcome stays unknown.
    uncertain: usize,
    effects: usize,
}

const fn cut(
    tools: &'static [&'static str],
    statement: &'static str,
    at: CutAt,
    uncertain: usize,
    effects: usize,
) -> Cut {
    Cut { tools, statement, at, uncertain, effects }
}

const STEP: &str = "set last_message_number = session.last_message_number";
const END: &str = "delete from jobs as job";
const MESSAGE: &str = "insert into session_inbox";
const STARTED: &str = "set status = 'started'";
/// The commit that asks for idempotent calls, and starts them.
const STARTING: &str = "(r.nonce is not null)::integer";
/// The commit that has the results of calls.
const RESULTS: &str = "update tool_calls as call";
const SETTLED: &str = "set status = $4, outcome";
const CLAIM: &str = "with ready as materialized";
const HEARTBEAT: &str = "set run_at = clock_timestamp() + make_interval";

/// The cuts start after the first message was taken. The step's statement is cut at its first commit, the one
/// that begins the run.
const CUTS: &[Cut] = &[
    cut(BOTH, CLAIM, CutAt::BeforeServer, 0, 4),
    cut(BOTH, STEP, CutAt::BeforeServer, 0, 4),
    cut(BOTH, STEP, CutAt::BeforeAnswer, 0, 4),
    cut(BOTH, END, CutAt::BeforeServer, 0, 4),
    cut(BOTH, END, CutAt::BeforeAnswer, 0, 4),
    // The row never said `started`, so the call never ran, and it runs now.
    cut(GUARDED, STARTED, CutAt::BeforeServer, 0, 2),
    // The row says `started`, but its writer never got the answer. It takes the start back, and the call runs by another one.
    cut(GUARDED, STARTED, CutAt::BeforeAnswer, 0, 2),
    cut(IDEMPOTENT, STARTING, CutAt::BeforeServer, 0, 2),
    cut(IDEMPOTENT, STARTING, CutAt::BeforeAnswer, 0, 2),
    // The effect has happened. The worker retries until its outcome is committed: alone while others of the turn run,
    // and with the results if it ended last.
    cut(BOTH, SETTLED, CutAt::BeforeServer, 0, 4),
    cut(BOTH, SETTLED, CutAt::BeforeAnswer, 0, 4),
    cut(GUARDED, RESULTS, CutAt::BeforeServer, 0, 2),
    cut(GUARDED, RESULTS, CutAt::BeforeAnswer, 0, 2),
    cut(IDEMPOTENT, RESULTS, CutAt::BeforeServer, 0, 2),
    cut(BOTH, HEARTBEAT, CutAt::BeforeAnswer, 0, 4),
];

#[tokio::test]
#[ignore = "slow: make soak"]
async fn k32_a_commit_whose_answer_is_lost_applies_once() {
    for some in CUTS.chunks(4) {
        join_all(some.iter().map(survive_cut)).await;
    }
}

#[tokio::test]
async fn k32_a_guarded_call_whose_start_is_not_answered_runs_once_and_leaves_no_doubt() {
    survive_cut(&cut(GUARDED, STARTED, CutAt::BeforeAnswer, 0, 2)).await;
}

async fn survive_cut(cut: &Cut) {
    let case = format!("{:?} {:?} {:?}", cut.tools, cut.statement, cut.at);
    let mut world = World::new("cut", cut.tools).await;
    // A new connection must come before the lease ends, or another claim asks the model again.
    world.options = world.options.env("WAKEFUL_QUEUE__LEASE_S", "60");
    let proxy = Proxy::start(&world.database.url);
    world.model.hold();
    let process = world.options.spawn(&proxy.url);
    process.wait_for_log("\"Listening\"").await;
    let client = process.client();
    if cut.statement == CLAIM {
        proxy.cut_when(cut.statement, cut.at);
    }
    world.begin(&client).await;
    if cut.statement != CLAIM {
        world.model.asked(1).await;
        proxy.cut_when(cut.statement, cut.at);
    }
    if cut.statement == HEARTBEAT {
        eventually("the cut", || async { (proxy.cut_count() == 1).then_some(()) }).await;
    }
    world.model.release();
    let traces = world.finish(&client).await;
    assert_eq!(proxy.cut_count(), 1, "{case}: it was cut");
    assert_eq!(traces.journal("TOOL_FAILED_UNCERTAIN").len(), cut.uncertain, "{case}");
    assert_eq!(world.options.effects().len(), cut.effects, "{case}");
    assert!(traces.journal("GEN_RESUMED").is_empty(), "{case}: no model call was made again");
    let bodies = world.model.bodies();
    assert_eq!(bodies.len(), 4, "{case}: no model call was made again");
    if cut.uncertain == 0 {
        assert_eq!(bodies, World::undisturbed(cut.tools).await, "{case}: the same requests as undisturbed");
    }
    // The process shuts down through the proxy, which runs in this test: a blocking wait would stop the proxy
    // too.
    process.signal(libc::SIGTERM);
    let (status, _) = process.ended().await;
    assert!(status.success(), "{case}: it is the same process");
}

#[tokio::test]
async fn k32_a_message_whose_commit_is_not_answered_is_one_message_when_it_is_posted_again() {
    for (at, first_time) in [(CutAt::BeforeServer, 202), (CutAt::BeforeAnswer, 200)] {
        let mut world = World::new("cut", GUARDED).await;
        let proxy = Proxy::start(&world.database.url);
        let process = world.options.spawn(&proxy.url);
        process.wait_for_log("\"Listening\"").await;
        let client = process.client();
        let post = async || {
            let body = json!({"user_id": "ann", "text": "A table for two, please.", "client_key": "k1"});
            client.post("/v1/chat/cut/messages", &body).await
        };
        proxy.cut_when(MESSAGE, at);
        let (status, answer) = post().await;
        assert!(status.is_server_error(), "nothing is acknowledged that may not be there: {status} {answer}");
        assert_eq!(proxy.cut_count(), 1);
        let (status, answer) = post().await;
        assert_eq!(status, first_time, "{at:?}: {answer}");
        world.session_id = answer["session_id"].as_str().expect("an id").to_owned();
        let (status, again) = post().await;
        assert_eq!((status.as_u16(), &again), (200, &answer), "and the first answer from there on");
        let traces = world.finish(&client).await;
        assert_eq!(traces.journal("MESSAGE_RECEIVED").len(), 2, "and the one that was posted after it");
        assert_eq!(world.effects("charge"), 2);
        assert_eq!(world.model.bodies(), World::undisturbed(GUARDED).await);
    }
}

#[tokio::test]
async fn losing_every_connection_ends_no_process_and_loses_nothing() {
    let mut world = World::new("cut", BOTH).await;
    // It waits for heartbeats on new connections, and no lease may end before they come.
    world.options = world.options.env("WAKEFUL_QUEUE__LEASE_S", "60");
    world.model.hold();
    let process = world.serve().await;
    let client = process.client();
    world.begin(&client).await;

    world.model.asked(1).await;
    cut_connections(&world.database, &process).await;
    std::fs::write(world.options.path("hold"), "").unwrap();
    world.model.hold_from(1);
    world.options.has_effects(2).await;
    cut_connections(&world.database, &process).await;
    std::fs::remove_file(world.options.path("hold")).unwrap();
    let mut reader = Reader::open(&client, &world.session_id, None).await;
    reader.until("gen_chunk").await;
    rows(&world, "select count(*) from generation_chunks where session_id = $1", 1).await;
    cut_connections(&world.database, &process).await;
    world.model.release();

    let traces = world.finish(&client).await;
    assert_eq!(world.model.bodies(), World::undisturbed(BOTH).await, "no model call was repeated");
    assert!(traces.journal("TOOL_FAILED_UNCERTAIN").is_empty());
    assert_eq!(world.options.effects().len(), 4);
    assert!(process.terminate().success(), "it is the same process");
}

/// Ends every connection of the process, and waits until it has sent a heartbeat on a new one.
async fn cut_connections(database: &Database, process: &Process) {
    let (cut, at): (i64, String) = sqlx::query_as(
        "select count(pg_terminate_backend(pid)), clock_timestamp()::text from pg_stat_activity
        where datname = current_database() and application_name = 'wakeful'",
    )
    .fetch_one(&database.pool)
    .await
    .expect("pg_stat_activity");
    assert!(cut > 0);
    eventually("the heart to beat again", || async {
        let beats: i64 = sqlx::query_scalar(
            "select count(*) from workers where pid = $1 and beat_at > $2::text::timestamptz",
        )
        .bind(process.pid())
        .bind(&at)
        .fetch_one(&database.pool)
        .await
        .expect("workers");
        (beats == 1).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_closing_commit_whose_answer_is_late_is_not_taken_for_a_lost_lease() {
    let mut world = World::new("late", IDEMPOTENT).await;
    world.options = world.options.env("WAKEFUL_QUEUE__HEARTBEAT_S", "0.2");
    let proxy = Proxy::start(&world.database.url);
    world.model.hold();
    let process = world.options.spawn(&proxy.url);
    process.wait_for_log("\"Listening\"").await;
    world.begin(&process.client()).await;
    world.model.asked(1).await;
    proxy.cut_when(END, CutAt::HeldAnswer);
    world.model.release();
    // A heartbeat comes between the commit and its answer, and finds the job gone.
    process.wait_for_log("The lease is gone").await;
    assert!(!process.log().contains("The claim is over"), "{}", process.log());
    proxy.release();
    let end = process.wait_for_log("The claim is over").await;
    assert!(end.contains("\"end\":\"closed\""), "{end}");
    assert_eq!(proxy.cut_count(), 1);
    process.client().wait_for(&world.session_id, "completed").await;
    assert!(process.terminate().success());
}
