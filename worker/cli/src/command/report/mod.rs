//! Report of a comparison of two sessions, for people and for programs. `session diff` and `replay` print it.

mod columns;
mod html;
mod text;

use super::output::{Format, Output, count, dollars, printable};
use super::{Exit, Usage};
use anyhow::Context as _;
use std::path::{Path, PathBuf};
use wakeful_workflow::diff::{Level, Report, Sides, Totals};

/// A line of the totals: its name, the getter of its value, and the formatter.
type TotalsLine = (&'static str, fn(&Totals) -> i64, fn(i64) -> String);

/// The lines of the totals, in their order.
const TOTALS: [TotalsLine; 7] = [
    ("answers", |of| of.turns, |n| n.to_string()),
    ("tool calls", |of| of.tool_calls, |n| n.to_string()),
    ("input tokens", |of| of.usage.input_tokens, |n| n.to_string()),
    ("of them cached", |of| of.usage.cached_tokens, |n| n.to_string()),
    ("output tokens", |of| of.usage.output_tokens, |n| n.to_string()),
    ("cost", |of| of.usage.cost_micros, dollars),
    ("time", |of| of.time_ms, time),
];

/// The smallest difference that makes a comparison fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum FailOn {
    /// A different tool call: another tool, or other arguments.
    Tools,
    /// … or a different state, or a call that failed on one side only.
    State,
    /// … or a different text.
    #[default]
    Any,
    /// … or a model request with different bytes.
    Bytes,
}

impl FailOn {
    /// Returns whether `report` has such a difference.
    pub(crate) fn fails(self, report: &Report) -> bool {
        match self {
            FailOn::Tools => report.verdict >= Level::Tools,
            FailOn::State => report.verdict >= Level::State,
            FailOn::Any => report.verdict >= Level::Prose,
            FailOn::Bytes => report.verdict >= Level::Prose || report.requests.differ > 0,
        }
    }
}

/// The options of every command that shows a comparison.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct ReportArgs {
    /// Also write the report to FILE, as one self-contained HTML page.
    #[arg(long = "report", value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Which differences make the command end with exit status 8.
    #[arg(long, value_name = "WHAT", value_enum, default_value_t)]
    pub(crate) fail_on: FailOn,
    /// Show long texts whole.
    #[arg(long)]
    pub(crate) full: bool,
}

/// Prints `report`, writes its HTML page if one was asked for, and returns the exit status.
///
/// # Errors
/// When the page cannot be written, or stdout is closed.
pub(crate) fn tell(
    output: &Output,
    json: &impl serde::Serialize,
    report: &Report,
    args: &ReportArgs,
) -> anyhow::Result<Exit> {
    output.one(json, || text::of(output, report, args.full))?;
    if let Some(file) = &args.file {
        write_page(report, file)?;
        if output.format() != Some(Format::Json) {
            eprintln!("wrote {}", printable(&file.display().to_string()));
        }
    }
    Ok(if args.fail_on.fails(report) { Exit::Divergence } else { Exit::Ok })
}

/// Formats the report for people. `full` keeps long texts whole.
pub(crate) fn text(output: &Output, report: &Report, full: bool) -> String {
    text::of(output, report, full)
}

/// Checks that the page can be written, before the work that it reports is done.
///
/// # Errors
/// [`Usage`] when it cannot.
pub(crate) fn check_page(file: &Path) -> anyhow::Result<()> {
    let unwritable = |why: String| Usage(format!("--report: cannot write {}: {why}", file.display()));
    if file.file_name().is_none() || file.is_dir() {
        return Err(unwritable("it is not a file name".to_owned()).into());
    }
    // The temporary file is deleted when it is dropped.
    tempfile::NamedTempFile::new_in(folder_of(file)).map_err(|error| unwritable(error.to_string()))?;
    Ok(())
}

fn folder_of(file: &Path) -> &Path {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        Some(_) | None => Path::new("."),
    }
}

/// Writes the report as one HTML page, completely or not at all.
///
/// # Errors
/// When `file` cannot be written.
pub(crate) fn write_page(report: &Report, file: &Path) -> anyhow::Result<()> {
    use std::io::Write as _;
    let page = html::of(report)?;
    if file.file_name().is_none() {
        return Err(Usage(format!("{} is not a file name", file.display())).into());
    }
    let written = || -> std::io::Result<()> {
        let mut page_file = tempfile::NamedTempFile::new_in(folder_of(file))?;
        page_file.write_all(page.as_bytes())?;
        page_file.persist(file)?;
        Ok(())
    };
    written().with_context(|| format!("cannot write {}", file.display()))
}

