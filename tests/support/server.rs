//! A Postgres for a single test, which may stop it, fill its disk and make it read-only.

use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use tempfile::TempDir;
use wakeful::internal::dev::{Cluster, Options};

pub struct Server {
    // Drop order: the server first, then its files.
    cluster: Option<Cluster>,
    options: Options,
    dir: TempDir,
}

impl Server {
    pub async fn start() -> Server {
        Server::with(&[]).await
    }

    /// A server that writes nothing but what its clients ask for: its WAL is theirs.
    pub async fn quiet() -> Server {
        Server::with(&[("autovacuum", "off"), ("full_page_writes", "off"), ("checkpoint_timeout", "1h")])
            .await
    }

    /// With these settings in addition.
    pub async fn with(more: &[(&str, &str)]) -> Server {
        let mut dir = tempfile::Builder::new();
        dir.prefix("wakeful-server-").permissions(std::fs::Permissions::from_mode(0o711));
        let dir = dir.tempdir().expect("a temporary folder");
        let mut options = Options::new(dir.path());
        // Acknowledged data must survive the processes, but not a crash of the machine, so fsync can be off.
        options.fsync = false;
        let settings = [("synchronous_commit", "on"), ("full_page_writes", "on"), ("max_connections", "200")];
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        // A later setting overrides an earlier one.
        options.settings = settings.iter().chain(more).map(owned).collect();
        let mut server = Server { cluster: None, options, dir };
        server.start_again().await;
        server
    }

    pub fn url(&self) -> String {
        self.cluster.as_ref().expect("it runs").url("postgres")
    }

    /// A folder that is deleted with the server.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Stops it as `pg_ctl stop -m immediate` does, without notifying clients.
    pub async fn stop(&mut self) {
        let cluster = self.cluster.take().expect("it runs");
        let pid = cluster.pid().expect("this process started it");
        // SAFETY: kill takes no pointers, and the cluster's child is not reaped before it is dropped below.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGQUIT) }, 0);
        tokio::task::spawn_blocking(move || drop(cluster)).await.expect("it ends");
    }

    /// Starts it again. Returns when it accepts connections.
    pub async fn start_again(&mut self) {
        let options = self.options.clone();
        let started = tokio::task::spawn_blocking(move || Cluster::start(options)).await.expect("no panic");
        self.cluster = Some(started.expect("a Postgres starts"));
    }

    /// Stops it, and starts it with recovery.
    pub async fn restart(&mut self) {
        self.stop().await;
        self.start_again().await;
    }

    /// Runs each statement on its own as superuser, even while the server is read-only.
    pub async fn run(&self, statements: &[&str]) {
        let mut connection = PgConnection::connect(&self.url()).await.expect("it answers");
        for statement in ["set default_transaction_read_only = off"].iter().chain(statements) {
            let done = sqlx::query(AssertSqlSafe((*statement).to_owned())).execute(&mut connection).await;
            done.expect(statement);
        }
    }
}
