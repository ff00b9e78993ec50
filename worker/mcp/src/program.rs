//! The program of a server that is reached by its standard input and output.

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tracing::{debug, info};

/// What a program of ours always gets.
const ALWAYS: [&str; 8] = ["PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSL_CERT_FILE"];

/// How long a program that ended may take to close its standard error.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How long a program may take to end when its standard input does, and then after SIGTERM.
const BY_ITSELF: Duration = Duration::from_secs(2);
const AFTER_SIGTERM: Duration = Duration::from_secs(1);

/// The longest line of a program's errors that is kept.
const MAX_LINE: usize = 500;

/// A program that this process started. Dropping it kills it and what it has started.
#[derive(Debug)]
pub(crate) struct Program {
    child: Child,
    /// The last line of its standard error. Its sender goes when the program has closed it.
    last_words: watch::Receiver<String>,
}

impl Drop for Program {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

impl Program {
    /// Waits for the end of a program whose standard input has ended. One that goes on gets SIGTERM, and is killed if that does not
    /// help. What it started and left is killed too.
    pub async fn end(self, name: &str) {
        let how = if self.ends_within(BY_ITSELF).await {
            "by itself"
        } else {
            self.signal(Signal::TERM);
            if self.ends_within(AFTER_SIGTERM).await { "after SIGTERM" } else { "killed" }
        };
        info!(server = name, how, "The program of the MCP server {name} has ended: {how}");
    }

    /// Whether it ends in time. It is left a zombie: so its number is no other program's when its group is killed.
    async fn ends_within(&self, limit: Duration) -> bool {
        let Some(pid) = self.pid() else { return true };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        // Asked for before the first look, so that no end is missed between.
        let Ok(mut children) = signal(SignalKind::child()) else { return false };
        let ended = async {
            while matches!(waitid(WaitId::Pid(pid), options), Ok(None)) {
                children.recv().await;
            }
        };
        tokio::time::timeout(limit, ended).await.is_ok()
    }

    fn pid(&self) -> Option<Pid> {
        self.child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?))
    }

    /// Signals the program and what it has started. They may have ended by themselves.
    fn signal(&self, signal: Signal) {
        if let Some(group) = self.pid() {
            let _ = kill_process_group(group, signal);
        }
    }

    /// An error of a program that ended, with what it said last.
    pub async fn with_last_words(&self, text: String) -> String {
        let mut words = self.last_words.clone();
        // What it wrote may not have been read yet.
        let _ = tokio::time::timeout(LAST_WORDS, words.wait_for(|_| false)).await;
        let words = words.borrow();
        if words.is_empty() { text } else { format!("{text}; its last words: {}", *words) }
    }
}

/// Starts a program, with only the variables that it is to have: this process's others hold secrets.
pub(crate) fn start(
    name: &str,
    command: &[String],
    env: &[String],
) -> Result<(Program, ChildStdin, ChildStdout), String> {
    let given = ALWAYS.iter().copied().chain(env.iter().map(String::as_str));
    let given = given.filter_map(|name| Some((name.to_owned(), std::env::var_os(name)?)));
    let mut child = Command::new(&command[0])
        .args(&command[1..])
        .env_clear()
        .envs(given)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // Ctrl-C in a terminal is for this process, which drains.
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("the program {:?} cannot be started: {error}", command[0]))?;
    let (Some(input), Some(output), Some(errors)) =
        (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        return Err("the program has no standard input or output".to_owned());
    };
    let (say, last_words) = watch::channel(String::new());
    let name = name.to_owned();
    tokio::spawn(async move {
        let mut errors = BufReader::new(errors);
        let mut line = Vec::new();
        let keep = |line: &mut Vec<u8>| {
            let text = String::from_utf8_lossy(line).trim_end().to_owned();
            debug!(server = name, line = text, "An MCP server's standard error");
            if !text.is_empty() {
                say.send_replace(text);
            }
            line.clear();
        };
        // A program may write without end and without a line end, so only the beginning of a line is kept.
        while let Ok(bytes) = errors.fill_buf().await
            && !bytes.is_empty()
        {
            let end = bytes.iter().position(|byte| *byte == b'\n');
            let part = &bytes[..end.unwrap_or(bytes.len())];
            line.extend_from_slice(&part[..part.len().min(MAX_LINE - line.len())]);
            let read = end.map_or(bytes.len(), |end| end + 1);
            errors.consume(read);
            if end.is_some() {
                keep(&mut line);
            }
        }
        keep(&mut line);
    });
    Ok((Program { child, last_words }, input, output))
}
