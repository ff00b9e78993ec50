//! The waterfall of a session: what each step waited for, called and ran, from its journal.
//!
//! A wait may be hours long and a model call seconds. So stretches in which neither a model nor a tool works are drawn
//! shorter than they were; the numbers beside the bars are exact.

use crate::model::Event;
use crate::text::{cut, span};
use chrono::{DateTime, Utc};

/// The drawing's width in its own units.
const WIDTH: f64 = 1000.0;
/// The narrowest bar that can be seen.
const NARROWEST: f64 = 3.0;
/// A stretch without work is drawn at most this long, as a part of all work.
const LONGEST_REST: f64 = 0.15;

/// All rows, in the order in which they began.
pub(crate) struct Waterfall {
    pub rows: Vec<Row>,
    /// A stretch without work is drawn shorter than it was.
    pub shortened: bool,
    pub took: String,
}

/// One thing that took time, or a mark of one moment.
#[derive(Debug, PartialEq)]
pub(crate) struct Row {
    /// A step's first row names it.
    pub step: String,
    pub name: String,
    pub about: String,
    /// What the bar is: `wait`, `model`, `tool`, `rest`, `lost`, `bad`, `person` or `mark`.
    pub class: &'static str,
    pub x: String,
    pub width: String,
    /// Since the beginning.
    pub began: String,
    pub took: String,
}

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
}

impl Waterfall {
    pub fn of(events: &[Event], now: DateTime<Utc>) -> Waterfall {
        let bars = bars(events, now.timestamp_millis());
        let Some(begin) = bars.iter().map(|bar| bar.from).min() else {
            return Waterfall { rows: Vec::new(), shortened: false, took: String::new() };
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
            Row {
                step: bar.step.filter(|_| is_new).map_or_else(String::new, |step| format!("Step {step}")),
                name: bar.name,
                about: bar.about,
                class: bar.class,
                x: format!("{:.1}", from.min(WIDTH - width)),
                width: format!("{width:.1}"),
                began: format!("+{}", span(bar.from - begin)),
                took: if bar.class == "mark" { String::new() } else { span(bar.to - bar.from) },
            }
        });
        Waterfall { rows: rows.collect(), shortened: scale.shortened, took: span(end - begin) }
    }
}

