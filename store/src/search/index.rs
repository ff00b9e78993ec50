//! Fills the tables that a search reads, beside the steps.
//!
//! One worker at a time does it, under an advisory lock that ends with its transaction. It finds sessions without a mark by the
//! steps: ids of runs and sessions grow with time, so everything new is behind the last id that it read. A row may be committed some
//! time after its id was made. So each look reads the ids of the last two seconds again, and every ten seconds a sweep reads those of the
//! last minute, and one in ten minutes those of the last hour, in case that a host's clock is behind. Others leave a row in
//! `search_due`: a run that is opened again; a session of Absurd, whose ids say nothing of the time; and a bundle, which may be
//! committed long after its ids were made. A session that is at work is looked at again after some seconds,
//! until it rests and all of its messages are read. One in which nothing happens is left alone for minutes: each sweep sees by the number
//! of its last event whether it went on.

use super::laggards;
use super::said::words;
use super::words::WordVector;
use crate::json::to_json;
use crate::{Result, Store, failure, search::id_of};
use chrono::{DateTime, TimeDelta, Utc};
use sqlx::PgConnection;
use std::collections::BTreeMap;
use std::time::Duration;

/// The advisory lock of the worker that fills the tables. An erasure takes it too, so that no words come back after it.
pub(crate) const LOCK: i64 = 0x7761_6b65_7365_6172;

/// How many ids one look reads.
const IDS: i64 = 10_000;
/// How many sessions one look reads, and how many messages of each.
const SESSIONS: i64 = 50;
const MESSAGES: i64 = 50;
/// The bytes of one message that are read. What follows is not found by its words.
const MESSAGE_BYTES: i32 = 64 * 1024;
/// The words of so many bytes are written by one statement, about.
const STATEMENT_BYTES: usize = 4 << 20;

/// A row may be committed this long after its id was made, and a clock that makes ids may be ahead by it.
const LATE: TimeDelta = TimeDelta::seconds(60);
/// Most rows are committed sooner. Each look reads the ids of this time again.
const MOSTLY: TimeDelta = TimeDelta::seconds(2);
/// How often a sweep reads the ids of all of [`LATE`].
const SWEEPS_EVERY: TimeDelta = TimeDelta::seconds(10);
/// How often the ids of an hour are read again: see [`laggards`].
const LOOKS_BACK_EVERY: TimeDelta = TimeDelta::minutes(10);
/// While enough sessions for a look are due, ids are read this often: a look at a backlog would read the same ids each time.
const DISCOVERS_EVERY: TimeDelta = TimeDelta::seconds(2);

/// A session that is at work is looked at again after as long as it was silent, but not before the first and not after the second.
const AT_WORK: [Duration; 2] = [Duration::from_secs(3), Duration::from_secs(20)];
/// If nothing happened since the last look, it may rest for so long: thousands may wait behind a gate. A sweep finds those that go on.
const WAITS: Duration = Duration::from_secs(300);

/// What one look did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Indexed {
    /// How many ids of runs and sessions it read.
    pub ids: usize,
    /// How many sessions it read.
    pub sessions: usize,
    /// There is more to read now.
    pub more: bool,
}

struct Due {
    session_id: String,
    space_id: String,
    through: i64,
    parts: i32,
    last: i64,
    last_event_seq: i64,
    at_work: bool,
    cost_micros: i64,
    steps: i64,
    failed_calls: i64,
    active_at: DateTime<Utc>,
    silent_s: f64,
    sealed: bool,
    /// Nothing happened in it since the last look.
    unchanged: bool,
}

impl Due {
    /// Seconds until the next look. `None`: the session rests, so the next look follows the next run.
    fn pause_s(&self) -> Option<f64> {
        let [least, most] = AT_WORK.map(|time| time.as_secs_f64());
        let most = if self.unchanged { WAITS.as_secs_f64() } else { most };
        self.at_work.then(|| self.silent_s.clamp(least, most))
    }
}

