//! Messages that come in by one statement: the rows that they leave, and what they meet.

use super::*;
use wakeful_store::legacy::Imported;
use wakeful_store::wake::{Continues, NewAttachment, NewSession, Woken};

fn keyed(key: &str, text: &str) -> NewMessage {
    NewMessage { client_key: Some(key.into()), sender: Some("ann".into()), ..message(text) }
}

/// Where a message comes in.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    NewConversation,
    /// A session whose run is over.
    Rest,
    /// A run that waits for its worker.
    Queued,
    Running,
    /// The same message a second time.
    Known,
}

const ALL: [Place; 5] = [Place::NewConversation, Place::Rest, Place::Queued, Place::Running, Place::Known];

/// Brings conversation c1 to where the message comes in.
async fn prepare(world: &World, into: Place) {
    if into == Place::NewConversation {
        return;
    }
    let first = world.store.wake(&new_session("c1", "c1"), &keyed("first", "Hello")).await.unwrap();
    if matches!(into, Place::Rest | Place::Running) {
        let mut driver = world.drive(&first.session_id).await;
        driver.continues(Performed::Begun).await;
        if into == Place::Rest {
            assert_eq!(driver.commit(replied(vec![text("Hi.")])).await, Commit::Closed { opened: false });
        }
    }
}

fn of(into: Place) -> NewMessage {
    if into == Place::Known { keyed("first", "Hello") } else { keyed("second", "And another thing.") }
}

#[tokio::test]
async fn a_message_by_one_statement_leaves_the_rows_that_it_leaves_under_locks() {
    for into in ALL {
        let mut seen = Vec::new();
        for locked in [false, true] {
            let world = World::new().await;
            prepare(&world, into).await;
            let new = new_session("c1", "c1");
            // A chat from an old cache takes the way with locks; this one is empty.
            let woken = match locked {
                true => world.store.wake_imported(&new, &of(into), &Imported::default()).await,
                false => world.store.wake(&new, &of(into)).await,
            };
            let woken = woken.unwrap();
            assert_eq!(world.store.wake_session(&woken.session_id).await.unwrap(), [], "{into:?}");
            let mut dump = comparable(world.dump().await);
            dump.remove("legacy_chat_counts");
            seen.push(((woken.outcome, woken.duplicate), dump));
        }
        assert_eq!(seen[0], seen[1], "{into:?}");
    }
}

#[tokio::test]
async fn a_new_run_takes_over_no_outage_from_a_job_that_is_still_held() {
    for locked in [false, true] {
        let world = World::new().await;
        prepare(&world, Place::Rest).await;
        let held = "insert into jobs (kind, runner, space_id, conversation_id, session_id, step_number, lease, outage_since,
                outage_faults, waits_for, waits_since, gate_pass)
            select 'step', runner, space_id, conversation_id, session_id, 2, 7, now(), 5, 'openai', now(), 3
            from conversation_sessions";
        sqlx::query(held).execute(&world.database.pool).await.unwrap();
        let (new, message) = (new_session("c1", "c1"), keyed("second", "And another thing."));
        let woken = match locked {
            true => world.store.wake_imported(&new, &message, &Imported::default()).await,
            false => world.store.wake(&new, &message).await,
        };
        assert_eq!(woken.unwrap().outcome, Acceptance::NewRun);
        let fresh =
            "select count(*) from jobs where lease is null and outage_since is null and outage_faults = 0
            and waits_for is null and waits_since is null and gate_pass is null";
        assert_eq!(world.one(fresh).await, 1, "with locks: {locked}");
    }
}

#[tokio::test]
async fn a_message_that_comes_in_is_two_statements() {
    for into in ALL {
        let world = World::new().await;
        prepare(&world, into).await;
        let proxy = Proxy::start(&world.database.url);
        let store = Store::connect(&proxy.url, 4, "wakeful test").await.unwrap();
        let count = proxy.statements();
        let woken = store.wake(&new_session("c1", "c1"), &of(into)).await.unwrap();
        assert_eq!(woken.duplicate, into == Place::Known);
        // New connections send settings too, but not for long.
        assert!(proxy.statements() - count <= 5, "{into:?}: {}", proxy.statements() - count);
        let mut counts = Vec::new();
        for text in ["More.", "Still more.", "And more.", "The last."] {
            let before = proxy.statements();
            let woken = store.send(&woken.session_id, &message(text)).await.unwrap();
            assert_eq!(woken.outcome, Acceptance::Queued);
            counts.push(proxy.statements() - before);
        }
        assert_eq!(counts.iter().min(), Some(&2), "{into:?}: {counts:?}");
    }
}

