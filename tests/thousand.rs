//! A session of a thousand steps works like one of ten: it is read in one statement, forked without copying
//! blobs, exported and imported whole, and replayed with the exact bytes of each request.

use crate::support::long::Long;
use crate::support::wire::Proxy;
use crate::support::{Answer, Database, ModelServer, Options};
use std::collections::BTreeSet;
use wakeful_store::Store;
use wakeful_store::fork::ForkRequest;
use wakeful_workflow::bundle::{Limits, normal::normal};
use wakeful_workflow::diff::{Level, diff};
use wakeful_workflow::fork::CutPoint;

const STEPS: usize = 1000;
const LONG: Long = Long { steps: STEPS, message_bytes: 2048, hashes: false };

#[tokio::test]
#[ignore = "slow: make soak"]
async fn a_thousand_steps_are_hydrated_in_one_statement_forked_without_their_blobs_and_carried_whole() {
    let database = Database::new().await;
    let store = database.store().await;
    let session_id = LONG.make(&store, "long").await;

    let weight: i64 = database
        .value(
            "select sum(pg_column_size(s.*))::bigint from session_steps s where session_id = $1",
            &session_id,
        )
        .await;
    let steps: i64 =
        database.value("select count(*) from session_steps where session_id = $1", &session_id).await;
    assert_eq!(steps, STEPS as i64);
    assert!(weight < 256 * 1024, "the cached results of {steps} steps weigh {weight} bytes");
    let said: i64 = database
        .value(
            "select sum(length(content::text)) from conversation_records where session_id = $1",
            &session_id,
        )
        .await;
    assert!(said > 2 * STEPS as i64 * 2048, "{said} bytes were said");

    let proxy = Proxy::start(&database.url);
    let counted = Store::connect(&proxy.url, 2, "wakeful test").await.unwrap();
    let before = proxy.statements();
    let session = counted.hydrate(&session_id).await.unwrap();
    assert_eq!(proxy.statements() - before, 1);
    assert_eq!(session.records.len(), 2 * STEPS);
    assert_eq!(session.totals.turns, STEPS as i64);

    fork(&database, &store, &session_id).await;
    carry(&database, &store, &session_id).await;

    // The worker of its last turn reads of the next one what is new.
    let copy = counted.hydrate_to_keep(&session_id).await.unwrap().keep().expect("nothing is sealed");
    LONG.go_on(&store, &session_id).await;
    let before = proxy.statements();
    let caught_up = counted.catch_up(copy).await.unwrap().expect("nothing was lost");
    assert_eq!(proxy.statements() - before, 1);
    assert_eq!(caught_up.session, store.hydrate(&session_id).await.unwrap());
    assert_eq!(caught_up.session.records.len(), 2 * STEPS + 2);
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn a_thousand_recorded_steps_are_replayed_with_a_thousand_equal_request_hashes() {
    let database = Database::new().await;
    let store = database.store().await;
    let session_id = Long { hashes: true, ..LONG }.make(&store, "long").await;
    let before = parent(&database, &session_id).await;

    let model = ModelServer::turns(vec![Answer::text("Nobody asks me.")]).await;
    let mut options = Options::new()
        .model("openai/test")
        .env("OPENAI_BASE_URL", &model.url)
        .env("WAKEFUL_LOG", "warn")
        // In a debug build each of the last steps takes a large part of a second. No lease may end because of
        // that.
        .env("WAKEFUL_QUEUE__LEASE_S", "30");
    options.args = ["replay", &session_id, "--model", "recorded", "--tools", "recorded", "-o", "json"]
        .map(str::to_owned)
        .to_vec();
    let (status, process) = options.spawn(&database.url).ended().await;
    let (output, log) = (process.output(), process.log());
    assert!(status.success(), "{status}: {log}\n{}", output.chars().take(2000).collect::<String>());
    let told: serde_json::Value = serde_json::from_str(&output).unwrap();
    assert_eq!(told["diff"]["verdict"], "equal");
    assert_eq!(told["diff"]["requests"]["equal"], STEPS, "{}", told["diff"]["requests"]);
    assert_eq!(told["replay"]["requests_differ"], false);
    assert_eq!(told["replay"]["unrecorded"], serde_json::json!([]));
    assert_eq!(model.bodies().len(), 0, "no model was called");

    let replay = told["replay"]["session_id"].as_str().unwrap();
    assert_ne!(replay, session_id);
    let (hashes, other_hashes) = (requests(&database, &session_id).await, requests(&database, replay).await);
    assert_eq!(hashes.iter().collect::<BTreeSet<_>>().len(), STEPS, "each request has bytes of its own");
    assert!(hashes == other_hashes, "the report agrees with the journals");
    let (records, other_records) = (records(&database, &session_id).await, records(&database, replay).await);
    assert_eq!(records.len(), 2 * STEPS);
    // Not assert_eq: a failure would print four megabytes twice.
    assert!(records == other_records, "every message is the source's");
    assert_eq!(
        parent(&database, &session_id).await,
        before,
        "the source is as it was, and no blob was added"
    );
}

/// The hash of the request behind each answer, in the order of the answers.
async fn requests(database: &Database, session_id: &str) -> Vec<String> {
    sqlx::query_scalar(
        "select called.payload ->> 'request_sha256'
        from session_events ended
        join session_events called using (session_id)
        where ended.session_id = $1 and ended.type = 'GEN_COMPLETE' and called.type = 'LLM_CALLED'
            and called.payload ->> 'generation_id' = ended.payload ->> 'generation_id'
        order by (ended.payload ->> 'message_number')::bigint",
    )
    .bind(session_id)
    .fetch_all(&database.pool)
    .await
    .unwrap()
}

/// Number, role, content and `internal` of each message.
async fn records(database: &Database, session_id: &str) -> Vec<(i64, String, String, bool)> {
    sqlx::query_as(
        "select message_number, role, content::text, internal from conversation_records
        where session_id = $1 order by message_number",
    )
    .bind(session_id)
    .fetch_all(&database.pool)
    .await
    .unwrap()
}

/// The parent's rows as one text, and the number of blobs.
async fn parent(database: &Database, session_id: &str) -> (String, i64) {
    let rows = database
        .value(
            "select md5(concat(
                (select s::text from conversation_sessions s where session_id = $1),
                (select string_agg(r::text, '' order by message_number) from conversation_records r where session_id = $1),
                (select string_agg(t::text, '' order by step_number) from session_steps t where session_id = $1),
                (select string_agg(e::text, '' order by seq) from session_events e where session_id = $1),
                (select string_agg(c::text, '' order by call_id) from tool_calls c where session_id = $1)))",
            session_id,
        )
        .await;
    (rows, database.value("select count(*) from blobs where $1 <> ''", session_id).await)
}

