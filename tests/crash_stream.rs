//! `kill -9` while a model speaks (K6 to K10), and streams that end too early (K11). The transcript never has
//! half a message, and readers end with exactly what is in the transcript.

mod readers;

use crate::stream::{Frame, Reader, last_text, shown, work};
use crate::support::checker::{Traces, check};
use crate::support::raw::{Protocol, RawModel, Sent, prefill};
use crate::support::world::post_before_death;
use crate::support::{Database, Options, eventually};
use serde_json::{Value, json};
use sha2::Digest;

/// Each piece is longer than a chunk's limit, so each piece becomes a chunk.
fn pieces() -> Vec<String> {
    ["once", "upon", "a", "time"].map(|word| format!("{} ", word).repeat(1100 / word.len())).to_vec()
}

fn whole() -> String {
    pieces().concat()
}

async fn speaking(protocol: Protocol) -> RawModel {
    let pieces = pieces();
    RawModel::saying(protocol, &pieces.iter().map(String::as_str).collect::<Vec<_>>()).await
}

/// Options for a model that takes a prefill, or for one that does not.
fn options(model: &RawModel, prefilled: bool) -> Options {
    let options = model.options();
    if prefilled { options.config("[models.\"anthropic/test\"]\nprefill = true") } else { options }
}

/// A run that was cut off once and then continued.
struct Survived {
    traces: Traces,
    bodies: Vec<Value>,
}

impl Survived {
    /// The only reply.
    fn reply(&self) -> &str {
        let replies: Vec<&Value> =
            self.traces.records.iter().filter(|record| record["role"] == "assistant").collect();
        let [reply] = replies.as_slice() else { panic!("one reply: {replies:?}") };
        reply["content"][0]["text"].as_str().unwrap()
    }

    /// (strategy, prior_seq) of each resumption of an attempt that was cut off.
    fn resumed(&self) -> Vec<(&str, i64)> {
        let entries = self.traces.journal("GEN_RESUMED").into_iter();
        entries
            .map(|entry| (entry["strategy"].as_str().unwrap(), entry["prior_seq"].as_i64().unwrap()))
            .collect()
    }

    fn attempts(&self) -> Vec<i64> {
        let called = self.traces.journal("LLM_CALLED").into_iter();
        called.map(|called| called["attempt"].as_i64().unwrap()).collect()
    }
}

/// Sends a message, lets the failpoint kill the process, and lets another one finish.
async fn survive(model: RawModel, options: &Options, failpoint: &str) -> Survived {
    let database = Database::new().await;
    let process = options.clone().env("FAILPOINTS", failpoint).serve(&database).await;
    let id = post_before_death(&database, &process.client(), "c1", "Tell me a story.").await;
    let (status, process) = process.ended().await;
    assert!(!status.success() && process.log().contains("failpoint"), "{}", process.log());

    let process = options.serve(&database).await;
    process.client().wait_for(&id, "completed").await;
    assert!(process.terminate().success());
    finished(&database, &id, &model, options).await
}

/// Like [`survive`], with a reader. It is shown `pieces_shown` pieces one by one, and then the next one comes, or the end.
async fn survive_read(model: RawModel, options: &Options, failpoint: &str, pieces_shown: usize) -> Survived {
    let database = Database::new().await;
    let process = options.clone().env("FAILPOINTS", failpoint).serve(&database).await;
    model.hold_after(before_text(&model));
    let id = id(&process.client().chat("c1", "Tell me a story.").await);
    let mut reader = Reader::open(&process.client(), &id, None).await;
    show(&model, &mut reader, pieces_shown).await;
    if pieces_shown == pieces().len() {
        model.release();
    } else {
        model.hold_after(before_text(&model) + pieces_shown + 1);
    }
    let (status, process) = process.ended().await;
    assert!(!status.success() && process.log().contains("failpoint"), "{}", process.log());
    model.release();

    let process = options.serve(&database).await;
    process.client().wait_for(&id, "completed").await;
    assert!(process.terminate().success());
    finished(&database, &id, &model, options).await
}

