//! The store on a real Postgres, without a process: the warm copy, the logs, the fence, the locks and the queue.

mod bundle;
mod fork;
mod hostile;
mod journal;
mod sessions;
mod verify;
mod world;

use crate::support::wire::Proxy;
use futures::future::join_all;
use serde_json::json;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use wakeful::store::delivery::Settled;
use wakeful::store::heal::Cursor;
use wakeful::store::queue::Kind;
use wakeful::store::step::Commit;
use wakeful::store::wake::{Delivered, NewMessage};
use wakeful::store::{Error, Store, new_id};
use wakeful::workflow::advance::{Ending, Outcome, Performed, advance};
use wakeful::workflow::agent::{Limits, Policy};
use wakeful::workflow::plan::{Action, How, Stop, plan};
use wakeful::workflow::record::Role;
use wakeful::workflow::session::{CallOutcome, CallStatus, SessionStatus};
use world::*;

const LEASE: Duration = Duration::from_secs(60);

// ---- the warm copy ----

#[tokio::test]
async fn the_warm_copy_equals_hydration_after_every_commit() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Reserve a table and write to Bob.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Outcome::Begun).await;

    // A follow-up comes while the model is called; two calls are asked for, in no order of their ids.
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
        .continues(Outcome::Called(vec![
            performed(&reserve, run),
            performed(&email, done("Queued.", Some(mail))),
        ]))
        .await;
    assert_eq!(driver.session.state["email/call_a"]["subject"], "Table");
    assert_eq!(driver.session.last_step_number, 1);

    // The follow-up enters the transcript with the reply to it; the reply asks the user.
    let question = call("call_c", "ask_user");
    driver.continues(replied(vec![asks(&question)])).await;
    assert!(driver.session.inbox.is_empty());
    assert_eq!(driver.commit(asked(&question)).await, Commit::Closed);
    assert_eq!(world.status(&session_id).await, "waiting_input");

    let woken = world.send(&session_id, "At eight.").await;
    assert_eq!(woken.outcome, Delivered::Delivered);
    let mut driver = world.drive(&session_id).await;
    assert_eq!(
        driver.session.records.last().unwrap().role,
        Role::Tool,
        "the answer is the question's result"
    );
    driver.continues(Outcome::Begun).await;

    // An answer that races the pausing commit: the pause does not happen, and the answer is taken by the next plan.
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
    let answered = Performed { call: question, ending: Ending::Answered { inbox_id, text: answer } };
    driver.continues(Outcome::Called(vec![answered])).await;

    // The last reply meets a follow-up: it is kept, and the run goes on.
    world.send(&session_id, "Thanks!").await;
    driver.continues(replied(vec![text("Done.")])).await;
    assert_eq!(driver.session.inbox.len(), 1);
    assert_eq!(driver.commit(replied(vec![text("You are welcome.")])).await, Commit::Closed);
    assert_eq!(world.status(&session_id).await, "completed");
}

