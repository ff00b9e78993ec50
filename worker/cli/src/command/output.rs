//! Output of commands: tables for people, lines for pipes, JSON for programs.
//!
//! Texts come from users, models and mail servers and are treated as hostile. Text for a terminal goes
//! through [`printable`], and JSON through [`json`].

pub(super) use super::printable::printable;
use super::printable::{json, printable_lines};
use comfy_table::{Attribute, CellAlignment, Color, ColumnConstraint, ContentArrangement, Row, TableStyle};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{ErrorKind, IsTerminal, Write as _};

/// The formats of `-o`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Format {
    /// Aligned columns under a head.
    Table,
    /// One JSON document.
    Json,
    /// One line of JSON per item.
    Jsonl,
}

/// The option `-o`, the same in every command.
#[derive(Debug, clap::Args)]
pub(super) struct OutputArgs {
    /// Output format; without it, a table on a terminal and plain lines in a pipe. A table in a pipe is as wide as the
    /// variable COLUMNS says.
    #[arg(short = 'o', long = "output", value_name = "FORMAT", value_enum, global = true)]
    output: Option<Format>,
}

/// The reader of stdout closed it, as `head` does. Not a failure.
#[derive(Debug, thiserror::Error)]
#[error("nobody reads stdout any more")]
pub(super) struct ReaderGone;

/// How this process prints.
#[derive(Clone, Copy, Debug)]
pub(super) struct Output {
    format: Option<Format>,
    terminal: bool,
    colour: bool,
    /// Columns of the terminal; `None` for a pipe.
    width: Option<u16>,
}

impl Output {
    /// Creates an output for the format asked for and this process's stdout. Colour needs a terminal and no
    /// `NO_COLOR`.
    pub fn new(args: &OutputArgs) -> Output {
        let terminal = std::io::stdout().is_terminal();
        let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let width = if terminal { comfy_table::Table::new().width() } else { columns(args.output) };
        Output { format: args.output, terminal, colour: terminal && !dumb && !set("NO_COLOR"), width }
    }

    /// Prints a list: as a JSON array, as one JSON line per item, or as `table`.
    pub fn items<T: Serialize>(&self, items: &[T], table: impl FnOnce() -> Table) -> anyhow::Result<()> {
        match self.format {
            Some(Format::Json) => print(&format!("{}\n", json(&items, true)?)),
            Some(Format::Jsonl) => {
                let lines: Result<Vec<String>, _> = items.iter().map(|item| json(item, false)).collect();
                print(&lines?.iter().map(|line| format!("{line}\n")).collect::<String>())
            }
            Some(Format::Table) => print(&self.aligned(&table(), 0)),
            None if self.terminal => print(&self.aligned(&table(), 0)),
            None => print(&table().lines()),
        }
    }

    /// Prints the first `limit` items of a list. If there are none, people read `none`.
    pub fn page<T: Serialize>(
        &self,
        items: &[T],
        limit: i64,
        none: &str,
        table: impl FnOnce() -> Table,
    ) -> anyhow::Result<()> {
        self.items(items, table)?;
        if self.for_people() && items.is_empty() {
            print(none)?;
        }
        self.more(items.len(), limit);
        Ok(())
    }

    /// Says to people that a list may go on, if as many items are shown as were asked for.
    pub fn more(&self, shown: usize, limit: i64) {
        if self.for_people() && shown as i64 == limit {
            eprintln!("There may be more: --limit {}", limit.saturating_mul(10).min(10_000));
        }
    }

    /// Prints one item: as JSON, or as `text`.
    pub fn one<T: Serialize>(&self, item: &T, text: impl FnOnce() -> String) -> anyhow::Result<()> {
        match self.format {
            Some(Format::Json) => print(&format!("{}\n", json(item, true)?)),
            Some(Format::Jsonl) => print(&format!("{}\n", json(item, false)?)),
            Some(Format::Table) | None => print(&text()),
        }
    }