impl Store {
    /// Counts new failures, and puts what is new into the search. Does nothing while another process does it.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn index_sessions(&self) -> Result<Indexed> {
        let mut tx = self.pool.begin_long().await?;
        let is_mine = sqlx::query_scalar!(r#"select pg_try_advisory_xact_lock($1) as "mine!""#, LOCK);
        if !is_mine.fetch_one(&mut *tx).await? {
            return Ok(Indexed::default());
        }
        let found = discover(&mut tx).await?;
        let counted = failure::count(&mut tx).await?;
        let due = due(&mut tx).await?;
        let is_full = due.len() as i64 == SESSIONS;
        let (unchanged, due): (Vec<Due>, Vec<Due>) = due.into_iter().partition(|one| one.unchanged);
        look_later(&mut tx, &unchanged).await?;
        let ids: Vec<String> = due.iter().map(|one| one.session_id.clone()).collect();
        let mut messages = messages(&mut tx, &due).await?;
        let mut senders = senders(&mut tx, &ids).await?;
        let mut more = is_full || found.more || counted;
        let (mut documents, mut marks) = (Documents::default(), Marks::default());
        for one in &due {
            let read = messages.remove(&one.session_id).unwrap_or_default();
            let senders = senders.remove(&one.session_id).unwrap_or_default();
            more |= marks.add(one, &read, &senders, &mut documents)?;
            if documents.bytes > STATEMENT_BYTES {
                documents.write(&mut tx).await?;
            }
        }
        documents.write(&mut tx).await?;
        marks.write(&mut tx).await?;
        tx.commit().await?;
        Ok(Indexed { ids: found.ids, sessions: due.len(), more })
    }
}

/// Makes the next look read this session, whatever its ids are. Belongs into the transaction that writes the session.
pub(crate) async fn enter(tx: &mut PgConnection, session_id: &str, space_id: &str) -> Result<()> {
    sqlx::query!("insert into search_due (session_id, space_id) values ($1, $2)", session_id, space_id)
        .execute(tx)
        .await?;
    Ok(())
}

/// What a look found by ids.
struct Found {
    ids: usize,
    /// There may be more.
    more: bool,
}

