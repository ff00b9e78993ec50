//! Figures of both databases, which show what an import gains.

use super::source::Source;
use crate::{Result, Store};
use serde::Serialize;
use sqlx::AssertSqlSafe;
use std::time::Instant;

/// Real figures of one queue and its sessions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gained {
    pub tasks: i64,
    pub messages: i64,
    pub steps: i64,
    /// Of the imported tasks: their checkpoints in Absurd's table, and our messages and pointers.
    pub checkpoint_bytes: i64,
    pub record_bytes: i64,
    pub longest_task_id: String,
    pub longest_session_id: String,
    pub longest_steps: i64,
    /// What a resume reads: Absurd's query of all checkpoints of the longest task, and our hydration. The best of five.
    pub absurd_resume_ms: f64,
    pub hydrate_ms: f64,
    /// What a resume transfers.
    pub absurd_resume_bytes: i64,
    pub hydrate_bytes: i64,
    /// Bytes of the log (WAL) of the longest task's last step: its result written as one JSON, and its messages and its
    /// pointer written as here. Both are measured in this database, in a transaction that is rolled back.
    pub absurd_step_wal: i64,
    pub step_wal: i64,
}

impl Store {
    /// Measures one queue. `None`: nothing of it is here.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn absurd_gained(
        &self,
        source: &mut Source,
        space_id: &str,
        queue: &str,
    ) -> Result<Option<Gained>> {
        let name = format!("absurd:{queue}");
        let sums = sqlx::query!(
            r#"select count(*) as "tasks!", coalesce(sum(messages), 0)::bigint as "messages!",
                coalesce(sum(steps), 0)::bigint as "steps!", coalesce(sum(checkpoint_bytes), 0)::bigint as "checkpoint_bytes!",
                coalesce(sum(record_bytes), 0)::bigint as "record_bytes!"
            from absurd_imports where space_id = $1 and source = $2 and phase = 'here'"#,
            space_id,
            name
        )
        .fetch_one(&self.pool)
        .await?;
        let longest = sqlx::query!(
            "select task_id, session_id, steps, checkpoint_bytes, record_bytes from absurd_imports
            where space_id = $1 and source = $2 and phase = 'here'
            order by steps desc, checkpoint_bytes desc limit 1",
            space_id,
            name
        )
        .fetch_optional(&self.pool)
        .await?;
        let Some(longest) = longest else { return Ok(None) };
        let (absurd_resume_ms, absurd_resume_bytes) = source.resume(queue, &longest.task_id).await?;
        let mut hydrate_ms = f64::MAX;
        for _ in 0..5 {
            let began = Instant::now();
            self.hydrate(&longest.session_id).await?;
            hydrate_ms = hydrate_ms.min(began.elapsed().as_secs_f64() * 1000.0);
        }
        let hydrate_bytes = sqlx::query_scalar!(
            r#"select coalesce(sum(length(content::text) + length(details::text)), 0)::bigint as "bytes!"
            from conversation_records where session_id = $1"#,
            longest.session_id
        )
        .fetch_one(&self.pool)
        .await?;
        let (absurd_step_wal, step_wal) = self.wal_of_a_step(&longest.session_id).await?;
        Ok(Some(Gained {
            tasks: sums.tasks,
            messages: sums.messages,
            steps: sums.steps,
            checkpoint_bytes: sums.checkpoint_bytes,
            record_bytes: sums.record_bytes,
            longest_task_id: longest.task_id,
            longest_session_id: longest.session_id,
            longest_steps: longest.steps,
            absurd_resume_ms,
            hydrate_ms,
            absurd_resume_bytes,
            hydrate_bytes,
            absurd_step_wal,
            step_wal,
        }))
    }
}

