//! The report on a terminal: two columns where there is room, else one after the other.

use super::super::output::{Cell, Column, Output, Table, Tone, count, dollars};
use super::columns::{Span, lay, marked, span};
use super::{Sums, TOTALS, change, range, shorten_middle, sums, time, value};
use std::fmt::Write as _;
use unicode_width::UnicodeWidthStr;
use wakeful_workflow::diff::{
    Difference, Divergence, Level, Part, Piece, Report, RequestMatch, TurnDiff, TurnView, ValueDifference,
    WhichSide,
};

/// Width from which two texts are shown side by side.
const WIDE: usize = 100;
/// Characters of unchanged text shown next to a change.
const CONTEXT: usize = 60;
/// Characters of changed text that are shown.
const CHANGED: usize = 600;
const INDENT: usize = 6;

pub(super) fn of(output: &Output, report: &Report, full: bool) -> String {
    let mut text = Text { output, full, text: String::new() };
    text.head(report);
    text.setup(report);
    text.turns(&report.turns);
    text.state(&report.state);
    text.totals(report);
    text.text
}

struct Text<'a> {
    output: &'a Output,
    full: bool,
    text: String,
}

impl Text<'_> {
    fn line(&mut self, spans: &[Span]) {
        for span in spans {
            self.text.push_str(&self.output.paint(span.tone, &span.text));
        }
        self.text.push('\n');
    }

    fn head(&mut self, report: &Report) {
        let verdict = match report.verdict {
            Level::Equal => span(Tone::Good, "equal"),
            level => span(Tone::Bad, &format!("differs: {}", level.as_str())),
        };
        self.line(&[verdict]);
        let sides = [
            ("left ", &report.left, report.totals.left.turns),
            ("right", &report.right, report.totals.right.turns),
        ];
        for (name, one, turns) in sides {
            let about = format!(
                "  {}, {}, {}, {}, {}",
                one.agent,
                one.model,
                one.status,
                count(one.messages as i64, "message"),
                count(turns, "turn")
            );
            self.line(&[
                span(Tone::Faint, &format!("{name}  ")),
                span(Tone::Head, &one.session_id),
                span(Tone::Plain, &about),
            ]);
        }
        for (what, divergence) in [
            ("first divergence", &report.first_divergence),
            ("first other tool call", &report.first_tool_divergence),
        ] {
            if let Some(divergence) = divergence
                && (what == "first divergence" || report.first_divergence != report.first_tool_divergence)
            {
                self.line(&[
                    span(Tone::Faint, &format!("{what}: ")),
                    span(Tone::Bad, &format!("turn {}", divergence.turn)),
                    span(Tone::Plain, &format!("{}: {}", messages(divergence), divergence.what)),
                ]);
            }
        }
    }

    fn setup(&mut self, report: &Report) {
        if report.setup.is_empty() {
            return;
        }
        self.heading("Set up differently (this does not count)");
        for difference in &report.setup {
            self.line(&[span(Tone::Plain, &format!("  {}", difference.what.replace('_', " ")))]);
            self.words(&difference.words);
        }
    }

    fn turns(&mut self, turns: &[TurnDiff]) {
        if turns.is_empty() {
            return;
        }
        self.heading("Turns");
        let mut at = 0;
        while at < turns.len() {
            let equal = turns[at..].iter().take_while(|turn| turn.level == Level::Equal).count();
            if equal == 0 {
                self.turn(&turns[at]);
                at += 1;
                continue;
            }
            let (first, last) = (&turns[at], &turns[at + equal - 1]);
            let name = if equal == 1 { "turn " } else { "turns" };
            let other_bytes =
                turns[at..at + equal].iter().filter(|turn| turn.request == RequestMatch::Differs).count();
            let note = if other_bytes == 0 {
                String::new()
            } else {
                format!("  asked with other bytes: {other_bytes}")
            };
            let numbers = range(first.turn as i64, last.turn as i64);
            self.line(&[
                span(Tone::Plain, &format!("  {name} {numbers}  ")),
                span(Tone::Good, "equal"),
                span(Tone::Faint, &note),
            ]);
            at += equal;
        }
    }

    fn turn(&mut self, turn: &TurnDiff) {
        let numbers = |turn: &Option<TurnView>| {
            turn.as_ref().map_or("none".to_owned(), |turn| range(turn.first_message, turn.last_message))
        };
        let mut about = format!("  messages {} | {}", numbers(&turn.left), numbers(&turn.right));
        match turn.request {
            RequestMatch::Equal => about.push_str(", asked with the same bytes"),
            RequestMatch::Differs => about.push_str(", asked with other bytes"),
            RequestMatch::Unknown => {}
        }
        let took = |turn: &Option<TurnView>| {
            let answer = turn.as_ref()?.answer.as_ref()?;
            let tokens = answer.usage.input_tokens.saturating_add(answer.usage.output_tokens);
            Some(format!(
                "{} {} {}",
                count(tokens, "token"),
                dollars(answer.usage.cost_micros),
                answer.time_ms.map_or("?".to_owned(), time)
            ))
        };
        if let (Some(left), Some(right)) = (took(&turn.left), took(&turn.right)) {
            let _ = write!(about, "; {left} | {right}");
        }
        self.line(&[
            span(Tone::Plain, &format!("  turn  {}  ", turn.turn)),
            span(Tone::Bad, turn.level.as_str()),
            span(Tone::Faint, &about),
        ]);
        for difference in &turn.differences {
            self.difference(difference, turn);
        }
        if turn.unlisted > 0 {
            self.line(&[span(Tone::Faint, &format!("    and {} more", turn.unlisted))]);
        }
    }

    fn difference(&mut self, difference: &Difference, turn: &TurnDiff) {
        let sentence = format!("    {}", difference.part.sentence());
        match &difference.part {
            Part::Turn { on } => {
                self.line(&[span(Tone::Plain, &sentence)]);
                let Some(view) = turn.left.as_ref().or(turn.right.as_ref()) else { return };
                let mut said = Vec::new();
                for (who, text) in
                    [("in: ", &view.input), ("calls: ", &view.calls.join(", ")), ("says: ", &view.text)]
                {
                    if !text.is_empty() {
                        said.push(format!("{who}{text}"));
                    }
                }
                self.words(&[Piece { of: *on, text: said.join("\n") }]);
            }
            Part::CallOnly { on, name, arguments } => {
                self.line(&[span(Tone::Plain, &sentence)]);
                self.words(&[Piece { of: *on, text: format!("{name} {arguments}") }]);
            }
            Part::Call { arguments: changes, .. } | Part::State { changes } => {
                self.line(&[span(Tone::Plain, &sentence)]);
                self.changes(changes);
            }
            Part::Result { words, details, .. } => {
                self.line(&[span(Tone::Plain, &sentence)]);
                if !words.is_empty() {
                    self.words(words);
                }
                self.changes(details);
            }
            Part::Input { words } | Part::Text { words } => {
                self.line(&[span(Tone::Plain, &sentence)]);
                self.words(words);
            }
            Part::FinishReason { .. } | Part::Shape { .. } => self.line(&[span(Tone::Plain, &sentence)]),
        }
    }

    fn state(&mut self, changes: &[ValueDifference]) {
        if !changes.is_empty() {
            self.heading("State at the end");
            self.changes(changes);
        }
    }

    fn changes(&mut self, changes: &[ValueDifference]) {
        for change in changes {
            if !change.path.is_empty() {
                self.line(&[span(Tone::Head, &format!("{:INDENT$}{}", "", change.path))]);
            }
            if change.words.is_empty() {
                let left = Piece { of: WhichSide::Left, text: value(change.left.as_ref()) };
                let right = Piece { of: WhichSide::Right, text: value(change.right.as_ref()) };
                self.words(&[left, right]);
            } else {
                self.words(&change.words);
            }
        }
    }

    fn totals(&mut self, report: &Report) {
        for Sums { title, of: sides, has_change } in sums(report) {
            self.heading(&title);
            let mut columns = vec![Column::fixed(""), Column::number("LEFT"), Column::number("RIGHT")];
            columns.extend(has_change.then(|| Column::number("CHANGE")));
            let mut table = Table::new(&columns);
            for (name, of, show) in TOTALS {
                let (left, right) = (of(&sides.left), of(&sides.right));
                let mut cells: Vec<Cell> = vec![name.into(), show(left).into(), show(right).into()];
                cells.extend(has_change.then(|| Cell::from(change(left, right))));
                table.row(cells);
            }
            self.text.push_str(&self.output.aligned(&table, 2));
        }
        let requests = &report.requests;
        let first =
            requests.first_that_differs.map_or(String::new(), |turn| format!(" (the first in turn {turn})"));
        self.line(&[span(
            Tone::Plain,
            &format!(
                "  requests: {} with the same bytes, {} with others{first}, {} not known",
                requests.equal, requests.differ, requests.unknown
            ),
        )]);
    }

    fn heading(&mut self, text: &str) {
        self.text.push('\n');
        self.line(&[span(Tone::Head, text)]);
    }

    /// Prints the pieces of two texts, side by side if the terminal is wide enough.
    fn words(&mut self, pieces: &[Piece]) {
        let pieces = self.shortened(pieces);
        let width = self.output.width().map(usize::from);
        let spans = |sides: &[WhichSide]| -> Vec<Span> {
            pieces.iter().filter(|piece| sides.contains(&piece.of)).map(marked).collect()
        };
        match width {
            Some(width) if width >= WIDE => {
                let column = (width - INDENT - 3) / 2;
                let left = lay(&spans(&[WhichSide::Both, WhichSide::Left]), column);
                let right = lay(&spans(&[WhichSide::Both, WhichSide::Right]), column);
                for at in 0..left.len().max(right.len()) {
                    let none = Vec::new();
                    let (one, other) = (left.get(at).unwrap_or(&none), right.get(at).unwrap_or(&none));
                    let taken: usize = one.iter().map(|span| span.text.width()).sum();
                    let mut line = vec![Span { tone: Tone::Plain, text: " ".repeat(INDENT) }];
                    line.extend(one.iter().cloned());
                    line.push(Span {
                        tone: Tone::Faint,
                        text: format!("{:1$} │ ", "", column - taken.min(column)),
                    });
                    line.extend(other.iter().cloned());
                    self.line(&line);
                }
            }
            width => {
                let room = width.map_or(usize::MAX, |width| width.saturating_sub(INDENT).max(20));
                for spans in lay(&spans(&[WhichSide::Both, WhichSide::Left, WhichSide::Right]), room) {
                    let mut line = vec![Span { tone: Tone::Plain, text: " ".repeat(INDENT) }];
                    line.extend(spans);
                    self.line(&line);
                }
            }
        }
    }

    /// Cuts unchanged text to the part next to a change, and limits changed text.
    fn shortened(&self, pieces: &[Piece]) -> Vec<Piece> {
        if self.full {
            return pieces.to_vec();
        }
        let last = pieces.len().saturating_sub(1);
        let cut = |(at, piece): (usize, &Piece)| {
            let (head, tail) = match piece.of {
                WhichSide::Both if pieces.len() == 1 => (CHANGED, 0),
                WhichSide::Both => (if at == 0 { 0 } else { CONTEXT }, if at == last { 0 } else { CONTEXT }),
                WhichSide::Left | WhichSide::Right => (CHANGED, CONTEXT),
            };
            Piece { of: piece.of, text: shorten_middle(&piece.text, head, tail) }
        };
        pieces.iter().enumerate().map(cut).collect()
    }
}

fn messages(divergence: &Divergence) -> String {
    match (divergence.left_message, divergence.right_message) {
        (Some(left), Some(right)) if left == right => format!(" (from message {left})"),
        (Some(left), Some(right)) => format!(" (from message {left} | {right})"),
        (Some(left), None) => format!(" (from message {left} of the left)"),
        (None, Some(right)) => format!(" (from message {right} of the right)"),
        (None, None) => String::new(),
    }
}
