//! `wakeful dev`, as a person runs it: with its own Postgres in its own data directory.

use crate::support::client::{Client, numbers, texts};
use crate::support::{Program, eventually};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use tempfile::TempDir;
use tokio::net::TcpListener;
use wakeful_store::Store;
use wakeful_store::session::{SessionFilter, SessionSummary};

/// A place for the data directory.
struct Place {
    temp: TempDir,
}

impl Place {
    fn new() -> Place {
        let temp = TempDir::with_prefix("wakeful-dev-").unwrap();
        // As root, Postgres runs as another user, who must be able to enter this folder.
        std::fs::set_permissions(temp.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
        Place { temp }
    }

    fn data(&self) -> PathBuf {
        self.temp.path().join("data")
    }

    fn mails(&self) -> usize {
        std::fs::read_dir(self.data().join("mail/new")).into_iter().flatten().count()
    }

    /// `wakeful dev …` on a free port.
    fn dev(&self, arguments: &[&str]) -> Program {
        self.dev_with(&["--listen", "127.0.0.1:0"], arguments, &[])
    }

    /// `wakeful dev url|stop|reset`.
    fn verb(&self, verb: &str) -> Program {
        self.dev_with(&[], &[verb], &[])
    }

    fn dev_with(&self, options: &[&str], arguments: &[&str], env: &[(&str, &str)]) -> Program {
        let mut command = Program::command(self.temp.path());
        command.args(["dev", "--data-dir"]).arg(self.data()).args(options).args(arguments);
        command.envs(env.iter().copied());
        Program::start(command)
    }

    async fn store(&self) -> Store {
        let mut url = self.verb("url");
        assert_eq!(url.end().await, 0, "{}", url.errors());
        Store::connect(url.output().trim(), 2, "wakeful test").await.expect("dev's database")
    }
}

/// Waits for the banner, and returns a client for its address.
async fn up(program: &Program) -> Client {
    let line = program.line("Wakeful is up at ").await;
    program.line("the next start goes on from there").await;
    Client::new(line.split_once(" at ").unwrap().1)
}

async fn sessions(store: &Store) -> Vec<SessionSummary> {
    let filter = SessionFilter { limit: 100, ..SessionFilter::default() };
    store.sessions(&filter).await.unwrap()
}

async fn sample(client: &Client, conversation: &str) -> Value {
    let (_, found) = client.get(&format!("/v1/conversations/{conversation}/sessions")).await;
    let items = found["items"].as_array().unwrap_or_else(|| panic!("{found}"));
    assert_eq!(items.len(), 1);
    client.session(items[0]["session_id"].as_str().unwrap()).await
}

#[tokio::test]
async fn a_first_start_shows_the_samples_and_a_second_one_sends_none() {
    let place = Place::new();
    let mut first = place.dev(&["--once"]);
    assert_eq!(first.end().await, 0);
    let banner = first.output();
    for line in [
        "sample-clock   completed       By the worker's clock it is",
        "sample-note    completed       Done. The note is in notes/note.md",
        "sample-colour  waiting_input   asks: Which colour shall it be?",
        "/v1/chat/sample-colour/messages \\\n    -d '{\"text\": \"Green, please.\"}'",
        "curl -N \\\n  http://127.0.0.1:",
    ] {
        assert!(banner.contains(line), "{line:?} is not in\n{banner}");
    }
    assert_eq!(
        banner.matches(" session show sess_").count(),
        7,
        "each with the command that shows it:\n{banner}"
    );
    assert!(!banner.contains('\x1b'), "colours are for terminals");
    assert_eq!(place.verb("url").end().await, 6, "it has ended, and its Postgres too");

    let mut second = place.dev(&[]);
    let client = up(&second).await;
    let clock = sample(&client, "sample-clock").await;
    assert_eq!(clock["status"], "completed");
    assert_eq!(clock["steps"].as_array().unwrap().len(), 2);
    let note = sample(&client, "sample-note").await;
    assert_eq!(note["status"], "completed");
    assert_eq!(texts(&note, "user").len(), 1);
    assert_eq!(note["deliveries"][0]["status"], "sent");
    // The note, and the reply to the mail.
    assert_eq!(place.mails(), 2);
    let colour = sample(&client, "sample-colour").await;
    assert_eq!(colour["status"], "waiting_input");
    assert_eq!(sessions(&place.store().await).await.len(), 7, "one of each trigger, and two chats more");

    // The command that the banner offers.
    client.chat("sample-colour", "Green, please.").await;
    client.wait_for(colour["session_id"].as_str().unwrap(), "completed").await;

    // A dry replay may write to the same people as the sample.
    let mut url = place.verb("url");
    assert_eq!(url.end().await, 0);
    let mut command = Program::command(place.temp.path());
    command.args(["replay", note["session_id"].as_str().unwrap()]).env("DATABASE_URL", url.output().trim());
    let mut replay = Program::start(command);
    assert_eq!(replay.end().await, 0, "{}", replay.output());

    // Dev's database has the role that an erasure needs.
    let mut command = Program::command(place.temp.path());
    let erase = ["conversation", "erase", "sample-clock", "--yes"];
    command.args(erase).env("DATABASE_URL", url.output().trim());
    let mut erase = Program::start(command);
    assert_eq!(erase.end().await, 0, "{}", erase.errors());
    assert!(erase.output().contains("The receipt is erase_"), "{}", erase.output());

    // Dev does not write its defaults to a configuration file, so other commands in this folder assume the
    // same defaults.
    let mut url = place.verb("url");
    assert_eq!(url.end().await, 0);
    let mut command = Program::command(place.temp.path());
    command
        .arg("doctor")
        .env("DATABASE_URL", url.output().trim())
        .env("WAKEFUL_SERVER__LISTEN", "127.0.0.1:0");
    let mut doctor = Program::start(command);
    assert_eq!(doctor.end().await, 0, "{}", doctor.output());
    let report = doctor.output();
    assert!(
        report.contains("default (scripted/demo,") && report.contains("`wakeful dev` assumes"),
        "{report}"
    );
    assert!(report.contains(" is ready"), "it finds the server of this database: {report}");
    std::fs::write(place.temp.path().join("next.toml"), "").unwrap();
    for args in [vec!["ready"], vec!["preflight", "--against", "next.toml"]] {
        let mut command = Program::command(place.temp.path());
        command.args(&args).env("DATABASE_URL", url.output().trim());
        command.env("WAKEFUL_SERVER__LISTEN", "127.0.0.1:0");
        let mut ran = Program::start(command);
        assert_eq!(ran.end().await, 0, "{args:?}: {}{}", ran.output(), ran.errors());
    }

    let mut third = place.dev(&[]);
    assert_eq!(third.end().await, 4, "one at a time");
    assert!(third.errors().contains(&format!("(process {})", second.pid())), "{}", third.errors());
    assert_eq!(place.verb("reset").end().await, 4);
    assert_eq!(place.verb("stop").end().await, 0);
    assert_eq!(second.end().await, 0);
    assert_eq!(place.verb("stop").end().await, 0, "stopped is stopped");
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn a_killed_dev_goes_on_where_it_stood() {
    let place = Place::new();
    let mut first = place.dev(&[]);
    first.error_line("samples sent to").await;
    let store = place.store().await;
    let (note, step) = eventually("the note's first step", || async {
        let note = sessions(&store).await.into_iter().find(|one| one.conversation_id == "sample-note")?;
        let steps = store.steps(&note.session_id, None, 10).await.unwrap();
        let step = steps.into_iter().next()?;
        Some((note, step))
    })
    .await;
    first.signal(libc::SIGKILL);
    assert_eq!(first.end().await, 128 + libc::SIGKILL);
    drop(store);

    let mut second = place.dev(&[]);
    let client = up(&second).await;
    assert!(!second.errors().contains("samples sent to"), "{}", second.errors());
    let resumed = sample(&client, "sample-note").await;
    assert_eq!(resumed["session_id"], note.session_id.as_str());
    assert_eq!(resumed["status"], "completed");
    assert_eq!(numbers(&resumed), (2..=9).collect::<Vec<i64>>());
    assert_eq!(resumed["steps"][0]["worker_id"], step.worker_id.as_str(), "what was committed stays");
    assert_ne!(resumed["steps"][3]["worker_id"], step.worker_id.as_str());
    // The note, and the reply to the mail.
    assert_eq!(place.mails(), 2);
    second.signal(libc::SIGTERM);
    assert_eq!(second.end().await, 0);
    // sqlx tests a connection that it gets back at the moment when Postgres stops.
    let mut warnings = second.errors();
    warnings = warnings.lines().filter(|line| !line.contains("on-release")).collect();
    assert!(!warnings.contains("warning"), "{}", second.errors());
}

#[tokio::test]
async fn a_killed_worker_of_dev_is_followed_by_another_one() {
    let place = Place::new();
    let mut dev = place.dev(&["--no-samples"]);
    let client = up(&dev).await;
    let line = dev.line("kill -9 ").await;
    let first: i32 = line.trim().strip_prefix("kill -9 ").unwrap().parse().unwrap();
    assert_ne!(first, dev.pid(), "the console stays");
    let woken = client.chat("c1", "Write a note about the meeting").await;
    let session_id = woken["session_id"].as_str().unwrap();
    eventually("the first step", || async {
        let session = client.session(session_id).await;
        (!session["steps"].as_array().unwrap().is_empty()).then_some(())
    })
    .await;
    // SAFETY: no memory is involved, and the process is the one that the banner named.
    assert_eq!(unsafe { libc::kill(first, libc::SIGKILL) }, 0);
    dev.error_line("Another one starts").await;
    client.wait_for(session_id, "completed").await;
    let session = client.session(session_id).await;
    let steps = session["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 4);
    assert_ne!(steps[0]["worker_id"], steps[3]["worker_id"]);
    assert_eq!(place.mails(), 1);
    dev.signal(libc::SIGINT);
    assert_eq!(dev.end().await, 0, "the new worker drains");
}

#[tokio::test]
#[ignore = "slow: make soak"]
async fn fresh_and_reset_empty_the_data_and_nothing_else() {
    let place = Place::new();
    assert_eq!(place.dev(&["--once", "--no-samples"]).end().await, 0);
    let (kept, old) = (place.data().join("mine.txt"), place.data().join("mail/new/old"));
    for file in [&kept, &old] {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, "x").unwrap();
    }

    let fresh = place.dev(&["--fresh", "--no-samples"]);
    let client = up(&fresh).await;
    assert!(kept.exists() && !old.exists());
    client.chat("hello", "What time is it?").await;
    assert_eq!(sessions(&place.store().await).await.len(), 1);
    let (_, schedules) = client.get("/v1/schedules").await;
    assert_eq!(schedules["items"], serde_json::json!([]), "without samples there is no schedule of one");
    drop(fresh);

    assert_eq!(place.verb("reset").end().await, 0);
    let folders = std::fs::read_dir(place.data()).unwrap().flatten().filter(|entry| entry.path().is_dir());
    let folders: Vec<String> = folders.map(|entry| entry.file_name().into_string().unwrap()).collect();
    assert!(!folders.iter().any(|name| name.starts_with("postgres-") || name == "mail"), "{folders:?}");
    assert!(kept.exists());
}

#[tokio::test]
async fn a_database_that_is_given_is_used_and_never_emptied() {
    let (host, guest) = (Place::new(), Place::new());
    let mut running = host.dev(&["--no-samples"]);
    let client = up(&running).await;
    client.chat("hello", "What time is it?").await;
    let mut url = host.verb("url");
    assert_eq!(url.end().await, 0);
    let url = url.output().trim().to_owned();
    let env = [("DATABASE_URL", url.as_str())];

    for arguments in [["--fresh"], ["reset"]] {
        let mut refused = guest.dev_with(&[], &arguments, &env);
        assert_eq!(refused.end().await, 2);
        assert!(refused.errors().contains("DATABASE_URL is set"), "{}", refused.errors());
    }
    let mut other = guest.dev_with(&["--listen", "127.0.0.1:0"], &["--once"], &env);
    assert_eq!(other.end().await, 0);
    assert!(other.output().contains("the one of DATABASE_URL"), "{}", other.output());
    assert_eq!(sessions(&host.store().await).await.len(), 1, "somebody talks there: no samples");

    running.signal(libc::SIGINT);
    assert_eq!(running.end().await, 0);
    // A DATABASE_URL from `dev url` means dev's own database, so dev starts it.
    let mut again = host.dev_with(&["--listen", "127.0.0.1:0"], &["--once"], &env);
    assert_eq!(again.end().await, 0);
    assert!(again.output().contains("export DATABASE_URL"), "{}", again.output());
}

#[tokio::test]
async fn with_schedules_of_its_own_it_starts_and_sends_the_other_samples() {
    let place = Place::new();
    let own = "[schedules.mornings]\ncron = \"30 4 1 1 *\"\nprompt = \"Say what is due.\"\n";
    std::fs::write(place.temp.path().join("wakeful.toml"), own).unwrap();
    let mut dev = place.dev(&["--once"]);
    assert_eq!(dev.end().await, 0, "{}", dev.errors());
    assert!(place.mails() > 0, "the mail's sample was answered");
}

#[tokio::test]
async fn a_port_in_use_is_said_before_anything_is_started() {
    let place = Place::new();
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let mut program = place.dev_with(&["--listen", &address], &[], &[]);
    assert_eq!(program.end().await, 6);
    assert!(program.errors().contains("--listen"), "{}", program.errors());
    assert!(program.errors().contains(&address), "{}", program.errors());
    assert_eq!(place.verb("url").end().await, 6);
}
