//! Places where a test kills the process. Compiled to nothing without the feature `failpoints`.

/// Ends this process as `kill -9` does, when the failpoint `name` is set to `return` (crate `fail`, variable
/// `FAILPOINTS`, for example `FAILPOINTS='before_commit=1*return'`). Its other actions (`pause`, `sleep`) work too.
#[inline]
pub fn failpoint(name: &str) {
    #[cfg(feature = "failpoints")]
    fail::fail_point!(name, |_| die(name));
    #[cfg(not(feature = "failpoints"))]
    let _ = name;
}

#[cfg(feature = "failpoints")]
fn die(name: &str) {
    eprintln!("failpoint {name}: killing this process");
    // SAFETY: kill and getpid take no pointers. SIGKILL cannot be caught: nothing of this process runs afterwards.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    loop {
        std::thread::park();
    }
}
