//! Queries of `wakeful doctor`. Every query is bounded, because operators run it on production repeatedly.

use crate::pool::Server;
use crate::queue::APPLICATION;
use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection};
use std::str::FromStr;
use std::time::{Duration, Instant};

/// How many of the newest sessions are examined.
pub const NEWEST_SESSIONS: i64 = 10_000;

/// The oldest major version of Postgres that the statements support.
pub const OLDEST_SERVER: i32 = 15;

/// Returns host, port and database name of `url`: the parts that may be shown.
///
/// # Errors
/// [`Error::Database`] when the URL is malformed.
pub fn address(url: &str) -> Result<String> {
    let options = PgConnectOptions::from_str(url)?;
    let place = match options.get_socket() {
        Some(socket) => socket.display().to_string(),
        None => format!("{}:{}", options.get_host(), options.get_port()),
    };
    Ok(format!("{place}/{}", options.get_database().unwrap_or_else(|| options.get_username())))
}

/// Opens one connection and closes it. Unlike a pool it does not retry, so it reports the reason of a failure at
/// once.
///
/// # Errors
/// [`Error::Database`], at the latest after `patience`.
pub async fn reach(url: &str, patience: Duration) -> Result<()> {
    let options = PgConnectOptions::from_str(url)?;
    match tokio::time::timeout(patience, options.connect()).await {
        Ok(connected) => Ok(connected?.close().await?),
        Err(_) => Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()).into()),
    }
}

/// Returns whether a connection to `url` keeps its session. A pooler in transaction mode accepts LISTEN and gives the
/// session to another client, so a notification does not arrive within `patience`.
///
/// # Errors
/// [`Error::Database`] when the database gives no two connections now, or one of them ends.
pub async fn keeps_session(url: &str, patience: Duration) -> Result<bool> {
    match hears_itself(url, patience).await {
        // This connection got the notification of another client, or another client's prepared statement.
        Err(sqlx::Error::Protocol(_)) => Ok(false),
        Err(sqlx::Error::Database(error))
            if error.code().is_some_and(|code| ["42P05", "26000"].contains(&code.as_ref())) =>
        {
            Ok(false)
        }
        heard => Ok(heard?),
    }
}

async fn hears_itself(url: &str, patience: Duration) -> std::result::Result<bool, sqlx::Error> {
    let server = Server::new(url, APPLICATION)?;
    let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(patience);
    let pool = pool.connect_with(server.options().clone()).await?;
    let channel = crate::new_id("wakeful_session");
    let mut listener = PgListener::connect_with(&pool).await?;
    // A new connection would not hear what the old one missed.
    listener.eager_reconnect(false);
    listener.listen(&channel).await?;
    let mut other = server.connect(&[]).await?;
    // Such a pooler does not keep prepared statements either.
    sqlx::raw_sql(AssertSqlSafe(format!("notify {channel}"))).execute(&mut other).await?;
    let heard = tokio::time::timeout(patience, listener.try_recv()).await;
    other.close().await?;
    match heard {
        Ok(Ok(Some(_))) => Ok(true),
        Ok(Ok(None)) => Err(sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into())),
        Ok(Err(error)) => Err(error),
        Err(_) => Ok(false),
    }
}

/// Facts about the server.
#[derive(Clone, Debug)]
pub struct ServerFacts {
    /// The version as in `server_version_num`: 170011 for 17.11.
    pub version_num: i32,
    pub version: String,
    /// The server's clock.
    pub now: DateTime<Utc>,
    /// It is a standby, which takes no writes.
    pub standby: bool,
    /// It takes no writes: it is a standby, or this role's transactions are read-only by a setting.
    pub read_only: bool,
    /// Duration of the query. The clock is known only as precisely as that.
    pub round_trip: Duration,
}

