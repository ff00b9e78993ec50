//! Log formats: JSON, with one flat object per line that includes the fields of the enclosing spans, and a
//! short form for a terminal.
//!
//! Messages and fields hold what strangers and providers wrote. So every format shows characters that act on a
//! terminal as escapes, and each event stays one line.

use std::fmt;

use opentelemetry::Context;
use opentelemetry::trace::TraceContextExt;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, JsonFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

use crate::printable::{json_text, printable};

/// The keys are `timestamp`, `level`, `target`, `message`; `trace_id` and `span_id` inside a trace; the
/// event's fields; and the fields of the enclosing spans (the innermost wins), such as `session.id` and
/// `run.id`.
pub(super) struct Json;

impl<S> FormatEvent<S, JsonFields> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, JsonFields>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = Map::new();
        let now = chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Micros, true);
        line.insert("timestamp".to_owned(), now.into());
        line.insert("level".to_owned(), event.metadata().level().as_str().into());
        line.insert("target".to_owned(), event.metadata().target().into());
        let context = Context::current();
        let span = context.span();
        if span.span_context().is_valid() {
            line.insert("trace_id".to_owned(), span.span_context().trace_id().to_string().into());
            line.insert("span_id".to_owned(), span.span_context().span_id().to_string().into());
        }
        event.record(&mut Fields(&mut line));
        for span in ctx.event_scope().into_iter().flatten() {
            let extensions = span.extensions();
            let Some(fields) = extensions.get::<FormattedFields<JsonFields>>() else { continue };
            let Ok(Value::Object(fields)) = serde_json::from_str(&fields.fields) else { continue };
            for (key, value) in fields {
                // `otel.name` and similar fields are only for the exporter.
                if !key.starts_with("otel.") {
                    line.entry(key).or_insert(value);
                }
            }
        }
        writeln!(writer, "{}", json_text(Value::Object(line).to_string()))
    }
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
