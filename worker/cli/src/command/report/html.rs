//! The report as one HTML page without scripts or external resources, for light and dark, wide and narrow
//! screens. The template escapes every text, and control and direction characters are shown as escapes.

use super::super::output::dollars;
use super::super::printable::printable_lines;
use super::{Sums, TOTALS, TotalsLine, change, range, shorten_middle, sums, time, value};
use askama::Template;
use wakeful_workflow::diff::{
    Level, Part, Piece, Report, RequestMatch, Subject, TurnDiff, TurnView, ValueDifference, WhichSide,
};

/// Maximum number of characters shown at each end of an unchanged text, and at the start of a changed one.
const CONTEXT: usize = 400;
const CHANGED: usize = 20_000;
/// Limits that keep the page small enough for a browser: turns on the map at the top, turns in a list of
/// equal ones, and turns shown in full.
const MAPPED: usize = 2_000;
const LISTED: usize = 200;
const SHOWN: usize = 1_000;

/// Renders `report` as one HTML page.
///
/// # Errors
/// None in practice: the template writes into memory.
pub(super) fn of(report: &Report) -> anyhow::Result<String> {
    let page = Page {
        title: safe(&format!("{} | {}", report.left.session_id, report.right.session_id)),
        verdict: report.verdict.as_str(),
        equal: report.verdict == Level::Equal,
        sides: [
            side("Left", &report.left, report.totals.left.turns),
            side("Right", &report.right, report.totals.right.turns),
        ],
        firsts: firsts(report),
        map: report.turns.iter().take(MAPPED).map(mapped).collect(),
        unmapped: report.turns.len().saturating_sub(MAPPED),
        setup: report.setup.iter().map(|one| words(&one.what.replace('_', " "), &one.words)).collect(),
        blocks: blocks(&report.turns),
        unshown: report.turns.iter().filter(|turn| turn.level > Level::Equal).count().saturating_sub(SHOWN),
        state: report.state.iter().map(changed).collect(),
        tables: sums(report).into_iter().map(table).collect(),
        requests: format!(
            "{} asked with the same bytes, {} with others, {} not known",
            report.requests.equal, report.requests.differ, report.requests.unknown
        ),
    };
    Ok(page.render()?)
}

#[derive(Template)]
#[template(path = "diff.html")]
struct Page {
    title: String,
    verdict: &'static str,
    equal: bool,
    sides: [SideView; 2],
    firsts: Vec<First>,
    map: Vec<Mapped>,
    unmapped: usize,
    setup: Vec<Texts>,
    blocks: Vec<Block>,
    /// Number of turns that differ but are not shown.
    unshown: usize,
    state: Vec<Texts>,
    tables: Vec<TotalsView>,
    requests: String,
}

struct SideView {
    name: &'static str,
    session_id: String,
    about: Vec<(&'static str, String)>,
}

struct First {
    what: &'static str,
    turn: usize,
    sentence: String,
}

/// A turn on the map: its number, and its level as a word and as a sign.
struct Mapped {
    turn: usize,
    level: &'static str,
    sign: &'static str,
    other_bytes: bool,
}

enum Block {
    Equal { name: String, turns: Vec<EqualTurn>, unlisted: usize },
    Turn(TurnBlock),
}

struct EqualTurn {
    turn: usize,
    said: String,
    other_bytes: bool,
}

struct TurnBlock {
    turn: usize,
    level: &'static str,
    sign: &'static str,
    request: &'static str,
    sides: [Option<TurnSide>; 2],
    parts: Vec<PartView>,
    unlisted: usize,
}

struct TurnSide {
    messages: String,
    took: String,
}

struct PartView {
    level: &'static str,
    sentence: String,
    texts: Vec<Texts>,
}

/// Two texts side by side.
struct Texts {
    name: String,
    left: Vec<Run>,
    right: Vec<Run>,
}

struct Run {
    changed: bool,
    text: String,
}

/// A table of totals.
struct TotalsView {
    title: String,
    has_change: bool,
    lines: Vec<Total>,
}

struct Total {
    name: &'static str,
    left: String,
    right: String,
    change: String,
    /// Length of the bars, in percent of the longer one.
    left_bar: i64,
    right_bar: i64,
}

fn side(name: &'static str, one: &Subject, turns: i64) -> SideView {
    SideView {
        name,
        session_id: safe(&one.session_id),
        about: vec![
            ("agent", safe(&one.agent)),
            ("model", safe(&one.model)),
            ("status", safe(&one.status)),
            ("messages", one.messages.to_string()),
            ("turns", turns.to_string()),
        ],
    }
}

fn firsts(report: &Report) -> Vec<First> {
    let mut firsts = Vec::new();
    for (what, divergence) in [
        ("First divergence", &report.first_divergence),
        ("First other tool call", &report.first_tool_divergence),
    ] {
        if let Some(divergence) = divergence {
            firsts.push(First { what, turn: divergence.turn, sentence: safe(&divergence.what) });
        }
    }
    firsts.dedup_by_key(|first| first.turn);
    firsts
}

fn sign(level: Level) -> &'static str {
    match level {
        Level::Equal => "=",
        Level::Prose => "~",
        Level::State => "◆",
        Level::Tools => "≠",
    }
}

fn mapped(turn: &TurnDiff) -> Mapped {
    Mapped {
        turn: turn.turn,
        level: turn.level.as_str(),
        sign: sign(turn.level),
        other_bytes: turn.request == RequestMatch::Differs,
    }
}