/// Enters sessions that are new or go on.
async fn discover(tx: &mut PgConnection) -> Result<Found> {
    let progress = sqlx::query!(
        r#"select clock_timestamp() as "now!", run_id, session_id, recent_run_id, recent_session_id,
            swept_at <= clock_timestamp() - make_interval(secs => $1) or swept_at > clock_timestamp() as "sweeps!",
            looked_back_at <= clock_timestamp() - make_interval(secs => $3) as "looks_back!",
            (select count(*) from (
                select from search_sessions where due_at <= (select clock_timestamp()) limit $2
            ) due) = $2 as "is_backlog!"
        from search_progress"#,
        SWEEPS_EVERY.as_seconds_f64(),
        SESSIONS,
        LOOKS_BACK_EVERY.as_seconds_f64()
    )
    .fetch_one(&mut *tx)
    .await?;
    let (now, sweeps) = (progress.now, progress.sweeps);
    let recently = now - MOSTLY - DISCOVERS_EVERY;
    let is_recent = progress.recent_run_id > id_of("run", recently)
        && progress.recent_session_id > id_of("sess", recently);
    if progress.is_backlog && is_recent && !sweeps {
        return Ok(Found { ids: 0, more: false });
    }
    // What is older than `certain` is not read again: by a sweep, or by the looks until the next one.
    let (certain, run_id, session_id) = if sweeps {
        (now - LATE, progress.run_id, progress.session_id)
    } else {
        let recent = (progress.recent_run_id, progress.recent_session_id);
        (now - MOSTLY, recent.0.max(progress.run_id), recent.1.max(progress.session_id))
    };
    if sweeps {
        wake_waiting(&mut *tx).await?;
        if progress.looks_back {
            laggards::enter(&mut *tx, now).await?;
        }
    }
    let newest = now + LATE;
    let read = sqlx::query!(
        r#"with runs as materialized (
            select run_id, session_id from session_runs
            where run_id > $6 and run_id < $4
            order by run_id limit $1
        ), made as materialized (
            select session_id from conversation_sessions
            where session_id > $7 and session_id < $5
            order by session_id limit $1
        ), again as (
            delete from search_due where due_id in (select due_id from search_due order by due_id limit $1)
            returning session_id
        ), found as (
            select session_id from runs union select session_id from made union select session_id from again
        ), entered as (
            insert into search_sessions (session_id, space_id, due_at)
            select s.session_id, s.space_id, clock_timestamp()
            from found
            -- Postgres cannot tell how many are found, and a join could read the two tables from end to end. "offset 0" has it look for
            -- each one by the key.
            cross join lateral (
                select session_id, space_id, last_message_number, status from conversation_sessions
                where session_id = found.session_id offset 0
            ) s
            left join lateral (
                select session_id, due_at, through_message_number from search_sessions
                where session_id = found.session_id offset 0
            ) known on true
            where known.session_id is null
                or (known.due_at is null
                    and (known.through_message_number < s.last_message_number or s.status in ('queued', 'running')))
            on conflict (session_id) do update set due_at = excluded.due_at
        ), is_read as (
            -- Up to these ids, everything was read.
            select coalesce((select max(run_id) from runs having count(*) = $1), $10) as run_id,
                coalesce((select max(session_id) from made having count(*) = $1), $11) as session_id
        ), moved as (
            update search_progress p
            set run_id = case when $8 then greatest(p.run_id, least(r.run_id, $2)) else p.run_id end,
                session_id = case when $8 then greatest(p.session_id, least(r.session_id, $3)) else p.session_id end,
                recent_run_id = greatest(p.recent_run_id, least(r.run_id, $10)),
                recent_session_id = greatest(p.recent_session_id, least(r.session_id, $11)),
                swept_at = case when $8 and r.run_id >= $2 and r.session_id >= $3 then $9 else p.swept_at end
            from is_read r
        )
        select r.run_id < $2 or r.session_id < $3 or (select count(*) from again) = $1 as "more!",
            (select count(*) from runs) + (select count(*) from made) as "ids!"
        from is_read r"#,
        IDS,
        id_of("run", certain),
        id_of("sess", certain),
        id_of("run", newest),
        id_of("sess", newest),
        run_id,
        session_id,
        sweeps,
        now,
        id_of("run", now - MOSTLY),
        id_of("sess", now - MOSTLY)
    )
    .fetch_one(tx)
    .await?;
    Ok(Found { ids: read.ids as usize, more: read.more })
}

/// Makes the sessions due that were to rest and in which something happened since. Reads all resting ones, and writes only these.
async fn wake_waiting(tx: &mut PgConnection) -> Result<()> {
    sqlx::query!(
        "update search_sessions set due_at = clock_timestamp()
        where session_id = any(array(
            select waits.session_id
            from search_sessions waits
            cross join lateral (
                select last_event_seq from conversation_sessions where session_id = waits.session_id offset 0
            ) s
            where waits.due_at > (select clock_timestamp() + make_interval(secs => $1))
                and s.last_event_seq is distinct from waits.last_event_seq
        ))",
        AT_WORK[1].as_secs_f64()
    )
    .execute(tx)
    .await?;
    Ok(())
}