/// Sessions and deliveries that need a person, among the [`NEWEST_SESSIONS`].
#[derive(Clone, Debug, Default)]
pub struct Troubles {
    /// Sessions by status.
    pub sessions: Vec<(String, i64)>,
    /// Sessions that failed within the time asked about, and the newest of them; replays and imports are left out.
    pub failed_since: i64,
    pub failed_session: Option<String>,
    /// Sessions that wait for an operator, and the newest of them; replays and imports are left out.
    pub in_need: i64,
    pub in_need_session: Option<String>,
    /// Calls with an uncertain outcome that no person has decided, and one session that has such a call.
    pub uncertain_calls: i64,
    pub uncertain_call_session: Option<String>,
    /// That session's call.
    pub uncertain_call_id: Option<String>,
    /// Outgoing messages that may or may not have been sent, and one session that has such a message.
    pub uncertain_deliveries: i64,
    pub uncertain_delivery_session: Option<String>,
    /// Failed outgoing messages, the newest of them, and the age of the oldest.
    pub failed_deliveries: i64,
    pub failed_delivery: Option<String>,
    pub failed_oldest_s: f64,
    /// Outgoing messages of any session that should have been sent by now, and how long the oldest waits.
    pub waiting_deliveries: i64,
    pub waiting_oldest_s: f64,
}

/// What the role of this connection may do beyond its work.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoleFacts {
    pub role: String,
    pub superuser: bool,
    /// Row-level security does not bind it.
    pub sees_all_spaces: bool,
    /// It may make, change or drop tables.
    pub ddl: bool,
    /// It may change, delete or empty what is in the logs.
    pub rewrites_logs: bool,
    /// The role that erasures and retention take is there, and has its rights.
    pub retention_role: bool,
}

