//! Places where a test kills the process, and defects that a test puts in. Compiled to nothing without the feature
//! `failpoints`, which no release has.

/// Ends this process as `kill -9` does, when the failpoint `name` is set to `return` (crate `fail`, variable
/// `FAILPOINTS`, for example `FAILPOINTS='K21=1*return'`). Its other actions (`pause`, `sleep`) work too. What each name
/// stands for is the table in `tests/README.md`.
#[inline]
pub fn failpoint(name: &str) {
    #[cfg(feature = "failpoints")]
    fail::fail_point!(name, |_| die(name));
    #[cfg(not(feature = "failpoints"))]
    let _ = name;
}

/// Whether this process is to have the defect `name`, one of those that `WAKEFUL_MUTANT` takes: the tests must fail
/// with each. Always `false` without the feature.
#[inline]
pub fn mutant(name: &str) -> bool {
    #[cfg(feature = "failpoints")]
    {
        static MUTANT: std::sync::LazyLock<Option<String>> =
            std::sync::LazyLock::new(|| std::env::var("WAKEFUL_MUTANT").ok());
        MUTANT.as_deref() == Some(name)
    }
    #[cfg(not(feature = "failpoints"))]
    {
        let _ = name;
        false
    }
}

#[cfg(feature = "failpoints")]
fn die(name: &str) {
    eprintln!("failpoint {name}: killing this process");
    let this = rustix::process::getpid();
    // SIGKILL cannot be caught: nothing of this process runs afterwards.
    let _ = rustix::process::kill_process(this, rustix::process::Signal::KILL);
    loop {
        std::thread::park();
    }
}
