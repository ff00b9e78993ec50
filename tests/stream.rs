//! The stream: readers see each event of a session once and in order, even when they disconnect and come
//! back.

use crate::support::client::texts;
use crate::support::model::turns_since_user;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, timeout};
use reqwest::{Response, StatusCode, header};
use serde_json::{Value, json};

#[tokio::test]
async fn journal_frames_are_numbered_from_one_and_a_reader_goes_on_where_it_stopped() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| match turns_since_user(body) {
        0 => Answer::call("reserve", json!({"persons": 2})),
        _ => Answer::text("Your table is reserved."),
    })
    .await;
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let id = id(&client.chat("c1", "A table, please.").await);
    client.wait_for(&id, "completed").await;
    let (_, page) = client.get(&format!("/v1/sessions/{id}/events?limit=500")).await;
    let entries = page["items"].as_array().unwrap();

    let mut reader = Reader::open(&client, &id, None).await;
    let all = reader.take(entries.len()).await;
    assert!(all.iter().zip(1..).all(|(frame, number)| frame.id == Some(number)), "{all:?}");
    for (frame, entry) in all.iter().zip(entries) {
        assert_eq!(&frame.data, entry);
        assert_eq!(frame.event, entry["type"].as_str().unwrap().to_lowercase());
    }
    let events: Vec<&str> = all.iter().map(|frame| frame.event.as_str()).collect();
    for event in [
        "message_received",
        "trigger_event",
        "llm_called",
        "gen_start",
        "gen_complete",
        "tool_invoked",
        "tool_result",
        "state_transition",
        "invocation_result",
        "checkpoint",
    ] {
        assert!(events.contains(&event), "no {event} in {events:?}");
    }
    assert_eq!(all[0].data["payload"]["text"], "A table, please.");
    assert_eq!(last_text(&all), "Your table is reserved.");

    for cut in 0..entries.len() {
        let mut reader = Reader::open(&client, &id, Some(cut as i64)).await;
        assert_eq!(reader.take(entries.len() - cut).await, all[cut..]);
    }
    // A reader that has seen everything gets only what comes next.
    let mut reader = Reader::open(&client, &id, Some(entries.len() as i64)).await;
    client.chat("c1", "And another.").await;
    let next = reader.next().await.unwrap();
    assert_eq!((next.id, next.event.as_str()), (Some(entries.len() as i64 + 1), "message_received"));
    reader.until("checkpoint").await;
    client.wait_for(&id, "completed").await;

    // A number from before a backup was restored hides nothing that comes.
    let newest =
        client.get(&format!("/v1/sessions/{id}/events?limit=500")).await.1["items"].as_array().unwrap().len();
    let mut reader = Reader::open(&client, &id, Some(1_000_000)).await;
    client.chat("c1", "And one more.").await;
    let next = reader.next().await.unwrap();
    assert_eq!((next.id, next.event.as_str()), (Some(newest as i64 + 1), "message_received"));
}

#[tokio::test]
async fn what_is_being_said_is_seen_before_it_is_done_by_all_who_look() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello to you.")]).await;
    let process = options(&model).serve(&database).await;
    let client = process.client();
    model.hold();
    let id = id(&client.chat("c1", "Hello.").await);
    let mut first = Reader::open(&client, &id, None).await;
    let seen = first.until("gen_chunk").await;
    let reset = seen.iter().rposition(|frame| frame.event == "gen_reset").expect("a reset before the chunks");
    assert_eq!(seen[reset].data["attempt"], 1);
    assert!(seen[..reset].iter().all(|frame| frame.id.is_some()));
    assert!(
        seen[reset..].iter().all(|frame| frame.id.is_none()),
        "frames that may become void have no number: {seen:?}"
    );
    assert_eq!(shown(&seen), "Hello ");

    let mut second = Reader::open(&client, &id, None).await;
    let also = second.until("gen_chunk").await;
    assert_eq!(shown(&also), "Hello ", "a reader that comes later is shown all of it");
    assert_eq!(also, seen);
    model.release();

    for (reader, mut seen) in [(&mut first, seen), (&mut second, also)] {
        seen.extend(reader.until("checkpoint").await);
        assert_eq!(last_text(&seen), "Hello to you.");
        let numbers: Vec<i64> = seen.iter().filter_map(|frame| frame.id).collect();
        assert_eq!(numbers, (1..=numbers.len() as i64).collect::<Vec<_>>());
        let complete = seen.iter().position(|frame| frame.event == "gen_complete").unwrap();
        assert_eq!(shown(&seen[..complete]), "Hello to you.", "the chunks are the whole text");
        assert!(
            seen[complete..].iter().all(|frame| frame.event != "gen_chunk"),
            "nothing is shown after the truth"
        );
    }
}

