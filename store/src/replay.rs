//! Replays: what a session's log holds for them, which is read whole and never written, and how far one is.

use crate::wake::{By, NewMessage, Woken};
use crate::{Error, Result, Store};
use std::collections::BTreeMap;
use wakeful_workflow::id::CallId;
use wakeful_workflow::replay::{RecordedCall, Recording};
use wakeful_workflow::session::{CallStatus, SessionStatus};
use wakeful_workflow::strategy::{Rebase, Strategy};

impl Store {
    /// Reads the recording of a session: its messages, what its model was asked, and how its tools' calls ended. Of a
    /// session that runs, what it has committed so far.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Refused`] for one of which only sizes and hashes are left, [`Error::Corrupt`],
    /// [`Error::Database`].
    pub async fn recording(&self, session_id: &str) -> Result<Recording> {
        let session = self.hydrate(session_id).await?;
        let redacted = sqlx::query_scalar!(
            r#"select coalesce(imported_from ->> 'redacted' = 'true', false) as "redacted!"
            from conversation_sessions where session_id = $1"#,
            session_id
        )
        .fetch_one(&self.pool)
        .await?;
        if redacted {
            return Err(Error::Refused {
                session_id: session_id.to_owned(),
                reason: "it was imported from a redacted bundle: what was said is not there to be run again"
                    .to_owned(),
            });
        }
        let calls = sqlx::query!(
            r#"
            with called as materialized (
                select seq, payload from session_events where session_id = $1 and type = 'LLM_CALLED'
            ), answered as (
                select (ended.payload ->> 'message_number')::bigint as message_number, called.payload,
                    null::jsonb as rebase
                from session_events ended
                join called on called.payload ->> 'generation_id' = ended.payload ->> 'generation_id'
                where ended.session_id = $1 and ended.type = 'GEN_COMPLETE'
                union all
                -- A summary has no GEN_COMPLETE: the rebase that points at it follows its call.
                select (ended.payload ->> 'summary_message_number')::bigint, called.payload, ended.payload
                from session_events ended
                join called on called.seq = ended.seq - 1 and called.payload ->> 'purpose' = 'compaction'
                where ended.session_id = $1
                    and ended.type = 'CONTEXT_REBASED'
                    and ended.payload ->> 'summary_message_number' is not null
            )
            select message_number as "message_number!", payload ->> 'model' as "model!",
                payload ->> 'request_sha256' as "request_sha256!",
                payload ->> 'context_strategy' as "context_strategy!",
                coalesce((payload ->> 'prefill_bytes')::bigint, 0) as "prefill_bytes!",
                rebase
            from answered
            "#,
            session_id
        )
        .fetch_all(&self.pool)
        .await?;
        let calls = calls
            .into_iter()
            .map(|call| {
                let rebase = call.rebase.map(serde_json::from_value).transpose();
                let context_strategy = Strategy::parse(&call.context_strategy)
                    .ok_or_else(|| Error::corrupt("context strategy", &call.context_strategy))?;
                let recorded = RecordedCall {
                    model: call.model,
                    request_sha256: call.request_sha256,
                    context_strategy,
                    rebase: rebase.map_err(|error| Error::corrupt("rebase", error))?,
                    prefill_bytes: usize::try_from(call.prefill_bytes).unwrap_or(0),
                };
                Ok((call.message_number, recorded))
            })
            .collect::<Result<BTreeMap<_, _>>>()?;
        let settled =
            sqlx::query!("select call_id, status from tool_calls where session_id = $1", session_id)
                .fetch_all(&self.pool)
                .await?;
        let settled = settled
            .into_iter()
            .map(|call| {
                let status = CallStatus::parse(&call.status)
                    .ok_or_else(|| Error::corrupt("call status", &call.status))?;
                Ok((CallId::from(call.call_id), status))
            })
            .collect::<Result<BTreeMap<_, _>>>()?;
        let rebases = sqlx::query_scalar!(
            "select payload from session_events where session_id = $1 and type = 'CONTEXT_REBASED' order by seq",
            session_id
        )
        .fetch_all(&self.pool)
        .await?;
        let rebases = rebases
            .into_iter()
            .map(serde_json::from_value)
            .collect::<std::result::Result<Vec<Rebase>, _>>()
            .map_err(|error| Error::corrupt("rebase", error))?;
        Ok(Recording::new(session, calls, settled).with_rebases(rebases))
    }

