//! Definitions of schedules. When a scheduler starts, it writes the schedules of its configuration. The API
//! writes all others.

use super::{Definition, Schedule, Source, clock, find, refused, tell, timing};
use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use sqlx::PgConnection;

/// The advisory lock for writing a configuration's schedules.
const SYNC: i64 = i64::from_be_bytes(*b"schedule");

/// Why the API cannot create, change or remove a schedule of a configuration.
const OF_CONFIGURATION: &str = "is defined in the configuration, and the file decides: change or remove it there and restart \
                                the schedulers, or pause it here";

/// Who writes a definition.
#[derive(Clone, Copy)]
enum By<'a> {
    Config { deployment: &'a str },
    Api,
}

impl<'a> By<'a> {
    fn source(self) -> Source {
        match self {
            By::Config { .. } => Source::Config,
            By::Api => Source::Api,
        }
    }

    fn deployment(self) -> Option<&'a str> {
        match self {
            By::Config { deployment } => Some(deployment),
            By::Api => None,
        }
    }
}

/// The result of writing a configuration's schedules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Synced {
    /// Created, changed or restored.
    pub written: Vec<String>,
    /// Paused, because the configuration no longer contains them.
    pub withdrawn: Vec<String>,
    /// Names that belong to schedules of the API, which stay unchanged.
    pub name_conflicts: Vec<String>,
}

/// Says whether the locked schedule is the version that the caller means. `None`: any is.
pub type Expected<'a> = Option<&'a (dyn Fn(&Schedule) -> bool + Send + Sync)>;

fn expect(schedule: &Schedule, expected: Expected<'_>) -> Result<()> {
    if expected.is_none_or(|is_it| is_it(schedule)) {
        return Ok(());
    }
    Err(Error::Outdated { what: "schedule", id: schedule.definition.name.clone() })
}

impl Store {
    /// Makes a configuration's schedules match `definitions`. Pauses the schedules that this deployment had
    /// before and no longer has. Leaves those of other deployments and of the API alone. If two processes of
    /// one deployment have different configurations, the last one to call this wins. The same holds for a
    /// name that two deployments share.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn sync_schedules(
        &self,
        space_id: &str,
        deployment: &str,
        definitions: &[Definition],
        now: Option<DateTime<Utc>>,
    ) -> Result<Synced> {
        let mut tx = self.pool.begin().await?;
        // Let only one process write at a time. Each writes many rows, and two processes with different rows
        // could deadlock.
        sqlx::query!("select pg_advisory_xact_lock($1)", SYNC).execute(&mut *tx).await?;
        let now = clock(&mut tx, now).await?;
        let mut synced = Synced::default();
        for definition in definitions {
            match write(&mut tx, space_id, By::Config { deployment }, definition, now).await? {
                Written::Created | Written::Changed => synced.written.push(definition.name.clone()),
                Written::Same => {}
                Written::NameTaken => synced.name_conflicts.push(definition.name.clone()),
            }
        }
        let names: Vec<&str> = definitions.iter().map(|definition| definition.name.as_str()).collect();
        synced.withdrawn = sqlx::query_scalar!(
            "update schedules
            set paused_at = $3, paused_by = 'config', next_at = null, updated_at = clock_timestamp()
            where space_id = $1
                and source = 'config'
                and coalesce(deployment, 'default') = $4
                and name <> all($2)
                -- A schedule that a person paused keeps its paused_by.
                and paused_at is null
            returning name",
            space_id,
            &names as &[&str],
            now,
            deployment
        )
        .fetch_all(&mut *tx)
        .await?;
        tell(&mut tx).await?;
        tx.commit().await?;
        Ok(synced)
    }

    /// Creates a schedule. Returns `false` with it if the same schedule existed already.
    ///
    /// # Errors
    /// [`crate::Error::Schedule`] if the name belongs to a different schedule, [`crate::Error::Database`].
    pub async fn create_schedule(
        &self,
        space_id: &str,
        definition: &Definition,
        now: Option<DateTime<Utc>>,
    ) -> Result<(Schedule, bool)> {
        let mut tx = self.pool.begin().await?;
        let now = clock(&mut tx, now).await?;
        let created = insert(&mut tx, space_id, By::Api, definition, now).await?;
        let schedule = find(&mut tx, space_id, &definition.name).await?;
        if !created && schedule.source == Source::Config {
            return Err(refused(&schedule, OF_CONFIGURATION));
        }
        if !created && schedule.definition != *definition {
            return Err(refused(&schedule, "exists with other settings: change it, or take another name"));
        }
        tell(&mut tx).await?;
        tx.commit().await?;
        Ok((schedule, created))
    }

    /// Changes the definition of a schedule of the API, if `expected` says that it is the version that the caller means. A new
    /// pattern or zone counts from now on.
    ///
    /// # Errors
    /// [`crate::Error::NotFound`], [`crate::Error::Outdated`], [`crate::Error::Schedule`] for one of a configuration,
    /// [`crate::Error::Database`].
    pub async fn change_schedule(
        &self,
        space_id: &str,
        definition: &Definition,
        expected: Expected<'_>,
        now: Option<DateTime<Utc>>,
    ) -> Result<Schedule> {
        let mut tx = self.pool.begin().await?;
        let now = clock(&mut tx, now).await?;
        let before = find(&mut tx, space_id, &definition.name).await?;
        expect(&before, expected)?;
        if before.source != Source::Api {
            return Err(refused(&before, OF_CONFIGURATION));
        }
        write(&mut tx, space_id, By::Api, definition, now).await?;
        let schedule = find(&mut tx, space_id, &definition.name).await?;
        tell(&mut tx).await?;
        tx.commit().await?;
        Ok(schedule)
    }

    /// Removes a schedule and the records of its firings, if `expected` says that it is the version that the caller means. The
    /// sessions that it created stay.
    ///
    /// # Errors
    /// [`crate::Error::NotFound`], [`crate::Error::Outdated`], [`crate::Error::Schedule`] for one that a configuration still has,
    /// [`crate::Error::Database`].
    pub async fn delete_schedule(&self, space_id: &str, name: &str, expected: Expected<'_>) -> Result<()> {
        let mut tx = self.pool.begin().await?;
        let schedule = find(&mut tx, space_id, name).await?;
        expect(&schedule, expected)?;
        if schedule.source == Source::Config && schedule.paused_by.as_deref() != Some("config") {
            return Err(refused(&schedule, OF_CONFIGURATION));
        }
        sqlx::query!("delete from schedules where schedule_id = $1", schedule.schedule_id)
            .execute(&mut *tx)
            .await?;
        tx.commit().await?;
        Ok(())
    }
}

