//! Row-level security, tried as the runtime role: what a connection sees of two spaces.

use crate::support::{Database, Options, Process};
use serde_json::{Value, json};
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{AssertSqlSafe, Connection, Row};
use std::str::FromStr;
use wakeful_store::Store;
use wakeful_store::session::SessionFilter;
use wakeful_store::space::{Scope, within};
use wakeful_workflow::access::Scope as TokenScope;

/// A database in which each table has a row of `default` and one of `acme`.
async fn two_spaces() -> Database {
    let database = Database::new().await;
    database.with_roles().await;
    let mut fill = String::new();
    for space in ["default", "acme"] {
        let session = format!("sess_{space}");
        fill.push_str(&format!(
            "insert into conversation_counters (conversation_id, space_id, mailbox_id) values ('{space}/c', '{space}', 'm');
            insert into conversation_sessions (session_id, conversation_id, space_id, mailbox_id, trigger_type, trigger_id,
                agent, model_id, model_context_window)
            values ('{session}', '{space}/c', '{space}', 'm', 'of_{space}', 'c', 'a', 'm', 1);
            insert into session_seed_messages (space_id, session_id, ordinal, role, content)
            values ('{space}', '{session}', 0, 'system', '');
            insert into session_runs (space_id, run_id, session_id, conversation_id, status)
            values ('{space}', 'run_{space}', '{session}', '{space}/c', 'queued');
            insert into session_inbox (space_id, session_id, client_key, content, content_sha256, run_id, outcome)
            values ('{space}', '{session}', '', '', '', '', '');
            insert into conversation_records
                (space_id, conversation_id, message_number, session_id, run_id, step_number, role, content)
            values ('{space}', '{space}/c', 1, '{session}', '', 1, 'user', '[]');
            insert into session_events (space_id, session_id, seq, type) values ('{space}', '{session}', 1, 'x');
            insert into session_steps (space_id, session_id, step_number, run_id, from_message_number, to_message_number,
                finish_reason, input_tokens, output_tokens, cached_tokens, cache_write_tokens, cost_micros,
                executed_local_tool_count, attempt, event_seq, lease, worker_id, started_at)
            values ('{space}', '{session}', 1, '', 1, 1, '', 0, 0, 0, 0, 0, 0, 1, 1, 1, '', now());
            insert into generations (space_id, session_id, generation_id, step_number, attempt, model, request_sha256)
            values ('{space}', '{session}', '', 1, 1, '', '');
            insert into generation_chunks (space_id, session_id, generation_id, chunk_no, text)
            values ('{space}', '{session}', '', 0, '');
            insert into tool_calls
                (space_id, session_id, call_id, run_id, step_number, message_number, name, args_sha256, effect)
            values ('{space}', '{session}', '', '', 1, 1, '', '', 'pure');
            insert into blobs (space_id, sha256, size, media_type, bytes) values ('{space}', 'x', 1, 'x', 'x');
            insert into deliveries (delivery_id, space_id, conversation_id, channel, ordinal, session_id, source_key, content)
            values ('dlv_{space}', '{space}', '{space}/c', 'x', 1, '{session}', '', '{{}}');
            insert into jobs (kind, space_id, conversation_id, session_id, step_number)
            values ('step', '{space}', '{space}/c', '{session}', 1);
            insert into mails (space_id, mailbox_id, message_id, subject, subject_key, body_sha256, answers, dropped)
            values ('{space}', 'm', '{space}', '', '', '', '{{}}', 'x');
            insert into schedules (schedule_id, space_id, name, source, cron, time_zone, agent, conversation_id, prompt,
                missed, missed_limit, overlap, last_tick)
            values ('sch_{space}', '{space}', 'n', 'api', '', '', '', '', '', 'skip', 1, 'skip', now());
            insert into schedule_firings (space_id, schedule_id, tick, session_id)
            values ('{space}', 'sch_{space}', now(), '{session}');
            insert into legal_holds (space_id, conversation_id, reason) values ('{space}', '{space}/c', 'x');
            insert into erasures (erasure_id, space_id, subject_sha256) values ('{space}', '{space}', 'x');"
        ));
    }
    sqlx::raw_sql(AssertSqlSafe(fill)).execute(&database.pool).await.expect("the rows are made");
    database
}

async fn connect(database: &Database, role: &str) -> PgConnection {
    let url = database.as_role(role);
    PgConnection::connect_with(&PgConnectOptions::from_str(&url).unwrap()).await.unwrap()
}

async fn set(connection: &mut PgConnection, space: &str) {
    sqlx::query("select set_config('wakeful.space', $1, false)")
        .bind(space)
        .execute(connection)
        .await
        .unwrap();
}

