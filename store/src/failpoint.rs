//! Failpoints: places where a test kills the process. A build without the feature `failpoints` contains none of them.

/// Kills this process as `kill -9` does, when a test sets the failpoint of this name to `return` (crate `fail`, variable
/// `FAILPOINTS`, for example `FAILPOINTS='K21=1*return'`). Its other actions (`pause`, `sleep`) work too. The table in
/// `tests/README.md` explains each name.
#[cfg(feature = "failpoints")]
#[doc(hidden)]
#[macro_export]
macro_rules! failpoint {
    ($name:literal) => {
        $crate::failpoint::hit($name)
    };
}

/// Expands to nothing, because this build has no failpoints. The name is not compiled in either.
#[cfg(not(feature = "failpoints"))]
#[doc(hidden)]
#[macro_export]
macro_rules! failpoint {
    ($name:literal) => {};
}

#[cfg(feature = "failpoints")]
#[doc(hidden)]
pub fn hit(name: &str) {
    fail::fail_point!(name, |word| match word.as_deref() {
        Some("stop") => stop(name),
        _ => die(name),
    });
}

/// Stops this process until it gets SIGCONT.
#[cfg(feature = "failpoints")]
fn stop(name: &str) {
    eprintln!("failpoint {name}: stopping this process");
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP);
    // Another thread may take the signal, and this one would run on until the stop reaches it. The signal is pending until a thread
    // takes it, and that stops all threads: this one at the end of the call that reads so.
    while is_pending(rustix::process::Signal::STOP) {}
}

/// Returns whether a signal to this process was sent, and no thread has taken it.
#[cfg(feature = "failpoints")]
fn is_pending(signal: rustix::process::Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
    let bits = pending.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or_default();
    bits & 1 << (signal.as_raw() - 1) != 0
}

#[cfg(feature = "failpoints")]
fn die(name: &str) {
    eprintln!("failpoint {name}: killing this process");
    let this = rustix::process::getpid();
    // SIGKILL cannot be caught, so this process runs nothing more.
    let _ = rustix::process::kill_process(this, rustix::process::Signal::KILL);
    loop {
        std::thread::park();
    }
}
