//! The figures as a table for people, and as a file for the next run to compare with.

use crate::long::{self, Cost};
use crate::reads::{Read, median};
use crate::server::{Sent, Tables};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::io::{IsTerminal, Write};
use std::path::PathBuf;

/// The programs that take part in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contestant {
    Pgbench,
    Step,
    Turn,
}

impl Contestant {
    pub const ALL: [Contestant; 3] = [Contestant::Pgbench, Contestant::Step, Contestant::Turn];

    pub fn name(self) -> &'static str {
        match self {
            Contestant::Pgbench => "pgbench, the same rows",
            Contestant::Step => "step commit",
            Contestant::Turn => "turn: two commits",
        }
    }
}

/// One round of one contestant.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Sample {
    pub per_second: f64,
    /// For one step.
    pub wal_bytes: f64,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct Report {
    server: String,
    seconds: u32,
    rounds: u32,
    pgbench: Vec<Sample>,
    step: Vec<Sample>,
    turn: Vec<Sample>,
    pub traffic: Vec<Option<Sent>>,
    pub tables: Tables,
    pub hydrate: Vec<Read>,
    pub claim: Vec<Read>,
    pub long: Vec<Cost>,
    #[serde(flatten)]
    summary: Summary,
}

/// The figures that are compared from run to run.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Summary {
    step_ratio: f64,
    turn_ratio: f64,
}

impl Report {
    pub fn new(server: String, seconds: u32, rounds: u32) -> Report {
        Report {
            server,
            seconds,
            rounds,
            pgbench: Vec::new(),
            step: Vec::new(),
            turn: Vec::new(),
            traffic: Vec::new(),
            tables: Tables::default(),
            hydrate: Vec::new(),
            claim: Vec::new(),
            long: Vec::new(),
            summary: Summary::default(),
        }
    }

    pub fn add(&mut self, contestant: Contestant, sample: Sample) {
        match contestant {
            Contestant::Pgbench => self.pgbench.push(sample),
            Contestant::Step => self.step.push(sample),
            Contestant::Turn => self.turn.push(sample),
        }
        self.summary = Summary {
            step_ratio: median(&self.ratios(Contestant::Step)),
            turn_ratio: median(&self.ratios(Contestant::Turn)),
        };
    }

    fn samples(&self, contestant: Contestant) -> &[Sample] {
        match contestant {
            Contestant::Pgbench => &self.pgbench,
            Contestant::Step => &self.step,
            Contestant::Turn => &self.turn,
        }
    }

    /// The ratio to pgbench, round by round.
    fn ratios(&self, contestant: Contestant) -> Vec<f64> {
        let pairs = self.samples(contestant).iter().zip(&self.pgbench);
        pairs.map(|(one, rival)| one.per_second / rival.per_second).collect()
    }

    pub fn print(&self) {
        let paint = Paint::of_stdout();
        println!("\n{}", paint.bold("Steps a second, 16 sessions at a time"));
        println!(
            "{}",
            paint.dim(&format!("{} rounds of {} s in turns; {}", self.rounds, self.seconds, self.server))
        );
        println!();
        println!("  {:<24} {:>9} {:<24} {:>13} {:>10}", "", "× pgbench", "", "least – most", "WAL bytes");
        for contestant in Contestant::ALL {
            let ratios = self.ratios(contestant);
            let ratio = median(&ratios);
            let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
            let most = ratios.iter().copied().fold(0.0, f64::max);
            let wal: Vec<f64> = self.samples(contestant).iter().map(|sample| sample.wal_bytes).collect();
            let spread = match contestant {
                Contestant::Pgbench => String::new(),
                Contestant::Step | Contestant::Turn => format!("{least:.2} – {most:.2}"),
            };
            println!(
                "  {:<24} {ratio:>9.2} {} {spread:>13} {:>10.0}",
                contestant.name(),
                paint.bar(ratio, 24),
                median(&wal)
            );
        }
        let rates: Vec<f64> = self.pgbench.iter().map(|sample| sample.per_second).collect();
        println!(
            "  {}",
            paint.dim(&format!(
                "pgbench did {:.0} a second here and now: no figure of Wakeful's",
                median(&rates)
            ))
        );
        if let Some(last) = last() {
            println!(
                "  {}",
                paint.dim(&format!("the run before: {:.2} and {:.2}", last.step_ratio, last.turn_ratio))
            );
        }

        println!("\n  {}", paint.bold("What one step sends and leaves"));
        for (contestant, sent) in [Contestant::Step, Contestant::Turn].into_iter().zip(&self.traffic) {
            match sent {
                Some(sent) => println!(
                    "  {:<24} {:.1} statements, {:.1} round trips, {:.0} bytes sent (counted on the wire)",
                    contestant.name(),
                    sent.statements,
                    sent.round_trips,
                    sent.bytes
                ),
                None => println!("  {:<24} not counted: the server wants TLS", contestant.name()),
            }
        }
        let tables = &self.tables;
        println!(
            "  {:<24} {:.0} bytes, at most {}",
            "row of session_steps", tables.step_row_bytes, tables.step_row_bytes_max
        );
        println!(
            "  {:<24} {:.1} % of the sessions', {:.1} % of the jobs'",
            "HOT updates", tables.hot_sessions_percent, tables.hot_jobs_percent
        );
        reads(&paint, "Hydration, by messages of 2 KB", "messages", &self.hydrate);
        reads(&paint, "Claim of one job, by jobs pending", "pending", &self.claim);
        long::print(&paint, &self.long);
        println!();
    }

