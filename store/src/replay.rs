//! Replays: reads the log of a source session without changing it, and keeps track of how far replays are.

use crate::wake::{By, NewMessage, Woken};
use crate::{Error, Result, Store};
use std::collections::{BTreeMap, HashMap};
use wakeful_workflow::id::CallId;
use wakeful_workflow::replay::{RecordedCall, Recording};
use wakeful_workflow::session::{CallStatus, SessionStatus};
use wakeful_workflow::strategy::{Rebase, Strategy};

impl Store {
    /// Refuses a session whose bundle was redacted, with these words for what cannot be done.
    ///
    /// # Errors
    /// [`Error::Refused`] for such a session, [`Error::Database`].
    pub async fn has_its_texts(&self, session_id: &str, what: &str) -> Result<()> {
        let redacted = sqlx::query_scalar!(
            r#"select coalesce(imported_from ->> 'redacted' = 'true', false) as "redacted!"
            from conversation_sessions where session_id = $1"#,
            session_id
        )
        .fetch_optional(&self.pool)
        .await?;
        if redacted == Some(true) {
            return Err(Error::without_texts(session_id, what));
        }
        Ok(())
    }

    /// Reads the recording of a session: its messages, the requests to its model, and how its tool calls
    /// ended. For a running session, reads what is committed so far.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Refused`] for a session from a redacted bundle, [`Error::Corrupt`],
    /// [`Error::Database`].
    pub async fn recording(&self, session_id: &str) -> Result<Recording> {
        let session = self.hydrate(session_id).await?;
        self.has_its_texts(session_id, "without its texts it cannot be run again").await?;
        let entries = sqlx::query!(
            r#"select seq, type as kind, payload ->> 'generation_id' as generation_id, payload ->> 'model' as model,
                payload ->> 'request_sha256' as request_sha256, payload ->> 'context_strategy' as context_strategy,
                coalesce((payload ->> 'prefill_bytes')::bigint, 0) as "prefill_bytes!",
                coalesce(payload ->> 'purpose' = 'compaction', false) as "summarises!",
                (payload ->> 'message_number')::bigint as message_number,
                (payload ->> 'summary_message_number')::bigint as summary_message_number,
                case when type = 'CONTEXT_REBASED' then payload end as rebase
            from session_events
            where session_id = $1 and type in ('LLM_CALLED', 'GEN_COMPLETE', 'CONTEXT_REBASED')
            order by seq"#,
            session_id
        )
        .fetch_all(&self.pool)
        .await?;
        // Joined here by hash: Postgres expects few entries and would compare each with each.
        let (mut called, mut answers, mut rebases) = (HashMap::new(), BTreeMap::new(), Vec::new());
        let mut summary_call = None;
        for entry in entries {
            match (entry.kind.as_str(), entry.generation_id, entry.rebase) {
                ("LLM_CALLED", Some(generation_id), _) => {
                    let strategy = entry.context_strategy.unwrap_or_default();
                    let call = RecordedCall {
                        model: entry.model.unwrap_or_default(),
                        request_sha256: entry.request_sha256.unwrap_or_default(),
                        context_strategy: Strategy::parse(&strategy)
                            .ok_or_else(|| Error::corrupt("context strategy", &strategy))?,
                        rebase: None,
                        prefill_bytes: usize::try_from(entry.prefill_bytes).unwrap_or(0),
                    };
                    summary_call = entry.summarises.then(|| (entry.seq, call.clone()));
                    called.insert(generation_id, call);
                }
                ("GEN_COMPLETE", Some(generation_id), _) => {
                    if let (Some(number), Some(call)) = (entry.message_number, called.get(&generation_id)) {
                        answers.insert(number, call.clone());
                    }
                }
                (_, _, Some(rebase)) => {
                    let rebase: Rebase =
                        serde_json::from_value(rebase).map_err(|error| Error::corrupt("rebase", error))?;
                    // A summary has no GEN_COMPLETE: the rebase that points at it follows its call.
                    if let (Some(number), Some((seq, call))) = (entry.summary_message_number, &summary_call)
                        && *seq == entry.seq - 1
                    {
                        answers.insert(number, RecordedCall { rebase: Some(rebase.clone()), ..call.clone() });
                    }
                    rebases.push(rebase);
                }
                _ => {}
            }
        }
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
        Ok(Recording::new(session, answers, settled).with_rebases(rebases))
    }

    /// The replays that processes with this runner name began but have not reported on, newest first.
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

    /// The newest finished replay with this runner name. The next replay's key contains its id, so that
    /// repeating the command starts a new replay.
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

    /// Abandons a replay: cancels its open run, and marks it as finished so that no process resumes it.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Database`].
    pub async fn abandon_replay(&self, session_id: &str, reason: &str) -> Result<()> {
        match self.cancel(session_id, Some(reason)).await {
            // No run is open.
            Ok(_) | Err(Error::Conflict { .. }) => self.end_replay(session_id).await,
            Err(error) => Err(error),
        }
    }

    /// Sends a message to a replay, as the process that drives it.
    ///
    /// # Errors
    /// Those of [`Store::send`].
    pub async fn feed(&self, session_id: &str, message: &NewMessage) -> Result<Woken> {
        let woken = self.try_send(session_id, message, By::Replay, None).await;
        self.note_refusal(woken)
    }

    /// Retries a failed run of a replay, as the process that drives it.
    ///
    /// # Errors
    /// Those of [`Store::retry`].
    pub async fn retry_replay(&self, session_id: &str, reason: &str) -> Result<String> {
        self.try_retry(session_id, Some(reason), By::Replay).await
    }

    /// Seconds until the current claim of the session's job expires. `None` if no worker holds the job.
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

    /// Marks a replay as reported. The same command then begins a new replay.
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

    /// Returns the progress of a session without its messages, for callers that wait for one of its runs.
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

/// A replay that was begun and has no report yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfinished {
    pub session_id: String,
    /// Seconds since its creation.
    pub age_s: i64,
}

/// The progress of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    pub status: SessionStatus,
    /// Error of its newest run, if that failed.
    pub error: Option<String>,
    pub turns: i64,
    /// Input and output tokens.
    pub tokens: i64,
    pub cost_micros: i64,
}