#[tokio::test]
async fn an_interrupted_model_call_is_hydrated_and_gone_with_the_answer() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Outcome::Begun).await;
    driver.begin_generation("gen_1", 1).await;
    let session = driver.session.session_id.clone();
    let append = async |chunk_no, text| {
        world.store.append_chunk(&session, &"gen_1".into(), chunk_no, text).await.unwrap()
    };
    assert!(!append(1, "lo").await, "a chunk without the one before it would leave a gap");
    assert!(append(0, "Hel").await);
    assert!(append(0, "Hel").await, "asked again, it is there already");

    driver.session = world.store.hydrate(&session_id).await.unwrap();
    assert_eq!(driver.session.interrupted.len(), 1);
    assert_eq!(driver.session.interrupted[0].last_chunk, 0);
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
    driver.continues(Outcome::Begun).await;
    for turn in 0..5 {
        let reserve = call(&format!("call_{turn}"), "reserve");
        driver.continues(replied(vec![asks(&reserve)])).await;
        driver.continues(Outcome::Called(vec![performed(&reserve, done("Reserved.", None))])).await;
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
    // Each kind of write, at the point of a session's life at which it is made.
    let session_id = world.wake("c1", "Hello").await;
    let mut driver = world.drive(&session_id).await;
    world.refuses(&driver, Outcome::Begun).await;
    driver.continues(Outcome::Begun).await;

    let (reserve, other) = (call("call_1", "reserve"), call("call_2", "charge"));
    let turn = replied(vec![asks(&reserve), asks(&other)]);
    world.refuses(&driver, turn.clone()).await;
    world.refuses(&driver, replied(vec![text("Bye.")])).await;
    world.refuses(&driver, Outcome::Stopped(Stop::Cancelled)).await;
    driver.continues(turn).await;

    let mail = json!({"type": "sentEmail", "to": ["b@example.com"], "subject": "x", "body": "y"});
    let results = || {
        Outcome::Called(vec![
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
    assert!(settled.await.unwrap(), "the lease was what it lacked");
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
        policy: Policy::default(),
    };
    let mut driver = world.drive(&session_id).await;
    assert_eq!(driver.job.lease.job_id, zombie.job.lease.job_id);

    let before = world.dump().await;
    let transition = zombie.transition(Outcome::Begun);
    assert_eq!(zombie.write(&transition).await, Commit::Stale);
    assert!(driver.job.lease.token > zombie.job.lease.token);
    world.store.release(&zombie.job.lease).await.unwrap();
    assert_eq!(world.dump().await, before);
    driver.continues(Outcome::Begun).await;
}

#[tokio::test]
async fn a_job_whose_step_a_hand_changed_costs_no_answer() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Outcome::Begun).await;
    sqlx::query("update jobs set step_number = 7").execute(&world.database.pool).await.unwrap();
    assert_eq!(driver.commit(replied(vec![text("Hi.")])).await, Commit::Closed);
}

#[tokio::test]
async fn a_commit_whose_answer_was_lost_applies_once() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    let mut driver = world.drive(&session_id).await;
    let reserve = call("call_1", "reserve");
    let mail = json!({"type": "sentEmail", "to": ["b@example.com"], "subject": "x", "body": "y"});
    let script = vec![
        Outcome::Begun,
        replied(vec![asks(&reserve)]),
        Outcome::Called(vec![performed(&reserve, done("Reserved.", Some(mail)))]),
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

// ---- waking ----

#[tokio::test]
async fn one_trigger_at_once_many_times_makes_one_session() {
    let world = World::new().await;
    let wakes = (0..8).map(|n| {
        let (store, new) = (world.store.clone(), new_session("c1", "c1"));
        tokio::spawn(async move { store.wake(&new, &message(&format!("message {n}"))).await })
    });
    let mut woken = Vec::new();
    for wake in join_all(wakes).await {
        woken.push(wake.unwrap().unwrap());
    }
    let sessions: HashSet<&str> = woken.iter().map(|one| one.session_id.as_str()).collect();
    let runs: HashSet<&str> = woken.iter().map(|one| one.run_id.as_str()).collect();
    assert_eq!((sessions.len(), runs.len()), (1, 1));
    assert_eq!(woken.iter().filter(|one| one.outcome == Delivered::NewRun).count(), 1);
    assert_eq!(world.count("conversation_sessions").await, 1);
    assert_eq!(world.count("jobs").await, 1);
    assert_eq!(world.count("session_inbox").await, 8);
}

#[tokio::test]
async fn one_client_key_at_once_many_times_is_one_message() {
    let world = World::new().await;
    let wakes = (0..8).map(|_| {
        let (store, new) = (world.store.clone(), new_session("c1", "c1"));
        let message = NewMessage { client_key: Some("k".into()), ..message("once") };
        tokio::spawn(async move { store.wake(&new, &message).await })
    });
    let mut first = 0;
    for wake in join_all(wakes).await {
        first += i64::from(!wake.unwrap().unwrap().duplicate);
    }
    assert_eq!(first, 1);
    assert_eq!(world.count("session_inbox").await, 1);
}

#[tokio::test]
async fn a_closing_commit_that_meets_a_wake_keeps_its_reply_and_goes_on() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Outcome::Begun).await;
    let planned = driver.session.wake_seq;
    world.send(&session_id, "And another thing.").await;

    let Commit::Continued { wake_seq } = driver.commit(replied(vec![text("Hello to you.")])).await else {
        panic!("it closed over a message");
    };
    assert!(wake_seq > planned);
    let session = world.store.hydrate(&session_id).await.unwrap();
    assert_eq!(session.status, SessionStatus::Running);
    assert_eq!(session.records.last().unwrap().text(), "Hello to you.");
    assert_eq!(session.inbox[0].text, "And another thing.");
    assert_eq!(session.last_step_number, 1, "what was billed is a step");
    assert_eq!(plan(&session, &Limits::default()), Action::CallModel);
}

