//! The gates of the models, which all workers share: see [`wakeful_workflow::gate`].
//!
//! Only faults write here, and what follows them: probes, waves, waiting jobs. A lock on a gate's row is taken before a
//! job's. A job that begins to wait locks the gate's row shared, so the gate cannot open fully without seeing it.

use crate::encryption::SEALED;
use crate::queue::{GATES, Lease};
use crate::run::{Wakes, append_events};
use crate::{Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;
use std::time::Duration;
use wakeful_workflow::event::Event;
use wakeful_workflow::gate::{Gate, GatePolicy, Phase, Seen};
use wakeful_workflow::id::{RunId, SessionId};

/// Waiting jobs that are counted. A wave never has more.
const COUNTED: i64 = 1025;

/// The probe is made by one of so many jobs that wait the longest.
const FIRST_IN_LINE: i64 = 100;

/// A gate as it was read.
#[derive(Clone, Debug)]
pub struct GateView {
    pub gate_id: String,
    pub gate: Gate,
    /// The number of its last opening: a job with this pass goes through.
    pub opening: i64,
    /// The database's clock at that time, in milliseconds.
    pub now_ms: i64,
    pub last_error: Option<String>,
}

/// A gate that is not open, for people.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ClosedGate {
    /// What does not answer: a model with its provider (`openai/gpt-5`), a blob store, or what files begin with.
    pub provider: String,
    /// `shut`, or `opening` while the waiting jobs are let through.
    pub phase: String,
    pub since: DateTime<Utc>,
    pub next_probe_at: Option<DateTime<Utc>>,
    /// Probes that failed.
    pub probes: i32,
    /// Jobs that wait for it; at most 1025 are counted.
    pub waiting: i64,
    pub last_error: Option<String>,
}

