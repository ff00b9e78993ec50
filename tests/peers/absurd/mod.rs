//! Out of a real Absurd: its schema as its own program has it, filled and worked by its own SDK.

mod live;
mod stage;
mod versions;

use crate::support::{Database, Options};
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;
use stage::{Peer, absurd, command, count, model, options, with_args};
use std::collections::BTreeMap;

/// What the sessions of a database hold, by task: to compare two imports.
async fn fingerprint(database: &Database) -> BTreeMap<String, String> {
    let rows: Vec<(String, String)> = sqlx::query_as(
        "select i.task_id, s.status || ' ' || s.last_message_number - s.base_message_number || ' ' || s.last_step_number || ' ' ||
            md5(coalesce((select string_agg(r.role || r.content::text || r.details::text, ',' order by r.message_number)
                from conversation_records r where r.session_id = s.session_id), '')) || ' ' || s.state::text
        from absurd_imports i join conversation_sessions s on s.session_id = i.session_id",
    )
    .fetch_all(&database.pool)
    .await
    .unwrap();
    let tasks = rows.len();
    let by_task: BTreeMap<String, String> = rows.into_iter().collect();
    assert_eq!(by_task.len(), tasks, "no task came twice");
    let sessions = count(&database.pool, "select count(*) from conversation_sessions").await;
    assert_eq!(sessions, tasks as i64, "no session without its task");
    by_task
}

#[tokio::test]
#[ignore = "needs Absurd: make test-peers"]
async fn a_thousand_tasks_come_over_and_each_is_equal() {
    let (peer, database, model) = (Peer::filled(1000).await, Database::new().await, model().await);
    let options = options(&model);
    let over = peer.count("select (select count(*) from absurd.t_default where state in ('completed', 'failed', 'cancelled')) + (select count(*) from absurd.t_parted where state in ('completed', 'failed', 'cancelled'))").await;

    let scan = absurd(&options, &peer, &database, &["scan"]).await;
    assert_eq!(scan.code, Some(0), "{}", scan.errors);
    assert_eq!(scan.json["schema"], "absurd");
    assert_eq!(
        database.rows().await.values().sum::<i64>(),
        Database::new().await.rows().await.values().sum::<i64>()
    );

    let imported = absurd(&options, &peer, &database, &["import"]).await;
    println!("import: {:#}", imported.json);
    // One task is not an agent. It is named.
    assert_eq!(imported.code, Some(1), "{}", imported.errors);
    let reasons = imported.json["cannot_come"].as_object().unwrap();
    assert_eq!(reasons.len(), 1, "{reasons:?}");
    assert_eq!(reasons.values().next().unwrap()["first"], json!([peer.id("report")]));
    assert_eq!(imported.json["imported"], over - 1);
    assert_eq!(imported.json["running"], 1);
    // Six wait or nap, and one is pending. Absurd may run them.
    assert_eq!(imported.json["open"], 7);

    let verified = absurd(&options, &peer, &database, &["verify"]).await;
    println!("verify: {:#}", verified.json);
    assert_eq!(verified.code, Some(0), "{}{}", verified.json, verified.errors);
    assert_eq!((&verified.json["compared"], &verified.json["equal"]), (&json!(over - 1), &json!(over - 1)));
    let ours = command(&options, &database, &["session", "verify", "--all", "-o", "json"]).await;
    assert_eq!(ours.code, Some(0), "{}", ours.json);

    particular_tasks(&peer, &database).await;
    damage_is_found(&options, &peer, &database).await;
    hydration_side_by_side(&peer, &database).await;

    // The same command again has nothing to do.
    let before = fingerprint(&database).await;
    let again = absurd(&options, &peer, &database, &["import"]).await;
    assert_eq!((&again.json["imported"], &again.json["already"]), (&json!(0), &json!(over - 1)));
    assert_eq!(fingerprint(&database).await, before);
}

async fn session_of(database: &Database, task_id: &str) -> String {
    database.value("select session_id from absurd_imports where task_id = $1", task_id).await
}

