//! Retention deletes what ended long ago, and nothing else: not what a hold covers, nor a fork's parent, nor what goes on.

use crate::support::{Answer, Client, Database, ModelServer, Options, Process, eventually};
use serde_json::{Value, json};

struct World {
    database: Database,
    options: Options,
    client: Client,
    _model: ModelServer,
    _process: Process,
}

impl World {
    /// A server with this `[retention]`, whose model asks a question where the message says so, and fails where it says so.
    async fn new(retention: &str) -> World {
        let database = Database::new().await;
        database.with_roles().await;
        let model = ModelServer::start(|body, _| {
            let text = body["messages"].as_array().unwrap().last().unwrap()["content"].as_str().unwrap_or("");
            match text {
                "Ask." => Answer::call("ask_user", json!({"question": "When?"})),
                "Fail." => Answer::Error(400),
                _ => Answer::text("Done."),
            }
        })
        .await;
        let config = format!(
            "[agents.default]\nsystem_prompt = \"You are a test.\"\nmodel = \"openai/test\"\n\n[retention]\n{retention}"
        );
        let options = Options::new().config(&config).env("OPENAI_BASE_URL", &model.url);
        let process = options.serve(&database).await;
        let client = process.client();
        World { database, options, client, _model: model, _process: process }
    }

    /// A chat that ends in `status`. Returns its session.
    async fn chat(&self, conversation: &str, text: &str, status: &str) -> String {
        let body = json!({"text": text, "user_id": "ann"});
        let (_, woken) = self.client.post(&format!("/v1/chat/{conversation}/messages"), &body).await;
        let id = woken["session_id"].as_str().unwrap_or_else(|| panic!("{woken}")).to_owned();
        self.client.wait_for(&id, status).await;
        id
    }

    /// Makes the conversations as old as if the last thing in them had happened that many days ago.
    async fn age(&self, conversations: &[&str], days: i32) {
        let ids: Vec<String> = conversations.iter().map(|id| format!("default/{id}")).collect();
        eventually("every job to end", || async {
            let sql = "select count(*) from jobs where conversation_id = any($1)";
            let jobs: i64 = sqlx::query_scalar(sql).bind(&ids).fetch_one(&self.database.pool).await.unwrap();
            (jobs == 0).then_some(())
        })
        .await;
        let mut tx = self.database.pool.begin().await.unwrap();
        // Only a superuser may do this: the log is append-only.
        sqlx::query("set local session_replication_role = replica").execute(&mut *tx).await.unwrap();
        for sql in [
            "update session_events set ts = ts - make_interval(days => $2) where session_id in (
                select session_id from conversation_sessions where conversation_id = any($1))",
            "update conversation_sessions set started_at = started_at - make_interval(days => $2)
                where conversation_id = any($1)",
            "update conversation_counters set created_at = created_at - make_interval(days => $2)
                where conversation_id = any($1)",
        ] {
            sqlx::query(sql).bind(&ids).bind(days).execute(&mut *tx).await.unwrap();
        }
        tx.commit().await.unwrap();
    }

    async fn run(&self, args: &[&str], env: &[(&str, &str)]) -> (Option<i32>, Value, String) {
        let mut args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        args.extend(["-o".to_owned(), "json".to_owned()]);
        let mut options = Options { args, ..self.options.clone() };
        for (name, value) in env {
            options = options.env(name, *value);
        }
        let (status, process) = options.spawn(&self.database.url).ended().await;
        (status.code(), serde_json::from_str(&process.output()).unwrap_or_default(), process.log())
    }

    async fn retained(&self, verb: &str) -> Value {
        let (status, lines, said) = self.run(&["retention", verb], &[]).await;
        assert_eq!(status, Some(0), "{said}");
        lines
    }

    /// The conversations that are left, without their space.
    async fn left(&self) -> Vec<String> {
        let sql = "select split_part(conversation_id, '/', 2) from conversation_counters order by 1";
        sqlx::query_scalar(sql).fetch_all(&self.database.pool).await.unwrap()
    }

    /// How many rows of any table name the session.
    async fn rows_of(&self, session: &str) -> i64 {
        let sql = "select (select count(*) from session_events where session_id = $1)
            + (select count(*) from conversation_records where session_id = $1)
            + (select count(*) from session_steps where session_id = $1)
            + (select count(*) from session_runs where session_id = $1)
            + (select count(*) from session_inbox where session_id = $1)
            + (select count(*) from conversation_sessions where session_id = $1)
            + (select count(*) from session_seed_messages where session_id = $1)";
        self.database.value(sql, session).await
    }
}

