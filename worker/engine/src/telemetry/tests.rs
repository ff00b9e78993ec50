use std::io;
use std::sync::{Arc, Mutex};

use opentelemetry::trace::TraceContextExt;
use reqwest::StatusCode;
use reqwest::header::HeaderMap;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tracing::{Instrument, info, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use wiremock::matchers::{method, path};
use wiremock::{Mock, MockServer, Request, ResponseTemplate};

use super::*;

/// Collects log lines.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    fn json(&self) -> Vec<Value> {
        self.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn settings(env: &[(&str, &str)]) -> Settings {
    Settings::read(env.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())), false)
}

fn start(settings: &Settings) -> (Dispatch, Guard, Lines) {
    let lines = Lines::default();
    let writer = lines.clone();
    let (dispatch, guard, warnings) = build(settings, move || writer.clone(), None);
    assert_eq!(warnings, Vec::<String>::new());
    (dispatch, guard, lines)
}

/// Starts a collector that answers `status` and forwards each request that it receives.
async fn collector(status: StatusCode) -> (String, mpsc::UnboundedReceiver<(HeaderMap, Vec<u8>)>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    // It listens until the test ends.
    let server = Box::leak(Box::new(MockServer::start().await));
    let take = move |request: &Request| {
        let _ = sender.send((request.headers.clone(), request.body.clone()));
        ResponseTemplate::new(status)
    };
    Mock::given(method("POST")).and(path("/v1/traces")).respond_with(take).mount(server).await;
    (server.uri(), receiver)
}

/// Dropping a guard blocks, so do it on another thread: the collector must keep running.
async fn end(guard: Guard) {
    tokio::task::spawn_blocking(move || guard.shutdown()).await.unwrap();
}