/// Why and for how long a job is given back.
#[derive(Clone, Copy, Debug)]
pub struct SetBack<'a> {
    pub error: &'a str,
    /// The gate that the job waits for, if it is not open. It looks by itself after `look`.
    pub gate: Option<(&'a str, Duration)>,
    /// When it is tried again where no gate holds it up.
    pub delay: Duration,
    /// The entry about the call that failed. `None`: no call was made.
    pub failed: Option<(&'a SessionId, Option<&'a RunId>, &'a Event)>,
    /// The fault is an outage of the provider, or its gate is shut: the claim does not count as an attempt.
    pub outage: bool,
}

struct Row {
    phase: String,
    faults: i32,
    last_fault_ms: Option<i64>,
    answered_ms: Option<i64>,
    since_ms: Option<i64>,
    probe_at_ms: Option<i64>,
    probes: i32,
    wave: i32,
    opening: i64,
    last_error: Option<String>,
    now_ms: i64,
}

impl Row {
    fn gate(&self) -> Gate {
        let since_ms = self.since_ms.unwrap_or(self.now_ms);
        let phase = match self.phase.as_str() {
            "shut" => Phase::Shut {
                since_ms,
                probe_at_ms: self.probe_at_ms.unwrap_or(self.now_ms),
                probes: self.probes.into(),
            },
            "opening" => Phase::Opening { since_ms, wave: self.wave.into() },
            _ => Phase::Open,
        };
        let (last_fault_ms, answered_ms) = (self.last_fault_ms, self.answered_ms);
        Gate { phase, faults: self.faults.into(), last_fault_ms, answered_ms }
    }
}

impl Store {
    /// Returns the gates that are not open.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn gates(&self) -> Result<Vec<GateView>> {
        let rows = sqlx::query!(
            r#"select gate_id, phase, faults, (extract(epoch from last_fault_at) * 1000)::bigint as last_fault_ms,
                (extract(epoch from answered_at) * 1000)::bigint as answered_ms,
                (extract(epoch from since) * 1000)::bigint as since_ms,
                (extract(epoch from probe_at) * 1000)::bigint as probe_at_ms, probes, wave, opening, last_error,
                (extract(epoch from clock_timestamp()) * 1000)::bigint as "now_ms!"
            from provider_gates
            where phase <> 'open'"#
        )
        .fetch_all(&self.pool)
        .await?;
        let views = rows.into_iter().map(|row| {
            let gate_id = row.gate_id;
            let row = Row {
                phase: row.phase,
                faults: row.faults,
                last_fault_ms: row.last_fault_ms,
                answered_ms: row.answered_ms,
                since_ms: row.since_ms,
                probe_at_ms: row.probe_at_ms,
                probes: row.probes,
                wave: row.wave,
                opening: row.opening,
                last_error: row.last_error,
                now_ms: row.now_ms,
            };
            let (gate, opening, now_ms) = (row.gate(), row.opening, row.now_ms);
            GateView { gate_id, gate, opening, now_ms, last_error: row.last_error }
        });
        Ok(views.collect())
    }

    /// Returns the gates that are not open, with the number of jobs that wait for each.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn closed_gates(&self) -> Result<Vec<ClosedGate>> {
        Ok(sqlx::query_as!(
            ClosedGate,
            r#"select provider, phase, since as "since!", case when phase = 'shut' then probe_at end as next_probe_at, probes,
                last_error,
                (select count(*) from (
                    select from jobs where waits_for = gate_id limit $1
                ) counted) as "waiting!"
            from provider_gates
            where phase <> 'open'
            order by since"#,
            COUNTED
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// Records what a worker saw of a provider, and returns its gate after that.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn gate_saw(
        &self,
        gate_id: &str,
        provider: &str,
        seen: Seen,
        error: Option<&str>,
        policy: &GatePolicy,
    ) -> Result<GateView> {
        // A provider's error may quote the prompt of an encrypted conversation, and a gate is everybody's.
        let error = error.map(|error| if self.vault.is_open() { SEALED } else { error });
        let mut tx = self.pool.begin().await?;
        sqlx::query!(
            "insert into provider_gates (gate_id, provider) values ($1, $2) on conflict (gate_id) do nothing",
            gate_id,
            provider
        )
        .execute(&mut *tx)
        .await?;
        let row = sqlx::query_as!(
            Row,
            r#"select phase, faults, (extract(epoch from last_fault_at) * 1000)::bigint as last_fault_ms,
                (extract(epoch from answered_at) * 1000)::bigint as answered_ms,
                (extract(epoch from since) * 1000)::bigint as since_ms,
                (extract(epoch from probe_at) * 1000)::bigint as probe_at_ms, probes, wave, opening, last_error,
                (extract(epoch from clock_timestamp()) * 1000)::bigint as "now_ms!"
            from provider_gates
            where gate_id = $1
            for update"#,
            gate_id
        )
        .fetch_one(&mut *tx)
        .await?;
        let before = row.gate();
        let after = before.after(seen, row.now_ms, policy);
        let opens = matches!(after.phase, Phase::Opening { .. }) && before.phase != after.phase;
        let opening = row.opening + i64::from(opens);
        if after != before {
            let probe = matches!(seen, Seen::Fault { probe: true, .. } | Seen::Success { probe: true });
            write(&mut tx, gate_id, &after, row.now_ms, opening, error).await?;
            if probe {
                sqlx::query!(
                    "update provider_gates set probe_job = null, probe_until = null where gate_id = $1",
                    gate_id
                )
                .execute(&mut *tx)
                .await?;
            }
            if before.phase != after.phase {
                sqlx::query!("select pg_notify($1, $2)", GATES, gate_id).execute(&mut *tx).await?;
            }
        }
        tx.commit().await?;
        let last_error = error.map(str::to_owned).or(row.last_error);
        Ok(GateView { gate_id: gate_id.to_owned(), gate: after, opening, now_ms: row.now_ms, last_error })
    }

    /// Takes the right to make the probe of a gate, for the time `hold`. Returns false if another job has it, or the
    /// probe is not due.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn take_probe(&self, gate_id: &str, lease: &Lease, hold: Duration) -> Result<bool> {
        let taken = sqlx::query!(
            "update provider_gates
            set probe_job = $2, probe_until = clock_timestamp() + make_interval(secs => $3)
            where gate_id = $1 and phase = 'shut' and probe_at <= clock_timestamp()
                and (probe_until is null or probe_until <= clock_timestamp() or probe_job = $2)",
            gate_id,
            lease.job_id,
            hold.as_secs_f64()
        )
        .execute(&self.pool)
        .await?;
        Ok(taken.rows_affected() == 1)
    }

    /// Keeps the right to make the probe for another `hold`, while the call lasts.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn keep_probe(&self, gate_id: &str, job_id: i64, hold: Duration) -> Result<()> {
        sqlx::query!(
            "update provider_gates
            set probe_until = clock_timestamp() + make_interval(secs => $3)
            where gate_id = $1 and phase = 'shut' and probe_job = $2",
            gate_id,
            job_id,
            hold.as_secs_f64()
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Lets the next jobs of a gate through, if it is time: one for a probe, or a wave. Returns how many were woken. Only one
    /// of the processes that ask at a moment does it.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn tend_gate(&self, gate_id: &str, hold: Duration, policy: &GatePolicy) -> Result<u64> {
        let mut tx = self.pool.begin().await?;
        let row = sqlx::query_as!(
            Row,
            r#"select phase, faults, (extract(epoch from last_fault_at) * 1000)::bigint as last_fault_ms,
                (extract(epoch from answered_at) * 1000)::bigint as answered_ms,
                (extract(epoch from since) * 1000)::bigint as since_ms,
                (extract(epoch from probe_at) * 1000)::bigint as probe_at_ms, probes, wave, opening, last_error,
                (extract(epoch from clock_timestamp()) * 1000)::bigint as "now_ms!"
            from provider_gates
            where gate_id = $1 and phase <> 'open' and wake_at <= clock_timestamp()
                and (phase <> 'shut' or probe_until is null or probe_until <= clock_timestamp())
            for update skip locked"#,
            gate_id
        )
        .fetch_optional(&mut *tx)
        .await?;
        let Some(row) = row else { return Ok(0) };
        let waiting = sqlx::query_scalar!(
            r#"select count(*) as "waiting!"
            from (select from jobs where waits_for = $1 and lease is null limit $2) counted"#,
            gate_id,
            COUNTED
        )
        .fetch_one(&mut *tx)
        .await?;
        let before = row.gate();
        let (through, after) = before.wave(waiting, row.now_ms);
        let opens = matches!(before.phase, Phase::Opening { .. });
        // The probe is made by the job whose calls failed the least. So a request that fails by itself does not keep the gate
        // shut, if one that may well be answered waits too. And the job that probes goes to the end of the line.
        let woken = sqlx::query!(
            "update jobs
            set run_at = clock_timestamp(), waits_since = case when $3 then null else clock_timestamp() end,
                waits_for = case when $3 then null else waits_for end,
                gate_pass = case when $3 then $4 else gate_pass end
            where job_id = any (array(
                select job_id from jobs
                where waits_for = $1 and lease is null and ($3 or job_id = (
                    select job_id from (
                        select job_id, outage_faults, waits_since from jobs
                        where waits_for = $1 and lease is null
                        order by waits_since
                        limit $5
                    ) first
                    order by outage_faults, waits_since
                    limit 1))
                order by waits_since
                limit $2
                for update skip locked))",
            gate_id,
            through,
            opens,
            row.opening,
            FIRST_IN_LINE
        )
        .execute(&mut *tx)
        .await?
        .rows_affected();
        // A waiting job that another transaction holds was left out. It would not be woken if the gate opened now.
        let left_out = woken < through.unsigned_abs();
        let after = if opens && left_out { before } else { after };
        write(&mut tx, gate_id, &after, row.now_ms, row.opening, None).await?;
        // One that was woken for a probe has some time to begin it. Then another is woken.
        let pause = match after.phase {
            Phase::Shut { .. } if woken > 0 => hold,
            Phase::Shut { .. } | Phase::Opening { .. } | Phase::Open => {
                Duration::from_millis(policy.wave_ms.unsigned_abs())
            }
        };
        sqlx::query!(
            "update provider_gates set wake_at = clock_timestamp() + make_interval(secs => $2) where gate_id = $1",
            gate_id,
            pause.as_secs_f64()
        )
        .execute(&mut *tx)
        .await?;
        if after.is_open() {
            sqlx::query!("select pg_notify($1, $2)", GATES, gate_id).execute(&mut *tx).await?;
        }
        tx.commit().await?;
        Ok(woken)
    }

    /// Gives a job back after a fault of its model call, or because its provider's gate is not open. Writes nothing if the
    /// lease is lost. Returns whether the run is to be cancelled: then the job waits for nothing.
    ///
    /// # Errors
    /// [`crate::Error::Database`]; then the lease ends by itself.
    pub async fn set_back(&self, lease: &Lease, back: &SetBack<'_>) -> Result<bool> {
        let error = self.sealed_for_job(lease.job_id, back.error).await?;
        let mut tx = self.pool.begin().await?;
        if let Some((session_id, run_id, event)) = back.failed {
            let run_id = run_id.map(RunId::as_str);
            let events = std::slice::from_ref(event);
            append_events(&mut tx, session_id.as_str(), run_id, None, Wakes::Nothing, events).await?;
        }
        let (gate_id, look) = back.gate.unzip();
        let set = sqlx::query!(
            "with gate as (
                -- Waits for a process that is opening the gate, and then sees that it is open.
                select gate_id from provider_gates where gate_id = $3 and phase <> 'open' for share
            )
            update jobs
            set lease = null, worker_id = null, last_error = $4,
                stuck = case when $5::boolean then greatest(stuck - 1, 0) else greatest(stuck, 1) end,
                attempt = case when $6::boolean then attempt else greatest(attempt - 1, 0) end,
                outage_since = case when $5 then coalesce(outage_since, clock_timestamp()) else outage_since end,
                outage_faults = outage_faults + case when $5 and $6 then 1 else 0 end,
                waits_for = (select gate_id from gate),
                waits_since = case
                    when not exists (select from gate) then null
                    when $6 then clock_timestamp()
                    else coalesce(waits_since, clock_timestamp())
                end,
                -- The wait is not the database's, so it does not count as a time in which the database failed the step.
                fault_since = case when exists (select from gate) then null else fault_since end,
                faults = case when exists (select from gate) then 0 else faults end,
                run_at = clock_timestamp()
                    + make_interval(secs => case when exists (select from gate) then $7::float8 else $8::float8 end),
                trace_context = $9
            where job_id = $1 and lease = $2",
            lease.job_id,
            lease.token,
            gate_id,
            error,
            back.outage,
            back.failed.is_some(),
            look.unwrap_or(back.delay).as_secs_f64(),
            back.delay.as_secs_f64(),
            lease.trace_context.as_deref()
        )
        .execute(&mut *tx)
        .await?;
        if set.rows_affected() == 0 {
            return Ok(false);
        }
        // A cancel that came during the claim found no waiting job. The statement above may have waited for it, so only a
        // later one sees it.
        let cancelled = sqlx::query!(
            "update jobs
            set run_at = clock_timestamp(), waits_for = null, waits_since = null
            where job_id = $1 and exists (
                select from conversation_sessions s
                where s.session_id = jobs.session_id and s.cancel_requested)",
            lease.job_id
        )
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(cancelled.rows_affected() == 1)
    }
}