fn bars(events: &[Event], now: i64) -> Vec<Bar> {
    let mut bars: Vec<Bar> = Vec::new();
    for event in events {
        let at = event.ts.0.timestamp_millis();
        let step = event.step_number;
        let bar = |name: &str, about: String, class, from, to, of: &str, is_open| Bar {
            step,
            name: name.to_owned(),
            about,
            class,
            from,
            to,
            of: of.to_owned(),
            is_open,
        };
        match event.kind.as_str() {
            "state_transition" if event.text("to_state") == "queued" => {
                let mut wait = bar("in the queue", String::new(), "wait", at, now, "queue", true);
                wait.step = None;
                bars.push(wait);
            }
            "state_transition" => {
                close(&mut bars, "queue", at, "");
            }
            "LLM_CALLED" => {
                let began = event.text("started_at").parse::<DateTime<Utc>>();
                let from = began.map_or(at, |began| began.timestamp_millis());
                // Whatever the step waited for has come.
                close(&mut bars, "rest", from, "");
                close(&mut bars, "lost", from, "");
                let attempt = event.number("attempt").unwrap_or(1);
                let name = match (event.text("purpose"), attempt) {
                    ("" | "reply", 1) => "model".to_owned(),
                    ("" | "reply", _) => format!("model, attempt {attempt}"),
                    (purpose, _) => purpose.replace('_', " "),
                };
                let model = event.text("model").to_owned();
                match event.number("prompt_tokens") {
                    Some(tokens) => {
                        let about = format!("{model}, {} tokens in", crate::text::count(tokens));
                        bars.push(bar(&name, about, "model", from, at, event.text("generation_id"), false));
                    }
                    None => lost(&mut bars, bar(&name, model, "lost", from, at, "lost", true)),
                }
            }
            "ATTEMPT_FAILED" => {
                let waits = event.number("retry_in_ms").map(|ms| at + ms);
                let name = if waits.is_some() { "back-off" } else { "waits at the provider's gate" };
                let about = cut(&format!("{}: {}", event.text("fault"), event.text("reason")), 160);
                bars.push(bar(name, about, "rest", at, waits.unwrap_or(now), "rest", waits.is_none()));
            }
            "GEN_RESUMED" => {
                let kept = match event.text("strategy") {
                    "resume" => "; the text that it had written was kept",
                    _ => "; all that was committed before was kept",
                };
                if let Some(call) = bars.iter_mut().rev().find(|bar| bar.of == "lost" && bar.is_open) {
                    call.about.push_str(kept);
                }
            }
            "GEN_FAILED" => {
                close(&mut bars, "lost", at, event.text("reason"));
            }
            "TOOL_INVOKED" => {
                let (name, call) = (event.text("name"), event.text("call_id"));
                let class = if name == "ask_user" { "person" } else { "tool" };
                bars.push(bar(name, String::new(), class, at, now, call, true));
            }
            "TOOL_RESULT" => {
                let text = cut(event.text("text"), 120);
                if let Some(at) = close(&mut bars, event.text("call_id"), at, &text)
                    && event.payload["ok"] == false
                {
                    bars[at].class = "bad";
                }
            }
            "TOOL_FAILED_UNCERTAIN" => {
                let found = bars.iter_mut().rev().find(|bar| bar.of == event.text("call_id"));
                if let Some(call) = found {
                    (call.class, call.about, call.to) = ("bad", "may have run: uncertain".to_owned(), at);
                }
            }
            "GEN_SENT" | "DELIVERY_FAILED" | "DELIVERY_BOUNCED" => {
                let about = format!("{} {}", event.text("channel"), event.text("reason"));
                let name = if event.kind == "GEN_SENT" { "delivered" } else { "delivery failed" };
                let mut mark = bar(name, cut(&about, 120), "mark", at, at, "", false);
                mark.step = None;
                bars.push(mark);
            }
            "SESSION_STEERED" => {
                let name = format!("{} by {}", event.text("verb"), event.text("by"));
                let mut mark =
                    bar(&cut(&name, 60), event.text("reason").to_owned(), "mark", at, at, "", false);
                mark.step = None;
                bars.push(mark);
            }
            "CONTEXT_REBASED" => {
                bars.push(bar("context rebased", String::new(), "mark", at, at, "", false));
            }
            "invocation_result" => {
                close(&mut bars, "queue", at, "");
                close(&mut bars, "rest", at, "");
                let status = event.text("status").replace('_', " ");
                let about = cut(event.text("error"), 160);
                bars.push(bar(&status, about, "mark", at, at, "", false));
            }
            _ => {}
        }
    }
    bars.sort_by_key(|bar| bar.from);
    bars
}

/// A model call whose reply never came. It ended when the attempt was given up, or when the next one began.
fn lost(bars: &mut Vec<Bar>, mut call: Bar) {
    let failed = bars.iter().filter(|bar| bar.class == "rest" && bar.from >= call.from);
    if let Some(end) = failed.map(|bar| bar.from).min() {
        (call.to, call.class, call.is_open) = (end, "bad", false);
    } else {
        call.about.push_str(", lost with its worker");
    }
    bars.push(call);
}

/// Ends the newest open bar of `of`, and returns where it is.
fn close(bars: &mut [Bar], of: &str, at: i64, about: &str) -> Option<usize> {
    let found = bars.iter().rposition(|bar| bar.is_open && bar.of == of)?;
    let bar = &mut bars[found];
    (bar.to, bar.is_open) = (at.max(bar.from), false);
    if !about.is_empty() {
        bar.about = about.to_owned();
    }
    Some(found)
}

/// Where each moment is drawn.
struct Scale {
    /// Moments, and their places.
    places: Vec<(i64, f64)>,
    shortened: bool,
}

