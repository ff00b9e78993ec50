//! Bundles: an import equals its export, whatever the session was in the middle of, and starts nothing.

use super::hostile::Lines;
use super::made_up::*;
use super::world::*;
use serde_json::{Value, json};
use std::io::Write as _;
use wakeful_store::export::Export;
use wakeful_store::fork::{ForkRequest, Purpose};
use wakeful_store::heal::Cursor;
use wakeful_store::import::Imported;
use wakeful_store::queue::Kind;
use wakeful_store::resend::Resend;
use wakeful_store::step::Commit;
use wakeful_store::wake::{NewAttachment, NewMessage, NewSession};
use wakeful_store::{Error, Store};
use wakeful_workflow::advance::Performed;
use wakeful_workflow::bundle::Limits;
use wakeful_workflow::bundle::normal::normal;
use wakeful_workflow::fork::CutPoint;
use wakeful_workflow::plan::{Action, How, plan};

async fn rest(mut export: Export) -> Vec<u8> {
    let mut bundle = Vec::new();
    while let Some(chunk) = export.next().await.unwrap() {
        assert!(chunk.ends_with(b"\n"), "whole lines");
        bundle.extend(chunk);
    }
    bundle
}

pub(super) async fn export(store: &Store, session_id: &str) -> Vec<u8> {
    rest(store.export(session_id, false).await.unwrap()).await
}

pub(super) async fn try_import(store: &Store, bundle: &[u8]) -> Result<Imported, Error> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bundle).unwrap();
    store.import(file.path(), "default", Limits::default(), |_| {}).await
}

/// Imports a bundle that must be accepted, verifies the session, and returns its id.
pub(super) async fn import(store: &Store, bundle: &[u8]) -> String {
    let imported = try_import(store, bundle).await.unwrap();
    let session_id = imported.session_id.expect("it was imported");
    let verification = store.verify(&session_id).await.unwrap();
    let differ: Vec<_> = verification.checks.iter().filter(|check| !check.agrees).collect();
    assert!(verification.agrees, "{differ:#?}");
    session_id
}

pub(super) fn rows(bundle: &[u8], section: &str) -> Vec<Value> {
    let lines = std::str::from_utf8(bundle).unwrap().lines();
    let values = lines.map(|line| serde_json::from_str::<Value>(line).unwrap());
    values.filter_map(|mut value| value.get_mut(section).map(Value::take)).collect()
}

/// Compares two bundles by content: the original, and the export of its import.
fn assert_equal(a: &[u8], b: &[u8]) {
    let (a, b) = (normal(a).unwrap(), normal(b).unwrap());
    for (a, b) in a.lines().zip(b.lines()) {
        assert_eq!(a, b);
    }
    assert_eq!(a, b);
}

fn mail(subject: &str) -> Value {
    json!({"type": "sentEmail", "to": ["bob@example.com"], "subject": subject, "body": "Hi."})
}