/// How many events come before the first piece of the answer.
fn before_text(model: &RawModel) -> usize {
    match model.protocol {
        Protocol::Anthropic => 2,
        Protocol::OpenAi => 0,
    }
}

/// Lets the model say `count` pieces, each when the reader has been shown those before it. Returns the frames.
async fn show(model: &RawModel, reader: &mut Reader, count: usize) -> Vec<Frame> {
    let mut seen = Vec::new();
    for said in 1..=count {
        model.hold_after(before_text(model) + said);
        while shown(&seen) != pieces()[..said].concat() {
            seen.push(reader.next().await.unwrap());
        }
    }
    seen
}

async fn finished(database: &Database, id: &str, model: &RawModel, options: &Options) -> Survived {
    let traces = check(database, id, &options.effects()).await;
    let sent = model.bodies();
    let hashes: Vec<String> = sent.iter().map(|body| hex::encode(sha2::Sha256::digest(body))).collect();
    let called: Vec<&str> = traces
        .journal("LLM_CALLED")
        .into_iter()
        .map(|called| called["request_sha256"].as_str().expect("a hash"))
        .collect();
    // A process writes the intent before it sends the request. If it is killed in between, there are more
    // entries than bodies.
    assert_eq!(
        called[called.len() - sent.len()..],
        hashes,
        "each entry has the hash of the bytes that were sent"
    );
    Survived { traces, bodies: sent.iter().map(|body| serde_json::from_str(body).unwrap()).collect() }
}

#[tokio::test]
async fn k06_a_call_that_was_written_down_and_not_made_is_made_with_the_same_bytes() {
    for protocol in Protocol::BOTH {
        let model = speaking(protocol).await;
        let options = options(&model, false);
        let survived = survive(model, &options, "K6=1*return").await;
        assert_eq!(survived.reply(), whole());
        assert_eq!(survived.attempts(), [1, 2]);
        assert_eq!(survived.bodies.len(), 1, "the first attempt died before it asked");
        let called = survived.traces.journal("LLM_CALLED");
        assert_eq!(called[0]["request_sha256"], called[1]["request_sha256"]);
        assert_eq!(survived.resumed(), [("replace", -1)]);
    }
}

#[tokio::test]
async fn k07_an_answer_that_had_begun_and_was_shown_to_nobody_is_replaced() {
    // No chunk was committed, so even with a prefill there is no text to resume from.
    for prefilled in [false, true] {
        let model = speaking(Protocol::Anthropic).await;
        let options = options(&model, prefilled);
        let survived = survive(model, &options, "K7=1*return").await;
        assert_eq!(survived.reply(), whole());
        assert_eq!(survived.attempts(), [1, 2]);
        assert_eq!(survived.bodies[0], survived.bodies[1]);
        assert_eq!(survived.resumed(), [("replace", -1)]);
    }
}

#[tokio::test]
async fn k08_an_answer_that_was_half_shown_is_replaced_and_never_left_half() {
    for protocol in Protocol::BOTH {
        let model = speaking(protocol).await;
        let options = options(&model, false);
        let survived = survive_read(model, &options, "K8=2*off->1*return", 2).await;
        assert_eq!(survived.reply(), whole());
        assert_eq!(survived.bodies[0], survived.bodies[1], "from the start");
        assert_eq!(survived.resumed(), [("replace", 2)]);
    }
}

#[tokio::test]
async fn k08_an_answer_that_was_half_shown_is_gone_on_from_where_the_model_takes_a_prefill() {
    let model = speaking(Protocol::Anthropic).await;
    let options = options(&model, true);
    let survived = survive_read(model, &options, "K8=2*off->1*return", 2).await;
    assert_eq!(survived.reply(), whole());
    assert_eq!(survived.resumed(), [("resume", 2)]);
    assert_eq!(survived.attempts(), [1, 2]);
    let mut second = survived.bodies[1].clone();
    assert_eq!(
        prefill(&second),
        Some(pieces()[..3].concat().trim_end()),
        "the three chunks, without the blank"
    );
    second["messages"].as_array_mut().unwrap().pop();
    assert_eq!(second, survived.bodies[0], "and all else as it was");
}

