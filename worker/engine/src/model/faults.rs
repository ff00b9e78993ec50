//! Tests: every fault of a call, with both protocols.

use super::anthropic::Anthropic;
use super::call::Endpoint;
use super::openai::OpenAi;
use super::{Deltas, Model, NoDeltas};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use wakeful_workflow::context::{Context, Message};
use wakeful_workflow::fault::Fault;
use wakeful_workflow::record::{Block, Reply, Role};
use wakeful_workflow::wire::{anthropic, openai};
use wiremock::matchers::any;
use wiremock::{Mock, MockServer, ResponseTemplate};

pub(super) fn endpoint(base_url: &str) -> Endpoint {
    Endpoint {
        client: reqwest::Client::new(),
        base_url: base_url.to_owned(),
        api_key: Some("secret".to_owned().into()),
        idle_timeout_ms: 5_000,
        total_timeout_ms: 10_000,
    }
}

pub(super) fn hello() -> Context {
    let content = vec![Block::Text { text: "hello".to_owned() }];
    Context {
        system: String::new(),
        tools: Vec::new().into(),
        messages: vec![Message { role: Role::User, content: content.into() }],
        prefill: None,
    }
}

/// Collects the deltas.
#[derive(Default)]
pub(super) struct Heard(pub String);

impl Deltas for Heard {
    fn text(&mut self, delta: &str) {
        self.0.push_str(delta);
    }
}

fn models(endpoint: &Endpoint) -> [Box<dyn Model>; 2] {
    [
        Box::new(Anthropic::new(endpoint.clone(), anthropic::Options::new("m", 100))),
        Box::new(OpenAi::new(endpoint.clone(), openai::Options::new("m", 100))),
    ]
}

/// Calls both models at `endpoint` and returns their answers.
async fn ask(endpoint: &Endpoint) -> Vec<Result<Reply, Fault>> {
    let mut answers = Vec::new();
    for model in models(endpoint) {
        answers.push(model.call(&model.request(&hello()), &mut NoDeltas).await);
    }
    answers
}

/// Returns the answers of both models when the server answers `response`.
async fn replies(response: ResponseTemplate) -> Vec<Result<Reply, Fault>> {
    let server = MockServer::start().await;
    Mock::given(any()).respond_with(response).mount(&server).await;
    ask(&endpoint(&server.uri())).await
}

/// Returns the faults of both models when the server answers `response`.
async fn faults(response: ResponseTemplate) -> Vec<Fault> {
    let server = MockServer::start().await;
    Mock::given(any()).respond_with(response).mount(&server).await;
    ask(&endpoint(&server.uri())).await.into_iter().map(|answer| answer.unwrap_err()).collect()
}

fn error(status: u16, error: Value) -> ResponseTemplate {
    ResponseTemplate::new(status).set_body_json(json!({"type": "error", "error": error}))
}

fn events(events: &[&str]) -> ResponseTemplate {
    ResponseTemplate::new(200).set_body_raw(stream(events), "text/event-stream")
}

pub(super) fn stream(events: &[&str]) -> String {
    events.iter().map(|data| format!("data: {data}\n\n")).collect()
}

/// The server's behaviour after it has read the request and written its response.
#[derive(Clone, Copy)]
enum Then {
    Close,
    StaySilent,
    /// Sends keep-alive comments endlessly.
    Ping,
}

