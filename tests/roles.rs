//! The roles of `deploy/roles.sql`: what each may do, tried by logging in as it, and that the runtime role is enough.

use crate::support::database::ROLES;
use crate::support::world::World;
use crate::support::{Database, Options};
use serde_json::json;
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::str::FromStr;

const LOGS: [&str; 3] = ["conversation_records", "session_events", "audit_log"];

async fn run(url: &str, sql: &str) -> Result<(), sqlx::Error> {
    let mut connection = PgConnection::connect_with(&PgConnectOptions::from_str(url)?).await?;
    let done = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut connection).await;
    connection.close().await?;
    done.map(|_| ())
}

/// What no role but the owner may do with a log.
fn rewrites(log: &str) -> [String; 3] {
    let column = if log == "audit_log" { "actor" } else { "session_id" };
    [format!("update {log} set {column} = {column}"), format!("truncate {log}"), format!("drop table {log}")]
}

/// Whether the role may not do this.
async fn is_denied(url: &str, sql: &str) -> bool {
    match run(url, sql).await {
        Ok(()) => false,
        Err(error) => {
            let code = error.as_database_error().and_then(|error| error.code().map(|code| code.into_owned()));
            assert_eq!(code.as_deref(), Some("42501"), "{sql}: {error}");
            true
        }
    }
}

#[tokio::test]
async fn a_whole_session_runs_in_the_runtime_role_which_can_rewrite_no_log() {
    let mut world = World::new("c1", &["charge", "reserve", "compose_email"]).await;
    world.database.with_roles().await;
    let runtime = world.database.as_role("wakeful_runtime");
    let process = world.options.spawn(&runtime);
    process.wait_for_log("\"Listening\"").await;
    let client = process.client();
    world.begin(&client).await;
    world.finish(&client).await;
    // Schedules, forks, tokens and retries write where a session does not.
    let made =
        client.post("/v1/schedules", &json!({"name": "s", "cron": "0 9 * * *", "prompt": "Go."})).await;
    assert_eq!(made.0.as_u16(), 201, "{}", made.1);
    let id = world.session_id.clone();
    for (path, body, status) in [
        ("/v1/schedules/s/trigger".to_owned(), json!({}), 202),
        (format!("/v1/sessions/{id}/fork"), json!({"at": "last-user"}), 201),
        (format!("/v1/sessions/{id}/wake"), json!({}), 202),
        (format!("/v1/sessions/{id}/archive"), json!({}), 202),
        ("/v1/tokens".to_owned(), json!({"scope": "read"}), 201),
        ("/v1/user-tokens".to_owned(), json!({"user_id": "ann"}), 201),
    ] {
        let (got, body) = client.post(&path, &body).await;
        assert_eq!(got.as_u16(), status, "{path}: {body}");
    }
    let deleted = crate::support::http().delete(format!("{}/v1/schedules/s", process.url())).send().await;
    assert_eq!(deleted.expect("the server answers").status().as_u16(), 204);
    assert!(!process.log().contains("permission denied"), "{}", process.log());
    let mut doctor = world.options.clone();
    doctor.args = ["doctor", "-o", "json"].map(str::to_owned).to_vec();
    let (_, doctor) = doctor.spawn(&runtime).ended().await;
    let report: serde_json::Value = serde_json::from_str(&doctor.output()).expect("a report");
    let role = report
        .as_array()
        .expect("checks")
        .iter()
        .find(|check| check["name"] == "role")
        .expect("it is checked");
    assert_eq!(role["level"], "ok", "{role}");
    assert!(process.terminate().success());
    for log in LOGS {
        for sql in rewrites(log).into_iter().chain([
            format!("delete from {log}"),
            format!("alter table {log} disable trigger all"),
            format!("drop trigger append_only on {log}"),
        ]) {
            assert!(is_denied(&runtime, &sql).await, "{sql}");
        }
        run(&runtime, &format!("select count(*) from {log}")).await.expect(log);
    }
    for sql in [
        "create table x (y int)",
        "drop table jobs",
        "truncate jobs",
        "delete from conversation_sessions",
        "delete from tool_calls",
        "delete from _sqlx_migrations",
        // A forged receipt would make the next erasure delete what it names.
        "insert into erasures (erasure_id, space_id, subject_sha256) values ('x', 'default', 'x')",
        "update erasures set pending = '{}'",
        "set session_replication_role = replica",
        "create role x",
        "create or replace function refuse_rewrite() returns trigger language plpgsql as 'begin return new; end'",
    ] {
        assert!(is_denied(&runtime, sql).await, "{sql}");
    }
}