#[tokio::test]
async fn k09_a_chunk_that_nobody_was_told_of_is_seen_once_by_a_reader_elsewhere() {
    for prefilled in [false, true] {
        let database = Database::new().await;
        let model = speaking(Protocol::Anthropic).await;
        let options = options(&model, prefilled);
        let api = options.clone().arg("--roles=api").serve(&database).await;
        let client = api.client();
        let worker = work(&options.clone().env("FAILPOINTS", "K9=1*off->1*return"), &database).await;
        model.hold_after(before_text(&model));
        let id = id(&client.chat("c1", "Tell me a story.").await);
        let mut reader = Reader::open(&client, &id, None).await;
        let mut seen = show(&model, &mut reader, 1).await;
        model.hold_after(before_text(&model) + 2);
        let (status, worker) = worker.ended().await;
        assert!(!status.success() && worker.log().contains("failpoint"), "{}", worker.log());

        while shown(&seen) != pieces()[..2].concat() {
            seen.push(reader.next().await.unwrap());
        }
        let worker = work(&options, &database).await;
        // The model holds the second attempt until the reader knows of it.
        while seen.iter().filter(|frame| frame.event == "gen_reset").count() < 2 {
            seen.push(reader.next().await.unwrap());
        }
        model.release();
        seen.extend(reader.until("checkpoint").await);
        assert_frames(&seen, &whole());
        let first = seen.iter().filter(|frame| frame.event == "gen_reset").nth(1).unwrap();
        assert_eq!(first.data["attempt"], 2);
        assert!(worker.terminate().success());
        let survived = finished(&database, &id, &model, &options).await;
        assert_eq!(survived.reply(), whole());
        assert_eq!(survived.resumed(), [(if prefilled { "resume" } else { "replace" }, 1)]);
    }
}

#[tokio::test]
async fn k10_an_answer_that_came_whole_and_was_not_committed_is_asked_for_again() {
    for (prefilled, strategy) in [(false, "replace"), (true, "resume")] {
        let model = speaking(Protocol::Anthropic).await;
        let options = options(&model, prefilled);
        let survived = survive_read(model, &options, "K10=1*return", 4).await;
        // The prefill is the whole answer, and the model has only the final blank left to say.
        assert_eq!(survived.reply(), whole());
        assert_eq!(survived.resumed(), [(strategy, 3)]);
    }
}

#[tokio::test]
async fn k11_a_stream_that_ends_without_its_end_marker_is_no_answer() {
    for protocol in Protocol::BOTH {
        let model = RawModel::start(protocol, move |_, number| {
            Sent::Events(match number {
                0 => protocol.half_text(&["This is ha"]),
                _ => protocol.text(&["This is all of it."]),
            })
        })
        .await;
        let survived = retried(model).await;
        assert_eq!(survived.reply(), "This is all of it.");
    }
}

#[tokio::test]
async fn k11_a_tool_call_whose_arguments_break_off_is_never_run() {
    for protocol in Protocol::BOTH {
        // Arguments that break off may still be valid JSON. Only the end marker makes them a call.
        for arguments in ["{\"cents\": 12", "{\"cents\": 12}"] {
            let model = RawModel::start(protocol, move |_, number| {
                Sent::Events(match number {
                    0 => protocol.half_call("I charge you.", "charge", arguments),
                    _ => protocol.text(&["On second thoughts, it is free."]),
                })
            })
            .await;
            let survived = retried(model).await;
            assert_eq!(survived.reply(), "On second thoughts, it is free.");
            assert!(survived.traces.calls.is_empty() && survived.traces.journal("TOOL_INVOKED").is_empty());
        }
    }
}

