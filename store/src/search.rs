//! Finds sessions by what was said in them, who wrote, which tool was asked for, how they failed, and what they cost.
//!
//! The statement has only the conditions that were asked for, and is planned anew each time with their values. So Postgres knows
//! whether a value is rare, and reads either an index of that value or the newest sessions in their order. Sessions are named in
//! the order of time, so no list is sorted as a whole.
//!
//! Words, tools, senders, costs and failures are in tables of their own, which `index` fills beside the steps.

mod behind;
mod index;
mod laggards;
mod said;
mod words;

pub use behind::Behind;
pub use index::Indexed;
pub(crate) use index::{LOCK, enter};

use crate::pool::Transaction;
use crate::session::{SessionFilter, SessionPlace};
use crate::{Error, Result, Store};
use chrono::{DateTime, TimeDelta, Utc};
use serde_json::Value;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Execute, FromRow, PgConnection, Postgres, QueryBuilder, Row};
use wakeful_workflow::failure::is_fingerprint;
use wakeful_workflow::session::SessionStatus;

/// How far the clock of the process that made a session's id may be from the database's, in hours.
const CLOCKS_H: i64 = 1;

/// The most groups of errors that a part of a text may name.
const GROUPS: i64 = 200;

/// A user with more conversations is looked for session by session, the newest first.
const CONVERSATIONS: i64 = 1000;

/// A word, a sender or a tool of at most so many sessions is few: these sessions are looked at, and no others.
const FEW: i64 = 3000;

/// A word, a sender or a tool that Postgres expects in more sessions is not few.
const MANY: f64 = 100_000.0;

/// The columns of a search for ids.
const IDS: &str = "s.session_id";

/// … in the order of their activity.
const PLACES: &str = "s.session_id, h.active_at";

/// What is read before a search, because its statement depends on it.
#[derive(Debug, Default)]
struct Beside {
    /// The only sessions that can be found, where that is known. Postgres guesses how often a value is there, and a guess that is
    /// too high would lead it through all sessions.
    few: Option<Vec<String>>,
    /// The fingerprints of the errors that are asked for.
    groups: Option<Vec<String>>,
    /// The user who is asked for has many conversations.
    talks_much: bool,
}

impl Store {
    /// The sessions that a filter names, in their order.
    pub(crate) async fn find_sessions(&self, filter: &SessionFilter) -> Result<Vec<SessionPlace>> {
        let columns = if filter.by_activity { PLACES } else { IDS };
        self.find(columns, filter).await
    }

