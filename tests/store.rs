//! The store on a real Postgres, without a process: the warm copy, the logs, the fence, the locks and the queue.

mod absurd;
mod alive;
mod announced;
mod at_once;
mod batches;
mod bundle;
mod cancelled;
mod claims;
mod ending;
mod erasure;
mod fork;
mod full;
mod group;
mod hostile;
mod joined;
mod journal;
mod keys;
mod made_up;
mod offers;
mod overview;
mod pauses;
mod pool;
mod queue;
mod sessions;
mod starting;
mod turns;
mod verify;
mod waking;
mod warm;
mod world;

use crate::support::eventually;
use crate::support::wire::Proxy;
use futures::future::join_all;
use made_up::*;
use serde_json::json;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use wakeful_store::delivery::Settled;
use wakeful_store::generation::NewChunks;
use wakeful_store::heal::Cursor;
use wakeful_store::queue::Kind;
use wakeful_store::step::{Commit, Performance};
use wakeful_store::wake::NewMessage;
use wakeful_store::{Error, Store, new_id};
use wakeful_workflow::advance::{CallEnd, EndedCall, Performed, advance};
use wakeful_workflow::agent::{AgentPolicy, Limits};
use wakeful_workflow::inbox::Acceptance;
use wakeful_workflow::plan::{Action, How, Stop, plan};
use wakeful_workflow::record::Role;
use wakeful_workflow::session::{CallOutcome, CallStatus, SessionStatus};
use world::*;

const LEASE: Duration = Duration::from_secs(60);

// ---- the warm copy ----

#[tokio::test]
async fn the_warm_copy_equals_hydration_after_every_commit() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Reserve a table and write to Bob.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;

    // A follow-up arrives during the model call. The model asks for two calls whose order is not that of
    // their ids.
    world.send(&session_id, "For four persons.").await;
    let (reserve, email) = (call("call_b", "reserve"), call("call_a", "compose_email"));
    driver.continues(replied(vec![text("One moment."), asks(&reserve), asks(&email)])).await;
    assert_eq!(driver.session.inbox.len(), 1, "the follow-up was read in by the refresh");
    assert_eq!(driver.session.calls.len(), 2);

    let run = done("Reserved.", None);
    driver.settle(&reserve, &run).await;
    let mail =
        json!({"type": "sentEmail", "to": ["bob@example.com"], "subject": "Table", "body": "For four."});
    driver
        .continues(Performed::Called(vec![
            performed(&reserve, run),
            performed(&email, done("Queued.", Some(mail))),
        ]))
        .await;
    assert_eq!(driver.session.state["email/call_a"]["subject"], "Table");
    assert_eq!(driver.session.last_step_number, 1);

    // The follow-up enters the transcript with the reply to it. That reply asks the user.
    let question = call("call_c", "ask_user");
    driver.continues(replied(vec![asks(&question)])).await;
    assert!(driver.session.inbox.is_empty());
    assert_eq!(driver.commit(asked(&question)).await, Commit::Closed { opened: false });
    assert_eq!(world.status(&session_id).await, "waiting_input");

    let woken = world.send(&session_id, "At eight.").await;
    assert_eq!(woken.outcome, Acceptance::Delivered);
    let mut driver = world.drive(&session_id).await;
    assert_eq!(
        driver.session.records.last().unwrap().role,
        Role::Tool,
        "the answer is the question's result"
    );
    driver.continues(Performed::Begun).await;

    // The answer arrives before the pausing commit: the run does not pause, and the next plan takes the
    // answer.
    let question = call("call_d", "ask_user");
    driver.continues(replied(vec![asks(&question)])).await;
    world.send(&session_id, "By the window.").await;
    driver.continues(asked(&question)).await;
    assert_eq!(driver.session.status, SessionStatus::Running);
    let Action::CallTools { calls } = plan(&driver.session, &Limits::default()) else {
        panic!("the answer is owed")
    };
    let How::Answer { inbox_id, text: answer } = calls[0].how.clone() else { panic!("{calls:?}") };
    assert_eq!(answer, "By the window.");
    let answered = EndedCall { call: question, ending: CallEnd::Answered { inbox_id, text: answer } };
    driver.continues(Performed::Called(vec![answered])).await;

    // A follow-up arrives before the closing commit: the reply is kept, and the run continues.
    world.send(&session_id, "Thanks!").await;
    driver.continues(replied(vec![text("Done.")])).await;
    assert_eq!(driver.session.inbox.len(), 1);
    assert_eq!(
        driver.commit(replied(vec![text("You are welcome.")])).await,
        Commit::Closed { opened: false }
    );
    assert_eq!(world.status(&session_id).await, "completed");
}

