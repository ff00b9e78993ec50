//! The list of the audit. Like that of the search of sessions, its statement has only the conditions that were asked for, so that
//! each of them comes from an index.

use super::{AuditFilter, Audited};
use crate::{Result, Store};
use serde_json::Value;
use sqlx::{Postgres, QueryBuilder};

const COLUMNS: &str = "audit_id, at, actor_kind, actor, token_id, user_id, verb, target, space_id, reason, address, outcome, \
    status, times";

/// A row may have a time that is earlier than the time of a row with a smaller number, by this much at most.
const APART: &str = "interval '1 minute'";

impl Store {
    /// The audit, newest first.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn audited(&self, filter: &AuditFilter) -> Result<Vec<Audited>> {
        let mut list = statement(filter, self.verbs_of(filter).await?);
        let found = list.build_query_as::<Audited>().persistent(false);
        let mut found = found.fetch_all(&self.pool.of_installation()).await?;
        for row in &mut found {
            row.reason = self.reveal_reason(row.target.as_deref(), row.reason.take()).await;
        }
        Ok(found)
    }

    /// What Postgres does for this list, as EXPLAIN ANALYZE says it. For tests.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    #[doc(hidden)]
    pub async fn explain_audited(&self, filter: &AuditFilter) -> Result<Value> {
        let mut list = statement(filter, self.verbs_of(filter).await?);
        crate::search::explain(&mut list, &mut *self.pool.of_installation().acquire().await?).await
    }

    /// The verbs that a filter's verb means: itself, and those that it is the beginning of, up to a point. There are few: their
    /// index is read from one to the next.
    async fn verbs_of(&self, filter: &AuditFilter) -> Result<Option<Vec<String>>> {
        let Some(beginning) = &filter.verb else { return Ok(None) };
        let verbs = sqlx::query_scalar!(
            r#"with recursive known (verb) as (
                (select verb from audit_log where verb >= $1 order by verb limit 1)
                union all
                select (select a.verb from audit_log a where a.verb > known.verb order by a.verb limit 1)
                from known
                where starts_with(known.verb, $1)
            )
            select verb as "verb!" from known where verb = $1 or starts_with(verb, $1 || '.')"#,
            beginning
        );
        Ok(Some(verbs.fetch_all(&self.pool.of_installation()).await?))
    }
}

fn statement(filter: &AuditFilter, verbs: Option<Vec<String>>) -> QueryBuilder<Postgres> {
    let mut sql = QueryBuilder::new("");
    let Some(actor) = &filter.actor else {
        sql.push(format_args!("select {COLUMNS} from audit_log where true"));
        page(&mut sql, filter, verbs);
        return sql;
    };
    // A name, a token or a user: each has an index.
    sql.push("select * from (");
    for (n, column) in ["actor", "token_id", "user_id"].into_iter().enumerate() {
        sql.push(if n == 0 { "(" } else { " union (" });
        sql.push(format_args!("select {COLUMNS} from audit_log where {column} = ")).push_bind(actor.clone());
        page(&mut sql, filter, verbs.clone());
        sql.push(")");
    }
    sql.push(") found order by audit_id desc limit ").push_bind(filter.limit);
    sql
}

/// All other conditions, and the order.
fn page(sql: &mut QueryBuilder<Postgres>, filter: &AuditFilter, verbs: Option<Vec<String>>) {
    let equal = [("target", &filter.target), ("outcome", &filter.outcome), ("space_id", &filter.space)];
    for (column, value) in equal {
        if let Some(value) = value {
            sql.push(format_args!(" and {column} = ")).push_bind(value.clone());
        }
    }
    if let Some(verbs) = verbs {
        sql.push(" and verb = any (").push_bind(verbs).push(")");
    }
    if let Some(since) = filter.since {
        sql.push(" and at >= ").push_bind(since);
        // Numbers grow with time, so the list ends there.
        sql.push(" and audit_id >= (select coalesce(min(audit_id), 9223372036854775807) from (");
        sql.push("select audit_id from audit_log where at >= ").push_bind(since);
        sql.push(format_args!(" - {APART} order by at limit 100) early)"));
    }
    if let Some(before) = filter.before {
        sql.push(" and audit_id < ").push_bind(before);
    }
    sql.push(" order by audit_id desc limit ").push_bind(filter.limit);
}