impl Store {
    /// What the role of the pool's connections may do.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn role_facts(&self) -> Result<RoleFacts> {
        Ok(sqlx::query_as!(
            RoleFacts,
            r#"
            with logs (name) as (values ('conversation_records'), ('session_events'), ('audit_log'))
            select current_user::text as "role!", r.rolsuper as "superuser!",
                not row_security_active('conversation_sessions') as "sees_all_spaces!",
                has_schema_privilege(current_schema(), 'create')
                    or exists (select from logs
                        join pg_class c on c.oid = to_regclass(logs.name)
                        where pg_has_role(c.relowner, 'member')) as "ddl!",
                exists (select from logs
                    where has_table_privilege(logs.name, 'update, delete, truncate')) as "rewrites_logs!",
                exists (select from pg_roles
                    where rolname = 'wakeful_retention'
                        and has_table_privilege(oid, 'session_events', 'delete')) as "retention_role!"
            from pg_roles r
            where r.rolname = current_user
            "#
        )
        .fetch_one(&self.pool)
        .await?)
    }

    /// Version and clock of the server.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn server_facts(&self) -> Result<ServerFacts> {
        // Connect first, so that the time to connect does not count into the clock's uncertainty.
        let mut connection = self.pool.acquire().await?;
        let began = Instant::now();
        let row = sqlx::query!(
            r#"
            select current_setting('server_version_num')::integer as "version_num!",
                current_setting('server_version') as "version!",
                clock_timestamp() as "now!", pg_is_in_recovery() as "standby!",
                current_setting('transaction_read_only')::boolean as "read_only!"
            "#
        )
        .fetch_one(&mut *connection)
        .await?;
        Ok(ServerFacts {
            version_num: row.version_num,
            version: row.version,
            now: row.now,
            standby: row.standby,
            read_only: row.standby || row.read_only,
            round_trip: began.elapsed(),
        })
    }

    /// Returns how long a notification takes from one connection to another that listens. A pooler in transaction
    /// mode gives the listening connection's server to another client; then the notification never arrives, and no
    /// error is raised.
    ///
    /// # Errors
    /// [`Error::Database`]. No notification within `patience` is `None`.
    pub async fn notification_round_trip(&self, patience: Duration) -> Result<Option<Duration>> {
        let channel = crate::new_id("wakeful_doctor");
        // A server that has no connection left would be asked again and again.
        let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(patience);
        let pool = pool.connect_with(self.server.options().clone()).await?;
        let mut listener = PgListener::connect_with(&pool).await?;
        listener.listen(&channel).await?;
        let began = Instant::now();
        sqlx::query!("select pg_notify($1, '')", channel).fetch_one(&self.pool).await?;
        match tokio::time::timeout(patience, listener.recv()).await {
            Ok(Ok(_)) => Ok(Some(began.elapsed())),
            Ok(Err(error)) => Err(Error::Database(error)),
            Err(_) => Ok(None),
        }
    }

    /// Counts what needs a person, among the newest sessions only, so that the cost does not grow with the tables. A
    /// delivery counts as late only after `patience`, and a failed session for the time `since`.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn troubles(&self, patience: Duration, since: Duration) -> Result<Troubles> {
        let sessions = sqlx::query!(
            r#"
            select status, count(*) as "count!"
            from (
                select status from conversation_sessions order by session_id desc limit $1
            ) newest
            group by status
            order by status
            "#,
            NEWEST_SESSIONS
        )
        .fetch_all(&self.pool)
        .await?;
        let ended = sqlx::query!(
            r#"
            with newest as (
                select session_id, status, completed_at, trigger_type from conversation_sessions
                order by session_id desc
                limit $1
            )
            select count(*) filter (where failed) as "failed!", max(session_id) filter (where failed) as failed_session,
                count(*) filter (where needs) as "needs!", max(session_id) filter (where needs) as needy_session
            from (
                select session_id, status = 'needs_attention' as needs,
                    status = 'failed' and completed_at > clock_timestamp() - make_interval(secs => $2) as failed
                from newest
                where trigger_type not in ('replay', 'import')
            ) judged
            "#,
            NEWEST_SESSIONS,
            since.as_secs_f64()
        )
        .fetch_one(&self.pool)
        .await?;
        let effects = sqlx::query!(
            r#"
            with newest as materialized (
                select session_id from conversation_sessions order by session_id desc limit $1
            ), calls as (
                select count(*) as found, max(tool_calls.session_id) as session_id,
                    (array_agg(tool_calls.call_id order by tool_calls.session_id desc, tool_calls.call_id))[1] as call_id
                from tool_calls
                join newest on newest.session_id = tool_calls.session_id
                where tool_calls.status = 'uncertain'
                    and coalesce(tool_calls.resolution ->> 'outcome', 'approved') = 'approved'
            ), outgoing as (
                select deliveries.session_id, deliveries.delivery_id, deliveries.status, deliveries.created_at
                from deliveries
                join newest on newest.session_id = deliveries.session_id
                where deliveries.status in ('uncertain', 'failed') and not deliveries.imported
            ), waiting as (
                select coalesce(resent_at, created_at) as since
                from deliveries
                where status in ('queued', 'sending')
                    and coalesce(resent_at, created_at) < clock_timestamp() - make_interval(secs => $2)
                limit $1
            )
            select calls.found as "calls!", calls.session_id as call_session, calls.call_id,
                (select count(*) from outgoing where status = 'uncertain') as "uncertain!",
                (select max(session_id) from outgoing where status = 'uncertain') as uncertain_session,
                (select count(*) from outgoing where status = 'failed') as "failed!",
                (select max(delivery_id) from outgoing where status = 'failed') as failed_delivery,
                (
                    select extract(epoch from clock_timestamp() - min(created_at))::float8 from outgoing
                    where status = 'failed'
                ) as failed_oldest_s,
                (select count(*) from waiting) as "waiting!",
                (select extract(epoch from clock_timestamp() - min(since))::float8 from waiting) as waiting_oldest_s
            from calls
            "#,
            NEWEST_SESSIONS,
            patience.as_secs_f64()
        )
        .fetch_one(&self.pool)
        .await?;
        Ok(Troubles {
            sessions: sessions.into_iter().map(|row| (row.status, row.count)).collect(),
            failed_since: ended.failed,
            failed_session: ended.failed_session,
            in_need: ended.needs,
            in_need_session: ended.needy_session,
            uncertain_calls: effects.calls,
            uncertain_call_session: effects.call_session,
            uncertain_call_id: effects.call_id,
            uncertain_deliveries: effects.uncertain,
            uncertain_delivery_session: effects.uncertain_session,
            failed_deliveries: effects.failed,
            failed_delivery: effects.failed_delivery,
            failed_oldest_s: effects.failed_oldest_s.unwrap_or_default(),
            waiting_deliveries: effects.waiting,
            waiting_oldest_s: effects.waiting_oldest_s.unwrap_or_default(),
        })
    }
}
