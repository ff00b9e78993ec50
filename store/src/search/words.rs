//! The words of a text, as the search keeps them, and a query for them.
//!
//! A word is a run of letters and digits, in lower case. Both sides are taken apart here, by the same rule: so a word is
//! found whatever stands around it, and whatever locale the database has. To let Postgres take a text apart (`to_tsvector`)
//! cost 4.4 ms for 24 KB, more than the steps that wrote it; this costs the database nothing.

use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgArgumentBuffer, PgHasArrayType, PgTypeInfo};
use sqlx::{Encode, Postgres, Type};
use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Write as _;

/// Postgres takes longer words for an error. Nobody looks for them.
const WORD_BYTES: usize = 2046;
/// Positions that Postgres keeps of one word.
const POSITIONS: usize = 255;
/// The last position that Postgres can tell from others. Phrases are not found behind it.
const LAST_POSITION: u16 = 16383;
/// Postgres allows a tsvector of 1 MiB. What follows is not found by its words.
const VECTOR_BYTES: usize = 1_000_000;

/// The words of a text and where they stand: a `tsvector`, in the binary form that `tsvectorrecv` of Postgres reads.
#[derive(Debug)]
pub(super) struct WordVector(Vec<u8>);

impl WordVector {
    pub fn of(text: &str) -> WordVector {
        let text = lower(text);
        let mut places: HashMap<&str, Vec<u16>> = HashMap::new();
        let mut bytes = 0;
        for (word, n) in split(&text).zip(1usize..) {
            if word.len() > WORD_BYTES {
                continue;
            }
            let position = u16::try_from(n).unwrap_or(LAST_POSITION).min(LAST_POSITION);
            let of_word = places.entry(word).or_default();
            if of_word.is_empty() {
                // Its count of positions, and what aligns it.
                bytes += word.len() + 4;
            }
            if of_word.len() < POSITIONS && of_word.last() != Some(&position) {
                of_word.push(position);
                bytes += size_of::<u16>();
            }
            if bytes > VECTOR_BYTES {
                break;
            }
        }
        let mut places: Vec<_> = places.into_iter().collect();
        // By their bytes, as Postgres sorts them. Others it would have to sort itself.
        places.sort_unstable_by_key(|(word, _)| *word);
        let mut vector = Vec::with_capacity(bytes + places.len() + 4);
        vector.extend((places.len() as u32).to_be_bytes());
        for (word, positions) in places {
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

/// The `tsquery` of what somebody typed, as text: words that must all be there, `"words in a row"`, `-without`, and `or` between two
/// alternatives. What stands together, such as an address, is looked for in a row. Without a word it is empty, and finds nothing.
pub(super) fn query(typed: &str) -> String {
    let typed = lower(typed);
    let mut query = String::new();
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
        let words: Vec<&str> = split(term).filter(|word| word.len() <= WORD_BYTES).collect();
        if words.is_empty() {
            continue;
        }
        let not = if is_not { "!" } else { "" };
        let _ = write!(query, "{joined_by}{not}('{}')", words.join("' <-> '"));
        joined_by = " & ";
    }
    query
}

fn lower(text: &str) -> Cow<'_, str> {
    if text.is_ascii() { text.to_ascii_lowercase().into() } else { text.to_lowercase().into() }
}

fn split(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty())
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

    #[test]
    fn a_word_is_a_run_of_letters_and_digits_in_lower_case() {
        let vector =
            WordVector::of("Two at the L\u{f6}wen, TWO: ann@example.com\u{1}(4711)_b \u{17d}lu\u{165}");
        let words = read(&vector);
        let expected: [(&str, &[u16]); 10] = [
            ("4711", &[9]),
            ("ann", &[6]),
            ("at", &[2]),
            ("b", &[10]),
            ("com", &[8]),
            ("example", &[7]),
            ("l\u{f6}wen", &[4]),
            ("the", &[3]),
            ("two", &[1, 5]),
            ("\u{17e}lu\u{165}", &[11]),
        ];
        let expected: Vec<_> = expected.map(|(word, at)| (word.to_owned(), at.to_vec())).into();
        assert_eq!(words, expected);
        assert_eq!(read(&WordVector::of(" - !")), []);
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
        assert!((VECTOR_BYTES..1 << 20).contains(&stored), "{stored}");
    }

    #[test]
    fn a_query_has_words_phrases_alternatives_and_what_must_not_be_there() {
        for (typed, expected) in [
            ("TABLE  l\u{f6}wen", "('table') & ('l\u{f6}wen')"),
            ("\"for Two\" -room", "('for' <-> 'two') & !('room')"),
            ("4711 OR l\u{f6}wen", "('4711') | ('l\u{f6}wen')"),
            ("a b or c -\"d e\"", "('a') & ('b') | ('c') & !('d' <-> 'e')"),
            ("ann@example.com", "('ann' <-> 'example' <-> 'com')"),
            ("say\"for two\"", "('say') & ('for' <-> 'two')"),
            ("\"not closed", "('not' <-> 'closed')"),
            // Between two words alone it is no word.
            ("or a or", "('or') & ('a') & ('or')"),
            ("a or or b", "('a') | ('or') & ('b')"),
            ("\"or\" a", "('or') & ('a')"),
            ("o'brien's \\ & | ! <-> :* -", "('o' <-> 'brien' <-> 's')"),
            ("- -", ""),
            ("", ""),
        ] {
            assert_eq!(query(typed), expected, "{typed}");
        }
    }
}