const WAITS: &str = "select count(*) from pg_stat_activity
    where datname = current_database() and wait_event_type = 'Lock'";

/// Sends `messages` to conversation c1 while another transaction holds what they write, so that each has read before
/// one of them writes.
async fn at_once(world: &World, hold: &'static str, messages: &[NewMessage]) -> Vec<Result<Woken, Error>> {
    let mut holder = world.database.pool.begin().await.unwrap();
    sqlx::query(hold).execute(&mut *holder).await.unwrap();
    let new = new_session("c1", "c1");
    let wakes = join_all(messages.iter().map(|message| world.store.wake(&new, message)));
    let release = async {
        let count = messages.len() as i64;
        eventually("all wait", || async { (world.one(WAITS).await >= count).then_some(()) }).await;
        holder.rollback().await.unwrap();
    };
    tokio::join!(wakes, release).0
}

/// Holds the name of a conversation that does not exist yet.
const HOLD_NAME: &str = "insert into conversation_counters (conversation_id, space_id, mailbox_id)
    values ('default/c1', 'default', 'default')";

#[tokio::test]
async fn of_first_messages_at_once_one_makes_the_session_and_the_others_join_it() {
    let world = World::new().await;
    let messages = ["one", "two"].map(|text| keyed(text, text));
    let woken: Vec<Woken> =
        at_once(&world, HOLD_NAME, &messages).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(woken[0].session_id, woken[1].session_id);
    assert_eq!(woken[0].run_id, woken[1].run_id);
    let new_runs = woken.iter().filter(|one| one.outcome == Acceptance::NewRun).count();
    assert_eq!(new_runs, 1);
    for (table, count) in [
        ("conversation_counters", 1),
        ("conversation_sessions", 1),
        ("session_seed_messages", 1),
        ("session_inbox", 2),
        ("session_runs", 1),
        ("jobs", 1),
    ] {
        assert_eq!(world.count(table).await, count, "{table}");
    }
}

#[tokio::test]
async fn of_messages_at_once_at_a_session_at_rest_one_opens_the_run_and_the_other_joins_it() {
    let world = World::new().await;
    prepare(&world, Place::Rest).await;
    let messages = ["one", "two"].map(|text| keyed(text, text));
    let hold = "select from conversation_counters for update";
    let woken: Vec<Woken> = at_once(&world, hold, &messages).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(woken[0].run_id, woken[1].run_id);
    assert_eq!(woken.iter().filter(|one| one.outcome == Acceptance::NewRun).count(), 1);
    let inbox = "select count(*) from session_inbox where status = 'pending'";
    assert_eq!(world.one(inbox).await, 1);
    assert_eq!(world.one("select count(*) from session_runs where status = 'running'").await, 1);
}

#[tokio::test]
async fn messages_at_once_at_an_open_run_are_read_in_the_order_of_their_commits() {
    let world = World::new().await;
    prepare(&world, Place::Running).await;
    let messages = ["one", "two"].map(|text| keyed(text, text));
    let hold = "select from conversation_sessions for update";
    for woken in at_once(&world, hold, &messages).await {
        assert_eq!(woken.unwrap().outcome, Acceptance::Queued);
    }
    // The inbox is read by its numbers, and the journal by its own.
    let order = "select count(*) from (
        select (payload ->> 'inbox_id')::bigint - lag((payload ->> 'inbox_id')::bigint) over (order by seq) as step
        from session_events where type = 'MESSAGE_RECEIVED') e where step <= 0";
    assert_eq!(world.one(order).await, 0);
    assert_eq!(world.one("select count(*) from session_inbox where status = 'pending'").await, 2);
}

