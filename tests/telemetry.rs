//! Traces and logs, end to end: what a collector receives from the real process, and what the log says.

use crate::support::client::texts;
use crate::support::{Answer, Database, ModelServer, Options, Process};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as AnyValue;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::Message;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use wakeful_engine::telemetry::names;

/// A word in the user's text, a tool's arguments and the reply.
const MARKER: &str = "xyzzy-4711";

#[tokio::test]
async fn a_run_is_one_trace_of_known_spans_without_any_content() {
    let collector = Collector::start().await;
    let database = Database::new().await;
    let model = ModelServer::turns(vec![
        Answer::call("write_file", json!({"path": "note.txt", "content": MARKER})),
        Answer::call(
            "compose_email",
            json!({"to": ["ann@example.org"], "subject": MARKER, "body": format!("The word is {MARKER}.")}),
        ),
        Answer::text(&format!("I wrote {MARKER} down.")),
    ])
    .await;
    let process = options(&collector.url, &model).env("WAKEFUL_LOG", "debug").serve(&database).await;
    let client = process.client();
    let answer = client.chat("c1", &format!("Write {MARKER} down.")).await;
    let session_id = answer["session_id"].as_str().unwrap();
    let session = client.wait_for(session_id, "completed").await;
    assert_eq!(texts(&session, "assistant").last().unwrap(), &format!("I wrote {MARKER} down."));
    process.wait_for_log("Sent by email").await;
    let log = end(process).await;

    let send = collector.only(names::SEND_STEP);
    let process = collector.only(names::PROCESS_STEP);
    let agent = collector.only(&names::invoke_agent("default"));
    let deliver = collector.only(&names::deliver("email"));
    assert!(process.parent_span_id.is_empty() && deliver.parent_span_id.is_empty(), "roots");
    assert_ne!(process.trace_id, send.trace_id);
    assert_eq!(links(&process), std::slice::from_ref(&send.span_id));
    assert_eq!(
        links(&deliver),
        [send.span_id.clone(), process.span_id.clone()],
        "the request that began it, and its claim"
    );
    assert_eq!(agent.parent_span_id, process.span_id);
    let chats = collector.named(&names::chat("test"));
    let commits = collector.named(names::COMMIT_STEP);
    let tools: Vec<Span> =
        ["write_file", "compose_email"].map(|tool| collector.only(&names::execute_tool(tool))).into();
    assert_eq!(chats.len(), 3);
    // The beginning; each turn that asks for a tool, and its results; the reply.
    assert_eq!(commits.len(), 6);
    for span in chats.iter().chain(&commits).chain(&tools) {
        assert_eq!((&span.parent_span_id, &span.trace_id), (&agent.span_id, &process.trace_id), "{span:#?}");
    }
    for span in [&send, &process, &agent, &deliver].into_iter().chain(&chats).chain(&commits).chain(&tools) {
        assert_eq!(text(span, names::SESSION_ID), session_id, "{span:#?}");
        assert_eq!(text(span, names::CONVERSATION_ID), "default/c1", "{span:#?}");
        assert_eq!(attribute(span, names::ERROR_TYPE), None);
    }
    for span in [&send, &agent].into_iter().chain(&commits) {
        assert_eq!(text(span, names::RUN_ID), answer["run_id"].as_str().unwrap());
    }

    assert_eq!(send.kind(), SpanKind::Producer);
    assert_eq!(
        (process.kind(), text(&process, names::MESSAGING_OPERATION_TYPE)),
        (SpanKind::Consumer, "process".into())
    );
    assert_eq!(text(&agent, names::AGENT_NAME), "default");
    assert_eq!(text(&agent, names::OPERATION_NAME), names::OPERATION_INVOKE_AGENT);
    assert_eq!(text(&tools[0], names::TOOL_NAME), "write_file");
    assert_eq!(text(&tools[0], names::TOOL_TYPE), names::TOOL_TYPE_FUNCTION);
    assert!(attribute(&tools[0], names::TOOL_CALL_ID).is_some());
    let [first, .., last] = &chats[..] else { panic!("{chats:?}") };
    assert_eq!(first.kind(), SpanKind::Client);
    assert_eq!(text(first, names::OPERATION_NAME), names::OPERATION_CHAT);
    assert_eq!(text(first, names::PROVIDER_NAME), "openai");
    assert_eq!(text(first, names::REQUEST_MODEL), "test");
    assert_eq!(attribute(first, names::USAGE_INPUT_TOKENS), Some(AnyValue::IntValue(100)));
    assert_eq!(attribute(first, names::USAGE_OUTPUT_TOKENS), Some(AnyValue::IntValue(10)));
    assert_eq!(attribute(first, names::USAGE_CACHE_READ_INPUT_TOKENS), Some(AnyValue::IntValue(40)));
    assert_eq!(finish_reasons(first), ["tool_calls"]);
    assert_eq!(finish_reasons(last), ["stop"]);
    assert!(matches!(attribute(last, names::RESPONSE_TIME_TO_FIRST_CHUNK), Some(AnyValue::DoubleValue(_))));

    assert!(
        !collector.bytes().windows(MARKER.len()).any(|window| window == MARKER.as_bytes()),
        "content was exported"
    );
    assert!(!log.contains(MARKER), "content was logged:\n{log}");
    let completed = line(&log, "The run is completed");
    assert_eq!(completed["session.id"], session_id);
    assert_eq!(completed["trace_id"], hex::encode(&process.trace_id));
    assert_eq!(completed["run.id"], answer["run_id"]);
}

