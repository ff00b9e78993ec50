//! Kills inside a step.

use super::{BOTH, GUARDED, IDEMPOTENT, Kill, Row, Survived, survive, survive_rows, survive_those};
use crate::support::World;
use crate::support::eventually;
use futures::future::join_all;
use serde_json::Value;

#[tokio::test]
async fn k03_a_claim_that_never_read_its_session_costs_nothing() {
    for (_, survived) in survive_rows("K3").await {
        let sql = "select count(*) from session_seed_messages where session_id = $1";
        let seeds: i64 = survived.world.database.value(sql, &survived.world.session_id).await;
        let sessions: i64 = survived
            .world
            .database
            .value("select count(*) from conversation_sessions where $1 <> ''", "all")
            .await;
        assert_eq!((sessions, seeds), (1, 1));
        assert!(survived.traces.journal("GEN_RESUMED").is_empty());
    }
}

#[tokio::test]
async fn k05_a_run_that_had_not_begun_begins_once() {
    for (_, survived) in survive_rows("K5").await {
        each_call_ran_once(&survived);
        let to = |state: &str| {
            let moves = survived.traces.journal("state_transition");
            moves.iter().filter(|one| one["to_state"] == state).count()
        };
        assert_eq!((to("running"), to("completed")), (2, 2), "once per message");
    }
}

#[tokio::test]
async fn k06_a_kill_during_the_model_call_costs_that_call_and_nothing_else() {
    for (_, survived) in survive_rows("K6").await {
        let resumed = survived.traces.journal("GEN_RESUMED");
        assert_eq!(resumed.len(), 1);
        let attempts: Vec<&Value> =
            survived.traces.journal("LLM_CALLED").into_iter().map(|called| &called["attempt"]).collect();
        let resumed_at =
            survived.traces.events.iter().position(|event| event["type"] == "GEN_RESUMED").unwrap();
        let calls_before =
            survived.traces.events[..resumed_at].iter().filter(|event| event["type"] == "LLM_CALLED").count();
        assert_eq!(attempts[calls_before - 1], 1, "the attempt that was cut off");
        assert_eq!(attempts[calls_before], 2, "the one that replaced it");
        assert_eq!(attempts.len(), 5);
        let second = survived.traces.steps.iter().filter(|step| step["attempt"] == 2).count();
        assert_eq!(second, 1, "one step took two attempts");
    }
}

#[tokio::test]
async fn k10_an_answer_that_was_not_committed_is_asked_for_again() {
    for (_, survived) in survive_rows("K10").await {
        assert_eq!(survived.traces.journal("GEN_RESUMED").len(), 1);
    }
}

#[tokio::test]
async fn k12_k13_a_kill_around_a_send_leaves_one_mail() {
    const MAIL: &[&str] = &["compose_email"];
    let kills = ["K12=1*return", "K13=1*return", "K21=1*return", "K22=2*off->1*return"];
    let survived = join_all(kills.map(|kill| survive(MAIL, Kill::At(kill)))).await;
    let undisturbed = World::undisturbed(MAIL).await;
    for survived in survived {
        let sql = "select count(*) from deliveries where session_id = $1 and status = 'sent'";
        let sent: i64 = survived.world.database.value(sql, &survived.world.session_id).await;
        // The deliverer may kill the process while the model is being asked for the reply.
        assert!(survived.repeated() <= 1);
        let bodies = survived.world.model.bodies();
        let distinct = crate::support::checker::distinct(&bodies);
        assert_eq!(distinct, undisturbed.iter().collect::<Vec<_>>(), "the same requests as undisturbed");
        assert_eq!(sent, 2, "one per message");
        assert_eq!(survived.world.mails(), 2, "one per message");
        assert_eq!(survived.traces.journal("GEN_SENT").len(), 2);
    }
}

#[tokio::test]
async fn k17_a_call_that_had_not_started_runs_once_and_the_model_is_asked_nothing_again() {
    for (_, survived) in survive_rows("K17").await {
        each_call_ran_once(&survived);
    }
}

#[tokio::test]
async fn k18_k19_a_guarded_call_that_may_have_run_is_not_run_again_and_the_model_is_told() {
    let undisturbed = World::undisturbed(GUARDED).await;
    let guarded = |row: &Row| row.tools == GUARDED;
    let survived = [survive_those("K18", guarded).await, survive_those("K19", guarded).await];
    for (_, survived) in survived.into_iter().flatten() {
        let bodies = survived.world.model.bodies();
        assert_eq!(bodies[0], undisturbed[0], "the request before the kill is unchanged");
        let next: Value = serde_json::from_str(&bodies[1]).unwrap();
        let result = next["messages"].as_array().unwrap().last().unwrap();
        assert_eq!(result["role"], "tool");
        assert!(result["content"].as_str().unwrap().contains("OUTCOME UNKNOWN"), "{result}");
        let statuses: Vec<&Value> = survived.traces.calls.iter().map(|call| &call["status"]).collect();
        assert_eq!(statuses, ["uncertain", "done"]);
    }
}

#[tokio::test]
async fn k18_k19_an_idempotent_call_that_may_have_run_is_run_again_under_the_same_id() {
    let others = |row: &Row| row.tools != GUARDED;
    let survived = [survive_those("K18", others).await, survive_those("K19", others).await];
    for (_, survived) in survived.into_iter().flatten() {
        let effects = survived.world.options.effects();
        // The last effect belongs to the second message.
        let first = &effects[..effects.len() - 1];
        assert!(first.iter().all(|line| *line == effects[0]), "one key: {effects:?}");
        assert_eq!(survived.traces.calls[0]["attempts"], 2);
    }
}

