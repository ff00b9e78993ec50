//! The program itself, `wakeful` with any arguments: for commands that start their own Postgres.

use super::captured::Captured;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

/// A running program. Dropping it kills it.
pub struct Program {
    child: Child,
    output: Captured,
    errors: Captured,
    ended: Option<ExitStatus>,
}

impl Program {
    /// Where `wakeful` is.
    pub fn wakeful() -> PathBuf {
        // Cargo tells a test only the programs of its own package. `make test` builds this one beside them.
        let wakeful = Path::new(env!("CARGO_BIN_EXE_fixture_worker")).with_file_name("wakeful");
        assert!(wakeful.exists(), "not built: {}; run `make test`", wakeful.display());
        wakeful
    }

    /// `wakeful`, in an environment that names no database, no model and no configuration.
    pub fn command(dir: &Path) -> Command {
        let mut command = Command::new(Program::wakeful());
        for (name, _) in std::env::vars() {
            let ours = ["WAKEFUL_", "ANTHROPIC_", "OPENAI_", "OTEL_", "FAILPOINTS", "DATABASE_URL"];
            // Keep this variable: it selects a defect that the process must have.
            if name != "WAKEFUL_MUTANT" && ours.iter().any(|prefix| name.starts_with(prefix)) {
                command.env_remove(name);
            }
        }
        command.current_dir(dir);
        command
    }

    pub fn start(mut command: Command) -> Program {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program was built");
        let output = Captured::of(child.stdout.take().expect("piped"));
        let errors = Captured::of(child.stderr.take().expect("piped"));
        Program { child, output, errors, ended: None }
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Everything written to stdout so far.
    pub fn output(&self) -> String {
        self.output.text()
    }

    /// Everything written to stderr so far.
    pub fn errors(&self) -> String {
        self.errors.text()
    }

    /// Waits until a line of stdout contains `text`, and returns that line.
    pub async fn line(&self, text: &str) -> String {
        self.line_of(&self.output, text).await
    }

    /// Like [`Program::line`], but on stderr.
    pub async fn error_line(&self, text: &str) -> String {
        self.line_of(&self.errors, text).await
    }

    async fn line_of(&self, stream: &Captured, text: &str) -> String {
        let line = stream.line(text).await;
        line.unwrap_or_else(|| panic!("no line with {text:?}:\n{}\n{}", self.output(), self.errors()))
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: kill takes no pointers; the pid is of a child that has not been waited for.
        let sent = unsafe { libc::kill(self.pid(), signal) };
        assert_eq!(sent, 0, "the process takes signals");
    }

    /// Waits for the program's end, and returns its exit status. For a signal: 128 plus the signal's number.
    pub async fn end(&mut self) -> i32 {
        use std::os::unix::process::ExitStatusExt;
        let ended = tokio::time::timeout(super::timeout(), super::End::of(&mut self.child).reached()).await;
        assert!(ended.is_ok(), "it does not end:\n{}\n{}", self.output(), self.errors());
        let status = self.child.wait().expect("it can be waited for");
        self.ended = Some(status);
        self.output.join();
        self.errors.join();
        status.code().or_else(|| status.signal().map(|signal| 128 + signal)).expect("it ended")
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if self.ended.is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            eprintln!("--- its output ---\n{}\n--- its errors ---\n{}", self.output(), self.errors());
        }
    }
}