/// Starts a server that writes `response` byte for byte.
async fn raw_server(response: String, then: Then) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let mut request = Vec::new();
            // The request's body ends with a closing brace, which no HTTP head does.
            while !request.ends_with(b"}") {
                let mut chunk = [0; 4096];
                let read = socket.read(&mut chunk).await.unwrap();
                request.extend_from_slice(&chunk[..read]);
            }
            socket.write_all(response.as_bytes()).await.unwrap();
            match then {
                Then::Close => {}
                Then::StaySilent => {
                    // Wait until the client closes the connection.
                    let _ = socket.read(&mut [0; 1]).await;
                }
                Then::Ping => {
                    while socket.write_all(b": ping\n\n").await.is_ok() {
                        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                    }
                }
            }
        }
    });
    format!("http://{address}")
}

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n";
const ANTHROPIC_START: [&str; 3] = [
    r#"{"type":"message_start","message":{"usage":{"input_tokens":1}}}"#,
    r#"{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}"#,
    r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"half"}}"#,
];
const OPENAI_START: [&str; 1] = [r#"{"choices":[{"delta":{"content":"half"},"finish_reason":null}]}"#];

/// Returns the answers of both models to the start of a stream in their own protocol.
async fn ask_raw(head: &str, then: Then, configure: fn(&mut Endpoint)) -> Vec<Result<Reply, Fault>> {
    let mut answers = Vec::new();
    for (which, start) in [ANTHROPIC_START.as_slice(), OPENAI_START.as_slice()].into_iter().enumerate() {
        let url = raw_server(format!("{head}\r\n{}", stream(start)), then).await;
        let mut endpoint = endpoint(&url);
        configure(&mut endpoint);
        let model = models(&endpoint).into_iter().nth(which).unwrap();
        answers.push(model.call(&model.request(&hello()), &mut NoDeltas).await);
    }
    answers
}

#[tokio::test]
async fn a_rate_limit_carries_the_delay_that_the_provider_asks_for() {
    let response = error(429, json!({"type": "rate_limit_error", "message": "slow down"}));
    let expected = Fault::RateLimited { retry_after_ms: Some(3_000) };
    assert_eq!(faults(response.insert_header("retry-after", "3")).await, [expected.clone(), expected]);
}

#[tokio::test]
async fn a_failing_provider_is_overloaded() {
    for status in [500, 502, 503, 504, 529] {
        for fault in faults(error(status, json!({"message": "no"}))).await {
            let message = "no".to_owned();
            assert_eq!(fault, Fault::Overloaded { status, message, retry_after_ms: None });
        }
    }
}

#[tokio::test]
async fn an_error_page_that_is_no_json_is_told_as_it_is() {
    for fault in faults(ResponseTemplate::new(503).set_body_string("<h1>upstream down</h1>")).await {
        assert!(
            matches!(&fault, Fault::Overloaded { status: 503, message, .. } if message.contains("upstream"))
        );
    }
}

#[tokio::test]
async fn refused_credentials_are_unauthorized() {
    for status in [401, 403] {
        for fault in faults(error(status, json!({"message": "invalid x-api-key"}))).await {
            assert_eq!(fault, Fault::Unauthorized { message: "invalid x-api-key".to_owned() });
        }
    }
}

#[tokio::test]
async fn an_unknown_model_is_named() {
    for fault in faults(error(404, json!({"type": "not_found_error", "message": "model: m"}))).await {
        assert_eq!(fault, Fault::UnknownModel { message: "model: m".to_owned() });
    }
}

#[tokio::test]
async fn any_other_refusal_keeps_the_providers_words() {
    for fault in faults(error(400, json!({"message": "tools.0: bad schema"}))).await {
        assert_eq!(fault, Fault::Refused { status: 400, message: "tools.0: bad schema".to_owned() });
    }
}

#[tokio::test]
async fn a_request_that_is_too_long_is_a_context_overflow() {
    let answers = [
        error(
            400,
            json!({"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 8 maximum"}),
        ),
        error(400, json!({"code": "context_length_exceeded", "message": "too long"})),
        error(413, json!({"type": "request_too_large", "message": "Request exceeds the maximum size"})),
        error(
            429,
            json!({"type": "tokens", "code": "rate_limit_exceeded", "message": "Request too large for m on tokens per min \
                (TPM): Limit 30000, Requested 36278. The input or output tokens must be reduced in order to run successfully."}),
        ),
    ];
    for answer in answers {
        for fault in faults(answer).await {
            assert!(matches!(fault, Fault::ContextOverflow { .. }), "{fault:?}");
        }
    }
    let busy = json!({"type": "tokens", "code": "rate_limit_exceeded", "message": "Rate limit reached for m on tokens per \
        min (TPM): Limit 30000, Used 29000, Requested 2000. Please try again in 2s."});
    for fault in faults(error(429, busy)).await {
        assert!(matches!(fault, Fault::RateLimited { .. }), "a pause helps: {fault:?}");
    }
}

#[tokio::test]
async fn an_error_inside_the_stream_is_a_fault_and_no_answer() {
    let overloaded = r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#;
    for fault in faults(events(&[overloaded])).await {
        let message = "Overloaded".to_owned();
        assert_eq!(fault, Fault::Overloaded { status: 529, message, retry_after_ms: None });
    }
    let limited = r#"{"type":"error","error":{"code":"rate_limit_exceeded","message":"slow"}}"#;
    for fault in faults(events(&[limited])).await {
        assert_eq!(fault, Fault::RateLimited { retry_after_ms: None });
    }
}

#[tokio::test]
async fn an_error_body_under_status_200_is_a_fault() {
    for fault in faults(error(200, json!({"type": "overloaded_error", "message": "busy"}))).await {
        assert!(matches!(fault, Fault::Overloaded { status: 529, .. }));
    }
    for fault in faults(ResponseTemplate::new(200).set_body_json(json!({"choices": []}))).await {
        assert!(matches!(fault, Fault::BadResponse { .. }));
    }
}

#[tokio::test]
async fn a_stream_that_is_not_of_the_protocol_is_a_bad_response() {
    for fault in faults(events(&["{\"half\":"])).await {
        assert!(matches!(fault, Fault::BadResponse { .. }), "{fault:?}");
    }
}

#[tokio::test]
async fn an_answer_without_text_or_call_is_empty() {
    let anthropic =
        [r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"}}"#, r#"{"type":"message_stop"}"#];
    assert!(replies(events(&anthropic)).await[0].as_ref().unwrap().is_empty());
    let openai = [r#"{"choices":[{"delta":{"content":" "},"finish_reason":"stop"}]}"#, "[DONE]"];
    assert_eq!(faults(events(&["[DONE]"])).await[1], Fault::StreamCut);
    assert!(replies(events(&openai)).await[1].as_ref().unwrap().is_empty());
}

#[tokio::test]
async fn a_stream_that_ends_after_its_usage_is_whole_without_a_marker() {
    let end = r#"{"choices":[{"delta":{"content":"Hello."},"finish_reason":"stop"}]}"#;
    let usage = r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}"#;
    let reply = replies(events(&[end, usage])).await.remove(1).unwrap();
    assert_eq!((reply.content.len(), reply.usage.output_tokens), (1, 2));
    assert_eq!(faults(events(&[end])).await[1], Fault::StreamCut, "the usage may still have come");
}

#[tokio::test]
async fn a_withheld_answer_is_not_sampled_again() {
    let anthropic =
        [r#"{"type":"message_delta","delta":{"stop_reason":"refusal"}}"#, r#"{"type":"message_stop"}"#];
    assert!(matches!(faults(events(&anthropic)).await[0], Fault::Refused { .. }));
    let openai = [r#"{"choices":[{"delta":{},"finish_reason":"content_filter"}]}"#, "[DONE]"];
    assert!(matches!(faults(events(&openai)).await[1], Fault::Refused { .. }));
}

#[tokio::test]
async fn a_stream_that_ends_before_its_marker_is_cut() {
    // The connection closes before the announced length, and without any announced length.
    for head in [&format!("{HEAD}content-length: 9999\r\n"), HEAD] {
        for answer in ask_raw(head, Then::Close, |_| {}).await {
            assert_eq!(answer, Err(Fault::StreamCut));
        }
    }
}

#[tokio::test]
async fn a_server_that_falls_silent_in_the_middle_uses_up_an_attempt() {
    for answer in ask_raw(HEAD, Then::StaySilent, |endpoint| endpoint.idle_timeout_ms = 100).await {
        let fault = answer.unwrap_err();
        assert!(fault.shuts_gate() && !fault.is_outage(), "what came is paid for: {fault:?}");
        assert_eq!(fault, Fault::Stalled { after_ms: 100 });
    }
}

#[tokio::test]
async fn keep_alives_hold_off_the_idle_limit_but_not_the_total_one() {
    let limits: fn(&mut Endpoint) = |endpoint| {
        endpoint.idle_timeout_ms = 200;
        endpoint.total_timeout_ms = 600;
    };
    for answer in ask_raw(HEAD, Then::Ping, limits).await {
        assert_eq!(answer, Err(Fault::Stalled { after_ms: 600 }));
    }
}

#[tokio::test]
async fn a_server_that_never_answers_times_out() {
    let url = raw_server(String::new(), Then::StaySilent).await;
    let endpoint = Endpoint { idle_timeout_ms: 100, ..endpoint(&url) };
    for answer in ask(&endpoint).await {
        assert_eq!(answer, Err(Fault::Timeout { after_ms: 100 }));
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_is_unreachable() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    for answer in ask(&endpoint(&url)).await {
        assert!(matches!(answer, Err(Fault::Unreachable { .. })), "{answer:?}");
    }
}

#[tokio::test]
async fn a_connection_that_closes_before_the_head_is_unreachable() {
    let url = raw_server(String::new(), Then::Close).await;
    for answer in ask(&endpoint(&url)).await {
        assert!(matches!(answer, Err(Fault::Unreachable { .. })), "{answer:?}");
    }
}

#[tokio::test]
async fn a_key_that_no_header_can_hold_asks_for_configuration_and_is_not_shown() {
    let endpoint = Endpoint { api_key: Some("sk-1\n".to_owned().into()), ..endpoint("http://127.0.0.1:1") };
    for answer in ask(&endpoint).await {
        let Err(Fault::NotConfigured { message }) = answer else { panic!("{answer:?}") };
        assert!(!message.contains("sk-1"));
    }
}

/// Answers each request on each connection with `events`. Ends a response only after it was told to, and sends whenever it
/// accepts a connection.
async fn server_that_ends_late(events: String) -> (String, mpsc::UnboundedReceiver<()>, Arc<Semaphore>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (accepted, connections) = mpsc::unbounded_channel();
    let ends = Arc::new(Semaphore::new(0));
    let may_end = Arc::clone(&ends);
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let _ = accepted.send(());
            let (events, may_end) = (events.clone(), Arc::clone(&may_end));
            tokio::spawn(async move {
                loop {
                    let mut request = Vec::new();
                    while !request.ends_with(b"}") {
                        let mut chunk = [0; 4096];
                        match socket.read(&mut chunk).await {
                            Ok(0) | Err(_) => return,
                            Ok(read) => request.extend_from_slice(&chunk[..read]),
                        }
                    }
                    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
                    let response = format!("{head}{:x}\r\n{events}\r\n", events.len());
                    socket.write_all(response.as_bytes()).await.unwrap();
                    may_end.acquire().await.unwrap().forget();
                    let _ = socket.write_all(b"0\r\n\r\n").await;
                }
            });
        }
    });
    (url, connections, ends)
}

#[tokio::test]
async fn a_connection_is_used_again_though_its_response_ends_after_the_last_event() {
    const CALLS: usize = 10;
    let whole = [
        [
            r#"{"type":"message_start","message":{"usage":{"input_tokens":1}}}"#,
            r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":1}}"#,
            r#"{"type":"message_stop"}"#,
        ],
        [
            r#"{"choices":[{"delta":{"content":"Hello"},"finish_reason":null}]}"#,
            r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#,
            "[DONE]",
        ],
    ];
    for (number, events) in whole.iter().enumerate() {
        let (url, mut connections, ends) = server_that_ends_late(stream(events)).await;
        let model = &models(&endpoint(&url))[number];
        for _ in 0..CALLS {
            model.call(&model.request(&hello()), &mut NoDeltas).await.unwrap();
            ends.add_permits(1);
        }
        // A call that comes before the response ended opens a connection of its own, so there may be a few.
        let mut accepted = 0;
        while connections.try_recv().is_ok() {
            accepted += 1;
        }
        assert!((1..CALLS).contains(&accepted), "{accepted} connections for {CALLS} calls");
    }
}