    /// Returns `columns` of each session `s` that a filter names, newest first.
    pub(crate) async fn find<T>(&self, columns: &'static str, filter: &SessionFilter) -> Result<Vec<T>>
    where
        T: for<'r> FromRow<'r, PgRow> + Send + Unpin,
    {
        self.find_within(("", columns, ""), filter).await
    }

    /// Puts `before` and `after` around the search's statement, and returns the rows of the whole.
    pub(crate) async fn find_within<T>(
        &self,
        (before, columns, after): (&'static str, &'static str, &'static str),
        filter: &SessionFilter,
    ) -> Result<Vec<T>>
    where
        T: for<'r> FromRow<'r, PgRow> + Send + Unpin,
    {
        let beside = self.beside(filter).await?;
        let mut statement = statement((before, columns), filter, &beside);
        statement.push(after);
        let query = statement.build_query_as::<T>().persistent(false);
        if !looks_beside(filter, &beside) {
            return Ok(query.fetch_all(&self.pool).await?);
        }
        let mut tx = self.with_bitmaps().await?;
        let found = query.fetch_all(&mut *tx).await?;
        tx.rollback().await?;
        Ok(found)
    }

    /// Begins a transaction in which Postgres may use the indexes of words and arrays. They give bitmaps, which our connections do
    /// without, for the sake of the claims.
    async fn with_bitmaps(&self) -> Result<Transaction> {
        let mut tx = self.pool.begin().await?;
        sqlx::raw_sql("set local enable_bitmapscan = on").execute(&mut *tx).await?;
        Ok(tx)
    }

    /// What Postgres does to find these sessions, as EXPLAIN ANALYZE says it. For tests.
    ///
    /// # Errors
    /// [`Error::Database`].
    #[doc(hidden)]
    pub async fn explain_sessions(&self, filter: &SessionFilter) -> Result<Value> {
        let beside = self.beside(filter).await?;
        let mut statement = statement(("", IDS), filter, &beside);
        if !looks_beside(filter, &beside) {
            return explain(&mut statement, &mut *self.pool.acquire().await?).await;
        }
        let mut tx = self.with_bitmaps().await?;
        let plan = explain(&mut statement, &mut tx).await?;
        tx.rollback().await?;
        Ok(plan)
    }

    async fn beside(&self, filter: &SessionFilter) -> Result<Beside> {
        let groups = self.groups_of(filter).await?;
        let few = self.few_of(filter).await?;
        let Some(user) = filter.user.as_ref().or(filter.user_id.as_ref()) else {
            return Ok(Beside { groups, few, talks_much: false });
        };
        let conversations = sqlx::query_scalar!(
            r#"select count(*) as "count!" from (
                select from conversation_counters where user_id = $1 and ($2::text is null or space_id = $2) limit $3
            ) talks"#,
            user,
            filter.space_id,
            CONVERSATIONS + 1
        );
        let conversations = conversations.fetch_one(&self.pool).await?;
        Ok(Beside { groups, few, talks_much: conversations > CONVERSATIONS })
    }

    /// The sessions of the rarest word, sender or tool that is asked for, if they are [`FEW`].
    async fn few_of(&self, filter: &SessionFilter) -> Result<Option<Vec<String>>> {
        const WORDS: &str =
            "select session_id from search_documents where words @@ $1::text::tsquery limit $2";
        // Failed ones have an index of their own: of a tool of many sessions, they may be few.
        let failed = if only_failed(filter) { " and fingerprint is not null" } else { "" };
        let by = |column: &str| {
            format!("select session_id from search_sessions where {column} @> array[$1]{failed} limit $2")
        };
        let words =
            filter.text.as_deref().map(|text| words::query(text).wanted).filter(|words| !words.is_empty());
        let asked = [(WORDS.to_owned(), &words), (by("senders"), &filter.from), (by("tools"), &filter.tool)];
        let asked: Vec<_> =
            asked.into_iter().filter_map(|(sql, value)| Some((sql, value.as_ref()?))).collect();
        if asked.is_empty() {
            return Ok(None);
        }
        let mut few: Option<Vec<String>> = None;
        let mut tx = self.with_bitmaps().await?;
        // Only their own indexes say at once whether there are few.
        sqlx::raw_sql("set local enable_indexscan = off; set local enable_indexonlyscan = off")
            .execute(&mut *tx)
            .await?;
        for (sql, value) in asked {
            // A word of all sessions takes a tenth of a second to look up. Where the statistics say that it is one, nothing is asked.
            let expected = format!("explain (format json) {sql}");
            let expected = sqlx::query_scalar::<_, Value>(AssertSqlSafe(expected)).bind(value).bind(FEW + 1);
            let expected = expected.persistent(false).fetch_one(&mut *tx).await?;
            if expected[0]["Plan"]["Plans"][0]["Plan Rows"].as_f64().is_some_and(|rows| rows > MANY) {
                continue;
            }
            let found = sqlx::query_scalar::<_, String>(AssertSqlSafe(sql))
                .bind(value)
                .bind(FEW + 1)
                .persistent(false);
            let found = found.fetch_all(&mut *tx).await?;
            if found.len() as i64 <= FEW && few.as_ref().is_none_or(|few| found.len() < few.len()) {
                few = Some(found);
            }
        }
        tx.rollback().await?;
        Ok(few)
    }

    /// The fingerprints that `filter.error` names.
    async fn groups_of(&self, filter: &SessionFilter) -> Result<Option<Vec<String>>> {
        let Some(error) = &filter.error else { return Ok(None) };
        if is_fingerprint(error) {
            return Ok(Some(vec![error.clone()]));
        }
        let found = sqlx::query_scalar!(
            "select distinct fingerprint from error_groups
            where ($1::text is null or space_id = $1)
                and (position(lower($2) in lower(text)) > 0 or position(lower($2) in lower(example)) > 0)
            limit $3",
            filter.space_id,
            error,
            GROUPS
        );
        Ok(Some(found.fetch_all(&self.pool).await?))
    }
}

/// Carries a statement out, and says how.
pub(crate) async fn explain(
    statement: &mut QueryBuilder<Postgres>,
    connection: &mut PgConnection,
) -> Result<Value> {
    let mut query = statement.build();
    let arguments = query.take_arguments().map_err(|error| Error::corrupt("filter", error))?;
    let text = format!("explain (analyze, timing off, format json) {}", query.sql().as_str());
    let query = sqlx::query_with(AssertSqlSafe(text), arguments.unwrap_or_default());
    Ok(query.persistent(false).fetch_one(connection).await?.try_get(0)?)
}

/// Whether a search reads the tables that a worker fills beside the steps.
fn looks_beside(filter: &SessionFilter, beside: &Beside) -> bool {
    filter.text.is_some() || joins_beside(filter, beside)
}

/// Whether only failed sessions with a fingerprint can be found. A replay or an import may have failed without one.
fn only_failed(filter: &SessionFilter) -> bool {
    filter.status.as_deref() == Some(SessionStatus::Failed.as_str()) && filter.only_live
}

/// Whether it joins `search_sessions`.
fn joins_beside(filter: &SessionFilter, beside: &Beside) -> bool {
    filter.from.is_some()
        || filter.tool.is_some()
        || beside.groups.is_some()
        || filter.cost_over_micros.is_some()
        || filter.steps_over.is_some()
        || filter.failed_calls
        || filter.by_activity
}

/// The statement of a filter, which begins with `before`.
fn statement(
    (before, columns): (&str, &str),
    filter: &SessionFilter,
    beside: &Beside,
) -> QueryBuilder<Postgres> {
    let mut sql = QueryBuilder::new(before);
    sql.push("select ").push(columns).push(" from conversation_sessions s");
    for (n, user) in [&filter.user_id, &filter.user].into_iter().flatten().enumerate() {
        if beside.talks_much {
            // Postgres does not turn around what has a limit: the sessions are read in their order.
            sql.push(" cross join lateral (select from conversation_counters");
            sql.push(" where conversation_id = s.conversation_id and user_id = ").push_bind(user.clone());
            sql.push(format_args!(" limit 1) c{n}"));
        } else {
            sql.push(format_args!(
                " join conversation_counters c{n} on c{n}.conversation_id = s.conversation_id"
            ));
            sql.push(format_args!(" and c{n}.user_id = ")).push_bind(user.clone());
        }
    }
    let joins = joins_beside(filter, beside);
    if joins {
        sql.push(" join search_sessions h on h.session_id = s.session_id");
    }
    sql.push(" where true");
    let equal = [
        ("s.space_id", &filter.space_id),
        ("s.status", &filter.status),
        ("s.conversation_id", &filter.conversation_id),
        ("s.trigger_type", &filter.trigger_type),
        ("s.agent", &filter.agent),
    ];
    for (column, value) in equal {
        if let Some(value) = value {
            sql.push(format_args!(" and {column} = ")).push_bind(value.clone());
        }
    }
    if let Some(few) = &beside.few {
        sql.push(" and s.session_id = any (").push_bind(few.clone()).push(")");
    }
    bounds(&mut sql, "s", filter);
    if joins {
        bounds(&mut sql, "h", filter);
    }
    if filter.only_live {
        sql.push(" and s.trigger_type not in ('replay', 'import')");
    }
    if let Some(since) = filter.since {
        sql.push(" and s.started_at >= ").push_bind(since);
    }
    if let Some(until) = filter.until {
        sql.push(" and s.started_at < ").push_bind(until);
    }
    if let Some(text) = &filter.text {
        let query = words::query(text);
        // A query of nothing finds nothing.
        if !query.wanted.is_empty() || query.unwanted.is_empty() {
            sql.push(" and s.session_id in (select d.session_id from search_documents d where d.words @@ ");
            sql.push_bind(query.wanted).push("::text::tsquery");
            bounds(&mut sql, "d", filter);
            sql.push(")");
        }
        // What was said later is in a document of its own.
        for unwanted in query.unwanted {
            sql.push(" and not exists (select from search_documents d where d.session_id = s.session_id and d.words @@ ");
            sql.push_bind(unwanted).push("::text::tsquery)");
        }
    }
    for (column, value) in [("h.senders", &filter.from), ("h.tools", &filter.tool)] {
        if let Some(value) = value {
            sql.push(format_args!(" and {column} @> ")).push_bind(vec![value.clone()]);
        }
    }
    if let Some(groups) = beside.groups.as_deref() {
        // A session that was retried and went on has no error any more.
        sql.push(" and s.status = 'failed'");
        match groups {
            [one] => sql.push(" and h.fingerprint = ").push_bind(one.clone()),
            several => sql.push(" and h.fingerprint = any (").push_bind(several.to_vec()).push(")"),
        };
    }
    if let Some(cost) = filter.cost_over_micros {
        sql.push(" and h.cost_micros > ").push_bind(cost);
    }
    if let Some(steps) = filter.steps_over {
        sql.push(" and h.steps > ").push_bind(steps);
    }
    if filter.failed_calls {
        sql.push(" and h.failed_calls > 0");
    }
    if joins && only_failed(filter) {
        sql.push(" and h.fingerprint is not null");
    }
    if filter.by_activity {
        if let Some(space) = &filter.space_id {
            sql.push(" and h.space_id = ").push_bind(space.clone());
        }
        if let Some(agent) = &filter.agent {
            sql.push(" and h.agent = ").push_bind(agent.clone());
        }
        if let (Some(before), Some(active_at)) = (&filter.before, filter.before_active_at) {
            sql.push(" and (h.active_at, h.session_id) < (").push_bind(active_at);
            sql.push(", ").push_bind(before.clone()).push(")");
        }
        sql.push(" order by h.active_at desc, h.session_id desc limit ").push_bind(filter.limit);
    } else {
        sql.push(" order by s.session_id desc limit ").push_bind(filter.limit);
    }
    sql
}

/// Between which ids the sessions are. Each table is told, because Postgres carries no inequality from one to the next.
fn bounds(sql: &mut QueryBuilder<Postgres>, table: &str, filter: &SessionFilter) {
    if let Some(before) = filter.before.as_ref().filter(|_| !filter.by_activity) {
        sql.push(format_args!(" and {table}.session_id < ")).push_bind(before.clone());
    }
    if let Some(since) = filter.since {
        let first = id_at(since.checked_sub_signed(TimeDelta::hours(CLOCKS_H)).unwrap_or(since));
        sql.push(format_args!(" and {table}.session_id >= ")).push_bind(first);
    }
    // An import began when its original did, and has a new id.
    if let Some(until) = filter.until.filter(|_| filter.only_live) {
        let last = id_at(until.checked_add_signed(TimeDelta::hours(CLOCKS_H)).unwrap_or(until));
        sql.push(format_args!(" and {table}.session_id < ")).push_bind(last);
    }
}

/// The first id that a session could have at this time.
fn id_at(time: DateTime<Utc>) -> String {
    id_of("sess", time)
}

/// The first id with this prefix that could be made at this time: [`crate::new_id`] begins with the milliseconds.
pub(crate) fn id_of(prefix: &str, time: DateTime<Utc>) -> String {
    format!("{prefix}_{:012x}", time.timestamp_millis().max(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_between_the_ids_of_times() {
        let now = Utc::now();
        let made = crate::new_id("sess");
        assert!(id_at(now - TimeDelta::seconds(1)) < made && made < id_at(now + TimeDelta::seconds(1)));
    }

    #[test]
    fn a_statement_has_only_what_was_asked_for() {
        let filter = SessionFilter { limit: 1, ..SessionFilter::default() };
        let text = |filter: &SessionFilter| {
            statement(("", IDS), filter, &Beside::default()).sql().as_str().to_owned()
        };
        assert!(!text(&filter).contains("join"));
        let filter =
            SessionFilter { tool: Some("reserve".to_owned()), text: Some("two".to_owned()), ..filter };
        assert!(text(&filter).contains("h.tools @> $2") && text(&filter).contains("d.words @@"));
    }
}