#[tokio::test]
async fn one_message_twice_at_once_is_one_message_wherever_it_comes_in() {
    for (into, hold) in [
        (Place::NewConversation, HOLD_NAME),
        (Place::Rest, "select from conversation_counters for update"),
        (Place::Running, "select from conversation_sessions for update"),
    ] {
        let world = World::new().await;
        prepare(&world, into).await;
        let before = world.count("session_inbox").await;
        let twice = [of(into), of(into)];
        let woken: Vec<Woken> = at_once(&world, hold, &twice).await.into_iter().map(Result::unwrap).collect();
        assert_eq!(woken.iter().filter(|one| one.duplicate).count(), 1, "{into:?}");
        assert_eq!(woken[0].run_id, woken[1].run_id, "{into:?}");
        assert_eq!(world.count("session_inbox").await - before, 1, "{into:?}");
        let other = NewMessage { text: "Something else.".into(), ..of(into) };
        let reused = world.store.wake(&new_session("c1", "c1"), &other).await;
        assert!(matches!(reused, Err(Error::KeyReused { .. })), "{into:?}: {reused:?}");
    }
}

#[tokio::test]
async fn a_message_and_a_cancel_at_once_at_an_open_run() {
    let world = World::new().await;
    prepare(&world, Place::Running).await;
    let session_id: String =
        world.database.value("select session_id from conversation_sessions where $1 <> ''", "any").await;
    // The message has read that the run is open, and waits. The cancel is committed before it writes.
    let mut holder = world.database.pool.begin().await.unwrap();
    sqlx::query("select from conversation_sessions for update").execute(&mut *holder).await.unwrap();
    let wake = async { world.store.send(&session_id, &message("Wait!")).await.unwrap() };
    let cancel = async {
        eventually("the message waits", || async { (world.one(WAITS).await >= 1).then_some(()) }).await;
        let cancel = "update conversation_sessions set cancel_requested = true, wake_seq = wake_seq + 1";
        sqlx::query(cancel).execute(&mut *holder).await.unwrap();
        holder.commit().await.unwrap();
    };
    let (woken, ()) = tokio::join!(wake, cancel);
    assert_eq!(woken.outcome, Acceptance::NewRun, "the cancelled run takes no more messages");
    let open: String =
        world.database.value("select open_run_id from conversation_counters where $1 <> ''", "any").await;
    assert_ne!(woken.run_id, open);
}

#[tokio::test]
async fn a_message_meets_a_run_that_opened_since_it_looked() {
    let world = World::new().await;
    prepare(&world, Place::Rest).await;
    let other = new_session("c1", "other");
    // Both have read that no run holds the conversation.
    let mut holder = world.database.pool.begin().await.unwrap();
    sqlx::query("select from conversation_counters for update").execute(&mut *holder).await.unwrap();
    let (one, two) = (new_session("c1", "c1"), message("more"));
    let first = world.store.wake(&one, &two);
    let second = async {
        eventually("the first waits", || async { (world.one(WAITS).await >= 1).then_some(()) }).await;
        world.store.wake(&other, &message("Hello")).await
    };
    let release = async {
        eventually("both wait", || async { (world.one(WAITS).await >= 2).then_some(()) }).await;
        holder.rollback().await.unwrap();
    };
    let (first, second, ()) = tokio::join!(first, second, release);
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_ne!(first.session_id, second.session_id);
    assert_eq!((first.outcome, second.outcome), (Acceptance::NewRun, Acceptance::NewRun));
    assert_eq!(world.one("select queued_runs::bigint from conversation_counters").await, 1);
    assert_eq!(world.count("jobs").await, 1);
    for woken in [first, second] {
        assert_eq!(world.store.wake_session(&woken.session_id).await.unwrap(), []);
    }
}

#[tokio::test]
async fn files_take_the_way_with_locks_and_a_session_of_another_conversation_is_refused() {
    let world = World::new().await;
    prepare(&world, Place::Rest).await;
    let file =
        NewAttachment { file_name: "a.txt".into(), media_type: "text/plain".into(), bytes: b"A".to_vec() };
    let with_file = NewMessage { attachments: vec![file], ..keyed("file", "See this.") };
    let woken = world.store.wake(&new_session("c1", "c1"), &with_file).await.unwrap();
    let session = world.store.hydrate(&woken.session_id).await.unwrap();
    assert_eq!(session.records.last().unwrap().details.attachments.len(), 1);
    let elsewhere = world.store.wake(&new_session("c2", "c1"), &message("Hello")).await;
    assert!(matches!(elsewhere, Err(Error::KeyReused { .. })), "{elsewhere:?}");
    assert_eq!(world.count("conversation_counters").await, 1, "nothing is left of it");
}

