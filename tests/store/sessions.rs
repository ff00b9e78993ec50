//! Which session a message goes to, and how step numbers find a session's messages.

use super::*;
use wakeful_store::wake::{Continues, NewSession};
use wakeful_workflow::derive;
use wakeful_workflow::state::State;

/// A chat message's session: it continues the conversation's latest one.
fn chat(conversation: &str) -> NewSession {
    NewSession { continues: Continues::Conversation, ..new_session(conversation, conversation) }
}

fn keyed(key: &str, text: &str) -> NewMessage {
    NewMessage { client_key: Some(key.into()), ..message(text) }
}

#[tokio::test]
async fn two_first_messages_at_once_make_one_session() {
    let world = World::new().await;
    let new = chat("c1");
    let woken = join_all((0..8).map(|number| {
        let (store, new) = (world.store.clone(), new.clone());
        async move { store.wake(&new, &message(&format!("m{number}"))).await.unwrap() }
    }))
    .await;
    let ids: HashSet<&str> = woken.iter().map(|one| one.session_id.as_str()).collect();
    assert_eq!(ids.len(), 1);
    let runs: HashSet<&str> = woken.iter().map(|one| one.run_id.as_str()).collect();
    assert_eq!(runs.len(), 1, "the others join the first one's run");
    assert_eq!(world.count("conversation_sessions").await, 1);
    assert_eq!(world.count("session_inbox").await, 8);
    assert_eq!(world.count("session_seed_messages").await, 1);
}

#[tokio::test]
async fn a_chat_goes_on_with_the_latest_session_whatever_made_it_and_an_email_with_its_own() {
    let world = World::new().await;
    let wake =
        async |new: &NewSession, text: &str| world.store.wake(new, &message(text)).await.unwrap().session_id;
    let by_trigger = |trigger_type: &str, trigger_id: &str| NewSession {
        trigger_type: trigger_type.into(),
        ..new_session("c1", trigger_id)
    };
    let first = wake(&chat("c1"), "one").await;
    assert_eq!(wake(&chat("c1"), "two").await, first);
    let mut latest = first.clone();
    for (trigger_type, trigger_id) in
        [("email", "<1@mail>"), ("import", "i1"), ("fork", "f1"), ("cron", "daily 1")]
    {
        let made = wake(&by_trigger(trigger_type, trigger_id), "made").await;
        assert_ne!(made, latest, "{trigger_type}");
        assert_eq!(wake(&chat("c1"), "on").await, made, "{trigger_type}");
        let of_messenger = NewSession { trigger_type: "message".into(), ..chat("c1") };
        assert_eq!(wake(&of_messenger, "on").await, made, "{trigger_type}");
        latest = made;
    }
    assert_ne!(
        wake(&by_trigger("email", "<1@mail>"), "again").await,
        latest,
        "the same email has its session"
    );
    assert_eq!(wake(&by_trigger("chat", "c1"), "again").await, first, "by its trigger it is the first");
    assert_ne!(wake(&chat("c2"), "elsewhere").await, latest);
}

#[tokio::test]
async fn the_order_of_sessions_is_the_databases_whatever_their_ids_say() {
    let world = World::new().await;
    let first = world.store.wake(&chat("c1"), &message("one")).await.unwrap().session_id;
    let second = world.store.restart(&chat("c1"), None).await.unwrap().session_id;
    // Ids look like this when the clock of the process that made the second session is slow.
    let early = sqlx::query("update conversation_sessions set session_id = 'sess_0' where session_id = $1")
        .bind(&second);
    // The seeds refer to the old id. Replica mode turns the foreign key check off.
    let mut connection = world.database.pool.acquire().await.unwrap();
    sqlx::query("set session_replication_role = replica").execute(&mut *connection).await.unwrap();
    early.execute(&mut *connection).await.unwrap();
    assert!(first.as_str() > "sess_0");
    assert_eq!(world.store.wake(&chat("c1"), &message("two")).await.unwrap().session_id, "sess_0");
    let chain = world.store.chain("default/c1", None, 10).await.unwrap();
    let ids: Vec<&str> = chain.iter().map(|one| one.session_id.as_str()).collect();
    assert_eq!(ids, ["sess_0", first.as_str()]);
}

