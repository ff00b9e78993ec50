//! The real process: started, observed, stopped, and killed.

use super::Database;
use super::captured::Captured;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use tempfile::TempDir;

/// How to start a process. A clone shares the folder, like processes of one system.
#[derive(Clone)]
pub struct Options {
    /// TOML under the defaults below.
    pub config: String,
    pub args: Vec<String>,
    pub env: BTreeMap<String, String>,
    /// Shared by the processes of one test: workspaces, mail, effects.
    pub dir: Arc<TempDir>,
}

impl Options {
    /// `serve` with all roles on a free port, and the tools of `fixture_worker`.
    pub fn new() -> Options {
        Options {
            config: String::new(),
            args: vec!["serve".into()],
            env: BTreeMap::new(),
            dir: Arc::new(TempDir::with_prefix("wakeful-test-").expect("a temporary folder")),
        }
    }

    /// The default agent with this model, and every tool.
    pub fn model(mut self, model: &str) -> Options {
        write!(
            self.config,
            "[agents.default]\nsystem_prompt = \"You are a test.\"\nmodel = \"{model}\"\ntools = [\"current_time\", \
             \"read_file\", \"write_file\", \"compose_email\", \"ask_user\", \"charge\", \"reserve\"]\n\
             recipients = [\"*\"]\n"
        )
        .expect("a string takes text");
        self
    }

    pub fn config(mut self, toml: &str) -> Options {
        self.config.push_str(toml);
        self.config.push('\n');
        self
    }

    pub fn env(mut self, name: &str, value: impl Into<String>) -> Options {
        self.env.insert(name.into(), value.into());
        self
    }

    pub fn arg(mut self, arg: &str) -> Options {
        self.args.push(arg.into());
        self
    }

    /// A lease that ends soon after its process stops. A busy machine may let it end while the process works, so
    /// that another claim repeats work: only for tests in which a lease has to end. Another process does not wait for
    /// the lease of one that was killed.
    pub fn short_lease(self) -> Options {
        self.env("WAKEFUL_QUEUE__LEASE_S", "1.5")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The effects of the tools: `tool session call`, one line per effect.
    pub fn effects(&self) -> Vec<String> {
        std::fs::read_to_string(self.path("effects")).unwrap_or_default().lines().map(str::to_owned).collect()
    }

    /// Waits until these effects are there.
    pub async fn until_effects(&self, what: &str, are_enough: impl Fn(&[String]) -> bool) {
        let changes = super::folder::Changes::of(self.path("effects"));
        super::within(what, changes.until(|| are_enough(&self.effects()))).await;
    }

    /// Waits until `count` effects are there.
    pub async fn has_effects(&self, count: usize) {
        self.until_effects(&format!("{count} effects"), |effects| effects.len() >= count).await;
    }

    /// Starts the process and waits until it listens. If a failpoint is to kill it, its liveness lock is waited for too: without
    /// one, the next process would wait for the end of its leases.
    pub async fn serve(&self, database: &Database) -> Process {
        let process = self.spawn(&database.url);
        process.wait_for_log("\"Listening\"").await;
        let has_all_roles = !self.args.iter().any(|arg| arg.starts_with("--roles"));
        if has_all_roles && self.env.contains_key("FAILPOINTS") {
            // It may die before that, if its work waits already.
            let _ = process.log.line("Took the liveness lock").await;
        }
        process
    }

    /// Starts the process and waits for nothing.
    pub fn spawn(&self, database_url: &str) -> Process {
        self.spawn_via(&[], database_url)
    }

    /// Like [`Options::spawn`]. The command `via` runs the process, unless it is empty.
    pub fn spawn_via(&self, via: &[String], database_url: &str) -> Process {
        let config = self.path("wakeful.toml");
        let dir = self.dir.path().display();
        // The configuration allows only one way to send mail.
        let other_way =
            self.config.contains("[email.smtp]") || self.env.contains_key("WAKEFUL_EMAIL__SES__SEND");
        let mail = if other_way { String::new() } else { format!("[email]\nmaildir = \"{dir}/mail\"\n") };
        let defaults =
            format!("[server]\nlisten = \"127.0.0.1:0\"\n{mail}[workspace]\ndir = \"{dir}/workspaces\"\n");
        let text = format!("{defaults}{}", self.config);
        // Another process of this folder may be reading the file, and half a file is a different
        // configuration.
        if std::fs::read_to_string(&config).ok().as_deref() != Some(&text) {
            std::fs::write(&config, text).expect("the configuration");
        }
        let mut command = match via.split_first() {
            Some((program, arguments)) => {
                let mut command = Command::new(program);
                command.args(arguments).arg(binary());
                command
            }
            None => Command::new(binary()),
        };
        command.args(&self.args).arg("--config").arg(&config);
        for (name, _) in std::env::vars() {
            let ours = ["WAKEFUL_", "ANTHROPIC_", "OPENAI_", "OTEL_", "FAILPOINTS", "DATABASE_URL"];
            // Keep this variable: it selects a defect that the processes must have.
            if name != "WAKEFUL_MUTANT" && ours.iter().any(|prefix| name.starts_with(prefix)) {
                command.env_remove(name);
            }
        }
        command
            .env("DATABASE_URL", database_url)
            .env("WAKEFUL_LOG", "info,wakeful=debug")
            // On a busy machine a heartbeat may take seconds.
            .env("WAKEFUL_QUEUE__LEASE_S", "10")
            .env("WAKEFUL_QUEUE__HEARTBEAT_S", "0.3")
            .env("WAKEFUL_QUEUE__POLL_MS", "200")
            .env("FIXTURE_EFFECTS", self.path("effects"))
            .env("FIXTURE_HOLD", self.path("hold"))
            .envs(&self.env)
            .current_dir(self.dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("fixture_worker was built");
        let log = Captured::of(child.stderr.take().expect("piped"));
        let output = Captured::of(child.stdout.take().expect("piped"));
        Process { child: Some(child), log, output, _dir: Arc::clone(&self.dir) }
    }
}

/// `wakeful` with the tests' own tools.
fn binary() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_fixture_worker"))
}

/// A running process. Dropping it kills it.
pub struct Process {
    child: Option<Child>,
    log: Captured,
    output: Captured,
    /// Keeps the files for as long as the process runs.
    _dir: Arc<TempDir>,
}

impl Process {
    pub fn pid(&self) -> i32 {
        self.child.as_ref().expect("it runs").id() as i32
    }