async fn particular_tasks(peer: &Peer, database: &Database) {
    // Hidden checkpoints, and an event that came.
    let hidden = session_of(database, peer.id("hidden")).await;
    let texts: String = database
        .value("select string_agg(content::text, ' ' order by message_number) from conversation_records where session_id = $1", &hidden)
        .await;
    assert!(
        !texts.contains("hidden") && !texts.contains("pending") && texts.contains("Sunny. 🌞"),
        "{texts}"
    );
    let by: String = database
        .value("select (state -> ('absurd/' || k)) ->> 'by' from conversation_sessions, lateral (select substr(key, 8) as k from jsonb_object_keys(state) key where key like 'absurd/$awaitEvent:%') w where session_id = $1", &hidden)
        .await;
    assert_eq!(by, "ann");
    // NUL and lone surrogates: Absurd cannot hold them, so its step has failed.
    for name in ["nul", "lone"] {
        let error: String = database
            .value(
                "select error from conversation_sessions where session_id = $1",
                &session_of(database, peer.id(name)).await,
            )
            .await;
        assert!(
            error.contains("unicode") || error.contains("Unicode") || error.contains("json"),
            "{name}: {error}"
        );
    }
    let big: i64 = database
        .value(
            "select max(octet_length(content::text))::bigint from conversation_records where session_id = $1",
            &session_of(database, peer.id("big")).await,
        )
        .await;
    assert!(big > 5 << 20, "{big}");
    // The tenth step follows the ninth.
    let longest = session_of(database, peer.id("longest")).await;
    let steps: Vec<String> = sqlx::query_scalar(
        "select details -> 'absurd' ->> 'checkpoint' from conversation_records
        where session_id = $1 and role = 'assistant' order by message_number",
    )
    .bind(&longest)
    .fetch_all(&database.pool)
    .await
    .unwrap();
    let right: Vec<String> =
        (1..=200).map(|n| if n == 1 { "agent-loop".to_owned() } else { format!("agent-loop#{n}") }).collect();
    assert_eq!(steps, right);
    let first: String = database
        .value("select type || ' ' || (payload ->> 'task_name') from session_events where session_id = $1 and seq = 1", &longest)
        .await;
    assert_eq!(first, "SESSION_IMPORTED weather-agent");
    let unknown: i64 = database
        .value("select count(*) from session_steps where session_id = $1 and usage_unknown", &longest)
        .await;
    assert_eq!(unknown, 200);
    let cancelled: String = database
        .value(
            "select status || ': ' || error from conversation_sessions where session_id = $1",
            &session_of(database, peer.id("cancelled")).await,
        )
        .await;
    assert_eq!(cancelled, "cancelled: cancelled");
    let own: i64 = database
        .value(
            "select total_input_tokens from conversation_sessions where session_id = $1",
            &session_of(database, peer.id("own")).await,
        )
        .await;
    assert_eq!(own, (1..=12).sum::<i64>());
}

