//! Gives up a session that was taken and has not run here, so that Absurd may have its task again.

use super::import::ImportRow;
use crate::run::{self, Wakes};
use crate::{Result, Store};
use serde::Serialize;
use wakeful_workflow::event::Event;
use wakeful_workflow::session::SessionStatus;

/// Why a task is not given back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Held {
    pub task_id: String,
    pub session_id: String,
    pub why: String,
}

/// What became of a request to give a task back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GivenBack {
    /// It runs here no more, and Absurd may have it.
    Released,
    /// It ran here, or it was over in Absurd.
    Refused(Held),
}

impl Store {
    /// Taken tasks of this name that are here or on their way back, in the order of their ids, above `after`.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn absurd_taken(
        &self,
        space_id: &str,
        source: &str,
        name: &str,
        after: &str,
        limit: i64,
    ) -> Result<Vec<ImportRow>> {
        Ok(sqlx::query_as!(
            ImportRow,
            "select source, task_id, time, session_id, task_name, shape, taken, phase from absurd_imports
            where space_id = $1 and source = $2 and task_name = $3 and task_id > $4 and taken and phase <> 'returned'
            order by task_id
            limit $5",
            space_id,
            source,
            name,
            after,
            limit
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// Ends the session of a taken task, if nothing has happened to it here since the import: no worker claimed its job, no
    /// message came. Afterwards its row is `returning`, until [`Store::absurd_returned`].
    ///
    /// # Errors
    /// [`crate::Error::NotFound`], [`crate::Error::Database`].
    pub async fn absurd_release(&self, space_id: &str, import: &ImportRow) -> Result<GivenBack> {
        if import.phase == "returning" {
            return Ok(GivenBack::Released);
        }
        let refused = |why: &str| {
            Ok(GivenBack::Refused(Held {
                task_id: import.task_id.clone(),
                session_id: import.session_id.clone(),
                why: why.to_owned(),
            }))
        };
        let mut tx = self.pool.begin().await?;
        let session = run::lock(&mut tx, &import.session_id).await?;
        let unmoved = sqlx::query_scalar!(
            r#"select (s.last_event_seq = i.event_seq) as "unmoved!"
            from absurd_imports i join conversation_sessions s on s.session_id = i.session_id
            where i.space_id = $1 and i.source = $2 and i.task_id = $3 and i.time = $4 and i.phase = 'here'"#,
            space_id,
            import.source,
            import.task_id,
            import.time
        )
        .fetch_optional(&mut *tx)
        .await?;
        match (unmoved, session.status) {
            (None, _) => return refused("it is not here any more"),
            (Some(false), _) => return refused("it ran here"),
            (Some(true), SessionStatus::Queued | SessionStatus::WaitingInput) => {}
            (Some(true), status) => return refused(&format!("it is {}", status.as_str())),
        }
        // The job's own columns decide: a worker that claims it at this moment has written a lease, or finds no job.
        let deleted = sqlx::query!(
            "delete from jobs where kind = 'step' and session_id = $1 and lease is null and attempt = 0 and stuck = 0",
            import.session_id
        )
        .execute(&mut *tx)
        .await?
        .rows_affected();
        if session.status == SessionStatus::Queued && deleted == 0 {
            return refused("a worker has it here");
        }
        let reason = "given back to Absurd";
        let transition = |from: SessionStatus, to: SessionStatus| Event::StateTransition {
            from_state: from.as_str().to_owned(),
            to_state: to.as_str().to_owned(),
            reason: Some(reason.to_owned()),
        };
        let run_id = run::newest(&mut tx, &import.session_id).await?;
        let events = [
            transition(session.status, SessionStatus::Failed),
            Event::SessionTerminated { reason: Some(reason.to_owned()) },
            transition(SessionStatus::Failed, SessionStatus::Terminated),
        ];
        run::append_events(&mut tx, &import.session_id, run_id.as_deref(), None, Wakes::Planner, &events)
            .await?;
        sqlx::query!(
            "update conversation_sessions set status = 'terminated', error = $2, completed_at = clock_timestamp()
            where session_id = $1",
            import.session_id,
            reason
        )
        .execute(&mut *tx)
        .await?;
        sqlx::query!(
            "update tool_calls set status = 'abandoned' where session_id = $1 and result_message_number is null",
            import.session_id
        )
        .execute(&mut *tx)
        .await?;
        sqlx::query!(
            "update session_runs set status = 'failed', error = $2, completed_at = clock_timestamp() where session_id = $1",
            import.session_id,
            reason
        )
        .execute(&mut *tx)
        .await?;
        sqlx::query!(
            "update conversation_counters set open_run_id = null where conversation_id = $1 and open_run_id = $2",
            session.conversation_id,
            run_id
        )
        .execute(&mut *tx)
        .await?;
        self.set_phase(&mut tx, space_id, import, "returning").await?;
        crate::failpoint!("K74");
        tx.commit().await?;
        crate::failpoint!("K75");
        Ok(GivenBack::Released)
    }

    /// Notes that Absurd has the task again.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn absurd_returned(&self, space_id: &str, import: &ImportRow) -> Result<()> {
        let mut tx = self.pool.begin().await?;
        self.set_phase(&mut tx, space_id, import, "returned").await?;
        tx.commit().await?;
        Ok(())
    }

    async fn set_phase(
        &self,
        tx: &mut sqlx::PgConnection,
        space_id: &str,
        import: &ImportRow,
        phase: &str,
    ) -> Result<()> {
        sqlx::query!(
            "update absurd_imports set phase = $5 where space_id = $1 and source = $2 and task_id = $3 and time = $4",
            space_id,
            import.source,
            import.task_id,
            import.time,
            phase
        )
        .execute(tx)
        .await?;
        Ok(())
    }
}
