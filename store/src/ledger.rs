//! The ledger of tool calls. Because of it, a guarded call runs at most once.
//!
//! The commit of the message that asks for a call writes the call as `invoked`. For an idempotent or guarded call this
//! proves that it has not run: before it runs, it becomes `started`, which says that it may have run. An idempotent call that
//! runs at once is written as `started` by the commit itself. A pure call stays `invoked` while it runs.
//!
//! A worker may run the tool only if its own update or its own commit has set `started` with a nonce that it
//! holds. A row that is already `started` gives no right to run the tool, even under the same lease.

use crate::error::missed_fence;
use crate::queue::Lease;
use crate::{Error, Result, Store, new_id};
use wakeful_workflow::advance::CallStart;
use wakeful_workflow::id::{CallId, SessionId};
use wakeful_workflow::session::{CallOutcome, CallStatus};

/// The right to run one call once.
#[derive(Debug)]
pub struct Started {
    nonce: String,
    /// How many times the call was started, this time included.
    pub attempt: i32,
}

impl Started {
    /// The right of a first start whose answer is lost.
    pub fn of(nonce: String) -> Started {
        Started { nonce, attempt: 1 }
    }

    /// The right to run a call that a commit started.
    pub fn by_commit(start: &CallStart) -> Started {
        Started { nonce: start.nonce.clone(), attempt: 1 }
    }
}

/// A new nonce for a call that a commit is to start.
pub fn new_nonce() -> String {
    new_id("nonce")
}

impl Store {
    /// Sets calls that were started and did not run from `started` back to `invoked`, so that their rows prove it again. Skips a
    /// call that was started again since. Writes nothing if the lease is lost.
    ///
    /// # Errors
    /// [`Error::Database`]; then the calls count as ones that may have run.
    pub async fn withdraw_starts(
        &self,
        lease: &Lease,
        session_id: &SessionId,
        started: &[Started],
    ) -> Result<()> {
        let nonces: Vec<&str> = started.iter().map(|started| started.nonce.as_str()).collect();
        sqlx::query!(
            "with s as (
                select session_id from conversation_sessions where session_id = $1 for no key update
            ), j as (
                update jobs set stuck = stuck
                from s
                where jobs.job_id = $2 and jobs.lease = $3
                returning jobs.job_id
            )
            update tool_calls
            set status = 'invoked', start_nonce = null, attempts = attempts - 1, started_at = null, settled_by = null
            from s, j
            where tool_calls.session_id = s.session_id
                and tool_calls.result_message_number is null
                and tool_calls.status = 'started'
                and tool_calls.start_nonce = any ($4)",
            session_id.as_str(),
            lease.job_id,
            lease.token,
            &nonces as &[&str]
        )
        .execute(&self.pool.in_line(session_id.as_str()))
        .await?;
        Ok(())
    }

    /// Moves a call from `from` to `started` under the new `nonce`, fenced by the lease. `None`: the lease is lost or the call has
    /// changed, so it must not run.
    ///
    /// `from` is `invoked`, or `started` for an idempotent call that is run again. Until the end of the lease
    /// plus `timeout_s` seconds, others must assume that the call may still be running.
    ///
    /// # Errors
    /// [`Error::Database`]: the update may have been committed, so the call must not run. [`Store::withdraw_starts`] with this
    /// nonce says that it did not.
    pub async fn start_call(
        &self,
        lease: &Lease,
        session_id: &SessionId,
        call_id: &CallId,
        nonce: &str,
        from: CallStatus,
        timeout_s: u64,
    ) -> Result<Option<Started>> {
        // `set stuck = stuck` changes nothing: the update locks the job's row and checks the lease on the row that it
        // locked. A select would check an older version.
        let attempt = sqlx::query_scalar!(
            r#"
            with s as (
                select session_id from conversation_sessions where session_id = $1 for no key update
            ), j as (
                update jobs set stuck = stuck
                from s
                where jobs.job_id = $2 and jobs.lease = $3
                returning jobs.run_at
            )
            update tool_calls
            set status = 'started',
                start_nonce = $4,
                attempts = attempts + 1,
                started_at = clock_timestamp(),
                settled_by = j.run_at + make_interval(secs => $5)
            from s, j
            where tool_calls.session_id = s.session_id
                and tool_calls.call_id = $6
                and tool_calls.status = $7
            returning attempts
            "#,
            session_id.as_str(),
            lease.job_id,
            lease.token,
            nonce,
            timeout_s as f64,
            call_id.as_str(),
            from.as_str()
        )
        .fetch_optional(&self.pool.in_line(session_id.as_str()))
        .await?;
        Ok(attempt.map(|attempt| Started { nonce: nonce.to_owned(), attempt }))
    }

    /// Records the outcome of a started call, in a fenced commit of its own. A repetition of it changes nothing. `false`: nothing
    /// was written, because the call was started again since or the lease is lost.
    ///
    /// # Errors
    /// [`Error::Database`]; [`Error::Keys`] if the session's key cannot be had.
    pub async fn settle_call(
        &self,
        lease: &Lease,
        session_id: &SessionId,
        call_id: &CallId,
        started: &Started,
        status: CallStatus,
        outcome: &CallOutcome,
    ) -> Result<bool> {
        let outcome = serde_json::to_string(outcome).map_err(|error| Error::corrupt("outcome", error))?;
        let outcome = self.seal_of(session_id.as_str()).await?.json(outcome)?;
        let settled = sqlx::query_scalar!(
            r#"
            with s as (
                select session_id from conversation_sessions where session_id = $1 for no key update
            ), j as (
                update jobs set stuck = 0, died = 0
                from s
                where jobs.job_id = $2 and jobs.lease = $3
                returning jobs.job_id
            ), settled as (
                update tool_calls
                set status = $4, outcome = $5::text::json, settled_at = clock_timestamp()
                from s, j
                where tool_calls.session_id = s.session_id
                    and tool_calls.call_id = $6
                    and tool_calls.status = 'started'
                    and tool_calls.start_nonce = $7
                returning tool_calls.call_id
            )
            select 1 / count(*) as "settled!" from settled
            "#,
            session_id.as_str(),
            lease.job_id,
            lease.token,
            status.as_str(),
            outcome,
            call_id.as_str(),
            started.nonce
        )
        .fetch_one(&self.pool.in_line(session_id.as_str()))
        .await;
        match settled {
            Ok(_) => Ok(true),
            // No row was settled: the statement divided by zero, and Postgres undid the update of the job too.
            Err(error) if missed_fence(&error) => self.has_outcome(session_id, call_id, started).await,
            Err(error) => Err(error.into()),
        }
    }

    /// Returns whether this very start of the call has an outcome: an earlier try was committed, and only its answer was lost.
    async fn has_outcome(&self, session_id: &SessionId, call_id: &CallId, started: &Started) -> Result<bool> {
        Ok(sqlx::query_scalar!(
            r#"select exists (
                select from tool_calls
                where session_id = $1 and call_id = $2 and start_nonce = $3 and status in ('done', 'failed')
            ) as "settled!""#,
            session_id.as_str(),
            call_id.as_str(),
            started.nonce
        )
        .fetch_one(&self.pool)
        .await?)
    }
}