async fn due(tx: &mut PgConnection) -> Result<Vec<Due>> {
    Ok(sqlx::query_as!(
        Due,
        r#"select h.session_id, h.space_id, h.through_message_number as through, h.parts, s.last_message_number as last,
            s.last_event_seq, s.status in ('queued', 'running') as "at_work!", s.total_cost_micros as cost_micros,
            s.total_turns::bigint as "steps!",
            (select count(*) from tool_calls c where c.session_id = s.session_id and c.status = 'failed') as "failed_calls!",
            a.active_at as "active_at!",
            extract(epoch from clock_timestamp() - a.active_at)::float8 as "silent_s!",
            s.data_key is not null as "sealed!",
            h.active_at is not distinct from a.active_at and h.through_message_number >= s.last_message_number
                and h.steps = s.total_turns and h.cost_micros = s.total_cost_micros
                and h.last_event_seq is not distinct from s.last_event_seq as "unchanged!"
        -- The limit comes before the joins, and "offset 0" has Postgres look for each session by the key: it believes that a third of all
        -- are due, and could read both tables from end to end. The time is read once: what changes within a statement cannot be looked up
        -- in an index.
        from (
            select * from search_sessions where due_at <= (select clock_timestamp()) order by due_at limit $1
        ) h
        cross join lateral (
            select * from conversation_sessions where session_id = h.session_id offset 0
        ) s
        cross join lateral (
            select coalesce((
                select e.ts from session_events e where e.session_id = s.session_id order by e.seq desc limit 1
            ), s.started_at) as active_at
        ) a
        order by h.due_at"#,
        SESSIONS
    )
    .fetch_all(tx)
    .await?)
}