#[tokio::test]
async fn k20_of_two_calls_in_one_turn_only_the_open_one_is_recovered() {
    for (row, survived) in survive_rows("K20").await {
        if row.uncertain == 0 {
            continue;
        }
        let next: Value = serde_json::from_str(&survived.world.model.bodies()[1]).unwrap();
        let messages = next["messages"].as_array().unwrap();
        let results: Vec<&str> =
            messages[messages.len() - 2..].iter().map(|m| m["content"].as_str().unwrap()).collect();
        assert!(results[0].contains("OUTCOME UNKNOWN"), "{results:?}");
        assert_eq!(results[1], "Reserved for 2.");
    }
}

#[tokio::test]
async fn k21_a_kill_before_the_steps_commit_repeats_no_model_call_and_no_guarded_tool() {
    survive_rows("K21").await;
    // Of two calls the first to end was recorded at once, and at most the last one is open.
    let survived = survive(BOTH, Kill::At("K21=1*return")).await;
    assert_eq!(survived.repeated(), 0);
    assert_eq!(survived.world.effects("charge"), 2, "one for each message");
    let again = survived.world.effects("reserve") - 2;
    assert!(again + survived.uncertain() <= 1, "{again} repeated");
}

#[tokio::test]
async fn k22_a_kill_right_after_a_commit_repeats_nothing() {
    for (row, survived) in survive_rows("K22").await {
        each_call_ran_once(&survived);
        // The commits that begin a run and end a step also record the intent of the next model call, as at K6.
        // The next worker cannot know that the call was not made.
        let records_intent = matches!(row.kill, Kill::At("K22=1*return" | "K22=2*off->1*return"));
        assert_eq!(survived.traces.journal("GEN_RESUMED").len(), usize::from(records_intent), "{row:?}");
    }
}

fn each_call_ran_once(survived: &Survived) {
    assert_eq!(survived.world.options.effects().len(), survived.traces.calls.len(), "each ran once");
}

#[test]
fn the_table_knows_its_tools() {
    for row in super::table::ROWS {
        assert!(row.tools.iter().all(|tool| BOTH.contains(tool)), "{row:?}");
    }
}

/// The first start of a call that an update writes waits for a lock. What is taken back is noted.
const SLOW_START: &str = "create table slow (once boolean);
    create table withdrawn (call_id text);
    create function slow_once() returns trigger language plpgsql security definer set search_path = public as $$
    begin
        if old.status = 'started' and new.status = 'invoked' then
            insert into withdrawn values (new.call_id);
        end if;
        if new.status = 'started' and not exists (select from slow) then
            insert into slow values (true);
            perform pg_advisory_xact_lock(42);
        end if;
        return new;
    end $$;
    create trigger slow_once before update of status on tool_calls for each row execute function slow_once()";

/// Holds up the first start of a call until the lease that it began under has ended.
struct SlowStart(sqlx::Transaction<'static, sqlx::Postgres>);

impl SlowStart {
    async fn new(world: &World) -> SlowStart {
        sqlx::raw_sql(SLOW_START).execute(&world.database.pool).await.unwrap();
        let mut gate = world.database.pool.begin().await.unwrap();
        sqlx::query("select pg_advisory_xact_lock(42)").execute(&mut *gate).await.unwrap();
        SlowStart(gate)
    }

    async fn ends(self, world: &World) {
        for (what, is_so) in [
            (
                "the start",
                "select count(*) from pg_locks where locktype = 'advisory' and not granted and $1 <> ''
                and database = (select oid from pg_database where datname = current_database())",
            ),
            ("the lease's end", "select count(*) from jobs where run_at < clock_timestamp() and $1 <> ''"),
        ] {
            eventually(what, async || (world.database.value::<i64>(is_so, "all").await == 1).then_some(()))
                .await;
        }
        self.0.rollback().await.unwrap();
    }
}

/// The lease as it was before the start may have ended when the start is written, though the worker has renewed it meanwhile. Then
/// the call does not run yet, and the row says so: the outcome is known.
#[tokio::test]
async fn a_guarded_call_whose_start_was_slow_runs_once_and_is_not_uncertain() {
    let mut world = World::new("slow-start", GUARDED).await;
    world.options = world
        .options
        .env("WAKEFUL_QUEUE__LEASE_S", "2")
        .env("WAKEFUL_QUEUE__HEARTBEAT_S", "0.5")
        .env("FIXTURE_POST", "guarded");
    let slow = SlowStart::new(&world).await;
    let process = world.serve().await;
    let client = process.client();
    world.begin(&client).await;
    slow.ends(&world).await;
    let traces = world.finish(&client).await;
    assert_eq!(world.database.value::<i64>("select count(*) from slow where $1 <> ''", "all").await, 1);
    assert!(traces.journal("TOOL_FAILED_UNCERTAIN").is_empty());
    assert_eq!(world.options.effects().len(), 2, "one charge for each message");
}

#[tokio::test]
async fn a_call_that_an_earlier_worker_may_have_run_is_never_said_not_to_have_run() {
    let mut world = World::new("slow-restart", IDEMPOTENT).await;
    world.options = world.options.env("WAKEFUL_QUEUE__LEASE_S", "2").env("WAKEFUL_QUEUE__HEARTBEAT_S", "0.5");
    let slow = SlowStart::new(&world).await;
    let process = world.serve_until("K19=1*return").await;
    world.begin(&process.client()).await;
    let (_, _) = process.ended().await;
    let process = world.serve().await;
    slow.ends(&world).await;
    world.finish(&process.client()).await;
    let count = async |sql| world.database.value::<i64>(sql, "all").await;
    assert_eq!(count("select count(*) from slow where $1 <> ''").await, 1, "its second start was slow");
    assert_eq!(count("select count(*) from withdrawn where $1 <> ''").await, 0);
}