/// Changes rows as only a superuser can, one kind of damage to one session each, and undoes it.
async fn damage_is_found(options: &Options, peer: &Peer, database: &Database) {
    let session = session_of(database, peer.id("longest")).await;
    let run = async |sql: String| {
        let sql = format!("set session_replication_role = replica; {sql}");
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&database.pool).await.expect("the damage");
    };
    run(format!(
        "create table kept as select * from conversation_records where session_id = '{session}';
        create table kept_calls as select * from tool_calls where session_id = '{session}'"
    ))
    .await;
    let cases = [
        (
            "order",
            format!(
                "update conversation_records r set content = o.content, role = o.role, details = o.details
            from kept o where r.session_id = '{session}' and r.session_id = o.session_id
                and r.message_number in (12, 14) and o.message_number = 26 - r.message_number"
            ),
        ),
        (
            "missing",
            format!(
                "delete from conversation_records where session_id = '{session}' and message_number = 20"
            ),
        ),
        (
            "call ids",
            format!(
                "update conversation_records set content = replace(content::text, '\"call_1', '\"other_1')::json
            where session_id = '{session}' and message_number = 30"
            ),
        ),
        (
            "ledger",
            format!(
                "update tool_calls set call_id = 'other' where session_id = '{session}' and call_id like '%\\_7'"
            ),
        ),
        (
            "differs",
            format!(
                "update conversation_records set content = replace(content::text, 'Step 9', 'Step 8')::json
            where session_id = '{session}'"
            ),
        ),
        (
            "state",
            format!(
                "update conversation_sessions set state = state || '{{\"x\": 1}}' where session_id = '{session}'"
            ),
        ),
    ];
    for (what, damage) in cases {
        run(damage).await;
        // The first among all, the others by their task.
        let all: &[&str] = if what == "order" { &["verify"] } else { &["verify", peer.id("longest")] };
        let verified = absurd(options, peer, database, all).await;
        assert_eq!(verified.code, Some(8), "{what}: {}", verified.json);
        let differ = verified.json["differ"].as_array().unwrap();
        assert_eq!((differ.len(), &differ[0]["session_id"]), (1, &json!(session)), "{what}");
        let found: Vec<&str> = differ[0]["differences"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["what"].as_str().unwrap())
            .collect();
        println!("{what}: found {found:?}");
        assert!(found.contains(&what), "{what}: {found:?}");
        run(format!(
            "delete from conversation_records where session_id = '{session}';
            insert into conversation_records select * from kept;
            delete from tool_calls where session_id = '{session}';
            insert into tool_calls select * from kept_calls;
            update conversation_sessions set state = state - 'x' where session_id = '{session}'"
        ))
        .await;
    }
    run("drop table kept; drop table kept_calls".to_owned()).await;
    assert_eq!(absurd(options, peer, database, &["verify", "--sample", "50"]).await.code, Some(0));
}

async fn hydration_side_by_side(peer: &Peer, database: &Database) {
    let task = peer.id("longest");
    let theirs = peer.node("resume", &[("TASK", task)]).await;
    let store = database.store().await;
    let session = session_of(database, task).await;
    let mut best = f64::MAX;
    for _ in 0..10 {
        let began = std::time::Instant::now();
        let hydrated = store.hydrate(&session).await.unwrap();
        best = best.min(began.elapsed().as_secs_f64() * 1000.0);
        assert_eq!(hydrated.records.len(), 400);
    }
    println!("resume of 200 steps: Absurd's SDK {theirs}, hydration here {best:.1} ms (in this build)");
    store.close().await;
}

#[tokio::test]
#[ignore = "needs Absurd: make test-peers"]
async fn killed_at_twenty_instants_and_twice_at_once_it_is_the_same_import() {
    let (peer, model) = (Peer::filled(120).await, model().await);
    let options = options(&model);
    let whole = Database::new().await;
    absurd(&options, &peer, &whole, &["import", "--parallel", "1"]).await;
    let right = fingerprint(&whole).await;

    let database = Database::new().await;
    let mut killed = 0;
    for (instant, point) in (0..20).zip(["K70", "K71", "K72", "K73"].into_iter().cycle()) {
        // Each kill lets a few more tasks through.
        let point = format!("{point}={}*off->1*return", instant % 7);
        let args = [
            "absurd",
            "--from",
            peer.database.url.as_str(),
            "import",
            "--parallel",
            if instant % 2 == 0 { "1" } else { "3" },
        ];
        let (status, _) =
            with_args(&options, &args).env("FAILPOINTS", point).spawn(&database.url).ended().await;
        killed += i32::from(status.code().is_none());
        for (task, session) in fingerprint(&database).await {
            assert_eq!(right.get(&task), Some(&session), "half a session after kill {instant}");
        }
    }
    assert_eq!(killed, 20);
    println!("after 20 kills: {} of {} tasks", fingerprint(&database).await.len(), right.len());
    absurd(&options, &peer, &database, &["import"]).await;
    assert_eq!(fingerprint(&database).await, right);

    let both = Database::new().await;
    let args = ["absurd", "--from", peer.database.url.as_str(), "-o", "json", "import"];
    let first = with_args(&options, &args).spawn(&both.url);
    let second = with_args(&options, &args).spawn(&both.url);
    let (a, b) = tokio::join!(first.ended(), second.ended());
    let imported =
        |output: &str| serde_json::from_str::<Value>(output).unwrap()["imported"].as_i64().unwrap();
    println!("at once: {} and {} imported", imported(&a.1.output()), imported(&b.1.output()));
    assert_eq!(imported(&a.1.output()) + imported(&b.1.output()), right.len() as i64);
    assert_eq!(fingerprint(&both).await, right);
    assert_eq!(absurd(&options, &peer, &both, &["verify"]).await.code, Some(0));
}

