//! Runs that end: by one statement, in a statement with others, and beside messages, cancels and runs that wait.

use super::group::{commit_all, driver_turn, drivers, warm};
use super::*;
use crate::support::proxy::{CutAt, Proxy as Cutting};
use wakeful_workflow::fault::Fault;
use wakeful_workflow::policy::{ReplyRoute, SessionPolicy};

/// What a run ends with.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Answer,
    /// The answer takes a message that came meanwhile into the transcript.
    AnswerToTwo,
    /// The answer goes out as a message too.
    Mail,
    Question,
    Failure,
}

/// A claimed session whose next commit ends its run.
async fn ending<'w>(
    world: &'w World,
    conversation: &str,
    end: End,
) -> (Driver<'w>, wakeful_workflow::advance::Transition) {
    let mut new = new_session(conversation, conversation);
    if end == End::Mail {
        let reply =
            ReplyRoute { channel: "email".into(), to: json!({"to": ["ann@example.com"]}), split_at: None };
        new.policy = SessionPolicy { reply: Some(reply), ..SessionPolicy::default() };
    }
    let session_id = world.store.wake(&new, &message("Hello")).await.unwrap().session_id;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    let question = call("call_1", "ask_user");
    match end {
        End::AnswerToTwo => {
            world.send(&session_id, "And another thing.").await;
            world.store.refresh(&mut driver.session).await.unwrap();
        }
        End::Question => driver.continues(replied(vec![text("One moment."), asks(&question)])).await,
        End::Answer | End::Mail | End::Failure => {}
    }
    let outcome = match end {
        End::Answer | End::AnswerToTwo | End::Mail => replied(vec![text("Hello to you.")]),
        End::Question => asked(&question),
        End::Failure => Performed::Stopped(Stop::Failed(Fault::StepLimit { limit: 1 })),
    };
    let transition = driver.transition(outcome);
    (driver, transition)
}

#[tokio::test]
async fn a_run_that_ends_by_one_statement_leaves_the_rows_that_it_leaves_under_locks() {
    for end in [End::Answer, End::AnswerToTwo, End::Mail, End::Question, End::Failure] {
        let mut dumps = Vec::new();
        for locked in [false, true] {
            let world = World::new().await;
            let (mut driver, transition) = ending(&world, "c1", end).await;
            // Only this copy says so: the store then takes the way with locks.
            driver.session.cancel_requested = locked;
            assert_eq!(driver.write(&transition).await, Commit::Closed { opened: false }, "{end:?}");
            dumps.push(comparable(world.dump().await));
        }
        assert_eq!(dumps[0], dumps[1], "{end:?}");
    }
}

#[tokio::test]
async fn runs_that_end_and_runs_that_go_on_are_one_statement() {
    let world = World::new().await;
    let mut drivers = drivers(&world, 17).await;
    let proxy = Proxy::start(&world.database.url);
    let store = warm(&proxy.url, &mut drivers[16..]).await;
    let mut from = 0;
    for (count, ends) in [(1, 1), (2, 1), (5, 5), (8, 3)] {
        let group = &drivers[from..from + count];
        from += count;
        let transitions: Vec<_> = group
            .iter()
            .enumerate()
            .map(|(at, driver)| match at < ends {
                true => driver.transition(replied(vec![text("Hello to you.")])),
                false => driver_turn(driver),
            })
            .collect();
        let commits: Vec<_> = group.iter().zip(&transitions).collect();
        let before = proxy.statements();
        let done = commit_all(&store, &commits).await;
        assert_eq!(proxy.statements() - before, 1, "{ends} of {count}");
        for (at, (driver, commit)) in group.iter().zip(done).enumerate() {
            let id = driver.session.session_id.as_str();
            let cold = world.store.hydrate(id).await.unwrap();
            if at < ends {
                assert_eq!(commit.unwrap(), Commit::Closed { opened: false });
                assert_eq!((cold.status, cold.run), (SessionStatus::Completed, None));
            } else {
                assert!(matches!(commit.unwrap(), Commit::Continued { .. }));
                let mut warm = driver.session.clone();
                warm.apply(&transitions[at]);
                assert_eq!(cold, warm);
            }
            assert_eq!(world.store.wake_session(id).await.unwrap(), [], "nothing is to be healed");
        }
    }
    let jobs = world.count("jobs").await;
    let open = world.one("select count(*) from conversation_counters where open_run_id is not null").await;
    let running = world.one("select count(*) from session_runs where status = 'running'").await;
    assert_eq!((jobs, open, running), (17 - 10, 17 - 10, 17 - 10));
    let ended = "select count(*) from session_runs where completed_at is not null and steps = 1";
    assert_eq!(world.one(ended).await, 10);
}

