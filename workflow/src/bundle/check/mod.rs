//! The check: a state machine that reads a bundle line by line and refuses it at the first line that does not
//! fit.
//!
//! A bundle comes from outside, so the check trusts nothing in it. It verifies order, numbers, sums,
//! references and hashes before a row of the bundle is written. Its memory stays small for any input
//! (numbers, ids and hashes, never texts), and the number of rows of each kind is bounded.

mod blobs;
mod fits;
mod logs;
mod rows;
mod session;

use super::scan;
use super::{Counts, Header, Limits, Line, Section, SessionRow, Trailer, VERSION, blobs_of};
use blobs::Blobs;
use fits::CheckResult;
use logs::Logs;
use rows::Rows;
use sha2::{Digest, Sha256};

/// Why a bundle is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct Refused {
    /// From 1.
    pub line: u64,
    pub reason: String,
}

/// Maximum number of rows of each kind.
const MOST: Counts = Counts {
    seeds: 10_000,
    runs: 20_000,
    records: 200_000,
    steps: 100_000,
    events: 1_000_000,
    calls: 200_000,
    deliveries: 50_000,
    inbox: 100_000,
};

/// The kind of a checked line.
#[derive(Debug)]
pub enum Checked {
    Header,
    Row(Box<Line>),
    /// The last line: the bundle is complete and consistent.
    End,
}

/// Facts about a bundle that passed the check.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    pub header: Header,
    pub session: Box<SessionRow>,
    /// Ids of the inbox rows, in order. An import takes as many new ones from the database.
    pub inbox: Vec<i64>,
    pub blobs: i64,
    pub bytes: u64,
    pub sha256: String,
}

/// Checks one bundle. See the module.
pub struct Checker {
    limits: Limits,
    hash: Sha256,
    bytes: u64,
    lines: u64,
    stage: Stage,
}

enum Stage {
    Start,
    Open(Box<Open>),
    Done(Box<Summary>),
}

/// A bundle between its first and its last line.
struct Open {
    header: Header,
    section: Section,
    counts: Counts,
    session: Option<Box<SessionRow>>,
    rows: Rows,
    logs: Logs,
    blobs: Blobs,
}

impl Checker {
    /// A check that has read nothing yet.
    pub fn new(limits: Limits) -> Checker {
        Checker { limits, hash: Sha256::new(), bytes: 0, lines: 0, stage: Stage::Start }
    }

    /// Checks the next line, passed without its newline. Every line of a bundle ends with a newline, the last
    /// one too.
    ///
    /// # Errors
    /// [`Refused`] if the line does not fit. The check cannot continue then.
    pub fn line(&mut self, line: &[u8]) -> Result<Checked, Refused> {
        self.lines += 1;
        self.checked(line).map_err(|reason| self.refused(reason))
    }

    /// Ends the input.
    ///
    /// # Errors
    /// [`Refused`] if the last line is missing.
    pub fn finish(self) -> Result<Summary, Refused> {
        match self.stage {
            Stage::Done(summary) => Ok(*summary),
            Stage::Start => Err(Refused { line: 1, reason: "it is empty".to_owned() }),
            Stage::Open(_) => {
                let reason = "it ends before its last line, the checksum: it is not whole".to_owned();
                Err(Refused { line: self.lines, reason })
            }
        }
    }

    /// A refusal of the line that comes next.
    pub fn next_refused(&self, reason: impl Into<String>) -> Refused {
        Refused { line: self.lines + 1, reason: reason.into() }
    }

    /// A refusal of the current line.
    fn refused(&self, reason: impl Into<String>) -> Refused {
        Refused { line: self.lines, reason: reason.into() }
    }

    fn checked(&mut self, line: &[u8]) -> Result<Checked, String> {
        if line.len() > self.limits.line_bytes {
            return Err(format!("it is longer than {} bytes", self.limits.line_bytes));
        }
        let before = self.hash.clone();
        self.hash.update(line);
        self.hash.update(b"\n");
        self.bytes += line.len() as u64 + 1;
        if self.bytes > self.limits.bytes {
            return Err(format!("the bundle is larger than {} bytes", self.limits.bytes));
        }
        scan::bytes(line)?;
        match &mut self.stage {
            Stage::Start => {
                let header = header(line)?;
                self.stage = Stage::Open(Box::new(Open::new(header)));
                Ok(Checked::Header)
            }
            Stage::Open(open) if line.starts_with(b"{\"sha256\"") => {
                let trailer: Trailer = read(line, "checksum")?;
                let sha256 = hex::encode(before.finalize());
                if trailer.sha256 != sha256 {
                    return Err(format!(
                        "the checksum does not fit: it says {}, the lines give {sha256}",
                        trailer.sha256
                    ));
                }
                let summary = open.close(self.bytes, sha256)?;
                self.stage = Stage::Done(Box::new(summary));
                Ok(Checked::End)
            }
            Stage::Open(open) => {
                let row: Line = read(line, "row")?;
                open.row(&row)?;
                Ok(Checked::Row(Box::new(row)))
            }
            Stage::Done(_) => Err("there is a line after the last one".to_owned()),
        }
    }
}