impl Scale {
    fn of(bars: &[Bar], begin: i64, end: i64) -> Scale {
        let mut moments: Vec<i64> =
            bars.iter().flat_map(|bar| [bar.from, bar.to]).chain([begin, end]).collect();
        moments.sort_unstable();
        moments.dedup();
        let works = |from: i64, to: i64| {
            let is_work = |bar: &&Bar| matches!(bar.class, "model" | "tool" | "bad" | "lost");
            bars.iter().filter(is_work).any(|bar| bar.from <= from && bar.to >= to)
        };
        let stretches: Vec<(i64, i64, bool)> =
            moments.windows(2).map(|pair| (pair[0], pair[1], works(pair[0], pair[1]))).collect();
        let work: i64 = stretches.iter().filter(|(.., works)| *works).map(|(from, to, _)| to - from).sum();
        let longest = if work > 0 { work as f64 * LONGEST_REST } else { f64::MAX };
        let (mut at, mut shortened) = (0.0, false);
        let mut places = vec![(begin, 0.0)];
        for (from, to, works) in stretches {
            let length = (to - from) as f64;
            let drawn = if works { length } else { length.min(longest) };
            shortened |= drawn < length;
            at += drawn;
            places.push((to, at));
        }
        let all = if at > 0.0 { at } else { 1.0 };
        for place in &mut places {
            place.1 *= WIDTH / all;
        }
        Scale { places, shortened }
    }

