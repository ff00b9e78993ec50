//! Rolling deploys and rollbacks: workers with different configurations, binaries of different ages, and workers that drain.

use crate::cli::run;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, eventually};
use axum::http::StatusCode;
use serde_json::{Value, json};

/// What is configured besides the default agent of [`Options::model`].
const NEW_AGENT: &str = "[agents.new]\nmodel = \"openai/test\"\ntools = []";
/// The agent is there for another space only.
const NEW_AGENT_ELSEWHERE: &str = "[agents.new]\nmodel = \"openai/test\"\ntools = []\nspaces = [\"acme\"]";

fn options(model: &ModelServer, config: &str) -> Options {
    Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url).config(config)
}

/// Starts a process that only works.
async fn worker(options: &Options, database: &Database) -> Process {
    let process = options.clone().arg("--roles=worker").spawn(&database.url);
    process.wait_for_log("\"Working\"").await;
    process
}

async fn chat_with(client: &Client, agent: &str, conversation: &str) -> String {
    let body = json!({"user_id": "ann", "text": "Hello.", "agent": agent});
    let (status, answer) = client.post(&format!("/v1/chat/{conversation}/messages"), &body).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{answer}");
    answer["session_id"].as_str().unwrap().to_owned()
}

/// Names of the workers, once there are `count`.
async fn workers(client: &Client, count: usize) -> Vec<Value> {
    eventually("the workers' first heartbeats", || async {
        let (_, list) = client.get("/v1/workers").await;
        let all = list["items"].as_array().unwrap().clone();
        (all.len() == count).then_some(all)
    })
    .await
}

