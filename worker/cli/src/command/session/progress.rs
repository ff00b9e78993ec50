//! Progress of an export or an import in bytes: a bar on a terminal, else a line every five seconds. Printed to stderr.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Interval between two lines when stderr is not a terminal.
const EVERY: Duration = Duration::from_secs(5);

#[derive(Clone)]
pub(super) struct Progress(Arc<Shown>);

enum Shown {
    Bar(ProgressBar),
    Lines { what: &'static str, told: Mutex<Instant> },
}

impl Progress {
    /// Starts a progress display in bytes, with the total if it is known.
    pub fn of_bytes(what: &'static str, total: Option<u64>) -> Progress {
        if !std::io::stderr().is_terminal() {
            return Progress(Arc::new(Shown::Lines { what, told: Mutex::new(Instant::now()) }));
        }
        let (bar, style) = match total {
            Some(total) => {
                (ProgressBar::new(total), "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}")
            }
            None => (ProgressBar::new_spinner(), "{msg} {spinner} {bytes} {bytes_per_sec}"),
        };
        // If a template were wrong, the default style would show the same facts.
        let style = ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar());
        Progress(Arc::new(Shown::Bar(bar.with_style(style).with_message(what))))
    }

    /// Reports the number of bytes done so far.
    pub fn at(&self, bytes: u64) {
        match &*self.0 {
            Shown::Bar(bar) => bar.set_position(bytes),
            Shown::Lines { what, told } => {
                let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
                if told.elapsed() >= EVERY {
                    *told = Instant::now();
                    eprintln!("{what}: {bytes} bytes");
                }
            }
        }
    }

    /// Removes the bar.
    pub fn end(&self) {
        match &*self.0 {
            Shown::Bar(bar) => bar.finish_and_clear(),
            Shown::Lines { .. } => {}
        }
    }
}
