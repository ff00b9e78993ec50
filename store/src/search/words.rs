//! The words of a text, as the search keeps them, and a query for them.
//!
//! A word is a run of letters and digits, in lower case. What stands together (an address, a path, a price) is also kept as a
//! whole. Both sides are taken apart here, by the same rule: so a word is found whatever stands around it, and whatever locale the
//! database has. To let Postgres take a text apart (`to_tsvector`) cost 4.4 ms for 24 KB, more than the steps that wrote it.
//! It kept addresses, hosts and decimals as a whole too, so what it took apart is still found by them; a test says by what else.

use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgArgumentBuffer, PgHasArrayType, PgTypeInfo};
use sqlx::{Encode, Postgres, Type};
use std::borrow::Cow;
use std::collections::HashMap;
use unicode_normalization::UnicodeNormalization as _;
use unicode_normalization::char::is_combining_mark;

/// Postgres takes longer words for an error. Nobody looks for them.
const WORD_BYTES: usize = 2046;
/// What stands together and is longer is found by its words only.
const WHOLE_BYTES: usize = 200;
/// Positions that Postgres keeps of one word.
const POSITIONS: usize = 255;
/// The last position that Postgres can tell from others. Words in a row are not found behind it.
const LAST_POSITION: u16 = 16383;
/// Postgres allows a tsvector of 1 MiB. What follows is not found by its words.
const VECTOR_BYTES: usize = 1_000_000;

const SOFT_HYPHEN: char = '\u{ad}';
/// What a capital I with a dot leaves of its dot in lower case.
const DOT_ABOVE: char = '\u{307}';

/// The words of a text and where they stand: a `tsvector`, in the binary form that `tsvectorrecv` of Postgres reads.
#[derive(Debug)]
pub(super) struct WordVector(Vec<u8>);

impl WordVector {
    pub fn of(text: &str) -> WordVector {
        let text = normal(text);
        let mut places = Places::default();
        let mut position = 0;
        for piece in text.split_whitespace() {
            let first = position + 1;
            for word in words(piece) {
                position += 1;
                places.add(word, position);
            }
            if position > first
                && let Some(whole) = whole(piece)
            {
                places.add(whole, first);
            }
        }
        places.vector()
    }
}

/// Where each word stands.
#[derive(Default)]
struct Places<'t> {
    by_word: HashMap<&'t str, Vec<u16>>,
    /// What Postgres stores of them, about.
    bytes: usize,
}

impl<'t> Places<'t> {
    fn add(&mut self, word: &'t str, position: usize) {
        // With its count of positions, and what aligns it.
        let bytes = word.len() + 6;
        if word.len() > WORD_BYTES || self.bytes + bytes > VECTOR_BYTES {
            return;
        }
        let position = u16::try_from(position).unwrap_or(LAST_POSITION).min(LAST_POSITION);
        let places = self.by_word.entry(word).or_default();
        if places.len() < POSITIONS && places.last() != Some(&position) {
            self.bytes += if places.is_empty() { bytes } else { size_of::<u16>() };
            places.push(position);
        }
    }

    fn vector(self) -> WordVector {
        let mut words: Vec<_> = self.by_word.into_iter().collect();
        // By their bytes, as Postgres sorts them. Others it would have to sort itself.
        words.sort_unstable_by_key(|(word, _)| *word);
        let mut vector = Vec::with_capacity(self.bytes + words.len() + 4);
        vector.extend((words.len() as u32).to_be_bytes());
        for (word, positions) in words {
            vector.extend(word.as_bytes());
            vector.push(0);
            vector.extend((positions.len() as u16).to_be_bytes());
            vector.extend(positions.iter().flat_map(|position| position.to_be_bytes()));
        }
        WordVector(vector)
    }
}

impl Type<Postgres> for WordVector {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_name("tsvector")
    }
}

impl PgHasArrayType for WordVector {
    fn array_type_info() -> PgTypeInfo {
        PgTypeInfo::with_name("_tsvector")
    }
}

impl Encode<'_, Postgres> for WordVector {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        buffer.extend(&self.0);
        Ok(IsNull::No)
    }
}

/// What somebody looks for. Each text is a `tsquery`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Query {
    /// What a document of the session must match. Empty: nothing must be there.
    pub wanted: String,
    /// What no document of the session may match.
    pub unwanted: Vec<String>,
}

