//! Which tasks are here: the rows of `absurd_imports`.

use crate::wake::Woken;
use crate::{Result, Store};
use serde::Serialize;
use wakeful_workflow::inbox::Acceptance;

/// A task that was imported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ImportRow {
    pub source: String,
    pub task_id: String,
    pub time: i32,
    /// Empty: it was parked, and went back before it became a session.
    pub session_id: String,
    pub task_name: String,
    pub shape: String,
    pub taken: bool,
    pub phase: String,
}

impl Store {
    /// Which of these tasks are here.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn absurd_known(
        &self,
        space_id: &str,
        source: &str,
        task_ids: &[String],
    ) -> Result<Vec<String>> {
        Ok(sqlx::query_scalar!(
            "select task_id from absurd_imports
            where space_id = $1 and source = $2 and task_id = any ($3) and phase <> 'returned'",
            space_id,
            source,
            task_ids
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// Imported tasks in the order of their ids, above `after`.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn absurd_imports(
        &self,
        space_id: &str,
        after: Option<(&str, &str)>,
        limit: i64,
    ) -> Result<Vec<ImportRow>> {
        let (source, task_id) = after.unwrap_or_default();
        Ok(sqlx::query_as!(
            ImportRow,
            "select source, task_id, time, session_id, task_name, shape, taken, phase from absurd_imports
            where space_id = $1 and (source, task_id) > ($2, $3) and phase = 'here'
            order by source, task_id
            limit $4",
            space_id,
            source,
            task_id,
            limit
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// How many tasks are here.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn absurd_count(&self, space_id: &str) -> Result<i64> {
        Ok(sqlx::query_scalar!(
            r#"select count(*) as "count!" from absurd_imports where space_id = $1 and phase = 'here'"#,
            space_id
        )
        .fetch_one(&self.pool)
        .await?)
    }

    /// A random sample of the imported tasks: another one for each `seed`.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn absurd_sample(&self, space_id: &str, seed: &str, limit: i64) -> Result<Vec<ImportRow>> {
        Ok(sqlx::query_as!(
            ImportRow,
            "select source, task_id, time, session_id, task_name, shape, taken, phase from absurd_imports
            where space_id = $1 and phase = 'here'
            order by md5(session_id || $2)
            limit $3",
            space_id,
            seed,
            limit
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// Finds the task that was spawned under this key in Absurd and was imported. Returns what the sender of such a spawn gets, and
    /// the agent of the session.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn absurd_by_key(
        &self,
        space_id: &str,
        source: &str,
        key: &str,
    ) -> Result<Option<(Woken, String)>> {
        let found = sqlx::query!(
            r#"select i.session_id, r.run_id, s.agent
            from absurd_imports i
            join conversation_sessions s on s.session_id = i.session_id
            join session_runs r on r.session_id = i.session_id
            where i.space_id = $1 and i.source = $2 and i.idempotency_key = $3 and i.phase <> 'returned'
            order by r.created_at limit 1"#,
            space_id,
            source,
            key
        )
        .fetch_optional(&self.intake)
        .await?;
        Ok(found.map(|found| {
            let woken = Woken {
                session_id: found.session_id,
                run_id: found.run_id,
                outcome: Acceptance::NewRun,
                duplicate: true,
            };
            (woken, found.agent)
        }))
    }
}
