//! One turn of two sessions, row by row: what is the same on both sides stands there once, and changed words are marked.

use super::{in_words, text};
use serde_json::Value;

/// The longest text of one side.
const TEXT: usize = 4000;
/// How much of what is the same is shown on each side of a change, if the text is longer than that.
const AROUND: usize = 400;
/// What stands for what is left out.
const LEFT_OUT: &str = " […] ";

pub(super) struct Turn {
    pub number: i64,
    pub level: String,
    pub word: &'static str,
    pub sentences: Vec<String>,
    pub rows: Vec<Row>,
    /// Hashes, sizes, and what the tools returned.
    pub folded: Vec<Row>,
    /// Only one side has this turn: whether it is the left one.
    pub only_left: Option<bool>,
}

/// One thing that was said or done.
#[derive(Debug, PartialEq)]
pub(super) struct Row {
    pub name: String,
    pub left: Vec<Piece>,
    pub right: Vec<Piece>,
}

/// A piece of a text, and whether the other side has it too.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Piece {
    pub text: String,
    pub is_changed: bool,
}

impl Row {
    pub fn is_same(&self) -> bool {
        self.left == self.right && self.left.iter().all(|piece| !piece.is_changed)
    }

    /// What each side has as a whole.
    fn whole(name: impl Into<String>, left: &str, right: &str) -> Row {
        let is_changed = left != right;
        // A difference beyond the longest text has to be seen all the same: what is the same before it is left out.
        let is_long = [left, right].into_iter().any(|text| text.chars().count() > TEXT);
        let same = if is_changed && is_long { common(left, right) } else { 0 };
        let pieces = |text: &str| {
            let (before, rest) = text.split_at(same);
            let pieces = [
                Piece { text: shortened(before), is_changed: false },
                Piece { text: begun(rest, TEXT), is_changed },
            ];
            pieces.into_iter().filter(|piece| !piece.text.is_empty()).collect()
        };
        Row { name: name.into(), left: pieces(left), right: pieces(right) }
    }

    /// Texts that the API has compared word by word, or else as a whole.
    fn words(name: impl Into<String>, words: &Value, left: &str, right: &str) -> Row {
        let Some(words) = words.as_array().filter(|words| !words.is_empty()) else {
            return Row::whole(name, left, right);
        };
        let is_changed = words.iter().any(|one| one["of"] != "both");
        let of = |side: &str| {
            let mut room = TEXT;
            let mut pieces = Vec::new();
            for (at, one) in words.iter().enumerate() {
                let is_own = one["of"] == side;
                if !is_own && one["of"] != "both" {
                    continue;
                }
                let whole = text(&one["text"]);
                let shown = if is_changed && !is_own { shortened(&whole) } else { whole };
                if shown.chars().count() > room {
                    // The rest is left out, and with it what differs there.
                    let differs = words[at..].iter().any(|one| one["of"] != "both");
                    let beginning: String = shown.chars().take(room).collect();
                    if !beginning.is_empty() {
                        pieces.push(Piece { text: beginning, is_changed: is_own });
                    }
                    pieces.push(Piece { text: LEFT_OUT.to_owned(), is_changed: differs });
                    break;
                }
                room -= shown.chars().count();
                if !shown.is_empty() {
                    pieces.push(Piece { text: shown, is_changed: is_own });
                }
            }
            pieces
        };
        Row { name: name.into(), left: of("left"), right: of("right") }
    }

    fn is_empty(&self) -> bool {
        self.left.is_empty() && self.right.is_empty()
    }
}

/// How many bytes both texts begin with.
fn common(left: &str, right: &str) -> usize {
    let same = left.char_indices().zip(right.chars()).take_while(|((_, one), other)| one == other);
    same.last().map_or(0, |((at, char), _)| at + char.len_utf8())
}

/// The beginning of a text, which says so if there is more.
fn begun(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}{LEFT_OUT}", &text[..end]),
        None => text.to_owned(),
    }
}