/// Reads what somebody typed: words that must all be there, `"words in a row"`, `-without`, and `or` between two alternatives. What
/// stands together is looked for as a whole, or in a row. Beside `or`, a `-without` is of one document only.
pub(super) fn query(typed: &str) -> Query {
    let typed = normal(typed);
    let has_or = typed.split_whitespace().any(|word| word == "or");
    let mut query = String::new();
    let mut unwanted = Vec::new();
    let mut joined_by = "";
    let mut rest = typed.trim_start();
    while !rest.is_empty() {
        let (is_not, term) = match rest.strip_prefix('-') {
            Some(term) => (true, term),
            None => (false, rest),
        };
        let (term, after) = match term.strip_prefix('"') {
            Some(phrase) => phrase.split_once('"').unwrap_or((phrase, "")),
            None => term.split_at(term.find(|c: char| c.is_whitespace() || c == '"').unwrap_or(term.len())),
        };
        let is_or = term == "or" && rest.starts_with("or");
        rest = after.trim_start();
        if is_or && !query.is_empty() && joined_by != " | " && !rest.is_empty() {
            joined_by = " | ";
            continue;
        }
        let Some(term) = of_term(term) else { continue };
        if is_not && !has_or {
            unwanted.push(term);
            continue;
        }
        query.push_str(joined_by);
        query.push_str(if is_not { "!" } else { "" });
        query.push_str(&term);
        joined_by = " & ";
    }
    Query { wanted: query, unwanted }
}

/// The query of one term.
fn of_term(term: &str) -> Option<String> {
    let words: Vec<&str> = words(term).filter(|word| word.len() <= WORD_BYTES).collect();
    let in_a_row = words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" <-> ");
    let is_one_piece = !term.contains(char::is_whitespace);
    match whole(term).filter(|_| is_one_piece && words.len() > 1) {
        // The parts of a price or a date are in many sessions, and an index does not know where they stand.
        Some(whole) if words.iter().all(|word| word.chars().all(char::is_numeric)) => {
            Some(format!("({})", quoted(whole)))
        }
        Some(whole) => Some(format!("({} | {in_a_row})", quoted(whole))),
        None => (!words.is_empty()).then(|| format!("({in_a_row})")),
    }
}

/// As a tsquery quotes a word.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\\', "\\\\").replace('\'', "''"))
}

/// In lower case, composed, and without what is not seen.
fn normal(text: &str) -> Cow<'_, str> {
    if text.is_ascii() {
        return text.to_ascii_lowercase().into();
    }
    let mut normal = String::with_capacity(text.len());
    for c in text.to_lowercase().nfc() {
        if c != SOFT_HYPHEN && (c != DOT_ABOVE || !normal.ends_with('i')) {
            normal.push(c);
        }
    }
    normal.into()
}

fn is_of_word(c: char) -> bool {
    c.is_alphanumeric() || is_combining_mark(c)
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !is_of_word(c)).filter(|word| !word.is_empty())
}

