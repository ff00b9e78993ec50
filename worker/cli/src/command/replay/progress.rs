//! Progress of a replay.

use crate::command::meter::{Meter, style};
use crate::command::output::{count, dollars, printable, span};
use crate::replay::Observer;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use wakeful_store::replay::{Progress, Unfinished};

/// Shows one replay.
pub(super) struct Shown {
    meter: Meter,
    /// Why the replay stands still, as it was printed last.
    why: Mutex<String>,
}

impl Shown {
    pub(super) fn start() -> Shown {
        let meter = Meter::new(None, style("{spinner} {bar:30} {pos}/{len} turns  {msg}  {elapsed}"));
        if let Some(bar) = meter.bar() {
            bar.enable_steady_tick(Duration::from_millis(120));
        }
        Shown { meter, why: Mutex::default() }
    }

    pub(super) fn end(&self) {
        self.meter.end();
    }
}

impl Observer for Shown {
    fn on_resume(&self, found: &Unfinished) {
        let (id, age) = (printable(&found.session_id), span(found.age_s as f64));
        self.meter
            .say(&format!("going on with {id}, begun {age} ago by the same command (--fresh begins anew)"));
    }

    fn on_wait(&self, session_id: &str, seconds: i64) {
        let id = printable(session_id);
        self.meter.say(&format!(
            "{id} is held by another process: if that one is gone, this goes on in {seconds} s"
        ));
    }

    fn on_model(&self, model: &str, host: Option<&str>) {
        let at = host.map(|host| format!(" at {host}")).unwrap_or_default();
        self.meter.say(&printable(&format!("replay: calls {model}{at}")));
    }

    fn on_start(&self, session_id: &str, answers: u64) {
        match self.meter.bar() {
            Some(bar) => bar.set_length(answers),
            None => eprintln!("replay {session_id}: {} to run", count(answers as i64, "turn")),
        }
    }

    fn on_progress(&self, answers: u64, progress: &Progress) {
        let spent = format!("{} tokens, {}", progress.tokens, dollars(progress.cost_micros));
        if let Some(bar) = self.meter.bar() {
            bar.set_message(spent.clone());
        }
        self.meter.at(answers, || format!("replay: {}, {spent}", count(answers as i64, "turn")));
    }

    fn on_blocked(&self, why: &str) {
        let mut said = self.why.lock().unwrap_or_else(PoisonError::into_inner);
        if *said != why {
            why.clone_into(&mut said);
            self.meter.say(&format!("replay: {}", printable(why)));
        }
    }
}

/// An observer that shows nothing, for the replays of a suite.
pub(super) struct Silent;

impl Observer for Silent {
    fn on_start(&self, _: &str, _: u64) {}

    fn on_progress(&self, _: u64, _: &Progress) {}
}