    /// Every moment that is asked for is one of a bar, so it has a place.
    fn x(&self, moment: i64) -> f64 {
        let found = self.places.binary_search_by_key(&moment, |(at, _)| *at);
        found.map_or(0.0, |at| self.places[at].1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn event(seq: i64, s: f64, kind: &str, step: Option<i64>, payload: Value) -> Event {
        let ts = DateTime::from_timestamp_millis(1_000_000 + (s * 1000.0) as i64).unwrap();
        let row = json!({"seq": seq, "ts": ts, "type": kind, "step_number": step, "payload": payload});
        serde_json::from_value(row).unwrap()
    }

    fn at(s: f64) -> String {
        DateTime::from_timestamp_millis(1_000_000 + (s * 1000.0) as i64).unwrap().to_rfc3339()
    }

    fn drawn(events: &[Event]) -> Vec<(String, &'static str, String, String)> {
        let now = DateTime::from_timestamp_millis(1_000_000 + 100_000).unwrap();
        let rows = Waterfall::of(events, now).rows.into_iter();
        rows.map(|row| (row.name, row.class, row.began, row.took)).collect()
    }

    fn row(
        name: &str,
        class: &'static str,
        began: &str,
        took: &str,
    ) -> (String, &'static str, String, String) {
        (name.to_owned(), class, began.to_owned(), took.to_owned())
    }

    #[test]
    fn a_step_waits_calls_and_runs_its_tools() {
        let events = [
            event(1, 0.0, "state_transition", None, json!({"from_state": "created", "to_state": "queued"})),
            event(
                2,
                1.0,
                "state_transition",
                Some(1),
                json!({"from_state": "queued", "to_state": "running"}),
            ),
            event(
                3,
                3.0,
                "LLM_CALLED",
                Some(1),
                json!({"generation_id": "g1", "model": "m", "attempt": 1,
                "prompt_tokens": 7, "started_at": at(1.0)}),
            ),
            event(4, 3.0, "TOOL_INVOKED", Some(1), json!({"call_id": "c1", "name": "reserve"})),
            event(5, 4.5, "TOOL_RESULT", Some(1), json!({"call_id": "c1", "ok": false, "text": "no table"})),
            event(6, 5.0, "invocation_result", Some(1), json!({"ok": true, "status": "completed"})),
        ];
        let expected = [
            row("in the queue", "wait", "+0 ms", "1.0 s"),
            row("model", "model", "+1.0 s", "2.0 s"),
            row("reserve", "bad", "+3.0 s", "1.5 s"),
            row("completed", "mark", "+5.0 s", ""),
        ];
        assert_eq!(drawn(&events), expected);
    }

    #[test]
    fn a_call_that_died_with_its_worker_ends_where_the_next_begins() {
        let call = |seq, attempt, from: f64, tokens: Value| {
            event(
                seq,
                9.0,
                "LLM_CALLED",
                Some(1),
                json!({"generation_id": seq.to_string(), "model": "m",
                "attempt": attempt, "prompt_tokens": tokens, "started_at": at(from)}),
            )
        };
        let expected =
            [row("model", "lost", "+0 ms", "4.0 s"), row("model, attempt 2", "model", "+4.0 s", "5.0 s")];
        assert_eq!(drawn(&[call(1, 1, 0.0, Value::Null), call(2, 2, 4.0, json!(9))]), expected);
    }

    #[test]
    fn a_failed_attempt_is_followed_by_its_back_off() {
        let events = [
            event(
                1,
                2.0,
                "ATTEMPT_FAILED",
                Some(1),
                json!({"model": "m", "fault": "overloaded", "reason": "529",
                "attempt": 1, "retry_in_ms": 3000}),
            ),
            event(
                2,
                9.0,
                "LLM_CALLED",
                Some(1),
                json!({"generation_id": "g1", "model": "m", "attempt": 1,
                "prompt_tokens": null, "started_at": at(0.0)}),
            ),
            event(
                3,
                9.0,
                "LLM_CALLED",
                Some(1),
                json!({"generation_id": "g2", "model": "m", "attempt": 2,
                "prompt_tokens": 9, "started_at": at(5.0)}),
            ),
        ];
        let expected = [
            row("model", "bad", "+0 ms", "2.0 s"),
            row("back-off", "rest", "+2.0 s", "3.0 s"),
            row("model, attempt 2", "model", "+5.0 s", "4.0 s"),
        ];
        assert_eq!(drawn(&events), expected);
    }

    #[test]
    fn a_crash_says_what_was_kept() {
        let kept = |strategy: &str| {
            let call = |seq: i64, attempt: i64, from: f64, tokens: Value| {
                let payload = json!({"generation_id": seq.to_string(), "model": "m", "attempt": attempt,
                    "prompt_tokens": tokens, "started_at": at(from)});
                event(seq, 9.0, "LLM_CALLED", Some(1), payload)
            };
            let resumed =
                json!({"generation_id": "3", "strategy": strategy, "replaces": "1", "prior_seq": 4});
            let events = [
                call(1, 1, 0.0, Value::Null),
                event(2, 9.0, "GEN_RESUMED", Some(1), resumed),
                call(3, 2, 4.0, json!(9)),
            ];
            Waterfall::of(&events, Utc::now()).rows[0].about.clone()
        };
        assert_eq!(kept("resume"), "m, lost with its worker; the text that it had written was kept");
        assert_eq!(kept("replace"), "m, lost with its worker; all that was committed before was kept");
    }

    #[test]
    fn a_wait_of_hours_leaves_room_for_the_work() {
        let events = [
            event(1, 0.0, "TOOL_INVOKED", Some(1), json!({"call_id": "c1", "name": "ask_user"})),
            event(2, 90.0, "TOOL_RESULT", Some(1), json!({"call_id": "c1", "ok": true, "text": "green"})),
            event(
                3,
                92.0,
                "LLM_CALLED",
                Some(2),
                json!({"generation_id": "g", "model": "m", "attempt": 1,
                "prompt_tokens": 9, "started_at": at(90.0)}),
            ),
        ];
        let drawn = Waterfall::of(&events, Utc::now());
        assert!(drawn.shortened);
        assert_eq!(drawn.rows[0].took, "1 min 30 s");
        assert!(drawn.rows[1].width.parse::<f64>().unwrap() > 700.0, "{:?}", drawn.rows);
    }

    #[test]
    fn nothing_is_drawn_of_an_empty_journal() {
        assert!(Waterfall::of(&[], Utc::now()).rows.is_empty());
    }
}