#[tokio::test]
async fn an_interrupted_model_call_is_hydrated_and_gone_with_the_answer() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    driver.begin_generation("gen_1", 1).await;
    let session = driver.session.session_id.clone();
    let append = async |first_chunk, texts: &[&str]| {
        let call = NewChunks {
            session_id: session.clone(),
            generation_id: "gen_1".into(),
            first_chunk,
            texts: texts.iter().map(|text| (*text).to_owned()).collect(),
        };
        let lost = NewChunks { generation_id: "gen_0".into(), first_chunk: 0, ..call.clone() };
        let appended = world.store.append_chunks(&[lost, call]).await.unwrap();
        assert!(!appended[0], "the other call is not there");
        appended[1]
    };
    assert!(!append(1, &["lo"]).await, "a chunk without the one before it would leave a gap");
    assert!(append(0, &["H"]).await);
    assert!(append(0, &["H", "el"]).await, "the first one is there already");

    driver.session = world.store.hydrate(&session_id).await.unwrap();
    assert_eq!(driver.session.interrupted.len(), 1);
    assert_eq!(driver.session.interrupted[0].last_chunk, 1);
    assert_eq!(world.store.generation_text(&session, &"gen_1".into()).await.unwrap(), "Hel");
    world.send(&session_id, "Still there?").await;
    driver.continues(replied(vec![text("Hello.")])).await;
    assert!(driver.session.interrupted.is_empty());
    let kinds = world.journal(&session_id).await;
    let resumed: Vec<&str> =
        kinds.iter().map(String::as_str).filter(|kind| kind.starts_with("GEN_")).collect();
    assert_eq!(resumed, ["GEN_START", "GEN_RESUMED", "GEN_START", "GEN_COMPLETE"]);
}

#[tokio::test]
async fn hydration_takes_one_statement_however_long_the_session_is() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    for turn in 0..5 {
        let reserve = call(&format!("call_{turn}"), "reserve");
        driver.continues(replied(vec![asks(&reserve)])).await;
        driver.continues(Performed::Called(vec![performed(&reserve, done("Reserved.", None))])).await;
    }
    let proxy = Proxy::start(&world.database.url);
    let store = Store::connect(&proxy.url, 2, "wakeful test").await.unwrap();
    let before = proxy.statements();
    let session = store.hydrate(&session_id).await.unwrap();
    assert_eq!(proxy.statements() - before, 1);
    assert_eq!(session.records.len(), 11);
    assert_eq!(session, driver.session);
}

// ---- the logs ----

#[tokio::test]
async fn both_logs_refuse_to_be_rewritten() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    let before = world.dump().await;
    for statement in [
        "update conversation_records set internal = true",
        "update conversation_records set created_at = created_at",
        "delete from conversation_records",
        "truncate conversation_records",
        "update session_events set type = 'other'",
        "update session_events set ts = ts where seq = 1",
        "delete from session_events where seq = 1",
        "truncate session_events",
    ] {
        let refused = sqlx::query(statement).execute(&world.database.pool).await;
        let error = refused.expect_err(statement).to_string();
        assert!(error.contains("append-only"), "{statement}: {error}");
    }
    assert_eq!(world.dump().await, before);
    assert_eq!(
        world.store.hydrate(&session_id).await.unwrap().records.len(),
        1,
        "there was something to refuse"
    );
}

// ---- the fence ----

