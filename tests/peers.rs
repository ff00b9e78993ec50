//! Against a third-party model server: npm's aimock, which speaks both protocols and can be told to fail.
//!
//! `make test-peers` installs it and runs these.

mod absurd;
#[cfg(feature = "object-stores")]
mod blobs;
mod console;
mod email_out;
#[cfg(feature = "legacy-redis")]
mod legacy_chat;
mod mail;
mod mcp;
mod notify;
mod pgbouncer;
mod pictures;
mod roundtrip;
mod schemathesis;
#[cfg(feature = "ses")]
mod ses;

use crate::support::client::{numbers, texts};
use crate::support::{Client, Database, Options, Process, timeout};
use eventsource_stream::Event;
use futures::{Stream, StreamExt};
use serde_json::{Value, json};
use std::process::Stdio;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

/// The model server sends its text slowly, in several pieces. So the process writes more than one chunk, and
/// a reader sees the text grow.
const SLOW: (usize, u64) = (4, 400);

#[derive(Clone, Copy)]
enum Protocol {
    Anthropic,
    OpenAi,
}

impl Protocol {
    const BOTH: [Protocol; 2] = [Protocol::Anthropic, Protocol::OpenAi];

    fn model(self) -> &'static str {
        match self {
            Protocol::Anthropic => "anthropic/claude-sonnet-5",
            Protocol::OpenAi => "openai/gpt-5",
        }
    }

    /// `serve` with this protocol's provider at `aimock`.
    fn options(self, aimock: &Aimock) -> Options {
        let options = Options::new()
            .model(self.model())
            .config(&format!("[models.\"{}\"]\ninput_usd = 3.0\noutput_usd = 15.0", self.model()));
        match self {
            Protocol::Anthropic => {
                options.env("ANTHROPIC_API_KEY", "key").env("ANTHROPIC_BASE_URL", &aimock.url)
            }
            Protocol::OpenAi => {
                options.env("OPENAI_API_KEY", "key").env("OPENAI_BASE_URL", format!("{}/v1", aimock.url))
            }
        }
    }
}

#[tokio::test]
#[ignore = "needs aimock: make test-peers"]
async fn a_tool_loop_of_three_steps_over_chat_completions() {
    tool_loop(Protocol::OpenAi).await;
}

#[tokio::test]
#[ignore = "needs aimock: make test-peers"]
async fn a_tool_loop_of_three_steps_over_messages() {
    tool_loop(Protocol::Anthropic).await;
}

async fn tool_loop(protocol: Protocol) {
    const REPLY: &str = "It is late, and your table for two is reserved.";
    let asks = |id: &str, name: &str, arguments: Value| {
        let call = json!({"id": id, "name": name, "arguments": arguments.to_string()});
        json!({"toolCalls": [call], "usage": usage()})
    };
    let mut first = asks("call_one", "current_time", json!({}));
    first["content"] = json!("Let me look.");
    let second = asks("call_two", "reserve", json!({"persons": 2}));
    let last = json!({"content": REPLY, "usage": usage()});
    let aimock = Aimock::start(json!([
        slowly(json!({"match": {"userMessage": "table", "hasToolResult": false}, "response": first})),
        {"match": {"toolCallId": "call_one"}, "response": second},
        slowly(json!({"match": {"toolCallId": "call_two"}, "response": last})),
    ]))
    .await;
    let database = Database::new().await;
    let options = protocol.options(&aimock);
    // No worker runs before the reader is connected, so the reader also sees the first answer.
    let process = options.clone().arg("--roles=api").serve(&database).await;
    let client = process.client();
    let answer = client.chat("c1", "A table for two, please.").await;
    let session_id = answer["session_id"].as_str().expect("an id");
    let stream = client.stream(session_id, None).await;
    let worker = options.clone().arg("--roles=worker").spawn(&database.url);
    let frames = tokio::time::timeout(timeout(), until_completed(stream)).await.expect("the run completes");
    let session = client.session(session_id).await;

    assert_eq!(texts(&session, "assistant"), ["Let me look.", "", REPLY]);
    assert_eq!(texts(&session, "tool").len(), 2);
    assert_eq!(texts(&session, "tool")[1], "Reserved for 2.");
    assert_eq!(options.effects().len(), 1);
    assert_eq!(numbers(&session), [2, 3, 4, 5, 6, 7]);
    assert_eq!(session["total_turns"], 3);
    assert_eq!((&session["total_input_tokens"], &session["total_output_tokens"]), (&json!(60), &json!(21)));
    assert_eq!(session["total_cost_micros"], 3 * (20 * 3 + 7 * 15));

    let complete = of_kind(&frames, "gen_complete");
    assert_eq!(said(&complete), ["Let me look.", "", REPLY]);
    for (generation, whole) in
        complete.iter().map(|frame| &frame["payload"]["generation_id"]).zip(said(&complete))
    {
        let shown = shown(&frames, generation);
        assert!(whole.starts_with(&shown.concat()), "{shown:?} is not the beginning of {whole:?}");
        assert_eq!(shown.is_empty(), whole.is_empty(), "text is shown while it comes: {whole:?}");
    }
    assert!(shown(&frames, &complete[2]["payload"]["generation_id"]).len() > 1, "it came in pieces");

    let requests = aimock.requests().await;
    assert_eq!(requests.len(), 3);
    requests.iter().for_each(check);
    // Each request repeats the messages of the previous request unchanged. A provider's prompt cache depends
    // on that.
    for pair in requests.windows(2) {
        let (before, after) = (messages(&pair[0]), messages(&pair[1]));
        assert_eq!(before, &after[..before.len()]);
    }
    end(worker).await;
    end(process).await;
}