    /// Everything written to stderr so far.
    pub fn log(&self) -> String {
        self.log.text()
    }

    /// Everything written to stdout so far.
    pub fn output(&self) -> String {
        self.output.text()
    }

    /// Waits until a line of the log contains `text`, and returns that line.
    pub async fn wait_for_log(&self, text: &str) -> String {
        let line = self.log.line(text).await;
        line.unwrap_or_else(|| panic!("no log line with {text:?}:\n{}", self.log()))
    }

    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        let log = self.log();
        let line = log.lines().find(|line| line.contains("\"Listening\"")).expect("it listens");
        let line: serde_json::Value = serde_json::from_str(line).expect("logs are JSON");
        format!("http://{}", line["listen"].as_str().expect("an address"))
    }

    pub fn client(&self) -> super::Client {
        super::Client::new(&self.url())
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: kill takes no pointers; the pid is of a child that has not been waited for.
        let sent = unsafe { libc::kill(self.pid(), signal) };
        assert_eq!(sent, 0, "the process takes signals");
    }

    /// The most memory that the process has had so far, in MiB.
    pub fn peak_mib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("its peak");
        line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).expect("a number") / 1024
    }

    /// How often the process's thread of this name has slept or waited.
    pub fn pauses_of(&self, thread: &str) -> u64 {
        let named =
            |task: &Path| std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == thread);
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).expect("it runs");
        let task = tasks.map(|task| task.expect("a thread").path()).find(|task| named(task));
        let status = task
            .and_then(|task| std::fs::read_to_string(task.join("status")).ok())
            .expect("it has the thread");
        let pauses = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        pauses.and_then(|pauses| pauses.trim().parse().ok()).expect("a number")
    }

    /// Returns whether the process has ended, by itself or by a signal.
    pub fn has_ended(&mut self) -> bool {
        self.child.as_mut().is_none_or(|child| child.try_wait().expect("it can be waited for").is_some())
    }

    /// The end of the process, to wait for beside something else.
    pub fn end(&mut self) -> super::End {
        super::End::of(self.child.as_mut().expect("it runs"))
    }

    /// `kill -9`, and waits until it is dead.
    pub fn kill(mut self) {
        self.signal(libc::SIGKILL);
        self.wait();
    }

    /// SIGTERM, and waits for its end.
    pub fn terminate(mut self) -> ExitStatus {
        self.signal(libc::SIGTERM);
        self.wait()
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        let status = self.child.as_mut().expect("it runs").wait().expect("it can be waited for");
        self.child = None;
        self.log.join();
        self.output.join();
        status
    }

    /// Like [`Process::wait`], but does not block the test's runtime and has a time limit. If the process
    /// does not end in time, the panic shows its log.
    pub async fn ended(mut self) -> (ExitStatus, Process) {
        let ended = tokio::time::timeout(2 * super::timeout(), self.end().reached()).await;
        assert!(ended.is_ok(), "it does not end:\n{}", self.log());
        (self.wait(), self)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            eprintln!("--- log of the process ---\n{}", self.log());
        }
    }
}