#[tokio::test]
async fn a_lost_lease_writes_nothing_in_any_table() {
    let world = World::new().await;
    // Each kind of write, at the point of a session's life where it is made.
    let session_id = world.wake("c1", "Hello").await;
    let mut driver = world.drive(&session_id).await;
    world.refuses(&driver, Performed::Begun).await;
    driver.continues(Performed::Begun).await;

    let (reserve, other) = (call("call_1", "reserve"), call("call_2", "charge"));
    let turn = replied(vec![asks(&reserve), asks(&other)]);
    world.refuses(&driver, turn.clone()).await;
    world.refuses(&driver, replied(vec![text("Bye.")])).await;
    world.refuses(&driver, Performed::Stopped(Stop::Cancelled)).await;
    driver.continues(turn).await;

    let mail = json!({"type": "sentEmail", "to": ["b@example.com"], "subject": "x", "body": "y"});
    let results = || {
        Performed::Called(vec![
            performed(&reserve, done("Reserved.", Some(mail.clone()))),
            performed(&other, done("Charged.", None)),
        ])
    };
    world.refuses(&driver, results()).await;

    let started = driver.start(&reserve).await.expect("the lease is held");
    let outcome = CallOutcome { content: "Reserved.".into(), is_error: false, details: None };
    let token = world.steal(driver.job.lease.job_id).await;
    let before = world.dump().await;
    let (lease, id) = (&driver.job.lease, &driver.session.session_id);
    let settled = world.store.settle_call(lease, id, &reserve.call_id, &started, CallStatus::Done, &outcome);
    assert!(!settled.await.unwrap(), "settled without the lease");
    assert!(driver.start(&other).await.is_none(), "started without the lease");
    assert!(!driver.try_generation("gen_1", 1).await, "a model call began without the lease");
    world.store.retry_later(lease, Duration::ZERO, "late").await.unwrap();
    world.store.release(lease).await.unwrap();
    world.store.end_job(lease).await.unwrap();
    assert_eq!(world.dump().await, before);
    world.give_back(driver.job.lease.job_id, token).await;
    let settled = world.store.settle_call(lease, id, &reserve.call_id, &started, CallStatus::Done, &outcome);
    assert!(settled.await.unwrap(), "it lacked only the lease");
    let again = world.store.settle_call(lease, id, &reserve.call_id, &started, CallStatus::Done, &outcome);
    assert!(again.await.unwrap(), "who got no answer asks again");
    driver.continues(results()).await;
}

#[tokio::test]
async fn the_token_of_an_earlier_claim_moves_nothing() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    let mut earlier = Claims::start(&world.store, Kind::Step, 1, Duration::from_millis(1));
    let first = earlier.next().await;
    earlier.stop();
    let zombie = Driver {
        world: &world,
        session: world.store.hydrate(&session_id).await.unwrap(),
        job: first,
        policy: AgentPolicy::default(),
    };
    let mut driver = world.drive(&session_id).await;
    assert_eq!(driver.job.lease.job_id, zombie.job.lease.job_id);

    let before = world.dump().await;
    let transition = zombie.transition(Performed::Begun);
    assert_eq!(zombie.write(&transition).await, Commit::Stale);
    assert_ne!(driver.job.lease.token, zombie.job.lease.token);
    world.store.release(&zombie.job.lease).await.unwrap();
    assert_eq!(world.dump().await, before);
    driver.continues(Performed::Begun).await;
}

// Each statement begins before the claim commits, so its snapshot still shows the old lease.
#[tokio::test]
async fn a_statement_that_meets_an_uncommitted_claim_writes_nothing() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    let mut driver = world.drive(&session_id).await;
    let job_id = driver.job.lease.job_id;
    driver.continues(Performed::Begun).await;
    let before = world.count("generations").await;
    let began = world.claim_during(job_id, driver.try_generation("gen_1", 1)).await;
    assert!(!began, "a second worker may call the model now, so this one must not");
    assert_eq!(world.count("generations").await, before, "the next reply would journal a false GEN_RESUMED");

    let token = driver.job.lease.token;
    world.give_back(job_id, token).await;
    let (reserve, other) = (call("call_1", "reserve"), call("call_2", "charge"));
    driver.continues(replied(vec![asks(&reserve), asks(&other)])).await;
    assert!(world.claim_during(job_id, driver.start(&other)).await.is_none());
    world.give_back(job_id, token).await;
    let started = driver.start(&reserve).await.expect("the lease is held");
    let outcome = CallOutcome { content: "Reserved.".into(), is_error: false, details: None };
    let (lease, id) = (&driver.job.lease, &driver.session.session_id);
    let settled = world.store.settle_call(lease, id, &reserve.call_id, &started, CallStatus::Done, &outcome);
    assert!(!world.claim_during(job_id, settled).await.unwrap());
    assert_eq!(world.one("select count(*) from tool_calls where status = 'invoked'").await, 1);
    assert_eq!(world.one("select count(*) from tool_calls where status = 'started'").await, 1);

    world.give_back(job_id, token).await;
    let results = driver.transition(Performed::Called(vec![
        performed(&reserve, done("Reserved.", None)),
        performed(&other, done("Charged.", None)),
    ]));
    assert_eq!(world.claim_during(job_id, driver.write(&results)).await, Commit::Stale);
    assert_eq!(world.one("select count(*) from tool_calls where result_message_number is null").await, 2);
}

