//! `take` and `back` at the same time: exactly one side has the task.

use super::*;

/// An open task that is parked.
async fn parked() -> (World, Theirs, Source, String) {
    let (world, theirs) = (World::new().await, Theirs::new("absurd").await);
    let task = theirs.task(1, "pending", "'pending', now(), null, null", &[("agent-loop", turn(1))]).await;
    let mut source = theirs.source(May::Park).await;
    assert_eq!(source.park("q", "agent", 10).await.unwrap().task_ids, [task.as_str()]);
    (world, theirs, source, task)
}

impl Theirs {
    async fn is_parked(&self) -> bool {
        sqlx::query_scalar("select claimed_by like 'wakeful:%' and available_at = 'infinity' from absurd.r_q")
            .fetch_one(&self.database.pool)
            .await
            .map(|parked: Option<bool>| parked == Some(true))
            .unwrap()
    }
}

/// That one waits for a lock in our database, and that two do.
const ONE_WAITS: &str = "select count(*) >= 1 from pg_stat_activity
    where datname = current_database() and wait_event_type = 'Lock'";
const TWO_WAIT: &str = "select count(*) >= 2 from pg_stat_activity
    where datname = current_database() and wait_event_type = 'Lock'";
/// That one has locked the row of an import, and does something else now.
const ONE_HOLDS: &str = "select exists (select from pg_stat_activity where datname = current_database()
    and state = 'idle in transaction' and query like '%from absurd_imports%for update%')";

async fn taken(world: &World) -> ImportRow {
    let mut rows = world.store.absurd_taken("default", "absurd:q", "agent", "", 10).await.unwrap();
    assert_eq!(rows.len(), 1);
    rows.remove(0)
}

#[tokio::test]
async fn a_task_that_is_being_imported_is_not_given_back() {
    let (world, theirs, mut source, task) = parked().await;
    // The import has claimed the task, and waits for its conversation.
    let mut other = world.database.pool.begin().await.unwrap();
    sqlx::query(AssertSqlSafe(format!(
        "insert into conversation_counters (conversation_id, space_id, mailbox_id)
        values ('default/absurd-{task}', 'default', 'default')"
    )))
    .execute(&mut *other)
    .await
    .unwrap();
    let (outcome, unclaimed, ()) = tokio::join!(
        import(&world, &mut source, &task, false),
        async {
            world.until(ONE_WAITS).await;
            world.store.absurd_unclaimed("default", "absurd:q", &task, "agent").await.unwrap()
        },
        async {
            world.until(TWO_WAIT).await;
            other.rollback().await.unwrap();
        }
    );
    assert_eq!((session_of(&outcome).1, unclaimed), (SessionStatus::Queued, None));
    assert!(theirs.is_parked().await);
}

#[tokio::test]
async fn a_task_that_went_back_after_it_was_read_is_not_imported() {
    let (world, theirs, mut source, task) = parked().await;
    let mut giver = theirs.source(May::Park).await;
    // Another process gives it back between the import's reading and its claim.
    let mut other = world.database.pool.begin().await.unwrap();
    sqlx::query("lock table absurd_imports in access exclusive mode").execute(&mut *other).await.unwrap();
    let (outcome, ()) = tokio::join!(import(&world, &mut source, &task, false), async {
        world.until(ONE_WAITS).await;
        sqlx::query(AssertSqlSafe(format!(
            "insert into absurd_imports (space_id, source, task_id, time, session_id, task_name, task_state, shape, taken, phase)
            values ('default', 'absurd:q', '{task}', 1, '', 'agent', 'pending', '', true, 'returned')"
        )))
        .execute(&mut *other)
        .await
        .unwrap();
        theirs.run("update absurd.r_q set claimed_by = null, available_at = now(), state = 'pending'").await;
        other.commit().await.unwrap();
    });
    assert_eq!(outcome, Outcome::Open);
    assert_eq!(world.count("conversation_sessions").await, 0);
    // Taken again, it comes.
    assert_eq!(giver.park("q", "agent", 10).await.unwrap().task_ids.len(), 1);
    assert_eq!(session_of(&import(&world, &mut source, &task, false).await).1, SessionStatus::Queued);
}