#[tokio::test]
async fn a_reader_writes_nothing_and_sees_no_secret_and_a_scaler_sees_one_view() {
    let mut world = World::new("c1", &["reserve"]).await;
    world.database.with_roles().await;
    let process = world.serve().await;
    let client = process.client();
    world.begin(&client).await;
    client.wait_for(&world.session_id, "completed").await;
    let reader = world.database.as_role("wakeful_reader");
    let scaler = world.database.as_role("wakeful_scaler");
    run(&reader, "select count(*) from conversation_records").await.expect("a reader reads");
    run(&reader, "select * from queue_backlog").await.expect("a reader reads");
    run(&scaler, "select kind, ready, leased, delayed, oldest_ready_s from queue_backlog")
        .await
        .expect("it scales");
    let tables: Vec<String> = world
        .database
        .value(
            "select array_agg(tablename::text) from pg_tables where schemaname = 'public' and $1 <> ''",
            "x",
        )
        .await;
    assert!(tables.len() > 20, "{tables:?}");
    for table in &tables {
        for role in [&reader, &scaler] {
            for sql in [
                format!("insert into {table} default values"),
                format!("delete from {table}"),
                format!("truncate {table}"),
                format!("drop table {table}"),
            ] {
                assert!(is_denied(role, &sql).await, "{sql}");
            }
        }
        assert!(is_denied(&scaler, &format!("select from {table}")).await, "{table}");
        // The search's tables have rows of all spaces, and no policy.
        let secrets = ["api_tokens", "signing_keys", "search_sessions", "search_documents"];
        let is_secret = secrets.contains(&table.as_str());
        assert_eq!(is_denied(&reader, &format!("select from {table}")).await, is_secret, "{table}");
    }
}

#[tokio::test]
async fn only_retention_deletes_from_the_logs_and_it_changes_nothing_else() {
    let mut world = World::new("c1", &["reserve"]).await;
    world.database.with_roles().await;
    let process = world.serve().await;
    let client = process.client();
    world.begin(&client).await;
    client.wait_for(&world.session_id, "completed").await;
    assert!(process.terminate().success());
    let retention = world.database.as_role("wakeful_retention");
    for log in LOGS {
        for sql in rewrites(log).into_iter().chain([format!("insert into {log} default values")]) {
            assert!(is_denied(&retention, &sql).await, "{sql}");
        }
        if log != "audit_log" {
            run(&retention, &format!("delete from {log}")).await.expect(log);
        }
    }
    for sql in [
        // What retention erased is in the audit.
        "delete from audit_log",
        "delete from legal_holds",
        "delete from erasures",
        "select key from signing_keys",
        "delete from api_tokens",
    ] {
        assert!(is_denied(&retention, sql).await, "{sql}");
    }
    let left: i64 = world.database.value("select count(*) from session_events where $1 <> ''", "x").await;
    assert_eq!(left, 0);
}

