//! Firing: turns due ticks into sessions, in the transaction that records them.

use super::{FIRINGS_KEPT, Schedule, clock, find, timing};
use crate::create::find_or_create;
use crate::encryption::Vault;
use crate::wake::{Continues, NewMessage, NewSession, Woken, acceptance_of, put_in_inbox};
use crate::{Error, Result, Store, new_id};
use chrono::{DateTime, Utc};
use sqlx::{Connection, PgConnection};
use std::time::Duration;
use wakeful_workflow::schedule::{self, Overlap, Timing};
use wakeful_workflow::trigger::CRON;

/// Composes the session of a firing from an agent, its prompt and its tools, or says why it cannot.
pub type Compose<'a> = dyn Fn(&Schedule) -> std::result::Result<NewSession, String> + Send + Sync + 'a;

/// How often a scheduler looks at a due schedule that an operator's pause holds.
const PAUSED_LOOK: Duration = Duration::from_secs(5);

/// The result of one check of one schedule.
#[derive(Clone, Debug)]
pub struct Fired {
    pub name: String,
    /// The woken sessions, oldest tick first.
    pub woken: Vec<(DateTime<Utc>, Woken)>,
    /// Ticks that did not fire, with the reason. One entry covers all missed ticks.
    pub skipped: Vec<(DateTime<Utc>, String)>,
}

impl Store {
    /// Fires the due ticks of one schedule whose agent is among `agents`. The time is `now`, or the
    /// database's clock without it. Returns `None` if nothing is due, or if other schedulers are already
    /// firing all that is due. `compose` composes the session of a firing; this function sets its trigger,
    /// conversation and message. Runs in one transaction.
    ///
    /// # Errors
    /// [`Error::Database`], [`Error::Keys`]; nothing was fired then. If it is one schedule that cannot be fired now, its id is
    /// added to `put_off`; schedules that are in there already are left out. A tick that fails for another reason is
    /// skipped, with that reason.
    pub async fn fire_due(
        &self,
        now: Option<DateTime<Utc>>,
        agents: &[String],
        put_off: &mut Vec<String>,
        compose: &Compose<'_>,
    ) -> Result<Option<Fired>> {
        let fired = self.try_fire_due(now, agents, put_off, compose).await;
        self.note_refusal(fired)
    }

    async fn try_fire_due(
        &self,
        now: Option<DateTime<Utc>>,
        agents: &[String],
        put_off: &mut Vec<String>,
        compose: &Compose<'_>,
    ) -> Result<Option<Fired>> {
        let mut tx = self.pool.begin().await?;
        let now = clock(&mut tx, now).await?;
        let due = sqlx::query!(
            "select space_id, name
            from schedules
            where paused_at is null and next_at <= $1 and agent = any($2) and schedule_id <> all ($3::text[])
                and not exists (select from pauses p
                    where p.pause_id = 'schedule:' || schedules.space_id || '/' || schedules.name
                        and p.resuming_since is null and (p.ends_at is null or p.ends_at > $1))
            order by next_at
            limit 1
            for update skip locked",
            now,
            agents,
            &put_off[..]
        )
        .fetch_optional(&mut *tx)
        .await?;
        let Some(due) = due else { return Ok(None) };
        let schedule = find(&mut tx, &due.space_id, &due.name).await?;
        let mut fired = Fired { name: due.name, woken: Vec::new(), skipped: Vec::new() };
        let timing = match timing(&schedule.definition) {
            Ok(timing) => timing,
            // The definition was valid for the binary that wrote it, but not for this one. Clear its next
            // tick, so that it is not due again. A change of the schedule sets the next tick again.
            Err(error) => {
                skip(&mut tx, &schedule, now, &error.to_string()).await?;
                advance(&mut tx, &schedule, schedule.last_tick, None).await?;
                tx.commit().await?;
                fired.skipped.push((now, error.to_string()));
                return Ok(Some(fired));
            }
        };
        let definition = &schedule.definition;
        let limit = definition.missed_limit.unsigned_abs();
        let decision = schedule::decide(&timing, definition.missed, limit, schedule.last_tick, now);
        if let Some(passed) = &decision.passed {
            let reason = passed.reason(definition.missed);
            skip(&mut tx, &schedule, passed.last, &reason).await?;
            fired.skipped.push((passed.last, reason));
        }
        crate::failpoint!("K60");
        for tick in decision.fire {
            let became = fire(&mut tx, &self.vault, &schedule, &timing, tick, compose).await;
            match became.inspect_err(|_| put_off.push(schedule.schedule_id.clone()))? {
                Became::Fired(woken) => fired.woken.push((tick, woken)),
                Became::Skipped(reason) => {
                    skip(&mut tx, &schedule, tick, &reason).await?;
                    fired.skipped.push((tick, reason));
                }
                Became::FiredBefore => {}
            }
        }
        advance(&mut tx, &schedule, decision.last_tick, decision.next_at).await?;
        crate::failpoint!("K61");
        tx.commit().await?;
        Ok(Some(fired))
    }

