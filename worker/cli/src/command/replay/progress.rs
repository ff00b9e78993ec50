//! Progress of a replay: a bar on a terminal, elsewhere a line when something changed. Printed to stderr, because
//! stdout is data.

use crate::command::output::{count, dollars, printable, span};
use crate::replay::Observer;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use wakeful_store::replay::{Progress, Unfinished};

/// Shortest time between two progress lines when stderr is not a terminal.
const EVERY: Duration = Duration::from_secs(5);

/// Shows one replay.
pub(super) struct Meter {
    bar: ProgressBar,
    terminal: bool,
    said: Mutex<Said>,
}

/// What was printed last.
struct Said {
    at: Instant,
    line: String,
    /// Why the replay stands still.
    why: String,
}

impl Said {
    fn nothing(at: Instant) -> Said {
        Said { at, line: String::new(), why: String::new() }
    }

    /// Whether to print this line: it is another one, and the last one is a while ago.
    fn is_due(&mut self, line: &str, now: Instant) -> bool {
        let is_due = self.line != line && now.duration_since(self.at) >= EVERY;
        if is_due {
            self.at = now;
            line.clone_into(&mut self.line);
        }
        is_due
    }

    /// Whether to print this reason: it is another one.
    fn is_another(&mut self, why: &str) -> bool {
        let is_another = self.why != why;
        why.clone_into(&mut self.why);
        is_another
    }
}

impl Meter {
    pub(super) fn start() -> Meter {
        let terminal = std::io::stderr().is_terminal();
        let target = if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(None, target);
        if let Ok(style) =
            ProgressStyle::with_template("{spinner} {bar:30} {pos}/{len} turns  {msg}  {elapsed}")
        {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(120));
        Meter { bar, terminal, said: Mutex::new(Said::nothing(Instant::now())) }
    }

    fn said(&self) -> MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn end(&self) {
        self.bar.finish_and_clear();
    }
}

impl Observer for Meter {
    fn on_resume(&self, found: &Unfinished) {
        let (id, age) = (printable(&found.session_id), span(found.age_s as f64));
        self.bar.suspend(|| {
            eprintln!("going on with {id}, begun {age} ago by the same command (--fresh begins anew)");
        });
    }

    fn on_wait(&self, session_id: &str, seconds: i64) {
        let id = printable(session_id);
        self.bar.suspend(|| {
            eprintln!("{id} is held by another process: if that one is gone, this goes on in {seconds} s");
        });
    }

    fn on_model(&self, model: &str, host: Option<&str>) {
        let at = host.map(|host| format!(" at {host}")).unwrap_or_default();
        let line = format!("replay: calls {model}{at}");
        self.bar.suspend(|| eprintln!("{}", printable(&line)));
    }

    fn on_start(&self, session_id: &str, answers: u64) {
        self.bar.set_length(answers);
        if !self.terminal {
            eprintln!("replay {session_id}: {} to run", count(answers as i64, "turn"));
        }
    }

    fn on_progress(&self, answers: u64, progress: &Progress) {
        let spent = format!("{} tokens, {}", progress.tokens, dollars(progress.cost_micros));
        self.bar.set_position(answers);
        self.bar.set_message(spent.clone());
        let line = format!("replay: {}, {spent}", count(answers as i64, "turn"));
        if !self.terminal && self.said().is_due(&line, Instant::now()) {
            eprintln!("{line}");
        }
    }

    fn on_blocked(&self, why: &str) {
        if self.said().is_another(why) {
            self.bar.suspend(|| eprintln!("replay: {}", printable(why)));
        }
    }
}

/// An observer that shows nothing, for the replays of a suite.
pub(super) struct Silent;

impl Observer for Silent {
    fn on_start(&self, _: &str, _: u64) {}

    fn on_progress(&self, _: u64, _: &Progress) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_printed_when_it_is_another_one_and_a_while_has_passed() {
        let start = Instant::now();
        let mut said = Said::nothing(start);
        assert!(!said.is_due("1 turn", start));
        assert!(said.is_due("1 turn", start + EVERY));
        assert!(!said.is_due("1 turn", start + 3 * EVERY), "nothing changed");
        assert!(said.is_due("2 turns", start + 3 * EVERY));
        assert!(!said.is_due("3 turns", start + 3 * EVERY), "too soon");
        assert!(said.is_another("waits for openai/other: no route"));
        assert!(!said.is_another("waits for openai/other: no route"));
    }
}