async fn fork(database: &Database, store: &Store, session_id: &str) {
    let before = parent(database, session_id).await;
    let request = ForkRequest { start: false, ..ForkRequest::new(session_id, CutPoint::Step(500)) };
    let forked = store.fork(&request).await.unwrap();
    assert_eq!(parent(database, session_id).await, before, "the parent is as it was, and no blob was copied");
    let fork = store.side(&forked.session_id).await.unwrap();
    assert_eq!(fork.records.len(), 1001, "the message, and two of each step");
    let report = diff(&store.side(session_id).await.unwrap(), &fork);
    assert_eq!(report.first_divergence.map(|first| first.turn), Some(501));
    assert!(report.turns[..500].iter().all(|turn| turn.level == Level::Equal));
}

async fn carry(database: &Database, store: &Store, session_id: &str) {
    let folder = tempfile::TempDir::with_prefix("wakeful-test-").unwrap();
    let file = folder.path().join("export.json");
    let bundle = export(store, session_id).await;
    assert_eq!(export(store, session_id).await, bundle, "the same state gives the same bytes");
    std::fs::write(&file, &bundle).unwrap();
    let imported = store.import(&file, "default", Limits::default(), |_| {}).await.unwrap();
    let here = imported.session_id.unwrap();
    assert_ne!(here, session_id);
    let again = export(store, &here).await;
    // Not assert_eq: a failure would print six megabytes twice.
    assert!(normal(&again).unwrap() == normal(&bundle).unwrap(), "the import equals the export");

    let report = diff(&store.side(session_id).await.unwrap(), &store.side(&here).await.unwrap());
    assert_eq!(report.verdict, Level::Equal);
    assert_eq!((report.turns.len(), report.requests.equal), (STEPS, STEPS));
    assert_eq!(report.totals.left.usage, report.totals.right.usage);
    let jobs: i64 = database.value("select count(*) from jobs where $1 <> ''", &here).await;
    assert_eq!(jobs, 0, "an import starts nothing");
}

async fn export(store: &Store, session_id: &str) -> Vec<u8> {
    let mut export = store.export(session_id, false).await.unwrap();
    let mut bundle = Vec::new();
    while let Some(chunk) = export.next().await.unwrap() {
        bundle.extend(chunk);
    }
    bundle
}