/// The result of writing a definition.
enum Written {
    Created,
    Changed,
    Same,
    /// The name belongs to a schedule of another source, which was left unchanged.
    NameTaken,
}

/// Creates the schedule, or changes its definition.
async fn write(
    tx: &mut PgConnection,
    space_id: &str,
    by: By<'_>,
    definition: &Definition,
    now: DateTime<Utc>,
) -> Result<Written> {
    if insert(tx, space_id, by, definition, now).await? {
        return Ok(Written::Created);
    }
    let before = find(tx, space_id, &definition.name).await?;
    if before.source != by.source() {
        return Ok(Written::NameTaken);
    }
    let returns = before.paused_by.as_deref() == Some("config");
    if before.definition == *definition && before.deployment.as_deref() == by.deployment() && !returns {
        return Ok(Written::Same);
    }
    // A new pattern starts now, so its earlier ticks do not count as missed.
    let restarts = returns
        || (&before.definition.cron, &before.definition.time_zone)
            != (&definition.cron, &definition.time_zone);
    let last_tick = if restarts { now } else { before.last_tick };
    let paused = before.paused_at.is_some() && !returns;
    let next_at = if paused { None } else { timing(definition)?.after(last_tick) };
    sqlx::query!(
        "update schedules
        set cron = $2, time_zone = $3, agent = $4, conversation_id = $5, prompt = $6, mail_to = $7, missed = $8,
            missed_limit = $9, overlap = $10, last_tick = $11, next_at = $12,
            paused_at = case when $13 then paused_at end, paused_by = case when $13 then paused_by end,
            deployment = $14, revision = revision + 1, updated_at = clock_timestamp()
        where schedule_id = $1",
        before.schedule_id,
        definition.cron,
        definition.time_zone,
        definition.agent,
        definition.conversation_id,
        definition.prompt,
        &definition.mail_to,
        definition.missed.as_str(),
        definition.missed_limit,
        definition.overlap.as_str(),
        last_tick,
        next_at,
        paused,
        by.deployment()
    )
    .execute(tx)
    .await?;
    Ok(Written::Changed)
}

/// Creates the schedule, unless its name is taken. It starts now, so earlier ticks do not belong to it.
async fn insert(
    tx: &mut PgConnection,
    space_id: &str,
    by: By<'_>,
    definition: &Definition,
    now: DateTime<Utc>,
) -> Result<bool> {
    let inserted = sqlx::query!(
        "insert into schedules
            (schedule_id, space_id, name, source, cron, time_zone, agent, conversation_id, prompt, mail_to, missed,
             missed_limit, overlap, last_tick, next_at, deployment)
        values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)
        on conflict do nothing",
        schedule_id(space_id, &definition.name),
        space_id,
        definition.name,
        by.source().as_str(),
        definition.cron,
        definition.time_zone,
        definition.agent,
        definition.conversation_id,
        definition.prompt,
        &definition.mail_to,
        definition.missed.as_str(),
        definition.missed_limit,
        definition.overlap.as_str(),
        now,
        timing(definition)?.after(now),
        by.deployment()
    )
    .execute(tx)
    .await?;
    Ok(inserted.rows_affected() == 1)
}

/// A schedule's id, made of its space and name. A schedule that is removed and created again does not fire
/// its ticks twice.
fn schedule_id(space_id: &str, name: &str) -> String {
    use sha2::Digest;
    let digest = hex::encode(sha2::Sha256::digest(format!("{space_id}/{name}")));
    format!("sched_{}", &digest[..20])
}