/// A session with everything: two runs, follow-ups, parallel calls, a mail that was sent and one that was
/// not, a question and its answer, and a state whose values are blobs of several parts.
async fn rich(world: &World) -> String {
    let session_id = world.wake("c1", "Write to Bob, twice.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    world.send(&session_id, "And reserve a table. ☕\u{1}").await;
    let (a, b, c) =
        (call("call_a", "compose_email"), call("call_b", "compose_email"), call("call_c", "reserve"));
    driver.continues(replied(vec![text("One moment."), asks(&b), asks(&a), asks(&c)])).await;
    let reserved =
        done("Reserved.", Some(json!({"type": "other", "rate": 1.0e-7, "no": 12_345_678_901_i64})));
    driver.settle(&c, &reserved).await;
    let called = vec![
        performed(&b, done("Queued.", Some(mail("One")))),
        performed(&a, done("Queued.", Some(mail(&"x".repeat(150 << 10))))),
        performed(&c, reserved),
    ];
    driver.continues(Performed::Called(called)).await;
    let question = call("call_d", "ask_user");
    driver.continues(replied(vec![asks(&question)])).await;
    assert_eq!(driver.commit(asked(&question)).await, Commit::Closed { opened: false });
    world.send(&session_id, "At eight.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    assert_eq!(driver.commit(replied(vec![text("Done.")])).await, Commit::Closed { opened: false });
    let mut claims = Claims::start(&world.store, Kind::Deliver, 1, super::LEASE);
    world.deliver(&claims.next().await).await;
    claims.stop();
    world.send(&session_id, "Thanks!").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    assert_eq!(
        driver.commit(replied(vec![text("You are welcome.")])).await,
        Commit::Closed { opened: false }
    );
    session_id
}

#[tokio::test]
async fn what_is_exported_is_imported_equal() {
    let world = World::new().await;
    let session_id = rich(&world).await;
    let bundle = export(&world.store, &session_id).await;
    assert_eq!(export(&world.store, &session_id).await, bundle, "the same state gives the same bytes");
    for (section, count) in
        [("session", 1), ("seed", 1), ("run", 2), ("step", 4), ("delivery", 2), ("call", 4)]
    {
        assert_eq!(rows(&bundle, section).len(), count, "{section}");
    }
    assert!(rows(&bundle, "blob").iter().any(|part| part["at"] != 0), "a blob of several parts");

    let elsewhere = World::new().await;
    let copy = import(&elsewhere.store, &bundle).await;
    let again = export(&elsewhere.store, &copy).await;
    assert_equal(&bundle, &again);
    assert_ne!(bundle, again, "its ids are its own");

    // The model's context is the same.
    let (a, b) =
        (world.store.hydrate(&session_id).await.unwrap(), elsewhere.store.hydrate(&copy).await.unwrap());
    let full = |session| wakeful_workflow::context::full(session, vec![]);
    assert_eq!(full(&a), full(&b));
    assert_eq!((a.state, a.totals, a.prefix), (b.state, b.totals, b.prefix));
}

#[tokio::test]
async fn k42_the_same_bundle_twice_gives_two_sessions_beside_the_first() {
    let world = World::new().await;
    let session_id = rich(&world).await;
    let before = world.dump().await;
    let bundle = export(&world.store, &session_id).await;
    assert_eq!(world.dump().await, before, "an export writes nothing");
    let (one, two) = (import(&world.store, &bundle).await, import(&world.store, &bundle).await);
    assert_ne!(one, two);
    assert_equal(&export(&world.store, &one).await, &export(&world.store, &two).await);
    assert_eq!(export(&world.store, &session_id).await, bundle, "the first is as it was");
    assert_eq!(world.one("select count(distinct conversation_id) from conversation_sessions").await, 3);
    assert_eq!(world.one("select count(distinct message_id) from conversation_records").await, 3 * 11);
    let blobs = world.one("select count(*) from blobs").await;
    assert_eq!(blobs, before["blobs"].as_array().unwrap().len() as i64, "blobs are shared");
    // A message to the copy goes to the copy alone. Ids from the bundle do not collide with ids that the
    // database assigns.
    world.send(&one, "Hello again.").await;
    assert_eq!(world.status(&one).await, "queued");
}

#[tokio::test]
async fn an_import_in_mid_run_starts_nothing_and_a_retry_runs_no_call_of_it() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Charge Bob.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    driver.sends_mail("call_m").await;
    // Of four calls one never began, one may have run, one is done and has a mail to send, and one waits.
    let calls = ["invoked", "started", "done", "waiting"].map(|id| call(id, "charge"));
    driver.continues(replied(calls.iter().map(asks).collect())).await;
    driver.start(&calls[1]).await.unwrap();
    driver.settle(&calls[2], &done("Queued.", Some(mail("Once more")))).await;
    world.run_sql("update tool_calls set status = 'waiting' where call_id = 'waiting'").await;
    world.send(&session_id, "Are you there?").await;
    let bundle = export(&world.store, &session_id).await;
    assert_eq!(rows(&bundle, "session")[0]["status"], "running");

    let elsewhere = World::new().await;
    let copy = import(&elsewhere.store, &bundle).await;
    assert_equal(&bundle, &export(&elsewhere.store, &copy).await);
    assert_eq!(elsewhere.count("jobs").await, 0, "no job");
    assert_eq!(elsewhere.status(&copy).await, "failed");
    let runs = elsewhere.one("select count(*) from session_runs where status in ('queued', 'running')").await;
    let unsent = elsewhere.one("select count(*) from deliveries where status in ('queued', 'sending')").await;
    let pending = elsewhere.one("select count(*) from session_inbox where status = 'pending'").await;
    assert_eq!((runs, unsent, pending), (0, 0, 0));

    // The healer leaves it alone.
    let before = elsewhere.dump().await;
    let page = elsewhere.store.look_for_unattended(&mut Cursor::default(), 100).await.unwrap();
    assert_eq!(page.sessions, Vec::<String>::new());
    assert!(elsewhere.store.wake_session(&copy).await.unwrap().is_empty());
    assert_eq!(elsewhere.dump().await, before);

    // A person retries it: no call of the bundle runs, and nothing is sent.
    elsewhere.store.retry(&copy, None).await.unwrap();
    let mut driver = elsewhere.drive(&copy).await;
    driver.continues(Performed::Begun).await;
    let Action::CallTools { calls } = plan(&driver.session, &wakeful_workflow::agent::Limits::default())
    else {
        panic!("the calls are closed first");
    };
    for planned in &calls {
        match &planned.how {
            How::Abandon | How::Uncertain { .. } => {}
            How::Reuse(_, outcome) => assert_eq!(outcome.details, None, "nothing to send comes out of it"),
            How::Run | How::Answer { .. } => panic!("{planned:?} would run"),
        }
    }
    assert_eq!(calls.len(), 4);
}

#[tokio::test]
async fn k41_an_export_of_a_live_run_is_of_one_moment_and_a_slow_reader_holds_nothing() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Go on.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    for round in 0..5 {
        driver.sends_mail(&format!("call_{round}")).await;
    }
    let open = call("call_open", "charge");
    driver.continues(replied(vec![asks(&open)])).await;
    driver.start(&open).await.unwrap();
    world.send(&session_id, "Faster!").await;
    let at_once = export(&world.store, &session_id).await;

    // This export begins at the same moment and is read while the run continues. Everything that was open
    // settles meanwhile.
    let mut slow = world.store.export(&session_id, false).await.unwrap();
    let mut bundle = slow.next().await.unwrap().unwrap();
    let long = world.one(
        "select count(*) from pg_stat_activity where xact_start < now() and pid <> pg_backend_pid()
        and datname = current_database()",
    );
    assert_eq!(long.await, 0, "no transaction is open between two pages");
    driver.session = world.store.hydrate(&session_id).await.unwrap();
    driver.continues(Performed::Called(vec![performed(&open, done("Charged.", None))])).await;
    let mut claims = Claims::start(&world.store, Kind::Deliver, 1, super::LEASE);
    world.deliver(&claims.next().await).await;
    claims.stop();
    while let Some(chunk) = slow.next().await.unwrap() {
        bundle.extend(chunk);
        world.send(&session_id, "And more.").await;
    }
    assert_eq!(bundle, at_once);
    let copy = import(&world.store, &bundle).await;
    assert_equal(&bundle, &export(&world.store, &copy).await);
}

