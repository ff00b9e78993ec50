//! Schedules: defined, fired, paused, and shown.
//!
//! Firing is one transaction. It locks the schedule's row, which all other schedulers skip, and reads the
//! clock once. It wakes the sessions of the ticks, records the result of each tick, and moves `last_tick`. So
//! a tick fires completely or not at all, whichever process crashes. A schedule's row is locked before any
//! conversation's row.

mod define;
mod fire;

pub use define::{Expected, Synced};
pub use fire::{Compose, Fired};

use crate::{Error, Result, Store};
use chrono::{DateTime, SubsecRound, Utc};
use serde::Serialize;
use sqlx::PgConnection;
use wakeful_workflow::schedule::{Missed, Overlap, Timing};

/// A schedule whose tick was not fired for this many seconds is late.
pub const LATE_S: f64 = 120.0;

/// The notification channel that tells schedulers that a schedule changed.
pub(crate) const CHANNEL: &str = "wakeful_schedules";

/// Number of firings that are kept for each schedule.
pub const FIRINGS_KEPT: i64 = 100;

/// Who defined a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Source {
    Config,
    Api,
}

impl Source {
    /// The word that is stored and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Source::Config => "config",
            Source::Api => "api",
        }
    }

    fn parse(word: &str) -> Result<Source> {
        match word {
            "config" => Ok(Source::Config),
            "api" => Ok(Source::Api),
            _ => Err(Error::corrupt("schedule source", word)),
        }
    }
}

/// The definition of a schedule. [`Timing::parse`] has accepted its pattern and its zone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Definition {
    pub name: String,
    pub cron: String,
    pub time_zone: String,
    pub agent: String,
    /// As it is stored: `space/id`.
    pub conversation_id: String,
    pub prompt: String,
    /// Addresses that replies go to.
    pub mail_to: Vec<String>,
    pub missed: Missed,
    pub missed_limit: i32,
    pub overlap: Overlap,
}

/// A stored schedule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Schedule {
    pub schedule_id: String,
    #[serde(skip)]
    pub space_id: String,
    pub source: Source,
    #[serde(flatten)]
    pub definition: Definition,
    pub paused_at: Option<DateTime<Utc>>,
    /// `config` if the configuration no longer contains it.
    pub paused_by: Option<String>,
    /// Every tick up to here is decided.
    pub last_tick: DateTime<Utc>,
    /// `None` if it is paused, or if no tick follows.
    pub next_at: Option<DateTime<Utc>>,
    pub revision: i64,
    /// The deployment whose configuration contains it. `None` if the API created it.
    pub deployment: Option<String>,
}

/// The result of a tick.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Firing {
    /// Where the page before it begins.
    #[serde(skip)]
    pub firing_id: i64,
    pub tick: DateTime<Utc>,
    /// Whether a person asked for it.
    pub manual: bool,
    pub session_id: Option<String>,
    /// The session's current status.
    pub status: Option<String>,
    /// Why it was skipped.
    pub reason: Option<String>,
    pub at: DateTime<Utc>,
}

/// A schedule that does not fire as it should.
#[derive(Clone, Debug)]
pub struct Late {
    pub name: String,
    pub agent: String,
    pub overdue_s: f64,
    /// How far `last_tick` is in the future, because a clock was ahead.
    pub ahead_s: f64,
}

impl Store {
    /// Pauses a schedule until it is resumed. Changes nothing if it is paused already.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Database`].
    pub async fn pause_schedule(&self, space_id: &str, name: &str) -> Result<Schedule> {
        let mut tx = self.pool.begin().await?;
        let schedule = find(&mut tx, space_id, name).await?;
        sqlx::query!(
            "update schedules
            set paused_at = clock_timestamp(), paused_by = 'person', next_at = null, updated_at = clock_timestamp()
            where schedule_id = $1 and paused_at is null",
            schedule.schedule_id
        )
        .execute(&mut *tx)
        .await?;
        let schedule = find(&mut tx, space_id, name).await?;
        tx.commit().await?;
        Ok(schedule)
    }

