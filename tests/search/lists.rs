//! Each list and search reads about as many rows as its page shows, in the runtime role, whatever else there is: the bench's
//! large installation, at a hundredth. What is counted is what Postgres read, because a policy misleads its guesses.

use crate::support::Database;
use crate::support::plans::{self, read, shipped};
use chrono::{TimeDelta, Utc};
use serde_json::Value;
use std::collections::BTreeSet;
use wakeful_store::Store;
use wakeful_store::audit::AuditFilter;
use wakeful_store::page::PAGE_BYTES;
use wakeful_store::session::SessionFilter;

const FILL: &str = include_str!("../bench/lists/fill.sql");
const SESSIONS: i64 = 12_000;
/// In the long session.
const MESSAGES: i64 = 1500;
/// A page of 50 may read so many rows: fewer than any list or the long session has.
const READ: f64 = 900.0;

/// A database with the installation, and whatever has its number of rows analysed.
async fn installation() -> Database {
    let database = Database::new().await;
    let fill = FILL.replace("{sessions}", &SESSIONS.to_string()).replace("{messages}", &MESSAGES.to_string());
    sqlx::raw_sql(sqlx::AssertSqlSafe(fill)).execute(&database.pool).await.unwrap();
    sqlx::raw_sql("analyze").execute(&database.pool).await.unwrap();
    database.with_roles().await;
    database
}

