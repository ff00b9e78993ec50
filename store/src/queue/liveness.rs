//! The liveness lock: other processes see within a second that a process has died.
//!
//! The README of this module has the protocol. In short: a lock that is free in two looks means that its
//! process is dead. A process whose lock's connection breaks removes the key from its jobs before the second
//! look, so its jobs stay with it.

use super::proven::{Lost, ProvenListener};
use super::{Holdings, Notifier, jittered};
use crate::pool::Use;
use crate::{Error, Result, Store};
use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

/// First key of our advisory locks; the second one is the process's own. "wake" in ASCII, so that other
/// programs' locks in this database do not meet ours.
const CLASS: i32 = 0x77_61_6b_65;

/// How often a process looks for locks that are free.
const LOOK: Duration = Duration::from_millis(400);

/// Shortest time between the first and the last look that find a lock free. In this time a live process whose
/// connection broke removes its key from its jobs.
const GRACE: Duration = Duration::from_millis(350);

/// After the server's start nobody judges for this long: it has freed every lock, and the processes need time to take theirs again.
const SETTLE: Duration = Duration::from_secs(3);

/// After the loss of its own lock a process judges no other one for this long. Another server may be the writer now, and then the
/// locks of all are free. Some processes notice that seconds later, and wait seconds more for the one that is gone.
const FAILOVER: Duration = Duration::from_secs(10);

/// Pause before the next attempt if the connection does not keep its session.
const POOLED_RETRY: Duration = Duration::from_secs(60);

/// Settings of a process's liveness lock.
#[derive(Clone, Debug)]
pub struct Liveness {
    pub store: Store,
    pub holdings: Arc<Holdings>,
    pub notifier: Notifier,
}

impl Liveness {
    /// Holds the lock and looks after the locks of others, until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let (judge, judges) = watch::channel(None);
        // After a panic the connection that holds the lock is gone, and claims would go on to name the lock. At an orderly stop,
        // jobs that are still leased keep the key: then others see that their worker is gone.
        let this = LetsGo(&self);
        let held = async { tokio::join!(this.0.keep(&judge), this.0.look(&judges)) };
        stop.run_until_cancelled(held).await;
    }

    /// Takes the lock, and takes another one whenever it is lost. `judge` says from when on this process may
    /// judge others.
    async fn keep(&self, judge: &watch::Sender<Option<Instant>>) {
        let (mut had_one, mut faults, mut unheard) = (false, 0, 0);
        loop {
            let lost = self.hold(judge, had_one).await;
            judge.send_replace(None);
            self.store.server.links.lost(Use::LivenessLock);
            let had_this = self.let_go();
            if had_this {
                (had_one, faults) = (true, 0);
            }
            faults += 1;
            unheard = if matches!(lost, Lost::Session) { unheard + 1 } else { 0 };
            let pause = match &lost {
                // One slow notification proves nothing: the server's disk may have stalled.
                Lost::Session if unheard < 2 => super::delay(faults, None).min(Duration::from_secs(5)),
                Lost::Session => {
                    warn!(
                        "The database connection does not keep its session: a pooler in transaction mode? Connect \
                         directly or in session mode. Until then, jobs of a killed worker wait for their lease's end"
                    );
                    POOLED_RETRY
                }
                Lost::Connection(error) => {
                    if faults == 1 {
                        warn!(%error, "No liveness lock; taking it again. Until then only leases count");
                    }
                    super::delay(faults, None).min(Duration::from_secs(5))
                }
            };
            if !had_this {
                tokio::time::sleep(pause).await;
            }
        }
    }

    /// The lock is lost: removes its key from the jobs. The next lock does not wait for that. `false`: there was none.
    fn let_go(&self) -> bool {
        let key = self.holdings.replace_lock(0);
        if key != 0 {
            tokio::spawn(disown(self.store.clone(), key));
        }
        key != 0
    }

    /// Takes a lock with a new key and holds it until its connection breaks.
    async fn hold(&self, judge: &watch::Sender<Option<Instant>>, had_one: bool) -> Lost {
        match self.try_hold(judge, had_one).await {
            Ok(never) => match never {},
            Err(lost) => lost,
        }
    }

    async fn try_hold(
        &self,
        judge: &watch::Sender<Option<Instant>>,
        had_one: bool,
    ) -> std::result::Result<Infallible, Lost> {
        let mut listener = ProvenListener::connect(&self.store, &[]).await?;
        // Prove it before the lock is taken: behind a pooler, the lock would stay with the server's connection.
        listener.prove_session(&self.store).await?;
        let taken = listener.run(async |connection| {
            sqlx::query_scalar!(
                r#"select key as "key!"
                from (select nextval('liveness_locks')::integer as key offset 0) as next
                where pg_try_advisory_lock($1, key)"#,
                CLASS
            )
            .fetch_optional(connection)
            .await
        });
        let Some(key) = taken.await? else {
            // Two billion connections later, a key may be in use.
            return Err(Lost::Connection(sqlx::Error::RowNotFound));
        };
        self.holdings.replace_lock(key);
        self.store.server.links.back(Use::LivenessLock);
        judge.send_replace(Some(Instant::now() + if had_one { FAILOVER } else { Duration::ZERO }));
        debug!(key, "Took the liveness lock");
        loop {
            // It listens to no channel, so this returns only when the connection is lost.
            listener.recv().await?;
        }
    }

    async fn look(&self, judges: &watch::Receiver<Option<Instant>>) {
        let mut free_since: HashMap<i32, Instant> = HashMap::new();
        loop {
            tokio::time::sleep(jittered(LOOK).max(GRACE)).await;
            let own =
                self.holdings.lock().filter(|_| judges.borrow().is_some_and(|from| Instant::now() >= from));
            let Some(own) = own else {
                free_since.clear();
                continue;
            };
            let free = match self.store.free_liveness_locks(own).await {
                Ok(free) => free,
                Err(error) => {
                    // The look before is of no use: this process cannot tell what happened in between.
                    free_since.clear();
                    debug!(%error, "No look at the other processes' locks");
                    continue;
                }
            };
            free_since.retain(|key, _| free.contains(key));
            let now = Instant::now();
            let gone: Vec<i32> = free
                .into_iter()
                .filter(|key| now - *free_since.entry(*key).or_insert(now) >= GRACE)
                .collect();
            // This process may have lost its own lock meanwhile, and with it the right to judge.
            if gone.is_empty() || judges.borrow().is_none() {
                continue;
            }
            match self.store.free_jobs_of(&gone, own).await {
                Ok(0) => {}
                Ok(jobs) => {
                    info!(jobs, locks = ?gone, "A worker died; its jobs can be claimed");
                    self.notifier.any_job();
                }
                Err(error) => debug!(%error, "A dead worker's jobs were not freed; trying again"),
            }
        }
    }
}

