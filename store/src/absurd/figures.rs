//! What is gained: figures of both databases.

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
    /// Bytes of the log of one step: what its checkpoint puts there, and what the pointer of a step puts there.
    pub absurd_step_bytes: i64,
    pub step_bytes: i64,
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
            absurd_step_bytes: longest.checkpoint_bytes / longest.steps.max(1),
            step_bytes: longest.record_bytes / longest.steps.max(1),
        }))
    }
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