/// A text that is the same on both sides, without its middle if it is long.
fn shortened(text: &str) -> String {
    let length = text.chars().count();
    if length <= 2 * AROUND + LEFT_OUT.len() {
        return text.to_owned();
    }
    let end: String = text.chars().skip(length - AROUND).collect();
    begun(text, AROUND) + &end
}

pub(super) fn turn(turn: &Value) -> Turn {
    let differences = turn["differences"].as_array().map_or(&[][..], Vec::as_slice);
    let level = text(&turn["level"]);
    let of = |part: &str| differences.iter().find(|one| one["part"] == part).unwrap_or(&Value::Null);
    let sides = |key: &str| (text(&turn["left"][key]), text(&turn["right"][key]));
    let calls = |side: &str| {
        let calls = turn[side]["calls"].as_array().map_or(&[][..], Vec::as_slice);
        calls.iter().map(text).collect::<Vec<_>>().join("\n")
    };
    let (input, says) = (sides("input"), sides("text"));
    // What was done stands before what was said.
    let mut rows = vec![
        Row::words("said to the model", &of("input")["words"], &input.0, &input.1),
        Row::whole("calls", &calls("left"), &calls("right")),
    ];
    let mut folded = Vec::new();
    for difference in differences {
        for (row, is_detail) in values(difference) {
            if is_detail { folded.push(row) } else { rows.push(row) }
        }
    }
    rows.push(Row::words("says", &of("text")["words"], &says.0, &says.1));
    rows.retain(|row| !row.is_empty());
    folded.retain(|row| !row.is_empty());
    let only_left = match (turn["left"].is_null(), turn["right"].is_null()) {
        (false, true) => Some(true),
        (true, false) => Some(false),
        _ => None,
    };
    Turn {
        number: turn["turn"].as_i64().unwrap_or_default(),
        word: in_words(&level),
        sentences: differences.iter().map(sentence).collect(),
        rows,
        folded,
        only_left,
        level,
    }
}

/// What each side has where the arguments of a call, the state, or a result differ, and whether that is folded away.
fn values(difference: &Value) -> Vec<(Row, bool)> {
    let name = &difference["name"];
    let of = match name["left"].as_str() {
        Some(_) => text(&name["left"]),
        None => text(&name["right"]),
    };
    if difference["part"] == "result" {
        return vec![(Row::words(format!("{of} returned"), &difference["words"], "", ""), true)];
    }
    let (of, places) = match (&difference["arguments"], &difference["changes"]) {
        (Value::Array(places), _) => (of, places),
        (_, Value::Array(places)) => ("state".to_owned(), places),
        _ => return Vec::new(),
    };
    let value = |place: &Value, side: &str| match text(&place[side]) {
        none if none.is_empty() => "-".to_owned(),
        some => some,
    };
    let row = |place: &Value| {
        let path = text(&place["path"]);
        let name = format!("{of}: {}", steps(&path));
        let is_detail = ["sha256", "bytes"].iter().any(|end| path.ends_with(end));
        (Row::words(name, &place["words"], &value(place, "left"), &value(place, "right")), is_detail)
    };
    places.iter().map(row).collect()
}

/// A JSON pointer as a person reads it: `/files/a~1b` is “files › a/b”.
fn steps(pointer: &str) -> String {
    let parts = pointer.split('/').skip(1).map(|part| part.replace("~1", "/").replace("~0", "~"));
    parts.collect::<Vec<_>>().join(" › ")
}