#[tokio::test]
#[ignore = "needs aimock: make test-peers"]
async fn a_rate_limit_is_waited_out_as_long_as_the_provider_asks() {
    for protocol in Protocol::BOTH {
        let limited = json!({"error": {"message": "slow down", "type": "rate_limit_error"}, "status": 429, "retryAfter": 2});
        let aimock = Aimock::start(json!([
            {"match": {"userMessage": "hello", "sequenceIndex": 0}, "response": limited},
            {"match": {"userMessage": "hello", "sequenceIndex": 1}, "response": {"content": "Now.", "usage": usage()}},
        ]))
        .await;
        let database = Database::new().await;
        let process = protocol.options(&aimock).serve(&database).await;
        let (session, frames) = run(&process.client(), "hello").await;

        assert_eq!(texts(&session, "assistant"), ["Now."]);
        assert_eq!(said(&of_kind(&frames, "gen_complete")), ["Now."]);
        let requests = aimock.requests().await;
        assert_eq!(statuses(&requests), [429, 200]);
        let sent_ms: Vec<i64> = requests.iter().map(|one| one["timestamp"].as_i64().unwrap()).collect();
        assert!(sent_ms[1] - sent_ms[0] >= 2_000, "{sent_ms:?}");
        assert_eq!(requests[0]["body"], requests[1]["body"]);
        requests.iter().for_each(check);
        assert_eq!(session["total_cost_micros"], 20 * 3 + 7 * 15, "only the answer is paid for");
        end(process).await;
    }
}

#[tokio::test]
#[ignore = "needs aimock: make test-peers"]
async fn a_stream_that_is_cut_is_asked_for_again_and_gives_one_reply() {
    for protocol in Protocol::BOTH {
        let mut cut = slowly(json!({
            "match": {"userMessage": "hello", "sequenceIndex": 0},
            "response": {"content": "This text begins and never comes to its end.", "usage": usage()},
        }));
        cut["truncateAfterChunks"] = json!(8);
        let whole = json!({"content": "This is all of it.", "usage": usage()});
        let aimock = Aimock::start(json!([
            cut,
            {"match": {"userMessage": "hello", "sequenceIndex": 1}, "response": whole},
        ]))
        .await;
        let database = Database::new().await;
        let process = protocol.options(&aimock).serve(&database).await;
        let (session, frames) = run(&process.client(), "hello").await;

        assert_eq!(texts(&session, "assistant"), ["This is all of it."]);
        assert_eq!(said(&of_kind(&frames, "gen_complete")), ["This is all of it."]);
        // A reader saw half an answer. Its generation id differs from that of the complete one.
        let complete = &of_kind(&frames, "gen_complete")[0]["payload"]["generation_id"];
        let half = of_kind(&frames, "gen_chunk")
            .into_iter()
            .filter(|frame| &frame["generation_id"] != complete)
            .map(|frame| frame["delta"].as_str().unwrap().to_owned())
            .collect::<String>();
        assert!(
            !half.is_empty() && "This text begins and never comes to its end.".starts_with(&half),
            "{half}"
        );
        let requests = aimock.requests().await;
        assert_eq!(statuses(&requests), [200, 200]);
        assert_eq!(requests[0]["response"]["interrupted"], true);
        assert_eq!(requests[0]["body"], requests[1]["body"]);
        requests.iter().for_each(check);
        end(process).await;
    }
}

/// A running aimock. Dropping it ends it.
struct Aimock {
    url: String,
    _child: Child,
    _dir: TempDir,
    /// Kept open, so that aimock can keep writing.
    _output: Lines<BufReader<ChildStdout>>,
}

impl Aimock {
    async fn start(fixtures: Value) -> Aimock {
        let peers = std::env::var("WAKEFUL_PEERS").expect("WAKEFUL_PEERS is set by `make test-peers`");
        let dir = TempDir::with_prefix("wakeful-aimock-").expect("a temporary folder");
        let file = dir.path().join("fixtures.json");
        std::fs::write(&file, json!({"fixtures": fixtures}).to_string()).expect("the fixtures");
        let mut child = Command::new(format!("{peers}/node_modules/.bin/llmock"))
            .args(["-p", "0", "--strict", "--validate-on-load", "--log-level", "info", "-f"])
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("aimock is installed");
        let mut output = BufReader::new(child.stdout.take().expect("piped")).lines();
        let listens = async {
            while let Some(line) = output.next_line().await.expect("its output is text") {
                if let Some((_, url)) = line.split_once("server listening on ") {
                    return url.trim().to_owned();
                }
            }
            panic!("aimock ended: {:?}", child.wait().await)
        };
        let url = tokio::time::timeout(timeout(), listens).await.expect("aimock listens");
        Aimock { url, _child: child, _dir: dir, _output: output }
    }

