//! Many large messages: a page and a stream end by their bytes, so nobody takes the memory of the API by what he has sent himself.

use crate::support::{Answer, Client, Database, ModelServer, Options, Process};
use futures::StreamExt;
use serde_json::{Value, json};
use std::collections::BTreeSet;

const MESSAGES: usize = 40;
/// Of each message. A request has at most 1 MiB.
const BYTES: usize = 900 << 10;
/// A page has 4 MiB of texts, and what stands around them.
const PAGE: usize = 5 << 20;

/// An API without a worker, and a session with large messages that wait.
async fn crowded() -> (Database, Process, Client, String) {
    let database = Database::new().await;
    let process = Options::new().model("scripted/none").arg("--roles=api").serve(&database).await;
    let client = process.client();
    let mut session_id = String::new();
    for number in 0..MESSAGES {
        // Postgres compresses it to nearly nothing.
        let text = format!("{number} {}", "long ".repeat(BYTES / 5));
        session_id = client.chat("c1", &text).await["session_id"].as_str().expect("an id").to_owned();
    }
    (database, process, client, session_id)
}

#[tokio::test]
async fn pages_of_large_messages_end_by_their_bytes_and_lead_to_the_next() {
    let (_database, process, client, id) = crowded().await;
    let before = process.peak_mib();
    let (mut cursor, mut seen) = (String::new(), BTreeSet::new());
    loop {
        let path = format!("/v1/sessions/{id}/events?limit=500{cursor}");
        let text = client.get_request(&path).send().await.unwrap().text().await.unwrap();
        assert!(text.len() < PAGE, "{} bytes", text.len());
        let page: Value = serde_json::from_str(&text).unwrap();
        seen.extend(page["items"].as_array().unwrap().iter().map(|entry| entry["seq"].as_i64().unwrap()));
        match page["next"].as_i64() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    assert_eq!(seen.len() as i64, *seen.last().unwrap(), "no entry is left out");
    assert!(seen.len() > MESSAGES, "{}", seen.len());
    // Of the newest, those stay away that are older.
    for (limit, fewer) in [(30, true), (2, false)] {
        let (_, newest) = client.get(&format!("/v1/sessions/{id}/events?limit={limit}&newest=true")).await;
        let shown: Vec<i64> =
            newest["items"].as_array().unwrap().iter().map(|entry| entry["seq"].as_i64().unwrap()).collect();
        let last = seen.len() as i64;
        assert_eq!(shown, (last - shown.len() as i64 + 1..=last).collect::<Vec<_>>());
        assert_eq!((shown.len() < limit, &newest["next"]), (fewer, &json!(null)));
    }
    let grown = process.peak_mib() - before;
    assert!(grown < 60, "the process grew by {grown} MB");
}

#[tokio::test]
async fn pages_of_a_history_end_by_their_bytes_too() {
    let model = ModelServer::start(|_, _| Answer::text("Heard.")).await;
    let database = Database::new().await;
    let process =
        Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url).serve(&database).await;
    let client = process.client();
    // Each in a session of its own, so that no model is asked about all of them.
    let sessions = 7;
    for number in 0..sessions {
        let made = client.post("/v1/conversations/c1/new", &json!({})).await.0;
        assert_eq!(made.as_u16(), if number == 0 { 404 } else { 201 });
        let text = format!("{number} {}", "long ".repeat(BYTES / 5));
        let id = client.chat("c1", &text).await["session_id"].as_str().expect("an id").to_owned();
        client.wait_for(&id, "completed").await;
    }
    let (mut cursor, mut seen, mut pages) = (String::new(), Vec::new(), 0);
    loop {
        let path = format!("/v1/conversations/c1/history?limit=500{cursor}");
        let text = client.get_request(&path).send().await.unwrap().text().await.unwrap();
        assert!(text.len() < PAGE, "{} bytes", text.len());
        pages += 1;
        let page: Value = serde_json::from_str(&text).unwrap();
        let items = page["items"].as_array().unwrap();
        assert!(!items.is_empty());
        seen.extend(items.iter().map(|item| format!("{} {}", item["type"], item["id"])));
        match page["next"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    assert!(pages >= 2, "{pages}");
    let once: BTreeSet<&String> = seen.iter().collect();
    assert_eq!((once.len(), seen.len()), (seen.len(), 3 * sessions), "each once: {seen:?}");
}

#[tokio::test]
async fn who_opens_streams_of_large_messages_and_reads_nothing_takes_little_memory() {
    let (_database, process, client, id) = crowded().await;
    let before = process.peak_mib();
    let mut unread = Vec::new();
    for _ in 0..4 {
        let path = format!("/v1/sessions/{id}/stream");
        let mut stream = Box::pin(client.get_request(&path).send().await.unwrap().bytes_stream());
        // The first bytes show that it has looked.
        stream.next().await.unwrap().unwrap();
        unread.push(stream);
    }
    let grown = process.peak_mib() - before;
    assert!(grown < 60, "the process grew by {grown} MB");
    drop(unread);
    // One who reads gets all of them.
    let events = client.stream(&id, None).await;
    let received = events.filter(|event| std::future::ready(event.event == "message_received"));
    assert_eq!(received.take(MESSAGES).count().await, MESSAGES);
}
