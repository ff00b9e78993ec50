//! A journal as lines of JSON, as `wakeful session tail --after 0 -o jsonl` or another program writes it.
//!
//! A line is `{"seq", "ts", "type", "run_id", "step_number", "payload"}`. `entry_type` and `data` are
//! accepted for `type` and `payload`. If `seq` is missing, the line's number takes its place. States and
//! values must be in their lines, because there is no database that a pointer could point into.

use super::Journal;
use crate::{Error, Result};
use serde_json::Value;
use wakeful_workflow::recover::{Checkpoint, Entry};

/// A journal read from lines. It holds a single journal and ignores the id.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lines {
    entries: Vec<Line>,
    /// Warnings for the reader: an incomplete last line, missing entries.
    pub notes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq)]
struct Line {
    number: usize,
    seq: i64,
    kind: String,
    payload: Value,
}

/// A line that is not a journal entry, by its number from 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {number}: {reason}")]
pub struct LinesError {
    pub number: usize,
    pub reason: String,
}

impl Lines {
    /// Reads a whole journal. Skips an incomplete last line (a crash while appending) and adds a note.
    ///
    /// # Errors
    /// [`LinesError`] for any other line that is not an entry, or whose number is not above the one before.
    pub fn read(bytes: &[u8]) -> std::result::Result<Lines, LinesError> {
        let mut lines = Lines::default();
        for (index, text) in bytes.split_inclusive(|byte| *byte == b'\n').enumerate() {
            let number = index + 1;
            if text.trim_ascii().is_empty() {
                continue;
            }
            let before = lines.entries.last().map(|line| line.seq);
            match entry(number, text, before) {
                Ok(line) => lines.push(line, before),
                // Only the last line can lack its newline.
                Err(reason) if !text.ends_with(b"\n") => {
                    lines.notes.push(format!("line {number} was not finished and is left out ({reason})"));
                }
                Err(reason) => return Err(LinesError { number, reason }),
            }
        }
        Ok(lines)
    }

    fn push(&mut self, line: Line, before: Option<i64>) {
        let Line { number, seq, kind, .. } = &line;
        match before {
            // A checkpoint contains everything before it, so a gap before it does no harm.
            _ if kind == "checkpoint" => self.notes.clear(),
            None if *seq > 1 => self.notes.push(format!(
                "the journal begins with entry {seq} and has no checkpoint before: what came earlier is not recovered"
            )),
            Some(before) if *seq > before + 1 => {
                self.notes.push(format!("line {number}: entry {seq} follows entry {before}: some are missing"));
            }
            Some(_) | None => {}
        }
        self.entries.push(line);
    }
}

fn entry(number: usize, text: &[u8], before: Option<i64>) -> std::result::Result<Line, String> {
    let value: Value = serde_json::from_slice(text).map_err(|error| format!("no JSON: {error}"))?;
    let either = |name: &str, other: &str| value.get(name).or_else(|| value.get(other));
    let kind = either("type", "entry_type").and_then(Value::as_str).ok_or("it has no type")?;
    let payload = either("payload", "data").filter(|payload| payload.is_object());
    let payload = payload.ok_or("it has no payload")?;
    let seq = match value.get("seq") {
        Some(seq) => seq.as_i64().ok_or("its seq is no number")?,
        None => before.unwrap_or(0) + 1,
    };
    if let Some(before) = before.filter(|before| *before >= seq) {
        return Err(format!("its seq {seq} is not above {before}, that of the entry before"));
    }
    Ok(Line { number, seq, kind: kind.to_owned(), payload: payload.clone() })
}

impl Line {
    fn corrupt(&self, error: impl std::fmt::Display) -> Error {
        Error::corrupt("journal", LinesError { number: self.number, reason: error.to_string() })
    }
}

impl Journal for Lines {
    async fn last_checkpoint(&self, _id: &str) -> Result<Option<Checkpoint>> {
        let newest = self.entries.iter().rev().find(|line| line.kind == "checkpoint");
        let read =
            |line: &Line| Checkpoint::read(line.seq, &line.payload).map_err(|error| line.corrupt(error));
        newest.map(read).transpose()
    }

    async fn entries_after(&self, _id: &str, seq: i64) -> Result<Vec<Entry>> {
        let newer = self.entries.iter().filter(|line| line.seq > seq);
        newer
            .map(|line| Entry::read(&line.kind, &line.payload).map_err(|error| line.corrupt(error)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(text: &str) -> Vec<String> {
        Lines::read(text.as_bytes()).unwrap().notes
    }

    fn refused(text: &str) -> String {
        Lines::read(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_line_that_was_not_finished_is_left_out_and_noted() {
        let whole = "{\"seq\":1,\"type\":\"x\",\"payload\":{}}\n";
        for torn in ["{\"seq\":2,\"type\":\"x\",\"pay", "{\"seq\":2}", "12", "\u{fffd}"] {
            let read = Lines::read(format!("{whole}{torn}").as_bytes()).unwrap();
            assert_eq!(read.entries.len(), 1);
            assert!(read.notes[0].starts_with("line 2 was not finished"), "{:?}", read.notes);
        }
        let unterminated = whole.trim_end();
        assert!(notes(unterminated).is_empty(), "it only lacks its newline");
    }

    #[test]
    fn any_other_bad_line_is_refused_by_its_number() {
        let whole = "{\"seq\":4,\"type\":\"checkpoint\",\"payload\":{}}\n";
        assert!(refused(&format!("{whole}\nnonsense\n{whole}")).starts_with("line 3: no JSON"));
        assert_eq!(refused(&format!("{whole}{{}}\n")), "line 2: it has no type");
        assert_eq!(refused(&format!("{whole}{{\"type\":\"x\"}}\n")), "line 2: it has no payload");
        assert_eq!(
            refused(&format!("{whole}{whole}")),
            "line 2: its seq 4 is not above 4, that of the entry before"
        );
        assert_eq!(
            refused("{\"seq\":\"1\",\"type\":\"x\",\"payload\":{}}\n"),
            "line 1: its seq is no number"
        );
    }

    #[test]
    fn what_is_missing_is_noted_unless_a_checkpoint_says_it() {
        let line = |seq: i64, kind: &str| format!("{{\"seq\":{seq},\"type\":\"{kind}\",\"payload\":{{}}}}\n");
        assert!(notes(&line(7, "x"))[0].starts_with("the journal begins with entry 7"));
        assert!(notes(&line(7, "checkpoint")).is_empty());
        let gap = [line(1, "x"), line(3, "x")].concat();
        assert_eq!(notes(&gap), ["line 2: entry 3 follows entry 1: some are missing"]);
        assert!(notes(&[gap, line(9, "checkpoint"), line(10, "x")].concat()).is_empty());
    }
}
