//! Logs to stderr, traces to a collector, and what `/metrics` shows.
//!
//! Traces are recorded only when an OTLP endpoint is set. Neither logs nor traces hold text of people or
//! models: span fields are only ids, names, counts and kinds of errors. Keep to that when you add one.

use crate::web::{self, Reach};
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{BatchConfigBuilder, BatchSpanProcessor, SdkTracerProvider};
use tokio::runtime::Runtime;
use tracing::{Dispatch, Level, Metadata};
use tracing_subscriber::field::MakeExt as _;
use tracing_subscriber::filter::{FilterExt, LevelFilter, dynamic_filter_fn};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{self, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

mod context;
mod export;
mod log;
mod metrics;
pub mod names;
#[cfg(test)]
mod tests;

pub use context::{failed, link, passed_on, set_remote_parent, trace_context};
pub use export::dropped_spans;
pub use metrics::Metrics;

const DEFAULT_FILTER: &str =
    "info,apalis=warn,sqlx=warn,hyper=warn,h2=warn,reqwest=warn,rustls=warn,tower=warn";

/// Longest time that the process waits at its end for the last spans to be sent.
const FLUSH: Duration = Duration::from_secs(2);

/// Libraries whose spans are not exported. The exporter's own HTTP calls would otherwise create new spans to
/// export.
const FOREIGN: [&str; 9] =
    ["opentelemetry", "hyper", "h2", "reqwest", "rustls", "tower", "sqlx", "apalis", "tokio"];

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// For people. `color` if the terminal supports it.
    Text { color: bool },
    /// One JSON object per line.
    Json,
}

/// The settings of logs and traces, read from the environment by [`Settings::from_env`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Directives of `tracing_subscriber::EnvFilter`.
    pub filter: String,
    pub format: Format,
    /// The full address to post spans to. `None`: no traces.
    pub traces_endpoint: Option<String>,
    /// `None` if `OTEL_SERVICE_NAME` or `OTEL_RESOURCE_ATTRIBUTES` sets it.
    pub service_name: Option<String>,
    /// Maximum number of spans that may wait for the collector.
    pub queue_size: usize,
    /// Time limit of one request to the collector.
    pub timeout_ms: u64,
}

impl Settings {
    /// Reads `WAKEFUL_LOG`, `WAKEFUL_LOG_FORMAT` (`text` or `json`; text on a terminal and JSON elsewhere when
    /// unset), `NO_COLOR` and the `OTEL_*` variables that decide whether there are traces at all:
    /// `OTEL_SDK_DISABLED`, `OTEL_TRACES_EXPORTER`, the endpoints and the service's name. The SDK reads the others
    /// itself.
    pub fn from_env(env: impl Iterator<Item = (String, String)>) -> Settings {
        Settings::read(env, std::io::stderr().is_terminal())
    }

    fn read(env: impl Iterator<Item = (String, String)>, terminal: bool) -> Settings {
        let env: std::collections::BTreeMap<String, String> =
            env.filter(|(_, text)| !text.trim().is_empty()).collect();
        let get = |name: &str| env.get(name).map(|text| text.trim());
        let color = terminal && get("NO_COLOR").is_none();
        let format = match get("WAKEFUL_LOG_FORMAT") {
            Some(format) if format.eq_ignore_ascii_case("json") => Format::Json,
            Some(format) if format.eq_ignore_ascii_case("text") => Format::Text { color },
            _ if terminal => Format::Text { color },
            _ => Format::Json,
        };
        let off = get("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"))
            || get("OTEL_TRACES_EXPORTER").is_some_and(|value| value.eq_ignore_ascii_case("none"));
        let endpoint = get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").map(str::to_owned).or_else(|| {
            get("OTEL_EXPORTER_OTLP_ENDPOINT").map(|base| format!("{}/v1/traces", base.trim_end_matches('/')))
        });
        let named = get("OTEL_SERVICE_NAME").is_some()
            || get("OTEL_RESOURCE_ATTRIBUTES").is_some_and(|list| list.contains("service.name="));
        let number = |name: &str| get(name).and_then(|text| text.parse().ok()).filter(|number| *number > 0);
        Settings {
            filter: get("WAKEFUL_LOG").unwrap_or(DEFAULT_FILTER).to_owned(),
            format,
            traces_endpoint: endpoint.filter(|_| !off),
            service_name: (!named).then(|| "wakeful".to_owned()),
            queue_size: number("OTEL_BSP_MAX_QUEUE_SIZE")
                .and_then(|n| usize::try_from(n).ok())
                .unwrap_or(2048),
            timeout_ms: number("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
                .or_else(|| number("OTEL_EXPORTER_OTLP_TIMEOUT"))
                .unwrap_or(10_000),
        }
    }
}

