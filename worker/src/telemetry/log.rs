//! JSON log lines: one flat object a line, with the ids of the spans around it.

use std::fmt;

use opentelemetry::Context;
use opentelemetry::trace::TraceContextExt;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{FormatEvent, JsonFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

/// Keys: `timestamp`, `level`, `target`, `message`, `trace_id` and `span_id` inside a trace, the event's fields, and
/// those of the spans around it (the innermost wins), `session.id` and `run.id` among them.
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
                // `otel.name` and its like steer the exporter.
                if !key.starts_with("otel.") {
                    line.entry(key).or_insert(value);
                }
            }
        }
        writeln!(writer, "{}", Value::Object(line))
    }
}

/// Writes the fields of an event into the line, never over a key that is there.
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
