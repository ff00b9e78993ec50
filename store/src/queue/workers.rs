//! The list of worker processes, read from their heartbeats.

use super::GATES;
use crate::audit::act;
use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};

/// The name that processes of the fleet have in `pg_stat_activity`.
pub const APPLICATION: &str = "wakeful";

/// One worker process as the CLI and the API show it.
#[derive(Clone, Debug, serde::Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WorkerView {
    pub worker_id: String,
    pub host: String,
    pub pid: i32,
    pub version: String,
    /// How many jobs of each kind the process works on at a time.
    pub concurrency: i32,
    pub started_at: DateTime<Utc>,
    /// Seconds since its last heartbeat, by the database's clock.
    pub beat_age_s: f64,
    /// Number of leases that the process holds now.
    pub leases: i64,
    /// The newest migration that its binary knows. `None`: a version before the first that said so.
    pub schema_number: Option<i64>,
    /// The agents of its configuration: `NAME`, or `SPACE/NAME` if it has the agent for some spaces only.
    pub agents: Option<Vec<String>>,
    /// Since when it takes no more jobs, because `drain_asked_by` asked for it.
    pub drain_asked_at: Option<DateTime<Utc>>,
    pub drain_asked_by: Option<String>,
}

impl WorkerView {
    /// Whether its last heartbeat is younger than `silent_after_s`.
    pub fn is_fresh(&self, silent_after_s: f64) -> bool {
        self.beat_age_s < silent_after_s
    }

    /// `alive` or `draining`. Without a heartbeat: `silent` while it holds jobs, which wait for their leases to end, and `gone` when
    /// it holds none, so that nothing waits for it.
    pub fn state(&self, silent_after_s: f64) -> &'static str {
        match (self.is_fresh(silent_after_s), self.drain_asked_at) {
            (true, None) => "alive",
            (true, Some(_)) => "draining",
            (false, _) if self.leases > 0 => "silent",
            (false, _) => "gone",
        }
    }

    /// Whether it takes steps of this agent's sessions in `space_id`.
    pub fn has_agent(&self, agent: &str, space_id: &str) -> bool {
        let of_space = format!("{space_id}/{agent}");
        self.drain_asked_at.is_none()
            && self.agents.iter().flatten().any(|served| served == agent || *served == of_space)
    }
}

/// What the fleet wants of the server's connections.
#[derive(Clone, Copy, Debug)]
pub struct Connections {
    /// Workers with a recent heartbeat, and the most that they open together.
    pub workers: i64,
    pub wanted: i64,
    /// The server's `max_connections` without those that it keeps for administrators.
    pub limit: i64,
    /// Connections of other programs now.
    pub others: i64,
    /// The most that this role, or this database, may have; the server enforces it. `None`: neither has such a limit.
    pub own_limit: Option<i64>,
}

impl Connections {
    /// Says in words that the server has too few connections, and what helps. `None`: it has enough.
    pub fn shortage(&self) -> Option<(String, &'static str)> {
        if let Some(limit) = self.own_limit.filter(|limit| self.wanted > *limit) {
            return Some((
                format!(
                    "{} workers want up to {} connections, and this role or this database may have {limit}",
                    self.workers, self.wanted
                ),
                "workers go on with fewer, slower: raise it (alter role … connection limit, or alter database … connection limit), \
                 or run fewer processes",
            ));
        }
        let left = (self.limit - self.others).max(0);
        let said = format!(
            "{} workers want up to {} connections, and the server has {left} for them ({} in all, {} used by other \
             programs)",
            self.workers, self.wanted, self.limit, self.others
        );
        let remedy =
            "workers go on with fewer, slower: raise max_connections of the server, or run fewer processes";
        (self.wanted > left).then_some((said, remedy))
    }
}

/// How many worker processes there are, by [`WorkerView::state`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerCounts {
    pub alive: i64,
    pub draining: i64,
    pub silent: i64,
}

