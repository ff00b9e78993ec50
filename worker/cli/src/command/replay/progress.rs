//! Progress of a replay: a bar on a terminal, a line every few seconds elsewhere. Printed to stderr, because
//! stdout is data.

use crate::command::output::{count, dollars, printable, span};
use crate::replay::Observer;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use wakeful_store::replay::{Progress, Unfinished};

/// Interval between two progress lines when stderr is not a terminal.
const EVERY: Duration = Duration::from_secs(5);

/// Shows one replay.
pub(super) struct Meter {
    bar: ProgressBar,
    terminal: bool,
    said: Mutex<Instant>,
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
        Meter { bar, terminal, said: Mutex::new(Instant::now()) }
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
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.terminal && said.elapsed() >= EVERY {
            *said = Instant::now();
            eprintln!("replay: {}, {spent}", count(answers as i64, "turn"));
        }
    }
}

/// An observer that shows nothing, for the replays of a suite.
pub(super) struct Silent;

impl Observer for Silent {
    fn on_start(&self, _: &str, _: u64) {}

    fn on_progress(&self, _: u64, _: &Progress) {}
}
