//! The watchdog: a thread beside the runtime that ends a process whose code does not yield.
//!
//! A time limit is a timer of the runtime, and it drops what has yielded. Code that never yields (a loop without
//! `await`, a blocking call that hangs) keeps its thread, and a few of them keep the heartbeat and every neighbour from
//! running. Nothing inside the process can take a thread back; so the process ends, its supervisor starts it anew, and
//! the claim counts as one that died: next time it is a suspect, and at the limit its run fails.
//!
//! Time here is the time that this thread was seen to run. `CLOCK_MONOTONIC` stands still while the machine is
//! suspended, as `CLOCK_BOOTTIME`, by which leases are held, does not; and each tick counts for no more than two, so
//! that a process that was stopped (SIGSTOP, a debugger, a frozen container) is not ended for it when it goes on.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// What a step's own code, a model's or a channel's may keep a thread for without yielding.
pub const UNYIELDING: Duration = Duration::from_secs(60);

/// Beyond every limit, for a busy machine.
const GRACE: Duration = Duration::from_secs(5);

const TICK: Duration = Duration::from_millis(250);

/// How long the whole runtime may stand still, beside a lease: then every lease is lost and there is nothing to save.
const STANDSTILL: Duration = Duration::from_secs(10);

/// Watches what this process does. Cloning shares it.
#[derive(Clone, Debug, Default)]
pub struct Watchdog(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    units: Mutex<Vec<Arc<Unit>>>,
    /// Milliseconds that the thread has seen.
    lived_ms: AtomicU64,
    /// `lived_ms` when the runtime last ran a task of ours.
    pulse_ms: AtomicU64,
    /// Something did not yield: the process is on its way out.
    ending: AtomicBool,
}

/// Something that runs, and must yield.
#[derive(Debug)]
struct Unit {
    /// The lease under which it runs.
    lease: i64,
    what: String,
    limit_ms: u64,
    /// `lived_ms` at the beginning of the poll that it is in, and one more; 0 outside of any.
    polled_ms: AtomicU64,
}

thread_local! {
    /// The innermost unit that this thread is in: the one that answers for the time.
    static CURRENT: RefCell<Option<Arc<Unit>>> = const { RefCell::new(None) };
}

impl Watchdog {
    /// Runs `future`, which must not keep its thread for longer than `limit` (and some seconds of grace) at a time. `what`
    /// is how the log names it.
    pub async fn watch<F: Future>(&self, lease: i64, what: String, limit: Duration, future: F) -> F::Output {
        let limit_ms = (limit + GRACE).as_millis() as u64;
        let unit = Arc::new(Unit { lease, what, limit_ms, polled_ms: AtomicU64::new(0) });
        let _registered = Registered::new(&self.0, &unit);
        let mut future = std::pin::pin!(future);
        poll_fn(|cx| {
            let _inside = Inside::enter(&self.0, &unit);
            future.as_mut().poll(cx)
        })
        .await
    }

    /// Starts the thread, and the task by which it sees that the runtime runs. Both end with the last clone.
    pub fn start(&self, lease: Duration, draining: CancellationToken, drain: Duration) {
        let pulse = Arc::downgrade(&self.0);
        tokio::spawn(async move {
            while let Some(shared) = pulse.upgrade() {
                shared.pulse_ms.store(shared.lived_ms.load(Ordering::Relaxed), Ordering::Relaxed);
                drop(shared);
                tokio::time::sleep(TICK).await;
            }
        });
        let shared = Arc::downgrade(&self.0);
        let standstill = lease.max(STANDSTILL) + GRACE;
        let watch = move || run(&shared, standstill, &draining, drain);
        if let Err(error) = std::thread::Builder::new().name("watchdog".into()).spawn(watch) {
            tracing::warn!(%error, "There is no watchdog: code that never yields will not be ended");
        }
    }

    /// Whether something did not yield, so that this process is to end with an error whatever else it does.
    pub fn is_ending(&self) -> bool {
        self.0.ending.load(Ordering::Relaxed)
    }
}

struct Registered<'a> {
    shared: &'a Shared,
    unit: &'a Arc<Unit>,
}

impl<'a> Registered<'a> {
    fn new(shared: &'a Shared, unit: &'a Arc<Unit>) -> Registered<'a> {
        shared.units().push(Arc::clone(unit));
        Registered { shared, unit }
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.shared.units().retain(|unit| !Arc::ptr_eq(unit, self.unit));
    }
}

/// One poll of a unit. The unit around it does not answer for this time.
struct Inside<'a> {
    shared: &'a Shared,
    unit: &'a Arc<Unit>,
    outer: Option<Arc<Unit>>,
}