    pub fn print_long(&self) {
        let paint = Paint::of_stdout();
        println!("\n  {}", paint.dim(&self.server));
        long::print(&paint, &self.long);
        println!();
    }

    /// Writes `bench/steps.json` into the target directory.
    pub fn keep(&self) -> Result<()> {
        let file = file();
        std::fs::create_dir_all(file.parent().context("a file has a directory")?)?;
        std::fs::write(&file, serde_json::to_vec_pretty(self)?)?;
        Ok(())
    }
}

fn reads(paint: &Paint, title: &str, unit: &str, reads: &[Read]) {
    let longest = reads.iter().map(|read| read.round_trips_worth).fold(0.0, f64::max);
    println!("\n  {}", paint.bold(title));
    println!("  {:<24} {:>9}", "", "× select 1");
    for read in reads {
        let trips = read.round_trips.map_or_else(String::new, |trips| format!("{trips:.0} round trips"));
        println!(
            "  {:<24} {:>9.1} {} {trips}",
            format!("{} {unit}", read.size),
            read.round_trips_worth,
            paint.bar(read.round_trips_worth / longest, 24)
        );
    }
}

fn file() -> PathBuf {
    // Cargo's directory for a bench's files is a child of the target directory.
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).with_file_name("bench").join("steps.json")
}

fn last() -> Option<Summary> {
    serde_json::from_slice(&std::fs::read(file()).ok()?).ok()
}

/// The table's style: colours only on a terminal, and not under NO_COLOR.
pub struct Paint {
    colours: bool,
}

impl Paint {
    fn of_stdout() -> Paint {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Paint { colours: std::io::stdout().is_terminal() && !refused }
    }

    pub fn bold(&self, text: &str) -> String {
        self.wrap("1", text)
    }

    pub fn dim(&self, text: &str) -> String {
        self.wrap("2", text)
    }

    fn wrap(&self, code: &str, text: &str) -> String {
        if self.colours { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// A bar of `width` cells, filled in eighths. Parts above 1 are cut off.
    pub fn bar(&self, part: f64, width: usize) -> String {
        const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
        let eighths = ((part.clamp(0.0, 1.0) * width as f64 * 8.0).round() as usize).min(width * 8);
        let bar = "█".repeat(eighths / 8) + EIGHTHS[eighths % 8];
        let rest = " ".repeat(width - eighths.div_ceil(8));
        self.wrap("36", &bar) + &rest
    }
}

/// A line on stderr that says what is being measured.
#[derive(Debug, Default)]
pub struct Progress {
    width: usize,
}

impl Progress {
    pub fn say(&mut self, what: &str) {
        let mut out = std::io::stderr().lock();
        // Ignore the error: progress is not worth failing for.
        let _ = if out.is_terminal() {
            write!(out, "\r{what:<width$}", width = self.width).and_then(|()| out.flush())
        } else {
            writeln!(out, "bench: {what}")
        };
        self.width = what.chars().count();
    }

    pub fn clear(&mut self) {
        let mut out = std::io::stderr().lock();
        if out.is_terminal() {
            let _ = write!(out, "\r{:<width$}\r", "", width = self.width).and_then(|()| out.flush());
        }
    }
}