/// The tables in which each space has a row.
async fn tables(database: &Database) -> Vec<String> {
    let tables: Vec<String> = sqlx::query_scalar(
        "select table_name::text from information_schema.columns c
        join pg_tables t on t.tablename = c.table_name and t.schemaname = c.table_schema
        where c.table_schema = 'public' and c.column_name = 'space_id' and c.is_nullable = 'NO'",
    )
    .fetch_all(&database.pool)
    .await
    .unwrap();
    let mut filled = Vec::new();
    for table in tables {
        let has = AssertSqlSafe(format!("select count(*) from {table}"));
        let rows: i64 = sqlx::query_scalar(has).fetch_one(&database.pool).await.unwrap();
        // The catalogue's test holds the policy of the others.
        if rows == 2 {
            filled.push(table);
        }
    }
    assert!(filled.len() >= 19, "{filled:?}");
    filled
}

/// The spaces of the rows that a connection sees in a table.
async fn seen(connection: &mut PgConnection, table: &str) -> Vec<String> {
    let sql = format!("select space_id from {table} order by space_id");
    sqlx::query_scalar(AssertSqlSafe(sql)).fetch_all(connection).await.expect(table)
}

#[tokio::test]
async fn a_connection_sees_the_space_that_it_names_and_without_one_nothing() {
    let database = two_spaces().await;
    let tables = tables(&database).await;
    let mut runtime = connect(&database, "wakeful_runtime").await;
    for table in &tables {
        assert_eq!(seen(&mut runtime, table).await, [] as [&str; 0], "{table} without the setting");
    }
    let none: [&str; 0] = [];
    for (space, expected) in [
        ("acme", &["acme"][..]),
        ("default", &["default"]),
        ("*", &["acme", "default"]),
        ("", &none),
        ("other", &none),
    ] {
        set(&mut runtime, space).await;
        for table in &tables {
            assert_eq!(seen(&mut runtime, table).await, expected, "{table} in {space:?}");
        }
    }
    // What the operator's roles see without saying anything, and in one space.
    for role in ["wakeful_reader", "wakeful_retention", "wakeful_owner"] {
        let mut operator = connect(&database, role).await;
        assert_eq!(seen(&mut operator, "conversation_records").await, ["acme", "default"], "{role}");
        set(&mut operator, "acme").await;
        assert_eq!(seen(&mut operator, "conversation_records").await, ["acme"], "{role}");
    }
    let mut scaler = connect(&database, "wakeful_scaler").await;
    let ready: i64 =
        sqlx::query_scalar("select ready from queue_backlog").fetch_one(&mut scaler).await.unwrap();
    assert_eq!(ready, 2, "counts are of all spaces");
}

#[tokio::test]
async fn a_connection_changes_nothing_of_another_space() {
    let database = two_spaces().await;
    let tables = tables(&database).await;
    let mut runtime = connect(&database, "wakeful_runtime").await;
    set(&mut runtime, "acme").await;
    for table in &tables {
        let may = format!(
            "select has_table_privilege('{table}', 'update'), has_table_privilege('{table}', 'delete')"
        );
        let may = sqlx::query(AssertSqlSafe(may)).fetch_one(&mut runtime).await.unwrap();
        let verbs = [
            (may.get(0), format!("update {table} set space_id = space_id where space_id <> 'acme'")),
            (may.get(1), format!("delete from {table} where space_id <> 'acme'")),
        ];
        for (may, sql) in verbs {
            if may {
                let done = sqlx::query(AssertSqlSafe(sql.clone())).execute(&mut runtime).await.expect(&sql);
                assert_eq!(done.rows_affected(), 0, "{sql}");
            }
        }
        // A row of its own space may not move to another one, and none may be made there.
        let moved = format!("update {table} set space_id = 'default'");
        let copied = format!(
            "insert into {table} select (jsonb_populate_record(row, '{{\"space_id\": \"default\"}}')).* from {table} row"
        );
        for sql in [moved, copied] {
            let refused = sqlx::query(AssertSqlSafe(sql.clone())).execute(&mut runtime).await;
            let error = refused.expect_err(&sql).into_database_error().expect("the server refuses");
            // Before it compares the spaces, the server refuses what the role may never do, and ids that it makes itself.
            assert!(["42501", "428C9"].contains(&error.code().unwrap().as_ref()), "{sql}: {error}");
        }
    }
    let mut owner = connect(&database, "wakeful_owner").await;
    set(&mut owner, "*").await;
    for table in &tables {
        assert_eq!(seen(&mut owner, table).await, ["acme", "default"], "{table}");
    }
}

