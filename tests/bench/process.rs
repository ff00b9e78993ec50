//! Processes of the release binary `wakeful`, and what the kernel knows of a process: CPU time and memory.

use anyhow::{Context, Result, bail};
use captured::Captured;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::process::{Child, Command};

#[path = "../support/captured.rs"]
mod captured;

/// The text of a message of 2 KB.
const MESSAGE_BYTES: usize = 2000;

/// Tool steps of each session of a backlog.
pub const STEPS: usize = 5;

/// The file that every tool step reads.
pub const FILE: &str = "notes.txt";

/// The folders of all sites. They are removed when the bench ends: for a minute after a file is deleted, ext4 looks at its
/// inode's place each time a file is made. A worker spent a quarter of its CPU there when the part before had just deleted
/// thousands of files.
static SITES: Mutex<Vec<TempDir>> = Mutex::new(Vec::new());

/// Removes what the sites of this bench have left.
pub fn remove_sites() {
    SITES.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// A folder with the configuration and the scenario of the scripted model, for all processes of one part.
pub struct Site {
    dir: PathBuf,
}

impl Site {
    /// A site whose model is scripted and answers at once.
    pub fn new() -> Result<Site> {
        Site::with_model("scripted/bench", "")
    }

    /// A site whose model is at `url` and speaks OpenAI's protocol.
    pub fn with_provider(url: &str) -> Result<Site> {
        Site::with_model("openai/bench", &format!("[providers.openai]\nbase_url = \"{url}\"\n"))
    }

    /// A site with these agents too.
    pub fn with_agents<'a>(names: impl Iterator<Item = &'a str>) -> Result<Site> {
        let agent = |name| {
            format!("[agents.{name}]\nsystem_prompt = \"You are measured.\"\nmodel = \"scripted/bench\"\n")
        };
        Site::with_model("scripted/bench", &names.map(agent).collect::<String>())
    }

    fn with_model(model: &str, more: &str) -> Result<Site> {
        let dir = TempDir::with_prefix("wakeful-bench-")?;
        let path = dir.path().to_owned();
        SITES.lock().unwrap_or_else(PoisonError::into_inner).push(dir);
        std::fs::create_dir(path.join("scenarios"))?;
        std::fs::write(path.join("scenarios/bench.toml"), scenario())?;
        std::fs::write(
            path.join("wakeful.toml"),
            format!(
                "[server]\nlisten = \"127.0.0.1:0\"\nconnections = 20000\nstreams = 20000\n[workspace]\ndir = \"workspaces\"\n\
                 [scripted]\ndir = \"scenarios\"\n[agents.default]\nsystem_prompt = \"You are measured.\"\n\
                 model = \"{model}\"\ntools = [\"read_file\"]\n{more}"
            ),
        )?;
        Ok(Site { dir: path })
    }

    /// Gives a session the file that its steps read.
    pub fn furnish(&self, session_id: &str) -> Result<()> {
        let workspace = self.dir.join("workspaces").join(session_id);
        std::fs::create_dir_all(&workspace)?;
        Ok(std::fs::write(workspace.join(FILE), text())?)
    }

    /// Starts `wakeful serve` with its default settings, and waits until its log says that it works or listens.
    pub async fn serve(&self, database_url: &str, roles: &str) -> Result<Serve> {
        // To make one takes longer than a look whether the process is ready.
        let client = reqwest::Client::new();
        let mut command = Command::new(binary()?);
        for (name, _) in std::env::vars() {
            if ["WAKEFUL_", "ANTHROPIC_", "OPENAI_", "OTEL_", "DATABASE_URL"]
                .iter()
                .any(|prefix| name.starts_with(prefix))
            {
                command.env_remove(name);
            }
        }
        let began = Instant::now();
        let mut child = command
            .args(["serve", "--roles", roles, "--config"])
            .arg(self.dir.join("wakeful.toml"))
            .env("DATABASE_URL", database_url)
            .current_dir(&self.dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("wakeful does not start")?;
        let log = child.stderr.take().context("it is piped")?.into_owned_fd()?;
        let log = Captured::of(std::fs::File::from(log));
        let mut serve = Serve { child, log, began, ready_ms: 0.0 };
        serve.wait_for(if roles.contains("worker") { "Working" } else { "Listening" }).await?;
        if roles.contains("api") {
            let url = format!("{}/readyz", serve.url()?);
            while !client.get(&url).send().await.is_ok_and(|answer| answer.status().is_success()) {
                serve.check()?;
                // A process says in its answers alone that it is ready, as to a load balancer.
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        serve.ready_ms = serve.began.elapsed().as_secs_f64() * 1e3;
        Ok(serve)
    }
}

/// A running `wakeful serve`. Dropping it kills it.
pub struct Serve {
    child: Child,
    log: Captured,
    began: Instant,
    /// From the start of the process until it is ready.
    pub ready_ms: f64,
}

impl Serve {
    pub fn pid(&self) -> Result<i32> {
        Ok(self.child.id().context("it runs")? as i32)
    }

    pub fn url(&self) -> Result<String> {
        let log = self.log_text();
        let line = log.lines().find(|line| line.contains("\"Listening\"")).context("it listens")?;
        let line: serde_json::Value = serde_json::from_str(line)?;
        Ok(format!("http://{}", line["listen"].as_str().context("an address")?))
    }

    pub fn log_text(&self) -> String {
        self.log.text()
    }

    /// `kill -9`, and waits for its end.
    pub async fn kill(mut self) -> Result<()> {
        self.child.kill().await?;
        self.log.join();
        Ok(())
    }

    fn check(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("wakeful ended ({status}):\n{}", self.log_text());
        }
        if self.began.elapsed() > Duration::from_secs(60) {
            bail!("wakeful is not ready after a minute:\n{}", self.log_text());
        }
        Ok(())
    }

    async fn wait_for(&mut self, text: &str) -> Result<()> {
        if self.log.line(text).await.is_none() {
            let status = self.child.try_wait()?;
            bail!("wakeful does not say {text:?} (ended: {status:?}):\n{}", self.log_text());
        }
        Ok(())
    }
}

/// How long a process may take to say what is waited for.
fn timeout() -> Duration {
    Duration::from_secs(60)
}

/// The release binary. `make bench` builds it in the same way as this program.
fn binary() -> Result<PathBuf> {
    let built = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("release").join("wakeful");
    let path = std::env::var_os("WAKEFUL_BENCH_BINARY").map_or(built, PathBuf::from);
    anyhow::ensure!(path.is_file(), "{} is missing: run this by `make bench`", path.display());
    Ok(path)
}

/// A line of `/proc/PID/stat`, in the kernel's ticks.
struct Ticks {
    parent: i32,
    own: u64,
    /// Of children that it has waited for.
    ended: u64,
}

impl Ticks {
    fn of(pid: i32) -> Option<Ticks> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name of the program may hold spaces, and ends at the last parenthesis.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let sum = |range: std::ops::Range<usize>| -> Option<u64> {
            Some(fields.get(range)?.iter().filter_map(|field| field.parse::<u64>().ok()).sum())
        };
        Some(Ticks { parent: fields.get(1)?.parse().ok()?, own: sum(11..13)?, ended: sum(13..15)? })
    }
}

/// CPU seconds, user and system, of a process, of its living children, and of the children that it has waited for.
pub fn cpu_seconds(pid: i32) -> f64 {
    let of_children = || -> u64 {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let children = entries.filter_map(|entry| {
            let child = Ticks::of(entry.file_name().to_str()?.parse().ok()?)?;
            (child.parent == pid).then_some(child.own + child.ended)
        });
        children.sum()
    };
    // The time of a child that ends moves to its parent. Read again if that happened in between.
    let ticks = loop {
        let Some(before) = Ticks::of(pid) else { break 0 };
        let children = of_children();
        if Ticks::of(pid).is_none_or(|after| after.ended == before.ended) {
            break before.own + before.ended + children;
        }
    };
    // SAFETY: sysconf takes no pointers.
    ticks as f64 / unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64
}

/// Lets this process, and those that it starts, open as many descriptors as the system allows. Returns how many.
pub fn raise_descriptors() -> Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls get a pointer to a whole `rlimit` that lives longer than the call.
    let raised = unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        // Only root may raise the second limit.
        let wished = libc::rlimit { rlim_cur: 65_536, rlim_max: limit.rlim_max.max(65_536) };
        if libc::setrlimit(libc::RLIMIT_NOFILE, &wished) != 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit)
    };
    anyhow::ensure!(raised == 0, "the limit of descriptors cannot be read");
    Ok(limit.rlim_cur)
}

/// Resident memory in MB.
pub fn resident_mb(pid: i32) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("VmRSS")?;
    Ok(line.split_whitespace().next().context("a number")?.parse::<f64>()? / 1024.0)
}

/// The scripted model answers at once. The user's text chooses the turn.
fn scenario() -> String {
    let text = text();
    let step = format!(
        "[[turn.reply]]\ntext = \"{text}\"\ntool_calls = [{{ name = \"read_file\", arguments = {{ path = \"{FILE}\" }} }}]\n"
    );
    let end = "[[turn.reply]]\ntext = \"That is all.\"\n";
    format!(
        "[[turn]]\nwhen = \"steps\"\n{}{end}[[turn]]\nwhen = \"answer\"\n{end}\
         [[turn]]\nwhen = \"hold\"\n[[turn.reply]]\ndelay_ms = 800000\ntext = \"Late.\"\n",
        step.repeat(STEPS)
    )
}

/// The text of every message, in words as a model streams them.
pub fn text() -> String {
    crate::fixture::text(MESSAGE_BYTES).trim_end().to_owned()
}