/// One table of totals.
struct Sums<'a> {
    title: String,
    of: &'a Sides<Totals>,
    /// Both sides are sums over the same answers, so a change between them says something.
    has_change: bool,
}

/// Returns the tables of the totals. If one side has answers that the other has not, or that were not measured there, as the
/// copied beginning of a fork, a second table has the sums over the others, and it alone has the changes.
fn sums(report: &Report) -> Vec<Sums<'_>> {
    let turns = |of: &Sides<Totals>| (of.left.turns, of.right.turns);
    let (totals, common) = (&report.totals, &report.compared);
    let has_change = turns(common) == turns(totals);
    let mut tables = vec![Sums { title: "Totals".to_owned(), of: totals, has_change }];
    if !has_change && common.left.turns > 0 {
        let title = format!("Totals over {} that both sides made", count(common.left.turns, "answer"));
        tables.push(Sums { title, of: common, has_change: true });
    }
    tables
}

/// Formats a duration: `1.2 s`, `350 ms`.
fn time(ms: i64) -> String {
    match ms {
        ms if ms.abs() < 1_000 => format!("{ms} ms"),
        ms if ms.abs() < 120_000 => format!("{}.{} s", ms / 1_000, (ms.abs() % 1_000) / 100),
        ms => format!("{} min", ms / 60_000),
    }
}

/// Formats a range: `3–7`, or `3` for a single number.
fn range(first: i64, last: i64) -> String {
    if first == last { first.to_string() } else { format!("{first}–{last}") }
}

/// Formats a value as JSON: with its quotes, `"1"` differs from `1`.
fn value(value: Option<&serde_json::Value>) -> String {
    value.map_or_else(|| "nothing".to_owned(), serde_json::Value::to_string)
}

/// Returns the first `head` and the last `tail` characters of `text`.
fn shorten_middle(text: &str, head: usize, tail: usize) -> String {
    let characters = text.chars().count();
    if characters <= head + tail + 3 {
        return text.to_owned();
    }
    let first: String = text.chars().take(head).collect();
    let rest: String = text.chars().skip(characters - tail).collect();
    format!("{first} … {rest}")
}

/// Formats a change, such as `+20 %`.
fn change(left: i64, right: i64) -> String {
    match (left, right) {
        (left, right) if left == right => "=".to_owned(),
        (0, _) => "new".to_owned(),
        (left, right) => format!("{:+.0} %", (right as f64 - left as f64) * 100.0 / left as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_a_part_of_what_was() {
        assert_eq!(change(10, 12), "+20 %");
        assert_eq!(change(10, 5), "-50 %");
        assert_eq!(change(0, 5), "new");
        assert_eq!(change(5, 5), "=");
    }

    #[test]
    fn the_ends_of_a_long_text_are_kept() {
        assert_eq!(shorten_middle("abcdefghijklmnop", 3, 2), "abc … op");
        assert_eq!(shorten_middle("abcdefgh", 3, 2), "abcdefgh");
    }

    #[test]
    fn only_sums_over_the_same_answers_have_a_change() {
        let side = || wakeful_workflow::diff::Side {
            session_id: "sess_1".into(),
            agent: String::new(),
            model: String::new(),
            status: "completed".to_owned(),
            system: String::new(),
            tools: Vec::new(),
            seeds: Vec::new(),
            records: Vec::new(),
            state: serde_json::Map::new(),
            answers: std::collections::BTreeMap::new(),
        };
        let mut report = wakeful_workflow::diff::diff(&side(), &side());
        let of = |turns: i64| Totals { turns, ..Totals::default() };
        let mut tables = |left: i64, right: i64, common: i64| -> Vec<(String, i64, bool)> {
            report.totals = Sides { left: of(left), right: of(right) };
            report.compared = Sides { left: of(common), right: of(common) };
            sums(&report).into_iter().map(|one| (one.title, one.of.left.turns, one.has_change)).collect()
        };
        let whole = |turns, has_change| ("Totals".to_owned(), turns, has_change);
        assert_eq!(tables(3, 3, 3), [whole(3, true)]);
        let common = ("Totals over 2 answers that both sides made".to_owned(), 2, true);
        assert_eq!(tables(3, 5, 2), [whole(3, false), common]);
        assert_eq!(tables(3, 5, 0), [whole(3, false)]);
    }
}