impl<'a> Inside<'a> {
    fn enter(shared: &'a Shared, unit: &'a Arc<Unit>) -> Inside<'a> {
        let outer = CURRENT.replace(Some(Arc::clone(unit)));
        if let Some(outer) = &outer {
            outer.polled_ms.store(0, Ordering::Relaxed);
        }
        unit.polled_ms.store(shared.now(), Ordering::Relaxed);
        Inside { shared, unit, outer }
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.unit.polled_ms.store(0, Ordering::Relaxed);
        if let Some(outer) = &self.outer {
            outer.polled_ms.store(self.shared.now(), Ordering::Relaxed);
        }
        CURRENT.set(self.outer.take());
    }
}

impl Shared {
    fn units(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Unit>>> {
        self.units.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> u64 {
        self.lived_ms.load(Ordering::Relaxed) + 1
    }

    /// What has kept a thread for longer than it may, and for how many milliseconds.
    fn overdue(&self) -> Vec<(Arc<Unit>, u64)> {
        let now = self.now();
        let kept = |unit: &Arc<Unit>| match unit.polled_ms.load(Ordering::Relaxed) {
            0 => 0,
            since => now.saturating_sub(since),
        };
        let units = self.units();
        let units = units.iter().map(|unit| (Arc::clone(unit), kept(unit)));
        units.filter(|(unit, kept_ms)| *kept_ms > unit.limit_ms).collect()
    }

    /// What has a thread now.
    fn busy(&self) -> String {
        let units = self.units();
        let busy = units.iter().filter(|unit| unit.polled_ms.load(Ordering::Relaxed) > 0);
        let busy: Vec<&str> = busy.map(|unit| unit.what.as_str()).collect();
        if busy.is_empty() {
            "nothing that is watched; did a tool spawn it?".to_owned()
        } else {
            busy.join(", ")
        }
    }

    /// How long the runtime has run nothing of ours.
    fn still(&self) -> Duration {
        let pulse_ms = self.pulse_ms.load(Ordering::Relaxed);
        Duration::from_millis(self.lived_ms.load(Ordering::Relaxed).saturating_sub(pulse_ms))
    }
}

fn run(shared: &Weak<Shared>, standstill: Duration, draining: &CancellationToken, drain: Duration) {
    let mut last = Instant::now();
    let mut tick = move |shared: &Shared| {
        let lived = last.elapsed().min(TICK * 2);
        last = Instant::now();
        shared.lived_ms.fetch_add(lived.as_millis() as u64, Ordering::Relaxed);
    };
    loop {
        std::thread::sleep(TICK);
        let Some(shared) = shared.upgrade() else { return };
        tick(&shared);
        let overdue = shared.overdue();
        if overdue.is_empty() && shared.still() < standstill {
            continue;
        }
        shared.ending.store(true, Ordering::Relaxed);
        for (unit, kept_ms) in &overdue {
            say(&format!(
                "{} has kept its thread for {} s without yielding. This process ends what else it has in hand and then \
                 aborts, to be started anew; the claim counts as an attempt",
                unit.what,
                kept_ms / 1000
            ));
        }
        if overdue.is_empty() {
            say(&format!(
                "Nothing has run in this process for {} s: every thread of its runtime is kept by code that does not \
                 yield. It aborts, to be started anew. In hand: {}",
                shared.still().as_secs(),
                shared.busy()
            ));
            std::process::abort();
        }
        draining.cancel();
        let began_ms = shared.now();
        let culprit = |lease: i64| overdue.iter().any(|(unit, _)| unit.lease == lease);
        // A runtime that stands still ends nobody's work.
        while shared.still() < GRACE
            && shared.now() - began_ms < drain.as_millis() as u64
            && shared.units().iter().any(|unit| !culprit(unit.lease))
        {
            std::thread::sleep(TICK);
            tick(&shared);
        }
        say(&format!("Aborting. On the threads: {}", shared.busy()));
        std::process::abort();
    }
}

/// A line of the log, past the runtime and past every lock that the code in question may hold.
fn say(message: &str) {
    let line = serde_json::json!({
        "timestamp": chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Micros, true),
        "level": "ERROR",
        "target": module_path!(),
        "message": message,
    });
    let line = format!("{line}\n");
    // SAFETY: the pointer and the length are those of a live string, and write only reads.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_innermost_unit_answers_for_the_time_and_only_while_it_is_polled() {
        let dog = Watchdog::default();
        let live = |ms| dog.0.lived_ms.fetch_add(ms, Ordering::Relaxed);
        let names =
            || -> Vec<String> { dog.0.overdue().into_iter().map(|(unit, _)| unit.what.clone()).collect() };
        let long = GRACE.as_millis() as u64 + 1500;
        let limit = Duration::from_secs(1);
        let inner = async {
            live(long);
            assert_eq!(names(), ["inner"]);
            tokio::task::yield_now().await;
            assert!(names().is_empty(), "it has yielded");
        };
        let outer = async {
            dog.watch(1, "inner".to_owned(), limit, inner).await;
            assert!(names().is_empty(), "the inner one's time is not the outer one's");
            live(long);
            assert_eq!(names(), ["outer"]);
        };
        dog.watch(1, "outer".to_owned(), limit, outer).await;
        assert!(dog.0.units().is_empty());
    }
}