#[tokio::test]
async fn a_message_beside_a_new_beginning_goes_to_one_of_the_two_sessions_and_to_both_in_no_order() {
    for message_first in [true, false] {
        let world = World::new().await;
        let old = world.store.wake(&chat("c1"), &message("one")).await.unwrap().session_id;
        let mut driver = world.drive(&old).await;
        driver.continues(Performed::Begun).await;
        assert_eq!(driver.commit(replied(vec![text("Hi.")])).await, Commit::Closed { opened: false });
        // The test holds the lock on the conversation's row. Both tasks wait for it and get it in order of
        // arrival.
        let mut lock = world.database.pool.begin().await.unwrap();
        sqlx::query("select 1 from conversation_counters for update").execute(&mut *lock).await.unwrap();
        let store = world.store.clone();
        let send = || {
            let store = store.clone();
            tokio::spawn(async move { store.wake(&chat("c1"), &message("two")).await.unwrap().session_id })
        };
        let begin = || {
            let store = store.clone();
            tokio::spawn(async move { store.restart(&chat("c1"), None).await.unwrap().session_id })
        };
        let waits = async |number: i64| {
            crate::support::eventually("someone to wait for the lock", || async {
                let waiting = world
                    .one("select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()")
                    .await;
                (waiting == number).then_some(())
            })
            .await;
        };
        let (sent, begun);
        if message_first {
            sent = send();
            waits(1).await;
            begun = begin();
        } else {
            begun = begin();
            waits(1).await;
            sent = send();
        }
        waits(2).await;
        lock.commit().await.unwrap();
        let (sent, new) = (sent.await.unwrap(), begun.await.unwrap());
        // A message that has looked before the new session was there goes to the old one.
        assert!(sent == old || (!message_first && sent == new), "{sent}");
        assert_eq!(world.count("session_inbox").await, 2);
        let third = world.store.wake(&chat("c1"), &message("three")).await.unwrap().session_id;
        assert_eq!(third, new, "a later message");
    }
}

#[tokio::test]
async fn a_message_that_is_sent_again_after_a_new_beginning_has_its_first_answer() {
    let world = World::new().await;
    let first = world.store.wake(&chat("c1"), &keyed("k1", "one")).await.unwrap();
    let begun = world.store.restart(&chat("c1"), None).await.unwrap();
    let again = world.store.wake(&chat("c1"), &keyed("k1", "one")).await.unwrap();
    assert!(again.duplicate);
    assert_eq!((&again.session_id, &again.run_id), (&first.session_id, &first.run_id));
    let other = world.store.wake(&chat("c1"), &keyed("k1", "another")).await;
    assert!(matches!(other, Err(Error::KeyReused { .. })), "{other:?}");
    let next = world.store.wake(&chat("c1"), &keyed("k2", "two")).await.unwrap();
    assert_eq!(next.session_id, begun.session_id);
}

#[tokio::test]
async fn an_answer_is_taken_where_a_question_is_open_and_nowhere_else() {
    let world = World::new().await;
    let session_id = world.wake("c1", "A table, please.").await;
    let refused = |answered: wakeful_store::Result<wakeful_store::wake::Woken>| {
        assert!(matches!(answered, Err(Error::Conflict { .. })), "{answered:?}");
    };
    refused(world.store.answer(&session_id, &message("Four.")).await);
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    let question = call("call_a", "ask_user");
    driver.continues(replied(vec![asks(&question)])).await;
    refused(world.store.answer(&session_id, &message("Four.")).await);
    assert_eq!(driver.commit(asked(&question)).await, Commit::Closed { opened: false });

    let answered = world.store.answer(&session_id, &keyed("k", "Four.")).await.unwrap();
    assert_eq!(answered.outcome, Acceptance::Delivered);
    let again = world.store.answer(&session_id, &keyed("k", "Four.")).await.unwrap();
    assert!(again.duplicate, "its answer was lost, and it is sent again");
    refused(world.store.answer(&session_id, &message("Five.")).await);
    assert_eq!(world.one("select count(*) from session_inbox").await, 2, "a refusal leaves no row");
    let missing = world.store.answer("sess_none", &message("Four.")).await;
    assert!(matches!(missing, Err(Error::NotFound { .. })), "{missing:?}");
}

