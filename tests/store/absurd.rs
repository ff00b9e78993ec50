//! Tasks of Absurd become sessions: on tables written here from the facts of Absurd 0.1 and of `durable`. They are not Absurd's own
//! files; `tests/peers/absurd/` runs against the real one.

mod proof;
mod races;
mod slim;
mod versions;

use super::made_up::{message, new_session};
use super::world::World;
use crate::support::Database;
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;
use wakeful_store::absurd::{Compared, GivenBack, Import, ImportRow, May, Outcome, Source, Unparked};
use wakeful_workflow::session::SessionStatus;

/// The tables of the queue `q` as Absurd 0.1 (`absurd`) or `durable` has them. `durable` has no status of a checkpoint and no
/// idempotency key.
fn tables(schema: &str) -> String {
    let (status, key) = match schema {
        "absurd" => ("status text not null default 'committed',", ", idempotency_key text unique"),
        _ => ("", ", parent_task_id uuid"),
    };
    format!(
        "create schema {schema};
        create table {schema}.queues (queue_name text primary key, created_at timestamptz default now());
        insert into {schema}.queues values ('q');
        create table {schema}.t_q (task_id uuid primary key, task_name text not null, params jsonb not null, headers jsonb,
            retry_strategy jsonb, max_attempts integer, cancellation jsonb, enqueue_at timestamptz not null default now(),
            first_started_at timestamptz, state text not null, attempts integer not null default 1, last_attempt_run uuid,
            completed_payload jsonb, cancelled_at timestamptz {key});
        create table {schema}.r_q (run_id uuid primary key, task_id uuid not null, attempt integer not null, state text not null,
            claimed_by text, claim_expires_at timestamptz, available_at timestamptz not null, wake_event text,
            event_payload jsonb, started_at timestamptz, completed_at timestamptz, failed_at timestamptz, result jsonb,
            failure_reason jsonb, created_at timestamptz not null default now());
        create table {schema}.c_q (task_id uuid not null, checkpoint_name text not null, state jsonb, {status} owner_run_id uuid,
            updated_at timestamptz not null default clock_timestamp(), primary key (task_id, checkpoint_name));
        create table {schema}.e_q (event_name text primary key, payload jsonb, emitted_at timestamptz not null default now());
        create table {schema}.w_q (task_id uuid not null, run_id uuid not null, step_name text not null, event_name text not null,
            timeout_at timestamptz, created_at timestamptz not null default now(), primary key (run_id, step_name));"
    )
}

/// A database with such tables.
struct Theirs {
    database: Database,
    schema: &'static str,
}

impl Theirs {
    async fn new(schema: &'static str) -> Theirs {
        let theirs = Theirs { database: Database::without_schema().await, schema };
        theirs.run(&tables(schema)).await;
        theirs
    }

    async fn run(&self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&self.database.pool).await.expect(sql);
    }

    /// A task of this number with these checkpoints. `run` is its run's state and what follows `available_at`.
    async fn task(&self, n: u8, state: &str, run: &str, checkpoints: &[(&str, Value)]) -> String {
        let (task, run_id) = (id(n, 1), id(n, 2));
        let schema = self.schema;
        self.run(&format!(
            "insert into {schema}.t_q (task_id, task_name, params, state, last_attempt_run) values ('{task}', 'agent',
                '{{\"prompt\": \"Question {n}\"}}', '{state}', '{run_id}');
            insert into {schema}.r_q (run_id, task_id, attempt, state, available_at, wake_event, failure_reason)
            values ('{run_id}', '{task}', 1, {run});"
        ))
        .await;
        for (name, state) in checkpoints {
            let sql = format!(
                "insert into {schema}.c_q (task_id, checkpoint_name, state, owner_run_id) values ('{task}', $1, $2, '{run_id}')"
            );
            sqlx::query(AssertSqlSafe(sql))
                .bind(name)
                .bind(state)
                .execute(&self.database.pool)
                .await
                .unwrap();
        }
        task
    }

    async fn source(&self, may: May) -> Source {
        Source::open(&self.database.url, "wakeful test", may).await.unwrap()
    }
}

fn id(n: u8, kind: u8) -> String {
    format!("0199000{kind}-0000-7000-8000-0000000000{n:02x}")
}

fn turn(step: usize) -> Value {
    json!({"newMessages": [
        {"role": "assistant", "content": [{"type": "tool-call", "toolCallId": format!("c{step}"), "toolName": "look", "input": {}}]},
        {"role": "tool", "content": [{"type": "tool-result", "toolCallId": format!("c{step}"), "toolName": "look",
            "output": {"type": "text", "value": format!("seen {step}")}}]}], "finishReason": "tool-calls"})
}