    /// Prints one item of an endless list, on a line of its own.
    pub fn line<T: Serialize>(&self, item: &T, text: impl FnOnce() -> String) -> anyhow::Result<()> {
        match self.format {
            Some(Format::Json | Format::Jsonl) => print(&format!("{}\n", json(item, false)?)),
            Some(Format::Table) | None => print(&text()),
        }
    }

    /// The format that was asked for.
    pub fn format(&self) -> Option<Format> {
        self.format
    }

    /// Returns whether a person reads the output. Headings and hints are printed only then.
    pub fn for_people(&self) -> bool {
        match self.format {
            Some(Format::Table) => true,
            Some(Format::Json | Format::Jsonl) => false,
            None => self.terminal,
        }
    }

    /// Lays out the table with aligned columns, within the terminal's width, `indent` columns from the left.
    pub fn aligned(&self, table: &Table, indent: u16) -> String {
        table.aligned(self.width, self.colour, indent)
    }

    /// Wraps `text` to the terminal's width (at most 100 columns: longer lines are hard to read), `indent`
    /// columns from the left. Newlines stay; every other control character is escaped.
    pub fn block(&self, text: &str, indent: u16) -> String {
        let mut block = Table::new(&[Column::flexible("")]);
        block.row([Cell { text: printable_lines(text), tone: Tone::Plain }]);
        block.wrapped().aligned(self.width.map(|width| width.min(100 + indent)), false, indent)
    }

    /// Like [`Output::block`], each line in the colour of `tone`.
    pub fn painted_block(&self, tone: Tone, text: &str) -> String {
        self.block(text, 0).lines().map(|line| format!("{}\n", self.paint(tone, line))).collect()
    }

    /// Columns of the terminal; `None` for a pipe.
    pub fn width(&self) -> Option<u16> {
        self.width
    }

    /// Returns how many columns are left next to `taken` ones: at least 20, and no limit in a pipe.
    pub fn room(&self, taken: usize) -> usize {
        self.width.map_or(usize::MAX, |width| usize::from(width).saturating_sub(taken).max(20))
    }

    /// Escapes and colours `text`.
    pub fn paint(&self, tone: Tone, text: &str) -> String {
        let code = match tone {
            Tone::Plain => None,
            Tone::Head => Some("1"),
            Tone::Good => Some("32"),
            Tone::Busy => Some("33"),
            Tone::Bad => Some("31"),
            Tone::Faint => Some("2"),
        };
        match code {
            Some(code) if self.colour => format!("\u{1b}[{code}m{}\u{1b}[0m", printable(text)),
            Some(_) | None => printable(text).into_owned(),
        }
    }
}

/// The width of a table that was asked for in a pipe, as `watch` and its like say it. `None`: no limit.
fn columns(format: Option<Format>) -> Option<u16> {
    let columns = std::env::var("COLUMNS").ok().filter(|_| format == Some(Format::Table))?;
    columns.parse().ok().filter(|width| *width >= 20)
}

/// Meaning of a text, which decides its colour. The words have the same meaning without colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    Plain,
    Head,
    Good,
    Busy,
    Bad,
    Faint,
}

impl Tone {
    /// Returns the tone of a session's, a run's, a call's or a delivery's status.
    pub fn of_status(status: &str) -> Tone {
        match status {
            "completed" | "done" | "sent" => Tone::Good,
            "created" | "queued" | "running" | "invoked" | "started" | "sending" => Tone::Plain,
            "waiting_input" | "waiting" => Tone::Busy,
            "needs_attention" | "failed" | "uncertain" => Tone::Bad,
            "cancelled" | "archived" | "terminated" | "abandoned" | "expired" => Tone::Faint,
            _ => Tone::Plain,
        }
    }
}

/// One cell: its text is escaped when the cell is made.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    pub fn new(text: impl AsRef<str>, tone: Tone) -> Cell {
        Cell { text: printable(text.as_ref()).into_owned(), tone }
    }

    pub fn status(status: &str) -> Cell {
        Cell::new(status, Tone::of_status(status))
    }
}

