//! The figures: as a table for people, as JSON for programs, as a plot.

use crate::lists::{self, Lists};
use crate::long::{self, Cost};
use crate::reads::median;
use anyhow::Result;
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::path::Path;

/// One measured figure.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    pub section: &'static str,
    pub name: String,
    pub unit: &'static str,
    pub median: f64,
    pub least: f64,
    pub most: f64,
    /// How often it was measured.
    pub times: usize,
    /// The quotient to the floor, each value to the floor's of the same round.
    pub of_floor: Option<f64>,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct Report {
    pub server: String,
    pub machine: String,
    pub arguments: String,
    pub figures: Vec<Figure>,
    pub long: Vec<Cost>,
    pub lists: Lists,
}

impl Report {
    pub fn new(server: String) -> Report {
        Report {
            server,
            machine: machine(),
            arguments: arguments(),
            figures: Vec::new(),
            long: Vec::new(),
            lists: Lists::default(),
        }
    }

    pub fn add(
        &mut self,
        section: &'static str,
        name: impl Into<String>,
        unit: &'static str,
        values: &[f64],
    ) {
        self.add_ratio(section, name, unit, values, &[]);
    }

    /// Adds a rate with the floor's rate of each round.
    pub fn add_ratio(
        &mut self,
        section: &'static str,
        name: impl Into<String>,
        unit: &'static str,
        values: &[f64],
        floor: &[f64],
    ) {
        let ratios: Vec<f64> = values.iter().zip(floor).map(|(value, floor)| value / floor).collect();
        self.figures.push(Figure {
            section,
            name: name.into(),
            unit,
            median: median(values),
            least: values.iter().copied().fold(f64::INFINITY, f64::min),
            most: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            times: values.len(),
            of_floor: (!ratios.is_empty()).then(|| median(&ratios)),
        });
    }

    /// Adds the median and the 99th percentile as two figures.
    pub fn add_percentiles(&mut self, section: &'static str, name: &str, unit: &'static str, values: &[f64]) {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = ((sorted.len() as f64 * 0.99).ceil() as usize).clamp(1, sorted.len().max(1)) - 1;
        self.add(section, format!("{name}, p50"), unit, values);
        self.add(section, format!("{name}, p99"), unit, &[sorted.get(at).copied().unwrap_or(f64::NAN)]);
    }

    pub fn print(&self) {
        let paint = Paint::of_stdout();
        println!("\n  {}", paint.dim(&format!("{}; {}", self.machine, self.server)));
        let mut section = "";
        for figure in &self.figures {
            if figure.section != section {
                section = figure.section;
                println!(
                    "\n  {:<52}{:>12}  {}",
                    paint.bold(section) + &" ".repeat(44_usize.saturating_sub(section.chars().count())),
                    "median",
                    paint.dim("least to most")
                );
            }
            let ratio = figure.of_floor.map_or(String::new(), |ratio| {
                format!("  {ratio:.2} of the floor {}", paint.bar(ratio / 2.0, 16))
            });
            let spread = match figure.times {
                0 | 1 => String::new(),
                times => format!("{} to {} ({times})", number(figure.least), number(figure.most)),
            };
            println!(
                "  {:<44}{:>12} {:<10}{}{ratio}",
                figure.name,
                number(figure.median),
                figure.unit,
                paint.dim(&spread)
            );
        }
        long::print(&paint, &self.long);
        lists::print(&paint, &self.lists);
        println!();
    }

    pub fn write_json(&self, file: &Path) -> Result<()> {
        Ok(std::fs::write(file, serde_json::to_vec_pretty(self)?)?)
    }

    /// Writes the figures as tables for `RESULTS.md`.
    pub fn write_markdown(&self, file: &Path) -> Result<()> {
        let mut text = format!("{}. {}. Arguments: `{}`.\n", self.machine, self.server, self.arguments);
        let mut section = "";
        for figure in &self.figures {
            if figure.section != section {
                section = figure.section;
                let ratio = self.figures.iter().any(|one| one.section == section && one.of_floor.is_some());
                let (head, line) = if ratio { (" of the floor |", "---|") } else { ("", "") };
                write!(
                    text,
                    "\n| {section} | median | least to most | times |{head}\n|---|---|---|---|{line}\n"
                )?;
            }
            let (median, least, most) = (number(figure.median), number(figure.least), number(figure.most));
            let ratio = figure.of_floor.map_or(String::new(), |ratio| format!(" {ratio:.2} |"));
            let (name, unit, times) = (&figure.name, figure.unit, figure.times);
            writeln!(
                text,
                "| {name} | {} | {least} to {most} | {times} |{ratio}",
                format!("{median} {unit}").trim_end()
            )?;
        }
        long::write_markdown(&mut text, &self.long)?;
        lists::write_markdown(&mut text, &self.lists)?;
        Ok(std::fs::write(file, text)?)
    }

    /// Draws the rates as bars, with the floor as a line.
    pub fn write_plot(&self, file: &Path) -> Result<()> {
        let bars: Vec<(&Figure, f64)> =
            self.figures.iter().filter_map(|figure| Some((figure, figure.of_floor?))).collect();
        let most = bars.iter().map(|(_, ratio)| *ratio).fold(1.0, f64::max);
        let (left, width, row) = (330.0, 420.0, 24.0);
        let height = 60.0 + row * bars.len() as f64;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"840\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"12\" y=\"22\" font-weight=\"bold\">Steps a second, as a part of what pgbench does with the same rows</text>\n"
        );
        for (at, (figure, ratio)) in bars.iter().enumerate() {
            let y = 40.0 + row * at as f64;
            let name = figure.name.replace('&', "&amp;").replace('<', "&lt;");
            writeln!(
                svg,
                "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{name}</text>\
                 <rect x=\"{left}\" y=\"{y}\" width=\"{:.1}\" height=\"16\" fill=\"#3b7dd8\"/>\
                 <text x=\"{:.1}\" y=\"{}\">{ratio:.2}</text>",
                left - 8.0,
                y + 13.0,
                width * ratio / most,
                left + width * ratio / most + 6.0,
                y + 13.0
            )?;
        }
        let floor = left + width / most;
        writeln!(
            svg,
            "<line x1=\"{floor:.1}\" y1=\"34\" x2=\"{floor:.1}\" y2=\"{}\" stroke=\"#333\" stroke-dasharray=\"4 3\"/>\n</svg>",
            height - 16.0
        )?;
        Ok(std::fs::write(file, svg)?)
    }
}

pub fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// The command line's arguments, without the names of files.
fn arguments() -> String {
    let (mut given, mut kept) = (std::env::args().skip(1), Vec::new());
    while let Some(one) = given.next() {
        match one.as_str() {
            "--json" | "--markdown" | "--plot" => drop(given.next()),
            "--bench" => {}
            _ => kept.push(one),
        }
    }
    kept.join(" ")
}

/// Cores and memory, without names.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kb = memory
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse::<f64>().ok());
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    format!(
        "{cores} cores, {:.0} GB of memory, load {} at the start",
        kb.unwrap_or(f64::NAN) / 1024.0 / 1024.0,
        load.split_whitespace().next().unwrap_or("unknown")
    )
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
