//! Log formats: JSON, with one flat object per line that includes the fields of the enclosing spans, and a
//! short form for a terminal.
//!
//! Messages and fields hold what strangers and providers wrote. So every format shows characters that act on a
//! terminal as escapes, and each event stays one line.

use std::fmt;
use std::ops::Range;

use opentelemetry::Context;
use opentelemetry::trace::TraceContextExt;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

use crate::printable::{json_text, printable};

/// The keys are `timestamp`, `level`, `target`, `message`; `trace_id` and `span_id` inside a trace; the
/// event's fields; and the fields of the enclosing spans (the innermost wins), such as `session.id` and
/// `run.id`.
pub(super) struct Json;

impl<S> FormatEvent<S, Pairs> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, Pairs>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = Line::new();
        let now = chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Micros, true);
        line.put("timestamp", &now);
        line.put("level", event.metadata().level().as_str());
        line.put("target", event.metadata().target());
        let context = Context::current();
        let span = context.span();
        if span.span_context().is_valid() {
            line.put("trace_id", &span.span_context().trace_id().to_string());
            line.put("span_id", &span.span_context().span_id().to_string());
        }
        event.record(&mut line);
        for span in ctx.event_scope().into_iter().flatten() {
            let extensions = span.extensions();
            let Some(pairs) = extensions.get::<FormattedFields<Pairs>>() else { continue };
            // A value that was recorded later replaces an earlier one.
            for pair in pairs.fields.lines().rev() {
                line.put_pair(pair);
            }
        }
        writeln!(writer, "{}", json_text(line.end()))
    }
}

/// Longer lines and longer fields of spans are rare.
const LINE_BYTES: usize = 1024;
const PAIRS_BYTES: usize = 512;

/// Writes the fields of a span as lines of `"name":value`, and [`Json`] puts them into its lines as they are. So a span's
/// fields become JSON once, however many events there are within it. Line breaks in values are escaped.
pub(super) struct Pairs;

impl<'w> FormatFields<'w> for Pairs {
    fn format_fields<R: RecordFields>(&self, mut writer: Writer<'w>, fields: R) -> fmt::Result {
        let mut text = PairsText(Vec::with_capacity(PAIRS_BYTES));
        fields.record(&mut text);
        writer.write_str(std::str::from_utf8(&text.0).map_err(|_| fmt::Error)?)
    }

    fn add_fields(
        &self,
        current: &'w mut FormattedFields<Self>,
        fields: &tracing::span::Record<'_>,
    ) -> fmt::Result {
        self.format_fields(current.as_writer(), fields)
    }
}

struct PairsText(Vec<u8>);

impl WriteFields for PairsText {
    fn field(&mut self, name: &str, value: &(impl Serialize + ?Sized)) {
        // `otel.name` and similar fields are only for the exporter.
        if !name.starts_with("otel.") {
            write_json(&mut self.0, name);
            self.0.push(b':');
            write_json(&mut self.0, value);
            self.0.push(b'\n');
        }
    }
}

/// A line of the log. The first value of a key counts.
struct Line {
    text: Vec<u8>,
    /// Where the keys stand in `text`, with their quotes.
    keys: Vec<Range<usize>>,
}

impl Line {
    fn new() -> Line {
        Line { text: Vec::with_capacity(LINE_BYTES), keys: Vec::with_capacity(32) }
    }

    fn put(&mut self, key: &str, value: &(impl Serialize + ?Sized)) {
        let at = self.text.len();
        self.text.push(if at == 0 { b'{' } else { b',' });
        write_json(&mut self.text, key);
        if self.keep_key(at) {
            self.text.push(b':');
            write_json(&mut self.text, value);
        }
    }

    /// Puts what [`Pairs`] has written.
    fn put_pair(&mut self, pair: &str) {
        // Names have no quotes.
        let Some((key, _)) = pair.split_once("\":") else { return };
        let at = self.text.len();
        self.text.push(if at == 0 { b'{' } else { b',' });
        self.text.extend_from_slice(key.as_bytes());
        self.text.push(b'"');
        if self.keep_key(at) {
            self.text.extend_from_slice(&pair.as_bytes()[key.len() + 1..]);
        }
    }