/// Nothing is to be read of these sessions. Those that are at work are looked at again.
async fn look_later(tx: &mut PgConnection, unchanged: &[Due]) -> Result<()> {
    if unchanged.is_empty() {
        return Ok(());
    }
    let ids: Vec<String> = unchanged.iter().map(|one| one.session_id.clone()).collect();
    let pauses: Vec<Option<f64>> = unchanged.iter().map(Due::pause_s).collect();
    sqlx::query!(
        "update search_sessions h set due_at = clock_timestamp() + make_interval(secs => d.pause_s)
        from unnest($1::text[], $2::float8[]) as d (session_id, pause_s)
        where h.session_id = d.session_id",
        &ids,
        &pauses as &[Option<f64>]
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// The next messages of these sessions, in their order: each with its number.
async fn messages(tx: &mut PgConnection, due: &[Due]) -> Result<BTreeMap<String, Vec<(i64, String)>>> {
    let ids: Vec<String> = due.iter().map(|one| one.session_id.clone()).collect();
    let through: Vec<i64> = due.iter().map(|one| one.through).collect();
    let rows = sqlx::query!(
        r#"select d.session_id as "session_id!", r.message_number, left(r.content::text, $4) as "content!"
        from unnest($1::text[], $2::bigint[]) as d (session_id, through)
        cross join lateral (
            select message_number, content from conversation_records
            where session_id = d.session_id and message_number > d.through
            order by message_number
            limit $3
        ) r
        order by d.session_id, r.message_number"#,
        &ids,
        &through,
        MESSAGES,
        MESSAGE_BYTES
    )
    .fetch_all(tx)
    .await?;
    let mut by_session: BTreeMap<String, Vec<(i64, String)>> = BTreeMap::new();
    for row in rows {
        by_session.entry(row.session_id).or_default().push((row.message_number, row.content));
    }
    Ok(by_session)
}

async fn senders(tx: &mut PgConnection, ids: &[String]) -> Result<BTreeMap<String, Vec<String>>> {
    let rows = sqlx::query!(
        r#"select session_id, array_agg(distinct sender) as "senders!" from session_inbox
        where session_id = any ($1) and sender is not null
        group by session_id"#,
        ids
    )
    .fetch_all(tx)
    .await?;
    Ok(rows.into_iter().map(|row| (row.session_id, row.senders)).collect())
}

/// What a look found to be said and has not written yet.
#[derive(Default)]
struct Documents {
    bytes: usize,
    session_ids: Vec<String>,
    parts: Vec<i32>,
    space_ids: Vec<String>,
    words: Vec<WordVector>,
}

impl Documents {
    fn add(&mut self, one: &Due, bodies: &[String]) {
        for (body, part) in bodies.iter().zip(one.parts..) {
            self.session_ids.push(one.session_id.clone());
            self.parts.push(part);
            self.space_ids.push(one.space_id.clone());
            self.words.push(WordVector::of(body));
            self.bytes += body.len();
        }
    }

    /// Writes them, so that there are none left.
    async fn write(&mut self, tx: &mut PgConnection) -> Result<()> {
        let documents = std::mem::take(self);
        if documents.parts.is_empty() {
            return Ok(());
        }
        // The macro does not know the type tsvector.
        sqlx::query(
            "insert into search_documents (session_id, part, space_id, words)
            select * from unnest($1::text[], $2::integer[], $3::text[], $4::tsvector[])
            on conflict (session_id, part) do update set words = excluded.words",
        )
        .bind(documents.session_ids)
        .bind(documents.parts)
        .bind(documents.space_ids)
        .bind(documents.words)
        .execute(tx)
        .await?;
        Ok(())
    }
}

/// What a look found out about its sessions. One statement writes it for all of them.
#[derive(Default)]
struct Marks {
    session_ids: Vec<String>,
    through: Vec<i64>,
    parts: Vec<i32>,
    /// A JSON array of texts each, as `senders`.
    tools: Vec<String>,
    senders: Vec<String>,
    costs_micros: Vec<i64>,
    steps: Vec<i64>,
    failed_calls: Vec<i64>,
    active_at: Vec<DateTime<Utc>>,
    last_event_seqs: Vec<i64>,
    /// Seconds until the next look. `None`: there is none.
    pauses_s: Vec<Option<f64>>,
}

impl Marks {
    /// Notes what was read of one session, and adds its words to `documents`. `true`: it has more messages.
    fn add(
        &mut self,
        one: &Due,
        read: &[(i64, String)],
        senders: &[String],
        documents: &mut Documents,
    ) -> Result<bool> {
        let (bodies, tools) = words(read, one.sealed);
        documents.add(one, &bodies);
        let is_full = read.len() as i64 == MESSAGES;
        // Numbers may be left out: another session of the conversation has them.
        let through = if is_full { read.last().map_or(one.through, |(number, _)| *number) } else { one.last };
        self.session_ids.push(one.session_id.clone());
        self.through.push(through);
        self.parts.push(one.parts + bodies.len() as i32);
        self.tools.push(to_json(&tools)?);
        self.senders.push(to_json(&senders)?);
        self.costs_micros.push(one.cost_micros);
        self.steps.push(one.steps);
        self.failed_calls.push(one.failed_calls);
        self.active_at.push(one.active_at);
        self.last_event_seqs.push(one.last_event_seq);
        self.pauses_s.push(if is_full { Some(0.0) } else { one.pause_s() });
        Ok(is_full)
    }

    async fn write(self, tx: &mut PgConnection) -> Result<()> {
        if self.session_ids.is_empty() {
            return Ok(());
        }
        sqlx::query!(
            "update search_sessions h
            set through_message_number = d.through,
                parts = d.parts,
                tools = array(
                    select distinct tool
                    from (select unnest(h.tools) union all select json_array_elements_text(d.tools::json)) t (tool)
                    order by tool
                ),
                senders = array(select json_array_elements_text(d.senders::json)),
                cost_micros = d.cost_micros,
                steps = d.steps,
                failed_calls = d.failed_calls,
                active_at = d.active_at,
                last_event_seq = d.last_event_seq,
                due_at = clock_timestamp() + make_interval(secs => d.pause_s),
                indexed_at = clock_timestamp()
            from unnest($1::text[], $2::bigint[], $3::integer[], $4::text[], $5::text[], $6::bigint[], $7::bigint[],
                $8::bigint[], $9::timestamptz[], $10::float8[], $11::bigint[]) as d (session_id, through, parts, tools, senders,
                cost_micros, steps, failed_calls, active_at, pause_s, last_event_seq)
            where h.session_id = d.session_id",
            &self.session_ids,
            &self.through,
            &self.parts,
            &self.tools,
            &self.senders,
            &self.costs_micros,
            &self.steps,
            &self.failed_calls,
            &self.active_at,
            &self.pauses_s as &[Option<f64>],
            &self.last_event_seqs
        )
        .execute(tx)
        .await?;
        Ok(())
    }
}