impl Store {
    /// Writes the session's last step but one twice, and rolls back: as one JSON, and as messages with a pointer. Other writers
    /// add to what is measured, so the least of three counts.
    async fn wal_of_a_step(&self, session_id: &str) -> Result<(i64, i64)> {
        let mut least = (i64::MAX, i64::MAX);
        for _ in 0..3 {
            let mut tx = self.pool.begin().await?;
            let start = wal(&mut tx).await?;
            // `details` is the only jsonb column of a table without other indexes, like that of checkpoints.
            sqlx::query!(
                "insert into session_seed_messages (space_id, session_id, ordinal, role, content, details)
                select max(r.space_id), $1, 1000000000, 'user', '', jsonb_agg(r.content)
                from conversation_records r
                join session_steps p on p.session_id = r.session_id
                    and r.message_number > p.from_message_number and r.message_number <= p.to_message_number
                where r.session_id = $1
                    and p.step_number = (select greatest(max(step_number) - 1, 1) from session_steps where session_id = $1)",
                session_id
            )
            .execute(&mut *tx)
            .await?;
            let middle = wal(&mut tx).await?;
            sqlx::query!(
                "with step as (
                    select * from session_steps where session_id = $1
                        and step_number = (select greatest(max(step_number) - 1, 1) from session_steps where session_id = $1)
                ), pointer as (
                    insert into session_steps (space_id, session_id, step_number, run_id, from_message_number, to_message_number, finish_reason,
                        input_tokens, output_tokens, cached_tokens, cache_write_tokens, cost_micros, executed_local_tool_count,
                        attempt, event_seq, lease, worker_id, started_at)
                    select space_id, session_id, 1000000000, run_id, from_message_number, to_message_number, finish_reason, input_tokens,
                        output_tokens, cached_tokens, cache_write_tokens, cost_micros, executed_local_tool_count, attempt,
                        event_seq, lease, worker_id, started_at
                    from step
                )
                insert into conversation_records (space_id, conversation_id, message_number, session_id, run_id, step_number, role, content)
                select r.space_id, r.conversation_id, r.message_number + 1000000000, r.session_id, r.run_id, r.step_number, r.role, r.content
                from conversation_records r, step
                where r.session_id = step.session_id and r.message_number > step.from_message_number
                    and r.message_number <= step.to_message_number",
                session_id
            )
            .execute(&mut *tx)
            .await?;
            let end = wal(&mut tx).await?;
            tx.rollback().await?;
            least = (least.0.min(middle - start), least.1.min(end - middle));
        }
        Ok(least)
    }
}

async fn wal(tx: &mut sqlx::PgConnection) -> Result<i64> {
    Ok(sqlx::query_scalar!(r#"select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint as "bytes!""#)
        .fetch_one(tx)
        .await?)
}

impl Source {
    /// Reads what a worker of Absurd reads when it resumes the task. Returns the best time of five, and the bytes.
    async fn resume(&mut self, queue: &str, task_id: &str) -> Result<(f64, i64)> {
        let (mut best, mut bytes) = (f64::MAX, 0);
        for _ in 0..5 {
            let began = Instant::now();
            let states: Vec<Option<String>> = match self.schema() {
                "absurd" => {
                    let sql = format!(
                        "select s.state::text from {} t, absurd.get_task_checkpoint_states($1, t.task_id, t.last_attempt_run) s
                        where t.task_id = $2::uuid",
                        self.table('t', queue)
                    );
                    sqlx::query_scalar(AssertSqlSafe(sql))
                        .bind(queue)
                        .bind(task_id)
                        .fetch_all(&mut self.connection)
                        .await?
                }
                _ => {
                    let sql = "select s.state::text from durable.get_task_checkpoint_states($1, $2::uuid) s";
                    sqlx::query_scalar(sql).bind(queue).bind(task_id).fetch_all(&mut self.connection).await?
                }
            };
            bytes = states.iter().flatten().map(|state| state.len() as i64).sum();
            let parsed: usize = states
                .iter()
                .flatten()
                .filter(|state| serde_json::from_str::<serde_json::Value>(state).is_ok())
                .count();
            std::hint::black_box(parsed);
            best = best.min(began.elapsed().as_secs_f64() * 1000.0);
        }
        Ok((best, bytes))
    }
}