impl<T: ToString> From<T> for Cell {
    fn from(text: T) -> Cell {
        Cell::new(text.to_string(), Tone::Plain)
    }
}

/// A column: its head, and how it shrinks when the terminal is narrow.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    head: &'static str,
    right: bool,
    flexible: bool,
    /// Left out on a narrow terminal.
    extra: bool,
    /// On a narrow terminal, on a line of its own under its row.
    below: bool,
    /// Cut to [`SHORT_ID`] characters on a narrow terminal.
    id: bool,
}

impl Column {
    /// A column as wide as its content, for ids and words that users copy.
    pub const fn fixed(head: &'static str) -> Column {
        Column { head, right: false, flexible: false, extra: false, below: false, id: false }
    }

    /// A column of ids. A narrow terminal shows their beginnings, which commands accept too.
    pub const fn id(head: &'static str) -> Column {
        Column { id: true, ..Column::fixed(head) }
    }

    /// A right-aligned column as wide as its content.
    pub const fn number(head: &'static str) -> Column {
        Column { head, right: true, flexible: false, extra: false, below: false, id: false }
    }

    /// A column that is cut to the width left over.
    pub const fn flexible(head: &'static str) -> Column {
        Column { head, right: false, flexible: true, extra: false, below: false, id: false }
    }

    /// Not shown on a terminal of fewer than [`NARROW`] columns.
    pub const fn extra(self) -> Column {
        Column { extra: true, ..self }
    }

    /// On a terminal of fewer than [`NARROW`] columns, shown under its row.
    pub const fn below(self) -> Column {
        Column { below: true, ..self }
    }
}

/// As much of an id as tells it from the others: the time in it, and some of what is random.
const SHORT_ID: usize = 20;

/// A terminal with fewer columns shows no extra columns.
const NARROW: u16 = 100;

/// Rows under a head.
#[derive(Clone, Debug)]
pub(super) struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
    wraps: bool,
}

impl Table {
    pub fn new(columns: &[Column]) -> Table {
        Table { columns: columns.to_vec(), rows: Vec::new(), wraps: false }
    }

    /// Makes the table wrap its flexible columns instead of cutting them.
    pub fn wrapped(mut self) -> Table {
        self.wraps = true;
        self
    }

