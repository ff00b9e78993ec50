//! How full the context was at each of the latest steps, and where it was rebased.

use crate::draw::Bars;
use crate::model::{Event, Step};
use crate::text::count;

/// A bar a step. Above the bars are the marks of the steps whose context began at a later message than before.
pub(super) struct Fills {
    pub bars: Bars,
    pub marks: Vec<Mark>,
    /// The fullest step in words.
    pub said: String,
}

pub(super) struct Mark {
    /// A triangle, as the path of an SVG.
    pub path: String,
    pub title: String,
}

impl Fills {
    /// `None` before the first step.
    pub fn of(steps: &[Step], events: &[Event], window: i64) -> Option<Fills> {
        let fullest = steps.iter().map(|step| step.usage.input_tokens).max()?;
        let share = |tokens: i64| format!("{:.1} %", tokens as f64 * 100.0 / window.max(1) as f64);
        let bar = |step: &Step| {
            let tokens = step.usage.input_tokens;
            let title = format!(
                "Step {}: {} tokens, {} of the window",
                step.step_number,
                count(tokens),
                share(tokens)
            );
            (title, vec![("fill", tokens as f64)])
        };
        let bars = Bars::of(steps.iter().map(bar).collect());
        let is_rebased = |number: i64| {
            events.iter().any(|one| one.kind == "CONTEXT_REBASED" && one.step_number == Some(number))
        };
        let marked = steps.iter().zip(&bars.bars).filter(|(step, _)| is_rebased(step.step_number));
        let marks = marked.map(|(step, bar)| Mark {
            path: format!("M{} 0h8l-4 6z", bar.x),
            title: format!("Rebased at step {}", step.step_number),
        });
        let marks = marks.collect();
        let said = format!(
            "What each of the last {} calls had in: at most {} of {} tokens ({})",
            steps.len(),
            count(fullest),
            count(window),
            share(fullest)
        );
        Some(Fills { marks, bars, said })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_bar_a_step_and_a_mark_where_the_context_was_rebased() {
        let at = "2026-11-25T10:00:00Z";
        let step = |number: i64, tokens: i64| -> Step {
            let row = json!({"step_number": number, "finish_reason": "stop", "usage": {"input_tokens": tokens},
                "executed_local_tool_count": 0, "attempt": 1, "worker_id": "w", "started_at": at, "committed_at": at});
            serde_json::from_value(row).expect("a step")
        };
        let rebased = json!({"seq": 9, "ts": at, "type": "CONTEXT_REBASED", "step_number": 8, "payload": {}});
        let rebased: Event = serde_json::from_value(rebased).expect("an entry");
        let fills = Fills::of(&[step(7, 900), step(8, 300)], &[rebased], 1000).expect("steps");
        assert_eq!(
            fills.said,
            "What each of the last 2 calls had in: at most 900 of 1\u{2009}000 tokens (90.0 %)"
        );
        let titles: Vec<_> = fills.bars.bars.iter().map(|bar| bar.title.as_str()).collect();
        assert_eq!(
            titles,
            ["Step 7: 900 tokens, 90.0 % of the window", "Step 8: 300 tokens, 30.0 % of the window"]
        );
        let marks: Vec<_> = fills.marks.iter().map(|one| (one.path.as_str(), one.title.as_str())).collect();
        assert_eq!(marks, [("M44.0 0h8l-4 6z", "Rebased at step 8")]);
        assert!(Fills::of(&[], &[], 1000).is_none());
    }
}
