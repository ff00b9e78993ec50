//! Waking: messages that arrive together, or while a run closes.

use super::*;
use wakeful_store::wake::NewAttachment;

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
    assert_eq!(woken.iter().filter(|one| one.outcome == Acceptance::NewRun).count(), 1);
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
    driver.continues(Performed::Begun).await;
    let planned = driver.session.wake_seq;
    world.send(&session_id, "And another thing.").await;

    let Commit::Continued { wake_seq, .. } = driver.commit(replied(vec![text("Hello to you.")])).await else {
        panic!("it closed over a message");
    };
    assert!(wake_seq > planned);
    let session = world.store.hydrate(&session_id).await.unwrap();
    assert_eq!(session.status, SessionStatus::Running);
    assert_eq!(session.records.last().unwrap().text(), "Hello to you.");
    assert_eq!(session.inbox[0].text, "And another thing.");
    assert_eq!(session.last_step_number, 1, "the billed answer is a step");
    assert_eq!(plan(&session, &Limits::default()), Action::CallModel);
}

#[tokio::test]
async fn a_follow_up_from_before_the_question_answers_it_and_no_run_waits_on_a_message() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
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
    // Two conversations with two sessions each, so that runs also queue behind one another.
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
                    // Small pages, so that the cursors wrap around.
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
    // A cancelled run left messages in the inbox. The session's next run reads them.
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

/// A miniature worker. It answers alternately with a tool call and with a reply.
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
                Action::Begin => Performed::Begun,
                Action::CallModel if turn.is_multiple_of(3) => {
                    replied(vec![asks(&call(&new_id("call"), "reserve"))])
                }
                Action::CallModel => replied(vec![text("Answer.")]),
                Action::Compact => unreachable!("no strategy is asked here"),
                Action::CallTools { calls } => Performed::Called(
                    calls
                        .into_iter()
                        .map(|planned| match planned.how {
                            How::Abandon => EndedCall { call: planned.call, ending: CallEnd::Abandoned },
                            _ => performed(&planned.call, done("Reserved.", None)),
                        })
                        .collect(),
                ),
                Action::Stop(stop) => Performed::Stopped(stop),
                Action::Pause => Performed::Paused,
            };
            let transition = advance(&session, outcome, AgentPolicy::default());
            match store.commit(&job.lease, &session, &transition, performance()).await.unwrap() {
                Commit::Continued { wake_seq, .. } => {
                    session.apply(&transition.continuing());
                    if wake_seq != session.wake_seq {
                        store.refresh(&mut session).await.unwrap();
                    }
                }
                Commit::Closed { .. } => break,
                Commit::Moved => session = store.hydrate(&id).await.unwrap(),
                Commit::Stale => panic!("a lease of a minute was lost"),
            }
        }
    }
    claims.stop();
}

/// The database's clock may go back: another host takes over, and its clock is late.
#[tokio::test]
async fn a_run_that_begins_after_another_is_the_newer_one_whatever_the_clock_says() {
    let world = World::new().await;
    let file =
        NewAttachment { file_name: "a.csv".into(), media_type: "text/csv".into(), bytes: b"1,2".to_vec() };
    // With a file a message takes the way with locks.
    for (conversation, attachments) in [("c1", Vec::new()), ("c2", vec![file])] {
        let session_id = world.wake(conversation, "Hello.").await;
        let mut driver = world.drive(&session_id).await;
        driver.continues(Performed::Begun).await;
        driver.commit(replied(vec![text("Hi.")])).await;
        drop(driver);
        world.run_sql("update session_runs set created_at = created_at + interval '1 hour'").await;
        let again = NewMessage { attachments, ..message("And now?") };
        let second = world.store.send(&session_id, &again).await.unwrap();
        assert_eq!(second.outcome, Acceptance::NewRun);
        let newest = "select run_id from session_runs where session_id = $1 order by created_at desc limit 1";
        assert_eq!(world.database.value::<String>(newest, &session_id).await, second.run_id);
        world.run_sql("delete from jobs").await;
    }
}