#[tokio::test]
async fn a_failed_attempt_names_its_error_once_and_the_next_is_linked_to_it() {
    let collector = Collector::start().await;
    let database = Database::new().await;
    let model = ModelServer::start(|_, number| match number {
        0 => Answer::Error(503),
        1 => Answer::call("write_file", json!({"path": "notes.txt", "content": "Here I am."})),
        _ => Answer::text("Here I am."),
    })
    .await;
    // With the default log filter: this is what an operator sees.
    let process = options(&collector.url, &model).env("WAKEFUL_LOG", "").serve(&database).await;
    let client = process.client();
    let answer = client.chat("c1", "Are you there?").await;
    client.wait_for(answer["session_id"].as_str().unwrap(), "completed").await;
    let log = end(process).await;

    let send = collector.only(names::SEND_STEP);
    let claims = collector.named(names::PROCESS_STEP);
    let [failed, done] = &claims[..] else { panic!("{claims:#?}") };
    assert_eq!(links(failed), std::slice::from_ref(&send.span_id));
    assert_eq!(links(done), [send.span_id.clone(), failed.span_id.clone()]);
    assert_ne!(failed.trace_id, done.trace_id);
    assert_eq!(text(failed, names::ERROR_TYPE), "overloaded");
    assert_eq!(attribute(done, names::ERROR_TYPE), None);
    let chats = collector.named(&names::chat("test"));
    assert_eq!(text(&chats[0], names::ERROR_TYPE), "overloaded");

    let warnings: Vec<Value> = lines(&log).filter(|line| line["level"] != "INFO").collect();
    let messages: Vec<&str> = warnings.iter().map(|line| line["message"].as_str().unwrap()).collect();
    assert_eq!(
        messages,
        [
            "No price is configured for this model: its calls count as free",
            "The step failed; trying again later"
        ]
    );
    assert_eq!(warnings[1]["session.id"], answer["session_id"]);
    assert_eq!(warnings[1]["trace_id"], hex::encode(&failed.trace_id));
    assert!(!log.contains("Committed step"), "at the default level a run has no line for each step: {log}");
    let foreign: Vec<Value> =
        lines(&log).filter(|line| !line["target"].as_str().unwrap().starts_with("wakeful")).collect();
    assert_eq!(foreign, Vec::<Value>::new(), "libraries are quiet");
}

#[tokio::test]
async fn a_run_that_fails_says_so_once_with_its_error() {
    let collector = Collector::start().await;
    let database = Database::new().await;
    let model = ModelServer::start(|_, _| Answer::Error(401)).await;
    let process = options(&collector.url, &model).serve(&database).await;
    let client = process.client();
    let answer = client.chat("c1", "Are you there?").await;
    client.wait_for(answer["session_id"].as_str().unwrap(), "failed").await;
    let log = end(process).await;

    let agent = collector.only(&names::invoke_agent("default"));
    assert_eq!(text(&agent, names::ERROR_TYPE), "unauthorized");
    let said: Vec<Value> = lines(&log)
        .filter(|line| line["error"].as_str().is_some_and(|e| e.contains("credentials")))
        .collect();
    let [said] = &said[..] else { panic!("{said:#?}") };
    assert_eq!((&said["level"], &said["message"]), (&json!("WARN"), &json!("The run is failed")));
    assert_eq!(said["session.id"], answer["session_id"]);
}

#[tokio::test]
async fn what_a_provider_says_of_a_request_is_in_the_runs_error_and_in_no_log() {
    let collector = Collector::start().await;
    let database = Database::new().await;
    // It quotes the prompt.
    let quoting = |status| Answer::Refused(status, format!("I cannot answer to: {MARKER}"));
    let model = ModelServer::start(move |_, number| quoting(if number == 0 { 503 } else { 400 })).await;
    let process = options(&collector.url, &model).env("WAKEFUL_LOG", "debug").serve(&database).await;
    let client = process.client();
    let answer = client.chat("c1", MARKER).await;
    let session = client.wait_for(answer["session_id"].as_str().unwrap(), "failed").await;
    assert!(session["error"].as_str().is_some_and(|error| error.contains(MARKER)), "{session}");
    let log = end(process).await;
    assert!(!log.contains(MARKER), "{log}");
    for (message, kind, status) in
        [("The step failed; trying again later", "overloaded", 503), ("The run is failed", "refused", 400)]
    {
        let line = line(&log, message);
        assert_eq!((&line["kind"], &line["model"]), (&json!(kind), &json!("openai/test")), "{line}");
        assert!(line["error"].as_str().unwrap().contains(&format!("(status {status})")), "{line}");
    }
}