/// The terminal of `wakeful dev`. Log lines are discarded until `open` is set, so that they do not mix with
/// the output of the start.
#[derive(Clone, Debug)]
pub struct Screen {
    pub color: bool,
    pub open: Arc<AtomicBool>,
}

impl<'a> MakeWriter<'a> for Screen {
    type Writer = Box<dyn Write>;

    fn make_writer(&'a self) -> Box<dyn Write> {
        if self.open.load(Ordering::Relaxed) {
            Box::new(std::io::stderr())
        } else {
            Box::new(std::io::sink())
        }
    }
}

/// Keeps traces going. Dropping it sends the waiting spans, for at most two seconds; the rest count as
/// dropped.
#[must_use = "traces end when this is dropped"]
#[derive(Debug)]
pub struct Guard {
    traces: Option<Traces>,
}

#[derive(Debug)]
struct Traces {
    provider: SdkTracerProvider,
    counts: Arc<export::Counts>,
    /// `None` only while being dropped.
    runtime: Option<Runtime>,
}

impl Guard {
    /// Returns how many spans of this pipeline were dropped.
    pub fn dropped(&self) -> u64 {
        self.traces.as_ref().map_or(0, |traces| traces.counts.dropped())
    }

    /// Sends the waiting spans and ends the traces, within two seconds.
    pub fn shutdown(self) {}
}

impl Drop for Traces {
    fn drop(&mut self) {
        // An error means that time ran out; `close` then counts the spans left.
        let _ = self.provider.shutdown_with_timeout(FLUSH);
        self.counts.close();
        if let Some(runtime) = self.runtime.take() {
            // This code usually runs inside a runtime, and a runtime must not be dropped inside another one.
            runtime.shutdown_background();
        }
    }
}

/// Sets up logs and traces for the whole process.
///
/// Never fails. If the filter is unusable, uses the default one; if the endpoint is unusable, records no
/// traces. The log reports both. A second call changes nothing.
pub fn init(settings: &Settings) -> Guard {
    install(build(settings, std::io::stderr, None))
}

/// Like [`init`], for `wakeful dev`: the log goes to `file`, and a short form of it to stderr.
pub fn init_dev(settings: &Settings, file: std::fs::File, screen: Screen) -> Guard {
    install(build(settings, Arc::new(file), Some(screen)))
}

fn install((dispatch, guard, warnings): (Dispatch, Guard, Vec<String>)) -> Guard {
    // Fails only if a subscriber is installed already, which then receives our events too.
    let _ = dispatch.try_init();
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    guard
}

fn build<W>(settings: &Settings, writer: W, screen: Option<Screen>) -> (Dispatch, Guard, Vec<String>)
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let mut warnings = Vec::new();
    let filter = filter(&settings.filter).unwrap_or_else(|error| {
        warnings.push(format!("WAKEFUL_LOG is not used: {error}"));
        EnvFilter::new(format!("{DEFAULT_FILTER},opentelemetry=off"))
    });
    let logs = match settings.format {
        Format::Text { color } => {
            let fields = tracing_subscriber::fmt::format::debug_fn(log::text_field).delimited(" ");
            tracing_subscriber::fmt::layer()
                .fmt_fields(fields)
                .with_writer(writer)
                .with_ansi(color)
                .with_target(false)
                .boxed()
        }
        Format::Json => tracing_subscriber::fmt::layer()
            .fmt_fields(log::Pairs)
            .event_format(log::Json)
            .with_ansi(false)
            .with_writer(writer)
            .boxed(),
    };
    let traces = settings.traces_endpoint.as_deref().and_then(|endpoint| {
        traces(settings, endpoint).map_err(|error| warnings.push(format!("No traces: {error}"))).ok()
    });
    let spans = traces.as_ref().map(|traces| {
        tracing_opentelemetry::layer()
            .with_tracer(traces.provider.tracer("wakeful"))
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_tracked_inactivity(false)
            // A dynamic filter, for the reason given at `asked_each_time`.
            .with_filter(dynamic_filter_fn(|metadata, _| is_ours(metadata)))
    });
    let screen = screen.map(|screen| {
        tracing_subscriber::fmt::layer()
            .event_format(log::Short { color: screen.color })
            .with_ansi(screen.color)
            .with_writer(screen)
            .with_filter(EnvFilter::new("warn,wakeful=info,wakeful_store=info,opentelemetry=off"))
    });
    let subscriber = tracing_subscriber::registry()
        .with(spans)
        .with(logs.with_filter(asked_each_time(filter)))
        .with(screen);
    (Dispatch::new(subscriber), Guard { traces }, warnings)
}