    /// Time until the next tick of a schedule of these agents, by the database's clock. `None` if there is
    /// none.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn next_firing(&self, agents: &[String]) -> Result<Option<Duration>> {
        let seconds = sqlx::query_scalar!(
            r#"select extract(epoch from min(
                case when exists (select from pauses p
                    where p.pause_id = 'schedule:' || schedules.space_id || '/' || schedules.name
                        and p.resuming_since is null and (p.ends_at is null or p.ends_at > clock_timestamp()))
                -- Nothing tells when the pause ends.
                then greatest(next_at, clock_timestamp() + make_interval(secs => $2))
                else next_at end
            ) - clock_timestamp())::float8
            from schedules
            where paused_at is null and agent = any($1)"#,
            agents,
            PAUSED_LOOK.as_secs_f64()
        )
        .fetch_one(&self.pool)
        .await?;
        Ok(seconds.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()))
    }

    /// Fires a schedule now because someone asks for it, even if it is paused. The same `client_key` again is
    /// the same firing.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Schedule`] if its session cannot be composed here, those of
    /// [`Store::wake`].
    pub async fn trigger_schedule(
        &self,
        space_id: &str,
        name: &str,
        client_key: Option<&str>,
        now: Option<DateTime<Utc>>,
        trace_context: Option<String>,
        compose: &Compose<'_>,
    ) -> Result<Woken> {
        let mut tx = self.pool.begin().await?;
        let now = clock(&mut tx, now).await?;
        let schedule = find(&mut tx, space_id, name).await?;
        let key = client_key.map_or_else(|| new_id("key"), str::to_owned);
        let trigger_id = schedule::manual_trigger_id(&schedule.schedule_id, &key);
        let refused = |reason: String| Error::Schedule { name: schedule.definition.name.clone(), reason };
        let timing = timing(&schedule.definition)?;
        let new = compose(&schedule).map_err(refused)?;
        // Look for the key first: the text contains the time, so the same key would come with another text.
        if let Some(before) = fired_before(&mut tx, &new, &trigger_id).await? {
            return Ok(before);
        }
        let woken =
            wake(&mut tx, &self.vault, &schedule, &timing, new, (trigger_id, now), trace_context).await?;
        record(&mut tx, &schedule, now, true, Some(&woken.session_id), None).await?;
        tx.commit().await?;
        Ok(woken)
    }
}

/// The result of a tick.
enum Became {
    Fired(Woken),
    /// The firing is recorded already, because someone set the schedule back.
    FiredBefore,
    Skipped(String),
}

async fn fire(
    tx: &mut PgConnection,
    vault: &Vault,
    schedule: &Schedule,
    timing: &Timing,
    tick: DateTime<Utc>,
    compose: &Compose<'_>,
) -> Result<Became> {
    let new = match compose(schedule) {
        Ok(new) => new,
        Err(reason) => return Ok(Became::Skipped(reason)),
    };
    let trigger_id = schedule::trigger_id(&schedule.schedule_id, tick);
    if fired_before(&mut *tx, &new, &trigger_id).await?.is_some() {
        return Ok(Became::FiredBefore);
    }
    match schedule.definition.overlap {
        Overlap::Queue => {}
        Overlap::Skip => {
            if let Some((session_id, status)) = unfinished(&mut *tx, &schedule.schedule_id).await? {
                return Ok(Became::Skipped(format!("overlap: {session_id} is {status}, overlap = skip")));
            }
        }
    }
    // A firing that fails must not block other schedules or this one's next tick.
    let mut point = tx.begin().await?;
    match wake(&mut point, vault, schedule, timing, new, (trigger_id, tick), None).await {
        Ok(woken) => {
            record(&mut point, schedule, tick, false, Some(&woken.session_id), None).await?;
            point.commit().await?;
            Ok(Became::Fired(woken))
        }
        Err(error) if error.is_transient() => Err(error),
        Err(error) => {
            point.rollback().await?;
            Ok(Became::Skipped(error.to_string()))
        }
    }
}

