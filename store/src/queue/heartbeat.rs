//! The heartbeat: one statement renews all leases of a process, on its own connection.
//!
//! It needs the pool only while the server has no other connection for it. So it also beats while the pool is full,
//! while statements are slow, and while the process drains.

use super::{Hold, Holdings, boottime_ms};
use crate::pool::Use;
use crate::{Store, schema};
use sqlx::PgConnection;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

/// How soon a heartbeat comes after one that failed.
const AGAIN: Duration = Duration::from_secs(1);

/// Settings of a process's heartbeat.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    pub store: Store,
    pub worker_id: Arc<str>,
    /// Whether the list of workers shows this process. `false` for a process that runs a replay.
    pub listed: bool,
    pub host: String,
    pub concurrency: i32,
    /// The most connections that the process opens.
    pub connections: i32,
    /// What the list of workers says of its agents.
    pub agents: Vec<String>,
    pub lease: Duration,
    pub every: Duration,
    pub holdings: Arc<Holdings>,
    /// Fires when an operator has asked this worker to drain.
    pub drain_asked: CancellationToken,
}

impl Heartbeat {
    /// Beats until `stop`, and goes on after every database fault.
    pub async fn run(self, stop: CancellationToken) {
        let mut own = Own { connection: None, faults: 0, next: Instant::now() };
        let mut tick = tokio::time::interval(self.every);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut faults = 0;
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                _ = tick.tick() => {}
                () = self.holdings.beat_now.notified() => {}
            }
            // Without a time limit, a connection whose server disappeared silently would block past the end of every
            // lease.
            match tokio::time::timeout(self.lease / 2, self.beat_over(&mut own)).await {
                Ok(Ok(())) => faults = 0,
                Ok(Err(error)) => {
                    self.store.server.breaks.note();
                    self.store.server.links.lost(Use::Heartbeat);
                    faults += 1;
                    if faults == 1 {
                        warn!(%error, "The heartbeat failed; leases are kept until they end");
                    } else {
                        debug!(%error, faults, "The heartbeat failed again");
                    }
                    // When the server is back, those that come first wait a moment for the others.
                    tick.reset_after(self.every.min(AGAIN));
                }
                Err(_) => {
                    self.store.server.links.lost(Use::Heartbeat);
                    faults += 1;
                    warn!("The heartbeat took too long; it goes on over a new connection");
                    // The server may still execute it, and write a lock that the process has lost meanwhile.
                    self.holdings.beat();
                }
            }
        }
        if let Some(mut open) = own.take(&self.store).await {
            // Rows of those that were killed long ago go too.
            let gone = sqlx::query!(
                "delete from workers where worker_id = $1 or beat_at < clock_timestamp() - interval '1 day'",
                &*self.worker_id
            );
            if let Err(error) = gone.execute(&mut open).await {
                debug!(%error, "The worker's row was left behind");
            }
        }
    }

    /// Beats over the heartbeat's own connection. While the server gives it none, it uses one of the pool.
    async fn beat_over(&self, own: &mut Own) -> Result<(), sqlx::Error> {
        match own.take(&self.store).await {
            Some(mut open) => {
                self.beat(&mut open).await?;
                self.store.server.links.back(Use::Heartbeat);
                own.connection = Some(open);
                Ok(())
            }
            None => self.beat(&mut *self.store.pool.acquire().await?).await,
        }
    }

    async fn beat(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        let held = self.holdings.all();
        let (jobs, tokens): (Vec<i64>, Vec<i64>) =
            held.iter().map(|((job, token), _)| (*job, *token)).unzip();
        // Read the clock before the statement, so that this value is never later than the lease's end in the
        // database.
        let ends_ms = boottime_ms() + self.lease.as_millis() as u64;
        let lock = self.holdings.lock();
        let extended = sqlx::query!(
            r#"with mine as materialized (
                select jobs.job_id
                from jobs
                join unnest($1::bigint[], $2::bigint[]) as held (job_id, token)
                    on jobs.job_id = held.job_id and jobs.lease = held.token
                for update of jobs skip locked
            )
            update jobs
            -- The process may have another liveness lock now than at the claim.
            set run_at = clock_timestamp() + make_interval(secs => $3), liveness_lock = $4
            from mine
            where jobs.job_id = mine.job_id
            returning jobs.job_id, jobs.lease as "token!""#,
            &jobs,
            &tokens,
            self.lease.as_secs_f64(),
            lock
        )
        .fetch_all(&mut *connection)
        .await;
        self.holdings.written(&self.store, lock);
        // The token too: this process may have claimed a job again whose lease it had lost, and the earlier claim still runs.
        let extended = extended?;
        self.holdings.beat_came(ends_ms - self.lease.as_millis() as u64, self.lease, self.every);
        let extended: HashSet<(i64, i64)> = extended.into_iter().map(|row| (row.job_id, row.token)).collect();
        let (extended, skipped): (Vec<_>, Vec<_>) =
            held.into_iter().partition(|(lease, _)| extended.contains(lease));
        for (_, hold) in extended {
            hold.ends_ms.store(ends_ms, Ordering::Release);
        }
        // Each of these may wait for a lock, so the ends of the others are noted before.
        for ((job_id, token), hold) in skipped {
            self.beat_one(connection, job_id, token, &hold).await?;
        }
        if !self.listed {
            return Ok(());
        }
        let drains = sqlx::query_scalar!(
            r#"insert into workers (worker_id, host, pid, version, concurrency, connections, schema_number, agents)
            values ($1, $2, $3, $4, $5, $6, $7, $8)
            on conflict (worker_id) do update set beat_at = clock_timestamp()
            returning drain_asked_at is not null as "drains!""#,
            &*self.worker_id,
            self.host,
            std::process::id() as i32,
            env!("CARGO_PKG_VERSION"),
            self.concurrency,
            self.connections,
            schema::number(),
            &self.agents
        )
        .fetch_one(connection)
        .await?;
        if drains {
            self.drain_asked.cancel();
        }
        Ok(())
    }

    /// Renews one lease that the update skipped. Either another statement of this process has locked the
    /// job's row, or the lease is lost.
    async fn beat_one(
        &self,
        connection: &mut PgConnection,
        job_id: i64,
        token: i64,
        hold: &Hold,
    ) -> Result<(), sqlx::Error> {
        let ends_ms = boottime_ms() + self.lease.as_millis() as u64;
        let extended = sqlx::query!(
            "update jobs
            set run_at = clock_timestamp() + make_interval(secs => $3)
            where job_id = $1 and lease = $2",
            job_id,
            token,
            self.lease.as_secs_f64()
        )
        .execute(connection)
        .await;
        match extended {
            Ok(done) if done.rows_affected() == 1 => hold.ends_ms.store(ends_ms, Ordering::Release),
            Ok(_) => {
                debug!(job_id, token, "The lease is gone");
                hold.lost.cancel();
            }
            // The row was locked for longer than the lock timeout. Nothing shows that the lease is lost.
            Err(sqlx::Error::Database(error)) if error.code().is_some_and(|code| code == "55P03") => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// The heartbeat's own connection.
struct Own {
    connection: Option<PgConnection>,
    /// How often in a row none could be opened.
    faults: i32,
    next: Instant,
}

impl Own {
    /// Takes the connection, or a new one. `None`: the server gives none at present.
    async fn take(&mut self, store: &Store) -> Option<PgConnection> {
        if let Some(open) = self.connection.take() {
            return Some(open);
        }
        if Instant::now() < self.next {
            return None;
        }
        self.faults += 1;
        // Noted before the attempt, because the beat's time limit may end it. Then the next beat uses the pool.
        self.next = Instant::now() + super::delay(self.faults, None).min(Duration::from_secs(5));
        match store.server.connect(&[("lock_timeout", "3s")]).await {
            Ok(open) => {
                self.faults = 0;
                Some(open)
            }
            Err(error) => {
                self.next = Instant::now() + super::delay(self.faults, None).min(Duration::from_secs(5));
                store.server.links.lost(Use::Heartbeat);
                if self.faults == 1 {
                    warn!(%error, "The heartbeat has no connection of its own; it uses those of the statements");
                }
                None
            }
        }
    }
}