/// One process, whose first call to `model` breaks off. Its model is not set up for a prefill.
async fn retried(model: RawModel) -> Survived {
    let database = Database::new().await;
    let options = options(&model, false);
    let process = options.serve(&database).await;
    let id = id(&process.client().chat("c1", "Hello.").await);
    process.client().wait_for(&id, "completed").await;
    assert!(process.terminate().success());
    let survived = finished(&database, &id, &model, &options).await;
    assert!(options.effects().is_empty(), "no tool ran");
    assert_eq!(survived.bodies[0], survived.bodies[1]);
    assert_eq!(survived.attempts(), [1, 2]);
    survived
}

#[tokio::test]
async fn what_came_before_a_tool_call_is_not_gone_on_from() {
    let anthropic = Protocol::Anthropic;
    for (read, last_chunk) in [(false, -1), (true, 0)] {
        let model = RawModel::start(anthropic, move |body, number| {
            assert_eq!(prefill(body), None);
            Sent::Events(match number {
                0 => anthropic.half_call("I charge you.", "charge", "{\"cents\": 12"),
                _ => anthropic.text(&["It is free."]),
            })
        })
        .await;
        let options = options(&model, true);
        let database = Database::new().await;
        let process = options.serve(&database).await;
        model.hold_after(before_text(&model) + 1);
        let id = id(&process.client().chat("c1", "Hello.").await);
        if read {
            let mut reader = Reader::open(&process.client(), &id, None).await;
            assert_eq!(shown(&reader.until("gen_chunk").await), "I charge you.");
        }
        model.release();
        process.client().wait_for(&id, "completed").await;
        let survived = finished(&database, &id, &model, &options).await;
        assert_eq!(survived.reply(), "It is free.");
        assert_eq!(survived.resumed(), [("replace", last_chunk)]);
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn text_that_nobody_reads_is_kept_for_the_next_attempt_where_the_model_takes_a_prefill() {
    let database = Database::new().await;
    let model = speaking(Protocol::Anthropic).await;
    let options = options(&model, true);
    let process = options.serve(&database).await;
    model.hold_after(before_text(&model) + 2);
    let id = id(&process.client().chat("c1", "Tell me a story.").await);
    let chunks = "select count(*) from generation_chunks where session_id = $1";
    eventually("two chunks", || async { (database.value::<i64>(chunks, &id).await == 2).then_some(()) })
        .await;
    process.kill();
    model.release();
    let process = options.serve(&database).await;
    process.client().wait_for(&id, "completed").await;
    assert!(process.terminate().success());
    let survived = finished(&database, &id, &model, &options).await;
    assert_eq!(survived.reply(), whole());
    assert_eq!(survived.resumed(), [("resume", 1)]);
}

#[tokio::test]
async fn text_that_nobody_reads_and_no_attempt_can_continue_is_not_written() {
    let model = speaking(Protocol::Anthropic).await;
    let options = options(&model, false);
    // The whole answer has come.
    let survived = survive(model, &options, "K10=1*return").await;
    assert_eq!(survived.reply(), whole());
    assert_eq!(survived.resumed(), [("replace", -1)]);
}

#[tokio::test]
async fn a_stream_that_is_cut_again_and_again_is_gone_on_from_until_it_is_whole() {
    let anthropic = Protocol::Anthropic;
    let model = RawModel::start(anthropic, move |body, _| {
        Sent::Events(match prefill(body) {
            None => anthropic.half_text(&["One, "]),
            Some("One,") => anthropic.half_text(&[" two,"]),
            Some("One, two,") => anthropic.text(&[" three."]),
            Some(other) => panic!("{other:?}"),
        })
    })
    .await;
    let options = options(&model, true);
    let database = Database::new().await;
    let process = options.serve(&database).await;
    let id = id(&process.client().chat("c1", "Count.").await);
    process.client().wait_for(&id, "completed").await;
    let survived = finished(&database, &id, &model, &options).await;
    assert_eq!(survived.reply(), "One, two, three.");
    let resumed = survived.resumed();
    assert_eq!(resumed.len(), 2);
    assert!(resumed.iter().all(|(strategy, _)| *strategy == "resume"), "{resumed:?}");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_prefill_that_the_provider_refuses_costs_a_refusal_and_no_run() {
    let anthropic = Protocol::Anthropic;
    let model = RawModel::start(anthropic, move |body, number| match (prefill(body), number) {
        (Some(_), _) => Sent::Refusal(400, "This model does not support assistant message prefill."),
        (None, 0) => Sent::Events(anthropic.half_text(&["This is ha"])),
        (None, _) => Sent::Events(anthropic.text(&["This is all of it."])),
    })
    .await;
    let options = options(&model, true);
    let database = Database::new().await;
    let process = options.serve(&database).await;
    let id = id(&process.client().chat("c1", "Hello.").await);
    process.client().wait_for(&id, "completed").await;
    process.wait_for_log("does not go on from a text").await;
    let survived = finished(&database, &id, &model, &options).await;
    assert_eq!(survived.reply(), "This is all of it.");
    assert_eq!(survived.resumed(), [("resume", 0), ("replace", 0)]);
    assert_eq!(survived.bodies.len(), 3);
    assert_eq!(survived.bodies[0], survived.bodies[2]);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_message_that_came_meanwhile_makes_it_another_request_and_no_text_is_gone_on_from() {
    let model = speaking(Protocol::Anthropic).await;
    let options = options(&model, true);
    let database = Database::new().await;
    let api = options.clone().arg("--roles=api").serve(&database).await;
    let worker = work(&options.clone().env("FAILPOINTS", "K8=2*off->1*return"), &database).await;
    model.hold_after(before_text(&model));
    let id = id(&api.client().chat("c1", "Tell me a story.").await);
    let mut reader = Reader::open(&api.client(), &id, None).await;
    show(&model, &mut reader, 2).await;
    model.hold_after(before_text(&model) + 3);
    let (status, _worker) = worker.ended().await;
    assert!(!status.success());
    model.release();
    api.client().chat("c1", "A short one.").await;
    let worker = work(&options, &database).await;
    api.client().wait_for(&id, "completed").await;
    assert!(worker.terminate().success());
    let survived = finished(&database, &id, &model, &options).await;
    assert_eq!(survived.reply(), whole());
    assert_eq!(survived.resumed(), [("replace", 2)]);
}

/// Checks a reader's frames. Journal frames have no gap and no repeat. Chunks are numbered from 0 after each
/// reset, without repeats. The text that a reader has is always a beginning of the answer, and at the end the
/// whole answer.
fn assert_frames(frames: &[Frame], answer: &str) {
    let numbers: Vec<i64> = frames.iter().filter_map(|frame| frame.id).collect();
    assert_eq!(numbers, (1..=numbers.len() as i64).collect::<Vec<_>>());
    let mut next = None;
    for (at, frame) in frames.iter().enumerate() {
        match frame.event.as_str() {
            "gen_reset" => next = Some((frame.data["generation_id"].clone(), 0)),
            "gen_chunk" => {
                let (generation, number) = next.as_mut().expect("a reset before the first chunk");
                assert_eq!(
                    (&frame.data["generation_id"], &frame.data["chunk_no"]),
                    (&*generation, &json!(number))
                );
                *number += 1;
                assert!(answer.starts_with(&shown(&frames[..=at])));
            }
            "gen_complete" => assert_eq!(frame.data["payload"]["text"], answer),
            _ => {}
        }
    }
    assert_eq!(frames.iter().filter(|frame| frame.event == "gen_complete").count(), 1);
    assert_eq!(last_text(frames), answer);
}

fn id(answer: &Value) -> String {
    answer["session_id"].as_str().expect("a session").to_owned()
}
