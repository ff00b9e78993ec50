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
