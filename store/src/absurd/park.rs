//! Parks tasks in Absurd, and gives them back there.
//!
//! A parked run is `pending` and available at infinity, so no worker claims it and no event wakes it: `emit_event` wakes only
//! sleeping runs. What it was before stands in `claimed_by`, after the word `wakeful:`. The task's rules of cancellation stand
//! there too, because Absurd would cancel a parked task by them, and that cannot be taken back.

use super::source::{MARKER, Source, marked};
use crate::Result;
use serde::Serialize;
use sqlx::{AssertSqlSafe, Row};

/// What `take` found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Parked {
    pub task_ids: Vec<String>,
    /// A worker of Absurd has them now.
    pub running: i64,
}

/// What became of a task that was given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unparked {
    /// It is as it was.
    AsBefore,
    /// Its event came meanwhile, so it runs at once.
    Woken,
    /// It was not parked: it was given back before, or somebody changed it in Absurd.
    WasNot,
}

impl Source {
    /// Parks up to `limit` tasks of this name that Absurd does not run at this moment, in one transaction.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn park(&mut self, queue: &str, name: &str, limit: i64) -> Result<Parked> {
        let (t, r) = (self.table('t', queue), self.table('r', queue));
        // Absurd's claim locks the same rows in the same way, so one of the two gets a run.
        let sql = format!(
            "with candidate as (
                select r.run_id from {r} r join {t} t on t.task_id = r.task_id
                where t.task_name = $1 and r.state in ('pending', 'sleeping')
                    and t.state in ('pending', 'sleeping', 'running')
                    and coalesce(r.claimed_by, '') not like '{MARKER}%'
                order by r.run_id
                limit $2
                for update skip locked
            ), parked as (
                update {r} r
                set state = 'pending', available_at = 'infinity', claim_expires_at = null,
                    claimed_by = '{MARKER}' || json_build_object('state', r.state, 'task_state', t.state,
                        'available_at', case when isfinite(r.available_at)
                            then to_char(r.available_at at time zone 'utc', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') end,
                        'cancellation', t.cancellation)::text
                from candidate c, {t} t
                where r.run_id = c.run_id and t.task_id = r.task_id and r.state in ('pending', 'sleeping')
                    and coalesce(r.claimed_by, '') not like '{MARKER}%'
                returning r.task_id
            ), kept as (
                update {t} t set cancellation = null from parked p where t.task_id = p.task_id and t.cancellation is not null
            )
            select task_id::text from parked"
        );
        let task_ids = sqlx::query_scalar(AssertSqlSafe(sql))
            .bind(name)
            .bind(limit)
            .fetch_all(&mut self.connection)
            .await?;
        let sql = format!(
            "select count(*) from {t} t join {r} r on r.run_id = t.last_attempt_run
            where t.task_name = $1 and t.state in ('pending', 'sleeping', 'running')
                and coalesce(r.claimed_by, '') not like '{MARKER}%'"
        );
        let running =
            sqlx::query_scalar(AssertSqlSafe(sql)).bind(name).fetch_one(&mut self.connection).await?;
        Ok(Parked { task_ids, running })
    }

    /// Gives a parked task back. If its event came meanwhile, it gets what `emit_event` would have given it.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn unpark(&mut self, queue: &str, task_id: &str) -> Result<Unparked> {
        sqlx::query("rollback").execute(&mut self.connection).await?;
        sqlx::query("begin").execute(&mut self.connection).await?;
        let unparked = self.unpark_in(queue, task_id).await;
        let end = if unparked.is_ok() { "commit" } else { "rollback" };
        sqlx::query(AssertSqlSafe(end.to_owned())).execute(&mut self.connection).await?;
        unparked
    }

    async fn unpark_in(&mut self, queue: &str, task_id: &str) -> Result<Unparked> {
        let [t, r, c, e, w] = ['t', 'r', 'c', 'e', 'w'].map(|kind| self.table(kind, queue));
        // Absurd locks the event before the run.
        let sql = format!(
            "select 1 from {e} e where e.event_name in (select r.wake_event from {r} r where r.task_id = $1::uuid) for share"
        );
        sqlx::query(AssertSqlSafe(sql)).bind(task_id).fetch_all(&mut self.connection).await?;
        let sql = format!(
            "select r.run_id::text as run_id, r.claimed_by, r.wake_event,
                exists (select from {e} e where e.event_name = r.wake_event and e.payload is not null) as emitted
            from {r} r join {t} t on t.task_id = r.task_id
            where r.task_id = $1::uuid and r.state = 'pending' and r.claimed_by like '{MARKER}%'
            for update of r, t"
        );
        let Some(row) =
            sqlx::query(AssertSqlSafe(sql)).bind(task_id).fetch_optional(&mut self.connection).await?
        else {
            return Ok(Unparked::WasNot);
        };
        let (run_id, claimed_by): (String, String) = (row.try_get("run_id")?, row.try_get("claimed_by")?);
        let emitted: bool = row.try_get("emitted")?;
        let was = marked(&claimed_by).unwrap_or_default();
        let text = |key: &str| was[key].as_str().map(str::to_owned);
        let woken = emitted && was["state"] == "sleeping";
        let sql =
            format!("update {t} set cancellation = $2::text::jsonb, state = $3 where task_id = $1::uuid");
        let cancellation = was.get("cancellation").filter(|of| !of.is_null()).map(ToString::to_string);
        let task_state = if woken { Some("pending".to_owned()) } else { text("task_state") };
        sqlx::query(AssertSqlSafe(sql))
            .bind(task_id)
            .bind(cancellation)
            .bind(task_state)
            .execute(&mut self.connection)
            .await?;
        if !woken {
            let sql = format!(
                "update {r} set state = $2, available_at = coalesce($3::timestamptz, 'infinity'), claimed_by = null
                where run_id = $1::uuid"
            );
            sqlx::query(AssertSqlSafe(sql))
                .bind(&run_id)
                .bind(text("state"))
                .bind(text("available_at"))
                .execute(&mut self.connection)
                .await?;
            return Ok(Unparked::AsBefore);
        }
        let status = if self.schema == "absurd" { ("status,", "'committed',") } else { ("", "") };
        let sql = format!(
            "insert into {c} (task_id, checkpoint_name, state, {} owner_run_id, updated_at)
            select w.task_id, w.step_name, e.payload, {} w.run_id, clock_timestamp()
            from {w} w join {e} e on e.event_name = w.event_name
            where w.run_id = $1::uuid and e.payload is not null
            on conflict (task_id, checkpoint_name) do update set state = excluded.state, owner_run_id = excluded.owner_run_id,
                updated_at = excluded.updated_at",
            status.0, status.1
        );
        sqlx::query(AssertSqlSafe(sql)).bind(&run_id).execute(&mut self.connection).await?;
        let sql = format!(
            "update {r} r
            set state = 'pending', available_at = clock_timestamp(), claimed_by = null, wake_event = null,
                event_payload = (select e.payload from {e} e where e.event_name = r.wake_event)
            where r.run_id = $1::uuid"
        );
        sqlx::query(AssertSqlSafe(sql)).bind(&run_id).execute(&mut self.connection).await?;
        let sql = format!("delete from {w} where run_id = $1::uuid");
        sqlx::query(AssertSqlSafe(sql)).bind(&run_id).execute(&mut self.connection).await?;
        Ok(Unparked::Woken)
    }

    /// Payloads of events that were emitted, by task, for those of `task_ids` that are parked and waited for one.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn emitted(
        &mut self,
        queue: &str,
        task_ids: &[String],
    ) -> Result<Vec<(String, String, String)>> {
        let sql = format!(
            "select r.task_id::text, e.event_name, e.payload::text from {} r join {} e on e.event_name = r.wake_event
            where r.task_id = any ($1::uuid[]) and r.claimed_by like '{MARKER}%' and e.payload is not null",
            self.table('r', queue),
            self.table('e', queue)
        );
        Ok(sqlx::query_as(AssertSqlSafe(sql)).bind(task_ids).fetch_all(&mut self.connection).await?)
    }
}