#[tokio::test]
async fn what_ended_long_ago_goes_and_what_is_held_forked_waiting_or_young_stays() {
    let world = World::new("ended_days = 30\nfailed_days = 300").await;
    let done = world.chat("done", "Hello.", "completed").await;
    world.chat("young", "Hello.", "completed").await;
    world.chat("held", "Hello.", "completed").await;
    world.chat("failed", "Fail.", "failed").await;
    world.chat("asks", "Ask.", "waiting_input").await;
    let parent = world.chat("parent", "Hello.", "completed").await;
    let (status, fork) =
        world.client.post(&format!("/v1/sessions/{parent}/fork"), &json!({"at": "last-user"})).await;
    assert!(status.is_success(), "{fork}");
    world.age(&["done", "held", "failed", "asks", "parent"], 40).await;
    let hold = ["conversation", "hold", "held", "--reason", "case 1"];
    assert_eq!(world.run(&hold, &[]).await.0, Some(0));
    let before = world.left().await;

    let plan = world.retained("plan").await;
    assert_eq!(
        (&plan[0]["space"], &plan[0]["conversations"], &plan[0]["sessions"], &plan[0]["held"]),
        (&json!("default"), &json!(1), &json!(1), &json!(1)),
        "{plan}"
    );
    assert_eq!(world.left().await, before, "a plan writes nothing");
    assert!(world.rows_of(&done).await > 0);

    let ran = world.retained("run").await;
    assert_eq!((&ran[0]["conversations"], &ran[0]["held"]), (&json!(1), &json!(1)), "{ran}");
    assert!(ran[0]["rows"]["session_events"].as_i64() > Some(3), "{ran}");
    let stays: Vec<String> = before.iter().filter(|id| *id != "done").cloned().collect();
    assert_eq!(world.left().await, stays);
    assert_eq!(world.rows_of(&done).await, 0);
    let (status, verified, said) = world.run(&["session", "verify", "--all"], &[]).await;
    assert_eq!(status, Some(0), "{verified} {said}");
    let audited: i64 = world
        .database
        .value(
            "select count(*) from audit_log join erasures on erasure_id = target
                where verb = $1 and pending is null",
            "retention.run",
        )
        .await;
    assert_eq!(audited, 1, "who deleted is in the audit");
    // There is nothing more to do, and the conversation's name can be used again.
    assert_eq!(world.retained("run").await[0]["conversations"], 0);
    world.chat("done", "Hello again.", "completed").await;

    // A failed session has a rule of its own, and a parent goes after its fork.
    world.age(&["failed"], 300).await;
    let forked = fork["conversation_id"].as_str().unwrap();
    world.age(&[forked], 40).await;
    let ran = world.retained("run").await;
    assert_eq!(ran[0]["conversations"], 2, "{ran}");
    assert_eq!(world.retained("run").await[0]["conversations"], 1);
    assert_eq!(world.left().await, ["asks", "done", "held", "young"]);
}

