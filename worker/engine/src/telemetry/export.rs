//! Export of spans to the collector, and the count of dropped spans.
//!
//! A failing exporter never slows down the work: spans wait in a bounded queue. Spans that do not fit or
//! cannot be sent are counted, and the log gets at most one line per minute.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use opentelemetry::Context;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{BatchSpanProcessor, Span, SpanData, SpanExporter, SpanProcessor};
use tokio::runtime::Handle;

/// Minimum time between two log lines.
const QUIET: Duration = Duration::from_secs(60);

static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Returns how many spans this process dropped, for `/metrics`.
pub fn dropped_spans() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// Counters of one pipeline's spans.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Spans that are neither delivered nor dropped yet.
    waiting: AtomicUsize,
    dropped: AtomicU64,
    closed: AtomicBool,
    logged: Mutex<Option<Instant>>,
}

impl Counts {
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    fn drop_spans(&self, spans: usize, reason: &str) {
        self.dropped.fetch_add(spans as u64, Ordering::Relaxed);
        DROPPED.fetch_add(spans as u64, Ordering::Relaxed);
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.is_none_or(|at| at.elapsed() >= QUIET) {
            *logged = Some(Instant::now());
            let dropped = self.dropped();
            drop(logged);
            tracing::warn!(dropped, reason, "Spans are dropped: the collector does not take them");
        }
    }

    /// Counts the waiting spans as dropped. An export that ends later does not count them again.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        let left = self.waiting.swap(0, Ordering::SeqCst);
        if left > 0 {
            self.drop_spans(left, "shut down before they were sent");
        }
    }
}

/// Passes spans to the batch queue while it has room.
///
/// The queue itself would drop them too, but does not tell how many.
#[derive(Debug)]
pub(super) struct Gate {
    pub inner: BatchSpanProcessor,
    pub counts: Arc<Counts>,
    /// The size of the inner queue.
    pub capacity: usize,
}

impl SpanProcessor for Gate {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.inner.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        if !span.span_context.is_sampled() {
            return;
        }
        if self.counts.closed.load(Ordering::SeqCst) {
            self.counts.drop_spans(1, "ended after the shutdown");
        } else if self.counts.waiting.fetch_add(1, Ordering::SeqCst) < self.capacity {
            self.inner.on_end(span);
        } else {
            self.counts.waiting.fetch_sub(1, Ordering::SeqCst);
            self.counts.drop_spans(1, "the queue is full");
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

/// Counts the spans that its exporter cannot deliver.
#[derive(Debug)]
pub(super) struct Counting<E> {
    pub inner: E,
    pub counts: Arc<Counts>,
}

impl<E: SpanExporter> SpanExporter for Counting<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let result = self.inner.export(batch).await;
        if !self.counts.closed.load(Ordering::SeqCst) {
            self.counts.waiting.fetch_sub(spans, Ordering::SeqCst);
            if let Err(error) = result {
                self.counts.drop_spans(spans, &error.to_string());
            }
        }
        // Return success, because the failure is counted: the SDK would log an error for each batch.
        Ok(())
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

/// Sends on its own runtime. The batch thread has none, and export must not load the worker's runtime or need
/// it during shutdown.
#[derive(Debug)]
pub(super) struct Client {
    pub runtime: Handle,
    pub inner: reqwest::Client,
}

#[async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let client = self.inner.clone();
        self.runtime.spawn(async move { client.send_bytes(request).await }).await?
    }
}