/// Lets the step job of a session that is to be cancelled be claimed now, although it waits for a gate or its next attempt.
pub(crate) async fn wait_no_longer(tx: &mut sqlx::PgConnection, session_id: &str) -> Result<()> {
    // The update does not ask for the lease. So it waits for a claim that ends just now, and sees its end.
    sqlx::query!(
        "update jobs
        set run_at = case when lease is null then clock_timestamp() else run_at end,
            waits_for = case when lease is null then null else waits_for end,
            waits_since = case when lease is null then null else waits_since end,
            held_by = case when lease is null then null else held_by end,
            held_since = case when lease is null then null else held_since end
        where session_id = $1 and kind = 'step'",
        session_id
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// Lets the step job of a session look at the gate that it waits for, and keeps its place in the line. Returns the gate.
pub(crate) async fn look_now(tx: &mut sqlx::PgConnection, session_id: &str) -> Result<Option<String>> {
    let waits_for = sqlx::query_scalar!(
        "update jobs set run_at = clock_timestamp()
        where session_id = $1 and kind = 'step' and lease is null and waits_for is not null
        returning waits_for",
        session_id
    )
    .fetch_optional(tx)
    .await?;
    Ok(waits_for.flatten())
}

/// Writes a gate. `wake_at` becomes the time of the next probe or wave.
async fn write(
    tx: &mut sqlx::PgConnection,
    gate_id: &str,
    gate: &Gate,
    now_ms: i64,
    opening: i64,
    error: Option<&str>,
) -> Result<()> {
    let (phase, since, probe_at, probes, wave, wake_at) = match gate.phase {
        Phase::Open => ("open", None, None, 0, 0, None),
        Phase::Shut { since_ms, probe_at_ms, probes } => {
            ("shut", Some(since_ms), Some(probe_at_ms), probes, 0, Some(probe_at_ms))
        }
        Phase::Opening { since_ms, wave } => ("opening", Some(since_ms), None, 0, wave, Some(now_ms)),
    };
    sqlx::query!(
        "update provider_gates
        set phase = $2, faults = $3, last_fault_at = to_timestamp($4::bigint / 1000.0), since = to_timestamp($5::bigint / 1000.0),
            probe_at = to_timestamp($6::bigint / 1000.0), probes = $7, wave = $8, opening = $9,
            answered_at = to_timestamp($12::bigint / 1000.0),
            -- A fault or an answer while the gate opens does not hurry the next wave.
            wake_at = case when $2 = 'opening' and phase = 'opening' then wake_at else to_timestamp($10::bigint / 1000.0) end,
            last_error = coalesce($11, last_error)
        where gate_id = $1",
        gate_id,
        phase,
        narrow(gate.faults),
        gate.last_fault_ms,
        since,
        probe_at,
        narrow(probes),
        narrow(wave),
        opening,
        wake_at,
        error.map(crate::error::bounded),
        gate.answered_ms
    )
    .execute(tx)
    .await?;
    Ok(())
}

fn narrow(count: i64) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}