    /// Takes the key after `at` away again if the line has it already.
    fn keep_key(&mut self, at: usize) -> bool {
        let key = at + 1..self.text.len();
        let is_new = self.keys.iter().all(|other| self.text[other.clone()] != self.text[key.clone()]);
        if is_new {
            self.keys.push(key);
        } else {
            self.text.truncate(at);
        }
        is_new
    }

    fn end(mut self) -> String {
        self.text.push(b'}');
        // JSON is UTF-8.
        String::from_utf8(self.text).unwrap_or_default()
    }
}

impl WriteFields for Line {
    fn field(&mut self, name: &str, value: &(impl Serialize + ?Sized)) {
        self.put(name, value);
    }
}

/// Writes to memory, which cannot fail. What is no JSON is `null`.
fn write_json(text: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) {
    let at = text.len();
    if serde_json::to_writer(&mut *text, value).is_err() {
        text.truncate(at);
        text.extend_from_slice(b"null");
    }
}

/// Text that is written as it is formatted.
struct Debugged<'a>(&'a dyn fmt::Debug);

impl Serialize for Debugged<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:?}", self.0))
    }
}

/// What writes fields as JSON.
trait WriteFields {
    fn field(&mut self, name: &str, value: &(impl Serialize + ?Sized));
}

macro_rules! visits {
    ($($writer:ty),*) => {$(
        impl Visit for $writer {
            fn record_f64(&mut self, field: &Field, value: f64) {
                self.field(name(field), &value);
            }

            fn record_i64(&mut self, field: &Field, value: i64) {
                self.field(name(field), &value);
            }

            fn record_u64(&mut self, field: &Field, value: u64) {
                self.field(name(field), &value);
            }

            fn record_bool(&mut self, field: &Field, value: bool) {
                self.field(name(field), &value);
            }

            fn record_str(&mut self, field: &Field, value: &str) {
                self.field(name(field), value);
            }

            fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
                self.field(name(field), &Debugged(value));
            }
        }
    )*};
}

visits!(Line, PairsText);

/// The field's name. One that is a word of Rust is written as `r#type`.
fn name(field: &Field) -> &'static str {
    field.name().strip_prefix("r#").unwrap_or(field.name())
}

/// `time message`, followed by the most useful fields, for a person who watches a terminal.
pub(super) struct Short {
    pub(super) color: bool,
}

impl<S, N> FormatEvent<S, N> for Short
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut fields = Map::new();
        event.record(&mut Fields(&mut fields));
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let message = fields.remove("message").map(|message| text(&message)).unwrap_or_default();
        // The message already names the step, and the session identifies the run.
        fields.remove("step");
        if fields.contains_key("session.id") {
            fields.remove("run.id");
        }
        let (dim, strong, end) = match (self.color, *event.metadata().level() <= Level::WARN) {
            (true, true) => ("\x1b[2m", "\x1b[33m", "\x1b[0m"),
            (true, false) => ("\x1b[2m", "", "\x1b[0m"),
            (false, _) => ("", "", ""),
        };
        let level = if *event.metadata().level() <= Level::WARN { "warning: " } else { "" };
        write!(
            writer,
            "{dim}{}{end}  {strong}{level}{}{end}",
            chrono::Local::now().format("%H:%M:%S"),
            printable(&message)
        )?;
        for (key, value) in &fields {
            write!(writer, "  {dim}{key}={}{end}", printable(&text(value)))?;
        }
        writeln!(writer)
    }
}

/// Writes a field for the text format: its name and its value, which has no effect on the terminal.
pub(super) fn text_field(writer: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug) -> fmt::Result {
    let value = format!("{value:?}");
    match field.name() {
        "message" => write!(writer, "{}", printable(&value)),
        name => write!(writer, "{name}={}", printable(&value)),
    }
}

/// Adds the fields of an event to the line, and never overwrites a key.
struct Fields<'a>(&'a mut Map<String, Value>);

impl Fields<'_> {
    fn put(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.entry(field.name()).or_insert_with(|| value.into());
    }
}

impl Visit for Fields<'_> {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}"));
    }
}