/// Creates the session of a firing, and gives it its message.
async fn wake(
    tx: &mut PgConnection,
    vault: &Vault,
    schedule: &Schedule,
    timing: &Timing,
    new: NewSession,
    (trigger_id, tick): (String, DateTime<Utc>),
    trace_context: Option<String>,
) -> Result<Woken> {
    let new = NewSession {
        space_id: schedule.space_id.clone(),
        conversation_id: schedule.definition.conversation_id.clone(),
        trigger_type: CRON.to_owned(),
        trigger_id: trigger_id.clone(),
        continues: Continues::Trigger,
        ..new
    };
    let message = NewMessage {
        client_key: Some(trigger_id),
        text: schedule::message(&schedule.definition.prompt, timing, tick),
        sender: None,
        trace_context,
        attachments: Vec::new(),
    };
    let session = find_or_create(&mut *tx, vault, &new, None).await?;
    put_in_inbox(tx, vault, session, &message).await
}

/// The answer to the first firing with this trigger, if there was one.
async fn fired_before(tx: &mut PgConnection, new: &NewSession, trigger_id: &str) -> Result<Option<Woken>> {
    let before = sqlx::query!(
        "select s.session_id, i.run_id, i.outcome
        from conversation_sessions s
        -- A firing has a session to itself, and its message comes first.
        join lateral (
            select run_id, outcome from session_inbox where session_id = s.session_id order by inbox_id limit 1
        ) i on true
        where s.space_id = $1 and s.mailbox_id = $2 and s.trigger_type = $3 and s.trigger_id = $4",
        new.space_id,
        new.mailbox_id,
        CRON,
        trigger_id
    )
    .fetch_optional(tx)
    .await?;
    before
        .map(|before| {
            let outcome = acceptance_of(&before.outcome)?;
            Ok(Woken { session_id: before.session_id, run_id: before.run_id, outcome, duplicate: true })
        })
        .transpose()
}

/// A firing whose run has not ended. A paused run counts.
async fn unfinished(tx: &mut PgConnection, schedule_id: &str) -> Result<Option<(String, String)>> {
    let open = sqlx::query!(
        "select s.session_id, s.status
        from schedule_firings f
        join conversation_sessions s on s.session_id = f.session_id
        where f.schedule_id = $1 and s.status in ('queued', 'running', 'waiting_input', 'needs_attention')
        order by f.firing_id desc
        limit 1",
        schedule_id
    )
    .fetch_optional(tx)
    .await?;
    Ok(open.map(|open| (open.session_id, open.status)))
}

async fn skip(tx: &mut PgConnection, schedule: &Schedule, tick: DateTime<Utc>, reason: &str) -> Result<()> {
    record(tx, schedule, tick, false, None, Some(&crate::error::bounded(reason))).await
}

/// Records the result of a tick, and deletes all but the newest [`FIRINGS_KEPT`] records and those whose run has not ended.
async fn record(
    tx: &mut PgConnection,
    schedule: &Schedule,
    tick: DateTime<Utc>,
    manual: bool,
    session_id: Option<&str>,
    reason: Option<&str>,
) -> Result<()> {
    sqlx::query!(
        "insert into schedule_firings (schedule_id, tick, manual, session_id, reason, space_id)
        values ($1, $2, $3, $4, $5, $6)",
        schedule.schedule_id,
        tick,
        manual,
        session_id,
        reason,
        schedule.space_id
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!(
        "delete from schedule_firings
        where schedule_id = $1
            and firing_id <= (
                select firing_id from schedule_firings
                where schedule_id = $1
                order by firing_id desc
                offset $2
                limit 1
            )
            -- overlap = skip looks for a firing that has not ended.
            and not exists (select from conversation_sessions s
                where s.session_id = schedule_firings.session_id
                    and s.status in ('queued', 'running', 'waiting_input', 'needs_attention'))",
        schedule.schedule_id,
        FIRINGS_KEPT
    )
    .execute(tx)
    .await?;
    Ok(())
}

async fn advance(
    tx: &mut PgConnection,
    schedule: &Schedule,
    last_tick: DateTime<Utc>,
    next_at: Option<DateTime<Utc>>,
) -> Result<()> {
    sqlx::query!(
        "update schedules set last_tick = $2, next_at = $3 where schedule_id = $1",
        schedule.schedule_id,
        last_tick,
        next_at
    )
    .execute(tx)
    .await?;
    Ok(())
}