/// Lets the lock go when it is dropped by a panic.
struct LetsGo<'a>(&'a Liveness);

impl Drop for LetsGo<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.let_go();
        }
    }
}

/// Removes the key of a lock that was lost from all jobs, so that only their leases count. Tries for as long
/// as it takes; a heartbeat and a claim do the same for the jobs that they just wrote.
pub(super) async fn disown(store: Store, key: i32) {
    let mut faults = 0;
    loop {
        match store.disown_liveness_lock(key).await {
            Ok(true) => return,
            // Another statement has locked some of the rows. It takes milliseconds.
            Ok(false) => tokio::time::sleep(Duration::from_millis(20)).await,
            // The process ends.
            Err(Error::Database(sqlx::Error::PoolClosed)) => return,
            Err(error) => {
                faults += 1;
                debug!(%error, key, "The jobs still name the lost liveness lock");
                tokio::time::sleep(super::delay(faults, None).min(Duration::from_secs(1))).await;
            }
        }
    }
}

impl Holdings {
    /// Call this after a statement that wrote `key` into jobs, when the leases are in here. If the lock has
    /// changed meanwhile, removes the key again, and lets the heartbeat write the new one.
    pub(super) fn written(&self, store: &Store, key: Option<i32>) {
        if self.lock() == key {
            return;
        }
        self.beat_now.notify_one();
        if let Some(key) = key {
            tokio::spawn(disown(store.clone(), key));
        }
    }
}

impl Store {
    /// Returns the keys that leased jobs name and that no process holds. Returns none in the first seconds
    /// after the server's start, when no process has its lock back, and none from a server where this process's `own` lock is free: it is
    /// another one than that of the lock, or the process does not know yet that it has lost it.
    async fn free_liveness_locks(&self, own: i32) -> Result<Vec<i32>> {
        // Taking the lock, shared with others who look, for the length of this statement asks one partition of
        // the lock table. `pg_locks` would stop all of them.
        Ok(sqlx::query_scalar!(
            r#"
            with named as materialized (
                select distinct liveness_lock as key
                from jobs
                where liveness_lock is not null
                    and lease is not null
                    and run_at > (select clock_timestamp())
            )
            select key as "key!"
            from named
            where pg_postmaster_start_time() < (select clock_timestamp()) - make_interval(secs => $2)
                and (select not pg_try_advisory_xact_lock_shared($1, $3))
                and pg_try_advisory_xact_lock_shared($1, key)
            "#,
            CLASS,
            SETTLE.as_secs_f64(),
            own
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// Ends the leases of jobs that name one of `keys`, if the lock is still free. A new token fences the old
    /// holder out at once, as a claim would, so that it starts no call under a lease that has ended. The job
    /// keeps a token, because the next claim must count this one as not given back.
    async fn free_jobs_of(&self, keys: &[i32], own: i32) -> Result<u64> {
        let freed = sqlx::query!(
            r#"
            with free as materialized (
                select key from unnest($2::integer[]) as k (key)
                where (select not pg_try_advisory_xact_lock_shared($1, $3))
                    and pg_try_advisory_xact_lock_shared($1, key)
            ), gone as materialized (
                select jobs.job_id
                from jobs
                join free on jobs.liveness_lock = free.key
                where jobs.lease is not null
                    and jobs.run_at > (select clock_timestamp())
                for update of jobs skip locked
            )
            update jobs
            set lease = new_lease(), liveness_lock = null, run_at = clock_timestamp()
            from gone
            where jobs.job_id = gone.job_id
            "#,
            CLASS,
            keys,
            own
        )
        .execute(&self.pool)
        .await?;
        Ok(freed.rows_affected())
    }

    /// Removes the key from jobs whose lease lasts: the look for dead workers leaves the others out. Returns `false` if some
    /// jobs still name the lock, because their rows are locked.
    async fn disown_liveness_lock(&self, key: i32) -> Result<bool> {
        sqlx::query!(
            "with mine as materialized (
                select job_id from jobs
                where liveness_lock = $1 and lease is not null and run_at > (select clock_timestamp())
                for update skip locked
            )
            update jobs set liveness_lock = null from mine where jobs.job_id = mine.job_id",
            key
        )
        .execute(&self.pool)
        .await?;
        Ok(sqlx::query_scalar!(
            r#"select not exists (
                select from jobs
                where liveness_lock = $1 and lease is not null and run_at > (select clock_timestamp())
            ) as "done!""#,
            key
        )
        .fetch_one(&self.pool)
        .await?)
    }
}
