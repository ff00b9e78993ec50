//! The watchdog: a thread outside the async runtime that ends a process whose code does not yield.
//!
//! A time limit is a timer of the runtime and can only drop code that yields. Code that never yields (a loop
//! without `await`, a blocking call that hangs) keeps its thread. A few such threads stop the heartbeat and
//! all other tasks. Nothing inside a process can take a thread back, so the watchdog ends the process and the
//! supervisor restarts it. The claim then counts as one that died: the queue treats its job as a suspect, and
//! at the attempt limit its run fails.
//!
//! Time here is the time during which this thread was able to run. `CLOCK_MONOTONIC` stops while the machine
//! is suspended (`CLOCK_BOOTTIME`, which leases use, does not). Each tick also counts as at most two ticks.
//! So a process that was stopped (SIGSTOP, a debugger, a frozen container) is not killed for that when it
//! continues.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

/// Longest time that a step's own code, a model or a channel may keep a thread without yielding.
pub const UNYIELDING: Duration = Duration::from_secs(60);

/// Added to every limit, for a busy machine.
const GRACE: Duration = Duration::from_secs(5);

const TICK: Duration = Duration::from_millis(250);

/// After so long without a pulse, the watchdog gives the runtime an empty task. If a task keeps the thread that has just waited for
/// timers and sockets, the others may sleep without anybody who waits for these: <https://github.com/tokio-rs/tokio/issues/4730>.
/// The empty task wakes one, and when that has nothing else to do, it waits for them.
const WAKE_AFTER: Duration = Duration::from_millis(750);

/// Longest time that the whole runtime may stand still; a longer lease extends it. After that every lease is
/// lost, and there is nothing left to save.
const STANDSTILL: Duration = Duration::from_secs(10);

/// Watches the units that this process runs. Clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Watchdog(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    units: Mutex<Vec<Arc<Unit>>>,
    /// Milliseconds that the watchdog thread has counted.
    lived_ms: AtomicU64,
    /// `lived_ms` when the runtime last ran our pulse task.
    pulse_ms: AtomicU64,
    /// A unit did not yield, so the process is about to end.
    ending: AtomicBool,
}

/// A piece of work that must yield.
#[derive(Debug)]
struct Unit {
    /// The job that it belongs to.
    job_id: i64,
    what: String,
    limit_ms: u64,
    /// `lived_ms` plus one at the start of the current poll; 0 outside of a poll.
    polled_ms: AtomicU64,
}

thread_local! {
    /// The innermost unit that this thread polls. The time counts for this one.
    static CURRENT: RefCell<Option<Arc<Unit>>> = const { RefCell::new(None) };
}

impl Watchdog {
    /// Runs `future`, which must not keep its thread for longer than `limit`, plus 5 s of grace, at a time.
    /// `what` is its name in the log. If it does, the process lets the work of other jobs than `job_id` end before it aborts.
    pub async fn watch<F: Future>(&self, job_id: i64, what: String, limit: Duration, future: F) -> F::Output {
        let limit_ms = (limit + GRACE).as_millis() as u64;
        let unit = Arc::new(Unit { job_id, what, limit_ms, polled_ms: AtomicU64::new(0) });
        let _registered = Registered::new(&self.0, &unit);
        let mut future = std::pin::pin!(future);
        poll_fn(|cx| {
            let _inside = Inside::enter(&self.0, &unit);
            future.as_mut().poll(cx)
        })
        .await
    }

    /// Starts the watchdog thread, and the pulse task that shows it that the runtime works. Both end when the
    /// last clone is dropped.
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
        let runtime = Handle::current();
        let watch = move || run(&shared, &runtime, standstill, &draining, drain);
        if let Err(error) = std::thread::Builder::new().name("watchdog".into()).spawn(watch) {
            tracing::warn!(%error, "There is no watchdog: code that never yields will not be ended");
        }
    }

    /// Returns whether a unit did not yield, so that this process must end with an error.
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

/// One poll of a unit. Its time does not count for the outer unit.
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

    /// Returns the units that keep a thread for longer than they may, and for how many milliseconds each.
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

    /// Names the units that keep a thread now.
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

    /// Returns how long the runtime has not run the pulse task.
    fn still(&self) -> Duration {
        let pulse_ms = self.pulse_ms.load(Ordering::Relaxed);
        Duration::from_millis(self.lived_ms.load(Ordering::Relaxed).saturating_sub(pulse_ms))
    }
}

fn run(
    shared: &Weak<Shared>,
    runtime: &Handle,
    standstill: Duration,
    draining: &CancellationToken,
    drain: Duration,
) {
    let mut last = Instant::now();
    let mut tick = move |shared: &Shared| {
        let lived = last.elapsed().min(TICK * 2);
        last = Instant::now();
        shared.lived_ms.fetch_add(lived.as_millis() as u64, Ordering::Relaxed);
        if shared.still() >= WAKE_AFTER {
            runtime.spawn(async {});
        }
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
                "{} has kept its thread for {} s without yielding. This process first ends its other work and then \
                 aborts, so that its supervisor restarts it; the claim counts as an attempt",
                unit.what,
                kept_ms / 1000
            ));
        }
        if overdue.is_empty() {
            say(&format!(
                "Nothing has run in this process for {} s: every thread of its runtime is kept by code that does not \
                 yield. It aborts, so that its supervisor restarts it. Running: {}",
                shared.still().as_secs(),
                shared.busy()
            ));
            std::process::abort();
        }
        draining.cancel();
        let began_ms = shared.now();
        // By its job: the jobs of one claim share a lease.
        let culprit = |job_id: i64| overdue.iter().any(|(unit, _)| unit.job_id == job_id);
        // Stop waiting if the runtime stands still: no task can finish then.
        while shared.still() < GRACE
            && shared.now() - began_ms < drain.as_millis() as u64
            && shared.units().iter().any(|unit| !culprit(unit.job_id))
        {
            std::thread::sleep(TICK);
            tick(&shared);
        }
        say(&format!("Aborting. On the threads: {}", shared.busy()));
        std::process::abort();
    }
}

/// Writes a log line directly to stderr, without the runtime or any lock that the stuck code may hold.
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

    #[test]
    fn a_task_that_keeps_the_thread_which_waited_for_timers_does_not_stop_the_timers() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let dog = Watchdog::default();
        let (is_over, ended) = (Arc::new(AtomicBool::new(false)), std::sync::mpsc::channel());
        runtime.block_on(async {
            dog.start(Duration::from_secs(60), CancellationToken::new(), Duration::ZERO);
        });
        let over = Arc::clone(&is_over);
        // A timer wakes it, so its thread is the one that has just waited for timers. The other one sleeps.
        runtime.spawn(async move {
            tokio::time::sleep(Duration::from_millis(50)).await;
            while !over.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let sender = ended.0;
        runtime.spawn(async move {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let _ = sender.send(());
        });
        let fired = ended.1.recv_timeout(Duration::from_secs(30));
        is_over.store(true, Ordering::Relaxed);
        assert!(fired.is_ok(), "the second timer did not fire while the first task kept its thread");
    }
}