#[tokio::test]
#[ignore = "needs Absurd: make test-peers"]
async fn open_tasks_go_on_here_or_go_back() {
    let (peer, database, model) = (Peer::filled(6).await, Database::new().await, model().await);
    let options = options(&model);
    absurd(&options, &peer, &database, &["import"]).await;
    let take = async |name: &str| {
        absurd(&options, &peer, &database, &["take", name, "--queue", "default", "--wait", "0"]).await
    };
    let row = async |id: &str| -> (String, String) {
        sqlx::query_as("select r.state || coalesce(' ' || r.wake_event, ''), r.available_at::text from absurd.r_default r where task_id = $1::uuid order by attempt desc limit 1")
            .bind(id).fetch_one(&peer.database.pool).await.unwrap()
    };
    let names = ["wait weather-agent", "nap weather-agent", "pending"];
    let mut before = BTreeMap::new();
    for name in names {
        before.insert(name, row(peer.id(name)).await);
    }
    let taken = take("weather-agent").await;
    // One runs in Absurd, by a worker that never ends it.
    assert_eq!(
        (taken.code, &taken.json["imported"], &taken.json["left_running"]),
        (Some(1), &json!(3), &json!(1)),
        "{}{}",
        taken.json,
        taken.errors
    );
    assert_eq!(taken.json["by_status"], json!({"queued": 2, "waiting_input": 1}));
    for name in names {
        assert_eq!(row(peer.id(name)).await.1, "infinity", "{name}");
    }
    let verified = absurd(&options, &peer, &database, &["verify"]).await;
    assert_eq!(verified.code, Some(0), "{}", verified.json);
    let ours = command(&options, &database, &["session", "verify", "--all"]).await;
    assert_eq!(ours.code, Some(0), "{}", ours.json);
    let nap: bool = database
        .value(
            "select run_at > now() + interval '50 minutes' from jobs where session_id = $1",
            &session_of(&database, peer.id("nap weather-agent")).await,
        )
        .await;
    assert!(nap, "it sleeps as long as it would have");

    // All go back, as they were; the event came meanwhile, so its task is awake.
    let event: String =
        sqlx::query_scalar("select wake_event from absurd.r_default where task_id = $1::uuid")
            .bind(peer.id("wait weather-agent"))
            .fetch_one(&peer.database.pool)
            .await
            .unwrap();
    let back = absurd(
        &options,
        &peer,
        &database,
        &["back", "weather-agent", "--queue", "default", "--task", peer.id("nap weather-agent")],
    )
    .await;
    assert_eq!((back.code, &back.json["returned"]), (Some(0), &json!(1)), "{}{}", back.json, back.errors);
    assert_eq!(row(peer.id("nap weather-agent")).await, before["nap weather-agent"]);
    sqlx::query("select absurd.emit_event('default', $1, '\"yes\"')")
        .bind(&event)
        .execute(&peer.database.pool)
        .await
        .unwrap();
    let back = absurd(&options, &peer, &database, &["back", "weather-agent", "--queue", "default"]).await;
    assert_eq!((&back.json["returned"], &back.json["woken"]), (&json!(2), &json!(1)), "{}", back.json);
    assert_eq!(row(peer.id("wait weather-agent")).await.0, "pending");
    assert_eq!(row(peer.id("pending")).await, before["pending"]);
    assert_eq!(peer.count("select count(*) from absurd.c_default where checkpoint_name like '$awaitEvent:%' and state = '\"yes\"'").await, 1);

    // Taken again, they run here: the pending one, the sleeping one when its time comes, the waiting one when it is
    // answered, and a failed one after a retry.
    assert_eq!(take("weather-agent").await.json["imported"], 3);
    let taken = take("run-agent").await;
    assert_eq!(
        taken.json["by_status"],
        json!({"queued": 1, "waiting_input": 1}),
        "{}{}",
        taken.json,
        taken.errors
    );
    sqlx::query("update jobs set run_at = now()").execute(&database.pool).await.unwrap();
    let process = options.serve(&database).await;
    let client = process.client();
    let last = async |id: &str| -> String {
        database
            .value("select session_id from absurd_imports where task_id = $1 order by time desc limit 1", id)
            .await
    };
    for name in ["pending", "nap weather-agent", "wait weather-agent", "nap run-agent"] {
        let session = client.wait_for(&last(peer.id(name)).await, "completed").await;
        assert_eq!(
            crate::support::client::texts(&session, "assistant").last().unwrap(),
            "I went on.",
            "{name}"
        );
    }
    let waits = last(peer.id("wait run-agent")).await;
    let (status, answer) =
        client.post(&format!("/v1/sessions/{waits}/messages"), &json!({"text": "Yes, do."})).await;
    assert!(status.is_success(), "{answer}");
    client.wait_for(&waits, "completed").await;
    let failed = last(peer.id("fail weather-agent")).await;
    let (status, answer) = client.post(&format!("/v1/sessions/{failed}/retry"), &json!({})).await;
    assert!(status.is_success(), "{answer}");
    let session = client.wait_for(&failed, "completed").await;
    assert_eq!(crate::support::client::texts(&session, "assistant").last().unwrap(), "I went on.");
    // What ran here stays here.
    let back = absurd(&options, &peer, &database, &["back", "weather-agent", "--queue", "default"]).await;
    assert_eq!((back.code, back.json["refused"].as_array().unwrap().len()), (Some(1), 3), "{}", back.json);
    assert!(process.terminate().success());
    let ours = command(&options, &database, &["session", "verify", "--all"]).await;
    assert_eq!(ours.code, Some(0), "{}", ours.json);
}

