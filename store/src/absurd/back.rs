//! Gives up a session that was taken and has not run here, so that Absurd may have its task again.
//!
//! A phase of an import only goes forward: here, returning, returned. The process that gives the task to Absurd holds the lock of
//! that row until the task is there. So a second `back` waits, and then sees that a later `take` may have parked the task again.

use super::known::ImportRow;
use super::park::Unparked;
use super::source::Source;
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
    /// It runs here no more, and Absurd has it.
    Returned(Unparked),
    /// It ran here, or it was over in Absurd.
    Refused(Held),
    /// Another `back` gave it back before.
    Already,
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

    /// Gives a taken task back to Absurd, if nothing has happened to its session here since the import: no worker claimed its
    /// job, no message came. The session ends.
    ///
    /// # Errors
    /// [`crate::Error::NotFound`], [`crate::Error::Database`].
    pub async fn absurd_give_back(
        &self,
        source: &mut Source,
        space_id: &str,
        queue: &str,
        import: &ImportRow,
    ) -> Result<GivenBack> {
        if import.phase == "here"
            && let Some(refused) = self.end_taken(space_id, import).await?
        {
            return Ok(refused);
        }
        let mut tx = self.pool.begin_long().await?;
        let phase = sqlx::query_scalar!(
            "select phase from absurd_imports
            where space_id = $1 and source = $2 and task_id = $3 and time = $4
            for update",
            space_id,
            import.source,
            import.task_id,
            import.time
        )
        .fetch_optional(&mut *tx)
        .await?;
        if phase.as_deref() != Some("returning") {
            return Ok(GivenBack::Already);
        }
        let unparked = source.unpark(queue, &import.task_id).await?;
        crate::failpoint!("K77");
        self.set_phase(&mut tx, space_id, import, "returned").await?;
        tx.commit().await?;
        Ok(GivenBack::Returned(unparked))
    }

    /// Notes that a parked task which never became a session goes back. Waits for an import of it that is under way. `None`: the
    /// task has become a session, or another `back` has it.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn absurd_unclaimed(
        &self,
        space_id: &str,
        source: &str,
        task_id: &str,
        name: &str,
    ) -> Result<Option<ImportRow>> {
        let mut tx = self.pool.begin_long().await?;
        let row = sqlx::query_as!(
            ImportRow,
            "insert into absurd_imports
                (space_id, source, task_id, time, session_id, task_name, task_state, shape, taken, phase)
            select $1, $2, $3, before.times + 1, '', $4, 'pending', '', true, 'returning'
            from (select count(*)::integer as times from absurd_imports
                where space_id = $1 and source = $2 and task_id = $3 and phase = 'returned') before
            on conflict do nothing
            returning source, task_id, time, session_id, task_name, shape, taken, phase",
            space_id,
            source,
            task_id,
            name
        )
        .fetch_optional(&mut *tx)
        .await?;
        if row.is_some() {
            tx.commit().await?;
        }
        Ok(row)
    }

    /// Ends the session of a taken task. Afterwards its row is `returning`. `Some`: the session was not ended, and why.
    async fn end_taken(&self, space_id: &str, import: &ImportRow) -> Result<Option<GivenBack>> {
        let refused = |why: &str| {
            Ok(Some(GivenBack::Refused(Held {
                task_id: import.task_id.clone(),
                session_id: import.session_id.clone(),
                why: why.to_owned(),
            })))
        };
        let mut tx = self.pool.in_line(&import.session_id).begin().await?;
        let conversation_id = run::conversation_of(&mut tx, &import.session_id).await?;
        let conversation = run::lock_conversation(&mut tx, &conversation_id).await?;
        let next = run::lock_next(&mut tx, &conversation).await?;
        let session = run::lock_session(&mut tx, &import.session_id).await?;
        let found = sqlx::query!(
            r#"select i.phase, (s.last_event_seq = i.event_seq) as "unmoved!"
            from absurd_imports i join conversation_sessions s on s.session_id = i.session_id
            where i.space_id = $1 and i.source = $2 and i.task_id = $3 and i.time = $4
            for update of i"#,
            space_id,
            import.source,
            import.task_id,
            import.time
        )
        .fetch_optional(&mut *tx)
        .await?;
        match (found, session.status) {
            (None, _) => return Ok(Some(GivenBack::Already)),
            // Another `back` has ended the session. Which of the two gives the task to Absurd is decided there.
            (Some(found), _) if found.phase != "here" => return Ok(None),
            (Some(found), _) if !found.unmoved => return refused("it ran here"),
            (Some(_), SessionStatus::Queued | SessionStatus::WaitingInput) => {}
            (Some(_), status) => return refused(&format!("it is {}", status.as_str())),
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
        let last_message_number = sqlx::query_scalar!(
            "update conversation_sessions set status = 'terminated', error = $2, completed_at = clock_timestamp()
            where session_id = $1
            returning last_message_number",
            import.session_id,
            reason
        )
        .fetch_one(&mut *tx)
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
        // A task that waits holds no conversation.
        if let Some(run_id) = run_id.filter(|run_id| conversation.open_run_id.as_ref() == Some(run_id)) {
            let ending = run::RunEnd {
                session_id: &import.session_id,
                run_id: &run_id,
                status: SessionStatus::Failed,
                error: Some(reason),
                last_message_number,
            };
            run::close(&mut tx, conversation, ending, next).await?;
        }
        self.set_phase(&mut tx, space_id, import, "returning").await?;
        crate::failpoint!("K74");
        tx.commit().await?;
        crate::failpoint!("K75");
        Ok(None)
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
