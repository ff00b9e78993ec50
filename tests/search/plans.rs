//! Every search is answered from an index: EXPLAIN says so, on a table of generated rows.

use crate::support::Database;
use chrono::TimeDelta;
use serde_json::Value;
use wakeful_store::Store;
use wakeful_store::session::SessionFilter;

const ROWS: i64 = 100_000;

/// Sessions as they are in an old installation: nearly all completed, a few agents, many users.
const FILL: &str = "
insert into conversation_counters (conversation_id, space_id, mailbox_id, user_id)
select 'default/c' || n, 'default', 'default', 'user' || n / 5 from generate_series(1::bigint, 100000) n;
insert into conversation_sessions (session_id, conversation_id, space_id, mailbox_id, trigger_type, trigger_id, agent, model_id,
    model_context_window, status, started_at, last_message_number)
select 'sess_' || lpad(to_hex(1790000000000 + n * 60000), 12, '0') || lpad(to_hex(n), 20, '0'), 'default/c' || n,
    case when n % 20 = 0 then 's' || n / 20 % 50 else 'default' end, 'default',
    case when n % 100 = 0 then 'cron' else 'chat' end, 't' || n, 'agent' || n % 7, 'm', 1,
    case when n % 1000 = 1 then 'failed' when n % 5000 = 2 then 'needs_attention' when n % 500 = 3 then 'archived'
        else 'completed' end,
    to_timestamp(1790000000 + n * 60), 4
from generate_series(1::bigint, 100000) n;
insert into search_sessions (session_id, space_id, through_message_number, parts, tools, senders, cost_micros, steps, fingerprint,
    active_at, failed_calls)
select session_id, space_id, 4, 1,
    case when n % 50 = 0 then array['charge', 'reserve'] when n % 2 = 0 then array['reserve'] else '{}' end,
    array['person' || n % 20000 || '@example.com'], n % 1000 * 1000, n % 100,
    case when n % 1000 = 1 then lpad(to_hex(n / 1000 % 3), 16, '0') end, to_timestamp(1790000000 + n * 60),
    case when n % 200 = 0 then 1 else 0 end
from (select *, row_number() over (order by session_id) as n from conversation_sessions) s;
insert into search_documents (session_id, part, space_id, words)
select session_id, 0, space_id, to_tsvector('simple', 'hello table for the room' || n % 500 || ' order' || n)
from (select *, row_number() over (order by session_id) as n from conversation_sessions) s;
insert into error_groups (space_id, fingerprint, kind, source, text, example, count, first_at, last_at, first_version, last_version,
    sample)
select 'default', lpad(to_hex(n), 16, '0'), 'refused', 'openai', 'the provider refused ' || n, 'x', 1, now(), now(), '1', '1', '{}'
from generate_series(0, 2) n;
";

/// By which index these are found.
const BY: [(&str, &str); 1] = [("by activity", "search_sessions_by_activity")];