fn done() -> Value {
    json!({"newMessages": [{"role": "assistant", "content": "Done."}], "finishReason": "stop"})
}

const OVER: &str = "'completed', now(), null, null";

async fn import(world: &World, source: &mut Source, task: &str, stopped: bool) -> Outcome {
    let new = new_session(&format!("absurd-{task}"), task);
    let import = Import { new: &new, queue: "q", task_id: task, shape: None, records_sql: "", stopped };
    world.store.absurd_import(source, &import).await.unwrap()
}

async fn back(world: &World, source: &mut Source, row: &ImportRow) -> GivenBack {
    world.store.absurd_give_back(source, "default", "q", row).await.unwrap()
}

fn session_of(outcome: &Outcome) -> (&str, SessionStatus) {
    let Outcome::Imported(imported) = outcome else { panic!("{outcome:?}") };
    (&imported.session_id, imported.status)
}

async fn equal(world: &World, source: &mut Source) -> usize {
    let rows = world.store.absurd_imports("default", None, 100).await.unwrap();
    for row in &rows {
        let comparison = world.store.absurd_compare(source, row, None, "").await.unwrap();
        assert!(matches!(comparison.result, Compared::Equal { .. }), "{comparison:?}");
        let verified = world.store.verify(&row.session_id).await.unwrap();
        assert!(
            verified.agrees,
            "{:?}",
            verified.checks.iter().filter(|check| !check.agrees).collect::<Vec<_>>()
        );
    }
    rows.len()
}