#[tokio::test]
async fn a_reader_sees_the_next_attempt_after_a_workers_death_and_the_whole_answer() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello to you.")]).await;
    let options = options(&model);
    let api = options.clone().arg("--roles=api").serve(&database).await;
    let client = api.client();
    model.hold();
    let worker = work(&options, &database).await;
    let id = id(&client.chat("c1", "Hello.").await);
    let mut reader = Reader::open(&client, &id, None).await;
    let mut seen = reader.until("gen_chunk").await;
    assert_eq!(shown(&seen), "Hello ");
    worker.kill();

    let worker = work(&options, &database).await;
    let again = reader.until("gen_chunk").await;
    assert_eq!((again[0].event.as_str(), &again[0].data["attempt"]), ("gen_reset", &json!(2)), "{again:?}");
    seen.extend(again);
    model.release();
    seen.extend(reader.until("checkpoint").await);
    assert!(seen.iter().any(|frame| frame.event == "gen_resumed"), "{seen:?}");
    assert_eq!(last_text(&seen), "Hello to you.");
    let completed = seen.iter().filter(|frame| frame.event == "gen_complete").count();
    assert_eq!(completed, 1);
    let numbers: Vec<i64> = seen.iter().filter_map(|frame| frame.id).collect();
    assert_eq!(numbers, (1..=numbers.len() as i64).collect::<Vec<_>>());
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "assistant"), ["Hello to you."]);
    assert!(worker.terminate().success());
}

#[tokio::test]
async fn a_reader_outlives_the_api_process() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello to you.")]).await;
    let options = options(&model);
    let api = options.clone().arg("--roles=api").serve(&database).await;
    let worker = work(&options, &database).await;
    let client = api.client();
    model.hold();
    let id = id(&client.chat("c1", "Hello.").await);
    let mut reader = Reader::open(&client, &id, None).await;
    let mut seen = reader.until("gen_chunk").await;
    api.kill();
    assert!(reader.next().await.is_none(), "the connection is over");

    let last = seen.iter().filter_map(|frame| frame.id).max();
    let api = options.clone().arg("--roles=api").serve(&database).await;
    let client = api.client();
    let mut reader = Reader::open(&client, &id, last).await;
    let again = reader.until("gen_chunk").await;
    assert_eq!((again[0].event.as_str(), shown(&again).as_str()), ("gen_reset", "Hello "), "{again:?}");
    seen.extend(again);
    model.release();
    seen.extend(reader.until("checkpoint").await);
    let numbers: Vec<i64> = seen.iter().filter_map(|frame| frame.id).collect();
    assert_eq!(numbers, (1..=numbers.len() as i64).collect::<Vec<_>>(), "no gap and no repeat");
    assert_eq!(last_text(&seen), "Hello to you.");
    assert!(worker.terminate().success());
}

#[tokio::test]
async fn a_failed_run_shows_no_call_in_flight() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::Cut("Half of it".into())]).await;
    let process = options(&model).config("limits = { attempts = 1 }").serve(&database).await;
    let client = process.client();
    let id = id(&client.chat("c1", "Hello.").await);
    client.wait_for(&id, "failed").await;
    let mut reader = Reader::open(&client, &id, None).await;
    let mut seen = reader.until("checkpoint").await;
    client.chat("c1", "Still there?").await;
    seen.extend(reader.until("message_received").await);
    assert!(seen.iter().all(|frame| frame.id.is_some()), "{seen:?}");
    assert!(seen.iter().any(|frame| frame.event == "llm_called"), "the call that was made is on the record");
}