impl Store {
    /// Counts the worker processes, with one look at the leased jobs. A worker is silent when its last heartbeat is older than
    /// `silent_after_s` seconds and it holds jobs.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn count_workers(&self, silent_after_s: f64) -> Result<WorkerCounts> {
        Ok(sqlx::query_as!(
            WorkerCounts,
            r#"
            with holders as (
                select distinct worker_id from jobs where lease is not null and run_at > clock_timestamp()
            ), seen as (
                select w.worker_id, w.drain_asked_at,
                    w.beat_at > clock_timestamp() - make_interval(secs => $1) as fresh
                from workers w
                where w.beat_at > clock_timestamp() - interval '1 day'
            )
            select count(*) filter (where fresh and drain_asked_at is null) as "alive!",
                count(*) filter (where fresh and drain_asked_at is not null) as "draining!",
                count(*) filter (where not fresh and worker_id in (select worker_id from holders)) as "silent!"
            from seen
            "#,
            silent_after_s
        )
        .fetch_one(&self.pool)
        .await?)
    }

    /// Compares what the workers want with what the server has. `own` is what a process wants that is not yet among
    /// the workers.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn fleet_connections(&self, own: Option<u32>) -> Result<Connections> {
        // A version before did not say what it wants.
        let row = sqlx::query!(
            r#"
            select count(*) as "workers!", coalesce(sum(coalesce(connections, 8)), 0)::bigint as "wanted!",
                current_setting('max_connections')::bigint
                    - current_setting('superuser_reserved_connections')::bigint
                    - coalesce(current_setting('reserved_connections', true)::bigint, 0) as "limit!",
                (
                    select count(*) from pg_stat_activity
                    where datid is not null
                        and coalesce(backend_type, 'client backend') = 'client backend'
                        and application_name is distinct from $1
                ) as "others!",
                (
                    -- Superusers have no such limit.
                    select least(nullif(r.rolconnlimit, -1), nullif(d.datconnlimit, -1))::bigint
                    from pg_roles r, pg_database d
                    where r.rolname = session_user and not r.rolsuper and d.datname = current_database()
                ) as own_limit
            from workers
            where beat_at > clock_timestamp() - interval '1 minute'
            "#,
            APPLICATION
        )
        .fetch_one(&self.pool)
        .await?;
        Ok(Connections {
            workers: row.workers + i64::from(own.is_some()),
            wanted: row.wanted + i64::from(own.unwrap_or(0)),
            limit: row.limit,
            others: row.others,
            own_limit: row.own_limit,
        })
    }

    /// Returns the workers that sent a heartbeat within the last day, the latest first. A worker that shut
    /// down in order has removed its row. A killed worker's row stays, with an old heartbeat.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn workers(&self) -> Result<Vec<WorkerView>> {
        Ok(sqlx::query_as!(
            WorkerView,
            r#"
            with holders as materialized (
                -- Counted once, and not for each worker.
                select worker_id, count(*) as leases from jobs
                where lease is not null and run_at > clock_timestamp()
                group by worker_id
            )
            select w.worker_id, w.host, w.pid, w.version, w.concurrency, w.started_at,
                extract(epoch from clock_timestamp() - w.beat_at)::float8 as "beat_age_s!",
                coalesce(holders.leases, 0) as "leases!",
                w.schema_number, w.agents, w.drain_asked_at, w.drain_asked_by
            from workers w
            left join holders on holders.worker_id = w.worker_id
            where w.beat_at > clock_timestamp() - interval '1 day'
            order by w.beat_at desc
            limit 500
            "#
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// Asks a worker, or all that sent a heartbeat within the last day, to take no more jobs, to finish what they hold, and to end.
    /// Returns their names.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is no such worker, [`Error::Database`].
    pub async fn drain_workers(&self, worker_id: Option<&str>) -> Result<Vec<String>> {
        act::on(worker_id.unwrap_or("all"));
        let mut tx = self.pool.begin().await?;
        let asked = sqlx::query_scalar!(
            "update workers
            set drain_asked_at = coalesce(drain_asked_at, clock_timestamp()), drain_asked_by = coalesce(drain_asked_by, $2)
            where ($1::text is null or worker_id = $1) and beat_at > clock_timestamp() - interval '1 day'
            returning worker_id",
            worker_id,
            act::actor()
        )
        .fetch_all(&mut *tx)
        .await?;
        if let (true, Some(id)) = (asked.is_empty(), worker_id) {
            return Err(Error::NotFound { what: "worker", id: id.to_owned() });
        }
        // Workers send a heartbeat at this, and its answer tells them.
        sqlx::query!("select pg_notify($1, 'drain')", GATES).execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(asked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fleet_that_wants_more_connections_than_the_server_has_for_it_is_told_so() {
        let fleet = |wanted| Connections { workers: 4, wanted, limit: 27, others: 3, own_limit: None };
        assert!(fleet(24).shortage().is_none());
        let (said, remedy) = fleet(25).shortage().expect("one is lacking");
        assert!(said.contains("4 workers want up to 25 connections, and the server has 24"), "{said}");
        assert!(remedy.contains("max_connections"), "{remedy}");
        let limited = |own_limit| Connections { own_limit: Some(own_limit), ..fleet(12) };
        assert!(limited(12).shortage().is_none());
        let (said, remedy) = limited(11).shortage().expect("one is lacking");
        assert!(said.contains("this role or this database may have 11"), "{said}");
        assert!(remedy.contains("alter role"), "{remedy}");
    }

    #[test]
    fn a_worker_without_a_heartbeat_is_silent_while_it_holds_jobs_and_gone_when_it_holds_none() {
        let worker = |beat_age_s: f64, leases: i64, drain_asked_at: Option<DateTime<Utc>>| WorkerView {
            worker_id: "one".into(),
            host: "host".into(),
            pid: 1,
            version: "0.1.0".into(),
            concurrency: 4,
            started_at: Utc::now(),
            beat_age_s,
            leases,
            schema_number: None,
            agents: None,
            drain_asked_at,
            drain_asked_by: None,
        };
        let state = |worker: WorkerView| worker.state(30.0);
        assert_eq!([state(worker(1.0, 0, None)), state(worker(40.0, 2, None))], ["alive", "silent"]);
        assert_eq!(
            [state(worker(1.0, 1, Some(Utc::now()))), state(worker(40.0, 0, None))],
            ["draining", "gone"]
        );
    }
}