/// Protobuf stores strings as they are, so the test can search for a name without a schema.
fn holds(body: &[u8], text: &str) -> bool {
    body.windows(text.len()).any(|window| window == text.as_bytes())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_receives_the_spans_by_their_names() {
    let (address, mut received) = collector(StatusCode::OK).await;
    let (dispatch, guard, lines) = start(&settings(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &address)]));
    tracing::dispatcher::with_default(&dispatch, || {
        let step = info_span!(parent: None, "process step", { names::SESSION_ID } = "s-1");
        step.in_scope(|| {
            let chat =
                info_span!("chat", "otel.name" = names::chat("gpt-5"), "otel.kind" = names::KIND_CLIENT);
            chat.in_scope(|| info!("Committed step 1"));
            info_span!(target: "sqlx::query", "foreign span").in_scope(|| ());
            tracing::debug_span!("detail").in_scope(|| ());
        });
    });
    end(guard).await;
    let (headers, body) = received.recv().await.unwrap();
    assert_eq!(headers["content-type"], "application/x-protobuf");
    for text in [names::PROCESS_STEP, "chat gpt-5", "session.id", "s-1", "service.name", "wakeful"] {
        assert!(holds(&body, text), "{text} is missing");
    }
    for text in ["foreign span", "detail", "Committed step 1"] {
        assert!(!holds(&body, text), "{text} was sent");
    }
    let line = &lines.json()[0];
    assert_eq!(line["message"], "Committed step 1");
    assert_eq!(line["session.id"], "s-1");
    assert!(line.get("otel.name").is_none());
    let trace_id = opentelemetry::TraceId::from_hex(line["trace_id"].as_str().unwrap()).unwrap();
    assert!(body.windows(16).any(|window| window == trace_id.to_bytes()), "{line}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_down_costs_a_count_and_one_line() {
    // A port that was free a moment ago and on which no process listens.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let (dispatch, guard, lines) = start(&settings(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &address)]));
    let counts = guard.traces.as_ref().unwrap().counts.clone();
    let before = dropped_spans();
    // The export thread logs through the global subscriber, which a test does not have. The line at shutdown
    // uses this test's subscriber.
    tokio::task::spawn_blocking(move || {
        tracing::dispatcher::with_default(&dispatch, || {
            for _ in 0..5 {
                info_span!("process step").in_scope(|| ());
            }
            guard.shutdown();
        });
    })
    .await
    .unwrap();
    assert_eq!(counts.dropped(), 5);
    assert!(dropped_spans() >= before + 5);
    assert!(lines.text().lines().count() <= 1, "{}", lines.text());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_refuses_costs_a_count() {
    let (address, mut received) = collector(StatusCode::BAD_REQUEST).await;
    let (dispatch, guard, _) = start(&settings(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &address)]));
    let counts = guard.traces.as_ref().unwrap().counts.clone();
    tracing::dispatcher::with_default(&dispatch, || info_span!("process step").in_scope(|| ()));
    end(guard).await;
    assert!(received.recv().await.is_some());
    assert_eq!(counts.dropped(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_hangs_fills_the_queue_and_no_more() {
    // Accepts a connection and never answers.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let env = [("OTEL_EXPORTER_OTLP_ENDPOINT", address.as_str()), ("OTEL_BSP_MAX_QUEUE_SIZE", "4")];
    let (dispatch, guard, _) = start(&settings(&env));
    let counts = guard.traces.as_ref().unwrap().counts.clone();
    tracing::dispatcher::with_default(&dispatch, || {
        for _ in 0..10 {
            info_span!("process step").in_scope(|| ());
        }
    });
    assert_eq!(guard.dropped(), 6);
    end(guard).await;
    assert_eq!(counts.dropped(), 10);
    drop(listener);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_is_a_trace_of_its_own_that_is_linked_to_its_enqueue() {
    let (address, mut received) = collector(StatusCode::OK).await;
    let (dispatch, guard, _) = start(&settings(&[("OTEL_EXPORTER_OTLP_ENDPOINT", &address)]));
    let sent = tracing::dispatcher::with_default(&dispatch, || {
        let ids = |span: &tracing::Span| span.context().span().span_context().clone();
        assert_eq!(trace_context(), None);
        let send = info_span!("send step");
        let carried = send.in_scope(trace_context).unwrap();
        assert_eq!(carried, format!("00-{}-{}-01", ids(&send).trace_id(), ids(&send).span_id()));

        let other = info_span!("somewhere else");
        let _inside = other.enter();
        let run = info_span!(parent: None, "process step");
        assert!(link(&run, &carried));
        assert_ne!(ids(&run).trace_id(), ids(&send).trace_id());
        assert_ne!(ids(&run).trace_id(), ids(&other).trace_id());

        let child = info_span!(parent: None, "commit step");
        assert!(set_remote_parent(&child, &carried));
        assert_eq!(ids(&child).trace_id(), ids(&send).trace_id());
        for bad in ["", "00-0-0-01", "nonsense", "00-00000000000000000000000000000000-0000000000000000-01"] {
            assert!(!link(&run, bad) && !set_remote_parent(&child, bad), "{bad}");
        }
        failed(&run, "rate_limited");
        ids(&send).span_id()
    });
    end(guard).await;
    let (_, body) = received.recv().await.unwrap();
    // Three times: as its own id, in the run's link, and as the commit's parent.
    assert_eq!(body.windows(8).filter(|window| *window == sent.to_bytes()).count(), 3);
    assert!(holds(&body, "error.type") && holds(&body, "rate_limited"));
}

#[tokio::test]
async fn without_an_endpoint_there_is_no_trace_and_no_cost() {
    let (dispatch, guard, lines) = start(&settings(&[]));
    assert!(guard.traces.is_none());
    let span = tracing::dispatcher::with_default(&dispatch, || info_span!("process step"));
    async {
        assert_eq!(trace_context(), None);
        assert!(!set_remote_parent(&tracing::Span::current(), "nonsense"));
        tracing::dispatcher::with_default(&dispatch, || info!(step = 3, "Committed"));
    }
    .instrument(span)
    .await;
    let line = &lines.json()[0];
    assert_eq!((&line["step"], &line["level"]), (&Value::from(3), &Value::from("INFO")));
    assert!(line.get("trace_id").is_none());
}

#[test]
fn a_line_has_each_key_once_and_the_innermost_newest_value_counts() {
    let (dispatch, _guard, lines) = start(&settings(&[]));
    tracing::dispatcher::with_default(&dispatch, || {
        let outer = info_span!("outer", "otel.name" = "x", "run.id" = "outer", who = "outer", late = "early");
        let inner = info_span!(parent: &outer, "inner", "run.id" = "inner", share = 0.5, r#type = tracing::field::Empty);
        outer.record("late", "late");
        inner.record("type", true);
        inner.in_scope(|| {
            info!(who = "event", level = "none", count = -1, nothing = f64::NAN, "Said \"it\":")
        });
    });
    let text = lines.text();
    let line: Value = serde_json::from_str(&text).unwrap();
    for (key, value) in [
        ("level", Value::from("INFO")),
        ("message", "Said \"it\":".into()),
        ("who", "event".into()),
        ("count", (-1).into()),
        ("nothing", Value::Null),
        ("run.id", "inner".into()),
        ("share", 0.5.into()),
        ("type", true.into()),
        ("late", "late".into()),
    ] {
        assert_eq!(line[key], value, "{key}");
        assert_eq!(text.matches(&format!("{key:?}:")).count(), 1, "{key}: {text}");
    }
    assert!(line.get("otel.name").is_none(), "{text}");
}

#[test]
fn the_filter_quiets_the_exporter_and_a_bad_one_is_reported() {
    let (dispatch, _guard, lines) = start(&settings(&[("WAKEFUL_LOG", "debug")]));
    tracing::dispatcher::with_default(&dispatch, || {
        tracing::error!(target: "opentelemetry_sdk", "every batch");
        tracing::debug!("ours");
    });
    assert_eq!(lines.json().len(), 1);
    let (_, _, warnings) = build(&settings(&[("WAKEFUL_LOG", "a=b=c")]), io::sink, None);
    assert!(warnings.len() == 1 && warnings[0].starts_with("WAKEFUL_LOG is not used: "), "{warnings:?}");
    let (_, guard, warnings) =
        build(&settings(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "not an address")]), io::sink, None);
    assert!(guard.traces.is_none() && warnings[0].starts_with("No traces: "), "{warnings:?}");
}

#[test]
fn a_library_is_known_by_whole_words() {
    assert!(is_of("sqlx", "sqlx") && is_of("sqlx::query", "sqlx") && is_of("hyper_util::client", "hyper"));
    assert!(!is_of("h2o_tools", "h2") && !is_of("wakeful::sqlx", "sqlx"));
}

#[test]
fn settings_follow_the_environment() {
    let default = settings(&[]);
    assert_eq!((default.format, default.traces_endpoint.as_deref()), (Format::Json, None));
    assert_eq!(default.service_name.as_deref(), Some("wakeful"));
    let endpoint = |env: &[(&str, &str)]| settings(env).traces_endpoint;
    let base = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318/");
    assert_eq!(endpoint(&[base]).as_deref(), Some("http://c:4318/v1/traces"));
    assert_eq!(
        endpoint(&[base, ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://t/x")]).as_deref(),
        Some("http://t/x")
    );
    assert_eq!(endpoint(&[base, ("OTEL_SDK_DISABLED", "true")]), None);
    assert_eq!(endpoint(&[base, ("OTEL_TRACES_EXPORTER", "none")]), None);
    assert_eq!(settings(&[("OTEL_SERVICE_NAME", "mine")]).service_name, None);
    assert_eq!(settings(&[("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine")]).service_name, None);
    assert_eq!(settings(&[("WAKEFUL_LOG_FORMAT", "text")]).format, Format::Text { color: false });
    let terminal = |env: Option<(&str, &str)>| {
        Settings::read(env.into_iter().map(|(a, b)| (a.to_owned(), b.to_owned())), true).format
    };
    assert_eq!(terminal(None), Format::Text { color: true });
    assert_eq!(terminal(Some(("NO_COLOR", "1"))), Format::Text { color: false });
    assert_eq!(terminal(Some(("WAKEFUL_LOG_FORMAT", "json"))), Format::Json);
}

/// What strangers and providers write reaches the log in fields, in messages and in the fields of spans.
#[test]
fn what_others_wrote_neither_acts_on_a_terminal_nor_forges_a_line() {
    let hostile = "\u{1b}]0;mine\u{7}\u{9b}31m\u{202e}\r\n2026-01-01T00:00:00Z ERROR forged\u{2028}x";
    let log = |dispatch: &Dispatch| {
        tracing::dispatcher::with_default(dispatch, || {
            let outer = info_span!("outer", who = hostile, what = %hostile);
            outer.in_scope(|| tracing::warn!(error = %hostile, text = hostile, "It said {hostile}"));
        });
    };
    let mut logs = Vec::new();
    for format in ["text", "json"] {
        let (dispatch, guard, lines) = start(&settings(&[("WAKEFUL_LOG_FORMAT", format)]));
        log(&dispatch);
        logs.push((format, lines.text()));
        drop(guard);
    }
    let lines = Lines::default();
    let writer = lines.clone();
    let short = tracing_subscriber::fmt::layer()
        .event_format(log::Short { color: false })
        .with_writer(move || writer.clone());
    log(&Dispatch::new(tracing_subscriber::registry().with(short)));
    logs.push(("short", lines.text()));
    for (format, text) in logs {
        let line = text.strip_suffix('\n').unwrap();
        let acts = |c: char| c.is_control() || matches!(c, '\u{202e}' | '\u{2028}');
        assert!(!line.contains(acts), "{format}: {line:?}");
        assert!(line.contains("forged"), "{format}: it is shown: {line:?}");
    }
}