#[tokio::test]
async fn a_statement_without_a_condition_finds_the_rows_of_its_tasks_space() {
    let database = two_spaces().await;
    let url = database.as_role("wakeful_runtime");
    let store = Store::connect(&url, 3, "wakeful test").await.unwrap();
    let ids = async || -> Vec<String> {
        let all = SessionFilter { limit: 10, ..SessionFilter::default() };
        store.sessions(&all).await.unwrap().into_iter().map(|session| session.session_id).collect()
    };
    // Again and again: the pool lends connections that have seen other spaces.
    for _ in 0..3 {
        assert_eq!(within(Scope::of("acme"), ids()).await, ["sess_acme"]);
        assert_eq!(within(Scope::of("default"), ids()).await, ["sess_default"]);
        assert_eq!(within(Scope::Nothing, ids()).await, [] as [&str; 0]);
        assert_eq!(within(Scope::of("*"), ids()).await, [] as [&str; 0], "no space has this name");
        assert_eq!(ids().await, ["sess_default", "sess_acme"]);
    }
    within(Scope::of("acme"), async {
        store.cancel("sess_default", None).await.expect_err("it does not exist here");
        let at_once = futures::future::join_all((0..6).map(|_| ids())).await;
        assert!(at_once.iter().all(|ids| *ids == ["sess_acme"]), "{at_once:?}");
    })
    .await;
    store.close().await;
}

/// A server in the runtime role, and a token that reads the space acme.
async fn server_for_acme(database: &Database) -> (Process, String) {
    let options = Options::new()
        .model("openai/test")
        .env("OPENAI_BASE_URL", "http://127.0.0.1:1")
        .env("WAKEFUL_TOKEN", "the-configured-token-of-the-tests");
    let process = options.spawn(&database.as_role("wakeful_runtime"));
    process.wait_for_log("\"Listening\"").await;
    let store = database.store().await;
    let new = wakeful_store::token::NewToken {
        scope: TokenScope::Read,
        space_id: Some("acme".to_owned()),
        agent: None,
        name: None,
        expires_in: None,
    };
    let (_, token) = store.create_token(&new).await.unwrap();
    (process, token)
}

#[tokio::test]
async fn what_another_space_uses_shows_in_no_answer() {
    let database = two_spaces().await;
    let (process, token) = server_for_acme(&database).await;
    let ask = async |path: &str| -> (u16, Value) {
        let request = crate::support::http().get(format!("{}{path}", process.url())).bearer_auth(&token);
        let response = request.send().await.expect("the server answers");
        (response.status().as_u16(), response.json().await.unwrap_or(json!(null)))
    };
    let (status, own) = ask("/v1/sessions?trigger_type=of_acme").await;
    assert_eq!((status, own["items"].as_array().map(Vec::len)), (200, Some(1)), "{own}");
    let of_another = ask("/v1/sessions?trigger_type=of_default").await;
    let of_unknown = ask("/v1/sessions?trigger_type=of_unknown").await;
    assert_eq!(of_another.0, of_unknown.0);
    let detail =
        |answer: &(u16, Value)| answer.1["detail"].as_str().unwrap().replace("of_unknown", "of_default");
    assert_eq!(detail(&of_another), detail(&of_unknown), "a type of another space is as unknown as any");
}

/// The statements of a request keep conditions of their own, so their answers do not show what the guard lets them see. Here the
/// database counts under which space a request reads: a policy beside those of the schema, on a table that no loop of the
/// process reads.
#[tokio::test]
async fn a_request_reads_under_its_callers_space_whatever_its_statements_say() {
    let database = two_spaces().await;
    let probe = "create sequence read_as_acme; create sequence read_as_another;
        create function probe() returns boolean language plpgsql volatile security definer as $$
        begin
            perform case current_setting('wakeful.space', true) when 'acme' then nextval('public.read_as_acme')
                else nextval('public.read_as_another') end;
            return true;
        end $$;
        create policy probe on session_steps as restrictive for select using (probe());";
    sqlx::raw_sql(probe).execute(&database.pool).await.unwrap();
    let (process, token) = server_for_acme(&database).await;
    let request = crate::support::http().get(format!("{}/v1/sessions/sess_acme/steps", process.url()));
    let answer = request.bearer_auth(&token).send().await.expect("the server answers");
    assert_eq!(answer.status().as_u16(), 200);
    let steps: Value = answer.json().await.unwrap();
    assert_eq!(steps["items"].as_array().map(Vec::len), Some(1), "{steps}");
    let read = async |sequence: &str| -> bool {
        let called = AssertSqlSafe(format!("select is_called from {sequence}"));
        sqlx::query_scalar(called).fetch_one(&database.pool).await.unwrap()
    };
    assert!(read("read_as_acme").await, "the request reads as its caller's space");
    assert!(!read("read_as_another").await, "nothing else reads");
}