#[tokio::test]
async fn a_follow_up_from_before_the_question_answers_it_and_no_run_waits_on_a_message() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Outcome::Begun).await;
    world.send(&session_id, "For four, by the way.").await;
    let question = call("call_1", "ask_user");
    driver.continues(replied(vec![asks(&question)])).await;
    assert_eq!(driver.session.inbox.len(), 1);
    driver.continues(asked(&question)).await;
    assert!(matches!(plan(&driver.session, &Limits::default()), Action::CallTools { .. }));
}

#[tokio::test]
async fn wakes_cancels_retries_and_commits_at_once_neither_deadlock_nor_lose() {
    let world = World::new().await;
    // Two conversations of two sessions each, so that runs queue behind one another as well.
    let ids = [("c1", "t1"), ("c1", "t2"), ("c2", "t3"), ("c2", "t4")];
    let mut sessions = Vec::new();
    for (conversation, trigger) in ids {
        let woken = world.store.wake(&new_session(conversation, trigger), &message("start")).await.unwrap();
        sessions.push(woken.session_id);
    }
    let sent = Arc::new(AtomicU64::new(sessions.len() as u64));
    let over = Arc::new(AtomicBool::new(false));
    let workers: Vec<_> =
        (0..3).map(|seed| tokio::spawn(work(world.store.clone(), Arc::clone(&over), seed))).collect();
    let healers: Vec<_> = (0..2)
        .map(|_| {
            let (store, over) = (world.store.clone(), Arc::clone(&over));
            tokio::spawn(async move {
                let mut cursor = Cursor::default();
                while !over.load(Ordering::Relaxed) {
                    // Small pages, so that the cursors go round.
                    for id in store.look_for_unattended(&mut cursor, 2).await.unwrap().sessions {
                        assert_eq!(store.wake_session(&id).await.unwrap(), [], "found by a look");
                    }
                }
            })
        })
        .collect();
    let hammers = (0..6_u64).map(|hammer| {
        let (store, sessions, sent) = (world.store.clone(), sessions.clone(), Arc::clone(&sent));
        tokio::spawn(async move {
            for turn in 0..40_u64 {
                let id = &sessions[((hammer * 7 + turn * 3) % 4) as usize];
                let done = match (hammer + turn) % 5 {
                    0 => store.cancel(id, None).await.map(|_| ()),
                    1 => store.retry(id, None).await.map(|_| ()),
                    2 => store.wake_session(id).await.map(|healed| {
                        assert_eq!(healed, [], "every commit leaves a session in order");
                    }),
                    _ => store.send(id, &message("more")).await.map(|_| {
                        sent.fetch_add(1, Ordering::Relaxed);
                    }),
                };
                match done {
                    Ok(()) | Err(Error::Conflict { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        })
    });
    for hammer in join_all(hammers).await {
        hammer.unwrap();
    }
    // What a cancelled run left in the inbox is read by the session's next run.
    for id in &sessions {
        world.store.send(id, &message("last")).await.unwrap();
        sent.fetch_add(1, Ordering::Relaxed);
    }
    world.until("select count(*) = 0 from jobs").await;
    over.store(true, Ordering::Relaxed);
    for worker in workers.into_iter().chain(healers) {
        worker.await.unwrap();
    }
    let sent = sent.load(Ordering::Relaxed) as i64;
    assert_eq!(world.count("session_inbox").await, sent);
    assert_eq!(world.one("select count(*) from session_inbox where status = 'pending'").await, 0);
    let said = "select count(distinct details ->> 'inbox_id') from conversation_records where role = 'user'";
    assert_eq!(world.one(said).await, sent, "each message is in the transcript");
    assert_eq!(
        world.one("select count(*) from conversation_records where role = 'user'").await,
        sent,
        "… once"
    );
    let gaps = "select count(*) from (select message_number - lag(message_number, 1, 1::bigint)
        over (partition by conversation_id order by message_number) as step from conversation_records) n where step <> 1";
    assert_eq!(world.one(gaps).await, 0, "message numbers are dense");
    let gaps = "select count(*) from conversation_sessions s where last_event_seq <>
        (select count(*) from session_events e where e.session_id = s.session_id)";
    assert_eq!(world.one(gaps).await, 0, "journal numbers are dense");
    assert_eq!(
        world
            .one(
                "select count(*) from conversation_counters where open_run_id is not null or queued_runs <> 0"
            )
            .await,
        0
    );
    assert_eq!(world.one("select count(*) from session_runs where status in ('queued', 'running')").await, 0);
}

/// A worker in miniature: it answers, by turns with a tool call and with a reply.
async fn work(store: Store, over: Arc<AtomicBool>, seed: u64) {
    let mut claims = Claims::start(&store, Kind::Step, 1, LEASE);
    let mut turn = seed;
    while !over.load(Ordering::Relaxed) {
        let Ok(job) = tokio::time::timeout(Duration::from_millis(50), claims.next()).await else { continue };
        let id = job.session_id.clone().unwrap();
        let mut session = store.hydrate(&id).await.unwrap();
        loop {
            turn += 1;
            let outcome = match plan(&session, &Limits { steps: i64::MAX, ..Limits::default() }) {
                Action::Rest => {
                    store.end_job(&job.lease).await.unwrap();
                    break;
                }
                Action::Begin => Outcome::Begun,
                Action::CallModel if turn.is_multiple_of(3) => {
                    replied(vec![asks(&call(&new_id("call"), "reserve"))])
                }
                Action::CallModel => replied(vec![text("Answer.")]),
                Action::Compact => unreachable!("no strategy is asked here"),
                Action::CallTools { calls } => Outcome::Called(
                    calls
                        .into_iter()
                        .map(|planned| match planned.how {
                            How::Abandon => Performed { call: planned.call, ending: Ending::Abandoned },
                            _ => performed(&planned.call, done("Reserved.", None)),
                        })
                        .collect(),
                ),
                Action::Stop(stop) => Outcome::Stopped(stop),
                Action::Pause => Outcome::Paused,
            };
            let transition = advance(&session, outcome, Policy::default());
            match store.commit(&job.lease, &session, transition.clone(), performance()).await.unwrap() {
                Commit::Continued { wake_seq } => {
                    session.apply(&transition.continuing());
                    if wake_seq != session.wake_seq {
                        store.refresh(&mut session).await.unwrap();
                    }
                }
                Commit::Closed => break,
                Commit::Moved => session = store.hydrate(&id).await.unwrap(),
                Commit::Stale => panic!("a lease of a minute was lost"),
            }
        }
    }
    claims.stop();
}

// ---- deliveries ----

#[tokio::test]
async fn what_is_enqueued_while_the_deliver_job_ends_is_sent() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Write to Bob, twice.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Outcome::Begun).await;
    driver.sends_mail("call_1").await;

    let mut claims = Claims::start(&world.store, Kind::Deliver, 1, LEASE);
    let job = claims.next().await;
    let seen = world.store.pending_deliveries(&job.lease).await.unwrap().unwrap();
    world.deliver(&job).await;
    let none = world.store.claim_delivery(&job.lease, &job.conversation_id, "email", TERMS).await.unwrap();
    assert!(none.is_none(), "the look finds nothing more");

    // Enqueued after the look and before the end: the job does not end, and its lease is still its holder's.
    driver.sends_mail("call_2").await;
    assert!(!world.store.end_deliver_job(&job.lease, seen).await.unwrap());
    let seen = world.store.pending_deliveries(&job.lease).await.unwrap().expect("the lease is untouched");
    world.deliver(&job).await;

    // Enqueued after the end: another job.
    assert!(world.store.end_deliver_job(&job.lease, seen).await.unwrap());
    driver.sends_mail("call_3").await;
    drop(job);
    let job = claims.next().await;
    world.deliver(&job).await;
    assert_eq!(world.one("select count(*) from deliveries where status = 'sent'").await, 3);
    claims.stop();
}

#[tokio::test]
async fn a_deliverer_without_its_lease_claims_and_settles_nothing() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Write to Bob.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Outcome::Begun).await;
    driver.sends_mail("call_1").await;
    let mut claims = Claims::start(&world.store, Kind::Deliver, 1, LEASE);
    let job = claims.next().await;
    let token = world.steal(job.lease.job_id).await;
    let before = world.dump().await;
    assert!(world.store.pending_deliveries(&job.lease).await.unwrap().is_none());
    let claimed = world.store.claim_delivery(&job.lease, &job.conversation_id, "email", TERMS).await.unwrap();
    assert!(claimed.is_none());
    assert!(!world.store.end_deliver_job(&job.lease, 1).await.unwrap());
    assert_eq!(world.dump().await, before);

    world.give_back(job.lease.job_id, token).await;
    let claimed =
        world.store.claim_delivery(&job.lease, &job.conversation_id, "email", TERMS).await.unwrap().unwrap();
    world.steal(job.lease.job_id).await;
    let before = world.dump().await;
    let sent = Settled::Sent { receipt: json!({}) };
    assert!(!world.store.settle_delivery(&job.lease, &claimed, "email", &sent).await.unwrap());
    assert_eq!(world.dump().await, before);
    claims.stop();
}

