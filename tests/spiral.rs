//! Repair works on the request's copy. A transcript may hold what a provider refuses, for example two user
//! turns in a row. The transcript stays as it is, and a repaired request never costs a message.

use crate::support::raw::{Protocol, RawModel, Sent};
use crate::support::{Client, Database, Options, world};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use wakeful_workflow::advance::{Generated, Performed, advance};
use wakeful_workflow::agent::AgentPolicy;
use wakeful_workflow::context::full;
use wakeful_workflow::record::{Block, FinishReason, Reply, Usage};
use wakeful_workflow::strategy::Strategy;
use wakeful_workflow::wire::anthropic;

/// A message that the model's provider refuses, so that its run fails without a reply.
const REFUSED: &str = "This one fails.";

/// A model that says which message it answers, and refuses the message that must fail.
async fn model(protocol: Protocol) -> RawModel {
    RawModel::start(protocol, move |body, _| {
        let last = user_texts(body).pop().expect("a user's message").to_owned();
        if last == REFUSED {
            Sent::Refusal(400, "as told")
        } else {
            Sent::Events(protocol.text(&[&format!("A reply to: {last}")]))
        }
    })
    .await
}

/// The texts of the user's messages, block by block.
fn user_texts(body: &Value) -> Vec<&str> {
    let messages = body["messages"].as_array().expect("messages").iter();
    let of_user = messages.filter(|message| message["role"] == "user");
    of_user
        .flat_map(|message| match &message["content"] {
            Value::String(text) => vec![text.as_str()],
            blocks => {
                blocks.as_array().expect("blocks").iter().filter_map(|block| block["text"].as_str()).collect()
            }
        })
        .collect()
}

/// Every row of the transcript as stored, with the id of the transaction that wrote it: (number, role,
/// content, xmin).
async fn transcript(database: &Database) -> Vec<(i64, String, String, String)> {
    let sql = "select message_number, role, content::text || details::text, xmin::text
        from conversation_records order by message_number";
    sqlx::query_as(sql).fetch_all(&database.pool).await.unwrap()
}

fn roles(transcript: &[(i64, String, String, String)]) -> Vec<&str> {
    transcript.iter().map(|row| row.1.as_str()).collect()
}

async fn repairs(database: &Database, session_id: &str) -> Vec<i64> {
    let sql = "select (payload ->> 'repairs')::bigint from session_events
        where session_id = $1 and type = 'LLM_CALLED' order by seq";
    sqlx::query_scalar(sql).bind(session_id).fetch_all(&database.pool).await.unwrap()
}

/// Posts a message to a fresh process, and waits for the end of its run.
async fn turn(database: &Database, options: &Options, text: &str, status: &str) -> String {
    let process = options.serve(database).await;
    let client = process.client();
    let answer = client.chat("c1", text).await;
    let session_id = answer["session_id"].as_str().unwrap().to_owned();
    client.wait_for(&session_id, status).await;
    assert!(process.terminate().success());
    session_id
}

#[tokio::test]
async fn k38_one_violation_and_five_turns_with_a_fresh_worker_each_lose_no_reply() {
    let database = Database::new().await;
    let model = model(Protocol::Anthropic).await;
    let options = model.options();
    let session_id = turn(&database, &options, REFUSED, "failed").await;
    assert_eq!(roles(&transcript(&database).await), ["user"]);

    for number in 1..=5 {
        let before = transcript(&database).await;
        let text = format!("Message {number}");
        turn(&database, &options, &text, "completed").await;
        let after = transcript(&database).await;
        assert_eq!(after[..before.len()], before, "stored messages are unchanged");
        assert_eq!(roles(&after[before.len()..]), ["user", "assistant"]);
        assert!(after.last().unwrap().2.contains(&format!("A reply to: {text}")), "{after:?}");
    }
    let stored = transcript(&database).await;
    assert_eq!(roles(&stored)[..3], ["user", "user", "assistant"], "both user rows stay");
    assert_eq!(roles(&stored).iter().filter(|role| **role == "assistant").count(), 5);
    assert_eq!(stored.iter().map(|row| row.0).collect::<Vec<_>>(), (2..=12).collect::<Vec<_>>());
    assert_eq!(
        repairs(&database, &session_id).await,
        [0, 1, 1, 1, 1, 1],
        "one merge a call, for the one violation"
    );
    for body in &model.bodies()[1..] {
        alternates(&serde_json::from_str(body).unwrap());
    }
}

/// As the chat templates of some local models are.
#[tokio::test]
async fn a_server_that_wants_turns_gets_them_if_the_model_is_so_configured() {
    let strict = RawModel::start(Protocol::OpenAi, |body, _| {
        let messages = body["messages"].as_array().expect("messages");
        let takes_turns = messages.windows(2).all(|pair| pair[0]["role"] != pair[1]["role"]);
        match (takes_turns, user_texts(body).last() == Some(&REFUSED)) {
            (false, _) => Sent::Refusal(400, "Conversation roles must alternate user/assistant"),
            (true, true) => Sent::Refusal(400, "as told"),
            (true, false) if body["max_tokens"].is_u64() => Sent::Events(Protocol::OpenAi.text(&["Hello."])),
            (true, false) => Sent::Refusal(400, "max_tokens is missing"),
        }
    })
    .await;
    let plain = strict.options();
    let settings = "[models.\"openai/test\"]\nmerge_turns = true\nlegacy_max_tokens = true";
    let merged = plain.clone().config(settings);
    let database = Database::new().await;
    turn(&database, &plain, REFUSED, "failed").await;
    turn(&database, &plain, "Are you there?", "failed").await;
    turn(&database, &merged, "And now?", "completed").await;
    assert_eq!(roles(&transcript(&database).await), ["user", "user", "user", "assistant"]);
}