fn header(line: &[u8]) -> Result<Header, String> {
    #[derive(serde::Deserialize)]
    struct Versioned {
        wakeful_bundle: i64,
    }
    let version = serde_json::from_slice::<Versioned>(line)
        .map_err(|_| "it is no bundle of Wakeful: the first line is no header".to_owned())?
        .wakeful_bundle;
    if version != VERSION {
        return Err(format!(
            "it has version {version} of the format; this program reads version {VERSION}. Export it again, or use the \
             program that wrote it"
        ));
    }
    let header: Header = read(line, "header")?;
    if !scan::is_id(&header.session_id) {
        return Err("session_id: an id has letters, digits, _ and - only".to_owned());
    }
    let (counts, most) = (header.counts.each(), MOST.each());
    for ((name, count), (_, most)) in counts.into_iter().zip(most) {
        if !(0..=most).contains(&count) {
            return Err(format!("{count} {name} are not between 0 and {most}"));
        }
    }
    let mut before = 0;
    for (first, last) in &header.gaps {
        if *first <= before || last < first || *last > header.cut.message_number {
            return Err(format!("gaps: {first} to {last} is not a valid range of other sessions' messages"));
        }
        before = *last;
    }
    Ok(header)
}

impl Counts {
    /// Each count with the name of its rows.
    pub fn each(&self) -> [(&'static str, i64); 8] {
        [
            ("seeds", self.seeds),
            ("runs", self.runs),
            ("records", self.records),
            ("steps", self.steps),
            ("events", self.events),
            ("calls", self.calls),
            ("deliveries", self.deliveries),
            ("inbox", self.inbox),
        ]
    }
}

/// Parses a line and serialises it again. A difference means that the line contains something that parsing
/// ignored.
fn read<T: serde::de::DeserializeOwned + serde::Serialize>(line: &[u8], what: &str) -> Result<T, String> {
    let value: T = serde_json::from_slice(line).map_err(|error| format!("it is no {what}: {error}"))?;
    if !scan::is_written_as(line, &value) {
        return Err(format!(
            "this {what} is not in its one form: it has a field that is unknown here, one twice, or another spelling"
        ));
    }
    Ok(value)
}

impl Open {
    fn new(header: Header) -> Open {
        Open {
            rows: Rows::new(&header),
            logs: Logs::default(),
            blobs: Blobs::default(),
            header,
            section: Section::Session,
            counts: Counts::default(),
            session: None,
        }
    }

    fn row(&mut self, line: &Line) -> CheckResult {
        let section = line.section();
        if section < self.section {
            return Err(format!("a {} after a {}", section.as_str(), self.section.as_str()));
        }
        self.section = section;
        if self.session.is_none() && section != Section::Session {
            return Err("the session's row does not come first".to_owned());
        }
        self.count(section)?;
        for sha256 in blobs_of(line) {
            self.blobs.want(sha256, line)?;
        }
        match line {
            Line::Session(row) => self.session(row),
            Line::Seed(row) => self.rows.seed(row),
            Line::Run(row) => self.rows.run(row),
            Line::Record(row) => {
                self.rows.record(row)?;
                self.logs.record(row)
            }
            Line::Step(row) => self.rows.step(row),
            Line::Event(row) => self.logs.event(row, &self.rows),
            Line::Call(row) => self.logs.call(row, &self.rows),
            Line::Delivery(row) => self.logs.delivery(row),
            Line::Inbox(row) => self.logs.inbox(row),
            Line::Blob(part) => self.blobs.part(part),
        }
    }

    /// Counts a row. Refuses more rows than the header promised.
    fn count(&mut self, section: Section) -> CheckResult {
        let (count, promised) = match section {
            Section::Session | Section::Blob => return Ok(()),
            Section::Seed => (&mut self.counts.seeds, self.header.counts.seeds),
            Section::Run => (&mut self.counts.runs, self.header.counts.runs),
            Section::Record => (&mut self.counts.records, self.header.counts.records),
            Section::Step => (&mut self.counts.steps, self.header.counts.steps),
            Section::Event => (&mut self.counts.events, self.header.counts.events),
            Section::Call => (&mut self.counts.calls, self.header.counts.calls),
            Section::Delivery => (&mut self.counts.deliveries, self.header.counts.deliveries),
            Section::Inbox => (&mut self.counts.inbox, self.header.counts.inbox),
        };
        *count += 1;
        if *count > promised {
            return Err(format!("the header promises {promised} lines of this kind: {}", section.as_str()));
        }
        Ok(())
    }

    fn close(&mut self, bytes: u64, sha256: String) -> Result<Summary, String> {
        let Some(session) = self.session.take() else { return Err("there is no session in it".to_owned()) };
        let (found, promised) = (self.counts.each(), self.header.counts.each());
        for ((name, found), (_, promised)) in found.into_iter().zip(promised) {
            if found != promised {
                return Err(format!("the header promises {promised} {name}, there are {found}"));
            }
        }
        self.rows.close(&session)?;
        self.logs.close(&session)?;
        let blobs = self.blobs.close()?;
        Ok(Summary {
            header: self.header.clone(),
            session,
            inbox: std::mem::take(&mut self.logs.inbox_ids),
            blobs,
            bytes,
            sha256,
        })
    }
}