    pub fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().collect());
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Formats the table for pipes: one line per row, tabs between cells, no head, nothing cut.
    fn lines(&self) -> String {
        let mut text = String::new();
        for row in &self.rows {
            let cells: Vec<&str> = row.iter().map(|cell| cell.text.as_str()).collect();
            let _ = writeln!(text, "{}", cells.join("\t"));
        }
        text
    }

    fn aligned(&self, width: Option<u16>, colour: bool, indent: u16) -> String {
        let mut table = comfy_table::Table::new();
        table.load_style(TableStyle::new()).set_truncation_indicator("…").force_no_tty();
        if colour {
            table.enforce_styling();
        }
        if let Some(width) = width {
            table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
        }
        let narrow = width.is_some_and(|width| width < NARROW);
        let shown = |column: &Column| !(narrow && (column.extra || column.below));
        let columns: Vec<&Column> = self.columns.iter().filter(|column| shown(column)).collect();
        let heads = usize::from(columns.iter().any(|column| !column.head.is_empty()));
        if heads > 0 {
            let mut head = Row::from(columns.iter().map(|column| {
                let head = comfy_table::Cell::new(column.head).add_attribute(Attribute::Dim);
                if column.right { head.set_alignment(CellAlignment::Right) } else { head }
            }));
            head.max_height(1);
            table.set_header(head);
        }
        for row in &self.rows {
            let mut cells = Row::new();
            for (cell, column) in row.iter().zip(&self.columns).filter(|(_, column)| shown(column)) {
                let end = match column.id && narrow {
                    true => cell.text.char_indices().nth(SHORT_ID).map_or(cell.text.len(), |(at, _)| at),
                    false => cell.text.len(),
                };
                let styled = comfy_table::Cell::new(&cell.text[..end]);
                let styled = match cell.tone {
                    Tone::Plain => styled,
                    Tone::Head => styled.add_attribute(Attribute::Bold),
                    Tone::Good => styled.fg(Color::DarkGreen),
                    Tone::Busy => styled.fg(Color::DarkYellow),
                    Tone::Bad => styled.fg(Color::DarkRed),
                    Tone::Faint => styled.add_attribute(Attribute::Dim),
                };
                cells.add_cell(if column.right {
                    styled.set_alignment(CellAlignment::Right)
                } else {
                    styled
                });
            }
            if !self.wraps {
                cells.max_height(1);
            }
            table.add_row(cells);
        }
        for (index, column) in columns.into_iter().enumerate() {
            if let Some(laid) = table.column_mut(index) {
                laid.set_padding((if index == 0 { indent } else { 0 }, 2));
                if !column.flexible {
                    laid.set_constraint(ColumnConstraint::ContentWidth);
                }
            }
        }
        // Each row is one line, unless the table wraps; a table that wraps has nothing below its rows.
        let mut below = self.rows.iter().map(|row| if narrow { self.below(row) } else { String::new() });
        let mut text = String::new();
        for (index, line) in table.lines().enumerate() {
            let _ = writeln!(text, "{}", line.trim_end());
            let under = if index < heads { None } else { below.next() };
            if let Some(under) = under.filter(|under| !under.is_empty()) {
                let mut line = Table::new(&[Column::flexible("")]);
                line.row([Cell { text: under, tone: Tone::Faint }]);
                text.push_str(&line.aligned(width, colour, indent + 4));
            }
        }
        text
    }

    /// What stands under a row on a narrow terminal: `why: ticket 311`.
    fn below(&self, row: &[Cell]) -> String {
        let said = |(cell, column): (&Cell, &Column)| {
            let says = column.below && !matches!(cell.text.as_str(), "" | "-");
            says.then(|| format!("{}: {}", column.head.to_lowercase(), cell.text))
        };
        row.iter().zip(&self.columns).filter_map(said).collect::<Vec<_>>().join(", ")
    }
}

/// Writes to stdout at once.
///
/// # Errors
/// [`ReaderGone`] when the reader closed the pipe.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(ReaderGone.into()),
        written => Ok(written?),
    }
}

/// Turns [`ReaderGone`] into success: the reader got all that it wanted.
pub(super) fn until_reader_goes(ran: anyhow::Result<super::Exit>) -> anyhow::Result<super::Exit> {
    match ran {
        Err(error) if error.is::<ReaderGone>() => Ok(super::Exit::Ok),
        ran => ran,
    }
}

/// `1 turn`, `2 turns`.
pub(super) fn count(number: i64, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

/// The text with a capital first letter.
pub(super) fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
}

/// A span of time in one unit, rounded: `12s`, `5m`, `3h`, `9d`. What ends in 2 hours less a moment ends in `2h`.
pub(super) fn span(seconds: f64) -> String {
    let seconds = seconds.abs();
    let in_unit = |length: f64| (seconds / length).round() as u64;
    match seconds {
        s if s < 0.9995 => format!("{}ms", in_unit(0.001)),
        _ if in_unit(1.0) < 120 => format!("{}s", in_unit(1.0)),
        _ if in_unit(60.0) < 120 => format!("{}m", in_unit(60.0)),
        _ if in_unit(3600.0) < 48 => format!("{}h", in_unit(3600.0)),
        _ => format!("{}d", in_unit(86_400.0)),
    }
}

/// How long ago `then` was, by this host's clock.
pub(super) fn age(then: chrono::DateTime<chrono::Utc>) -> String {
    span((chrono::Utc::now() - then).num_milliseconds().max(0) as f64 / 1000.0)
}

/// Micro-dollars as dollars.
pub(super) fn dollars(micros: i64) -> String {
    format!("${}.{:04}", micros / 1_000_000, micros.abs() % 1_000_000 / 100)
}

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
