//! The demo's processes. Each runs `wakeful serve` of this same program.
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::super::child::Child;
use super::{LEASE_S, POLL_INTERVAL, TIMEOUT, maildir, workspaces};

/// The role of a process.
#[derive(Clone, Copy, Debug)]
pub enum Role {
    Api,
    Worker,
}

/// All processes that the demo started. Dropping this kills those that still run.
pub struct Cast {
    dir: PathBuf,
    database_url: String,
    actors: Vec<Actor>,
}

struct Actor {
    name: &'static str,
    role: Role,
    child: Child,
    log: PathBuf,
    /// The demo ended it on purpose.
    over: bool,
}

/// Facts that a process logged when it was ready.
pub struct Ready {
    pub pid: i32,
    /// The address of an API process, or the id of a worker.
    pub detail: String,
}

impl Cast {
    pub fn new(dir: &Path, database_url: &str) -> Result<Cast> {
        let tools = ["current_time", "read_file", "write_file", "compose_email", "ask_user"];
        let config = format!(
            "[server]\nlisten = \"127.0.0.1:0\"\n\
             [queue]\nlease_s = {LEASE_S}\nheartbeat_s = 1\npoll_ms = 200\n\
             [agents.default]\nmodel = \"scripted/demo\"\ntools = {tools:?}\nrecipients = [\"*\"]\n\
             [email]\nmaildir = {:?}\n[workspace]\ndir = {:?}\n",
            maildir(dir),
            workspaces(dir),
        );
        std::fs::write(dir.join("wakeful.toml"), config).context("The demo's configuration")?;
        Ok(Cast { dir: dir.to_owned(), database_url: database_url.to_owned(), actors: Vec::new() })
    }

    /// Starts a process without waiting until it is ready.
    pub fn start(&mut self, name: &'static str, role: Role) -> Result<()> {
        let log = self.dir.join(format!("{}.log", name.replace(' ', "-")));
        let roles = match role {
            Role::Api => "api,scheduler",
            Role::Worker => "worker",
        };
        let program = std::env::current_exe().context("The path of this program")?;
        let mut command = Command::new(program);
        command.args(["serve", "--roles", roles, "--config"]).arg(self.dir.join("wakeful.toml"));
        // Remove the caller's settings, which are meant for another system. Tracing settings stay.
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if ["WAKEFUL_", "DATABASE_URL", "ANTHROPIC_", "OPENAI_", "FAILPOINTS"]
                .iter()
                .any(|prefix| name.starts_with(prefix))
            {
                command.env_remove(&*name);
            }
        }
        command
            .env("DATABASE_URL", &self.database_url)
            .env("WAKEFUL_LOG_FORMAT", "json")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).context("The log of a process")?)
            // Ctrl-C at the terminal must reach only the demo, which then stops its processes.
            .process_group(0);
        let child = Child::spawn(command, libc::SIGKILL)?;
        self.actors.push(Actor { name, role, child, log, over: false });
        Ok(())
    }

    /// Waits until the process logs that it is ready.
    pub async fn ready(&mut self, name: &str) -> Result<Ready> {
        let began = Instant::now();
        loop {
            let actor = self.of(name)?;
            if let Some(detail) = actor.detail() {
                return Ok(Ready { pid: actor.child.pid(), detail });
            }
            self.check()?;
            if began.elapsed() > TIMEOUT {
                bail!("{name} does not start:\n{}", self.of(name)?.tail());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Fails if a process ended that should still run.
    pub fn check(&self) -> Result<()> {
        for actor in self.actors.iter().filter(|actor| !actor.over) {
            if let Some(status) = actor.child.wait(Duration::ZERO) {
                bail!("{} ended ({status}):\n{}", actor.name, actor.tail());
            }
        }
        Ok(())
    }

    /// Kills the process with SIGKILL, waits until it is gone, and returns its pid.
    pub fn kill(&mut self, name: &str) -> Result<i32> {
        let actor = self.actors.iter_mut().find(|actor| actor.name == name).context("no such process")?;
        actor.over = true;
        actor.child.signal(libc::SIGKILL);
        actor.child.wait(TIMEOUT).with_context(|| format!("{name} survives SIGKILL"))?;
        Ok(actor.child.pid())
    }

    /// Asks the processes that still run to end, workers first, and waits until they have.
    pub async fn end(&mut self) -> Result<()> {
        for actor in self.actors.iter_mut().rev().filter(|actor| !actor.over) {
            actor.over = true;
            actor.child.signal(libc::SIGTERM);
            let began = Instant::now();
            let status = loop {
                if let Some(status) = actor.child.wait(Duration::ZERO) {
                    break status;
                }
                if began.elapsed() > TIMEOUT {
                    bail!("{} does not end:\n{}", actor.name, actor.tail());
                }
                tokio::time::sleep(POLL_INTERVAL).await;
            };
            if !status.success() {
                bail!("{} ended badly ({status}):\n{}", actor.name, actor.tail());
            }
        }
        Ok(())
    }

    fn of(&self, name: &str) -> Result<&Actor> {
        self.actors.iter().find(|actor| actor.name == name).context("no such process")
    }
}

impl Actor {
    fn detail(&self) -> Option<String> {
        let (message, key) = match self.role {
            Role::Api => ("Listening", "listen"),
            Role::Worker => ("Working", "worker.id"),
        };
        let log = std::fs::read_to_string(&self.log).ok()?;
        let lines = log.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        let said = lines.into_iter().find(|line| line["message"] == message)?;
        Some(said[key].as_str()?.to_owned())
    }

    fn tail(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }
}

impl Drop for Cast {
    fn drop(&mut self) {
        for actor in &self.actors {
            actor.child.signal(libc::SIGKILL);
        }
        for actor in &self.actors {
            actor.child.wait(TIMEOUT);
        }
    }
}
