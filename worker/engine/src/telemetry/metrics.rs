//! What this process measures of its work. A server shows it at `/metrics`, with what the store measures
//! ([`wakeful_store::metrics`]).
//!
//! The names are those of Prometheus: base units (seconds, dollars), `_total` for what only grows. Each label has few values, which
//! the code or the configuration names: never the id of a session, a run or a person.

use super::dropped_spans;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use wakeful_store::metrics::WAITS;
use wakeful_store::step::Commit;
use wakeful_workflow::record::Usage;
use wakeful_workflow::session::SessionStatus;

/// Bounds in seconds of what a model or a tool takes.
const CALLS: [f64; 11] = [0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0];

/// Labels with values that the code names.
type Fixed<const N: usize> = [(&'static str, &'static str); N];
/// Labels of which some have values that the configuration names.
type Named<const N: usize> = [(&'static str, Cow<'static, str>); N];
/// A family of histograms, each made by a function without captures.
type Histograms<Labels> = Family<Labels, Histogram>;

/// The counters and histograms of a process. Clones of its parts share their values.
#[derive(Debug)]
pub struct Metrics {
    claims: Family<Fixed<1>, Counter>,
    commits: Histograms<Fixed<1>>,
    steps: Histogram,
    runs: Family<Fixed<1>, Counter>,
    model_calls: Histograms<Named<2>>,
    first_chunks: Histograms<Named<1>>,
    tokens: Family<Named<2>, Counter>,
    cost: Family<Named<1>, Counter<f64, AtomicU64>>,
    tool_calls: Histograms<Named<2>>,
    deliveries: Family<Named<2>, Counter>,
    messages: Family<Fixed<1>, Counter>,
}

impl Metrics {
    /// For a process with these channels. What alerts count is 0 from the start: Prometheus sees no increase in what appears with
    /// the first event.
    pub fn new<'c>(channels: impl IntoIterator<Item = &'c str>) -> Metrics {
        let metrics = Metrics {
            claims: Family::default(),
            commits: Family::new_with_constructor(|| Histogram::new(WAITS)),
            steps: Histogram::new(CALLS),
            runs: Family::default(),
            model_calls: Family::new_with_constructor(|| Histogram::new(CALLS)),
            first_chunks: Family::new_with_constructor(|| Histogram::new(CALLS)),
            tokens: Family::default(),
            cost: Family::default(),
            tool_calls: Family::new_with_constructor(|| Histogram::new(CALLS)),
            deliveries: Family::default(),
            messages: Family::default(),
        };
        for end in ["closed", "stale", "no_agent", "no_key", "no_host"] {
            drop(metrics.claims.get_or_create(&[("end", end)]));
        }
        drop(metrics.commits.get_or_create(&[("result", "stale")]));
        for status in [
            SessionStatus::Completed,
            SessionStatus::WaitingInput,
            SessionStatus::NeedsAttention,
            SessionStatus::Failed,
            SessionStatus::Cancelled,
        ] {
            drop(metrics.runs.get_or_create(&[("status", status.as_str())]));
        }
        for outcome in ["accepted", "duplicate", "refused"] {
            drop(metrics.messages.get_or_create(&[("outcome", outcome)]));
        }
        for channel in channels {
            for outcome in ["sent", "failed", "expired", "uncertain", "retried", "throttled"] {
                drop(
                    metrics
                        .deliveries
                        .get_or_create(&[("channel", named(channel)), ("outcome", outcome.into())]),
                );
            }
        }
        metrics
    }
}

fn named(value: &str) -> Cow<'static, str> {
    Cow::Owned(value.to_owned())
}

impl Metrics {
    /// A claim of a step job ended so.
    pub(crate) fn claim_ended(&self, end: &'static str) {
        self.claims.get_or_create(&[("end", end)]).inc();
    }

    /// A commit took so long, with its waits and repetitions. `None`: it failed, or a lost answer hides what became of it.
    pub(crate) fn committed(&self, commit: Option<&Commit>, took: Duration) {
        let result = match commit {
            Some(Commit::Continued { .. }) => "continued",
            Some(Commit::Closed { .. }) => "closed",
            Some(Commit::Moved) => "moved",
            Some(Commit::Stale) => "stale",
            None => "unknown",
        };
        self.commits.get_or_create(&[("result", result)]).observe(took.as_secs_f64());
    }

    /// A step was committed, for which the claim worked so long.
    pub(crate) fn stepped(&self, elapsed_s: f64) {
        self.steps.observe(elapsed_s);
    }