#[tokio::test]
async fn k41_what_is_sent_again_while_it_is_exported_is_what_it_was() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Go on.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    for round in 0..5 {
        driver.sends_mail(&format!("call_{round}")).await;
    }
    world
        .run_sql("update deliveries set status = 'failed', last_error = 'no', settled_at = clock_timestamp()")
        .await;
    let at_once = export(&world.store, &session_id).await;
    let mut slow = world.store.export(&session_id, false).await.unwrap();
    let mut bundle = slow.next().await.unwrap().unwrap();
    for delivery in world.store.deliveries(&session_id).await.unwrap() {
        world.store.resend(None, &delivery.delivery_id, &Resend::default()).await.unwrap();
    }
    while let Some(chunk) = slow.next().await.unwrap() {
        bundle.extend(chunk);
    }
    assert_eq!(bundle, at_once);
    // A later bundle has the resent delivery, with its journal entry.
    let copy = import(&world.store, &export(&world.store, &session_id).await).await;
    let kept = world.store.deliveries(&copy).await.unwrap();
    assert!(kept.iter().all(|delivery| delivery.status == "expired" && delivery.imported));
}

#[tokio::test]
async fn a_session_beside_others_in_its_conversation_is_carried_with_its_numbers() {
    let world = World::new().await;
    let beside = |trigger: &str| NewSession { seeds: vec![], ..new_session("c1", trigger) };
    let mut ids = Vec::new();
    // Two sessions take turns in one conversation.
    for (trigger, said) in [("a", "One."), ("b", "Two."), ("a", "Three."), ("b", "Four.")] {
        let woken = world.store.wake(&beside(trigger), &message(said)).await.unwrap();
        let mut driver = world.drive(&woken.session_id).await;
        driver.continues(Performed::Begun).await;
        assert_eq!(driver.commit(replied(vec![text("Yes.")])).await, Commit::Closed { opened: false });
        ids.push(woken.session_id);
    }
    for session_id in &ids[..2] {
        let bundle = export(&world.store, session_id).await;
        let header: Value =
            serde_json::from_slice(bundle.split(|byte| *byte == b'\n').next().unwrap()).unwrap();
        assert_eq!(header["gaps"].as_array().unwrap().len(), 1, "{header}");
        let copy = import(&world.store, &bundle).await;
        assert_equal(&bundle, &export(&world.store, &copy).await);
        assert!(world.store.wake_session(&copy).await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_redacted_bundle_says_nothing_and_still_fits() {
    let world = World::new().await;
    let session_id = rich(&world).await;
    let bundle = rest(world.store.export(&session_id, true).await.unwrap()).await;
    let said = String::from_utf8(bundle.clone()).unwrap();
    let whole = rest(world.store.export(&session_id, false).await.unwrap()).await;
    let (session, inbox) = (&rows(&whole, "session")[0], rows(&whole, "inbox"));
    let conversation = session["conversation_id"].as_str().unwrap().split_once('/').unwrap().1;
    let key = inbox[0]["client_key"].as_str().unwrap();
    for secret in [
        "Bob",
        "bob@example.com",
        "xxxxxxxx",
        "You are a test",
        "At eight",
        "welcome",
        "Queued.",
        &format!("/{conversation}\""),
        &format!("\"{key}\""),
        "reserve",
    ] {
        assert!(!said.contains(secret), "{secret}");
    }
    for blob in rows(&bundle, "blob") {
        use base64::Engine as _;
        let bytes =
            base64::engine::general_purpose::STANDARD.decode(blob["base64"].as_str().unwrap()).unwrap();
        let text = String::from_utf8(bytes).unwrap();
        assert!(
            !text.contains("bob@") && !text.contains("xxxx") && !text.contains("You are a test"),
            "{text}"
        );
    }
    for record in rows(&bundle, "record") {
        for block in record["content"].as_array().unwrap() {
            let arguments = block["arguments"].as_object().into_iter().flatten();
            let shown: Vec<&String> = arguments.map(|(key, _)| key).collect();
            assert!(shown.iter().all(|key| key.starts_with("redacted-")), "{block}");
        }
    }
    // Another export has other hashes, so a reader of several cannot try texts against all of them.
    let other = rest(world.store.export(&session_id, true).await.unwrap()).await;
    let text = |bundle: &[u8]| rows(bundle, "inbox")[0]["content"].as_str().unwrap().to_owned();
    assert_ne!(text(&other), text(&bundle));
    let copy = import(&world.store, &bundle).await;
    let again = export(&world.store, &copy).await;
    assert_equal(&bundle, &again);
    let header: Value = serde_json::from_slice(again.split(|byte| *byte == b'\n').next().unwrap()).unwrap();
    assert_eq!(header["redacted"], true, "a second export is redacted as well");
}

#[tokio::test]
async fn a_redacted_bundle_has_no_type_of_a_file_that_its_sender_made_up() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Here is a file.").await;
    let file = NewAttachment {
        file_name: "plan.secret".into(),
        media_type: "application/x-secret".into(),
        bytes: b"abc".to_vec(),
    };
    let message = NewMessage { attachments: vec![file], ..message("And another one.") };
    world.store.send(&session_id, &message).await.unwrap();
    let bundle = rest(world.store.export(&session_id, true).await.unwrap()).await;
    let types: Vec<Value> = rows(&bundle, "blob").iter().map(|blob| blob["media_type"].clone()).collect();
    assert!(types.contains(&json!("application/octet-stream")), "{types:?}");
    let said = String::from_utf8(bundle).unwrap();
    assert!(!said.contains("secret"), "{said}");
}

#[tokio::test]
async fn a_fork_of_what_is_redacted_is_redacted_and_runs_nothing() {
    let world = World::new().await;
    let bundle = rest(world.store.export(&rich(&world).await, true).await.unwrap()).await;
    let copy = import(&world.store, &bundle).await;
    let resting = |id: &str| ForkRequest { start: false, ..ForkRequest::new(id, CutPoint::End) };
    let child = world.store.fork(&resting(&copy)).await.unwrap().session_id;
    for session_id in [&copy, &child] {
        let before = world.dump().await;
        let started =
            ForkRequest { prompt: Some("Go on.".into()), ..ForkRequest::new(session_id, CutPoint::End) };
        let replay = ForkRequest { purpose: Purpose::Replay, ..resting(session_id) };
        for request in [started, replay] {
            let refused = world.store.fork(&request).await.unwrap_err().to_string();
            assert!(refused.contains("redacted bundle"), "{refused}");
        }
        assert!(world.store.recording(session_id).await.is_err());
        assert_eq!(world.dump().await, before, "nothing was written");
    }
    let header = export(&world.store, &child).await;
    let header: Value = serde_json::from_slice(header.split(|byte| *byte == b'\n').next().unwrap()).unwrap();
    assert_eq!(header["redacted"], true);
}

#[tokio::test]
async fn an_import_has_no_model_and_no_tools_of_its_bundles_choice() {
    let world = World::new().await;
    let lines = Lines::of(&export(&world.store, &rich(&world).await).await);
    let trigger_type = rows(&lines.sealed(), "session")[0]["trigger_type"].as_str().unwrap().to_owned();
    let rules =
        json!({"model": "dear/one", "tools": ["charge"], "tool_mode": "recorded", "web": {"allow": ["*"]}});
    let bundle = lines.replace("session", "\"policy\":{}", &format!("\"policy\":{rules}")).sealed();
    // A session whose tools are not live cannot have sent anything, so a bundle that says it did is refused.
    let refused = try_import(&world.store, &bundle).await.unwrap_err();
    assert!(refused.to_string().contains("its tools are not live"), "{refused}");
    let bundle =
        Lines::of(&bundle).replace("session", "\"tool_mode\":\"recorded\"", "\"tool_mode\":\"live\"");
    let bundle = bundle.replace("session", "\"tool_mode\":\"live\",", "").sealed();
    let copy = import(&world.store, &bundle).await;
    let rules_of = async |session_id: &str, column: &str| -> Value {
        let row =
            format!("select to_jsonb(s) -> '{column}' from conversation_sessions s where session_id = $1");
        sqlx::query_scalar(sqlx::AssertSqlSafe(row))
            .bind(session_id)
            .fetch_one(&world.database.pool)
            .await
            .unwrap()
    };
    assert_eq!(rules_of(&copy, "policy").await, json!({"replies_as": trigger_type}));
    assert_eq!(rules_of(&copy, "imported_from").await["policy"]["tools"], json!(["charge"]), "as data");
    // The copy replies the way its source does, and so does a fork of the copy.
    let child = ForkRequest { start: false, ..ForkRequest::new(&copy, CutPoint::End) };
    let child = world.store.fork(&child).await.unwrap().session_id;
    assert_eq!(rules_of(&child, "policy").await, json!({"replies_as": trigger_type}));
}

/// Rows of tool_calls and deliveries that an export of `rows` of each reads from the tables.
async fn read_by_an_export(rows: i32) -> i64 {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    sqlx::query(
        "with calls as (
            insert into tool_calls (space_id, session_id, call_id, run_id, step_number, message_number,
                result_message_number, name, args_sha256, effect, status)
            select 'default', $1, 'call_' || n, 'run', 1, 2, 2, 'read_file', repeat('0', 64), 'pure', 'done'
            from generate_series(1, $2) as n
        )
        insert into deliveries (delivery_id, space_id, conversation_id, channel, ordinal, session_id, source_key,
            content, status)
        select 'dlv_' || n, 'default', 'default/c1', 'email', n, $1, 'call_' || n, '{}', 'sent'
        from generate_series(1, $2) as n",
    )
    .bind(&session_id)
    .bind(rows)
    .execute(&world.database.pool)
    .await
    .unwrap();
    world.run_sql("vacuum analyze").await;
    let read =
        "select sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint from pg_stat_user_tables
        where relname in ('tool_calls', 'deliveries')";
    let before = world.one(read).await;
    let store = Store::connect(&world.database.url, 2, "exports").await.unwrap();
    let bundle = export(&store, &session_id).await;
    assert_eq!(super::bundle::rows(&bundle, "call").len(), rows as usize);
    assert_eq!(super::bundle::rows(&bundle, "delivery").len(), rows as usize);
    store.close().await;
    // A connection reports what it has read at the latest when it ends.
    world.until("select not exists (select from pg_stat_activity where application_name = 'exports')").await;
    world.one(read).await - before
}

#[tokio::test]
async fn an_export_reads_each_row_as_often_however_many_there_are() {
    let (few, many) = (read_by_an_export(1000).await, read_by_an_export(8000).await);
    assert!(few >= 2000, "{few} rows are counted");
    // Postgres may choose a plan that reads them once more. To read all for each page would be 64 times as many.
    assert!(many <= few * 16, "{few} rows read of 1000, and {many} of 8000");
}

#[tokio::test]
async fn the_search_finds_an_import_that_was_committed_late() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Pelargonium").await;
    let bundle = export(&world.store, &session_id).await;
    while world.store.index_sessions().await.unwrap().more {}
    // The search has read further than the ids that the import makes.
    world.run_sql("update search_progress set run_id = 'run_g', session_id = 'sess_g'").await;
    let imported = import(&world.store, &bundle).await;
    while world.store.index_sessions().await.unwrap().more {}
    let found: Vec<String> = sqlx::query_scalar("select session_id from search_sessions order by session_id")
        .fetch_all(&world.database.pool)
        .await
        .unwrap();
    assert_eq!(found, [session_id, imported]);
}
