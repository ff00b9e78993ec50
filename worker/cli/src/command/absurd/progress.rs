//! Progress in tasks, with rate and time left.

use crate::command::meter::{Meter, style};
use indicatif::ProgressState;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

pub(super) struct Progress {
    what: &'static str,
    total: u64,
    began: Instant,
    meter: Meter,
    done: Mutex<u64>,
}

impl Progress {
    pub fn new(what: &'static str, total: u64) -> Progress {
        let rate = |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            let _ = write!(out, "{:.0}/s", state.per_sec());
        };
        let style = style("{msg} {wide_bar} {pos}/{len} {rate} {eta} left").with_key("rate", rate);
        let meter = Meter::new(Some(total), style);
        if let Some(bar) = meter.bar() {
            bar.set_message(what);
        }
        Progress { what, total, began: Instant::now(), meter, done: Mutex::new(0) }
    }

    /// One more task is done.
    pub fn step(&self) {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        *done += 1;
        self.meter.at(*done, || {
            let rate = *done as f64 / self.began.elapsed().as_secs_f64();
            let left = self.total.saturating_sub(*done) as f64 / rate;
            format!("{}: {done} of {} tasks, {rate:.1}/s, {left:.0} s left", self.what, self.total)
        });
    }

    /// Removes the bar. Returns how long it took.
    pub fn end(&self) -> Duration {
        self.meter.end();
        self.began.elapsed()
    }
}
