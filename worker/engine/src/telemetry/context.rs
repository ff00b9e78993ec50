//! The trace context as a string that a job row can hold.

use std::collections::HashMap;

use opentelemetry::Context;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Status, TraceContextExt};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use super::names;

/// The name of the field: <https://www.w3.org/TR/trace-context/#traceparent-header>.
const TRACEPARENT: &str = "traceparent";

/// Returns the `traceparent` of the current span. `None` while traces are off.
pub fn trace_context() -> Option<String> {
    let mut carrier = HashMap::new();
    TraceContextPropagator::new().inject_context(&Span::current().context(), &mut carrier);
    carrier.remove(TRACEPARENT)
}

/// Makes `span` a child of the span that `traceparent` names, in its trace.
///
/// Returns false and changes nothing if the text is not a traceparent, or if the span has already started or
/// is not recorded.
pub fn set_remote_parent(span: &Span, traceparent: &str) -> bool {
    parse(traceparent).is_some_and(|context| span.set_parent(context).is_ok())
}

/// Links `span` to every span named in `trace_context`, a job row's text. All spans stay in their own traces.
///
/// A claim's first span is a root (`parent: None`), linked to the span that enqueued the job and to the
/// previous claim. A single trace for a whole session would be too large for tracing tools. Returns false and
/// changes nothing if the text has no traceparent.
pub fn link(span: &Span, trace_context: &str) -> bool {
    let contexts: Vec<Context> = trace_context.split_whitespace().filter_map(parse).collect();
    for context in &contexts {
        span.add_link(context.span().span_context().clone());
    }
    !contexts.is_empty()
}

/// Returns the trace context that the current span writes to its job and to the jobs that it enqueues: the
/// traceparent of the very first span, a space, and its own traceparent. Returns `trace_context` unchanged
/// while traces are off.
pub fn passed_on(trace_context: Option<&str>) -> Option<String> {
    let began = trace_context.and_then(|text| text.split_whitespace().next());
    match (began, self::trace_context()) {
        (Some(began), Some(own)) => Some(format!("{began} {own}")),
        (None, own @ Some(_)) => own,
        (_, None) => trace_context.map(str::to_owned),
    }
}

/// Marks `span` as failed. `error_type` is a word from a small set, such as `rate_limited`, never a message.
pub fn failed(span: &Span, error_type: &'static str) {
    span.set_attribute(names::ERROR_TYPE, error_type);
    span.set_status(Status::error(error_type));
}

fn parse(traceparent: &str) -> Option<Context> {
    let carrier = HashMap::from([(TRACEPARENT.to_owned(), traceparent.to_owned())]);
    let context = TraceContextPropagator::new().extract_with_context(&Context::new(), &carrier);
    context.span().span_context().is_valid().then_some(context)
}