#[tokio::test]
async fn a_finished_task_of_absurd_0_1_becomes_a_session_once() {
    let (world, theirs) = (World::new().await, Theirs::new("absurd").await);
    let mut checkpoints: Vec<(String, Value)> =
        vec![("initial-message".to_owned(), json!({"role": "user", "content": "Hi"}))];
    // Written in an order that neither the text nor the clock has.
    for step in (2..=11).rev() {
        checkpoints.push((format!("agent-loop#{step}"), if step == 11 { done() } else { turn(step) }));
    }
    checkpoints.push(("agent-loop".to_owned(), turn(1)));
    checkpoints.push(("send".to_owned(), json!({"id": 7})));
    let given: Vec<(&str, Value)> =
        checkpoints.iter().map(|(name, state)| (name.as_str(), state.clone())).collect();
    let task = theirs.task(1, "completed", OVER, &given).await;
    theirs
        .run("insert into absurd.c_q (task_id, checkpoint_name, state, status)
            select task_id, 'agent-loop#12', '{\"newMessages\": [{\"role\": \"assistant\", \"content\": \"hidden\"}]}', 'pending'
            from absurd.t_q")
        .await;
    let mut source = theirs.source(May::Read).await;
    assert_eq!((source.schema(), source.version()), ("absurd", "0.1 or older"));
    let mut other = theirs.source(May::Read).await;
    let (a, b) =
        tokio::join!(import(&world, &mut source, &task, false), import(&world, &mut other, &task, false));
    let mut outcomes = [a, b];
    outcomes.sort_by_key(|outcome| *outcome == Outcome::Already);
    let (session, status) = session_of(&outcomes[0]);
    assert_eq!((status, &outcomes[1]), (SessionStatus::Completed, &Outcome::Already));
    let hydrated = world.store.hydrate(session).await.unwrap();
    let calls: Vec<String> = hydrated
        .records
        .iter()
        .flat_map(|record| record.tool_calls())
        .map(|call| call.call_id.to_string())
        .collect();
    assert_eq!(calls, (1..=10).map(|step| format!("c{step}")).collect::<Vec<_>>());
    assert_eq!((hydrated.records.len(), &hydrated.state["absurd/send"]), (22, &json!({"id": 7})));
    let steps = world.store.steps(session, None, 100).await.unwrap();
    assert!(steps.len() == 11 && steps.iter().all(|step| step.usage.is_null()));
    assert_eq!(equal(&world, &mut source).await, 1);
    assert_eq!(world.journal(session).await[0], "SESSION_IMPORTED");
}

#[tokio::test]
async fn a_task_of_durable_is_read_by_its_times_and_numbers() {
    let (world, theirs) = (World::new().await, Theirs::new("durable").await);
    let (one, two) = ("a".repeat(64), "b".repeat(64));
    let names = [format!("agent-loop-{two}"), format!("agent-loop-{one}"), format!("agent-loop-{one}#2")];
    let task = theirs
        .task(1, "completed", OVER, &[(&names[0], turn(1)), (&names[1], turn(2)), (&names[2], done())])
        .await;
    let mut source = theirs.source(May::Read).await;
    let outcome = import(&world, &mut source, &task, false).await;
    let hydrated = world.store.hydrate(session_of(&outcome).0).await.unwrap();
    let texts: Vec<String> = hydrated.records.iter().map(|record| record.text()).collect();
    assert_eq!(texts, ["", "seen 1", "", "seen 2", "Done."]);
    assert_eq!(equal(&world, &mut source).await, 1);
}

#[tokio::test]
async fn an_open_task_stays_until_it_is_parked_and_goes_back_as_it_was() {
    let (world, theirs) = (World::new().await, Theirs::new("absurd").await);
    let sleeps =
        theirs.task(1, "sleeping", "'sleeping', '2030-01-01', null, null", &[("agent-loop", turn(1))]).await;
    let waits = theirs
        .task(2, "sleeping", "'sleeping', 'infinity', 'approved', null", &[("agent-loop", turn(1))])
        .await;
    let runs = theirs.task(3, "running", "'running', now(), null, null", &[("agent-loop", turn(1))]).await;
    theirs
        .run(&format!(
            "update absurd.t_q set cancellation = '{{\"max_duration\": 1}}';
            insert into absurd.w_q (task_id, run_id, step_name, event_name) values ('{waits}', '{}', '$awaitEvent:approved', 'approved');
            insert into absurd.e_q values ('approved', null)",
            id(2, 2)
        ))
        .await;
    let mut source = theirs.source(May::Park).await;
    for task in [&sleeps, &waits] {
        assert_eq!(import(&world, &mut source, task, false).await, Outcome::Open);
    }
    let parked = source.park("q", "agent", 100).await.unwrap();
    assert_eq!((parked.task_ids.len(), parked.running), (2, 1));
    assert_eq!(import(&world, &mut source, &runs, false).await, Outcome::Runs);
    let outcome = import(&world, &mut source, &sleeps, false).await;
    assert_eq!(session_of(&outcome).1, SessionStatus::Queued);
    let at: String = world
        .database
        .value("select run_at::text from jobs where session_id = $1", session_of(&outcome).0)
        .await;
    assert!(at.starts_with("2030-01-01"), "{at}");
    let outcome = import(&world, &mut source, &waits, false).await;
    assert_eq!(session_of(&outcome).1, SessionStatus::WaitingInput);
    assert_eq!(equal(&world, &mut source).await, 2);

    // Both go back. The event came meanwhile.
    theirs.run("update absurd.e_q set payload = '\"yes\"'").await;
    let taken = world.store.absurd_taken("default", "absurd:q", "agent", "", 10).await.unwrap();
    let mut went = Vec::new();
    for row in &taken {
        went.push(back(&world, &mut source, row).await);
    }
    assert_eq!(went, [GivenBack::Returned(Unparked::AsBefore), GivenBack::Returned(Unparked::Woken)]);
    let rows: Vec<(String, bool, bool)> = sqlx::query_as(
        "select r.state, r.available_at > '2029-01-01', t.cancellation is not null from absurd.r_q r
        join absurd.t_q t on t.task_id = r.task_id order by r.run_id",
    )
    .fetch_all(&theirs.database.pool)
    .await
    .unwrap();
    assert_eq!(rows[..2], [("sleeping".to_owned(), true, true), ("pending".to_owned(), false, true)]);
    let jobs: i64 = world.database.value("select count(*) from jobs where space_id = $1", "default").await;
    assert_eq!(jobs, 0);
    // It may be taken again, and makes another session.
    assert_eq!(source.park("q", "agent", 100).await.unwrap().task_ids.len(), 2);
    let again = import(&world, &mut source, &sleeps, false).await;
    assert_ne!(session_of(&again).0, taken[0].session_id);
}

#[tokio::test]
async fn what_ran_here_stays_here() {
    let (world, theirs) = (World::new().await, Theirs::new("absurd").await);
    for n in 1..=2 {
        theirs.task(n, "pending", "'pending', now(), null, null", &[("agent-loop", turn(1))]).await;
    }
    let mut source = theirs.source(May::Park).await;
    let parked = source.park("q", "agent", 100).await.unwrap();
    let mut sessions = Vec::new();
    for task in &parked.task_ids {
        sessions.push(session_of(&import(&world, &mut source, task, false).await).0.to_owned());
    }
    // One is claimed, the other gets a message.
    sqlx::query("update jobs set lease = nextval('leases'), attempt = 1 where session_id = $1")
        .bind(&sessions[0])
        .execute(&world.database.pool)
        .await
        .unwrap();
    world.store.send(&sessions[1], &message("One more thing.")).await.unwrap();
    for row in world.store.absurd_taken("default", "absurd:q", "agent", "", 10).await.unwrap() {
        let given = back(&world, &mut source, &row).await;
        assert!(matches!(given, GivenBack::Refused(_)), "{given:?}");
    }
    let jobs: i64 = world.database.value("select count(*) from jobs where space_id = $1", "default").await;
    assert_eq!(jobs, 2);
}

#[tokio::test]
async fn a_failed_task_can_be_retried_from_its_last_step() {
    let (world, theirs) = (World::new().await, Theirs::new("absurd").await);
    let task = theirs
        .task(1, "failed", "'failed', now(), null, '{\"message\": \"gone\"}'", &[("agent-loop", turn(1))])
        .await;
    let mut source = theirs.source(May::Read).await;
    let outcome = import(&world, &mut source, &task, false).await;
    let (session, status) = session_of(&outcome);
    assert_eq!(status, SessionStatus::Failed);
    world.store.retry(session, None).await.unwrap();
    let hydrated = world.store.hydrate(session).await.unwrap();
    assert!(hydrated.awaits_model() && hydrated.open_turn().is_none());
    assert_eq!((hydrated.last_step_number, hydrated.records.len()), (1, 2));
    let step: i64 = world.database.value("select step_number from jobs where session_id = $1", session).await;
    assert_eq!(step, 2);
}

#[tokio::test]
async fn a_task_enters_no_conversation_that_is_not_absurds() {
    let (world, theirs) = (World::new().await, Theirs::new("absurd").await);
    for n in 1..=5 {
        theirs.task(n, "completed", OVER, &[("agent-loop", done())]).await;
    }
    let mut source = theirs.source(May::Read).await;
    world.wake("chatted", "Hello?").await;
    let fill = "update conversation_counters set open_run_id = null;
        insert into conversation_counters (conversation_id, space_id, mailbox_id, user_id) values
            ('default/anns', 'default', 'default', 'ann'), ('default/telegram/7', 'default', 'default', null)";
    sqlx::raw_sql(fill).execute(&world.database.pool).await.unwrap();
    let before = world.dump().await;
    let mut enter = async |n: u8, conversation: &str| {
        let new = new_session(conversation, "task");
        let task = id(n, 1);
        let import =
            Import { new: &new, queue: "q", task_id: &task, shape: None, records_sql: "", stopped: false };
        world.store.absurd_import(&mut source, &import).await.unwrap()
    };
    for (n, conversation, why) in [
        (1, "chatted", "chatted has sessions that did not come from Absurd"),
        (2, "anns", "anns belongs to a user"),
        (3, "telegram/7", "telegram/7 belongs to a trigger"),
    ] {
        let outcome = enter(n, conversation).await;
        let Outcome::Cannot(said) = &outcome else { panic!("{outcome:?}") };
        assert!(said.contains(why), "{said}");
    }
    assert_eq!(world.dump().await, before, "nothing was written");
    // Tasks of one thread share a conversation.
    for n in 4..=5 {
        let outcome = enter(n, "thread").await;
        assert!(matches!(outcome, Outcome::Imported(_)), "{outcome:?}");
    }
}

#[tokio::test]
async fn a_cancelled_task_is_a_cancelled_session() {
    let (world, theirs) = (World::new().await, Theirs::new("absurd").await);
    let asks = json!({"newMessages": [{"role": "assistant", "content": [
        {"type": "tool-call", "toolCallId": "c1", "toolName": "look", "input": {}}]}], "finishReason": "tool-calls"});
    let task = theirs.task(1, "cancelled", "'cancelled', now(), null, null", &[("agent-loop", asks)]).await;
    let mut source = theirs.source(May::Read).await;
    let outcome = import(&world, &mut source, &task, false).await;
    let (session, status) = session_of(&outcome);
    assert_eq!(status, SessionStatus::Cancelled);
    let run: String = world
        .database
        .value("select status || ' ' || error || ' ' || (completed_at is not null) from session_runs where session_id = $1", session)
        .await;
    assert_eq!(run, "cancelled cancelled true");
    let moved: String = world
        .database
        .value(
            "select string_agg(payload ->> 'to_state', ' ' order by seq) from session_events
            where session_id = $1 and type = 'state_transition'",
            session,
        )
        .await;
    assert_eq!(moved, "queued running cancelled");
    assert_eq!(equal(&world, &mut source).await, 1);
    // A message goes on with it, and the call that Absurd may have made is not made again.
    world.store.send(session, &message("Once more.")).await.unwrap();
    let open: i64 = world
        .database
        .value("select count(*) from tool_calls where status = 'uncertain' and session_id = $1", session)
        .await;
    assert_eq!(open, 1);
}
