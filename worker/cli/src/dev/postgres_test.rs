//! Tests that run the installed Postgres.
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;

use sqlx::{Connection, Executor, PgConnection, Row};

use super::*;

/// A temporary directory that the server's account may pass through.
fn temp() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
    dir
}

fn options(data_dir: &Path) -> Options {
    Options { fsync: false, ..Options::new(data_dir) }
}

fn query(cluster: &Cluster, database: &str, sql: &'static str) -> Vec<String> {
    let url = cluster.url(database);
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let rows = connection.fetch_all(sql).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    })
}

fn lives(pid: i32) -> bool {
    // A zombie has ended; only its parent has not reaped it yet.
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[test]
fn a_cluster_is_made_stopped_and_started_again_with_its_data() {
    let temp = temp();
    let data_dir = temp.path().join("deep/dev");
    let began = Instant::now();
    let cluster = Cluster::start(Options::new(&data_dir)).unwrap();
    let first = began.elapsed();
    let pid = cluster.pid().unwrap();
    query(&cluster, "postgres", "create database kept");
    query(&cluster, "kept", "create table words (word text)");
    query(&cluster, "kept", "insert into words values ('wake')");
    assert_eq!(query(&cluster, "kept", "show fsync"), ["on"]);
    cluster.stop().unwrap();
    assert!(!lives(pid));

    let began = Instant::now();
    let cluster = Cluster::start(options(&data_dir)).unwrap();
    println!("first start {first:?}, warm start {:?}", began.elapsed());
    assert_eq!(query(&cluster, "kept", "select word from words"), ["wake"]);
    assert_eq!(query(&cluster, "kept", "show fsync"), ["off"]);
    assert_eq!(query(&cluster, "kept", "show listen_addresses"), [""]);
    let pid = cluster.pid().unwrap();
    drop(cluster);
    assert!(!lives(pid));
}

#[test]
fn a_path_may_be_long_and_hold_spaces_and_quotes() {
    let temp = temp();
    for name in ["with a space, \"quotes\" and ü%+".to_owned(), "long".repeat(40)] {
        let cluster = Cluster::start(options(&temp.path().join(&name))).unwrap();
        let mode = std::fs::metadata(&cluster.socket_dir).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700, "{name}");
        assert_eq!(query(&cluster, "postgres", "show data_checksums"), ["off"], "{name}");
        let socket_dir = cluster.socket_dir.clone();
        cluster.stop().unwrap();
        assert_eq!(socket_dir.exists(), socket_dir.starts_with(temp.path()), "{name}");
    }
}

#[test]
fn a_kill_during_the_making_leaves_no_half_cluster() {
    let temp = temp();
    let major = Binaries::find().unwrap().major;
    let half = temp.path().join(format!("postgres-{major}.new"));
    std::fs::create_dir_all(half.join("base")).unwrap();
    std::fs::write(half.join("PG_VERSION"), "").unwrap();
    let cluster = Cluster::start(options(temp.path())).unwrap();
    assert_eq!(query(&cluster, "postgres", "select 'up'"), ["up"]);
    assert!(!half.exists());
}

#[test]
fn a_second_start_uses_the_first_ones_server_and_leaves_it_running() {
    let temp = temp();
    // Start both at once: the later one waits while the earlier one creates the cluster.
    let data_dir = temp.path().to_owned();
    let other = std::thread::spawn(move || Cluster::start(options(&data_dir)).unwrap());
    let one = Cluster::start(options(temp.path())).unwrap();
    let other = other.join().unwrap();
    let (own, guest) = if one.is_own() { (one, other) } else { (other, one) };
    assert!(own.is_own() && !guest.is_own());
    assert_eq!(own.url("a b"), guest.url("a b"));
    guest.stop().unwrap();
    assert_eq!(query(&own, "postgres", "select 'still up'"), ["still up"]);
}

#[test]
fn a_running_server_is_found_but_not_removed_and_a_stopped_one_is_removed_alone() {
    let temp = temp();
    let maildir = temp.path().join("mail");
    std::fs::create_dir(&maildir).unwrap();
    assert!(Cluster::running(temp.path()).unwrap().is_none());
    let cluster = Cluster::start(options(temp.path())).unwrap();
    query(&cluster, "postgres", "create database old");
    let found = Cluster::running(temp.path()).unwrap().unwrap();
    assert_eq!(found.url("old"), cluster.url("old"));
    assert!(Cluster::remove(temp.path()).is_err());
    drop(found);
    cluster.stop().unwrap();
    assert!(Cluster::running(temp.path()).unwrap().is_none());
    Cluster::remove(temp.path()).unwrap();
    assert!(maildir.exists());
    let cluster = Cluster::start(options(temp.path())).unwrap();
    assert!(query(&cluster, "postgres", "select datname from pg_database where datname = 'old'").is_empty());
}

#[test]
fn a_pidfile_with_the_pid_of_another_program_does_not_stop_a_start() {
    let temp = temp();
    let cluster = Cluster::start(options(temp.path())).unwrap();
    let pgdata = PathBuf::from(&query(&cluster, "postgres", "show data_directory")[0]);
    cluster.stop().unwrap();
    let mut sleeper = Command::new("sleep").arg("60").current_dir("/").spawn().unwrap();
    let stale = format!("{}\n{}\n1\n5432\n/tmp\n\n0 0\nready\n", sleeper.id(), pgdata.display());
    std::fs::write(pgdata.join("postmaster.pid"), stale).unwrap();
    let cluster = Cluster::start(options(temp.path())).unwrap();
    assert!(cluster.is_own());
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
}

#[test]
#[cfg(target_os = "linux")]
fn a_killed_process_leaves_no_server_and_the_next_start_need_not_wait_for_it() {
    let temp = temp();
    let mut holder = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "dev::postgres::tests::hold_a_cluster", "--ignored", "--nocapture"])
        .env("WAKEFUL_HOLD_DATA_DIR", temp.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = BufReader::new(holder.stdout.take().unwrap())
        .lines()
        .find_map(|line| line.unwrap().split_once("server of pid ")?.1.parse::<i32>().ok())
        .unwrap();
    assert!(lives(pid));
    holder.kill().unwrap();
    // The worst moment to start: the holder is not reaped and its server still runs.
    let cluster = Cluster::start(options(temp.path())).unwrap();
    holder.wait().unwrap();
    assert!(!lives(pid));
    assert!(cluster.is_own());
    assert_eq!(query(&cluster, "postgres", "select 'up'"), ["up"]);
}

/// The process that the test above kills.
#[test]
#[ignore = "a part of a_killed_process_leaves_no_server_and_the_next_start_need_not_wait_for_it"]
fn hold_a_cluster() {
    let Some(data_dir) = std::env::var_os("WAKEFUL_HOLD_DATA_DIR") else { return };
    // Start on a thread that ends: the server must not end with the thread.
    let cluster =
        std::thread::spawn(move || Cluster::start(options(Path::new(&data_dir))).unwrap()).join().unwrap();
    println!("\nserver of pid {}", cluster.pid().unwrap());
    loop {
        std::thread::park();
    }
}
