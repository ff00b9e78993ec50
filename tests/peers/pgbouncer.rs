//! Behind PgBouncer: in session mode, with its defaults, everything works. In transaction mode `serve` refuses.

use crate::support::{Answer, Database, ModelServer, Options};
use sqlx::postgres::PgConnectOptions;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::Duration;
use tempfile::TempDir;

/// Debian's package installs it outside of most users' PATH.
const PROGRAM: &str = "/usr/sbin/pgbouncer";

struct PgBouncer {
    child: Child,
    url: String,
    _dir: TempDir,
}

impl PgBouncer {
    /// Starts one in front of `database`. It sets nothing but where the server is, who may connect, and the mode.
    async fn start(database: &Database, mode: &str) -> PgBouncer {
        let server = PgConnectOptions::from_str(&database.url).unwrap();
        let host = server.get_socket().map_or(server.get_host().to_owned(), |dir| dir.display().to_string());
        let mut dir = tempfile::Builder::new();
        let dir =
            dir.prefix("pgbouncer-").permissions(std::fs::Permissions::from_mode(0o711)).tempdir().unwrap();
        let place = dir.path().display();
        let config = dir.path().join("pgbouncer.ini");
        let text = format!(
            "[databases]\n{} = host={host} port={} user={}\n[pgbouncer]\nunix_socket_dir = {place}\nlisten_port = 6432\n\
             auth_type = any\npool_mode = {mode}\n",
            database.name,
            server.get_port(),
            server.get_username(),
        );
        std::fs::write(&config, text).unwrap();
        let mut command = Command::new(PROGRAM);
        if root() {
            // It does not run as root. Only the server's own account gets to the server's socket.
            let account = std::fs::metadata(&host).map_or((65534, 65534), |dir| (dir.uid(), dir.gid()));
            chown(dir.path(), Some(account.0), Some(account.1)).unwrap();
            command = Command::new("setpriv");
            command.args([format!("--reuid={}", account.0), format!("--regid={}", account.1)]);
            command.args(["--clear-groups", PROGRAM]);
        }
        let child = command.arg(&config).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let child = child.expect("PgBouncer: scripts/setup peers installs it");
        let url = server.socket(dir.path()).port(6432);
        let url = sqlx::ConnectOptions::to_url_lossy(&url).to_string();
        listens(&dir.path().join(".s.PGSQL.6432")).await;
        PgBouncer { child, url, _dir: dir }
    }
}

async fn listens(socket: &Path) {
    crate::support::eventually("PgBouncer to listen", || async {
        tokio::net::UnixStream::connect(socket).await.ok()
    })
    .await;
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
    }
}

async fn options() -> (Options, ModelServer) {
    let model = ModelServer::start(|_, _| Answer::text("Heard.")).await;
    (Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url), model)
}

#[tokio::test]
#[ignore = "needs PgBouncer: make test-peers"]
async fn pgbouncer_in_session_mode_works_with_its_defaults() {
    let database = Database::new().await;
    let bouncer = PgBouncer::start(&database, "session").await;
    let (options, model) = options().await;
    let options = crate::awake::long_leases(options);
    let mut processes = Vec::new();
    for _ in 0..2 {
        let process = options.spawn(&bouncer.url);
        process.wait_for_log("\"Listening\"").await;
        process.wait_for_log("Took the liveness lock").await;
        processes.push(process);
    }
    let client = processes[0].client();
    let id = client.chat("c1", "Hello.").await["session_id"].as_str().unwrap().to_owned();
    client.wait_for(&id, "completed").await;
    // A dead worker is noticed through the pooler too: leases last an hour.
    model.hold();
    client.chat("c1", "Again.").await;
    model.asked(2).await;
    let held = "select pid::text from workers join jobs using (worker_id) where jobs.session_id = $1";
    let holder: String = database.value(held, &id).await;
    let (dying, living): (Vec<_>, Vec<_>) =
        processes.into_iter().partition(|process| process.pid().to_string() == holder);
    for process in dying {
        process.kill();
    }
    model.asked(3).await;
    model.release();
    living[0].client().wait_for(&id, "completed").await;
    for process in living {
        assert!(process.terminate().success());
    }
}

#[tokio::test]
#[ignore = "needs PgBouncer: make test-peers"]
async fn pgbouncer_in_transaction_mode_is_refused_at_start_with_a_remedy() {
    let database = Database::new().await;
    let bouncer = PgBouncer::start(&database, "transaction").await;
    let (options, _model) = options().await;
    let (status, process) =
        tokio::time::timeout(Duration::from_secs(60), options.spawn(&bouncer.url).ended())
            .await
            .expect("it ends");
    assert_eq!(status.code(), Some(6), "{}", process.log());
    assert!(process.log().contains("pool_mode = session"), "{}", process.log());
}

fn root() -> bool {
    // SAFETY: geteuid takes no arguments.
    unsafe { libc::geteuid() == 0 }
}