#[tokio::test]
async fn a_worker_without_the_agent_leaves_its_jobs_to_one_that_has_it_and_fails_nothing() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Done.")]).await;
    let (new, old) = (options(&model, NEW_AGENT), options(&model, NEW_AGENT_ELSEWHERE));
    let api = new.clone().arg("--roles=api").serve(&database).await;
    let client = api.client();
    let old_worker = worker(&old, &database).await;

    let waits = chat_with(&client, "new", "c1").await;
    let ends = chat_with(&client, "new", "c2").await;
    for id in [&waits, &ends] {
        eventually("the worker to leave the step", || async {
            (client.session(id).await["job"]["held_by"] == "lacks:new").then_some(())
        })
        .await;
    }
    let cli = async |args: &[&str]| run(&new, &database.url, args).await;
    let why = cli(&["session", "why", &waits]).await;
    assert!(why.out.contains("no live worker has agent new"), "{}", why.out);
    assert!(
        why.out.contains("[agents.new]") && why.out.contains(&format!("session cancel {waits}")),
        "{}",
        why.out
    );
    let doctor = cli(&["doctor"]).await;
    assert!(
        doctor.out.contains("no live worker has agent new: 2 sessions of space default wait"),
        "{}",
        doctor.out
    );
    let list = cli(&["session", "list"]).await;
    assert!(list.out.contains("waits for a worker that has agent new"), "{}", list.out);
    // A cancel needs no agent.
    let (status, _) = client.post(&format!("/v1/sessions/{ends}/cancel"), &json!({})).await;
    assert_eq!(status, StatusCode::ACCEPTED);
    client.wait_for(&ends, "cancelled").await;
    assert_eq!(model.bodies().len(), 0);

    let new_worker = worker(&new, &database).await;
    client.wait_for(&waits, "completed").await;
    // Both take work now, and neither fails any.
    let mut sessions = Vec::new();
    for n in 0..12 {
        let agent = if n % 2 == 0 { "new" } else { "default" };
        sessions.push(chat_with(&client, agent, &format!("both{n}")).await);
    }
    for id in &sessions {
        client.wait_for(id, "completed").await;
    }
    let died: i64 =
        database.value("select count(*) from session_events where type = $1", "STEP_FAILED").await;
    assert_eq!(died, 0);
    for process in [old_worker, new_worker] {
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn a_schema_that_serves_an_older_binary_lets_it_go_on_and_says_so() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Done.")]).await;
    let options = options(&model, "");
    let before = options.serve(&database).await;
    // A newer binary migrates. To its schema, this binary is the older one.
    let newer = "insert into _sqlx_migrations (version, description, success, checksum, execution_time)
        values (99990101000001, 'of tomorrow', true, 'x', 1)";
    sqlx::raw_sql(newer).execute(&database.pool).await.unwrap();
    let after = options.serve(&database).await;
    after.wait_for_log("serves it").await;
    for (process, conversation) in [(&before, "c1"), (&after, "c2")] {
        let client = process.client();
        let answer = client.chat(conversation, "Hello.").await;
        client.wait_for(answer["session_id"].as_str().unwrap(), "completed").await;
    }
    let cli = async |args: &[&str]| run(&options, &database.url, args).await;
    let check = cli(&["migrate", "--check"]).await;
    assert_eq!(check.code, 0, "{}", check.err);
    assert!(check.out.contains("newer than this binary and serves it"), "{}", check.out);
    assert!(check.out.contains("99990101000001"), "{}", check.out);
    let migrate = cli(&["migrate"]).await;
    assert_eq!((migrate.code, migrate.out.as_str()), (0, "0 migrations applied\n"), "{}", migrate.err);
    let doctor = cli(&["doctor"]).await;
    assert!(doctor.out.contains("warning\tschema\tthe schema is newer"), "{}", doctor.out);

    // The schema serves it no more: it neither starts nor migrates.
    let contracted = "update schema_serves set oldest = 99990101000001";
    sqlx::raw_sql(contracted).execute(&database.pool).await.unwrap();
    for args in [&["serve"][..], &["migrate"], &["migrate", "--check"], &["session", "list"]] {
        let ran = cli(args).await;
        assert_eq!((ran.code, ran.out.as_str()), (6, ""), "{args:?}: {}", ran.err);
        assert!(ran.err.contains("does not serve it any more"), "{}", ran.err);
        assert!(ran.err.contains("serves binaries from 99990101000001 on"), "{}", ran.err);
    }
    for process in [before, after] {
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn a_migration_does_not_leave_live_older_workers_behind_unless_it_is_told_to() {
    let database = Database::new().await;
    let options = Options::new().model("scripted/demo");
    let cli = async |args: &[&str]| run(&options, &database.url, args).await;
    let check = cli(&["migrate", "--check"]).await;
    assert!(check.out.contains("the schema is this binary's"), "{}", check.out);
    // This binary's schema serves less than the present one, and an older worker is alive.
    let older = "update schema_serves set oldest = 1;
        insert into workers (worker_id, host, pid, version, concurrency, schema_number)
        values ('old-1', 'host', 1, '0.0.9', 4, 5)";
    sqlx::raw_sql(older).execute(&database.pool).await.unwrap();
    let check = cli(&["migrate", "--check"]).await;
    assert!(check.out.contains("1 live workers are older than this binary"), "{}", check.out);
    let refused = cli(&["migrate"]).await;
    assert_eq!(refused.code, 6, "{}", refused.out);
    assert!(refused.err.contains("old-1") && refused.err.contains("wakeful worker drain"), "{}", refused.err);
    let oldest =
        async || database.value::<i64>("select oldest from schema_serves where $1 <> ''", "all").await;
    assert_eq!(oldest().await, 1);
    assert_eq!(cli(&["migrate", "--leave-behind"]).await.code, 0);
    assert_eq!(oldest().await, wakeful_store::schema::OLDEST);
    assert_eq!(cli(&["migrate"]).await.code, 0, "the schema serves no less than before");
}

#[tokio::test]
async fn a_worker_that_is_drained_finishes_what_it_holds_takes_nothing_more_and_ends() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Done.")]).await;
    let options = options(&model, "");
    let api = options.clone().arg("--roles=api").serve(&database).await;
    let client = api.client();
    model.hold();
    let drained = worker(&options, &database).await;
    let name = workers(&client, 1).await[0]["worker_id"].as_str().unwrap().to_owned();
    let held = chat_with(&client, "default", "c1").await;
    model.asked(1).await;

    let cli = async |args: &[&str]| run(&options, &database.url, args).await;
    let asked =
        cli(&["worker", "drain", &name[..name.len() - 1], "--reason", "a deploy", "-o", "json"]).await;
    assert_eq!(asked.json(), json!({"workers": [name], "ended": false}), "{}", asked.err);
    drained.wait_for_log("Draining").await;
    let list = cli(&["worker", "list"]).await;
    assert!(list.out.contains("draining"), "{}", list.out);
    let (_, listed) = client.get("/v1/workers").await;
    assert!(listed["items"][0]["drain_asked_at"].is_string(), "{listed}");
    let waits = chat_with(&client, "default", "c2").await;
    model.release();
    client.wait_for(&held, "completed").await;
    let (status, drained) = drained.ended().await;
    assert!(status.success(), "{}", drained.log());
    assert_eq!(client.session(&waits).await["status"], "queued", "it took nothing more");
    assert_eq!(model.bodies().len(), 1);

    // The next one takes it, and is drained over the API.
    let next = worker(&options, &database).await;
    client.wait_for(&waits, "completed").await;
    let name = workers(&client, 1).await[0]["worker_id"].as_str().unwrap().to_owned();
    let (status, body) = client.post(&format!("/v1/workers/{name}/drain"), &json!({"reason": "done"})).await;
    assert_eq!((status, &body["state"]), (StatusCode::ACCEPTED, &json!("draining")), "{body}");
    assert!(next.ended().await.0.success());
    let (status, _) = client.post(&format!("/v1/workers/{name}/drain"), &json!({})).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert_eq!(cli(&["worker", "drain", "none-such"]).await.code, 3);

    let last = worker(&options, &database).await;
    workers(&client, 1).await;
    let all = cli(&["worker", "drain", "--all", "--wait"]).await;
    assert!(all.out.contains("Drained 1 worker"), "{}{}", all.out, all.err);
    assert!(last.ended().await.0.success());
    let audited: Vec<String> = database
        .value(
            "select array(select actor_kind || ' ' || outcome || ' ' || coalesce(reason, '-') from audit_log
                where verb = $1 order by audit_id)",
            "worker.drain",
        )
        .await;
    let of = |kind: &str| audited.iter().filter(|row| row.starts_with(kind)).count();
    assert!(audited.iter().any(|row| row == "cli done a deploy"), "{audited:?}");
    assert!(audited.iter().any(|row| row.ends_with("done done")), "{audited:?}");
    assert!(of("cli") >= 2, "{audited:?}");
}