/// What a difference is about.
fn sentence(difference: &Value) -> String {
    let part = text(&difference["part"]);
    let name = match &difference["name"] {
        Value::Object(sides) if sides.get("left") == sides.get("right") => {
            sides.get("left").map(text).unwrap_or_default()
        }
        Value::Object(sides) => sides.values().map(text).collect::<Vec<_>>().join(" / "),
        name => text(name),
    };
    match name.as_str() {
        "" => part.replace('_', " "),
        name => format!("{}: {name}", part.replace('_', " ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Changed words are in brackets.
    fn shown(rows: &[Row]) -> Vec<(&str, String, String)> {
        let said = |pieces: &[Piece]| {
            let said = pieces.iter().map(|one| match one.is_changed {
                true => format!("[{}]", one.text),
                false => one.text.clone(),
            });
            said.collect::<String>()
        };
        rows.iter().map(|row| (row.name.as_str(), said(&row.left), said(&row.right))).collect()
    }

    fn row<'a>(name: &'a str, left: &str, right: &str) -> (&'a str, String, String) {
        (name, left.to_owned(), right.to_owned())
    }

    #[test]
    fn a_turn_shows_what_each_side_has_where_its_calls_and_its_state_differ() {
        let turn = turn(&json!({
            "turn": 1,
            "level": "tools",
            "left": {"calls": ["charge"], "input": "Pay five.", "text": "Paid."},
            "right": {"calls": ["charge"], "input": "Pay seven.", "text": "Paid."},
            "differences": [
                {"part": "call", "name": {"left": "charge", "right": "charge"},
                    "arguments": [{"path": "/cents", "left": 500, "right": 700}]},
                {"part": "state", "changes": [{"path": "/files/bill~1may", "left": true},
                    {"path": "/file/a/sha256", "left": "00", "right": "11"}]},
                {"part": "input", "words": [{"of": "both", "text": "Pay "}, {"of": "left", "text": "five"},
                    {"of": "right", "text": "seven"}, {"of": "both", "text": "."}]},
                {"part": "result", "name": {"left": "charge", "right": "charge"},
                    "words": [{"of": "left", "text": "5"}, {"of": "right", "text": "7"}]},
            ],
        }));
        let expected = [
            row("said to the model", "Pay [five].", "Pay [seven]."),
            row("calls", "charge", "charge"),
            row("charge: cents", "[500]", "[700]"),
            row("state: files › bill/may", "[true]", "[-]"),
            row("says", "Paid.", "Paid."),
        ];
        assert_eq!(shown(&turn.rows), expected);
        let same: Vec<bool> = turn.rows.iter().map(Row::is_same).collect();
        assert_eq!(same, [false, true, false, false, true]);
        let folded = [row("state: file › a › sha256", "[00]", "[11]"), row("charge returned", "[5]", "[7]")];
        assert_eq!(shown(&turn.folded), folded);
        assert_eq!(
            (turn.word, turn.sentences.join(", "), turn.only_left),
            ("other tool calls", "call: charge, state, input, result: charge".to_owned(), None)
        );
    }

    #[test]
    fn what_differs_after_a_long_text_is_shown() {
        let same = "word ".repeat(2000);
        let words = json!([{"of": "both", "text": same}, {"of": "left", "text": "five"}, {"of": "right", "text": "seven"}]);
        let (left, right) = (format!("{same}five"), format!("{same}seven"));
        for row in [Row::words("says", &words, &left, &right), Row::whole("says", &left, &right)] {
            assert!(!row.is_same());
            let [(_, left, right)] = <[_; 1]>::try_from(shown(&[row])).unwrap();
            assert!(left.ends_with("word [five]") && right.ends_with("word [seven]"), "{left}");
            assert!(left.contains("word  […] ") && left.chars().count() < 1000, "{left}");
        }
        // Of too many changes, it is said that there are more.
        let many = json!([{"of": "left", "text": same}, {"of": "right", "text": "x"}, {"of": "both", "text": "and"},
            {"of": "right", "text": "more"}]);
        let row = Row::words("says", &many, "", "");
        assert_eq!(row.left.last(), Some(&Piece { text: LEFT_OUT.to_owned(), is_changed: true }));
        let row = Row::whole("says", &same, &same);
        assert!(row.is_same() && row.left[0].text.ends_with(LEFT_OUT));
    }

    #[test]
    fn a_turn_of_one_side_has_nothing_on_the_other() {
        let turn = turn(&json!({"turn": 2, "level": "prose", "left": null,
            "right": {"calls": [], "input": "More?", "text": "No."},
            "differences": [{"part": "turn", "on": "right"}]}));
        assert_eq!(shown(&turn.rows), [row("said to the model", "", "[More?]"), row("says", "", "[No.]")]);
        assert_eq!(turn.only_left, Some(false));
    }
}