#[tokio::test]
async fn only_an_auditor_deletes_from_the_audit_and_only_what_is_old() {
    let mut world = World::new("c1", &["reserve"]).await;
    let process = world.serve().await;
    let client = process.client();
    world.begin(&client).await;
    client.wait_for(&world.session_id, "completed").await;
    let delete = async |url: &str| {
        let mut options = world.options.clone();
        options.args =
            ["audit", "delete", "--older-than", "30", "--yes", "--as", "eve"].map(str::to_owned).to_vec();
        let (status, process) = options.spawn(url).ended().await;
        (status.code(), process.output(), process.log())
    };
    let nothing = delete(&world.database.url).await;
    world.database.with_roles().await;
    // Another test may have made the role, and only its rights are missing.
    assert_eq!(nothing.0, Some(4), "{nothing:?}");
    assert!(nothing.2.contains("wakeful_auditor") && nothing.2.contains("deploy/roles.sql"), "{nothing:?}");
    let auditor = world.database.as_role("wakeful_auditor");
    let young = run(&auditor, "delete from audit_log").await.expect_err("it is young");
    assert!(young.to_string().contains("30 days"), "{young}");
    run(&world.database.url, "insert into audit_log (at, actor_kind, actor, verb, outcome)
        select clock_timestamp() - n * interval '20 days', 'cli', 'ann', 'session.retry', 'done' from generate_series(0, 3) n")
        .await
        .expect("rows");
    // The owner of the tables cannot either.
    for (url, sql) in [
        (&world.database.url, "delete from audit_log"),
        (&world.database.url, "truncate audit_log"),
        (&auditor, "update audit_log set actor = 'x'"),
        (&auditor, "truncate audit_log"),
        (&auditor, "alter table audit_log disable trigger all"),
        (&auditor, "delete from session_events"),
        (&auditor, "select from conversation_records"),
        (
            &auditor,
            "insert into audit_log (at, actor_kind, actor, verb, outcome)
            values (clock_timestamp() - interval '40 days', 'cli', 'ann', 'session.retry', 'done')",
        ),
    ] {
        assert!(run(url, sql).await.is_err(), "{sql}");
    }
    let before: i64 = world.database.value("select count(*) from audit_log where $1 <> ''", "x").await;
    let (status, told, said) = delete(&auditor).await;
    assert_eq!((status, told.contains("2 rows")), (Some(0), true), "{told} {said}");
    let after: i64 = world.database.value("select count(*) from audit_log where $1 <> ''", "x").await;
    assert_eq!(after, before - 2 + 1, "and who deleted is there");
    let by: String = world
        .database
        .value("select actor || ': ' || reason from audit_log where verb = $1", "audit.delete")
        .await;
    assert_eq!(by, "eve: older than 30 days");

    // By its own timer: what the configuration says, in this role alone.
    run(
        &world.database.url,
        "insert into audit_log (at, actor_kind, actor, verb, outcome)
        values (clock_timestamp() - interval '500 days', 'cli', 'ann', 'session.retry', 'done')",
    )
    .await
    .expect("a row");
    let retain = async |url: &str, args: &[&str], days: &str| {
        let mut options = world.options.clone().config(&format!("[retention]\naudit_days = {days}"));
        options.dir = std::sync::Arc::new(tempfile::tempdir().unwrap());
        options.args = args.iter().map(|&arg| arg.to_owned()).collect();
        let (status, process) = options.spawn(url).ended().await;
        (status.code(), process.output(), process.log())
    };
    let (status, _, said) = retain(&world.database.url, &["retention", "plan"], "400").await;
    assert_eq!((status, said.contains("1 row of the audit are due")), (Some(0), true), "{said}");
    let kept = retain(&auditor, &["retention", "run", "--audit"], "0").await;
    assert_eq!((kept.0, kept.2.contains("audit_days")), (Some(2), true), "{kept:?}");
    let (status, told, said) = retain(&auditor, &["retention", "run", "--audit"], "400").await;
    assert_eq!((status, told.contains("1 rows of the audit are deleted")), (Some(0), true), "{told} {said}");
    let reason: String =
        world.database.value("select reason from audit_log where verb = $1", "retention.run").await;
    assert_eq!(reason, "audit older than 400 days");
}

#[tokio::test]
async fn the_owner_migrates_a_database_and_renews_the_roles() {
    let database = Database::without_schema().await;
    let url = database.url.clone();
    let migrate = |url: String| async move {
        let mut options = Options::new();
        options.args = vec!["migrate".into(), "up".into()];
        let (status, process) = options.spawn(&url).ended().await;
        assert!(status.success(), "{}", process.log());
    };
    migrate(url.clone()).await;
    run(&url, ROLES).await.expect("the roles are made");
    let owner = database.as_role("wakeful_owner");
    // As if a later version brought a table.
    run(&owner, "create table later (x int)").await.expect("the owner makes tables");
    let of_a_migration = "create function seen() returns bigint language sql set wakeful.space = '*' return (select count(*) from later)";
    run(&owner, of_a_migration).await.expect("the owner makes functions that see all spaces");
    migrate(owner.clone()).await;
    run(&owner, ROLES).await.expect("the owner renews the rights");
    let runtime = database.as_role("wakeful_runtime");
    run(&runtime, "insert into later values (1)").await.expect("the runtime role uses the new table");
    assert!(is_denied(&runtime, "truncate later").await);
}

#[tokio::test]
async fn an_owner_who_is_no_superuser_is_told_which_right_a_migration_needs_and_migrates_with_it() {
    let database = Database::without_schema().await;
    let name: String = database.value("select current_database()::text where $1 <> ''", "it").await;
    let plain = name.replace("wakeful_test_", "plain_");
    let makes = format!(
        "create role {plain} login; alter database {name} owner to {plain}; alter schema public owner to {plain}"
    );
    run(&database.url, &makes).await.unwrap();
    let url = database.as_role(&plain);
    let migrate = || async {
        let mut options = Options::new();
        options.args = vec!["migrate".into(), "up".into()];
        let (status, process) = options.spawn(&url).ended().await;
        (status.code(), process.log())
    };
    let grant = format!("grant set on parameter wakeful.space to {plain}");
    let (status, said) = migrate().await;
    assert!(status == Some(6) && said.contains(&grant), "{said}");
    let tables = "select count(*) from pg_tables where schemaname = $1 and tablename like 'conversation%'";
    assert_eq!(database.value::<i64>(tables, "public").await, 0, "nothing was migrated");
    run(&database.url, &grant).await.unwrap();
    assert_eq!(migrate().await.0, Some(0));
    assert!(database.value::<i64>(tables, "public").await > 0);
    // A role with a right cannot be removed, and the server outlives this test.
    run(&database.url, &format!("revoke set on parameter wakeful.space from {plain}")).await.unwrap();
}