#[tokio::test]
async fn what_a_run_has_used_is_shown_while_it_runs_and_written_when_it_ends() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Hello").await;
    let used = async || {
        let runs = world.store.runs(&session_id, None, 10, i64::MAX).await.unwrap().items;
        runs.iter()
            .map(|run| (run.steps, run.input_tokens + run.output_tokens, run.tool_calls))
            .collect::<Vec<_>>()
    };
    let written = "select sum(steps)::bigint from session_runs";
    let turns = "select sum(total_turns)::bigint from conversation_sessions";
    let step = async |driver: &mut Driver<'_>, id: &str| {
        let reserve = call(id, "reserve");
        driver.continues(replied(vec![asks(&reserve)])).await;
        driver.continues(Performed::Called(vec![performed(&reserve, done("Reserved.", None))])).await;
    };

    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    step(&mut driver, "call_1").await;
    step(&mut driver, "call_2").await;
    let tokens = driver.session.run.as_ref().unwrap().tokens;
    assert!(tokens > 0);
    assert_eq!((used().await, world.one(written).await), (vec![(2, tokens, 2)], 0));
    // It waits for a person. What it has used until then is written, and counts when it goes on.
    let question = call("call_3", "ask_user");
    driver.continues(replied(vec![asks(&question)])).await;
    assert_eq!(driver.commit(asked(&question)).await, Commit::Closed { opened: false });
    let first = used().await[0];
    assert_eq!((first.0, world.one(written).await), (world.one(turns).await, world.one(turns).await));
    drop(driver);
    world.send(&session_id, "For two.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    assert_eq!(used().await[0], first);
    step(&mut driver, "call_4").await;
    assert_eq!(used().await[0].0, first.0 + 1);
    assert_eq!(world.one(written).await, first.0);
    assert_eq!(driver.commit(replied(vec![text("Reserved.")])).await, Commit::Closed { opened: false });
    let first = used().await[0];
    assert_eq!((first.0, world.one(written).await), (world.one(turns).await, world.one(turns).await));
    drop(driver);

    world.send(&session_id, "Once more.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    step(&mut driver, "call_5").await;
    assert_eq!(driver.session.run.as_ref().unwrap().steps, 1);
    assert_eq!((used().await[1].0, used().await[0], world.one(written).await), (1, first, first.0));
    assert!(world.store.verify(&session_id).await.unwrap().agrees, "the totals of an open run are not wrong");
    let failed = Performed::Stopped(Stop::Failed(Fault::StepLimit { limit: 1 }));
    assert_eq!(driver.commit(failed).await, Commit::Closed { opened: false });
    assert_eq!((world.one(written).await, world.one(turns).await), (first.0 + 1, first.0 + 1));
    assert!(world.store.verify(&session_id).await.unwrap().agrees);
}

#[tokio::test]
async fn a_run_whose_row_changes_while_its_end_waits_ends_with_what_it_has_used() {
    let world = World::new().await;
    let (driver, transition) = ending(&world, "c1", End::Answer).await;
    // A notice that the run takes long is noted in its row.
    let mut notice = world.database.pool.begin().await.unwrap();
    sqlx::query("update session_runs set delay_told_at = now()").execute(&mut *notice).await.unwrap();
    let told = async {
        world
            .until(
                "select exists (select from pg_stat_activity
                where datname = current_database() and wait_event_type = 'Lock')",
            )
            .await;
        notice.commit().await.unwrap();
    };
    let (commit, ()) = tokio::join!(driver.write(&transition), told);
    assert_eq!(commit, Commit::Closed { opened: false });
    let ended = "select count(*) from session_runs
        where status = 'completed' and steps = 1 and input_tokens > 0 and delay_told_at is not null";
    assert_eq!(world.one(ended).await, 1);
}

#[tokio::test]
async fn a_run_that_cannot_end_keeps_no_other_of_its_statement_from_ending() {
    let world = World::new().await;
    let drivers = drivers(&world, 5).await;
    // The second session got a message, the fourth one's lease is lost.
    world.send(drivers[1].session.session_id.as_str(), "And another thing.").await;
    world.steal(drivers[3].job.lease.job_id).await;
    let transitions: Vec<_> =
        drivers.iter().map(|driver| driver.transition(replied(vec![text("Hello to you.")]))).collect();
    let commits: Vec<_> = drivers.iter().zip(&transitions).collect();
    let done = commit_all(&world.store, &commits).await;
    for (at, commit) in done.into_iter().enumerate() {
        match (at, commit.unwrap()) {
            (1, Commit::Continued { .. }) | (3, Commit::Stale) => {}
            (0 | 2 | 4, Commit::Closed { opened: false }) => {}
            (at, commit) => panic!("session {at}: {commit:?}"),
        }
    }
    assert_eq!(world.one("select count(*) from session_runs where status = 'running'").await, 2);
}

