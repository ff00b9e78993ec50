//! Child processes that do not outlive this one.
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// A child process with a thread that watches it until it has ended.
#[derive(Debug)]
pub struct Child {
    pid: i32,
    end: Arc<ChildExit>,
}

#[derive(Debug, Default)]
struct ChildExit {
    status: Mutex<Option<ExitStatus>>,
    came: Condvar,
}

impl ChildExit {
    fn lock(&self) -> MutexGuard<'_, Option<ExitStatus>> {
        // Nothing panics under this lock, and an exit status is whole or absent.
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Child {
    /// Starts the program. On Linux the kernel sends it `on_death` when this process dies, however it dies.
    ///
    /// The kernel ties that signal to the *thread* that forked, not to its process. A caller's thread, such
    /// as one of a runtime's pool or of a test, may end long before the process. So a thread of its own forks
    /// and waits, and lives exactly as long as the child.
    pub fn spawn(mut command: Command, on_death: i32) -> Result<Child> {
        let program = command.get_program().to_string_lossy().into_owned();
        die_with_this_thread(&mut command, on_death);
        let end = Arc::new(ChildExit::default());
        let (started, start) = mpsc::channel();
        let watched = end.clone();
        std::thread::Builder::new()
            .name("child".into())
            .spawn(move || {
                let mut child = match command.spawn() {
                    Ok(child) => child,
                    // Sending fails only if the caller is gone, and then the error does not matter.
                    Err(error) => return started.send(Err(error)).unwrap_or(()),
                };
                let pid = child.id() as i32;
                started.send(Ok(pid)).ok();
                wait_without_reaping(pid);
                // Reap the child under the lock, so that `signal` cannot hit a later process with the same
                // pid.
                let mut status = watched.lock();
                *status = Some(child.wait().unwrap_or_default());
                watched.came.notify_all();
            })
            .with_context(|| format!("No thread for {program}"))?;
        let started = start.recv().with_context(|| format!("The thread of {program} ended"))?;
        let pid = started.with_context(|| format!("{program} does not run"))?;
        Ok(Child { pid, end })
    }

    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Sends a signal, unless the process has ended.
    pub fn signal(&self, signal: i32) {
        let status = self.end.lock();
        if status.is_none() {
            // SAFETY: no memory is involved, and the pid is our child's: it is not reaped while we hold the lock.
            unsafe { libc::kill(self.pid, signal) };
        }
    }

    /// Waits up to `patience` for the end and returns the exit status, or `None` if the process still runs.
    pub fn wait(&self, patience: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + patience;
        let mut status = self.end.lock();
        while status.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            status = self.end.came.wait_timeout(status, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        *status
    }
}

/// Makes the kernel send `signal` to the program when the thread that starts it ends.
///
/// Works on Linux only. Elsewhere Postgres outlives a killed process, and the next start uses it.
#[cfg(target_os = "linux")]
pub fn die_with_this_thread(command: &mut Command, signal: i32) {
    let parent = std::process::id() as i32;
    let prepare = move || {
        // SAFETY: both calls are async-signal-safe and touch no memory. This runs after std's setuid, which would
        // clear the setting.
        unsafe {
            if libc::prctl(libc::PR_SET_PDEATHSIG, signal as libc::c_ulong) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // If the parent died before the call above, no signal comes.
            if libc::getppid() != parent {
                return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
            }
        }
        Ok(())
    };
    // SAFETY: the closure does not allocate and takes no lock, as the time between fork and exec demands.
    unsafe { command.pre_exec(prepare) };
}

#[cfg(not(target_os = "linux"))]
pub fn die_with_this_thread(_: &mut Command, _: i32) {}

fn wait_without_reaping(pid: i32) {
    loop {
        // SAFETY: a siginfo_t of zeros is valid, and the call writes only into it.
        let result = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            libc::waitid(libc::P_PID, pid as libc::id_t, &mut info, libc::WEXITED | libc::WNOWAIT)
        };
        if result == 0 || std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
            return;
        }
    }
}