    /// Lets a schedule fire again from now on. Ticks during the pause are lost. Also repairs a schedule whose
    /// `last_tick` is in the future because a clock was ahead.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Schedule`] if the configuration no longer contains it,
    /// [`Error::Database`].
    pub async fn resume_schedule(
        &self,
        space_id: &str,
        name: &str,
        now: Option<DateTime<Utc>>,
    ) -> Result<Schedule> {
        let mut tx = self.pool.begin().await?;
        let now = clock(&mut tx, now).await?;
        let schedule = find(&mut tx, space_id, name).await?;
        if schedule.paused_by.as_deref() == Some("config") {
            return Err(refused(&schedule, "is not in the configuration any more: put it back there"));
        }
        if schedule.paused_at.is_some() || schedule.last_tick > now {
            sqlx::query!(
                "update schedules
                set paused_at = null, paused_by = null, last_tick = $2, next_at = $3, updated_at = clock_timestamp()
                where schedule_id = $1",
                schedule.schedule_id,
                now,
                timing(&schedule.definition)?.after(now)
            )
            .execute(&mut *tx)
            .await?;
            tell(&mut tx).await?;
        }
        let schedule = find(&mut tx, space_id, name).await?;
        tx.commit().await?;
        Ok(schedule)
    }

    /// One schedule, by its name or its id.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Database`].
    pub async fn schedule(&self, space_id: &str, name: &str) -> Result<Schedule> {
        let mut tx = self.pool.begin().await?;
        let schedule = find(&mut tx, space_id, name).await?;
        tx.rollback().await?;
        Ok(schedule)
    }

    /// Every schedule, by name.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn schedules(&self, space_id: &str) -> Result<Vec<Schedule>> {
        let rows = sqlx::query_as!(
            Row,
            "select schedule_id, space_id, name, source, cron, time_zone, agent, conversation_id, prompt, mail_to,
                missed, missed_limit, overlap, paused_at, paused_by, last_tick, next_at, revision, deployment
            from schedules
            where space_id = $1
            order by name",
            space_id
        )
        .fetch_all(&self.pool)
        .await?;
        rows.into_iter().map(Row::read).collect()
    }

    /// Schedules by name, from the one after `after` on.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn schedules_after(
        &self,
        space_id: &str,
        after: Option<&str>,
        limit: i64,
    ) -> Result<Vec<Schedule>> {
        let rows = sqlx::query_as!(
            Row,
            "select schedule_id, space_id, name, source, cron, time_zone, agent, conversation_id, prompt, mail_to,
                missed, missed_limit, overlap, paused_at, paused_by, last_tick, next_at, revision, deployment
            from schedules
            where space_id = $1 and name > coalesce($2, '')
            order by name
            limit $3",
            space_id,
            after,
            limit
        )
        .fetch_all(&self.pool)
        .await?;
        rows.into_iter().map(Row::read).collect()
    }

    /// The firings of a schedule, newest first, of those before `before`. At most [`FIRINGS_KEPT`] are kept.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Database`].
    pub async fn firings(
        &self,
        space_id: &str,
        name: &str,
        before: Option<i64>,
        limit: i64,
    ) -> Result<Vec<Firing>> {
        let schedule = self.schedule(space_id, name).await?;
        Ok(sqlx::query_as!(
            Firing,
            r#"select f.firing_id, f.tick, f.manual, f.session_id, s.status as "status?", f.reason, f.at
            from schedule_firings f
            left join conversation_sessions s on s.session_id = f.session_id
            where f.schedule_id = $1 and ($2::bigint is null or f.firing_id < $2)
            order by f.firing_id desc
            limit $3"#,
            schedule.schedule_id,
            before,
            limit
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// The database's clock.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn now(&self) -> Result<DateTime<Utc>> {
        clock(&mut *self.pool.acquire().await?, None).await
    }

    /// Schedules that are two minutes late, and those whose `last_tick` is in the future because a clock was
    /// ahead.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn late_schedules(&self) -> Result<Vec<Late>> {
        Ok(sqlx::query_as!(
            Late,
            r#"select name, agent,
                greatest(extract(epoch from clock_timestamp() - next_at), 0)::float8 as "overdue_s!",
                greatest(extract(epoch from last_tick - clock_timestamp()), 0)::float8 as "ahead_s!"
            from schedules
            where paused_at is null
                and not exists (select from pauses p
                    where p.pause_id = 'schedule:' || schedules.space_id || '/' || schedules.name)
                and (
                    next_at < clock_timestamp() - make_interval(secs => $1)
                    or last_tick > clock_timestamp() + make_interval(secs => $1)
                )
            order by next_at
            limit 100"#,
            LATE_S
        )
        .fetch_all(&self.pool)
        .await?)
    }
}

