//! Spaces: every row belongs to one, and the database keeps them apart.

mod apart;

use crate::support::Database;
use sqlx::postgres::PgPool;
use sqlx::{AssertSqlSafe, Row};

/// Tables without rows of a space, and why.
const OF_THE_INSTALLATION: [(&str, &str); 15] = [
    ("_sqlx_migrations", "the schema is one for all spaces"),
    ("act_links", "a link is looked up before its space is known"),
    ("api_tokens", "a token is looked up before its space is known"),
    ("audit_log", "only admin tokens of the installation read it"),
    ("installation", "its name for stores beside the database"),
    ("legacy_chat_counts", "counts by day"),
    ("notify_conditions", "what is wrong with the whole of it"),
    ("pauses", "operators of the installation pause spaces, agents, providers and the queue alike"),
    ("provider_gates", "an outage of a provider is one for all spaces"),
    ("queue_samples", "counts of jobs by minute"),
    ("schema_serves", "the schema is one for all spaces"),
    ("search_progress", "one search reads all spaces"),
    ("signing_keys", "it signs for all spaces"),
    ("webhook_tokens", "digests of what senders have used up"),
    ("workers", "processes work for all spaces"),
];

/// Tables with rows of spaces and without a policy, because it would keep a search from its index. What is searched joins the
/// session, whose policy decides: `search::plans` reads them in the runtime role.
const SEARCHED: [&str; 2] = ["search_documents", "search_sessions"];

/// The one policy of a table with rows of spaces: for all commands and roles.
const POLICY: &str = "of_its_space * t {0} (
CASE current_setting('wakeful.space'::text, true)
    WHEN '*'::text THEN true
    WHEN space_id THEN true
    ELSE NULL::boolean
END IS NOT NULL) check (
CASE current_setting('wakeful.space'::text, true)
    WHEN '*'::text THEN true
    WHEN space_id THEN true
    ELSE NULL::boolean
END IS NOT NULL)";

#[tokio::test]
async fn every_table_belongs_to_spaces_or_says_why_it_is_the_installations() {
    let database = Database::new().await;
    let tables = sqlx::query(
        "select c.relname::text as name, coalesce(a.attnotnull, false) as owned,
            a.atthasdef is true as has_default, obj_description(c.oid) as comment,
            c.relrowsecurity and c.relforcerowsecurity as forced,
            array(select concat_ws(' ', p.polname, p.polcmd, p.polpermissive, p.polroles::text,
                    pg_get_expr(p.polqual, c.oid), 'check', pg_get_expr(p.polwithcheck, c.oid))
                from pg_policy p where p.polrelid = c.oid) as policies
        from pg_class c
        left join pg_attribute a on a.attrelid = c.oid and a.attname = 'space_id' and not a.attisdropped
        where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p')
        order by c.relname",
    )
    .fetch_all(&database.pool)
    .await
    .unwrap();
    let mut of_the_installation = Vec::new();
    for table in &tables {
        let (name, owned): (String, bool) = (table.get("name"), table.get("owned"));
        if OF_THE_INSTALLATION.iter().any(|(known, _)| *known == name) {
            assert!(!owned, "{name} has rows of a space");
            let comment: Option<String> = table.get("comment");
            let says = comment.is_some_and(|comment| comment.to_lowercase().contains("the installation"));
            assert!(says || name == "_sqlx_migrations", "{name} says why it is the installation's");
            of_the_installation.push(name);
            continue;
        }
        assert!(
            owned,
            "{name} has no `space_id text not null`; if it is the installation's, name it here and say so in a comment on it"
        );
        assert!(!table.get::<bool, _>("has_default"), "a statement may forget the space of {name}");
        if SEARCHED.contains(&name.as_str()) {
            let comment: Option<String> = table.get("comment");
            assert!(
                comment.is_some_and(|comment| comment.starts_with("Without a policy: ")),
                "{name} says why"
            );
            continue;
        }
        assert!(table.get::<bool, _>("forced"), "the migration of {name} calls keep_spaces_apart('{name}')");
        let policies: Vec<String> = table.get("policies");
        assert_eq!(policies, [POLICY], "{name}");
    }
    assert!(tables.len() > 20, "{}", tables.len());
    assert_eq!(of_the_installation, OF_THE_INSTALLATION.map(|(name, _)| name));
}

#[tokio::test]
async fn functions_of_triggers_and_of_owners_pin_their_search_path() {
    let database = Database::new().await;
    let loose: Vec<String> = sqlx::query_scalar(
        "select p.oid::regprocedure::text from pg_proc p
        where p.pronamespace = 'public'::regnamespace
            and not exists (select from pg_depend d where d.objid = p.oid and d.deptype = 'e')
            and not exists (select from unnest(p.proconfig) as setting where starts_with(setting, 'search_path='))
            -- In such a body the names were bound when it was created.
            and p.prosqlbody is null",
    )
    .fetch_all(&database.pool)
    .await
    .unwrap();
    assert_eq!(loose, [] as [&str; 0]);
}