#[tokio::test]
async fn a_token_of_the_installation_sees_the_space_that_it_asks_for_and_one_of_an_agent_only_its_own_errors()
{
    let database = two_spaces().await;
    let fill = "
        update conversation_sessions set status = 'failed';
        update jobs set held_by = 'queue', held_since = now();
        insert into pauses (pause_id, kind, name, reason) values ('queue', 'queue', '', 'x');
        insert into error_groups (space_id, fingerprint, kind, source, text, example, count, first_at, last_at, first_version,
            last_version, sample)
        select s.space_id, '0123456789abcdef', 'k', '', 'of ' || s.space_id, 'x', 1, now(), now(), '1', '1', array[s.session_id]
        from conversation_sessions s";
    sqlx::raw_sql(fill).execute(&database.pool).await.expect(fill);
    let configured = "the-configured-token-of-the-tests";
    let options = Options::new()
        .model("openai/test")
        .env("OPENAI_BASE_URL", "http://127.0.0.1:1")
        .env("WAKEFUL_TOKEN", configured)
        .arg("--roles=api");
    let process = options.spawn(&database.as_role("wakeful_runtime"));
    process.wait_for_log("\"Listening\"").await;
    let ask = async |token: &str, space: &str, path: &str| -> (u16, Value) {
        let request = crate::support::http().get(format!("{}{path}", process.url())).bearer_auth(token);
        let response = request.header("X-Wakeful-Space", space).send().await.expect("the server answers");
        (response.status().as_u16(), response.json().await.unwrap_or(json!(null)))
    };
    let (_, sessions) = ask(configured, "default", "/v1/sessions?space=acme&trigger_type=of_acme").await;
    assert_eq!(sessions["items"][0]["session_id"], "sess_acme", "{sessions}");
    let (_, errors) = ask(configured, "default", "/v1/errors?space=acme").await;
    assert_eq!(errors["items"][0]["text"], "of acme", "{errors}");
    assert_eq!(ask(configured, "default", "/v1/errors?space=*").await.0, 400);
    let (_, pauses) = ask(configured, "default", "/v1/pauses").await;
    assert_eq!(pauses["items"][0]["waiting"], 2, "{pauses}");
    let post = async |path: &str, body: &Value| -> (u16, Value) {
        let request = crate::support::http().post(format!("{}{path}", process.url())).bearer_auth(configured);
        let response = request.body(body.to_string()).send().await.expect("the server answers");
        (response.status().as_u16(), response.json().await.unwrap_or(json!(null)))
    };
    let (status, pause) = post("/v1/pauses", &json!({"kind": "queue", "reason": "y"})).await;
    assert_eq!((status, &pause["waiting"]), (201, &json!(2)), "{pause}");

    // A batch over another space is that space's.
    let body = json!({"verb": "archive", "filter": {"space": "acme"}, "reason": "old", "dry_run": true});
    let (status, preview) = post("/v1/batches", &body).await;
    assert_eq!((status, &preview["members"]), (200, &json!(1)), "{preview}");
    let body = json!({"verb": "archive", "filter": {"space": "acme"}, "reason": "old"});
    let (status, made) = post("/v1/batches", &body).await;
    assert_eq!(status, 201, "{made}");
    assert_eq!((&made["space_id"], &made["members"]), (&json!("acme"), &json!(1)), "{made}");
    let members = format!("/v1/batches/{}/members", made["batch_id"].as_str().unwrap());
    let (_, of_acme) = ask(configured, "acme", &members).await;
    assert_eq!(of_acme["items"][0]["session_id"], "sess_acme", "{of_acme}");
    assert_eq!(ask(configured, "default", &members).await.0, 404);
    let store = database.store().await;
    let batch_id = made["batch_id"].as_str().unwrap();
    assert_eq!(store.batch_members(Some("default"), batch_id, None, None, None, 9).await.unwrap().len(), 0);

    // Texts of errors are of the whole space, so a limited token names a group.
    let token = async |agent: Option<&str>| {
        let new = wakeful_store::token::NewToken {
            scope: TokenScope::Read,
            space_id: Some("acme".to_owned()),
            agent: agent.map(str::to_owned),
            name: None,
            expires_in: None,
        };
        store.create_token(&new).await.unwrap().1
    };
    let (of_space, of_agent) = (token(None).await, token(Some("a")).await);
    for (token, error, status) in [
        (&of_space, "anything", 200),
        (&of_agent, "0123456789abcdef", 200),
        (&of_agent, "anything", 400),
        (&of_agent, "of%20acme", 400),
    ] {
        let (answered, said) = ask(token, "acme", &format!("/v1/sessions?error={error}")).await;
        assert_eq!(answered, status, "{error}: {said}");
    }
}
