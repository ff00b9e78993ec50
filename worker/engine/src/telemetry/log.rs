//! Log formats: JSON, with one flat object per line that includes the fields of the enclosing spans, and a
//! short form for a terminal.
//!
//! Messages and fields hold what strangers and providers wrote. So every format shows characters that act on a
//! terminal as escapes, and each event stays one line.

use std::fmt;

use opentelemetry::Context;
use opentelemetry::trace::TraceContextExt;
use serde::Serialize;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::span::Record;
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

impl<S> FormatEvent<S, SpanFields> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, SpanFields>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = Line::default();
        let now = chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Micros, true);
        line.put("timestamp", &json(&now));
        line.put("level", &json(event.metadata().level().as_str()));
        line.put("target", &json(event.metadata().target()));
        let context = Context::current();
        let span = context.span();
        if span.span_context().is_valid() {
            line.put("trace_id", &json(&span.span_context().trace_id().to_string()));
            line.put("span_id", &json(&span.span_context().span_id().to_string()));
        }
        event.record(&mut EachField(|key: &str, value: String| line.put(key, &value)));
        for span in ctx.event_scope().into_iter().flatten() {
            let extensions = span.extensions();
            let Some(fields) = extensions.get::<FormattedFields<SpanFields>>() else { continue };
            // A value that the span recorded later comes after the earlier one.
            for piece in fields.fields.split_terminator(END).rev() {
                if let Some((key, value)) = piece.split_once(IS) {
                    line.put(key, value);
                }
            }
        }
        writeln!(writer, "{}", json_text(line.close()))
    }
}

/// Stand between a key and its value, and after the value. Inside of a JSON text they are escaped.
const IS: char = '\u{1f}';
const END: char = '\u{1e}';

/// Keeps a span's fields as pieces of JSON. A log line takes them over without parsing them.
pub(super) struct SpanFields;

impl<'w> FormatFields<'w> for SpanFields {
    fn format_fields<R: RecordFields>(&self, mut writer: Writer<'w>, fields: R) -> fmt::Result {
        let mut written = Ok(());
        fields.record(&mut EachField(|key: &str, value: String| {
            // `otel.name` and similar fields are only for the exporter.
            if written.is_ok() && !key.starts_with("otel.") {
                written = write!(writer, "{key}{IS}{value}{END}");
            }
        }));
        written
    }

    fn add_fields(&self, current: &'w mut FormattedFields<Self>, fields: &Record<'_>) -> fmt::Result {
        self.format_fields(current.as_writer(), fields)
    }
}

/// A log line that is being put together. The first value of a key stays.
#[derive(Default)]
struct Line {
    text: String,
    keys: Vec<String>,
}

impl Line {
    fn put(&mut self, key: &str, value: &str) {
        if self.keys.iter().any(|known| known == key) {
            return;
        }
        self.text.push(if self.keys.is_empty() { '{' } else { ',' });
        self.text.push_str(&json(key));
        self.text.push(':');
        self.text.push_str(value);
        self.keys.push(key.to_owned());
    }

    fn close(mut self) -> String {
        self.text.push('}');
        self.text
    }
}

/// Calls a function with each field's name and its value as JSON.
struct EachField<F>(F);

impl<F: FnMut(&'static str, String)> Visit for EachField<F> {
    fn record_f64(&mut self, field: &Field, value: f64) {
        (self.0)(field.name(), json(&value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        (self.0)(field.name(), value.to_string());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        (self.0)(field.name(), value.to_string());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        (self.0)(field.name(), value.to_string());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        (self.0)(field.name(), json(value));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        (self.0)(field.name(), json(&format!("{value:?}")));
    }
}

/// A number that JSON lacks becomes null.
fn json(value: &(impl Serialize + ?Sized)) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| "null".to_owned())
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