    /// The replays that processes of this name began and have not reported on, the newest first.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn unfinished_replays(&self, runner: &str) -> Result<Vec<Unfinished>> {
        let rows = sqlx::query!(
            r#"select session_id, extract(epoch from clock_timestamp() - started_at)::bigint as "age_s!"
            from conversation_sessions
            where runner = $1 and runner <> '' and replayed_at is null
            order by started_at desc, session_id desc"#,
            runner
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(rows.into_iter().map(|row| Unfinished { session_id: row.session_id, age_s: row.age_s }).collect())
    }

    /// The newest replay of this name that is over: with it the next one is told from it.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn finished_replay(&self, runner: &str) -> Result<Option<String>> {
        Ok(sqlx::query_scalar!(
            "select session_id from conversation_sessions
            where runner = $1 and runner <> '' and replayed_at is not null
            order by started_at desc, session_id desc
            limit 1",
            runner
        )
        .fetch_optional(&self.pool)
        .await?)
    }

    /// Ends a replay that nobody is to go on with: its run, if one is open, and its claim to be gone on with.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Database`].
    pub async fn abandon_replay(&self, session_id: &str, reason: &str) -> Result<()> {
        match self.cancel(session_id, Some(reason)).await {
            // It rests.
            Ok(_) | Err(Error::Conflict { .. }) => self.end_replay(session_id).await,
            Err(error) => Err(error),
        }
    }

    /// Gives a replay a message, as the process that runs it.
    ///
    /// # Errors
    /// Those of [`Store::send`].
    pub async fn feed(&self, session_id: &str, message: &NewMessage) -> Result<Woken> {
        let woken = self.try_send(session_id, message, By::Replay).await;
        self.noted(woken)
    }

    /// Goes on with a replay's run that failed, as the process that runs it.
    ///
    /// # Errors
    /// Those of [`Store::retry`].
    pub async fn retry_replay(&self, session_id: &str, reason: &str) -> Result<String> {
        self.try_retry(session_id, Some(reason), By::Replay).await
    }

    /// How many seconds the session's job is still held by whoever claimed it last. `None`: nobody holds it.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn held_for_s(&self, session_id: &str) -> Result<Option<i64>> {
        Ok(sqlx::query_scalar!(
            r#"select ceil(extract(epoch from run_at - clock_timestamp()))::bigint as "left!" from jobs
            where session_id = $1 and kind = 'step' and lease is not null and run_at > clock_timestamp()"#,
            session_id
        )
        .fetch_optional(&self.pool)
        .await?)
    }

    /// Writes down that a replay's report was made: the same command after this begins another replay.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn end_replay(&self, session_id: &str) -> Result<()> {
        sqlx::query!(
            "update conversation_sessions set replayed_at = clock_timestamp()
            where session_id = $1 and runner <> ''",
            session_id
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// How far a session is, without its messages: for whoever waits for a run of its.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Corrupt`], [`Error::Database`].
    pub async fn progress(&self, session_id: &str) -> Result<Progress> {
        let row = sqlx::query!(
            "select status, error, total_turns, total_input_tokens, total_output_tokens, total_cost_micros
            from conversation_sessions
            where session_id = $1",
            session_id
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or_else(|| Error::NotFound { what: "session", id: session_id.to_owned() })?;
        Ok(Progress {
            status: SessionStatus::parse(&row.status)
                .ok_or_else(|| Error::corrupt("session status", &row.status))?,
            error: row.error,
            turns: row.total_turns.into(),
            tokens: row.total_input_tokens + row.total_output_tokens,
            cost_micros: row.total_cost_micros,
        })
    }
}

/// A replay that was begun, and that nobody has reported on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfinished {
    pub session_id: String,
    /// Seconds since it was made.
    pub age_s: i64,
}

/// How far a session is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    pub status: SessionStatus,
    /// Why its newest run failed.
    pub error: Option<String>,
    pub turns: i64,
    /// Input and output.
    pub tokens: i64,
    pub cost_micros: i64,
}
