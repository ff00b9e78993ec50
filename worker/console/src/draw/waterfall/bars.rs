//! The bars of the waterfall, as the journal has them.

use super::{Bar, Kept, Known};
use crate::model::Event;
use crate::text::cut;
use chrono::{DateTime, Utc};

/// In the order of the journal's entries.
pub(super) fn bars(known: &Known<'_>) -> Vec<Bar> {
    let mut drawing = Drawing { known, bars: Vec::new(), kept: Kept::default(), uncertain: Vec::new() };
    for event in known.events {
        drawing.draw(event);
    }
    drawing.bars
}

/// The bars of the entries so far.
struct Drawing<'k> {
    known: &'k Known<'k>,
    bars: Vec<Bar>,
    kept: Kept,
    /// Calls that may have taken effect.
    uncertain: Vec<usize>,
}

impl Drawing<'_> {
    /// Draws what an entry of the journal tells.
    fn draw(&mut self, event: &Event) {
        match event.kind.as_str() {
            "state_transition" if event.text("to_state") == "queued" => {
                let wait = self.open(event, "in the queue", "wait", "queue");
                self.bars.push(Bar { step: None, ..wait });
            }
            "state_transition" => self.status_changed(event),
            "LLM_CALLED" => self.model_called(event),
            "ATTEMPT_FAILED" => self.attempt_failed(event),
            "GEN_RESUMED" => {
                if let Some(call) = self.bars.iter_mut().rev().find(|bar| bar.of == "lost" && bar.is_open) {
                    call.goes_on = true;
                    call.keeps_text = event.text("strategy") == "resume";
                }
            }
            "GEN_FAILED" => {
                close(&mut self.bars, "lost", millis(event), event.text("reason"));
            }
            "TOOL_INVOKED" => {
                let (name, call) = (event.text("name"), event.text("call_id"));
                let class = if name == "ask_user" { "person" } else { "tool" };
                let runs = self.open(event, name, class, call);
                self.bars.push(runs);
            }
            "TOOL_RESULT" => self.tool_ended(event),
            "TOOL_FAILED_UNCERTAIN" => {
                let about = "its end is unknown: it may have run";
                if let Some(call) = close(&mut self.bars, event.text("call_id"), millis(event), about) {
                    self.bars[call].class = "lost";
                    self.uncertain.push(call);
                }
            }
            "EFFECT_RESOLVED" => self.effect_resolved(event),
            "GEN_SENT" | "DELIVERY_FAILED" | "DELIVERY_BOUNCED" => {
                let about = format!("{} {}", event.text("channel"), event.text("reason"));
                let name = if event.kind == "GEN_SENT" { "delivered" } else { "delivery failed" };
                self.bars.push(Bar { step: None, about: cut(&about, 120), ..mark(event, name) });
            }
            "SESSION_STEERED" => {
                let name = cut(&format!("{} by {}", event.text("verb"), event.text("by")), 60);
                let about = event.text("reason").to_owned();
                self.bars.push(Bar { step: None, about, ..mark(event, &name) });
            }
            "CONTEXT_REBASED" => self.bars.push(mark(event, "context rebased")),
            "invocation_result" => self.run_ended(event),
            _ => {}
        }
    }

    /// A bar that begins with the entry and is open until now.
    fn open(&self, event: &Event, name: &str, class: &'static str, of: &str) -> Bar {
        let now = self.known.now.timestamp_millis();
        Bar { to: now, of: of.to_owned(), is_open: true, ..bar(event, name, class) }
    }

    /// The session has left the queue, or waits for a person.
    fn status_changed(&mut self, event: &Event) {
        close(&mut self.bars, "queue", millis(event), "");
        // What still runs then waits for a person.
        if event.text("to_state") == "needs_attention" {
            self.bars
                .iter_mut()
                .filter(|bar| bar.is_open && bar.class == "tool")
                .for_each(|bar| bar.class = "person");
            for call in std::mem::take(&mut self.uncertain) {
                let Bar { step, name, of, .. } = &self.bars[call];
                let name = format!("did {name} happen?");
                let wait = Bar { step: *step, ..self.open(event, &name, "person", of) };
                self.bars.push(wait);
            }
        }
    }

    fn model_called(&mut self, event: &Event) {
        let from = began(self.known, event, millis(event));
        // Whatever the step waited for has come.
        close(&mut self.bars, "rest", from, "");
        close(&mut self.bars, "lost", from, "");
        let attempt = event.number("attempt").unwrap_or(1);
        let is_reply = matches!(event.text("purpose"), "" | "reply");
        let name = match (is_reply, attempt) {
            (true, 1) => "model".to_owned(),
            (true, _) => format!("model, attempt {attempt}"),
            (false, _) => event.text("purpose").replace('_', " "),
        };
        let model = event.text("model").to_owned();
        // What was committed before is known only if the journal is there from its beginning.
        let from_the_beginning = self.known.events.first().is_some_and(|event| event.seq == 1);
        let call = Bar {
            from,
            is_call: !event.text("started_at").is_empty(),
            kept: from_the_beginning.then_some(self.kept),
            ..bar(event, &name, "model")
        };
        match event.number("prompt_tokens") {
            Some(tokens) => {
                let about = format!("{model}, {} tokens in", crate::text::count(tokens));
                self.bars.push(Bar { about, of: event.text("generation_id").to_owned(), ..call });
                self.kept.steps += usize::from(is_reply);
            }
            None => {
                let call = Bar { about: model, class: "lost", of: "lost".to_owned(), is_open: true, ..call };
                lost(&mut self.bars, call);
            }
        }
    }

    /// The step rests until it is tried again.
    fn attempt_failed(&mut self, event: &Event) {
        let waits = event.number("retry_in_ms").map(|ms| millis(event) + ms);
        let name = if waits.is_some() { "back-off" } else { "waits at the provider's gate" };
        let about = cut(&format!("{}: {}", event.text("fault"), event.text("reason")), 160);
        let rest = self.open(event, name, "rest", "rest");
        self.bars.push(Bar { about, to: waits.unwrap_or(rest.to), is_open: waits.is_none(), ..rest });
    }

    fn tool_ended(&mut self, event: &Event) {
        self.kept.results += 1;
        // The model was told that its end is unknown, so no person is asked.
        let bars = &self.bars;
        self.uncertain.retain(|call| bars[*call].of != event.text("call_id"));
        let text = cut(event.text("text"), 120);
        if let Some(call) = close(&mut self.bars, event.text("call_id"), millis(event), &text)
            && event.payload["ok"] == false
            && self.bars[call].class != "person"
        {
            self.bars[call].class = "bad";
        }
    }

    /// A person has decided about a call.
    fn effect_resolved(&mut self, event: &Event) {
        let at = millis(event);
        let (call, resolution) = (event.text("effect"), event.text("resolution"));
        if !matches!(resolution, "approved" | "declined") {
            let said = resolution.replace('_', " ");
            close(&mut self.bars, call, at, &format!("{said}, says {}", event.text("by")));
            return;
        }
        let about = format!("{resolution} by {}", event.text("by"));
        let Some(waited) = close(&mut self.bars, call, at, &about) else { return };
        let waited = &mut self.bars[waited];
        let (tool, step) = (waited.name.clone(), waited.step);
        (waited.class, waited.name) = ("person", format!("{tool} waits for approval"));
        if resolution == "approved" {
            let runs = self.open(event, &tool, "tool", call);
            self.bars.push(Bar { step, ..runs });
        }
    }

    fn run_ended(&mut self, event: &Event) {
        let at = millis(event);
        close(&mut self.bars, "queue", at, "");
        close(&mut self.bars, "rest", at, "");
        let status = event.text("status").replace('_', " ");
        self.bars.push(Bar { about: cut(event.text("error"), 160), ..mark(event, &status) });
    }
}