#[tokio::test]
async fn streams_end_when_the_process_drains() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let id = id(&client.chat("c1", "Hello.").await);
    client.wait_for(&id, "completed").await;
    let mut reader = Reader::open(&client, &id, None).await;
    reader.until("checkpoint").await;
    process.signal(libc::SIGTERM);
    assert!(reader.next().await.is_none());
    assert!(process.ended().await.0.success(), "a reader holds nothing up");
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Frame {
    pub(crate) id: Option<i64>,
    pub(crate) event: String,
    pub(crate) data: Value,
}

/// Reads frames as they are sent. An ordinary client would carry the last id over to frames without one.
pub(crate) struct Reader {
    response: Response,
    buffer: String,
}

impl Reader {
    pub(crate) async fn open(client: &Client, id: &str, last: Option<i64>) -> Reader {
        let mut request = client.get_request(&format!("/v1/sessions/{id}/stream"));
        if let Some(last) = last {
            request = request.header("Last-Event-ID", last.to_string());
        }
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
        Reader { response, buffer: String::new() }
    }

    /// The next frame; `None` when the connection ends.
    pub(crate) async fn next(&mut self) -> Option<Frame> {
        loop {
            if let Some((frame, rest)) = self.buffer.split_once("\n\n") {
                let fields: Vec<(&str, &str)> =
                    frame.lines().filter_map(|line| line.split_once(':')).collect();
                let field =
                    |name| fields.iter().find(|(key, _)| *key == name).map(|(_, value)| value.trim_start());
                // A comment only keeps the connection alive. It is not a frame.
                let frame = field("data").map(|data| Frame {
                    id: field("id").map(|id| id.parse().unwrap()),
                    event: field("event").unwrap().to_owned(),
                    data: serde_json::from_str(data).unwrap(),
                });
                self.buffer = rest.to_owned();
                match frame {
                    Some(frame) => return Some(frame),
                    None => continue,
                }
            }
            let bytes = tokio::time::timeout(timeout(), self.response.chunk()).await.expect("a frame comes");
            self.buffer.push_str(std::str::from_utf8(&bytes.ok()??).unwrap());
        }
    }

    /// The next comment's text. No frame may come before it.
    pub(crate) async fn comment(&mut self) -> String {
        loop {
            if let Some((comment, rest)) = self.buffer.split_once("\n\n") {
                let text = comment.strip_prefix(':').expect("a comment").trim().to_owned();
                self.buffer = rest.to_owned();
                return text;
            }
            let bytes =
                tokio::time::timeout(timeout(), self.response.chunk()).await.expect("a comment comes");
            self.buffer.push_str(std::str::from_utf8(&bytes.unwrap().unwrap()).unwrap());
        }
    }

    async fn take(&mut self, count: usize) -> Vec<Frame> {
        let mut frames = Vec::new();
        while frames.len() < count {
            frames.push(self.next().await.expect("the stream stays open"));
        }
        frames
    }

    /// The frames up to the first one with this name.
    pub(crate) async fn until(&mut self, event: &str) -> Vec<Frame> {
        let mut frames: Vec<Frame> = Vec::new();
        while frames.last().is_none_or(|frame| frame.event != event) {
            frames.push(self.next().await.expect("the stream stays open"));
        }
        frames
    }
}

/// What a reader sees: the chunks since the last reset.
pub(crate) fn shown(frames: &[Frame]) -> String {
    let since = frames.iter().rposition(|frame| frame.event == "gen_reset").map_or(0, |at| at + 1);
    let chunks = frames[since..].iter().filter(|frame| frame.event == "gen_chunk");
    chunks.map(|frame| frame.data["delta"].as_str().unwrap()).collect()
}

/// The text of the last completed model call.
pub(crate) fn last_text(frames: &[Frame]) -> &str {
    let complete = frames.iter().rfind(|frame| frame.event == "gen_complete").expect("a completed call");
    complete.data["payload"]["text"].as_str().unwrap()
}

fn options(model: &ModelServer) -> Options {
    Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url)
}

pub(crate) async fn work(options: &Options, database: &Database) -> Process {
    let worker = options.clone().arg("--roles=worker").spawn(&database.url);
    worker.wait_for_log("\"Working\"").await;
    worker
}

fn id(answer: &Value) -> String {
    answer["session_id"].as_str().expect("a session").to_owned()
}
