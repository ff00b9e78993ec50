//! Failed runs in groups. The commit that ends a run adds a row to `run_failures`. The worker that fills the search counts these rows
//! a moment later, so runs that fail at once do not wait for one another.

use crate::audit::act;
use crate::encryption::SEALED;
use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;
use sqlx::PgConnection;
use std::time::Duration;
use wakeful_workflow::failure::Failure;

/// The version that failures are noted with.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// How many failures one look counts.
const COUNTED: i64 = 5000;

/// How many hours a list of groups shows, and how many the page of one group shows.
const DAY: i32 = 24;
const WEEK: i32 = 168;

/// How many failed sessions of a group are counted.
const FAILED: i64 = 10_000;

/// A group of failed runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ErrorGroup {
    pub fingerprint: String,
    pub space_id: String,
    /// The fault's kind.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = wakeful_workflow::failure::KINDS)))]
    pub kind: String,
    /// The provider, or nothing.
    pub source: String,
    /// The text without what differs from one to the next.
    pub text: String,
    /// The newest error as it was.
    pub example: String,
    pub count: i64,
    pub first_at: DateTime<Utc>,
    pub last_at: DateTime<Utc>,
    pub first_version: String,
    pub last_version: String,
    /// The last ten sessions, the newest first.
    pub sample: Vec<String>,
    /// Failures in each of the last 24 hours, the oldest first. The last one has just begun. Of a single group: 168 hours.
    pub hours: Vec<i64>,
    pub muted: bool,
    /// Until when it is muted. `None` with `muted`: for good.
    pub muted_until: Option<DateTime<Utc>>,
    pub muted_by: Option<String>,
    pub mute_reason: Option<String>,
    pub note: Option<String>,
    pub noted_by: Option<String>,
    pub noted_at: Option<DateTime<Utc>>,
}

/// Which groups to list.
#[derive(Clone, Debug, Default)]
pub struct ErrorFilter {
    pub space_id: Option<String>,
    /// Only muted ones, or only others. `None`: all.
    pub muted: Option<bool>,
    /// A part of the text.
    pub text: Option<String>,
    pub kind: Option<String>,
    pub fingerprint: Option<String>,
    /// That failed then or later.
    pub since: Option<DateTime<Utc>>,
    /// Time, fingerprint and space of the last item of the page before.
    pub before: Option<(DateTime<Utc>, String)>,
    /// How many hours are counted each. 0: a day.
    pub hours: i32,
    pub limit: i64,
}

impl Store {
    /// Groups of failed runs, the newest failure first.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn error_groups(&self, filter: &ErrorFilter) -> Result<Vec<ErrorGroup>> {
        let (before_at, before) = filter.before.clone().unzip();
        let mut tx = self.pool.planned().await?;
        let found = sqlx::query_as!(
            ErrorGroup,
            r#"select fingerprint, space_id, kind, source, text, example, count, first_at, last_at, first_version,
                last_version, sample,
                array(
                    select coalesce(h.count, 0)
                    from generate_series($10::int - 1, 0, -1) ago
                    left join error_hours h on h.space_id = g.space_id and h.fingerprint = g.fingerprint
                        and h.hour = date_bin('1 hour', now(), timestamptz 'epoch') - make_interval(hours => ago)
                    order by ago desc
                ) as "hours!",
                coalesce(muted_until > clock_timestamp(), false) as "muted!",
                case when muted_until < 'infinity' and muted_until > clock_timestamp() then muted_until end as muted_until,
                muted_by, mute_reason, note, noted_by, noted_at
            from error_groups g
            where ($1::text is null or space_id = $1)
                and ($2::boolean is null or coalesce(muted_until > clock_timestamp(), false) = $2)
                and ($3::text is null
                    or position(lower($3) in lower(text)) > 0 or position(lower($3) in lower(example)) > 0)
                and ($4::text is null or kind = $4)
                and ($5::text is null or fingerprint = $5)
                and ($6::timestamptz is null or last_at >= $6)
                and ($7::timestamptz is null or (last_at, fingerprint) < ($7, $8))
            order by last_at desc, fingerprint desc
            limit $9"#,
            filter.space_id,
            filter.muted,
            filter.text,
            filter.kind,
            filter.fingerprint,
            filter.since,
            before_at,
            before,
            filter.limit,
            if filter.hours > 0 { filter.hours } else { DAY }
        )
        .fetch_all(&mut *tx)
        .await?;
        tx.rollback().await?;
        Ok(found)
    }

    /// One group. `space_id`: none for the newest of all spaces.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Database`].
    pub async fn error_group(&self, space_id: Option<&str>, fingerprint: &str) -> Result<ErrorGroup> {
        let filter = ErrorFilter {
            space_id: space_id.map(str::to_owned),
            fingerprint: Some(fingerprint.to_owned()),
            hours: WEEK,
            limit: 1,
            ..ErrorFilter::default()
        };
        let found = self.error_groups(&filter).await?.into_iter().next();
        found.ok_or_else(|| Error::NotFound { what: "error group", id: fingerprint.to_owned() })
    }

    /// How many of a group's sessions are still failed, counted up to 10,000.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn failed_now(&self, space_id: Option<&str>, fingerprint: &str) -> Result<i64> {
        Ok(sqlx::query_scalar!(
            r#"select count(*) as "count!" from (
                select from search_sessions h
                join conversation_sessions s using (session_id)
                where h.fingerprint = $1 and s.status = 'failed' and ($2::text is null or h.space_id = $2)
                limit $3
            ) failed"#,
            fingerprint,
            space_id,
            FAILED
        )
        .fetch_one(&self.pool)
        .await?)
    }

    /// Mutes a group for `length`; without a `length`, for good. A `length` of zero ends the muting.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Database`].
    pub async fn mute_errors(
        &self,
        space_id: Option<&str>,
        fingerprint: &str,
        length: Option<Duration>,
        reason: Option<&str>,
    ) -> Result<()> {
        act::because(reason);
        let mut tx = self.pool.begin().await?;
        let muted = sqlx::query!(
            "update error_groups
            set muted_until = case when $3::float8 is null then 'infinity'
                    when $3 > 0 then clock_timestamp() + make_interval(secs => $3) end,
                muted_by = case when $3 is null or $3 > 0 then $4 end,
                mute_reason = case when $3 is null or $3 > 0 then $5 end
            where fingerprint = $1 and ($2::text is null or space_id = $2)",
            fingerprint,
            space_id,
            length.map(|length| length.as_secs_f64()),
            act::actor(),
            reason
        );
        one_or_more(muted.execute(&mut *tx).await?.rows_affected(), fingerprint)?;
        Ok(tx.commit().await?)
    }

    /// Writes a note for those who look at the group next. An empty note removes the old one.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Database`].
    pub async fn note_errors(&self, space_id: Option<&str>, fingerprint: &str, note: &str) -> Result<()> {
        let mut tx = self.pool.begin().await?;
        let noted = sqlx::query!(
            "update error_groups
            set note = nullif($3, ''),
                noted_by = case when $3 <> '' then $4 end,
                noted_at = case when $3 <> '' then clock_timestamp() end
            where fingerprint = $1 and ($2::text is null or space_id = $2)",
            fingerprint,
            space_id,
            note,
            act::actor()
        );
        one_or_more(noted.execute(&mut *tx).await?.rows_affected(), fingerprint)?;
        Ok(tx.commit().await?)
    }
}