    /// Every request that aimock received, in its own form: it translates Anthropic's into messages of chat
    /// completions.
    async fn requests(&self) -> Vec<Value> {
        let (status, journal) = Client::new(&self.url).get("/__aimock/journal").await;
        assert!(status.is_success(), "{journal}");
        journal.as_array().expect("a list").clone()
    }
}

fn usage() -> Value {
    json!({"input_tokens": 20, "output_tokens": 7, "prompt_tokens": 20, "completion_tokens": 7, "total_tokens": 27})
}

fn slowly(mut fixture: Value) -> Value {
    (fixture["chunkSize"], fixture["latency"]) = (json!(SLOW.0), json!(SLOW.1));
    fixture
}

/// Sends `text`, and reads the stream until the run is completed. Returns the session and the frames' (event,
/// data).
async fn run(client: &Client, text: &str) -> (Value, Vec<(String, Value)>) {
    let answer = client.chat("c1", text).await;
    let session_id = answer["session_id"].as_str().expect("an id");
    let stream = client.stream(session_id, None).await;
    let frames = tokio::time::timeout(timeout(), until_completed(stream)).await.expect("the run completes");
    (client.session(session_id).await, frames)
}

async fn until_completed(mut stream: impl Stream<Item = Event> + Unpin) -> Vec<(String, Value)> {
    let mut frames = Vec::new();
    while let Some(frame) = stream.next().await {
        let data: Value = serde_json::from_str(&frame.data).expect("frames hold JSON");
        let over = data["payload"]["to_state"].clone();
        frames.push((frame.event, data));
        match over.as_str() {
            Some("completed") => return frames,
            Some("failed" | "needs_attention") => break,
            _ => {}
        }
    }
    panic!("not completed: {frames:#?}")
}

fn of_kind<'a>(frames: &'a [(String, Value)], kind: &str) -> Vec<&'a Value> {
    frames.iter().filter(|(event, _)| event == kind).map(|(_, data)| data).collect()
}

fn said(complete: &[&Value]) -> Vec<String> {
    complete.iter().map(|frame| frame["payload"]["text"].as_str().expect("a text").to_owned()).collect()
}

/// The pieces of one model call as a reader saw them. Asserts that their numbers are dense.
fn shown(frames: &[(String, Value)], generation_id: &Value) -> Vec<String> {
    let of_call =
        of_kind(frames, "gen_chunk").into_iter().filter(|frame| &frame["generation_id"] == generation_id);
    of_call
        .enumerate()
        .map(|(at, frame)| {
            assert_eq!(frame["chunk_no"], at);
            frame["delta"].as_str().expect("a text").to_owned()
        })
        .collect()
}

fn messages(request: &Value) -> &[Value] {
    request["body"]["messages"].as_array().expect("messages")
}

fn statuses(requests: &[Value]) -> Vec<i64> {
    requests.iter().map(|request| request["response"]["status"].as_i64().expect("a status")).collect()
}

/// Checks what both protocols require of a request.
fn check(request: &Value) {
    assert!(request["response"]["fixture"].is_object(), "aimock knew no answer to {request:#}");
    let (body, headers) = (&request["body"], &request["headers"]);
    assert_eq!(body["stream"], true);
    assert!(body["tools"].as_array().is_some_and(|tools| !tools.is_empty()));
    if request["path"] == "/v1/messages" {
        assert!(body["max_tokens"].as_i64().is_some_and(|tokens| tokens > 0));
        assert_eq!(headers["anthropic-version"], "2023-06-01");
        assert!(headers["x-api-key"].is_string());
    } else {
        assert_eq!(request["path"], "/v1/chat/completions");
        assert_eq!(body["stream_options"]["include_usage"], true);
        assert!(headers["authorization"].is_string());
    }
    assert_eq!(messages(request)[0], json!({"role": "system", "content": "You are a test."}));
    let mut asked: Vec<&Value> = Vec::new();
    for message in messages(request) {
        if message["role"] == "tool" {
            let id = &message["tool_call_id"];
            let at = asked.iter().position(|open| *open == id);
            asked.remove(at.unwrap_or_else(|| panic!("{id} was not asked for, or twice answered: {body:#}")));
            continue;
        }
        assert!(asked.is_empty(), "{asked:?} has no answer: {body:#}");
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            let arguments = call["function"]["arguments"].as_str().expect("arguments are text");
            assert!(serde_json::from_str::<Value>(arguments).expect("of JSON").is_object());
            asked.push(&call["id"]);
        }
        let empty = message["content"].as_str().is_none_or(|text| text.trim().is_empty());
        assert!(!empty || !asked.is_empty(), "an empty message: {body:#}");
    }
    assert!(asked.is_empty(), "{asked:?} has no answer: {body:#}");
}

async fn end(process: Process) {
    let ended = tokio::task::spawn_blocking(move || process.terminate()).await.expect("it can be waited for");
    assert!(ended.success(), "{ended}");
}
