//! Text in columns: spans of one tone each, laid out in lines no wider than the column.

use super::super::output::Tone;
use super::super::printable::printable_lines;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};
use wakeful_workflow::diff::{Piece, WhichSide};

/// A part of a line in one tone. Its text is already escaped.
#[derive(Clone)]
pub(super) struct Span {
    pub tone: Tone,
    pub text: String,
}

pub(super) fn span(tone: Tone, text: &str) -> Span {
    Span { tone, text: printable_lines(text) }
}

/// Marks a piece `[-left-]` or `{+right+}`, so that it also reads without colours.
pub(super) fn marked(piece: &Piece) -> Span {
    match piece.of {
        WhichSide::Both => span(Tone::Plain, &piece.text),
        WhichSide::Left => span(Tone::Bad, &format!("[-{}-]", piece.text)),
        WhichSide::Right => span(Tone::Good, &format!("{{+{}+}}", piece.text)),
    }
}

/// Lays out `spans` in lines of at most `width` columns, broken at spaces where possible.
pub(super) fn lay(spans: &[Span], width: usize) -> Vec<Vec<Span>> {
    let mut lines = vec![Vec::new()];
    let mut taken = 0;
    let put = |lines: &mut Vec<Vec<Span>>, tone: Tone, text: &str, fresh: bool| {
        if fresh {
            lines.push(Vec::new());
        }
        let line = lines.last_mut().expect("there is always a line");
        match line.last_mut() {
            Some(Span { tone: before, text: so_far }) if *before == tone => so_far.push_str(text),
            Some(_) | None => line.push(Span { tone, text: text.to_owned() }),
        }
    };
    for span in spans {
        for (at, line) in span.text.split('\n').enumerate() {
            if at > 0 {
                put(&mut lines, span.tone, "", true);
                taken = 0;
            }
            for word in line.split_inclusive(' ') {
                let fits = taken + word.trim_end().width() <= width;
                let mut rest = word;
                let mut fresh = !fits && taken > 0;
                if fresh {
                    taken = 0;
                }
                // A word that is longer than a line is cut.
                while rest.trim_end().width() > width {
                    let mut columns = 0;
                    let end = rest
                        .char_indices()
                        .find(|(_, c)| {
                            columns += c.width().unwrap_or(0);
                            columns > width
                        })
                        .map_or(rest.len(), |(at, c)| if at == 0 { c.len_utf8() } else { at });
                    put(&mut lines, span.tone, &rest[..end], fresh);
                    rest = &rest[end..];
                    fresh = true;
                    taken = 0;
                }
                if !rest.is_empty() {
                    put(&mut lines, span.tone, rest, fresh);
                    taken += rest.width();
                }
            }
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn laid(text: &str, width: usize) -> Vec<String> {
        lay(&[span(Tone::Plain, text)], width)
            .into_iter()
            .map(|line| line.into_iter().map(|span| span.text).collect::<String>().trim_end().to_owned())
            .collect()
    }

    #[test]
    fn lines_are_broken_at_blanks_and_a_long_word_is_cut() {
        assert_eq!(laid("to be or not", 5), ["to be", "or", "not"]);
        assert_eq!(laid("a unbreakable b", 6), ["a", "unbrea", "kable", "b"]);
        assert_eq!(laid("one\n\ntwo", 9), ["one", "", "two"]);
        // Two columns each.
        assert_eq!(laid("漢字漢字", 4), ["漢字", "漢字"]);
        assert_eq!(laid("漢字", 1), ["漢", "字"]);
    }
}
