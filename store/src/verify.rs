//! Compares a session's caches with its logs. Wakeful's statements write both together, but nothing in the
//! database prevents someone from editing the session's row by hand.

mod facts;
mod rebuild;

pub use rebuild::{Change, Rebuilt};

use crate::{Result, Store};
use facts::Facts;
use serde::Serialize;
use serde_json::{Value, json};
use wakeful_workflow::state::same_value;

/// One comparison of a cached value with a log.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// The compared column of the session's row, or a phrase that says what is compared.
    pub name: &'static str,
    /// The log that it was compared with.
    pub against: &'static str,
    /// Whether a rebuild can correct it. If not, the damage is in the logs themselves.
    pub cache: bool,
    pub cached: Value,
    pub folded: Value,
    pub agrees: bool,
}

/// The comparison of a session's caches with its logs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verification {
    pub session_id: String,
    pub agrees: bool,
    pub checks: Vec<Check>,
}

impl Store {
    /// Folds the session's logs and compares them with its row, in one short snapshot. Works in the middle of
    /// a run too.
    ///
    /// # Errors
    /// [`crate::Error::NotFound`], [`crate::Error::Corrupt`] for a log that cannot be read, [`crate::Error::Database`].
    pub async fn verify(&self, session_id: &str) -> Result<Verification> {
        let seal = self.own_seal_of(session_id).await?;
        let mut tx = self.pool.begin_long().await?;
        sqlx::query!("set transaction isolation level repeatable read, read only").execute(&mut *tx).await?;
        let facts = Facts::read(&mut tx, &seal, session_id).await?;
        // It only read. A commit of an act writes the act's row of the audit.
        tx.rollback().await?;
        let checks = checks(&facts);
        Ok(Verification {
            session_id: session_id.to_owned(),
            agrees: checks.iter().all(|check| check.agrees),
            checks,
        })
    }

    /// Returns the ids of sessions above `after`, in order, at most `limit`.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn session_ids(&self, space: Option<&str>, after: &str, limit: i64) -> Result<Vec<String>> {
        Ok(sqlx::query_scalar!(
            "select session_id from conversation_sessions
            where session_id > $1 and ($3::text is null or space_id = $3)
            order by session_id
            limit $2",
            after,
            limit,
            space
        )
        .fetch_all(&self.pool)
        .await?)
    }
}

fn checks(facts: &Facts) -> Vec<Check> {
    let row = &facts.row;
    let mut checks = vec![
        check("state", "messages", row.state.clone(), facts.state.clone()),
        match &facts.recovered {
            Ok(recovered) => check("state", "journal", row.state.clone(), recovered.state()),
            Err(error) => broken("state", "journal", row.state.clone(), error),
        },
        match &facts.recovered {
            Ok(recovered) => check("status", "journal", json!(row.status), json!(recovered.lifecycle_state)),
            Err(error) => broken("status", "journal", json!(row.status), error),
        },
    ];
    let totals = row.totals.columns().into_iter().zip(facts.totals.columns());
    checks.extend(
        totals.map(|((name, cached), (_, folded))| check(name, "steps", json!(cached), json!(folded))),
    );
    checks.extend([
        check("to_message_number", "steps", json!(row.to_message_number), json!(facts.to_message_number)),
        check("last_step_number", "steps", json!(row.last_step_number), json!(facts.last_step_number)),
        check("last_event_seq", "journal", json!(row.last_event_seq), json!(facts.last_event_seq)),
        check(
            "last_message_number",
            "messages",
            json!(row.last_message_number),
            json!(facts.last_message_number),
        ),
        check("rebase", "journal", row.rebase.clone(), facts.rebase.clone()),
        check(
            "compaction_failures",
            "journal",
            json!(row.compaction_failures),
            json!(facts.compaction_failures),
        ),
        check("totals of runs", "steps", json!(facts.wrong_runs), json!([])),
        damage("broken steps", "steps", json!(facts.broken_steps)),
        damage("missing entries", "journal", json!(facts.missing_entries)),
        damage("entries without their message", "messages", json!(facts.dangling)),
        damage("entries without their blob", "blobs", json!(facts.lost_blobs)),
    ]);
    checks
}

fn check(name: &'static str, against: &'static str, cached: Value, folded: Value) -> Check {
    let agrees = same_value(&cached, &folded);
    Check { name, against, cache: true, cached, folded, agrees }
}

/// A check of a log by itself. It agrees if `found` is an empty list or 0.
fn damage(name: &'static str, against: &'static str, found: Value) -> Check {
    let whole = if found.is_array() { json!([]) } else { json!(0) };
    Check { cache: false, ..check(name, against, whole, found) }
}

fn broken(name: &'static str, against: &'static str, cached: Value, error: &str) -> Check {
    Check { name, against, cache: true, cached, folded: json!({ "error": error }), agrees: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_compared_by_value_and_everything_else_as_it_is() {
        assert!(same_value(&json!({"a": [1.0, 2]}), &json!({"a": [1, 2.0]})));
        for (a, b) in [
            (json!({"a": 1}), json!({"a": 2})),
            (json!({"a": 1}), json!({"b": 1})),
            (json!({"a": 1}), json!({"a": 1, "b": 1})),
            (json!([1]), json!([1, 1])),
            (json!("1"), json!(1)),
            (json!(null), json!({})),
        ] {
            assert!(!same_value(&a, &b) && !same_value(&b, &a), "{a} {b}");
        }
    }
}