#[tokio::test]
async fn a_message_in_the_last_moment_keeps_its_conversation_and_a_death_loses_no_row() {
    let world = World::new("ended_days = 30").await;
    let first = world.chat("c1", "Hello.", "completed").await;
    let second = world.chat("c2", "Hello.", "completed").await;
    world.age(&["c1", "c2"], 40).await;

    // A message holds the conversation's row when retention has chosen it. Retention waits, and looks again.
    let mut message = world.database.pool.begin().await.unwrap();
    let opens = "update conversation_counters set open_run_id = 'run_x' where conversation_id = 'default/c1'";
    sqlx::query(opens).execute(&mut *message).await.unwrap();
    let commits = async {
        eventually("retention to wait for the row", || async {
            let sql = "select count(*) from pg_stat_activity
                where wait_event_type = 'Lock' and query like '%lock_for_erasure%' and datname = $1";
            (world.database.value::<i64>(sql, &world.database.name).await == 1).then_some(())
        })
        .await;
        message.commit().await.unwrap();
    };
    let died = world.run(&["retention", "run"], &[("FAILPOINTS", "E2=1*return")]);
    let ((status, _, said), ()) = tokio::join!(died, commits);
    assert_eq!(status, None, "{said}");
    assert_eq!(world.left().await, ["c1", "c2"]);
    assert_eq!(world.client.get(&format!("/v1/sessions/{first}")).await.0, 200, "the first one is whole");
    assert!(world.rows_of(&second).await > 0, "the log rows are still there");

    let closes = "update conversation_counters set open_run_id = null where conversation_id = 'default/c1'";
    sqlx::query(closes).execute(&world.database.pool).await.unwrap();
    world.age(&["c1"], -40).await;
    assert_eq!(world.retained("run").await[0]["conversations"], 0, "only the first run's work is finished");
    assert_eq!(world.left().await, ["c1"]);
    assert_eq!(world.rows_of(&second).await, 0);
}

#[tokio::test]
async fn a_message_that_a_session_in_need_takes_keeps_its_conversation() {
    let world = World::new("ended_days = 30\nfailed_days = 30").await;
    let id = world.chat("c1", "Hello.", "completed").await;
    world.age(&["c1"], 40).await;
    let in_need = "update conversation_sessions set status = 'needs_attention' where session_id = $1";
    sqlx::query(in_need).bind(&id).execute(&world.database.pool).await.unwrap();
    // The message and then retention wait for the session's row.
    let mut holds = world.database.pool.begin().await.unwrap();
    let locks = "select from conversation_sessions where session_id = $1 for update";
    sqlx::query(locks).bind(&id).execute(&mut *holds).await.unwrap();
    let wait = async |number: i64| {
        eventually("a wait for the row", || async {
            let sql = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = $1";
            (world.database.value::<i64>(sql, &world.database.name).await == number).then_some(())
        })
        .await;
    };
    let body = json!({"text": "Are you there?", "user_id": "ann"});
    let message = world.client.post("/v1/chat/c1/messages", &body);
    let retained = async {
        wait(1).await;
        world.retained("run").await
    };
    let frees = async {
        wait(2).await;
        holds.rollback().await.unwrap();
    };
    let ((status, woken), ran, ()) = tokio::join!(message, retained, frees);
    assert_eq!((status.as_u16(), &woken["session_id"]), (202, &json!(id)), "{woken}");
    assert_eq!(ran[0]["conversations"], 0, "{ran}");
    assert_eq!(world.left().await, ["c1"]);
    let waiting = "select count(*) from session_inbox where session_id = $1 and status = 'pending'";
    assert_eq!(world.database.value::<i64>(waiting, &id).await, 1);
}

#[tokio::test]
async fn each_space_has_its_own_days_and_without_any_the_command_refuses() {
    let world = World::new("ended_days = 30\n[retention.spaces.default]\nended_days = 0").await;
    world.chat("c1", "Hello.", "completed").await;
    world.age(&["c1"], 4000).await;
    assert_eq!(world.retained("run").await, json!([]), "0 keeps without limit");
    assert_eq!(world.left().await, ["c1"]);

    let mut nothing = world.options.clone().env("WAKEFUL_RETENTION__ENDED_DAYS", "0");
    nothing.args = ["retention", "run"].map(str::to_owned).to_vec();
    let (status, process) = nothing.spawn(&world.database.url).ended().await;
    assert_eq!(status.code(), Some(2));
    assert!(process.log().contains("[retention]"), "{}", process.log());
}
