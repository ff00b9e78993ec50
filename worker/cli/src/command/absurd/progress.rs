//! Progress in tasks, with rate and time left: a bar on a terminal, else a line every five seconds. Printed to stderr.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const EVERY: Duration = Duration::from_secs(5);

pub(super) struct Progress {
    what: &'static str,
    total: u64,
    began: Instant,
    bar: Option<ProgressBar>,
    shown: Mutex<(u64, Instant)>,
}

impl Progress {
    pub fn new(what: &'static str, total: u64) -> Progress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {per_sec} {eta} left");
            // If the template were wrong, the default style would show the same facts.
            let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(total).with_style(style).with_message(what)
        });
        Progress { what, total, began: Instant::now(), bar, shown: Mutex::new((0, Instant::now())) }
    }

    /// One more task is done.
    pub fn step(&self) {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        shown.0 += 1;
        if let Some(bar) = &self.bar {
            bar.inc(1);
        } else if shown.1.elapsed() >= EVERY {
            shown.1 = Instant::now();
            let rate = shown.0 as f64 / self.began.elapsed().as_secs_f64();
            let left = self.total.saturating_sub(shown.0) as f64 / rate;
            eprintln!("{}: {} of {} tasks, {rate:.1}/s, {left:.0} s left", self.what, shown.0, self.total);
        }
    }

    /// Removes the bar. Returns how long it took.
    pub fn end(&self) -> Duration {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.began.elapsed()
    }
}