#[tokio::test]
async fn a_collector_that_is_down_costs_a_count_and_one_line() {
    // A port that was just free, with no listener.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let nobody = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
    let process = options(&nobody, &model).serve(&database).await;
    let client = process.client();
    for conversation in ["c1", "c2"] {
        let answer = client.chat(conversation, "Hello?").await;
        client.wait_for(answer["session_id"].as_str().unwrap(), "completed").await;
    }
    let dropped = process.wait_for_log("Spans are dropped").await;
    let dropped: Value = serde_json::from_str(&dropped).unwrap();
    assert!(dropped["dropped"].as_u64().unwrap() > 0, "{dropped}");
    let log = end(process).await;
    assert_eq!(log.matches("Spans are dropped").count(), 1, "{log}");
}

fn options(collector: &str, model: &ModelServer) -> Options {
    Options::new()
        .model("openai/test")
        .env("OPENAI_BASE_URL", &model.url)
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", collector)
        .env("OTEL_BSP_SCHEDULE_DELAY", "100")
}

/// Ends the process, which then flushes its spans, and returns its whole log.
async fn end(process: Process) -> String {
    process.signal(libc::SIGTERM);
    let (status, process) = process.ended().await;
    assert!(status.success(), "{status}");
    let log = process.log();
    // Shown when the test fails.
    eprintln!("{log}");
    log
}

fn lines(log: &str) -> impl Iterator<Item = Value> {
    log.lines().map(|line| serde_json::from_str(line).expect("logs are JSON"))
}

fn line(log: &str, message: &str) -> Value {
    lines(log).find(|line| line["message"] == message).unwrap_or_else(|| panic!("no {message:?} in\n{log}"))
}

fn attribute(span: &Span, key: &str) -> Option<AnyValue> {
    let mut found = span.attributes.iter().filter(|one| one.key == key);
    let value = found.next().and_then(|one| one.value.clone()?.value);
    assert!(found.next().is_none(), "{key} is there twice: {span:#?}");
    value
}

fn text(span: &Span, key: &str) -> String {
    match attribute(span, key) {
        Some(AnyValue::StringValue(text)) => text,
        other => panic!("{key} is {other:?} in {span:#?}"),
    }
}

fn finish_reasons(span: &Span) -> Vec<String> {
    let Some(AnyValue::ArrayValue(array)) = attribute(span, names::RESPONSE_FINISH_REASONS) else {
        panic!("no finish reasons in {span:#?}")
    };
    let texts = array.values.into_iter().map(|value| match value.value {
        Some(AnyValue::StringValue(text)) => text,
        other => panic!("{other:?}"),
    });
    texts.collect()
}

/// The ids of the linked spans, in order.
fn links(span: &Span) -> Vec<Vec<u8>> {
    span.links.iter().map(|link| link.span_id.clone()).collect()
}

/// A collector that keeps everything it receives.
struct Collector {
    url: String,
    received: Arc<Mutex<Vec<u8>>>,
    spans: Arc<Mutex<Vec<Span>>>,
    server: JoinHandle<()>,
}

type Kept = (Arc<Mutex<Vec<u8>>>, Arc<Mutex<Vec<Span>>>);

impl Collector {
    async fn start() -> Collector {
        let (received, spans) = Kept::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let kept = (Arc::clone(&received), Arc::clone(&spans));
        let router = Router::new().route("/v1/traces", post(keep)).with_state(kept);
        let server = tokio::spawn(async move { axum::serve(listener, router).await.expect("it serves") });
        Collector { url, received, spans, server }
    }

    fn bytes(&self) -> Vec<u8> {
        self.received.lock().unwrap().clone()
    }

    /// The spans with this name, in the order in which they began.
    fn named(&self, name: &str) -> Vec<Span> {
        let mut spans: Vec<Span> =
            self.spans.lock().unwrap().iter().filter(|span| span.name == name).cloned().collect();
        spans.sort_by_key(|span| span.start_time_unix_nano);
        spans
    }

    fn only(&self, name: &str) -> Span {
        let [span] = &self.named(name)[..] else {
            let names: Vec<String> =
                self.spans.lock().unwrap().iter().map(|span| span.name.clone()).collect();
            panic!("not one {name:?} among {names:?}")
        };
        span.clone()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn keep(State((received, spans)): State<Kept>, body: Bytes) {
    received.lock().unwrap().extend_from_slice(&body);
    let request = ExportTraceServiceRequest::decode(body).expect("it is of the protocol");
    let resources = request.resource_spans.into_iter();
    spans.lock().unwrap().extend(resources.flat_map(|one| one.scope_spans).flat_map(|one| one.spans));
}