// ---- the queue ----

#[tokio::test]
async fn eight_claimers_at_once_never_get_one_job_twice() {
    const JOBS: i64 = 400;
    let world = World::new().await;
    world
        .execute(
            "insert into jobs (kind, space_id, conversation_id, session_id, step_number)
            select 'step', 'default', 'default/c' || n, 'sess_' || n, 1 from generate_series(1, 400) as n",
        )
        .await;
    let taken = Arc::new(std::sync::Mutex::new(Vec::new()));
    let claimers = (0..8).map(|_| {
        let (store, taken) = (world.store.clone(), Arc::clone(&taken));
        tokio::spawn(async move {
            let mut claims = Claims::start(&store, Kind::Step, 4, LEASE);
            while taken.lock().unwrap().len() < JOBS as usize {
                let Ok(job) = tokio::time::timeout(Duration::from_millis(100), claims.next()).await else {
                    continue;
                };
                taken.lock().unwrap().push((job.lease.job_id, job.lease.token));
                // Half of the jobs stay, leased: nobody else may have them.
                if job.lease.job_id % 2 == 0 {
                    store.end_job(&job.lease).await.unwrap();
                }
            }
            claims.stop();
        })
    });
    for claimer in join_all(claimers).await {
        claimer.unwrap();
    }
    let taken = taken.lock().unwrap();
    let jobs: HashSet<i64> = taken.iter().map(|(job, _)| *job).collect();
    let tokens: HashSet<i64> = taken.iter().map(|(_, token)| *token).collect();
    assert_eq!((taken.len(), jobs.len(), tokens.len()), (JOBS as usize, JOBS as usize, JOBS as usize));
}

// ---- what the tests stand on ----