/// Shows what happens if repair changes the transcript itself and new messages are found by their position.
/// Merging makes the list shorter, so the reply takes the position of a stored message and is mistaken for
/// it. The lost reply leaves two user turns in a row, which is the next violation. The product does not do
/// this: the test plays it on a real session, with the product's own projection and `advance`.
#[tokio::test]
async fn a_repair_in_place_would_lose_every_reply_and_more_with_each_turn() {
    let database = Database::new().await;
    let store = database.store().await;
    let session_id = world::wake(&store, "c1", "openai/test", REFUSED).await;
    let mut session = store.hydrate(&session_id).await.unwrap();
    let mut repairs = Vec::new();
    for number in 1..=5 {
        let mut message = session.records[0].clone();
        message.message_number = session.last_message_number + 1;
        message.content = vec![Block::Text { text: format!("Message {number}") }].into();
        session.records.push(message);
        session.last_message_number += 1;

        let request = anthropic::project(&full(&session, Vec::new()), &anthropic::Options::new("test", 8192));
        let repaired = request.repairs.total() as i64;
        repairs.push(repaired);
        let mut shorter = session.clone();
        shorter.last_message_number -= repaired;
        let mut transition = advance(&shorter, Performed::Replied(reply(number)), AgentPolicy::default());
        assert_eq!(transition.records.len(), 1, "the reply was made, and paid for");
        transition.records.retain(|record| record.message_number > session.last_message_number);
        session.last_message_number += transition.records.len() as i64;
        session.records.extend(transition.records);
    }
    let roles: Vec<&str> = session.records.iter().map(|record| record.role.as_str()).collect();
    assert_eq!(roles, ["user"; 6], "every reply is lost");
    assert_eq!(repairs, [1, 2, 3, 4, 5], "and each turn adds a violation");
}

/// The answer to one message.
fn reply(number: i64) -> Generated {
    let content = vec![Block::Text { text: format!("A reply to: Message {number}") }];
    Generated {
        generation_id: format!("gen_{number}").as_str().into(),
        attempt: 1,
        model: "anthropic/test".to_owned(),
        request_sha256: String::new(),
        started_at: Some("2026-01-01T00:00:00Z".to_owned()),
        repairs: 0,
        resumes: None,
        prefill_bytes: None,
        reply: Reply::new(content, FinishReason::Stop, Usage::default()),
        context_strategy: Strategy::Full,
        rebase: None,
        effects: BTreeMap::new(),
    }
}

#[tokio::test]
async fn k39_a_message_after_a_run_without_reply_leaves_both_where_they_are() {
    for protocol in Protocol::BOTH {
        for cancelled in [false, true] {
            let database = Database::new().await;
            let model = model(protocol).await;
            let process = model.options().serve(&database).await;
            let client = process.client();
            let session_id = if cancelled { interrupt(&client, &model).await } else { fail(&client).await };
            let before = transcript(&database).await;
            assert_eq!(roles(&before), ["user"]);
            client.chat("c1", "Once more.").await;
            client.wait_for(&session_id, "completed").await;

            let after = transcript(&database).await;
            assert_eq!(after[..1], before);
            assert_eq!(roles(&after), ["user", "user", "assistant"]);
            let body: Value = serde_json::from_str(model.bodies().last().unwrap()).unwrap();
            let first = if cancelled { "This is interrupted." } else { REFUSED };
            assert_eq!(user_texts(&body), [first, "Once more."]);
            let merged = match protocol {
                Protocol::Anthropic => {
                    alternates(&body);
                    1
                }
                // This protocol allows two user messages in a row.
                Protocol::OpenAi => 0,
            };
            assert_eq!(repairs(&database, &session_id).await, [0, merged]);
            assert!(process.terminate().success());
        }
    }
}

async fn fail(client: &Client) -> String {
    let answer = client.chat("c1", REFUSED).await;
    let session_id = answer["session_id"].as_str().unwrap().to_owned();
    client.wait_for(&session_id, "failed").await;
    session_id
}

async fn interrupt(client: &Client, model: &RawModel) -> String {
    model.hold_after(0);
    let answer = client.chat("c1", "This is interrupted.").await;
    let session_id = answer["session_id"].as_str().unwrap().to_owned();
    model.asked(1).await;
    let path = format!("/v1/sessions/{session_id}/cancel");
    let (status, answer) = client.post(&path, &json!({"reason": "test"})).await;
    assert!(status.is_success(), "{answer}");
    client.wait_for(&session_id, "cancelled").await;
    model.release();
    session_id
}

/// Checks the rule of the strictest servers of Anthropic's protocol.
fn alternates(body: &Value) {
    let messages = body["messages"].as_array().unwrap();
    for (at, message) in messages.iter().enumerate() {
        assert_eq!(message["role"], if at % 2 == 0 { "user" } else { "assistant" }, "{body:#}");
    }
    assert_eq!(messages.last().unwrap()["role"], "user");
}
