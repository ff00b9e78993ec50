//! Pauses in the database, which all workers share: see [`wakeful_workflow::pause`].
//!
//! A job that a pause holds up is given back with the pause's name on it, and no claim sees it until the pause lets it go. So a
//! claim costs the same with and without pauses. A pause that ends lets its jobs go at a rate, the oldest first; new ones
//! wait behind them.

use crate::audit::act;
use crate::queue::{GATES, Lease};
use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;
use std::time::Duration;
use wakeful_workflow::pause::{Kind, Subject};

/// Jobs that one look lets go at most, also of a pause that ends without a rate.
const WAVE: i64 = 1000;

/// Waiting jobs that are counted.
const COUNTED: i64 = 100_000;

/// One pause.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Pause {
    #[cfg_attr(feature = "schema", schemars(extend("enum" = Kind::ALL.map(Kind::as_str))))]
    pub kind: String,
    pub name: String,
    pub reason: String,
    /// Who paused it.
    pub by: Option<String>,
    pub since: DateTime<Utc>,
    /// When it ends by itself.
    pub until: Option<DateTime<Utc>>,
    /// Since when it lets its jobs go. `None`: it holds them.
    pub resuming_since: Option<DateTime<Utc>>,
    /// How many of them a second, when it ends. `None`: all.
    pub rate: Option<f64>,
    /// Jobs that it holds; at most 100,000 are counted.
    pub waiting: i64,
    /// A job whose passes have this number goes through.
    #[serde(skip)]
    pub number: i64,
}

impl Pause {
    /// What is paused. `None`: a kind that this binary does not know.
    pub fn subject(&self) -> Option<Subject> {
        Some(Subject { kind: Kind::parse(&self.kind)?, name: self.name.clone() })
    }

    /// What is paused, in words: "agent support".
    pub fn what(&self) -> String {
        if self.name.is_empty() {
            format!("the {}", self.kind)
        } else {
            format!("{} {}", self.kind, self.name)
        }
    }
}