/// A deploy is a new process beside the old one, then the old one's drain. Of two configurations, one lacks an agent; of two
/// schemas, one is newer than the binary.
#[tokio::test]
#[ignore = "slow: make soak"]
async fn twenty_rolling_deploys_there_and_back_under_load_fail_no_run_and_let_no_lease_time_out() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| {
        let last = body["messages"].as_array().unwrap().last().unwrap();
        if last["role"] == "user" {
            Answer::call("reserve", json!({"persons": 2}))
        } else {
            Answer::text("Done.")
        }
    })
    .await;
    let (newer, older) = (options(&model, NEW_AGENT), options(&model, ""));
    // A lease that no drain may outlast: what times out is seen as a claim of another.
    let newer = newer.env("WAKEFUL_QUEUE__LEASE_S", "20").arg("--concurrency=4");
    let older = older.env("WAKEFUL_QUEUE__LEASE_S", "20").arg("--concurrency=4");
    let api = newer.clone().arg("--roles=api").serve(&database).await;
    let client = api.client();
    let mut sessions = Vec::new();
    let mut standing = worker(&newer, &database).await;
    for deploy in 0..20 {
        let (schema, next) = if deploy % 2 == 0 {
            let rows =
                "insert into _sqlx_migrations (version, description, success, checksum, execution_time)
                values (99990101000001, 'of tomorrow', true, 'x', 1) on conflict do nothing";
            (rows, &older)
        } else {
            ("delete from _sqlx_migrations where version = 99990101000001", &newer)
        };
        sqlx::raw_sql(schema).execute(&database.pool).await.unwrap();
        let post = async |from: usize| {
            let mut posted = Vec::new();
            for n in from..from + 5 {
                let agent = if n % 2 == 0 { "new" } else { "default" };
                posted.push(chat_with(&client, agent, &format!("d{deploy}n{n}")).await);
            }
            posted
        };
        sessions.extend(post(0).await);
        let began = worker(next, &database).await;
        sessions.extend(post(5).await);
        standing.signal(libc::SIGTERM);
        let (status, ended) = standing.ended().await;
        assert!(status.success(), "{}", ended.log());
        sessions.extend(post(10).await);
        standing = began;
    }
    // Whatever waits for the new agent goes on with it.
    let last = worker(&newer, &database).await;
    for id in &sessions {
        client.wait_for(id, "completed").await;
    }
    let wrong: Value = database
        .value(
            "select json_build_object(
                'failed runs', (select count(*) from session_runs where status <> 'completed'),
                'failed steps', (select count(*) from session_events where type in ('RUN_FAILED', 'GEN_RESUMED')),
                'second attempts', (select count(*) from session_steps where attempt > 1),
                'jobs', (select count(*) from jobs where kind = 'step'))
            where $1 <> ''",
            "all",
        )
        .await;
    assert!(wrong.as_object().unwrap().values().all(|count| count == 0), "{wrong}");
    eprintln!("20 deploys, {} runs completed", sessions.len());
    for process in [standing, last] {
        assert!(process.terminate().success());
    }
}
