//! A Postgres of the storm's own, for its restarts are nobody else's.

use std::os::unix::fs::PermissionsExt;
use tempfile::TempDir;
use wakeful::dev::{Cluster, Options};

/// Fields drop in this order: first the server, then its files.
pub struct Server {
    cluster: Option<Cluster>,
    dir: TempDir,
}

impl Server {
    pub async fn start() -> Server {
        let mut builder = tempfile::Builder::new();
        // The server's account is another one where the tests run as root.
        builder.prefix("wakeful-storm-").permissions(std::fs::Permissions::from_mode(0o711));
        let dir = builder.tempdir().expect("a temporary folder");
        let mut server = Server { cluster: None, dir };
        server.begin().await;
        server
    }

    pub fn url(&self) -> String {
        self.cluster.as_ref().expect("it runs").url("postgres")
    }

    /// Immediate shutdown, without a checkpoint and without goodbyes, then a start with recovery.
    pub async fn restart(&mut self) {
        let cluster = self.cluster.take().expect("it runs");
        let pid = cluster.pid().expect("it is ours");
        // SAFETY: kill takes no pointers; the pid is of a child that the cluster has not waited for.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGQUIT) }, 0);
        // Stopping one that is on its way out is waiting for its end.
        let stopped = tokio::task::spawn_blocking(move || cluster.stop()).await;
        stopped.expect("stopping does not panic").expect("the server ends");
        self.begin().await;
    }

    async fn begin(&mut self) {
        let mut options = Options::new(self.dir.path());
        // What a process wrote outlives it, whether or not it reached the disk: the machine does not crash here. But a
        // commit is a commit.
        options.fsync = false;
        let settings = [("synchronous_commit", "on"), ("full_page_writes", "on"), ("max_connections", "200")];
        options.settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        let started = tokio::task::spawn_blocking(move || Cluster::start(options)).await;
        self.cluster = Some(started.expect("starting does not panic").expect("the storm's Postgres"));
    }
}
