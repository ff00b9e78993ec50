//! What the journal does not say of a crash: when the worker was last heard of, who went on, and since when nobody had the
//! session. The journal has a lost call only once the reply after it has come.

use super::{Bar, Kept, Known};
use chrono::TimeDelta;

/// From this on, time in which nothing is known to happen is a stretch of its own.
const HOLE_MS: i64 = 1000;

/// Parts each lost call from the time in which no worker had the session, draws the waits that no entry of the journal tells
/// of, and brings the bars into their order. Says whether a worker was lost and another one went on.
pub(super) fn part(bars: &mut Vec<Bar>, known: &Known<'_>) -> bool {
    bars.sort_by_key(|bar| bar.from);
    let (mut parted, mut survived): (Vec<Bar>, bool) = (Vec::new(), false);
    // From the beginning of a lost call until the attempt that replied.
    let mut crashes: Vec<(i64, i64)> = Vec::new();
    // The end of all that is known to have happened.
    let mut end: Option<i64> = None;
    let mut rest = std::mem::take(bars).into_iter();
    while let Some(mut bar) = rest.next() {
        if let Some(end) = end.filter(|end| bar.is_call && bar.from - end >= HOLE_MS) {
            let hole = hole(known, &parted, &bar, end);
            survived |= hole.class == "gone";
            parted.push(hole);
        }
        if bar.class != "mark" {
            end = end.max(Some(bar.to));
        }
        let mut gone = None;
        // A tool call that is lost waits for a person, and no other attempt follows it.
        let is_model_call = |bar: &Bar| bar.class == "lost" && bar.of == "lost";
        if is_model_call(&bar) && !bar.is_open {
            match crashes.last_mut().filter(|(_, until)| *until == bar.from) {
                Some((_, until)) => *until = bar.to,
                None => crashes.push((bar.from, bar.to)),
            }
            let is_last = !rest.as_slice().iter().any(|next| is_model_call(next) && next.step == bar.step);
            gone = after_crash(known, &mut bar, is_last);
            survived |= gone.is_some();
        }
        parted.push(bar);
        parted.extend(gone);
    }
    // What happened during a crash, such as a delivery, does not stand between an attempt and the next.
    let key = |bar: &Bar| {
        let during =
            crashes.iter().find(|(from, until)| bar.class == "mark" && (*from..*until).contains(&bar.from));
        during.map_or((bar.from, 1), |(from, _)| (*from, 0))
    };
    parted.sort_by_key(key);
    *bars = parted;
    survived
}

/// Ends a lost call at the last sign of life of its worker, and returns the rest of the time until the next attempt. `None`: no
/// worker died.
fn after_crash(known: &Known<'_>, call: &mut Bar, is_last: bool) -> Option<Bar> {
    let after = call.step.and_then(|number| known.step(number));
    // A worker that ends in order gives its claim back, and that claim does not count.
    if !call.goes_on || after.is_some_and(|step| step.attempt <= 1) {
        call.about.push_str(", cut off");
        return None;
    }
    let until = call.to;
    let former = former(known, call);
    let beat = former.and_then(|id| last_beat(known, id));
    let latter = after.filter(|_| is_last).map(|step| step.worker_id.as_str());
    let went_on = latter.map(|latter| format!("; {latter} went on")).unwrap_or_default();
    let kept = kept(call);
    // It lives, so it only lost hold of the session, at an unknown time.
    if former.is_some() && (former == latter || beat.is_some_and(|beat| beat > until)) {
        let former = former.unwrap_or_default();
        call.about.push_str(&format!(", cut off: {former} lost hold of the session{went_on}. {kept}"));
        return None;
    }
    let last = beat.unwrap_or(call.from).clamp(call.from, until);
    (call.to, call.is_unmeasured) = (last, last == call.from);
    call.about.push_str(if call.is_unmeasured {
        ", lost with its worker, which was not heard of after this"
    } else {
        ", lost with its worker, which was last heard of here"
    });
    Some(Bar {
        step: call.step,
        name: "no worker".to_owned(),
        about: format!("{} died{went_on}. {kept}", former.unwrap_or("its worker")),
        class: "gone",
        from: last,
        to: until,
        ..Bar::default()
    })
}

/// The worker that made the call: that of the step before, if this is the first call after it and began at once.
fn former<'a>(known: &Known<'a>, call: &Bar) -> Option<&'a str> {
    let before =
        call.step.and_then(|number| known.steps.iter().find(|step| step.step_number + 1 == number))?;
    let events = known.events.iter().filter(|event| event.step_number == Some(before.step_number));
    let written = events.map(|event| event.ts.0.timestamp_millis()).filter(|at| *at <= call.from).max();
    let last = written.max(Some(before.committed_at.0.timestamp_millis()))?;
    (call.name == "model" && call.from - last < HOLE_MS).then_some(before.worker_id.as_str())
}

/// When a worker was heard of last, if the list of workers still has it.
fn last_beat(known: &Known<'_>, worker_id: &str) -> Option<i64> {
    let worker = known.workers.iter().find(|worker| worker.worker_id == worker_id)?;
    let age = TimeDelta::milliseconds((worker.beat_age_s * 1000.0) as i64);
    Some((known.now - age).timestamp_millis())
}

/// What the crash left as it was.
fn kept(call: &Bar) -> String {
    let plural = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let text = if call.keeps_text { ", and the text that it had written" } else { "" };
    match call.kept {
        Some(Kept { steps, results }) => {
            format!("Kept: {}, {}{text}", plural(steps, "step"), plural(results, "tool result"))
        }
        None => format!("Kept: all that was committed before{text}"),
    }
}

/// The time before a model call in which nothing is known to have happened. The session was in the queue: a worker that ended gave
/// it back, or died between two calls.
fn hole(known: &Known<'_>, bars: &[Bar], call: &Bar, from: i64) -> Bar {
    let step = |number: Option<i64>| number.and_then(|number| known.step(number));
    let (before, after) = (step(call.step.map(|number| number - 1)), step(call.step));
    let workers = before.zip(after).filter(|(before, after)| before.worker_id != after.worker_id);
    // An attempt that failed, or was lost, has a bar.
    let is_first = !bars.iter().any(|bar| bar.step == call.step && bar.class != "mark");
    let (name, about, class) = match workers.filter(|_| is_first && call.class == "model") {
        Some((before, after)) if after.attempt > 1 => {
            let about = format!("{} died; {} went on. {}", before.worker_id, after.worker_id, kept(call));
            ("no worker", about, "gone")
        }
        Some((before, after)) => {
            let about = format!("{} gave it back; {} went on", before.worker_id, after.worker_id);
            ("in the queue", about, "wait")
        }
        None => ("in the queue", String::new(), "wait"),
    };
    Bar { name: name.to_owned(), about, class, from, to: call.from, ..Bar::default() }
}