#[tokio::test]
async fn an_intent_of_a_commit_is_withdrawn_by_the_holder_of_the_lease_alone() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    let mut driver = world.drive(&session_id).await;
    let (lease, id) = (&driver.job.lease, "gen_1".into());
    let transition = driver.transition(Performed::Begun);
    let performance = Performance { intent: Some(driver.generation(&id, 1)), ..performance() };
    let commit = world.store.commit(lease, &driver.session, &transition, performance).await.unwrap();
    assert!(matches!(commit, Commit::Continued { started_at: Some(_), .. }), "{commit:?}");
    // Committed again, because its answer was lost: nothing is written twice.
    let again = world.store.commit(lease, &driver.session, &transition, performance).await.unwrap();
    assert_eq!(again, Commit::Moved);
    assert_eq!(world.count("generations").await, 1);

    let session = &driver.session.session_id;
    let withdrawn = world.store.withdraw_generation(lease, session, &id);
    world.claim_during(lease.job_id, withdrawn).await.unwrap();
    assert_eq!(world.count("generations").await, 1, "the next worker may have read it");
    world.give_back(lease.job_id, lease.token).await;
    world.store.withdraw_generation(lease, session, &id).await.unwrap();
    driver.session = world.store.hydrate(&session_id).await.unwrap();
    assert!(driver.session.interrupted.is_empty());
    assert_eq!(driver.commit(replied(vec![text("Hi.")])).await, Commit::Closed { opened: false });
    assert!(!world.journal(&session_id).await.contains(&"GEN_RESUMED".to_owned()));
}

#[tokio::test]
async fn a_chunk_that_meets_an_uncommitted_reply_is_not_left_behind() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    driver.begin_generation("gen_1", 1).await;
    // A reply's commit deletes the session's model calls and their chunks.
    let mut reply = world.database.pool.begin().await.unwrap();
    for statement in ["delete from generations", "delete from generation_chunks"] {
        sqlx::query(statement).execute(&mut *reply).await.unwrap();
    }
    let chunks = [NewChunks {
        session_id: driver.session.session_id.clone(),
        generation_id: "gen_1".into(),
        first_chunk: 0,
        texts: vec!["Hel".to_owned()],
    }];
    let append = world.store.append_chunks(&chunks);
    let waits = world.until(
        "select exists (select from generation_chunks) or exists (select from pg_stat_activity
        where datname = current_database() and wait_event_type = 'Lock')",
    );
    let (appended, ()) = tokio::join!(append, async {
        waits.await;
        reply.commit().await.unwrap();
    });
    assert_eq!(appended.unwrap(), [false], "its model call is over");
    assert_eq!(world.count("generation_chunks").await, 0, "no commit would delete it");
}

#[tokio::test]
async fn a_job_whose_step_a_hand_changed_costs_no_answer() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    sqlx::query("update jobs set step_number = 7").execute(&world.database.pool).await.unwrap();
    assert_eq!(driver.commit(replied(vec![text("Hi.")])).await, Commit::Closed { opened: false });
}

#[tokio::test]
async fn a_commit_whose_answer_was_lost_applies_once() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    let mut driver = world.drive(&session_id).await;
    let reserve = call("call_1", "reserve");
    let mail = json!({"type": "sentEmail", "to": ["b@example.com"], "subject": "x", "body": "y"});
    let script = vec![
        Performed::Begun,
        replied(vec![asks(&reserve)]),
        Performed::Called(vec![performed(&reserve, done("Reserved.", Some(mail)))]),
        replied(vec![text("Done.")]),
    ];
    for (at, outcome) in script.into_iter().enumerate() {
        let transition = driver.transition(outcome);
        let first = driver.write(&transition).await;
        let after = world.dump().await;
        let second = driver.write(&transition).await;
        assert!(matches!(second, Commit::Moved | Commit::Stale), "{at}: {first:?} and then {second:?}");
        assert_eq!(world.dump().await, after, "{at}");
        if let Commit::Continued { .. } = first {
            driver.session = world.store.hydrate(&session_id).await.unwrap();
        }
    }
    assert_eq!(world.status(&session_id).await, "completed");
}