/// What a statement does with these values in the role that serves.
async fn explain(database: &Database, space: &str, text: &str, values: &[&str]) -> Value {
    plans::explain(database, "wakeful_runtime", space, text, values).await
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn a_page_of_each_list_reads_little_more_than_it_shows() {
    let database = installation().await;
    let long: String =
        sqlx::query_scalar("select session_id from conversation_sessions where agent = 'long'")
            .fetch_one(&database.pool)
            .await
            .unwrap();
    let space = "select space_id from conversation_sessions where session_id = $1";
    let space: String = database.value(space, &long).await;
    let long = format!("'{long}'");
    let (deliveries, notifications) = (shipped("held_up_since?"), shipped("g.label, n.count as"));
    let mails = shipped("dropped, received_at\n");
    let (members, messages) = (shipped("detail, acted_at, result, result_at"), shipped("internal = $4"));
    let effects = shipped("not d.imported and s.trigger_type");
    let (journal, none) = (shipped("inbox_text?"), "null");
    let batch: String = sqlx::query_scalar("select batch_id from batches where members > 1000 limit 1")
        .fetch_one(&database.pool)
        .await
        .unwrap();
    let of_batch: String = database.value("select space_id from batches where batch_id = $1", &batch).await;
    let batch = format!("'{batch}'");
    let [space, long, batch, of_batch] = [&space, &long, &batch, &of_batch].map(String::as_str);
    let [deliveries, notifications, mails, members, messages, journal] =
        [&deliveries, &notifications, &mails, &members, &messages, &journal].map(String::as_str);
    let bytes = PAGE_BYTES.to_string();
    let bytes = bytes.as_str();
    let open = "array['queued', 'running']";
    let uncertain = |space| {
        let unset = [none; 6];
        [&[space], &unset[..], &["false", none, none, "50", open, "true", "true"]].concat()
    };
    // Space, statement, values. The space `tiny` has rows of long ago, or none at all.
    let given: Vec<(&str, &str, Vec<&str>)> = vec![
        (space, journal, vec![long, "700", "50", bytes, "false"]),
        (space, journal, vec![long, "700", "50", bytes, "true"]),
        (space, messages, vec![long, none, "50", none, bytes]),
        (space, messages, vec![long, none, "50", "true", bytes]),
        ("large", deliveries, vec!["'large'", none, none, none, none, none, "false", none, "50", "true"]),
        ("tiny", deliveries, vec!["'tiny'", none, none, none, none, none, "false", none, "50", "true"]),
        (
            "large",
            deliveries,
            vec!["'large'", none, none, none, "'missing'", none, "false", none, "50", "true"],
        ),
        (
            "tiny",
            deliveries,
            vec!["'tiny'", none, none, none, none, "array['failed']", "false", none, "50", "true"],
        ),
        (
            "large",
            deliveries,
            vec!["'large'", none, none, "'large/c1'", none, none, "false", none, "50", "true"],
        ),
        ("large", mails, vec!["'large'", "false", none, none, none, "50"]),
        ("large", mails, vec!["'large'", "true", none, none, none, "50"]),
        ("tiny", mails, vec!["'tiny'", "true", none, none, none, "50"]),
        ("tiny", notifications, vec!["'tiny'", "false", none, none, none, none, "50"]),
        ("large", notifications, vec!["'large'", "false", none, "array['uncertain']", none, none, "50"]),
        ("large", effects.as_str(), uncertain("'large'")),
        ("tiny", effects.as_str(), uncertain("'tiny'")),
        (of_batch, members, vec![batch, none, none, none, "50", none]),
        (of_batch, members, vec![batch, "'pending'", none, none, "50", none]),
        (of_batch, members, vec![batch, none, "'cancelled'", none, "50", none]),
    ];
    let mut failed = Vec::new();
    for (space, text, values) in given {
        let plan = explain(&database, space, text, &values).await;
        if read(&plan) > READ {
            failed.push(format!("{space} {values:?} reads {}: {text}\n{plan:#}", read(&plan)));
        }
    }
    let store = Store::connect(&database.as_role("wakeful_runtime"), 4, "wakeful test").await.unwrap();
    let some = |text: &str| Some(text.to_owned());
    let of = AuditFilter { limit: 50, ..AuditFilter::default() };
    let day = Some(Utc::now() + TimeDelta::hours(1));
    for filter in [
        of.clone(),
        AuditFilter { actor: some("missing"), ..of.clone() },
        AuditFilter { actor: some("missing"), since: day, ..of.clone() },
        AuditFilter { verb: some("session"), ..of.clone() },
        AuditFilter { verb: some("batch.create"), ..of.clone() },
        AuditFilter { verb: some("missing"), ..of.clone() },
        AuditFilter { outcome: some("refused"), ..of.clone() },
        AuditFilter { space: some("tiny"), ..of.clone() },
        AuditFilter { since: day, ..of.clone() },
        AuditFilter { target: some("missing"), ..of },
    ] {
        let plan = store.explain_audited(&filter).await.unwrap();
        if read(&plan[0]["Plan"]) > READ {
            failed.push(format!("the audit of {filter:?} reads {}: {plan:#}", read(&plan[0]["Plan"])));
        }
    }
    let of = |space: &str| SessionFilter {
        space_id: some(space),
        only_live: true,
        limit: 50,
        ..SessionFilter::default()
    };
    let person =
        sqlx::query_scalar("select sender from session_inbox limit 1").fetch_one(&database.pool).await;
    for filter in [
        of("default"),
        of("tiny"),
        SessionFilter { agent: some("missing"), ..of("default") },
        SessionFilter { agent: some("rare"), ..of("large") },
        SessionFilter { trigger_type: some("import"), only_live: false, ..of("large") },
        SessionFilter { status: some("archived"), ..of("tiny") },
        SessionFilter { status: some("failed"), agent: some("rare"), ..of("default") },
        SessionFilter { text: some("nothing"), ..of("default") },
        SessionFilter { text: some("please"), ..of("default") },
        SessionFilter { text: some("room17"), ..of("large") },
        SessionFilter { tool: some("missing"), ..of("default") },
        SessionFilter { tool: some("missing"), by_activity: true, ..of("default") },
        SessionFilter { from: person.unwrap(), ..of("default") },
        SessionFilter { user: some("user77"), ..of("default") },
        SessionFilter { by_activity: true, ..of("tiny") },
        // The last ones in that order, in one space and in all.
        SessionFilter { agent: some("retired"), by_activity: true, ..of("large") },
        SessionFilter { agent: some("rare"), by_activity: true, space_id: None, ..of("default") },
        SessionFilter { status: some("failed"), by_activity: true, ..of("large") },
    ] {
        let plan = store.explain_sessions(&filter).await.unwrap();
        if read(&plan[0]["Plan"]) > READ {
            failed.push(format!("the search {filter:?} reads {}: {plan:#}", read(&plan[0]["Plan"])));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}

/// What a plan carries along with each of many rows, beside plain columns: a value that is made for all of them, to show a few.
fn made_for_many(plan: &Value, made: &mut Vec<String>) {
    if plan["Actual Rows"].as_f64().unwrap_or_default() > 300.0 {
        let output = plan["Output"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let values = ["json_build_object", "content)::text"];
        let own = plan["Node Type"].as_str().unwrap_or_default().to_owned();
        made.extend(
            output.filter(|one| values.iter().any(|v| one.contains(v))).map(|one| format!("{own}: {one}")),
        );
    }
    plan["Plans"].as_array().into_iter().flatten().for_each(|plan| made_for_many(plan, made));
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn a_page_of_a_long_history_makes_only_the_entries_that_it_shows() {
    let database = installation().await;
    let of_long = "select conversation_id || '|' || space_id from conversation_sessions where agent = $1";
    let of_long: String = database.value(of_long, "long").await;
    let (conversation, space) = of_long.split_once('|').unwrap();
    let history = shipped("went_out\n");
    let chain = format!("array['{conversation}']");
    for at in ["null", "now()"] {
        let plan =
            explain(&database, space, &history, &[&chain, at, "2", "''", "50", &PAGE_BYTES.to_string()])
                .await;
        let mut made = Vec::new();
        made_for_many(&plan, &mut made);
        assert!(made.is_empty(), "{made:#?}\n{plan:#}");
    }
    let store = Store::connect(&database.as_role("wakeful_runtime"), 4, "wakeful test").await.unwrap();
    let mut cursor: Option<String> = None;
    let mut seen = Vec::new();
    loop {
        let page =
            store.history(conversation, false, cursor.as_deref(), 400, PAGE_BYTES).await.unwrap().items;
        let Some(last) = page.last() else { break };
        cursor = Some(last.cursor.clone());
        seen.extend(page.into_iter().map(|item| (item.kind, item.id, item.facts)));
    }
    let count = |kind: &str| seen.iter().filter(|(of, ..)| of == kind).count() as i64;
    let replies =
        "select count(*) from conversation_records where conversation_id = $1 and role = 'assistant'";
    let messages = "select count(*) from conversation_records where conversation_id = $1 and role = 'user'";
    assert_eq!(count("reply"), database.value::<i64>(replies, conversation).await);
    assert_eq!(count("message"), database.value::<i64>(messages, conversation).await);
    let calls = "select count(*) from tool_calls join conversation_sessions using (session_id) where conversation_id = $1";
    assert_eq!((count("tool_call"), count("session")), (database.value(calls, conversation).await, 1));
    let ids: BTreeSet<_> = seen.iter().map(|(kind, id, _)| (kind, id)).collect();
    assert_eq!(ids.len(), seen.len(), "no entry comes twice");
    assert!(seen.iter().all(|(kind, _, facts)| kind != "reply" || facts["text"].as_str().is_some()));
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn failed_sessions_with_a_tool_of_many_are_found_among_those_that_failed() {
    let database = installation().await;
    // Most sessions ask for it, and of the failed ones three old ones.
    let wire = "update search_sessions set tools = array_append(tools, 'wire')
        where fingerprint is null or session_id in (select session_id from search_sessions
            where fingerprint is not null and space_id = 'default' order by session_id limit 3);
        with newest as (select session_id from conversation_sessions where status = 'completed' order by session_id desc limit 3000),
            failed as (update conversation_sessions s set status = 'failed', error = 'x' from newest n where s.session_id = n.session_id)
        update search_sessions h set fingerprint = repeat('0', 16), tools = '{}' from newest n where h.session_id = n.session_id;
        analyze conversation_sessions; analyze search_sessions";
    sqlx::raw_sql(wire).execute(&database.pool).await.unwrap();
    let store = Store::connect(&database.as_role("wakeful_runtime"), 4, "wakeful test").await.unwrap();
    let some = |text: &str| Some(text.to_owned());
    for by_activity in [false, true] {
        let filter = SessionFilter {
            space_id: some("default"),
            status: some("failed"),
            tool: some("wire"),
            only_live: true,
            by_activity,
            limit: 50,
            ..SessionFilter::default()
        };
        let plan = store.explain_sessions(&filter).await.unwrap();
        assert!(read(&plan[0]["Plan"]) < READ, "it reads {}: {plan:#}", read(&plan[0]["Plan"]));
        assert_eq!(store.sessions(&filter).await.unwrap().len(), 3);
    }
}

#[tokio::test]
async fn the_audit_of_an_actor_or_a_verb_is_what_it_was() {
    let database = installation().await;
    let store = Store::connect(&database.as_role("wakeful_runtime"), 4, "wakeful test").await.unwrap();
    let some = |text: &str| Some(text.to_owned());
    for (filter, condition) in [
        (AuditFilter { actor: some("person7"), ..AuditFilter::default() }, "actor = 'person7'"),
        (AuditFilter { actor: some("tok_7"), ..AuditFilter::default() }, "token_id = 'tok_7'"),
        (
            AuditFilter { actor: some("robot"), outcome: some("done"), ..AuditFilter::default() },
            "user_id = 'robot' and outcome = 'done'",
        ),
        (
            AuditFilter { verb: some("session"), before: Some(5000), ..AuditFilter::default() },
            "verb like 'session.%' and audit_id < 5000",
        ),
        (AuditFilter { verb: some("session.retry"), ..AuditFilter::default() }, "verb = 'session.retry'"),
        (AuditFilter { verb: some("sess"), ..AuditFilter::default() }, "false"),
        (
            AuditFilter { actor: some("person7"), verb: some("batch"), ..AuditFilter::default() },
            "actor = 'person7' and verb like 'batch.%'",
        ),
        (
            AuditFilter { since: Some(Utc::now() - TimeDelta::hours(3)), ..AuditFilter::default() },
            "at >= now() - interval '3 hours'",
        ),
    ] {
        let found = store.audited(&AuditFilter { limit: 70, ..filter }).await.unwrap();
        let found: Vec<i64> = found.iter().map(|row| row.audit_id).collect();
        let sql = format!("select audit_id from audit_log where {condition} order by audit_id desc limit 70");
        let all: Vec<i64> =
            sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_all(&database.pool).await.unwrap();
        assert_eq!(found, all, "{condition}");
    }
}
