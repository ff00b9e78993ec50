//! The server that everything is measured on, and what a piece of work costs it.

use crate::commits::{self, Shape};
use crate::fixture::{Database, Held};
use crate::process;
use crate::wire::Relay;
use anyhow::{Context, Result};
use sqlx::{Connection, PgConnection, Row};
use std::path::Path;
use tempfile::TempDir;
use wakeful::internal::dev::{Binaries, Cluster, Options};
use wakeful_store::Store;

/// A Postgres of its own, and a connection to it.
pub struct Server {
    connection: PgConnection,
    url: String,
    pid: i32,
    counts_statements: bool,
    // Drop order: the server first, then its files.
    _cluster: Cluster,
    _dir: TempDir,
}

/// What a piece of work cost the server.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spent {
    /// `None` without the extension `pg_stat_statements`.
    pub statements: Option<f64>,
    pub wal_bytes: f64,
    /// User and system time of all server processes.
    pub cpu_s: f64,
}

/// The counters at the beginning of a piece of work.
pub struct Meter {
    wal_bytes: i64,
    cpu_s: f64,
}

/// What one step sends, on average.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Sent {
    pub statements: f64,
    pub round_trips: f64,
    pub bytes: f64,
}

impl Server {
    /// Starts a server: on the disk of the target directory with fsync, or in memory without.
    pub async fn launch(tmpfs: bool) -> Result<Server> {
        use std::os::unix::fs::PermissionsExt;
        let parent = if tmpfs { Path::new("/dev/shm") } else { Path::new(env!("CARGO_TARGET_TMPDIR")) };
        std::fs::create_dir_all(parent)?;
        let mut dir = tempfile::Builder::new();
        // The server may run as another user, who has to get through.
        dir.prefix("wakeful-bench-").permissions(std::fs::Permissions::from_mode(0o711));
        let dir = dir.tempdir_in(parent)?;
        let mut options = Options::new(dir.path());
        options.fsync = !tmpfs;
        let mut settings = vec![
            ("max_connections", "200"),
            ("shared_buffers", "256MB"),
            ("max_wal_size", "4GB"),
            ("autovacuum_naptime", "10s"),
        ];
        let library = Binaries::find()?.dir.with_file_name("lib").join("pg_stat_statements.so");
        let counts_statements = library.is_file();
        if counts_statements {
            settings.extend([
                ("shared_preload_libraries", "pg_stat_statements"),
                ("pg_stat_statements.max", "10000"),
            ]);
        }
        options.settings =
            settings.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let cluster = tokio::task::spawn_blocking(move || Cluster::start(options)).await??;
        let (url, pid) = (cluster.url("postgres"), cluster.pid().context("it is our own")?);
        let mut connection = PgConnection::connect(&url).await?;
        if counts_statements {
            sqlx::query("create extension pg_stat_statements").execute(&mut connection).await?;
        }
        Ok(Server { connection, url, pid, counts_statements, _cluster: cluster, _dir: dir })
    }

    /// The URL of the database `postgres`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Version and the settings that decide what a commit costs.
    pub async fn describe(&mut self) -> Result<String> {
        let sql = "select 'Postgres ' || split_part(current_setting('server_version'), ' ', 1)
            || ', fsync ' || current_setting('fsync')
            || ', synchronous_commit ' || current_setting('synchronous_commit')
            || ', full_page_writes ' || current_setting('full_page_writes')
            || ', wal_level ' || current_setting('wal_level')";
        Ok(sqlx::query_scalar(sql).fetch_one(&mut self.connection).await?)
    }

    /// Writes a checkpoint now, so that none falls into a measurement, and begins to count.
    pub async fn start(&mut self, database: &Database) -> Result<Meter> {
        sqlx::query("checkpoint").execute(&mut self.connection).await?;
        if self.counts_statements {
            let reset = "select pg_stat_statements_reset(0, oid, 0) from pg_database where datname = $1";
            sqlx::query(reset).bind(database.name()).execute(&mut self.connection).await?;
        }
        Ok(Meter { wal_bytes: self.wal_bytes().await?, cpu_s: process::cpu_seconds(self.pid) })
    }

    pub async fn stop(&mut self, database: &Database, before: Meter) -> Result<Spent> {
        let cpu_s = process::cpu_seconds(self.pid) - before.cpu_s;
        let wal_bytes = (self.wal_bytes().await? - before.wal_bytes) as f64;
        let statements = if self.counts_statements {
            let sql = "select coalesce(sum(calls), 0)::float8 from pg_stat_statements
                join pg_database on pg_database.oid = dbid
                where datname = $1 and query not like '%of_the_bench%'";
            Some(sqlx::query_scalar(sql).bind(database.name()).fetch_one(&mut self.connection).await?)
        } else {
            None
        };
        Ok(Spent { statements, wal_bytes, cpu_s })
    }

    async fn wal_bytes(&mut self) -> Result<i64> {
        let sql = "select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint";
        Ok(sqlx::query_scalar(sql).fetch_one(&mut self.connection).await?)
    }

    /// Average and greatest bytes of a cached step result.
    pub async fn step_row_bytes(&self, database: &Database) -> Result<(f64, i32)> {
        let sql = "select avg(pg_column_size(s.*))::float8, max(pg_column_size(s.*)) from session_steps s";
        let row = sqlx::query(sql).fetch_one(&mut database.connect().await?).await?;
        Ok((row.try_get(0)?, row.try_get(1)?))
    }
}

/// Takes a few steps through a relay that counts.
pub async fn traffic(database: &Database, held: &mut [Held], shape: Shape) -> Result<Sent> {
    const STEPS: u32 = 20;
    let relay = Relay::start(&database.url)?;
    let store = Store::connect(relay.url(), 1, "wakeful bench").await?;
    let alone = held.len() == 1;
    // The first step also describes the statement to the client.
    commits::step(&store, &mut held[0], shape, alone).await?;
    let before = relay.traffic();
    for _ in 0..STEPS {
        commits::step(&store, &mut held[0], shape, alone).await?;
    }
    let sent = relay.traffic() - before;
    store.close().await;
    let each = |number: u64| number as f64 / f64::from(STEPS);
    Ok(Sent {
        statements: each(sent.statements),
        round_trips: each(sent.round_trips),
        bytes: each(sent.bytes),
    })
}
