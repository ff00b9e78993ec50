//! Compares two texts word by word.

use super::align::matches;
use super::ids::Ids;
use serde::Serialize;
use std::borrow::Cow;
use std::ops::Range;

/// Texts of more words are compared by lines, and texts of more lines as wholes.
const WORDS: usize = 4_000;
/// Number of word comparisons that one report may take, about half a second. After that, texts are compared
/// as wholes.
const BUDGET: usize = 60_000_000;

/// The side to which something belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum WhichSide {
    Both,
    Left,
    Right,
}

impl WhichSide {
    /// The side's name in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            WhichSide::Both => "both sides",
            WhichSide::Left => "left",
            WhichSide::Right => "right",
        }
    }
}

/// A piece of a text, and its side. The pieces of one side plus those of both sides, in order, are that
/// side's text. If the sides differ only in the spelling of one of Wakeful's ids, the piece has the left
/// spelling.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Piece {
    pub of: WhichSide,
    pub text: String,
}

/// Number of comparisons that are left.
pub(super) struct Budget(usize);

impl Default for Budget {
    fn default() -> Budget {
        Budget(BUDGET)
    }
}

impl Budget {
    /// Splits `left` and `right` into pieces. Empty if they are equal.
    pub fn words(&mut self, left: (&str, &Ids<'_>), right: (&str, &Ids<'_>)) -> Vec<Piece> {
        if left.1.text(left.0) == right.1.text(right.0) {
            return Vec::new();
        }
        for cut in [by_words, by_lines] {
            let (one, other) = (cut(left.0), cut(right.0));
            if one.len().max(other.len()) <= WORDS && self.0 > 0 {
                let (pieces, compared) = pieces(&one, left.1, &other, right.1);
                self.0 = self.0.saturating_sub(compared);
                return pieces;
            }
        }
        let whole = [(WhichSide::Left, left.0), (WhichSide::Right, right.0)];
        let said = whole.into_iter().filter(|(_, text)| !text.is_empty());
        said.map(|(of, text)| Piece { of, text: text.to_owned() }).collect()
    }
}

/// The pieces, and about how many comparisons it took to find them.
fn pieces(one: &[&str], ids: &Ids<'_>, other: &[&str], other_ids: &Ids<'_>) -> (Vec<Piece>, usize) {
    let keys: Vec<Cow<'_, str>> = one.iter().map(|word| ids.text(word)).collect();
    let other_keys: Vec<Cow<'_, str>> = other.iter().map(|word| other_ids.text(word)).collect();
    let mut pieces = Vec::new();
    let mut done = (0, 0);
    let (mut changed, mut beside) = (0..0, 0..0);
    let found = matches(&keys, &other_keys);
    let both = one.len() + other.len();
    let same: usize = found.iter().map(|(_, _, len)| len).sum();
    // The search costs about the number of words times the number of words that differ.
    let compared = both * (both - 2 * same + 1) / 2;
    for (at, at_other, len) in found.into_iter().chain([(one.len(), other.len(), 0)]) {
        changed = join(changed, done.0..at);
        beside = join(beside, done.1..at_other);
        done = (at + len, at_other + len);
        let last = done == (one.len(), other.len());
        // White space alone between two changes is noise. It joins them to one change.
        let noise = one[at..at + len].iter().all(|word| word.trim().is_empty());
        if noise && !last && !(changed.is_empty() && beside.is_empty()) {
            changed = join(changed, at..at + len);
            beside = join(beside, at_other..at_other + len);
            continue;
        }
        push(&mut pieces, WhichSide::Left, &one[changed.clone()]);
        push(&mut pieces, WhichSide::Right, &other[beside.clone()]);
        push(&mut pieces, WhichSide::Both, &one[at..at + len]);
        (changed, beside) = (done.0..done.0, done.1..done.1);
    }
    (pieces, compared)
}

fn join(before: Range<usize>, after: Range<usize>) -> Range<usize> {
    if before.is_empty() { after } else { before.start..after.end }
}

fn push(pieces: &mut Vec<Piece>, of: WhichSide, words: &[&str]) {
    if !words.is_empty() {
        pieces.push(Piece { of, text: words.concat() });
    }
}

/// Splits a text into words, white space, and every other character by itself. One of Wakeful's ids is one
/// word.
fn by_words(text: &str) -> Vec<&str> {
    #[derive(PartialEq)]
    enum Kind {
        Word,
        Blank,
        Mark,
    }
    let kind = |c: char| match c {
        c if c.is_alphanumeric() || c == '_' || c == '-' => Kind::Word,
        c if c.is_whitespace() => Kind::Blank,
        _ => Kind::Mark,
    };
    let mut words = Vec::new();
    let mut start = 0;
    let mut before = None;
    for (at, c) in text.char_indices() {
        let now = kind(c);
        if before.as_ref().is_some_and(|before| *before != now || now == Kind::Mark) {
            words.push(&text[start..at]);
            start = at;
        }
        before = Some(now);
    }
    if start < text.len() {
        words.push(&text[start..]);
    }
    words
}

fn by_lines(text: &str) -> Vec<&str> {
    text.split_inclusive('\n').collect()
}
