//! Commits of several sessions in one statement. A test's runtime has one thread, so all commits that are
//! started together wait when the lane looks.

use super::*;
use sqlx::Connection;
use wakeful_store::generation::NewGeneration;
use wakeful_store::step::Performance;
use wakeful_workflow::advance::Transition;
use wakeful_workflow::derive::StateUpdate;
use wakeful_workflow::generation::Purpose;
use wakeful_workflow::session::Session;
use wakeful_workflow::strategy::Strategy;

/// Sessions that are running, each with its worker.
pub(super) async fn drivers(world: &World, count: usize) -> Vec<Driver<'_>> {
    let mut drivers = Vec::new();
    for number in 0..count {
        let session_id = world.wake(&format!("g{number}"), "Hello").await;
        let mut driver = world.drive(&session_id).await;
        driver.continues(Performed::Begun).await;
        drivers.push(driver);
    }
    drivers
}

/// A store whose lane has its connection.
pub(super) async fn warm(url: &str, drivers: &mut [Driver<'_>]) -> Store {
    let store = Store::connect(url, 4, "wakeful test").await.unwrap();
    for of in [driver_turn, driver_results] {
        let transition = of(&drivers[0]);
        commit_all(&store, &[(&drivers[0], &transition)]).await.remove(0).unwrap();
        drivers[0].session.apply(&transition);
    }
    store
}

pub(super) fn driver_turn(driver: &Driver<'_>) -> Transition {
    let id = format!("call_{}", driver.session.last_step_number);
    driver.transition(replied(vec![text("One moment."), asks(&call(&id, "reserve"))]))
}

fn driver_results(driver: &Driver<'_>) -> Transition {
    let id = format!("call_{}", driver.session.last_step_number);
    driver.transition(Performed::Called(vec![performed(&call(&id, "reserve"), done("Reserved.", None))]))
}

pub(super) async fn commit_all(
    store: &Store,
    commits: &[(&Driver<'_>, &Transition)],
) -> Vec<Result<Commit, Error>> {
    let commits = commits.iter().map(|(driver, transition)| {
        store.commit(&driver.job.lease, &driver.session, transition, performance())
    });
    join_all(commits).await
}

/// Commits one transition of each, and asserts that the warm copies equal hydration.
async fn all_continue(store: &Store, drivers: &mut [Driver<'_>], of: impl Fn(&Driver<'_>) -> Transition) {
    let transitions: Vec<Transition> = drivers.iter().map(of).collect();
    let commits: Vec<_> = drivers.iter().zip(&transitions).collect();
    let done = commit_all(store, &commits).await;
    for ((driver, transition), commit) in drivers.iter_mut().zip(&transitions).zip(done) {
        assert!(matches!(commit, Ok(Commit::Continued { .. })), "{commit:?}");
        driver.session.apply(transition);
        assert_eq!(store.hydrate(driver.session.session_id.as_str()).await.unwrap(), driver.session);
    }
}

#[tokio::test]
async fn commits_that_wait_at_one_moment_are_one_statement_and_a_lone_one_waits_for_nobody() {
    let world = World::new().await;
    let mut drivers = drivers(&world, 16).await;
    let proxy = Proxy::start(&world.database.url);
    let store = warm(&proxy.url, &mut drivers[..1]).await;
    for count in [1, 2, 16] {
        let before = proxy.statements();
        let commits: Vec<Transition> = drivers[..count].iter().map(driver_turn).collect();
        let commits: Vec<_> = drivers[..count].iter().zip(&commits).collect();
        let done = commit_all(&store, &commits).await;
        assert_eq!(proxy.statements() - before, 1, "{count} sessions");
        assert!(done.iter().all(|commit| matches!(commit, Ok(Commit::Continued { .. }))), "{done:?}");
        for driver in &mut drivers[..count] {
            let id = driver.session.session_id.as_str().to_owned();
            driver.session = world.store.hydrate(&id).await.unwrap();
        }
        all_continue(&store, &mut drivers[..count], driver_results).await;
    }
}

#[tokio::test]
async fn messages_of_many_sessions_in_one_statement_stay_with_their_sessions() {
    let world = World::new().await;
    let mut drivers = drivers(&world, 7).await;
    // After the first round, turns of three sessions meet the results of the others.
    for round in 0..4 {
        let store = &world.store;
        all_continue(store, &mut drivers, |driver| {
            if driver.session.calls.is_empty() { driver_turn(driver) } else { driver_results(driver) }
        })
        .await;
        if round == 0 {
            all_continue(store, &mut drivers[..3], driver_results).await;
        }
    }
}

/// What is wrong with one commit of several.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Miss {
    LostLease,
    Moved,
    /// The job's row is of another space.
    OtherSpace,
    /// Somebody edited the number of the job's step.
    OtherStep,
    /// Its run has begun already.
    BegunTwice,
    /// It ends its run, and another run of the conversation waits.
    Awaited,
    /// A text that Postgres refuses.
    Poison,
    /// Another transaction holds the session's row.
    Held,
    /// The same session commits twice.
    Twice,
}

#[tokio::test]
async fn a_commit_that_fails_harms_no_other_of_its_statement() {
    for miss in [
        Miss::LostLease,
        Miss::Moved,
        Miss::OtherSpace,
        Miss::OtherStep,
        Miss::BegunTwice,
        Miss::Awaited,
        Miss::Poison,
        Miss::Held,
        Miss::Twice,
    ] {
        for count in [2, 16] {
            fails_alone(miss, count).await;
        }
    }
}

async fn fails_alone(miss: Miss, count: usize) {
    let world = World::new().await;
    let drivers = drivers(&world, count).await;
    let mut transitions: Vec<Transition> = drivers.iter().map(driver_turn).collect();
    let victim = count / 2;
    let victim_id = drivers[victim].session.session_id.as_str();
    let job_id = drivers[victim].job.lease.job_id;
    let edit_job = async |edit: &'static str| {
        sqlx::query(edit).bind(job_id).execute(&world.database.pool).await.unwrap();
    };
    let mut holder = world.database.pool.begin().await.unwrap();
    match miss {
        Miss::LostLease => {
            world.steal(job_id).await;
        }
        Miss::OtherSpace => edit_job("update jobs set space_id = 'other' where job_id = $1").await,
        Miss::OtherStep => {
            edit_job("update jobs set step_number = step_number + 1 where job_id = $1").await;
        }
        Miss::BegunTwice => {
            let queued = Session { status: SessionStatus::Queued, ..drivers[victim].session.clone() };
            transitions[victim] = advance(&queued, Performed::Begun, drivers[victim].policy);
        }
        Miss::Awaited => {
            transitions[victim] = drivers[victim].transition(replied(vec![text("That is all.")]));
            let other = new_session(&format!("g{victim}"), "another");
            world.store.wake(&other, &message("Now me.")).await.unwrap();
        }
        Miss::Moved => {
            let moved = "update conversation_sessions set last_message_number = last_message_number + 1
                where session_id = $1";
            sqlx::query(moved).bind(victim_id).execute(&world.database.pool).await.unwrap();
        }
        Miss::Poison => {
            transitions[victim].state_updates.push(StateUpdate { key: "k".into(), value: json!("\0") });
        }
        Miss::Held => {
            let hold = "select from conversation_sessions where session_id = $1 for update";
            sqlx::query(hold).bind(victim_id).execute(&mut *holder).await.unwrap();
        }
        Miss::Twice => {}
    }
    let mut commits: Vec<_> = drivers.iter().zip(&transitions).collect();
    if miss == Miss::Twice {
        commits.push((&drivers[victim], &transitions[victim]));
    }
    let release = async {
        if miss == Miss::Held {
            let others = count as i64 - 1;
            crate::support::eventually("the neighbours are committed", || async {
                (world.one("select count(*) from tool_calls").await == others).then_some(())
            })
            .await;
        }
        holder.rollback().await.unwrap();
    };
    let (mut done, ()) = tokio::join!(commit_all(&world.store, &commits), release);
    let context = format!("{miss:?} of {count}");
    let second = (miss == Miss::Twice).then(|| done.pop().unwrap());
    let of_victim = done.remove(victim);
    match miss {
        Miss::LostLease => assert_eq!(of_victim.unwrap(), Commit::Stale, "{context}"),
        Miss::Moved | Miss::OtherSpace | Miss::BegunTwice => {
            assert_eq!(of_victim.unwrap(), Commit::Moved, "{context}");
        }
        Miss::Awaited => assert_eq!(of_victim.unwrap(), Commit::Closed { opened: true }, "{context}"),
        Miss::Poison => {
            let error = of_victim.expect_err("Postgres refuses it");
            assert!(!error.is_transient(), "{context}: {error}");
        }
        Miss::Held | Miss::OtherStep => {
            assert!(matches!(of_victim, Ok(Commit::Continued { .. })), "{context}: {of_victim:?}");
        }
        Miss::Twice => {
            let both = [of_victim.unwrap(), second.unwrap().unwrap()];
            assert!(both.contains(&Commit::Moved), "{context}: {both:?}");
            assert!(both.iter().any(|one| matches!(one, Commit::Continued { .. })), "{context}: {both:?}");
        }
    }
    for commit in done {
        assert!(matches!(commit, Ok(Commit::Continued { .. })), "{context}: {commit:?}");
    }
    for (at, driver) in drivers.iter().enumerate() {
        let read = world.store.hydrate(driver.session.session_id.as_str()).await;
        let written = at != victim || matches!(miss, Miss::Held | Miss::OtherStep | Miss::Twice);
        assert_eq!(read.is_ok_and(|read| read.calls.len() == 1), written, "{context}, session {at}");
    }
    let counted = "select count(*) from jobs
        where lease is not null and (attempt <> 1 or stuck > 1 or died > 0 or last_error is not null)";
    assert_eq!(world.one(counted).await, 0, "{context}");
}

#[tokio::test]
async fn statements_of_two_processes_over_the_same_sessions_do_not_deadlock() {
    let world = World::new().await;
    let mut drivers = drivers(&world, 8).await;
    let other = world.database.store().await;
    for round in 0..20 {
        let transitions: Vec<Transition> =
            drivers.iter().map(if round % 2 == 0 { driver_turn } else { driver_results }).collect();
        let ahead: Vec<_> = drivers.iter().zip(&transitions).collect();
        let back: Vec<_> = ahead.iter().rev().copied().collect();
        let (one, mut two) = tokio::join!(commit_all(&world.store, &ahead), commit_all(&other, &back));
        two.reverse();
        for (one, two) in one.into_iter().zip(two) {
            let both = [one.unwrap(), two.unwrap()];
            assert!(both.contains(&Commit::Moved), "{both:?}");
            assert!(both.iter().any(|one| matches!(one, Commit::Continued { .. })), "{both:?}");
        }
        for (driver, transition) in drivers.iter_mut().zip(&transitions) {
            driver.session.apply(transition);
        }
    }
    let deadlocks = "select deadlocks from pg_stat_database where datname = current_database()";
    assert_eq!(world.one(deadlocks).await, 0);
    for driver in &drivers {
        assert_eq!(world.store.hydrate(driver.session.session_id.as_str()).await.unwrap(), driver.session);
    }
}

#[tokio::test]
async fn statements_of_many_sessions_meet_wakes_heals_and_heartbeats() {
    let world = World::new().await;
    let mut drivers = drivers(&world, 8).await;
    let ids: Vec<String> = drivers.iter().map(|one| one.session.session_id.as_str().to_owned()).collect();
    let over = AtomicBool::new(false);
    let wakes = async {
        for turn in 0..40 {
            world.send(&ids[(turn * 3) % 8], "more").await;
        }
        over.store(true, Ordering::Relaxed);
    };
    let heals = async {
        while !over.load(Ordering::Relaxed) {
            for id in &ids {
                assert_eq!(world.store.wake_session(id).await.unwrap(), []);
            }
        }
    };
    let beats = async {
        // As the heartbeat does it: all jobs of the process in one statement.
        let beat = "with mine as materialized (select job_id from jobs order by job_id desc for update skip locked)
            update jobs set run_at = clock_timestamp() + interval '60 s' from mine where jobs.job_id = mine.job_id";
        while !over.load(Ordering::Relaxed) {
            sqlx::query(beat).execute(&world.database.pool).await.unwrap();
        }
    };
    let steps = async {
        let mut round = 0;
        while !over.load(Ordering::Relaxed) || round % 2 == 1 {
            let of = if round % 2 == 0 { driver_turn } else { driver_results };
            let transitions: Vec<Transition> = drivers.iter().map(of).collect();
            let commits: Vec<_> = drivers.iter().zip(&transitions).collect();
            let done = commit_all(&world.store, &commits).await;
            for (at, commit) in done.into_iter().enumerate() {
                let Ok(Commit::Continued { wake_seq, .. }) = commit else { panic!("{commit:?}") };
                drivers[at].session.apply(&transitions[at]);
                if wake_seq != drivers[at].session.wake_seq {
                    world.store.refresh(&mut drivers[at].session).await.unwrap();
                }
            }
            round += 1;
        }
    };
    tokio::join!(wakes, heals, beats, steps);
    let deadlocks = "select deadlocks from pg_stat_database where datname = current_database()";
    assert_eq!(world.one(deadlocks).await, 0);
    for driver in &mut drivers {
        world.store.refresh(&mut driver.session).await.unwrap();
        assert_eq!(world.store.hydrate(driver.session.session_id.as_str()).await.unwrap(), driver.session);
    }
}

#[tokio::test]
async fn a_statement_of_many_sessions_whose_answer_is_lost_applies_once() {
    let world = World::new().await;
    let mut drivers = drivers(&world, 5).await;
    let mut proxy = Proxy::start(&world.database.url);
    let store = warm(&proxy.url, &mut drivers[..1]).await;
    let transitions: Vec<Transition> = drivers.iter().map(driver_turn).collect();
    let commits: Vec<_> = drivers.iter().zip(&transitions).collect();
    let mut holder = world.database.pool.begin().await.unwrap();
    sqlx::query("select from jobs order by job_id desc limit 1 for update")
        .execute(&mut *holder)
        .await
        .unwrap();
    let cut = async {
        world.until("select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')").await;
        proxy.go_away().await;
        holder.rollback().await.unwrap();
    };
    let (first, ()) = tokio::join!(commit_all(&store, &commits), cut);
    for commit in first {
        let away = commit.as_ref().is_err_and(|error| error.is_transient());
        assert!(away, "the server was away: {commit:?}");
    }
    proxy.come_back();
    let second = commit_all(&store, &commits).await;
    for (at, commit) in second.into_iter().enumerate() {
        let commit = commit.unwrap();
        assert!(matches!(commit, Commit::Moved | Commit::Continued { .. }), "{commit:?}");
        drivers[at].session.apply(&transitions[at]);
    }
    for driver in &drivers {
        assert_eq!(world.store.hydrate(driver.session.session_id.as_str()).await.unwrap(), driver.session);
    }
}

#[tokio::test]
async fn a_caller_that_goes_away_leaves_its_commit_whole_or_unwritten() {
    let world = World::new().await;
    let mut drivers = drivers(&world, 6).await;
    for (at, driver) in drivers.iter().enumerate() {
        let turn = driver_turn(driver);
        let commits = [(driver, &turn)];
        let commit = commit_all(&world.store, &commits);
        // Polled once: the commit waits for its lane. Then its caller is gone.
        if at % 2 == 0 {
            drop(futures::FutureExt::now_or_never(commit));
        } else {
            let _ = tokio::time::timeout(Duration::from_millis(1), commit).await;
        }
    }
    // The lanes go on with the others.
    let after = world.wake("after", "Hello").await;
    world.drive(&after).await.continues(Performed::Begun).await;
    for driver in &mut drivers {
        let turn = driver_turn(driver);
        let commit = commit_all(&world.store, &[(driver, &turn)]).await.remove(0).unwrap();
        assert!(matches!(commit, Commit::Moved | Commit::Continued { .. }), "{commit:?}");
        driver.session.apply(&turn);
        let read = world.store.hydrate(driver.session.session_id.as_str()).await.unwrap();
        assert_eq!((read.records.len(), read.calls.len()), (driver.session.records.len(), 1));
    }
}

#[tokio::test]
async fn the_intent_of_the_next_call_is_part_of_the_commit() {
    let world = World::new().await;
    let mut drivers = drivers(&world, 3).await;
    all_continue(&world.store, &mut drivers, driver_turn).await;
    let transitions: Vec<Transition> = drivers.iter().map(driver_results).collect();
    let ids = ["gen_0", "gen_1", "gen_2"].map(|id| id.into());
    let store = &world.store;
    let commit = |at: usize| {
        let driver: &Driver<'_> = &drivers[at];
        let new = NewGeneration {
            session_id: &driver.session.session_id,
            generation_id: &ids[at],
            step_number: driver.session.last_step_number + 2,
            attempt: 1,
            model: "test/test",
            request_sha256: "1",
            base_sha256: "2",
            repairs: 3,
            resumes: None,
            purpose: Purpose::Reply,
            context_strategy: Strategy::Full,
        };
        // The second one writes no intent.
        let performance = Performance { intent: (at != 1).then_some(new), ..performance() };
        let transition = transitions[at].clone();
        async move { store.commit(&driver.job.lease, &driver.session, &transition, performance).await.unwrap() }
    };
    let token = world.steal(drivers[2].job.lease.job_id).await;
    assert_eq!(commit(2).await, Commit::Stale);
    assert_eq!(world.count("generations").await, 0, "without the lease no intent is written");
    world.give_back(drivers[2].job.lease.job_id, token).await;

    let mut done = join_all([commit(0), commit(1)]).await;
    done.push(commit(2).await);
    for (at, commit) in done.into_iter().enumerate() {
        let Commit::Continued { started_at, .. } = commit else { panic!("{commit:?}") };
        let read = world.store.hydrate(drivers[at].session.session_id.as_str()).await.unwrap();
        let found: Vec<_> =
            read.interrupted.iter().map(|call| (&call.generation_id, &call.started_at)).collect();
        match &started_at {
            None => assert_eq!((at, found.len()), (1, 0)),
            Some(started_at) => assert_eq!(found, [(&ids[at], started_at)]),
        }
    }
}

#[tokio::test]
async fn closing_a_call_does_not_read_the_whole_ledger() {
    for count in [1, 2] {
        let blocks = blocks_of_a_turn(count).await;
        assert!(blocks < 400, "{count} sessions read {blocks} blocks of the ledger");
    }
}

/// Commits turns and results by statements that were prepared while the ledger was small. Returns the blocks of the ledger and its indexes that their connections have read in all.
async fn blocks_of_a_turn(count: usize) -> i64 {
    let world = World::new().await;
    let mut drivers = drivers(&world, count).await;
    let store = world.database.store().await;
    let turns = async |drivers: &mut [Driver<'_>]| {
        for of in [driver_turn, driver_results] {
            let transitions: Vec<Transition> = drivers.iter().map(of).collect();
            let commits: Vec<_> = drivers.iter().zip(&transitions).collect();
            for commit in commit_all(&store, &commits).await {
                assert!(matches!(commit, Ok(Commit::Continued { .. })), "{commit:?}");
            }
            for (driver, transition) in drivers.iter_mut().zip(&transitions) {
                driver.session.apply(transition);
            }
        }
    };
    turns(&mut drivers).await;
    // A connection reports what it read when it ends.
    let fill = "insert into tool_calls (space_id, session_id, call_id, run_id, step_number, message_number,
            result_message_number, name, args_sha256, effect, status)
        select space_id, session_id, 'old_' || n, 'run', 1, 1, 1, 'reserve', '0', 'pure', 'done'
        from conversation_sessions, generate_series(1, 10000) n";
    let mut filler = sqlx::PgConnection::connect(&world.database.url).await.unwrap();
    sqlx::query(fill).execute(&mut filler).await.unwrap();
    // As autovacuum does it. It makes prepared statements plan again.
    sqlx::query("analyze tool_calls").execute(&mut filler).await.unwrap();
    filler.close().await.unwrap();
    world.until("select n_tup_ins >= 10000 from pg_stat_user_tables where relname = 'tool_calls'").await;
    let blocks = "select (heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read)::bigint
        from pg_statio_user_tables where relname = 'tool_calls'";
    let before = world.one(blocks).await;
    turns(&mut drivers).await;
    store.close().await;
    crate::support::eventually("the update is reported", || async {
        let updates =
            world.one("select n_tup_upd from pg_stat_user_tables where relname = 'tool_calls'").await;
        (updates == 2 * count as i64).then_some(())
    })
    .await;
    world.one(blocks).await - before
}