/// What is wrong with a plan: a table that is read whole, or many rows that are sorted.
fn wrong(plan: &Value, found: &mut Vec<String>) {
    let text = |key: &str| plan[key].as_str().unwrap_or_default().to_owned();
    let rows = plan["Plan Rows"].as_f64().unwrap_or_default();
    let of_many = ["conversation_sessions", "search_sessions", "search_documents", "conversation_counters"];
    if text("Node Type") == "Seq Scan" && of_many.contains(&text("Relation Name").as_str()) {
        found.push(format!("reads all of {}", text("Relation Name")));
    }
    if ["Sort", "Hash", "Incremental Sort"].contains(&text("Node Type").as_str()) && rows > ROWS as f64 / 5.0
    {
        found.push(format!("{} of {rows} rows", text("Node Type")));
    }
    for child in plan["Plans"].as_array().into_iter().flatten() {
        wrong(child, found);
    }
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn every_search_and_every_two_together_come_from_an_index_and_sort_little() {
    let database = Database::new().await;
    sqlx::raw_sql(FILL).execute(&database.pool).await.unwrap();
    sqlx::raw_sql("analyze").execute(&database.pool).await.unwrap();
    // The role that serves: its rows are kept apart by policies, which a superuser passes by.
    database.with_roles().await;
    let store = Store::connect(&database.as_role("wakeful_runtime"), 4, "wakeful test").await.unwrap();
    let some = |text: &str| Some(text.to_owned());
    let began = chrono::DateTime::from_timestamp(1_790_000_000, 0).unwrap();
    type Set = Box<dyn Fn(&mut SessionFilter)>;
    let of = |set: fn(&mut SessionFilter, Option<String>), value: &str| -> Set {
        let value = some(value);
        Box::new(move |filter| set(filter, value.clone()))
    };
    let conditions: Vec<(&str, Set)> = vec![
        ("status failed", of(|f, v| f.status = v, "failed")),
        ("status completed", of(|f, v| f.status = v, "completed")),
        ("status archived", of(|f, v| f.status = v, "archived")),
        ("agent", of(|f, v| f.agent = v, "agent3")),
        ("agent that has none", of(|f, v| f.agent = v, "missing")),
        ("trigger cron", of(|f, v| f.trigger_type = v, "cron")),
        ("space", of(|f, v| f.space_id = v, "s7")),
        ("the large space", of(|f, v| f.space_id = v, "default")),
        ("user", of(|f, v| f.user = v, "user77")),
        ("rare word", of(|f, v| f.text = v, "order4711")),
        ("common word", of(|f, v| f.text = v, "hello")),
        ("word of some", of(|f, v| f.text = v, "room17 table")),
        ("what stands together", of(|f, v| f.text = v, "order4711.table")),
        ("a price", of(|f, v| f.text = v, "3.50")),
        ("no such word", of(|f, v| f.text = v, "nothing")),
        ("from", of(|f, v| f.from = v, "person7@example.com")),
        ("tool of few", of(|f, v| f.tool = v, "charge")),
        ("tool of many", of(|f, v| f.tool = v, "reserve")),
        ("error", of(|f, v| f.error = v, "0000000000000001")),
        ("error by text", of(|f, v| f.error = v, "refused")),
        ("since", Box::new(move |f| f.since = Some(began + TimeDelta::minutes(99_000)))),
        ("until", Box::new(move |f| f.until = Some(began + TimeDelta::minutes(2000)))),
        ("cost of few", Box::new(|f| f.cost_over_micros = Some(995_000))),
        ("cost of many", Box::new(|f| f.cost_over_micros = Some(1000))),
        ("failed calls", Box::new(|f| f.failed_calls = true)),
        ("by activity", Box::new(|f| f.by_activity = true)),
        ("steps of few", Box::new(|f| f.steps_over = Some(98))),
        (
            "next page",
            Box::new(move |f| {
                f.before =
                    Some(format!("sess_{:012x}", (began + TimeDelta::minutes(50_000)).timestamp_millis()))
            }),
        ),
    ];
    let mut failed = Vec::new();
    for (n, (one, set_one)) in conditions.iter().enumerate() {
        for (other, set_other) in &conditions[n..] {
            let mut filter = SessionFilter { only_live: true, limit: 50, ..SessionFilter::default() };
            set_other(&mut filter);
            set_one(&mut filter);
            let plan = store.explain_sessions(&filter).await.unwrap();
            if one == other
                && let Some((_, index)) = BY.iter().find(|(by, _)| by == one)
                && !plan.to_string().contains(index)
            {
                failed.push(format!("{one} comes without {index}: {plan}"));
            }
            let mut found = Vec::new();
            wrong(&plan[0]["Plan"], &mut found);
            if !found.is_empty() {
                failed.push(format!("{one} and {other}: {found:?}"));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
    // The plans are of statements that answer.
    let filter = SessionFilter {
        text: some("order4711"),
        status: some("completed"),
        limit: 50,
        ..SessionFilter::default()
    };
    assert_eq!(store.sessions(&filter).await.unwrap().len(), 1);
}