fn millis(event: &Event) -> i64 {
    event.ts.0.timestamp_millis()
}

/// A bar of the entry's step and moment.
fn bar(event: &Event, name: &str, class: &'static str) -> Bar {
    let (from, to) = (millis(event), millis(event));
    Bar { step: event.step_number, name: name.to_owned(), class, from, to, ..Bar::default() }
}

fn mark(event: &Event, name: &str) -> Bar {
    bar(event, name, "mark")
}

/// When a model call began. The commit of the step before writes it down, and then takes its own time: the call that
/// replied belongs to its step, so it did not begin before that.
fn began(known: &Known<'_>, event: &Event, at: i64) -> i64 {
    let began = event.text("started_at").parse::<DateTime<Utc>>();
    let from = began.map_or(at, |began| began.timestamp_millis());
    let replied = event.number("prompt_tokens").and(event.step_number);
    let step = replied.and_then(|number| known.step(number));
    from.max(step.map_or(from, |step| step.started_at.0.timestamp_millis())).min(at)
}

/// A model call whose reply never came. It ended when the attempt was given up, or before the next one began.
fn lost(bars: &mut Vec<Bar>, mut call: Bar) {
    let failed = bars.iter().filter(|bar| bar.class == "rest" && bar.from >= call.from);
    if let Some(end) = failed.map(|bar| bar.from).min() {
        (call.to, call.class, call.is_open) = (end, "bad", false);
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