fn one_or_more(rows: u64, fingerprint: &str) -> Result<()> {
    if rows == 0 {
        return Err(Error::NotFound { what: "error group", id: fingerprint.to_owned() });
    }
    Ok(())
}

/// Adds the failure of a run that no step's commit ends. `sealed`: it is of an encrypted conversation.
pub(crate) async fn add(
    tx: &mut PgConnection,
    session_id: &str,
    run_id: &str,
    failure: &Failure,
    error: &str,
    sealed: bool,
) -> Result<()> {
    // The groups of errors are of several conversations.
    let (text, error) = if sealed { (SEALED, SEALED) } else { (failure.text.as_str(), error) };
    sqlx::query!(
        "insert into run_failures (session_id, run_id, space_id, fingerprint, kind, source, text, error, version)
        select session_id, $2, space_id, $3, $4, $5, $6, $7, $8
        from conversation_sessions where session_id = $1",
        session_id,
        run_id,
        failure.fingerprint,
        failure.kind,
        failure.source,
        text,
        error,
        VERSION
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// Adds failures that are not counted yet to their groups. Those of replays are left out. `true`: there may be more.
pub(crate) async fn count(tx: &mut PgConnection) -> Result<bool> {
    let counted = sqlx::query_scalar!(
        r#"with taken as (
            update run_failures set is_counted = true
            -- An array, not a join: Postgres may read all failures to join a few.
            where failure_id = any (array(
                select failure_id from run_failures where not is_counted order by failure_id limit $1
            ))
            returning *
        ), live as (
            select taken.* from taken
            join conversation_sessions s using (session_id)
            where s.trigger_type <> 'replay'
        ), of_group as (
            select space_id, fingerprint, count(*) as count, min(at) as first_at, max(at) as last_at,
                (array_agg(session_id order by failure_id desc))[1:10] as sample,
                (array_agg(kind order by failure_id desc))[1] as kind,
                (array_agg(source order by failure_id desc))[1] as source,
                (array_agg(text order by failure_id desc))[1] as text,
                (array_agg(error order by failure_id desc))[1] as example,
                (array_agg(version order by failure_id))[1] as first_version,
                (array_agg(version order by failure_id desc))[1] as last_version
            from live
            group by space_id, fingerprint
        ), grouped as (
            insert into error_groups as g (space_id, fingerprint, kind, source, text, example, count, first_at, last_at,
                first_version, last_version, sample)
            select space_id, fingerprint, kind, source, text, example, count, first_at, last_at, first_version,
                last_version, sample
            from of_group
            order by space_id, fingerprint
            on conflict (space_id, fingerprint) do update
            set count = g.count + excluded.count,
                last_at = greatest(g.last_at, excluded.last_at),
                example = excluded.example,
                last_version = excluded.last_version,
                sample = array(
                    select one from unnest(excluded.sample || g.sample) with ordinality as u (one, n)
                    group by one order by min(n) limit 10
                )
        ), of_hour as (
            select space_id, fingerprint, date_bin('1 hour', at, timestamptz 'epoch') as hour, count(*) as count
            from live
            group by 1, 2, 3
        ), by_hour as (
            insert into error_hours as h (space_id, fingerprint, hour, count)
            select space_id, fingerprint, hour, count from of_hour
            order by 1, 2, 3
            on conflict (space_id, fingerprint, hour) do update set count = h.count + excluded.count
        ), forgotten as (
            delete from error_hours h using of_group
            where h.space_id = of_group.space_id and h.fingerprint = of_group.fingerprint
                and h.hour < now() - interval '8 days'
        ), newest as (
            select distinct on (session_id) session_id, space_id, fingerprint from live
            order by session_id, failure_id desc
        ), found as (
            insert into search_sessions (session_id, space_id, fingerprint, due_at)
            select session_id, space_id, fingerprint, clock_timestamp() from newest
            on conflict (session_id) do update set fingerprint = excluded.fingerprint
        )
        select count(*) = $1 as "more!" from taken"#,
        COUNTED
    )
    .fetch_one(tx)
    .await?;
    Ok(counted)
}
