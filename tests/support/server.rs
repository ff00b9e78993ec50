//! A Postgres of one test's own, which the test may stop, starve and forbid to write.

use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use tempfile::TempDir;
use wakeful::dev::{Cluster, Options};

pub struct Server {
    // Dropped in this order: the server, then its files.
    cluster: Option<Cluster>,
    options: Options,
    dir: TempDir,
}

impl Server {
    pub async fn start() -> Server {
        let mut dir = tempfile::Builder::new();
        dir.prefix("wakeful-server-").permissions(std::fs::Permissions::from_mode(0o711));
        let dir = dir.tempdir().expect("a temporary folder");
        let mut options = Options::new(dir.path());
        // What it has acknowledged must outlive its processes; the machine does not fail here.
        options.fsync = false;
        let settings = [("synchronous_commit", "on"), ("full_page_writes", "on"), ("max_connections", "200")];
        options.settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        let mut server = Server { cluster: None, options, dir };
        server.start_again().await;
        server
    }

    pub fn url(&self) -> String {
        self.cluster.as_ref().expect("it runs").url("postgres")
    }

    /// A folder that goes with it.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Ends it as `pg_ctl stop -m immediate` does: without a word to anyone.
    pub async fn stop(&mut self) {
        let cluster = self.cluster.take().expect("it runs");
        let pid = cluster.pid().expect("this process started it");
        // SAFETY: kill takes no pointers, and the cluster's child is not reaped before it is dropped below.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGQUIT) }, 0);
        tokio::task::spawn_blocking(move || drop(cluster)).await.expect("it ends");
    }

    /// Returns when it takes connections.
    pub async fn start_again(&mut self) {
        let options = self.options.clone();
        let started = tokio::task::spawn_blocking(move || Cluster::start(options)).await.expect("no panic");
        self.cluster = Some(started.expect("a Postgres starts"));
    }

    /// Ends it and starts it with recovery.
    pub async fn restart(&mut self) {
        self.stop().await;
        self.start_again().await;
    }

    /// Runs statements as the superuser, each by itself, also while it takes no writes.
    pub async fn run(&self, statements: &[&str]) {
        let mut connection = PgConnection::connect(&self.url()).await.expect("it answers");
        for statement in ["set default_transaction_read_only = off"].iter().chain(statements) {
            let done = sqlx::query(AssertSqlSafe((*statement).to_owned())).execute(&mut connection).await;
            done.expect(statement);
        }
    }
}