#[tokio::test]
#[ignore = "needs Absurd: make test-peers"]
async fn a_kill_between_the_two_databases_leaves_a_task_with_one_side_or_none() {
    let (peer, database, model) = (Peer::filled(6).await, Database::new().await, model().await);
    let options = options(&model);
    let args = |verb: &'static str| {
        ["absurd", "--from", peer.database.url.as_str(), "--queue", "default", verb, "weather-agent"]
    };
    let killed = async |verb: &'static str, point: &str| {
        let (status, _) = with_args(&options, &args(verb))
            .env("FAILPOINTS", format!("{point}=1*return"))
            .spawn(&database.url)
            .ended()
            .await;
        assert_eq!(status.code(), None, "{point}");
    };
    let parked = "select count(*) from absurd.r_default where claimed_by like 'wakeful:%'";
    let here = "select count(*) from conversation_sessions where status in ('queued', 'waiting_input')";
    let both = async || (peer.count(parked).await, count(&database.pool, here).await);

    killed("take", "K76").await;
    assert_eq!(both().await, (3, 0), "parked, and not here yet");
    absurd(&options, &peer, &database, &["take", "weather-agent", "--queue", "default", "--wait", "0"]).await;
    assert_eq!(both().await, (3, 3));
    killed("back", "K74").await;
    assert_eq!(both().await, (3, 3), "nothing happened");
    killed("back", "K75").await;
    assert_eq!(both().await, (3, 2), "one is with no side");
    killed("back", "K77").await;
    assert_eq!(both().await, (2, 2), "that one is back");
    let back = absurd(&options, &peer, &database, &["back", "weather-agent", "--queue", "default"]).await;
    assert_eq!(both().await, (0, 0), "{}{}", back.json, back.errors);
    let phases: Vec<String> =
        sqlx::query_scalar("select phase from absurd_imports").fetch_all(&database.pool).await.unwrap();
    assert_eq!(phases, ["returned"; 3]);
}