/// A piece of a text without what stands around it.
fn whole(piece: &str) -> Option<&str> {
    let whole = piece.trim_matches(|c: char| !is_of_word(c));
    (whole.len() <= WHOLE_BYTES && !whole.contains('\0')).then_some(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Its words and their positions, read from the binary form.
    fn read(vector: &WordVector) -> Vec<(String, Vec<u16>)> {
        let two = |at: usize| u16::from_be_bytes([vector.0[at], vector.0[at + 1]]);
        let count = u32::from_be_bytes(vector.0[..4].try_into().unwrap());
        let mut at = 4;
        let words = (0..count).map(|_| {
            let end = at + vector.0[at..].iter().position(|byte| *byte == 0).unwrap();
            let word = String::from_utf8(vector.0[at..end].to_vec()).unwrap();
            let positions = usize::from(two(end + 1));
            at = end + 3 + positions * 2;
            (word, (0..positions).map(|n| two(end + 3 + n * 2)).collect())
        });
        words.collect()
    }

    fn words_of(text: &str) -> Vec<String> {
        read(&WordVector::of(text)).into_iter().map(|(word, _)| word).collect()
    }

    #[test]
    fn a_word_is_a_run_of_letters_and_digits_and_what_stands_together_is_one_too() {
        let vector = WordVector::of("Two at the L\u{f6}wen, TWO: <ann@example.com>, \u{17d}lu\u{165}");
        let expected: [(&str, &[u16]); 9] = [
            ("ann", &[6]),
            ("ann@example.com", &[6]),
            ("at", &[2]),
            ("com", &[8]),
            ("example", &[7]),
            ("l\u{f6}wen", &[4]),
            ("the", &[3]),
            ("two", &[1, 5]),
            ("\u{17e}lu\u{165}", &[9]),
        ];
        let expected: Vec<_> = expected.map(|(word, at)| (word.to_owned(), at.to_vec())).into();
        assert_eq!(read(&vector), expected);
        assert_eq!(words_of(" - !\0"), [""; 0]);
        assert_eq!(words_of("a\0b"), ["a", "b"], "a word cannot have a zero");
    }

    #[test]
    fn a_word_is_the_same_however_it_is_written() {
        for (text, expected) in [
            ("L\u{f6}wen Lo\u{308}wen", "l\u{f6}wen"),
            ("\u{130}stanbul istanbul", "istanbul"),
            ("so\u{ad}fort sofort", "sofort"),
            ("\u{939}\u{93f}\u{928}\u{94d}\u{926}\u{940}", "\u{939}\u{93f}\u{928}\u{94d}\u{926}\u{940}"),
        ] {
            assert_eq!(words_of(text), [expected]);
            assert!(text.split(' ').all(|word| query(word).wanted == format!("('{expected}')")), "{text}");
        }
    }

    #[test]
    fn a_vector_stays_within_the_bounds_of_postgres() {
        let long = format!("{} {}", "x".repeat(WORD_BYTES + 1), "a ".repeat(20_000));
        let words = read(&WordVector::of(&long));
        assert_eq!(words.len(), 1, "the long word is left out");
        assert_eq!(words[0].1.len(), POSITIONS);
        let many: String = (0..200_000).map(|n| format!("word{n} ")).collect();
        let words = read(&WordVector::of(&many));
        assert!(words.iter().all(|(_, at)| at.len() == 1 && at[0] <= LAST_POSITION));
        let stored: usize = words.iter().map(|(word, at)| word.len() + 4 + at.len() * 2).sum();
        assert!((VECTOR_BYTES - 20..=VECTOR_BYTES).contains(&stored), "{stored}");
        let piece = "a.".repeat(100_000);
        assert_eq!(words_of(&piece), ["a"], "one piece that has no end");
    }

    #[test]
    fn a_query_has_words_phrases_alternatives_and_what_must_not_be_there() {
        let cases: [(&str, &str, &[&str]); 15] = [
            ("TABLE  l\u{f6}wen", "('table') & ('l\u{f6}wen')", &[]),
            ("\"for Two\" -room -a", "('for' <-> 'two')", &["('room')", "('a')"]),
            ("4711 OR l\u{f6}wen", "('4711') | ('l\u{f6}wen')", &[]),
            ("a b or c -\"d e\"", "('a') & ('b') | ('c') & !('d' <-> 'e')", &[]),
            ("ann@example.com", "('ann@example.com' | 'ann' <-> 'example' <-> 'com')", &[]),
            ("-\"example.com\"", "", &["('example.com' | 'example' <-> 'com')"]),
            ("3.50 2026-11-25", "('3.50') & ('2026-11-25')", &[]),
            ("say\"for two\"", "('say') & ('for' <-> 'two')", &[]),
            ("\"not closed", "('not' <-> 'closed')", &[]),
            // Between two words alone it is no word.
            ("or a or", "('or') & ('a') & ('or')", &[]),
            ("a or or b", "('a') | ('or') & ('b')", &[]),
            ("\"or\" a", "('or') & ('a')", &[]),
            ("o'brien\\x \\ & | ! <-> :* -", "('o''brien\\\\x' | 'o' <-> 'brien' <-> 'x')", &[]),
            ("- -", "", &[]),
            ("", "", &[]),
        ];
        for (typed, wanted, unwanted) in cases {
            let unwanted: Vec<String> = unwanted.iter().map(|one| (*one).to_owned()).collect();
            let expected = Query { wanted: wanted.to_owned(), unwanted };
            assert_eq!(query(typed), expected, "{typed}");
        }
    }
}