#[tokio::test]
async fn a_parked_task_without_a_session_goes_back_and_may_be_taken_again() {
    let (world, theirs, mut source, task) = parked().await;
    let row = world.store.absurd_unclaimed("default", "absurd:q", &task, "agent").await.unwrap().unwrap();
    // A crash here leaves it with no side, and the next `back` finds it.
    assert_eq!(import(&world, &mut source, &task, false).await, Outcome::Already);
    assert_eq!(taken(&world).await, row);
    assert_eq!(back(&world, &mut source, &row).await, GivenBack::Returned(Unparked::AsBefore));
    assert!(!theirs.is_parked().await);
    source.park("q", "agent", 10).await.unwrap();
    assert_eq!(session_of(&import(&world, &mut source, &task, false).await).1, SessionStatus::Queued);
    assert_eq!(taken(&world).await.time, 2);
}

#[tokio::test]
async fn two_that_give_a_task_back_do_it_once() {
    let (world, theirs, mut source, task) = parked().await;
    import(&world, &mut source, &task, false).await;
    let here = taken(&world).await;
    // Absurd holds the run, so the first one is in the middle of it when the second one comes.
    let mut other = theirs.source(May::Park).await;
    let mut hold = theirs.database.pool.begin().await.unwrap();
    sqlx::query("select from absurd.r_q for update").execute(&mut *hold).await.unwrap();
    let (first, second, ()) = tokio::join!(
        back(&world, &mut source, &here),
        async {
            // The session has ended, and its row is locked.
            world.until("select exists (select from absurd_imports where phase = 'returning')").await;
            world.until(ONE_HOLDS).await;
            let row = ImportRow { phase: "returning".to_owned(), ..here.clone() };
            back(&world, &mut other, &row).await
        },
        async {
            world.until(ONE_WAITS).await;
            hold.rollback().await.unwrap();
        }
    );
    assert_eq!((first, second), (GivenBack::Returned(Unparked::AsBefore), GivenBack::Already));
    // What these two have read is old now: the task is here again.
    source.park("q", "agent", 10).await.unwrap();
    import(&world, &mut source, &task, false).await;
    for phase in ["here", "returning"] {
        let row = ImportRow { phase: phase.to_owned(), ..here.clone() };
        assert_eq!(back(&world, &mut source, &row).await, GivenBack::Already, "{phase}");
    }
    assert!(theirs.is_parked().await);
    assert_eq!((taken(&world).await.time, world.count("jobs").await), (2, 1));
}

#[tokio::test]
async fn the_run_behind_a_task_that_goes_back_begins() {
    let (world, _theirs, mut source, task) = parked().await;
    import(&world, &mut source, &task, false).await;
    let new = new_session(&format!("absurd-{task}"), "next");
    let next = world.store.wake(&new, &message("And me?")).await.unwrap();
    assert_eq!(world.count("jobs").await, 1);
    let row = taken(&world).await;
    assert_eq!(back(&world, &mut source, &row).await, GivenBack::Returned(Unparked::AsBefore));
    let session: String = world
        .database
        .value("select session_id from jobs where conversation_id = $1", &new.conversation_id)
        .await;
    assert_eq!(session, next.session_id);
    let open: String = world
        .database
        .value(
            "select open_run_id || ' ' || queued_runs from conversation_counters where conversation_id = $1",
            &new.conversation_id,
        )
        .await;
    assert_eq!(open, format!("{} 0", next.run_id));
    for session in [&row.session_id, &next.session_id] {
        let verified = world.store.verify(session).await.unwrap();
        assert!(verified.agrees, "{:?}", verified.checks);
    }
}

#[tokio::test]
async fn the_search_finds_an_import_whose_id_says_nothing_of_the_time() {
    let (world, theirs) = (World::new().await, Theirs::new("absurd").await);
    let task = theirs.task(1, "completed", OVER, &[("agent-loop", done())]).await;
    let mut source = theirs.source(May::Read).await;
    // The search has read further than any id.
    sqlx::query("update search_progress set run_id = 'run_g', session_id = 'sess_g'")
        .execute(&world.database.pool)
        .await
        .unwrap();
    let outcome = import(&world, &mut source, &task, false).await;
    while world.store.index_sessions().await.unwrap().more {}
    let found: String = world
        .database
        .value("select session_id from search_documents where words @@ to_tsquery('simple', $1)", "done")
        .await;
    assert_eq!(found, session_of(&outcome).0);
    // Nor does the search read such ids at every look, although they are greater than those of today.
    assert!(found.as_str() > "sess_1", "{found}");
    sqlx::raw_sql("delete from search_sessions; update search_progress set run_id = '', session_id = ''")
        .execute(&world.database.pool)
        .await
        .unwrap();
    while world.store.index_sessions().await.unwrap().more {}
    assert_eq!(world.count("search_sessions").await, 0);
}