fn blocks(turns: &[TurnDiff]) -> Vec<Block> {
    let mut blocks = Vec::new();
    let (mut at, mut shown) = (0, 0);
    while at < turns.len() {
        let equal = turns[at..].iter().take_while(|turn| turn.level == Level::Equal).count();
        if equal > 0 {
            let same = &turns[at..at + equal];
            let name = if equal == 1 { "Turn" } else { "Turns" };
            blocks.push(Block::Equal {
                name: format!("{name} {}", range(same[0].turn as i64, same[equal - 1].turn as i64)),
                turns: same.iter().take(LISTED).map(equal_turn).collect(),
                unlisted: equal.saturating_sub(LISTED),
            });
            at += equal;
        } else {
            if shown < SHOWN {
                blocks.push(Block::Turn(turn(&turns[at])));
            }
            shown += 1;
            at += 1;
        }
    }
    blocks
}

fn equal_turn(turn: &TurnDiff) -> EqualTurn {
    let said = turn.left.as_ref().map_or_else(String::new, |view| {
        let parts = [view.input.clone(), view.calls.join(", "), view.text.clone()];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" → ")
    });
    EqualTurn { turn: turn.turn, said: safe(&said), other_bytes: turn.request == RequestMatch::Differs }
}

fn turn(turn: &TurnDiff) -> TurnBlock {
    let side = |name: &str, view: &Option<TurnView>| {
        view.as_ref().map(|view| TurnSide {
            messages: format!("{name} messages {}", range(view.first_message, view.last_message)),
            took: view.answer.as_ref().map_or_else(String::new, |answer| {
                let usage = &answer.usage;
                format!(
                    "{} in, {} out, {}, {}",
                    usage.input_tokens,
                    usage.output_tokens,
                    dollars(usage.cost_micros),
                    answer.time_ms.map_or_else(|| "?".to_owned(), time)
                )
            }),
        })
    };
    TurnBlock {
        turn: turn.turn,
        level: turn.level.as_str(),
        sign: sign(turn.level),
        request: match turn.request {
            RequestMatch::Equal => "asked with the same bytes",
            RequestMatch::Differs => "asked with other bytes",
            RequestMatch::Unknown => "",
        },
        sides: [side("left", &turn.left), side("right", &turn.right)],
        parts: turn
            .differences
            .iter()
            .map(|difference| PartView {
                level: difference.level.as_str(),
                sentence: safe(&difference.part.sentence()),
                texts: texts(&difference.part, turn),
            })
            .collect(),
        unlisted: turn.unlisted,
    }
}

fn texts(part: &Part, turn: &TurnDiff) -> Vec<Texts> {
    match part {
        Part::Turn { on } => {
            let view = turn.left.as_ref().or(turn.right.as_ref());
            let said = view.map_or_else(Vec::new, |view| {
                vec![
                    ("said to the model", view.input.clone()),
                    ("calls", view.calls.join(", ")),
                    ("says", view.text.clone()),
                ]
            });
            said.into_iter()
                .filter(|(_, text)| !text.is_empty())
                .map(|(name, text)| words(name, &[Piece { of: *on, text }]))
                .collect()
        }
        Part::CallOnly { on, name, arguments } => {
            vec![words(name, &[Piece { of: *on, text: format!("{arguments:#}") }])]
        }
        Part::Call { arguments: changes, .. } | Part::State { changes } => {
            changes.iter().map(changed).collect()
        }
        Part::Result { words: pieces, details, .. } => {
            let content = (!pieces.is_empty()).then(|| words("", pieces));
            content.into_iter().chain(details.iter().map(changed)).collect()
        }
        Part::Input { words: pieces } | Part::Text { words: pieces } => vec![words("", pieces)],
        Part::FinishReason { .. } | Part::Shape { .. } => Vec::new(),
    }
}

fn changed(change: &ValueDifference) -> Texts {
    if !change.words.is_empty() {
        return words(&change.path, &change.words);
    }
    let left = Piece { of: WhichSide::Left, text: value(change.left.as_ref()) };
    let right = Piece { of: WhichSide::Right, text: value(change.right.as_ref()) };
    words(&change.path, &[left, right])
}

fn words(name: &str, pieces: &[Piece]) -> Texts {
    let of = |side: WhichSide| {
        let own = pieces.iter().filter(|piece| piece.of == WhichSide::Both || piece.of == side);
        own.map(|piece| {
            let most = if piece.of == WhichSide::Both { CONTEXT } else { CHANGED };
            Run {
                changed: piece.of != WhichSide::Both,
                text: safe(&shorten_middle(&piece.text, most, CONTEXT)),
            }
        })
        .collect()
    };
    Texts { name: safe(name), left: of(WhichSide::Left), right: of(WhichSide::Right) }
}

fn table(sums: Sums<'_>) -> TotalsView {
    let row = |(name, of, show): TotalsLine| {
        let (left, right) = (of(&sums.of.left), of(&sums.of.right));
        let most = left.max(right).max(1) as f64;
        let bar = |of: i64| (of.max(0) as f64 * 100.0 / most).round() as i64;
        Total {
            name,
            left: show(left),
            right: show(right),
            change: change(left, right),
            left_bar: bar(left),
            right_bar: bar(right),
        }
    };
    let lines = TOTALS.into_iter().map(row).collect();
    TotalsView { title: sums.title, has_change: sums.has_change, lines }
}

fn safe(text: &str) -> String {
    printable_lines(text)
}

#[cfg(test)]
#[path = "html_tests.rs"]
mod tests;
