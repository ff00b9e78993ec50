//! Shows progress on stderr, because stdout is data: a bar on a terminal, elsewhere a line now and then.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Shortest time between two lines.
const EVERY: Duration = Duration::from_secs(5);

pub(super) enum Meter {
    Bar(ProgressBar),
    Lines(Mutex<Told>),
}

/// The line that was printed last, and when.
pub(super) struct Told {
    at: Instant,
    line: String,
}

/// Reads a template of indicatif. If it were wrong, the default style would show the same facts.
pub(super) fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

impl Meter {
    /// `total`: `None` if it is not known.
    pub fn new(total: Option<u64>, style: ProgressStyle) -> Meter {
        if std::io::stderr().is_terminal() {
            let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr());
            Meter::Bar(bar.with_style(style))
        } else {
            Meter::Lines(Mutex::new(Told::nothing(Instant::now())))
        }
    }

    pub fn bar(&self) -> Option<&ProgressBar> {
        match self {
            Meter::Bar(bar) => Some(bar),
            Meter::Lines(_) => None,
        }
    }

    /// Shows how much is done. `line` is printed only if no bar is drawn.
    pub fn at(&self, done: u64, line: impl FnOnce() -> String) {
        match self {
            Meter::Bar(bar) => bar.set_position(done),
            Meter::Lines(told) => {
                let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(line) = told.due(Instant::now(), line) {
                    eprintln!("{line}");
                }
            }
        }
    }

    /// Prints a line that stays, above the bar.
    pub fn say(&self, line: &str) {
        match self {
            Meter::Bar(bar) => bar.suspend(|| eprintln!("{line}")),
            Meter::Lines(_) => eprintln!("{line}"),
        }
    }

    /// Removes the bar.
    pub fn end(&self) {
        if let Meter::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

impl Told {
    fn nothing(at: Instant) -> Told {
        Told { at, line: String::new() }
    }

    /// The line to print now. `None`: the last one was printed just now, or said the same.
    fn due(&mut self, now: Instant, line: impl FnOnce() -> String) -> Option<&str> {
        if now.duration_since(self.at) < EVERY {
            return None;
        }
        let line = line();
        if line == self.line {
            return None;
        }
        *self = Told { at: now, line };
        Some(&self.line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_printed_when_it_is_another_one_and_a_while_has_passed() {
        let start = Instant::now();
        let mut told = Told::nothing(start);
        let mut printed = |line: &str, after: Duration| told.due(start + after, || line.to_owned()).is_some();
        assert!(!printed("1 turn", Duration::ZERO));
        assert!(printed("1 turn", EVERY));
        assert!(!printed("1 turn", 3 * EVERY), "nothing changed");
        assert!(printed("2 turns", 3 * EVERY));
        assert!(!printed("3 turns", 3 * EVERY), "too soon");
    }
}