/// The migrations with their versions.
fn migrations() -> Vec<(i64, String)> {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../migrations");
    let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
        .iter()
        .map(|file| {
            let name = file.file_name().unwrap().to_str().unwrap();
            let version = name.split('_').next().unwrap().parse().unwrap();
            (version, std::fs::read_to_string(file).unwrap())
        })
        .collect()
}

async fn run(pool: &PgPool, sql: &str) {
    // Of several statements, the server makes one transaction, as the migrations run.
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(pool).await.expect(sql);
}

/// The migration that gives each table its spaces.
const SPACES: i64 = 20_261_124_010_000;

#[tokio::test]
async fn rows_from_before_spaces_get_the_space_of_their_session() {
    let database = Database::without_schema().await;
    let pool = &database.pool;
    for (_, sql) in migrations().iter().filter(|(version, _)| *version < SPACES) {
        run(pool, sql).await;
    }
    // Two sessions with the same state, one of which alone has a second blob.
    let (both, own) = ("a".repeat(64), "b".repeat(64));
    let mut fill = format!(
        "insert into blobs (sha256, size, media_type, bytes) values ('{both}', 1, 'x', 'x'), ('{own}', 1, 'y', 'y');"
    );
    for (space, session) in [("default", "s1"), ("acme", "s2")] {
        let pointers = if space == "acme" { format!("{both} {own}") } else { both.clone() };
        fill.push_str(&format!(
            "insert into conversation_sessions (session_id, conversation_id, space_id, mailbox_id, trigger_type, trigger_id,
                agent, model_id, model_context_window)
            values ('{session}', '{space}/c', '{space}', 'm', 'chat', 'c', 'a', 'm', 1);
            insert into session_seed_messages (session_id, ordinal, role, content) values ('{session}', 0, 'system', '');
            insert into session_runs (run_id, session_id, conversation_id, status) values ('run_{session}', '{session}', '', 'queued');
            insert into session_inbox (session_id, client_key, content, content_sha256, run_id, outcome)
            values ('{session}', '', '', '', '', '');
            insert into conversation_records (conversation_id, message_number, session_id, run_id, step_number, role, content)
            values ('{space}/c', 1, '{session}', '', 1, 'user', '[]');
            insert into session_events (session_id, seq, type, payload) values ('{session}', 1, 'x', '{{\"x\": \"{pointers}\"}}');
            insert into session_steps values ('{session}', 1, '', 1, 1, '', 0, 0, 0, 0, 0, 0, 1, 1, 1, '', now());
            insert into generations (session_id, generation_id, step_number, attempt, model, request_sha256)
            values ('{session}', '', 1, 1, '', '');
            insert into generation_chunks values ('{session}', '', 0, '');
            insert into tool_calls (session_id, call_id, run_id, step_number, message_number, name, args_sha256, effect)
            values ('{session}', '', '', 1, 1, '', '', 'pure');
            insert into schedules (schedule_id, space_id, name, source, cron, time_zone, agent, conversation_id, prompt, missed,
                missed_limit, overlap, last_tick)
            values ('sch_{space}', '{space}', 'n', 'api', '', '', '', '', '', 'skip', 1, 'skip', now());
            insert into schedule_firings (schedule_id, tick, session_id) values ('sch_{space}', now(), '{session}');"
        ));
    }
    run(pool, &fill).await;
    for (_, sql) in migrations().iter().filter(|(version, _)| *version >= SPACES) {
        run(pool, sql).await;
    }
    for table in [
        "session_seed_messages",
        "session_runs",
        "session_inbox",
        "conversation_records",
        "session_events",
        "session_steps",
        "generations",
        "generation_chunks",
        "tool_calls",
    ] {
        let wrong = format!(
            "select count(*) from {table} row join conversation_sessions s using (session_id) where row.space_id <> s.space_id"
        );
        let wrong: i64 = sqlx::query_scalar(AssertSqlSafe(wrong)).fetch_one(pool).await.unwrap();
        assert_eq!(wrong, 0, "{table}");
        let spaces = format!("select array_agg(space_id order by space_id) from {table}");
        let spaces: Vec<String> = sqlx::query_scalar(AssertSqlSafe(spaces)).fetch_one(pool).await.unwrap();
        assert_eq!(spaces, ["acme", "default"], "{table}");
    }
    let firings: Vec<String> =
        sqlx::query_scalar("select space_id from schedule_firings order by 1").fetch_all(pool).await.unwrap();
    assert_eq!(firings, ["acme", "default"]);
    let blobs: Vec<(String, String)> =
        sqlx::query_as("select sha256, space_id from blobs order by 1, 2").fetch_all(pool).await.unwrap();
    let blobs: Vec<(&str, &str)> =
        blobs.iter().map(|(sha256, space)| (&sha256[..1], space.as_str())).collect();
    assert_eq!(blobs, [("a", "acme"), ("a", "default"), ("b", "acme")], "each space has what its rows name");
    for sql in ["update session_events set space_id = 'x'", "delete from conversation_records"] {
        let refused = sqlx::query(sql).execute(pool).await.expect_err("the logs are append-only again");
        assert!(refused.to_string().contains("append-only"), "{sql}: {refused}");
    }
}
