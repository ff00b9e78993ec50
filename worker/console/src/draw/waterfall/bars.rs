//! The bars of the waterfall, as the journal has them.

use super::{Bar, Kept, Known};
use crate::model::Event;
use crate::text::cut;
use chrono::{DateTime, Utc};

/// In the order of the journal's entries.
pub(super) fn bars(known: &Known<'_>) -> Vec<Bar> {
    let now = known.now.timestamp_millis();
    let mut bars: Vec<Bar> = Vec::new();
    // What was committed before is known only if the journal is there from its beginning.
    let from_the_beginning = known.events.first().is_some_and(|event| event.seq == 1);
    let mut kept = Kept::default();
    // Calls of which nobody knows whether they took effect.
    let mut uncertain: Vec<usize> = Vec::new();
    for event in known.events {
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
            ..Bar::default()
        };
        match event.kind.as_str() {
            "state_transition" if event.text("to_state") == "queued" => {
                let mut wait = bar("in the queue", String::new(), "wait", at, now, "queue", true);
                wait.step = None;
                bars.push(wait);
            }
            "state_transition" => {
                close(&mut bars, "queue", at, "");
                // What still runs then waits for a person.
                if event.text("to_state") == "needs_attention" {
                    bars.iter_mut()
                        .filter(|bar| bar.is_open && bar.class == "tool")
                        .for_each(|bar| bar.class = "person");
                    for call in uncertain.drain(..) {
                        let Bar { step, name, of, .. } = &bars[call];
                        let name = format!("did {name} happen?");
                        let wait =
                            Bar { step: *step, ..bar(&name, String::new(), "person", at, now, of, true) };
                        bars.push(wait);
                    }
                }
            }
            "LLM_CALLED" => {
                let from = began(known, event, at);
                // Whatever the step waited for has come.
                close(&mut bars, "rest", from, "");
                close(&mut bars, "lost", from, "");
                let attempt = event.number("attempt").unwrap_or(1);
                let is_reply = matches!(event.text("purpose"), "" | "reply");
                let name = match (is_reply, attempt) {
                    (true, 1) => "model".to_owned(),
                    (true, _) => format!("model, attempt {attempt}"),
                    (false, _) => event.text("purpose").replace('_', " "),
                };
                let model = event.text("model").to_owned();
                let call = |about: String, class, of: &str, is_open| Bar {
                    is_call: !event.text("started_at").is_empty(),
                    kept: from_the_beginning.then_some(kept),
                    ..bar(&name, about, class, from, at, of, is_open)
                };
                match event.number("prompt_tokens") {
                    Some(tokens) => {
                        let about = format!("{model}, {} tokens in", crate::text::count(tokens));
                        bars.push(call(about, "model", event.text("generation_id"), false));
                        kept.steps += usize::from(is_reply);
                    }
                    None => lost(&mut bars, call(model, "lost", "lost", true)),
                }
            }
            "ATTEMPT_FAILED" => {
                let waits = event.number("retry_in_ms").map(|ms| at + ms);
                let name = if waits.is_some() { "back-off" } else { "waits at the provider's gate" };
                let about = cut(&format!("{}: {}", event.text("fault"), event.text("reason")), 160);
                bars.push(bar(name, about, "rest", at, waits.unwrap_or(now), "rest", waits.is_none()));
            }
            "GEN_RESUMED" => {
                if let Some(call) = bars.iter_mut().rev().find(|bar| bar.of == "lost" && bar.is_open) {
                    call.goes_on = true;
                    call.keeps_text = event.text("strategy") == "resume";
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
                kept.results += 1;
                // The model was told that its end is unknown, so no person is asked.
                uncertain.retain(|call| bars[*call].of != event.text("call_id"));
                let text = cut(event.text("text"), 120);
                if let Some(at) = close(&mut bars, event.text("call_id"), at, &text)
                    && event.payload["ok"] == false
                    && bars[at].class != "person"
                {
                    bars[at].class = "bad";
                }
            }
            "TOOL_FAILED_UNCERTAIN" => {
                if let Some(call) =
                    close(&mut bars, event.text("call_id"), at, "its end is unknown: it may have run")
                {
                    bars[call].class = "lost";
                    uncertain.push(call);
                }
            }
            "EFFECT_RESOLVED" => {
                let (call, resolution) = (event.text("effect"), event.text("resolution"));
                let approved = resolution == "approved";
                if !approved && resolution != "declined" {
                    let said = resolution.replace('_', " ");
                    close(&mut bars, call, at, &format!("{said}, says {}", event.text("by")));
                }
                if (approved || resolution == "declined")
                    && let Some(waited) =
                        close(&mut bars, call, at, &format!("{resolution} by {}", event.text("by")))
                {
                    let (tool, step) = (bars[waited].name.clone(), bars[waited].step);
                    (bars[waited].class, bars[waited].name) =
                        ("person", format!("{tool} waits for approval"));
                    if approved {
                        bars.push(Bar { step, ..bar(&tool, String::new(), "tool", at, now, call, true) });
                    }
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
    bars
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
