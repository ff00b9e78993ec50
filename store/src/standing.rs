//! What a session does now and what it waits for, in one answer for operators.

use crate::outbox::{Delivery, DeliveryFilter};
use crate::session::SessionSummary;
use crate::{Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;

/// A session and what it waits for. Several statements read it, so the parts may differ by moments.
#[derive(Clone, Debug, Serialize)]
pub struct Standing {
    pub session: SessionSummary,
    /// The newest run.
    pub run: Option<RunView>,
    /// The running run of another session, which this session's queued run waits for.
    pub behind: Option<Holder>,
    /// The step job, and the deliver jobs of the conversation.
    pub jobs: Vec<JobView>,
    /// Messages that the next step will read.
    pub pending_messages: i64,
    /// Tool calls without a result, and uncertain ones.
    pub open_calls: Vec<OpenCall>,
    /// How many tool calls the newest run asked for, how many of those failed, and the newest of the failed ones.
    pub run_calls: i64,
    pub run_failed_calls: i64,
    pub failed_calls: Vec<FailedCall>,
    /// The newest outgoing messages that were not sent, may not have been sent, or missed a recipient, in
    /// order.
    pub unsent: Vec<Delivery>,
    /// Seconds since the newest journal entry.
    pub quiet_s: Option<f64>,
}

/// One run for display.
#[derive(Clone, Debug, Serialize)]
pub struct RunView {
    pub run_id: String,
    pub status: String,
    pub steps: i64,
    pub error: Option<String>,
    pub created_at: DateTime<Utc>,
    pub started_at: Option<DateTime<Utc>>,
    pub completed_at: Option<DateTime<Utc>>,
}

/// The run that holds the conversation.
#[derive(Clone, Debug, Serialize)]
pub struct Holder {
    pub run_id: String,
    pub session_id: String,
}

/// One job for display. Times are relative to the database's clock.
#[derive(Clone, Debug, Serialize)]
pub struct JobView {
    pub job_id: i64,
    pub kind: String,
    pub channel: Option<String>,
    pub step_number: Option<i64>,
    /// Claims of this step.
    pub attempt: i32,
    /// Claims since the last progress.
    pub stuck: i32,
    /// How many of those ended with the death of their worker.
    pub died: i32,
    /// A worker claimed the job and has not given it back. While `due_in_s` is positive, that worker holds
    /// the job.
    pub leased: bool,
    pub worker_id: Option<String>,
    /// Seconds since the holder's last heartbeat. None: no worker holds the job, or its holder has removed its row.
    pub worker_beat_age_s: Option<f64>,
    /// Seconds until the job may be claimed; negative if it could be claimed already. For a leased job, until the
    /// lease's end.
    pub due_in_s: f64,
    pub last_error: Option<String>,
    /// Seconds since the database began to fail the step, and how often it did since.
    pub fault_s: Option<f64>,
    pub faults: i32,
    /// Seconds since a provider's outage began to hold up the step, and how many of its calls failed since.
    pub outage_s: Option<f64>,
    pub outage_faults: i32,
    /// The provider whose gate the job waits for, since how many seconds that provider has been failing, and in how many
    /// seconds the next probe is due (none while the gate opens).
    pub waits_for: Option<String>,
    pub provider_down_s: Option<f64>,
    pub next_probe_in_s: Option<f64>,
    /// The pause that holds the job: `kind`, `name`, `reason`, `by`, `since`, `until`, `resuming`.
    pub held: Option<Value>,
    /// The agent that the workers which claimed the job lack, and for how many seconds it has waited for one that has it.
    pub lacks_agent: Option<String>,
    pub lacks_agent_s: Option<f64>,
}

/// An unsettled call for display.
#[derive(Clone, Debug, Serialize)]
pub struct OpenCall {
    pub call_id: String,
    pub name: String,
    pub effect: String,
    pub status: String,
    pub attempts: i32,
    /// The message that asked for it.
    pub message_number: i64,
    /// Whether the transcript has a result for the model, even one that says that the outcome is unknown.
    pub told: bool,
    pub started_at: Option<DateTime<Utc>>,
    /// The arguments of a call that a person has to judge, and what is known of an uncertain one's end.
    pub arguments: Option<Value>,
    pub reason: Option<String>,
}

/// A call whose tool returned an error, panicked or took too long.
#[derive(Clone, Debug, Serialize)]
pub struct FailedCall {
    pub call_id: String,
    pub name: String,
    pub message_number: i64,
    /// What the model was told: the beginning of it.
    pub error: Option<String>,
}

impl Store {
    /// Returns the state of the session and what it waits for.
    ///
    /// # Errors
    /// [`crate::Error::NotFound`], [`crate::Error::Database`].
    pub async fn standing(&self, space_id: Option<&str>, session_id: &str) -> Result<Standing> {
        let session = self.session(space_id, session_id).await?;
        let seal = self.seal_of(session_id).await?;
        let mut run = sqlx::query_as!(
            RunView,
            r#"select r.run_id, r.status, used.steps as "steps!", r.error, r.created_at, r.started_at,
                r.completed_at
            from session_runs r
            cross join lateral used_by_run(r) used
            where r.session_id = $1
            order by r.created_at desc
            limit 1"#,
            session_id
        )
        .fetch_optional(&self.pool)
        .await?;
        if let Some(run) = &mut run {
            run.error = seal.open_some(run.error.take())?;
        }
        let behind = sqlx::query_as!(
            Holder,
            "select r.run_id, r.session_id
            from conversation_sessions s
            join conversation_counters c on c.conversation_id = s.conversation_id
            join session_runs r on r.run_id = c.open_run_id
            where s.session_id = $1 and r.session_id <> s.session_id and s.status = 'queued'",
            session_id
        )
        .fetch_optional(&self.pool)
        .await?;
        let mut jobs = sqlx::query_as!(
            JobView,
            r#"
            select j.job_id, j.kind, j.channel, j.step_number, j.attempt, j.stuck, j.died, j.lease is not null as "leased!",
                j.worker_id,
                extract(epoch from clock_timestamp() - w.beat_at)::float8 as worker_beat_age_s,
                extract(epoch from j.run_at - clock_timestamp())::float8 as "due_in_s!",
                j.last_error, extract(epoch from clock_timestamp() - j.outage_since)::float8 as outage_s, j.outage_faults,
                extract(epoch from clock_timestamp() - j.fault_since)::float8 as fault_s, j.faults,
                g.provider as "waits_for?",
                extract(epoch from clock_timestamp() - g.since)::float8 as provider_down_s,
                extract(epoch from g.probe_at - clock_timestamp())::float8 as next_probe_in_s,
                (
                    select json_build_object('kind', p.kind, 'name', p.name, 'reason', p.reason, 'by', p.paused_by,
                        'since', p.since, 'until', p.ends_at, 'resuming', p.resuming_since is not null)
                    from pauses p where p.pause_id = j.held_by
                ) as held,
                case when j.held_by like 'lacks:%' then substr(j.held_by, 7) end as lacks_agent,
                case when j.held_by like 'lacks:%'
                    then extract(epoch from clock_timestamp() - j.held_since)::float8 end as lacks_agent_s
            from conversation_sessions s
            join jobs j on j.conversation_id = s.conversation_id
                and (j.session_id = s.session_id or j.kind = 'deliver')
            left join workers w on w.worker_id = j.worker_id
            left join provider_gates g on g.gate_id = j.waits_for
            where s.session_id = $1
            order by j.kind desc, j.channel
            limit 20
            "#,
            session_id
        )
        .fetch_all(&self.pool)
        .await?;
        for job in &mut jobs {
            job.last_error = seal.open_some(job.last_error.take())?;
        }
        let mut open_calls = sqlx::query_as!(
            OpenCall,
            r#"
            select c.call_id, c.name, c.effect, c.status, c.attempts, c.message_number,
                c.result_message_number is not null as "told!", c.started_at,
                case when c.status in ('uncertain', 'unapproved') then (
                    select block -> 'arguments'
                    from conversation_records r, jsonb_array_elements(r.content::jsonb) block
                    where r.conversation_id = s.conversation_id and r.message_number = c.message_number
                        and block ->> 'call_id' = c.call_id
                    limit 1
                ) end as arguments,
                case when c.status = 'uncertain' then (
                    select e.payload ->> 'reason' from session_events e
                    where e.session_id = c.session_id and e.type = 'TOOL_FAILED_UNCERTAIN'
                        and e.payload ->> 'call_id' = c.call_id
                    limit 1
                ) end as reason
            from tool_calls c
            join conversation_sessions s on s.session_id = c.session_id
            where c.session_id = $1 and (c.result_message_number is null or c.status = 'uncertain')
            order by c.message_number, c.call_id
            limit 50
            "#,
            session_id
        )
        .fetch_all(&self.pool)
        .await?;
        for call in &mut open_calls {
            call.reason = seal.open_some(call.reason.take())?;
            call.arguments = call.arguments.take().map(|sealed| seal.open_value(sealed)).transpose()?;
        }
        let run_id = run.as_ref().map(|run| run.run_id.as_str());
        let mut failed_calls = sqlx::query_as!(
            FailedCall,
            r#"
            select c.call_id, c.name, c.message_number,
                left((
                    select block ->> 'content'
                    from conversation_records r, jsonb_array_elements(r.content::jsonb) block
                    where r.conversation_id = s.conversation_id and r.message_number = c.result_message_number
                        and block ->> 'call_id' = c.call_id
                    limit 1
                ), case when s.data_key is null then 500 else 1000000000 end) as error
            from tool_calls c
            join conversation_sessions s on s.session_id = c.session_id
            where c.session_id = $1 and c.run_id = $2 and c.status = 'failed'
            order by c.message_number desc, c.call_id
            limit 20
            "#,
            session_id,
            run_id
        )
        .fetch_all(&self.pool)
        .await?;
        for call in &mut failed_calls {
            // A sealed text is opened whole, and cut then.
            let error = call.error.take().map(|sealed| seal.open(sealed)).transpose()?;
            call.error = error.map(|text| text.chars().take(500).collect());
        }
        let calls = sqlx::query!(
            r#"select count(*) as "all!", count(*) filter (where status = 'failed') as "failed!"
            from tool_calls where session_id = $1 and run_id = $2"#,
            session_id,
            run_id
        )
        .fetch_one(&self.pool)
        .await?;
        let filter = DeliveryFilter {
            session_id: Some(session_id.to_owned()),
            unsettled: true,
            limit: 50,
            ..DeliveryFilter::default()
        };
        let mut unsent = self.outbox(&filter).await?;
        unsent.sort_by_key(|delivery| delivery.ordinal);
        let (pending_messages, quiet_s) = {
            let row = sqlx::query!(
                r#"
                select
                    (select count(*) from session_inbox where session_id = $1 and status = 'pending') as "pending!",
                    (
                        select extract(epoch from clock_timestamp() - ts)::float8 from session_events
                        where session_id = $1
                        order by seq desc
                        limit 1
                    ) as quiet_s
                "#,
                session_id
            )
            .fetch_one(&self.pool)
            .await?;
            (row.pending, row.quiet_s)
        };
        Ok(Standing {
            session,
            run,
            behind,
            jobs,
            pending_messages,
            open_calls,
            run_calls: calls.all,
            run_failed_calls: calls.failed,
            failed_calls,
            unsent,
            quiet_s,
        })
    }
}