#[tokio::test]
async fn an_end_whose_answer_is_lost_applies_once() {
    let world = World::new().await;
    let (driver, transition) = ending(&world, "c1", End::Answer).await;
    let proxy = Cutting::start(&world.database.url);
    let store = Store::connect(&proxy.url, 4, "wakeful test").await.unwrap();
    proxy.cut_when("delete from jobs as job", CutAt::BeforeAnswer);
    let commit = store.commit(&driver.job.lease, &driver.session, &transition, performance()).await.unwrap();
    assert_eq!(commit, Commit::Stale, "the job is gone");
    assert_eq!(proxy.cut_count(), 1);
    assert_eq!(world.count("conversation_records").await, 2);
    assert_eq!(world.status(driver.session.session_id.as_str()).await, "completed");
}

const WAITS: &str = "select count(*) from pg_stat_activity
    where datname = current_database() and wait_event_type = 'Lock'";

/// Waits until this many connections wait for a lock.
async fn until_waiting(world: &World, count: i64) {
    eventually("connections wait", || async { (world.one(WAITS).await >= count).then_some(()) }).await;
}

/// A transaction that holds the rows that `sql` selects.
async fn holding(world: &World, sql: &'static str) -> sqlx::Transaction<'static, sqlx::Postgres> {
    let mut holder = world.database.pool.begin().await.unwrap();
    sqlx::query(sql).execute(&mut *holder).await.unwrap();
    holder
}

const HOLD_CONVERSATION: &str = "select from conversation_counters for update";
const HOLD_JOB: &str = "select from jobs for update";

#[tokio::test]
async fn a_message_that_comes_while_the_end_waits_keeps_the_run_going() {
    let world = World::new().await;
    let (driver, transition) = ending(&world, "c1", End::Answer).await;
    let session_id = driver.session.session_id.as_str();
    let holder = holding(&world, HOLD_CONVERSATION).await;
    let wake = async {
        until_waiting(&world, 1).await;
        let woken = world.send(session_id, "And another thing.").await;
        holder.rollback().await.unwrap();
        woken
    };
    let (commit, woken) = tokio::join!(driver.write(&transition), wake);
    assert!(matches!(commit, Commit::Continued { .. }), "{commit:?}");
    assert_eq!(woken.outcome, Acceptance::Queued);
    let session = world.store.hydrate(session_id).await.unwrap();
    assert_eq!(session.records.last().unwrap().text(), "Hello to you.", "the paid reply is kept");
    assert_eq!(session.inbox.len(), 1);
}

#[tokio::test]
async fn a_message_that_waits_for_the_end_opens_the_next_run() {
    let world = World::new().await;
    // Such a commit is alone, and its wait for a lock has no limit.
    let (driver, transition) = ending(&world, "c1", End::AnswerToTwo).await;
    let session_id = driver.session.session_id.as_str();
    let holder = holding(&world, HOLD_JOB).await;
    let wake = async {
        until_waiting(&world, 1).await;
        world.send(session_id, "And another thing.").await
    };
    let release = async {
        until_waiting(&world, 2).await;
        holder.rollback().await.unwrap();
    };
    let (commit, woken, ()) = tokio::join!(driver.write(&transition), wake, release);
    assert_eq!(commit, Commit::Closed { opened: false });
    assert_eq!(woken.outcome, Acceptance::NewRun, "the message found the session at rest after all");
    assert_eq!(world.count("jobs").await, 1);
    assert_eq!(world.store.wake_session(session_id).await.unwrap(), []);
}

#[tokio::test]
async fn a_run_of_another_session_that_queues_while_the_end_waits_is_started_by_it() {
    let world = World::new().await;
    let other = rests_beside(&world).await;
    let (driver, transition) = ending(&world, "c1", End::Answer).await;
    // The other session's wake gets the conversation first, and waits for its own session.
    let mut holder = world.database.pool.begin().await.unwrap();
    let hold = sqlx::query("select from conversation_sessions where session_id = $1 for update").bind(&other);
    hold.execute(&mut *holder).await.unwrap();
    let wake = async { world.send(&other, "more").await };
    let close = async {
        until_waiting(&world, 1).await;
        driver.write(&transition).await
    };
    let release = async {
        until_waiting(&world, 2).await;
        holder.rollback().await.unwrap();
    };
    let (woken, commit, ()) = tokio::join!(wake, close, release);
    assert_eq!(woken.outcome, Acceptance::NewRun);
    assert_eq!(commit, Commit::Closed { opened: true });
    started_beside(&world, &other).await;
}

#[tokio::test]
async fn a_run_of_another_session_that_waits_for_the_end_starts_by_itself() {
    let world = World::new().await;
    let other = rests_beside(&world).await;
    let (driver, transition) = ending(&world, "c1", End::AnswerToTwo).await;
    let holder = holding(&world, HOLD_JOB).await;
    let wake = async {
        until_waiting(&world, 1).await;
        world.send(&other, "more").await
    };
    let release = async {
        until_waiting(&world, 2).await;
        holder.rollback().await.unwrap();
    };
    let (commit, woken, ()) = tokio::join!(driver.write(&transition), wake, release);
    assert_eq!(commit, Commit::Closed { opened: false });
    assert_eq!(woken.outcome, Acceptance::NewRun);
    started_beside(&world, &other).await;
}

/// Another session of conversation c1, whose run is over.
async fn rests_beside(world: &World) -> String {
    let new = new_session("c1", "other");
    let other = world.store.wake(&new, &message("Hello")).await.unwrap().session_id;
    let mut driver = world.drive(&other).await;
    driver.continues(Performed::Begun).await;
    assert_eq!(driver.commit(replied(vec![text("Hi.")])).await, Commit::Closed { opened: false });
    other
}

/// The other session's run has the conversation now.
async fn started_beside(world: &World, other: &str) {
    let session = world.store.hydrate(other).await.unwrap();
    assert_eq!(session.status, SessionStatus::Queued);
    assert!(session.run.is_some());
    assert_eq!(session.records.last().unwrap().text(), "more");
    assert_eq!(world.count("jobs").await, 1);
    assert_eq!(world.one("select count(*) from conversation_counters where queued_runs <> 0").await, 0);
    assert_eq!(world.store.wake_session(other).await.unwrap(), []);
}

#[tokio::test]
async fn a_cancel_that_comes_before_the_end_is_carried_out() {
    let world = World::new().await;
    let (mut driver, transition) = ending(&world, "c1", End::Answer).await;
    let session_id = driver.session.session_id.as_str().to_owned();
    let holder = holding(&world, "select from conversation_sessions for update").await;
    // The cancel has the conversation and waits for the session. The end waits for the conversation.
    // Another process's: those of one process wait for each other before they wait for the row.
    let other = world.database.store().await;
    let cancel = async { other.cancel(&session_id, None).await.unwrap() };
    let close = async {
        until_waiting(&world, 1).await;
        driver.write(&transition).await
    };
    let release = async {
        until_waiting(&world, 2).await;
        holder.rollback().await.unwrap();
    };
    let (_, commit, ()) = tokio::join!(cancel, close, release);
    assert!(matches!(commit, Commit::Continued { .. }), "{commit:?}");
    driver.session = world.store.hydrate(&session_id).await.unwrap();
    assert_eq!(plan(&driver.session, &Limits::default()), Action::Stop(Stop::Cancelled));
    // A message after the cancel waits for the next run, which the end of the cancelled one opens.
    let woken = world.send(&session_id, "And now?").await;
    assert_eq!(woken.outcome, Acceptance::NewRun);
    driver.session = world.store.hydrate(&session_id).await.unwrap();
    let stopped = driver.transition(Performed::Stopped(Stop::Cancelled));
    assert_eq!(driver.write(&stopped).await, Commit::Closed { opened: true });
    let session = world.store.hydrate(&session_id).await.unwrap();
    assert_eq!(session.run.unwrap().run_id.as_str(), woken.run_id);
}

#[tokio::test]
async fn a_cancel_that_waits_for_the_end_finds_no_run() {
    let world = World::new().await;
    let (driver, transition) = ending(&world, "c1", End::AnswerToTwo).await;
    let session_id = driver.session.session_id.as_str();
    let holder = holding(&world, HOLD_JOB).await;
    // Another process's: those of one process wait for each other before they wait for the row.
    let other = world.database.store().await;
    let cancel = async {
        until_waiting(&world, 1).await;
        other.cancel(session_id, None).await
    };
    let release = async {
        until_waiting(&world, 2).await;
        holder.rollback().await.unwrap();
    };
    let (commit, cancelled, ()) = tokio::join!(driver.write(&transition), cancel, release);
    assert_eq!(commit, Commit::Closed { opened: false });
    assert!(matches!(cancelled, Err(Error::Conflict { .. })), "{cancelled:?}");
}
