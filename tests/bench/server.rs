//! Figures from the server itself, and the traffic of one step.

use crate::commits::{self, Shape};
use crate::fixture::{Database, Held};
use crate::wire::Relay;
use anyhow::Result;
use sqlx::{Connection, PgConnection, Row};
use wakeful_store::Store;

/// A connection of its own, for measuring.
pub struct Server(PgConnection);

/// Sizes and update kinds after the rounds.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Tables {
    pub step_row_bytes: f64,
    pub step_row_bytes_max: i32,
    pub hot_sessions_percent: f64,
    pub hot_jobs_percent: f64,
}

/// What one step sends, on average.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Sent {
    pub statements: f64,
    pub round_trips: f64,
    pub bytes: f64,
}

impl Server {
    pub async fn connect(url: &str) -> Result<Server> {
        Ok(Server(PgConnection::connect(url).await?))
    }

    /// Version and the settings that decide what a commit costs.
    pub async fn describe(&mut self) -> Result<String> {
        let sql = "select 'Postgres ' || split_part(current_setting('server_version'), ' ', 1)
            || ', fsync ' || current_setting('fsync')
            || ', synchronous_commit ' || current_setting('synchronous_commit')
            || ', full_page_writes ' || current_setting('full_page_writes')
            || ', wal_level ' || current_setting('wal_level')";
        Ok(sqlx::query_scalar(sql).fetch_one(&mut self.0).await?)
    }

    /// The position of the server's log. It covers all databases, so it says little on a shared server.
    pub async fn wal_bytes(&mut self) -> Result<i64> {
        let sql = "select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint";
        Ok(sqlx::query_scalar(sql).fetch_one(&mut self.0).await?)
    }

    /// Waits until the store's connections are closed: a backend reports its last numbers when it ends.
    pub async fn tables(&mut self) -> Result<Tables> {
        let others = "select count(*) from pg_stat_activity
            where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'";
        while sqlx::query_scalar::<_, i64>(others).fetch_one(&mut self.0).await? > 0 {
            tokio::task::yield_now().await;
        }
        let sizes = sqlx::query(
            "select avg(pg_column_size(s.*))::float8, max(pg_column_size(s.*)) from session_steps s",
        )
        .fetch_one(&mut self.0)
        .await?;
        let hot = "select coalesce(100.0 * n_tup_hot_upd / nullif(n_tup_upd, 0), 0)::float8
            from pg_stat_user_tables where relname = $1";
        Ok(Tables {
            step_row_bytes: sizes.try_get(0)?,
            step_row_bytes_max: sizes.try_get(1)?,
            hot_sessions_percent: sqlx::query_scalar(hot)
                .bind("conversation_sessions")
                .fetch_one(&mut self.0)
                .await?,
            hot_jobs_percent: sqlx::query_scalar(hot).bind("jobs").fetch_one(&mut self.0).await?,
        })
    }
}

/// Takes a few steps through a relay that counts. Returns `None` if the server refuses connections without
/// TLS.
pub async fn traffic(database: &Database, held: &mut [Held], shape: Shape) -> Result<Option<Sent>> {
    const STEPS: u32 = 20;
    let relay = Relay::start(&database.url)?;
    let Ok(store) = Store::connect(relay.url(), 1, "wakeful bench").await else { return Ok(None) };
    // The first step also describes the statement to the client.
    commits::step(&store, &mut held[0], shape).await?;
    let before = relay.traffic();
    for _ in 0..STEPS {
        commits::step(&store, &mut held[0], shape).await?;
    }
    let sent = relay.traffic() - before;
    store.close().await;
    let each = |number: u64| number as f64 / f64::from(STEPS);
    Ok(Some(Sent {
        statements: each(sent.statements),
        round_trips: each(sent.round_trips),
        bytes: each(sent.bytes),
    }))
}