#[tokio::test]
async fn a_message_that_is_sent_again_after_a_restart_is_accepted_once() {
    let world = World::new().await;
    prepare(&world, Place::Running).await;
    let new = NewSession { continues: Continues::Conversation, ..new_session("c1", "c1") };
    // Each attempt looks for the message before the other has written it.
    let mut holder = world.database.pool.begin().await.unwrap();
    sqlx::query("lock table session_inbox in exclusive mode").execute(&mut *holder).await.unwrap();
    let waiting = async |count: i64| {
        eventually("they wait", || async { (world.one(WAITS).await >= count).then_some(()) }).await;
    };
    let again = of(Place::Running);
    let first = world.store.wake(&new, &again);
    let second = async {
        waiting(1).await;
        world.store.restart(&new_session("c1", "again"), None).await.unwrap();
        world.store.wake(&new, &again).await
    };
    let release = async {
        waiting(2).await;
        holder.rollback().await.unwrap();
    };
    let (first, second, ()) = tokio::join!(first, second, release);
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_eq!(world.count("conversation_sessions").await, 2);
    assert_eq!(world.one("select count(*) from session_inbox where client_key = 'second'").await, 1);
    assert_eq!((&first.session_id, &first.run_id), (&second.session_id, &second.run_id));
    assert_ne!(first.duplicate, second.duplicate);
}

#[tokio::test]
async fn a_message_that_waits_for_its_session_during_a_restart_is_found_when_it_is_sent_again() {
    let world = World::new().await;
    prepare(&world, Place::Running).await;
    let new = NewSession { continues: Continues::Conversation, ..new_session("c1", "c1") };
    let mut holder = world.database.pool.begin().await.unwrap();
    sqlx::query("select from conversation_sessions for update").execute(&mut *holder).await.unwrap();
    let waiting = async |count: i64| {
        eventually("they wait", || async { (world.one(WAITS).await >= count).then_some(()) }).await;
    };
    let again = of(Place::Running);
    let (tell, sent) = tokio::sync::oneshot::channel();
    let first = world.store.wake(&new, &again);
    let second = async {
        waiting(1).await;
        world.store.restart(&new_session("c1", "again"), None).await.unwrap();
        let second = world.store.wake(&new, &again).await;
        // An error means that the first message is on its way already.
        let _ = tell.send(());
        second
    };
    // The restart waits for the session that it follows. If it does not, the second attempt is over before the first.
    let release = async {
        tokio::select! {
            () = waiting(2) => {}
            _ = sent => {}
        }
        holder.rollback().await.unwrap();
    };
    let (first, second, ()) = tokio::join!(first, second, release);
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_eq!(world.one("select count(*) from session_inbox where client_key = 'second'").await, 1);
    assert_eq!(first.session_id, second.session_id);
    assert_ne!(first.duplicate, second.duplicate);
}

#[tokio::test]
async fn a_message_of_one_agent_enters_no_conversation_that_began_with_another_meanwhile() {
    let world = World::new().await;
    let of = |agent: &str, only_agent: bool| NewSession {
        agent: agent.into(),
        only_agent,
        continues: Continues::Conversation,
        ..new_session("c1", "c1")
    };
    world.store.wake(&of("one", true), &message("Hello")).await.unwrap();
    world.store.wake(&of("one", true), &message("Again")).await.unwrap();
    world.store.wake(&of("two", false), &message("From one who reaches both")).await.unwrap();
    // At once, and with locks: a message with a file takes that way.
    let file = NewAttachment { file_name: "a".into(), media_type: "text/plain".into(), bytes: b"a".to_vec() };
    let with_file = NewMessage { attachments: vec![file], ..message("Hello") };
    let notice = NewSession { continues: Continues::Trigger, trigger_id: "n".into(), ..of("two", true) };
    for (new, message) in
        [(of("two", true), message("Hello")), (of("two", true), with_file), (notice, message("A notice"))]
    {
        let refused = world.store.wake(&new, &message).await;
        assert!(matches!(refused, Err(Error::NotFound { what: "conversation", .. })), "{refused:?}");
    }
    assert_eq!(world.count("session_inbox").await, 3);
}
