//! The database's host vanishes without a word: packets are swallowed, and no reset comes. The worker runs in a
//! network namespace with two links. One link goes down, and the host's name gets the other address, as after
//! a managed failover.

use crate::support::{Database, Process, eventually};
use sqlx::postgres::PgConnectOptions;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream, UnixStream};

const OLD: &str = "10.213.1.1";
const NEW: &str = "10.213.2.1";
const PORT: u16 = 15432;
const MODEL_PORT: u16 = 15433;

/// How long a process may keep a connection to a host that is gone.
const WITHIN: Duration = Duration::from_secs(10);

/// A namespace whose links lead to [`OLD`] and [`NEW`].
struct Namespace {
    name: String,
    hosts: PathBuf,
}

impl Namespace {
    fn new(dir: &Path) -> Namespace {
        let id = std::process::id() % 100_000;
        let made = Namespace { name: format!("wk{id}"), hosts: dir.join("hosts") };
        let name = &made.name;
        ip(&format!("netns add {name}"));
        ip(&format!("-n {name} link set lo up"));
        for (link, address) in [("old", "10.213.1"), ("new", "10.213.2")] {
            ip(&format!("link add wk{id}{link} type veth peer name {link} netns {name}"));
            ip(&format!("addr add {address}.1/24 dev wk{id}{link}"));
            ip(&format!("link set dev wk{id}{link} up"));
            ip(&format!("-n {name} addr add {address}.2/24 dev {link}"));
            ip(&format!("-n {name} link set dev {link} up"));
        }
        made.database_is(OLD);
        made
    }

    /// Writes into the file, because the process has this very file mounted.
    fn database_is(&self, address: &str) {
        std::fs::write(&self.hosts, format!("127.0.0.1 localhost\n{address} wakeful-db\n")).expect("hosts");
    }

    /// The command that runs another one inside.
    fn enter(&self) -> Vec<String> {
        let hosts = self.hosts.display();
        let mount = format!("mount --bind {hosts} /etc/hosts && exec \"$0\" \"$@\"");
        ["ip", "netns", "exec", &self.name, "sh", "-c", &mount].map(str::to_owned).to_vec()
    }

    /// From now on, packets from and to [`OLD`] are swallowed. New connections go to [`NEW`].
    fn vanish(&self) {
        ip(&format!("link set dev {}old down", self.name));
        self.database_is(NEW);
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        for arguments in [
            format!("link del {}old", self.name),
            format!("link del {}new", self.name),
            format!("netns del {}", self.name),
        ] {
            let _ = Command::new("ip").args(arguments.split(' ')).status();
        }
    }
}

fn ip(arguments: &str) {
    let done = Command::new("ip").args(arguments.split(' ')).output().expect("iproute2 is installed");
    assert!(done.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Passes connections to Postgres' Unix socket.
async fn forward_to_postgres(address: &str, database: &Database) {
    let options = PgConnectOptions::from_str(&database.url).expect("a URL");
    let folder = options.get_socket().expect("the tests' server has a Unix socket");
    let socket = folder.join(format!(".s.PGSQL.{}", options.get_port()));
    let listener = TcpListener::bind((address, PORT)).await.expect("an address of this host");
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = UnixStream::connect(&socket).await.expect("Postgres");
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut client, &mut server).await });
        }
    });
}

/// Passes connections to the model.
async fn forward_to_model(address: &str, url: &str) -> String {
    let to = url.trim_start_matches("http://").trim_end_matches("/v1").to_owned();
    let listener = TcpListener::bind((address, MODEL_PORT)).await.expect("an address of this host");
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = TcpStream::connect(&to).await.expect("the model");
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut client, &mut server).await });
        }
    });
    format!("http://{address}:{MODEL_PORT}/v1")
}

/// How many connections to [`OLD`] the process's namespace has that its kernel takes for established.
fn connections_to_old(process: &Process) -> usize {
    let table =
        std::fs::read_to_string(format!("/proc/{}/net/tcp", process.pid())).expect("the process lives");
    let old = format!("0101D50A:{PORT:04X}");
    let lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    lines.filter(|line| line.get(2) == Some(&old.as_str()) && line.get(3) == Some(&"01")).count()
}

#[tokio::test]
#[ignore = "needs root, for network namespaces: make soak"]
async fn nothing_of_a_host_that_vanished_is_left_and_work_goes_on_with_the_new_one() {
    // SAFETY: geteuid has no preconditions.
    assert_eq!(unsafe { libc::geteuid() }, 0, "network namespaces need root");
    let mut world = super::chatting("vanished").await;
    let namespace = Namespace::new(world.options.dir.path());
    forward_to_postgres(OLD, &world.database).await;
    forward_to_postgres(NEW, &world.database).await;
    let model = forward_to_model(NEW, &world.model.url).await;
    world.options = super::long_leases(world.options)
        .env("OPENAI_BASE_URL", model)
        // Only a notification wakes the worker in time.
        .env("WAKEFUL_QUEUE__POLL_MS", "3600000");
    let api = world.options.clone().arg("--roles=api").serve(&world.database).await;
    let client = api.client();
    let user = PgConnectOptions::from_str(&world.database.url).expect("a URL").get_username().to_owned();
    let url = format!("postgres://{user}@wakeful-db:{PORT}/{}?sslmode=disable", world.database.name);
    let worker = world.options.clone().arg("--roles=worker").spawn_via(&namespace.enter(), &url);
    worker.wait_for_log("Took the liveness lock").await;
    world.begin(&client).await;
    client.wait_for(&world.session_id, "completed").await;
    assert!(connections_to_old(&worker) > 3);

    namespace.vanish();
    let vanished = Instant::now();
    eventually("the old host's connections to end", || async {
        (connections_to_old(&worker) == 0).then_some(())
    })
    .await;
    let left_after = vanished.elapsed();
    println!("nothing of the old host was left after {:.1} s", left_after.as_secs_f64());
    assert!(left_after < WITHIN, "{left_after:?}");
    eventually("a lock on the new host", || async { (super::locks_taken(&worker) >= 2).then_some(()) }).await;
    for _ in 0..3 {
        world.begin(&client).await;
        client.wait_for(&world.session_id, "completed").await;
    }
    world.check().await;
    // A blocking wait in this thread would stop the forwarders, and the worker could not say goodbye to the database.
    let ended = tokio::task::spawn_blocking(move || worker.terminate()).await.expect("no panic");
    assert!(ended.success());
}
