//! The waterfall of a session: what each step waited for, called and ran, from its journal.
//!
//! A wait may be hours long and a model call seconds. So stretches in which neither a model nor a tool works are drawn
//! shorter than they were; the numbers beside the bars are exact.

mod bars;
mod lost;
mod scale;

use crate::model::{Event, Step, Worker};
use crate::text::span;
use chrono::{DateTime, Utc};
use scale::Scale;

/// The drawing's width in its own units.
const WIDTH: f64 = 1000.0;
/// The narrowest bar that can be seen.
const NARROWEST: f64 = 3.0;

/// All rows, in the order in which they began.
pub(crate) struct Waterfall {
    pub rows: Vec<Row>,
    /// A stretch without work is drawn shorter than it was.
    pub shortened: bool,
    pub took: String,
    /// An attempt was lost with its worker, and another worker went on.
    pub survived: bool,
}

/// One thing that took time, or a mark of one moment.
#[derive(Debug, PartialEq)]
pub(crate) struct Row {
    /// A step's first row names it.
    pub step: String,
    pub name: String,
    pub about: String,
    /// What the bar is: `wait`, `model`, `tool`, `rest`, `lost`, `gone`, `bad`, `person` or `mark`.
    pub class: &'static str,
    pub x: String,
    pub width: String,
    /// Since the beginning.
    pub began: String,
    pub took: String,
}

/// What is known of the session besides its journal.
pub(crate) struct Known<'a> {
    pub events: &'a [Event],
    /// The latest steps: the journal does not say which worker committed them.
    pub steps: &'a [Step],
    /// The workers of the last day, as far as the visitor may see them.
    pub workers: &'a [Worker],
    pub now: DateTime<Utc>,
}

impl Known<'_> {
    fn step(&self, number: i64) -> Option<&Step> {
        self.steps.iter().find(|step| step.step_number == number)
    }
}

#[derive(Default)]
struct Bar {
    step: Option<i64>,
    name: String,
    about: String,
    class: &'static str,
    from: i64,
    to: i64,
    /// The call or the generation that it is of, until its end is known.
    of: String,
    is_open: bool,
    /// A model call of which the journal says when it began.
    is_call: bool,
    /// What was committed before it. `None`: it is not known.
    kept: Option<Kept>,
    /// A later attempt took its place, …
    goes_on: bool,
    /// … and begins with its text.
    keeps_text: bool,
    /// Its duration is unknown.
    is_unmeasured: bool,
}

/// Counts of what a crash leaves as it was.
#[derive(Clone, Copy, Default)]
struct Kept {
    steps: usize,
    results: usize,
}

impl Waterfall {
    pub fn of(known: &Known<'_>) -> Waterfall {
        let mut bars = bars::bars(known);
        let survived = lost::part(&mut bars, known);
        let Some(begin) = bars.iter().map(|bar| bar.from).min() else {
            return Waterfall { rows: Vec::new(), shortened: false, took: String::new(), survived };
        };
        let end = bars.iter().map(|bar| bar.to).max().unwrap_or(begin);
        let scale = Scale::of(&bars, begin, end);
        let mut last_step = None;
        let rows = bars.into_iter().map(|bar| {
            let (from, to) = (scale.x(bar.from), scale.x(bar.to));
            let is_new = bar.step.is_some() && bar.step != last_step;
            if bar.step.is_some() {
                last_step = bar.step;
            }
            let width = (to - from).max(NARROWEST);
            let took = match (bar.class, bar.is_unmeasured) {
                ("mark", _) => String::new(),
                (_, true) => "not known".to_owned(),
                (_, false) => span(bar.to - bar.from),
            };
            Row {
                step: bar.step.filter(|_| is_new).map_or_else(String::new, |step| format!("Step {step}")),
                name: bar.name,
                about: bar.about,
                class: bar.class,
                x: format!("{:.1}", from.min(WIDTH - width)),
                width: format!("{width:.1}"),
                began: format!("+{}", span(bar.from - begin)),
                took,
            }
        });
        Waterfall { rows: rows.collect(), shortened: scale.shortened, took: span(end - begin), survived }
    }
}

#[cfg(test)]
mod tests;