    /// A run ended with this status of its session.
    pub(crate) fn run_ended(&self, status: &'static str) {
        self.runs.get_or_create(&[("status", status)]).inc();
    }

    /// A model call ended after so long: `ok`, or the kind of its fault. Its first text came after `first`.
    pub(crate) fn model_called(
        &self,
        model: &str,
        outcome: &'static str,
        took: Duration,
        first: Option<Duration>,
    ) {
        let labels = [("model", named(model)), ("outcome", Cow::Borrowed(outcome))];
        self.model_calls.get_or_create(&labels).observe(took.as_secs_f64());
        if let Some(first) = first {
            self.first_chunks.get_or_create(&[("model", named(model))]).observe(first.as_secs_f64());
        }
    }

    /// What a model's reply was billed for.
    pub(crate) fn model_used(&self, model: &str, usage: &Usage) {
        let read = usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens;
        for (kind, tokens) in [
            ("input", read),
            ("cached_input", usage.cached_tokens),
            ("cache_write_input", usage.cache_write_tokens),
            ("output", usage.output_tokens),
        ] {
            let labels = [("model", named(model)), ("kind", Cow::Borrowed(kind))];
            self.tokens.get_or_create(&labels).inc_by(u64::try_from(tokens).unwrap_or(0));
        }
        let dollars = usage.cost_micros.max(0) as f64 / 1e6;
        self.cost.get_or_create(&[("model", named(model))]).inc_by(dollars);
    }

    /// A tool's code ran for so long: `ok`, `tool_error`, `outcome_unknown`, `host`, `timeout` or `panic`.
    pub(crate) fn tool_ran(&self, tool: &str, outcome: &'static str, took: Duration) {
        let labels = [("tool", named(tool)), ("outcome", Cow::Borrowed(outcome))];
        self.tool_calls.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// An attempt at a delivery ended so.
    pub(crate) fn delivery_tried(&self, channel: &str, outcome: &'static str) {
        let labels = [("channel", named(channel)), ("outcome", Cow::Borrowed(outcome))];
        self.deliveries.get_or_create(&labels).inc();
    }

    /// A message came in and is committed. `duplicate`: it had come before.
    pub(crate) fn message_came(&self, duplicate: bool) {
        let outcome = if duplicate { "duplicate" } else { "accepted" };
        self.messages.get_or_create(&[("outcome", outcome)]).inc();
    }

    /// Counts the messages that are refused because too many come in at once.
    pub(crate) fn refused_messages(&self) -> Counter {
        self.messages.get_or_create_owned(&[("outcome", "refused")])
    }

    /// Adds this process's measurements to `registry`. Their names begin with its prefix.
    pub fn register(&self, registry: &mut Registry) {
        let Metrics {
            claims,
            commits,
            steps,
            runs,
            model_calls,
            first_chunks,
            tokens,
            cost,
            tool_calls,
            deliveries,
            messages,
        } = self;
        registry.register("step_claims", "Claims of step jobs that ended, by how", claims.clone());
        registry.register(
            "commit_seconds",
            "How long a step's commit took, with its waits and repetitions. result=stale: another worker had the session, and nothing was written",
            commits.clone(),
        );
        registry.register(
            "step_seconds",
            "How long a claim worked on a step until its commit",
            steps.clone(),
        );
        registry.register(
            "runs",
            "Runs that ended or paused, by the session's status after it",
            runs.clone(),
        );
        registry.register(
            "model_call_seconds",
            "How long a model call took. outcome: ok, or the kind of its fault",
            model_calls.clone(),
        );
        registry.register(
            "model_first_chunk_seconds",
            "How long a model call took to its first text",
            first_chunks.clone(),
        );
        registry.register("model_tokens", "Tokens of the replies; no token has two kinds", tokens.clone());
        registry.register(
            "model_cost_dollars",
            "Cost of the replies, by the configured prices",
            cost.clone(),
        );
        registry.register("tool_call_seconds", "How long a tool's code ran", tool_calls.clone());
        registry.register(
            "delivery_attempts",
            "Attempts to send a message, by how they ended",
            deliveries.clone(),
        );
        registry.register("messages", "Messages that came in", messages.clone());
        registry.register_collector(Box::new(DroppedSpans));
    }
}

/// The spans that the collector did not take. They are counted for the whole process.
#[derive(Debug)]
struct DroppedSpans;

impl Collector for DroppedSpans {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let dropped = ConstCounter::new(dropped_spans());
        let help = "Spans that were not sent to the collector";
        dropped.encode(encoder.encode_descriptor("dropped_spans", help, None, dropped.metric_type())?)
    }
}