impl Store {
    /// Pauses `subject`, or changes its pause.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn pause(
        &self,
        subject: &Subject,
        reason: &str,
        lasts: Option<Duration>,
        rate: Option<f64>,
    ) -> Result<Pause> {
        act::because(Some(reason));
        act::on(&subject.id());
        let mut tx = self.pool.begin().await?;
        sqlx::query!(
            "insert into pauses (pause_id, kind, name, reason, paused_by, ends_at, rate)
            values ($1, $2, $3, $4, $5, clock_timestamp() + make_interval(secs => $6), $7)
            on conflict (pause_id) do update set reason = excluded.reason, paused_by = excluded.paused_by,
                ends_at = excluded.ends_at, rate = excluded.rate, resuming_since = null, tended_at = null,
                number = nextval('pause_numbers')",
            subject.id(),
            subject.kind.as_str(),
            subject.name,
            reason,
            act::actor(),
            lasts.map(|lasts| lasts.as_secs_f64()),
            rate
        )
        .execute(&mut *tx)
        .await?;
        sqlx::query!("select pg_notify($1, $2)", GATES, subject.id()).execute(&mut *tx).await?;
        tx.commit().await?;
        self.pauses()
            .await?
            .into_iter()
            .find(|pause| pause.subject().as_ref() == Some(subject))
            .ok_or_else(|| Error::NotFound { what: "pause", id: subject.id() })
    }

    /// Ends a pause: its jobs go on, `rate` of them a second, or all.
    ///
    /// # Errors
    /// [`Error::NotFound`] if it is not paused, [`Error::Database`].
    pub async fn resume(&self, subject: &Subject, rate: Option<f64>) -> Result<()> {
        act::on(&subject.id());
        let mut tx = self.pool.begin().await?;
        let resumed = sqlx::query!(
            "update pauses
            set resuming_since = coalesce(resuming_since, clock_timestamp()), rate = coalesce($2, rate),
                tended_at = coalesce(tended_at, clock_timestamp())
            where pause_id = $1",
            subject.id(),
            rate
        )
        .execute(&mut *tx)
        .await?;
        if resumed.rows_affected() == 0 {
            return Err(Error::NotFound { what: "pause", id: subject.id() });
        }
        sqlx::query!("select pg_notify($1, $2)", GATES, subject.id()).execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(())
    }

    /// Like [`Store::resume`], for the first of `subjects` that is paused.
    ///
    /// # Errors
    /// [`Error::NotFound`] if none of them is paused, [`Error::Database`].
    pub async fn resume_first(&self, subjects: &[Subject], rate: Option<f64>) -> Result<Subject> {
        let mut missing = None;
        for subject in subjects {
            match self.resume(subject, rate).await {
                Ok(()) => return Ok(subject.clone()),
                Err(error @ Error::NotFound { .. }) => missing = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(missing.unwrap_or_else(|| Error::NotFound { what: "pause", id: String::new() }))
    }

    /// Every pause, the oldest first.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn pauses(&self) -> Result<Vec<Pause>> {
        self.known_pauses(COUNTED).await
    }

    /// Like [`Store::pauses`], but counts at most `counted` waiting jobs of each.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn known_pauses(&self, counted: i64) -> Result<Vec<Pause>> {
        Ok(sqlx::query_as!(
            Pause,
            r#"select kind, name, reason, paused_by as by, since, ends_at as until, resuming_since, rate, number,
                (select count(*) from (
                    select from jobs where jobs.held_by = pauses.pause_id limit $1
                ) counted) as "waiting!"
            from pauses
            order by since"#,
            counted
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// Lets the next jobs of ended pauses go, and removes a pause that holds none any more. Returns how many jobs may be
    /// claimed now. If several processes ask at one moment, only one of them does it.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn tend_pauses(&self) -> Result<u64> {
        let mut tx = self.pool.begin().await?;
        let ended = sqlx::query!(
            r#"select pause_id, number, rate, resuming_since is not null as "resuming!",
                extract(epoch from clock_timestamp() - coalesce(tended_at, clock_timestamp()))::float8 as "untended_s!"
            from pauses
            where resuming_since is not null or ends_at <= clock_timestamp()
            order by pause_id
            for update skip locked"#
        )
        .fetch_all(&mut *tx)
        .await?;
        let mut gone = 0;
        for pause in &ended {
            if !pause.resuming {
                sqlx::query!(
                    "update pauses set resuming_since = clock_timestamp(), tended_at = clock_timestamp() where pause_id = $1",
                    pause.pause_id
                )
                .execute(&mut *tx)
                .await?;
            }
            let wave = match pause.rate {
                Some(rate) => (rate * pause.untended_s).floor().clamp(0.0, WAVE as f64) as i64,
                None => WAVE,
            };
            if wave == 0 {
                continue;
            }
            let freed = sqlx::query!(
                "update jobs
                set run_at = clock_timestamp(), held_by = null, held_since = null,
                    -- While it was held, nobody knew how the provider did: that time is not a part of its outage. The outage may
                    -- have begun after the job first stood in line.
                    outage_since = outage_since + (clock_timestamp() - greatest(held_since, outage_since)),
                    -- The other pauses have let it go too, and must not hold it again.
                    pause_passes = array(select number from pauses where number = any (pause_passes)) || $2::bigint
                where job_id = any (array(
                    select job_id from jobs
                    where held_by = $1 and lease is null
                    order by held_since
                    limit $3
                    for update skip locked))",
                pause.pause_id,
                pause.number,
                wave
            )
            .execute(&mut *tx)
            .await?
            .rows_affected();
            gone += freed;
            // A job that begins to wait locks the row shared, so none is left behind.
            let over = sqlx::query!(
                "delete from pauses where pause_id = $1 and not exists (select from jobs where held_by = $1)",
                pause.pause_id
            )
            .execute(&mut *tx)
            .await?
            .rows_affected();
            if over == 0 {
                // Count only the time that this wave's jobs take at the rate: looks come more often than a whole job falls due. A
                // wave has a largest size. What it leaves because of that is made up for later, but for one second at most.
                let of_wave = pause.rate.map(|rate| wave as f64 / rate);
                sqlx::query!(
                    "update pauses
                    set tended_at = case
                        when $2::float8 is null then clock_timestamp()
                        else greatest(tended_at + make_interval(secs => $2), clock_timestamp() - interval '1 second')
                    end
                    where pause_id = $1",
                    pause.pause_id,
                    of_wave
                )
                .execute(&mut *tx)
                .await?;
            }
            sqlx::query!("select pg_notify($1, $2)", GATES, pause.pause_id).execute(&mut *tx).await?;
        }
        tx.commit().await?;
        Ok(gone)
    }

    /// Gives back a job that a pause holds up. The job looks again by itself after `look`. The claim does not count. Returns true if
    /// the pause is gone by now, or the run is to be cancelled: then the job may be claimed at once.
    ///
    /// # Errors
    /// [`Error::Database`]; then the lease ends by itself.
    pub async fn hold(&self, lease: &Lease, subject: &Subject, look: Duration) -> Result<bool> {
        let mut tx = self.pool.begin().await?;
        let held = sqlx::query_scalar!(
            r#"with pause as (
                select pause_id from pauses where pause_id = $3 for share
            )
            update jobs
            set lease = null, worker_id = null, stuck = greatest(stuck - 1, 0), attempt = greatest(attempt - 1, 0),
                held_by = (select pause_id from pause),
                held_since = case when exists (select from pause) then coalesce(held_since, clock_timestamp()) end,
                run_at = clock_timestamp()
                    + make_interval(secs => case when exists (select from pause) then $4::float8 else 0.1 end),
                -- The database has served the step, and what it waits for now is not the database.
                fault_since = null, faults = 0,
                trace_context = $5
            where job_id = $1 and lease = $2
            returning held_by is not null as "held!""#,
            lease.job_id,
            lease.token,
            subject.id(),
            look.as_secs_f64(),
            lease.trace_context.as_deref()
        )
        .fetch_optional(&mut *tx)
        .await?;
        // The statement above may have waited for a cancel, which found no waiting job.
        let cancelled = sqlx::query!(
            "update jobs set run_at = clock_timestamp(), held_by = null, held_since = null
            where job_id = $1 and lease is null
                and exists (select from conversation_sessions s
                    where s.session_id = jobs.session_id and s.cancel_requested)",
            lease.job_id
        )
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(held == Some(false) || cancelled.rows_affected() > 0)
    }
}