#[tokio::test]
async fn the_messages_of_the_steps_are_the_transcript_and_fold_into_the_warm_state() {
    let world = World::new().await;
    // Another session of the conversation takes message numbers in between.
    let session_id = world.wake("c1", "Reserve a table and write to Bob.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    for turn in 0..3 {
        driver.sends_mail(&format!("call_{turn}")).await;
        let write = call(&format!("call_w{turn}"), "write_file");
        driver.continues(replied(vec![text("A note."), asks(&write)])).await;
        let details = json!({"type": "fileWritten", "path": "notes.md", "bytes": turn, "sha256": "00"});
        driver.continues(Performed::Called(vec![performed(&write, done("Written.", Some(details)))])).await;
    }
    assert_eq!(driver.commit(replied(vec![text("Done.")])).await, Commit::Closed { opened: false });
    let other = world.store.wake(&new_session("c1", "other"), &message("Hello")).await.unwrap().session_id;
    let mut between = world.drive(&other).await;
    between.continues(Performed::Begun).await;
    assert_eq!(between.commit(replied(vec![text("Hello.")])).await, Commit::Closed { opened: false });
    world.send(&session_id, "Again.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    driver.sends_mail("call_last").await;

    let steps = world.store.steps(&session_id, None, 100).await.unwrap();
    assert_eq!(steps.len(), 8);
    let stored = world.store.hydrate(&session_id).await.unwrap().records;
    let between = |from: i64, to: i64| -> Vec<_> {
        let records = stored.iter();
        records
            .filter(|record| record.message_number > from && record.message_number <= to)
            .cloned()
            .collect()
    };
    let (mut records, mut state) = (Vec::new(), State::new());
    for step in &steps {
        let (from, to) = (step.from_message_number, step.to_message_number);
        let of_step = between(from, to);
        assert!(!of_step.is_empty());
        state = derive::fold(state, &of_step);
        records.extend(of_step);
    }
    assert_eq!(records, driver.session.records, "and none of the other session's");
    assert_eq!(state, driver.session.state);
    assert_eq!(state.len(), 5, "four emails and a file: {state:?}");
}

#[tokio::test]
async fn the_conversations_and_the_spaces_sessions_are_found_by_their_indexes() {
    let world = World::new().await;
    let fill = "insert into conversation_sessions (session_id, conversation_id, space_id, mailbox_id, trigger_type,
            trigger_id, agent, model_id, model_context_window, status)
        select 'sess_' || n, 'default/c' || n / 10, 's' || n / 100, 'm', 'chat', n::text, 'a', 'm', 1, 'completed'
        from generate_series(1, 5000) n";
    world.run_sql(fill).await;
    world.run_sql("analyze conversation_sessions").await;
    for (index, asked) in [
        ("idx_sessions_conversation", "where conversation_id = 'default/c7' order by ordinal desc limit 1"),
        (
            "idx_sessions_space",
            "where space_id = 's7' and mailbox_id = 'm' order by started_at desc limit 10",
        ),
    ] {
        let sql = format!("explain select session_id from conversation_sessions {asked}");
        let plan: Vec<String> =
            sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_all(&world.database.pool).await.unwrap();
        assert!(plan.iter().any(|line| line.contains(index)), "{plan:?}");
        assert!(!plan.iter().any(|line| line.contains("Sort")), "in the order of the index: {plan:?}");
    }
}