/// Locks the schedule with this name or id.
async fn find(tx: &mut PgConnection, space_id: &str, name: &str) -> Result<Schedule> {
    let row = sqlx::query_as!(
        Row,
        "select schedule_id, space_id, name, source, cron, time_zone, agent, conversation_id, prompt, mail_to,
            missed, missed_limit, overlap, paused_at, paused_by, last_tick, next_at, revision, deployment
        from schedules
        where space_id = $1 and (name = $2 or schedule_id = $2)
        for update",
        space_id,
        name
    )
    .fetch_optional(tx)
    .await?
    .ok_or_else(|| Error::NotFound { what: "schedule", id: name.to_owned() })?;
    row.read()
}

/// The current time to the second: the caller's, or that of the database, which all processes share.
async fn clock(tx: &mut PgConnection, now: Option<DateTime<Utc>>) -> Result<DateTime<Utc>> {
    let now = match now {
        Some(now) => now,
        None => sqlx::query_scalar!(r#"select clock_timestamp() as "now!""#).fetch_one(tx).await?,
    };
    Ok(now.trunc_subsecs(0))
}

/// Notifies the schedulers when this transaction commits.
async fn tell(tx: &mut PgConnection) -> Result<()> {
    sqlx::query!("select pg_notify($1, '')", CHANNEL).fetch_one(tx).await?;
    Ok(())
}

fn timing(definition: &Definition) -> Result<Timing> {
    Timing::parse(&definition.cron, &definition.time_zone)
        .map_err(|error| Error::Schedule { name: definition.name.clone(), reason: error.to_string() })
}

fn refused(schedule: &Schedule, reason: &str) -> Error {
    Error::Schedule { name: schedule.definition.name.clone(), reason: reason.to_owned() }
}

/// A row as it is stored.
struct Row {
    schedule_id: String,
    space_id: String,
    name: String,
    source: String,
    cron: String,
    time_zone: String,
    agent: String,
    conversation_id: String,
    prompt: String,
    mail_to: Vec<String>,
    missed: String,
    missed_limit: i32,
    overlap: String,
    paused_at: Option<DateTime<Utc>>,
    paused_by: Option<String>,
    last_tick: DateTime<Utc>,
    next_at: Option<DateTime<Utc>>,
    revision: i64,
    deployment: Option<String>,
}

impl Row {
    fn read(self) -> Result<Schedule> {
        Ok(Schedule {
            source: Source::parse(&self.source)?,
            definition: Definition {
                missed: Missed::parse(&self.missed)
                    .ok_or_else(|| Error::corrupt("schedule's missed", &self.missed))?,
                overlap: Overlap::parse(&self.overlap)
                    .ok_or_else(|| Error::corrupt("schedule's overlap", &self.overlap))?,
                name: self.name,
                cron: self.cron,
                time_zone: self.time_zone,
                agent: self.agent,
                conversation_id: self.conversation_id,
                prompt: self.prompt,
                mail_to: self.mail_to,
                missed_limit: self.missed_limit,
            },
            schedule_id: self.schedule_id,
            space_id: self.space_id,
            paused_at: self.paused_at,
            paused_by: self.paused_by,
            last_tick: self.last_tick,
            next_at: self.next_at,
            revision: self.revision,
            deployment: self.deployment,
        })
    }
}
