//! Timers of a worker: tasks that look after something again and again, and that must not end silently.

use futures::FutureExt;
use std::panic::AssertUnwindSafe;
use std::time::Duration;
use tokio::task::JoinHandle;
use tracing::error;

/// The pause after a panic.
const AGAIN: Duration = Duration::from_secs(1);

/// Runs a timer until it returns. If it panics, that is logged, and it begins again.
pub(super) fn start<T>(name: &'static str, mut timer: impl FnMut() -> T + Send + 'static) -> JoinHandle<()>
where
    T: Future<Output = ()> + Send + 'static,
{
    tokio::spawn(async move {
        while let Err(panic) = AssertUnwindSafe(async { timer().await }).catch_unwind().await {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or(panic.downcast_ref::<&str>().copied()).unwrap_or_default();
            error!(timer = name, panic = said, "A timer panicked; starting it again");
            tokio::time::sleep(AGAIN).await;
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[tokio::test(start_paused = true)]
    async fn a_timer_that_panics_begins_again_and_one_that_returns_ends() {
        let began = Arc::new(AtomicUsize::new(0));
        let counts = Arc::clone(&began);
        let timer = start("test", move || {
            let counts = Arc::clone(&counts);
            async move {
                let before = counts.fetch_add(1, Ordering::AcqRel);
                assert!(before >= 2, "panic {before}");
            }
        });
        timer.await.expect("it has ended by itself");
        assert_eq!(began.load(Ordering::Acquire), 3);
    }
}
