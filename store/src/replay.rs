//! Replays: what a session's log holds for them, which is read whole and never written, and how far one is.

use crate::{Error, Result, Store};
use std::collections::BTreeMap;
use wakeful_workflow::context::Strategy;
use wakeful_workflow::id::CallId;
use wakeful_workflow::replay::{RecordedCall, Recording};
use wakeful_workflow::session::{CallStatus, SessionStatus};

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
            select coalesce(ended.payload ->> 'message_number', ended.payload ->> 'summary_message_number')::bigint
                    as "message_number!",
                called.payload ->> 'model' as "model!",
                called.payload ->> 'request_sha256' as "request_sha256!",
                called.payload ->> 'context_strategy' as "context_strategy!",
                coalesce((called.payload ->> 'prefill_bytes')::bigint, 0) as "prefill_bytes!",
                case ended.type when 'CONTEXT_REBASED' then ended.payload end as rebase
            from session_events ended
            join session_events called
                on called.session_id = ended.session_id
                    and called.type = 'LLM_CALLED'
                    and case ended.type
                        when 'GEN_COMPLETE'
                            then called.payload ->> 'generation_id' = ended.payload ->> 'generation_id'
                        -- A summary has no GEN_COMPLETE: the rebase that points at it follows its call.
                        else called.seq = ended.seq - 1 and called.payload ->> 'purpose' = 'compaction'
                    end
            where ended.session_id = $1
                and (ended.type = 'GEN_COMPLETE'
                    or ended.type = 'CONTEXT_REBASED' and ended.payload ->> 'summary_message_number' is not null)
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
        Ok(Recording::new(session, calls, settled))
    }

    /// The replay that a process of this name began and has not reported on, if there is one.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn unfinished_replay(&self, runner: &str) -> Result<Option<String>> {
        Ok(sqlx::query_scalar!(
            "select session_id from conversation_sessions
            where runner = $1 and runner <> '' and replayed_at is null
            order by started_at desc
            limit 1",
            runner
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