/// What is not logged unless the directives mention it: the exporter would repeat its messages for every batch, and rmcp's
/// have what MCP servers say, of encrypted sessions too.
const QUIET: [(&str, &str); 2] = [("opentelemetry", "opentelemetry=off"), ("rmcp", "rmcp=error")];

/// Reads the directives, and adds what is quiet without them.
fn filter(directives: &str) -> Result<EnvFilter, tracing_subscriber::filter::ParseError> {
    let quiet = QUIET.iter().filter(|(name, _)| !directives.contains(name)).map(|(_, quiet)| *quiet);
    EnvFilter::try_new(std::iter::once(directives).chain(quiet).collect::<Vec<_>>().join(","))
}

/// Makes `filter` decide about each span and event that it lets through, instead of once per callsite.
///
/// Works around a lost-event bug: when no layer wants a record of the crate `log`, its rejection stays in
/// thread-local state. The next span or event on that thread is then lost if its callsite is cached as
/// enabled, because the old rejection is applied to it.
fn asked_each_time<S>(filter: EnvFilter) -> impl layer::Filter<S>
where
    S: tracing::Subscriber + for<'a> LookupSpan<'a>,
{
    let most = filter.max_level_hint().unwrap_or(LevelFilter::TRACE);
    filter.and(dynamic_filter_fn(|_, _| true).with_max_level_hint(most))
}

/// Returns whether to export this: only spans of our own. Log lines stay in the log, which names the trace.
fn is_ours(metadata: &Metadata<'_>) -> bool {
    metadata.is_span()
        && *metadata.level() <= Level::INFO
        && !FOREIGN.iter().any(|name| is_of(metadata.target(), name))
}

/// Returns whether `target` is a module of the library `name`: of `sqlx` or `sqlx_core`, but not of `sqlxyz`.
fn is_of(target: &str, name: &str) -> bool {
    target
        .strip_prefix(name)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with("::") || rest.starts_with('_'))
}

fn traces(settings: &Settings, endpoint: &str) -> anyhow::Result<Traces> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("otlp")
        .enable_all()
        .build()?;
    let timeout = Duration::from_millis(settings.timeout_ms);
    let inner = web::client(Reach::Named(&[endpoint])).timeout(timeout).build()?;
    let exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(export::Client { runtime: runtime.handle().clone(), inner })
        .with_endpoint(endpoint)
        .with_timeout(timeout)
        .build()?;
    let counts = Arc::new(export::Counts::default());
    let exporter = export::Counting { inner: exporter, counts: counts.clone() };
    let batch = BatchConfigBuilder::default().with_max_queue_size(settings.queue_size).build();
    let inner = BatchSpanProcessor::builder(exporter).with_batch_config(batch).build();
    let gate = export::Gate { inner, counts: counts.clone(), capacity: settings.queue_size };
    let mut resource = Resource::builder();
    if let Some(name) = &settings.service_name {
        resource = resource.with_service_name(name.clone());
    }
    let resource =
        resource.with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION"))).build();
    let provider = SdkTracerProvider::builder().with_resource(resource).with_span_processor(gate).build();
    Ok(Traces { provider, counts, runtime: Some(runtime) })
}
