//! Each list and search reads about as many rows as its page shows, in the runtime role, whatever else there is: the bench's
//! large installation, at a hundredth. What is counted is what Postgres read, because a policy misleads its guesses.

use crate::support::Database;
use chrono::{TimeDelta, Utc};
use serde_json::Value;
use wakeful_store::Store;
use wakeful_store::audit::AuditFilter;
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

/// Rows that were read, kept or not.
fn read(plan: &Value) -> f64 {
    let number = |key: &str| plan[key].as_f64().unwrap_or_default();
    let kind = plan["Node Type"].as_str().unwrap_or_default();
    let own = match kind.contains("Scan") && kind != "CTE Scan" && kind != "Subquery Scan" {
        true => {
            (number("Actual Rows")
                + number("Rows Removed by Filter")
                + number("Rows Removed by Index Recheck"))
                * number("Actual Loops")
        }
        // What a join throws away was read for each of its rows.
        false => number("Rows Removed by Join Filter") * number("Actual Loops"),
    };
    own + plan["Plans"].as_array().into_iter().flatten().map(read).sum::<f64>()
}

/// The text of a statement of the store, as it is compiled in: the one in which these words stand.
fn shipped(words: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../.sqlx");
    let texts = std::fs::read_dir(folder).unwrap().map(|file| {
        let described: Value = serde_json::from_slice(&std::fs::read(file.unwrap().path()).unwrap()).unwrap();
        described["query"].as_str().unwrap().to_owned()
    });
    let mut found: Vec<String> = texts.filter(|text| text.contains(words)).collect();
    assert_eq!(found.len(), 1, "statements with {words:?}: {found:#?}");
    found.remove(0)
}

/// What a statement does with these values, planned for them, as a caller of this space.
async fn explain(database: &Database, space: &str, text: &str, values: &[&str]) -> Value {
    let mut text = text.to_owned();
    for (n, value) in values.iter().enumerate().rev() {
        text = text.replace(&format!("${}", n + 1), value);
    }
    let pool = sqlx::PgPool::connect(&database.as_role("wakeful_runtime")).await.unwrap();
    let mut tx = pool.begin().await.unwrap();
    let settings = format!(
        "set local wakeful.space = '{space}'; set local enable_seqscan = off; set local enable_bitmapscan = off"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(settings)).execute(&mut *tx).await.unwrap();
    let text = format!("explain (analyze, timing off, format json) {text}");
    let plan: Value =
        sqlx::query_scalar(sqlx::AssertSqlSafe(text.clone())).fetch_one(&mut *tx).await.expect(&text);
    plan[0]["Plan"].clone()
}

#[tokio::test]
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
    let open = "array['queued', 'running']";
    let uncertain = |space| {
        let unset = [none; 6];
        [&[space], &unset[..], &["false", none, none, "50", open, "true", "true"]].concat()
    };
    // Space, statement, values. The space `tiny` has rows of long ago, or none at all.
    let given: Vec<(&str, &str, Vec<&str>)> = vec![
        (space, journal, vec![long, "700", "50"]),
        (space, messages, vec![long, none, "50", none]),
        (space, messages, vec![long, none, "50", "true"]),
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
    ] {
        let plan = store.explain_sessions(&filter).await.unwrap();
        if read(&plan[0]["Plan"]) > READ {
            failed.push(format!("the search {filter:?} reads {}: {plan:#}", read(&plan[0]["Plan"])));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
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
