//! What must hold after a storm, in addition to what [`checker`] asks of each session. Every message that was
//! taken is there once, and so is every mail. The model was asked nothing that a strict server refuses. Its
//! requests only grew. Every model call that was paid for twice is accounted for.

use super::plan::Plan;
use super::summary::Summary;
use crate::support::checker::{self, Traces, distinct};
use crate::support::{Database, Options, wire_rules};
use serde_json::Value;
use std::collections::BTreeSet;

/// What is left of a storm.
pub struct Left<'a> {
    pub plan: &'a Plan,
    pub sessions: &'a [String],
    pub database: &'a Database,
    pub bodies: &'a [String],
    pub options: &'a Options,
    pub logs: &'a [(String, String)],
    pub summary: &'a mut Summary,
}

pub async fn check(left: Left<'_>) {
    let Left { plan, sessions, database, bodies, options, logs, summary } = left;
    let effects = options.effects();
    summary.seeds = 1;
    summary.sessions = sessions.len();
    summary.effects = effects.len();
    summary.model_calls = bodies.len();
    assert_eq!(
        sessions.iter().collect::<BTreeSet<_>>().len(),
        plan.sessions.len(),
        "a conversation, a session"
    );
    let all: i64 = database.value("select count(*) from conversation_sessions where $1 <> ''", "all").await;
    assert_eq!(all, sessions.len() as i64, "and no other one");
    for body in bodies {
        wire_rules::check(body);
    }
    let mut mails = mails(options);
    for (number, (session_id, messages)) in sessions.iter().zip(&plan.sessions).enumerate() {
        let traces = checker::check(database, session_id, &effects).await;
        each_message_is_there_once(database, session_id, &traces).await;
        for message in messages {
            let sql = "select count(*) from session_inbox where client_key = $1";
            let taken: i64 = database.value(sql, &message.key).await;
            assert_eq!(taken, 1, "{} was taken, however often it was posted", message.key);
        }
        mails_are_sent_once(database, session_id, &traces, &mut mails).await;
        let asked = asked_in(bodies, number);
        what_is_asked_only_grows(&asked);
        let rebilled = asked.len() - distinct(&asked).len();
        summary.rebilled += rebilled;
        summary.resumed += traces.journal("GEN_RESUMED").len();
        summary.uncertain += traces.calls.iter().filter(|call| call["status"] == "uncertain").count();
        summary.messages += traces.records.iter().filter(|record| record["role"] == "user").count();
    }
    let broke = summary.disruptions();
    assert!(
        summary.rebilled <= broke,
        "{} model calls were paid for again, {broke} things broke",
        summary.rebilled
    );
    assert!(summary.uncertain <= broke, "{} effects are uncertain, {broke} things broke", summary.uncertain);
    assert!(mails.is_empty(), "mails without a call: {mails:?}");
    let lines = || logs.iter().flat_map(|(_, log)| log.lines());
    summary.fenced = lines().filter(|line| line.contains("nothing was written")).count();
    summary.stale_claims = lines()
        .filter(|line| line.contains("The claim is over") && line.contains(r#""end":"stale""#))
        .count();
    let sent: i64 =
        database.value("select count(*) from deliveries where status = 'sent' and $1 <> ''", "all").await;
    summary.mails = sent as usize;
    let panics: Vec<&str> = lines().filter(|line| line.contains("panicked")).collect();
    assert!(panics.is_empty(), "a process panicked: {panics:?}");
}

/// Asserts that each inbox message became one record: a user message, or the answer to a question.
async fn each_message_is_there_once(database: &Database, session_id: &str, traces: &Traces) {
    let inbox: Vec<String> =
        sqlx::query_scalar("select content from session_inbox where session_id = $1 order by inbox_id")
            .bind(session_id)
            .fetch_all(&database.pool)
            .await
            .expect("session_inbox");
    let said: Vec<String> = traces.records.iter().flat_map(|record| texts(&record["content"])).collect();
    for message in &inbox {
        let times = said.iter().filter(|text| *text == message).count();
        assert_eq!(times, 1, "{message:?} is in the transcript {times} times");
    }
    let users = traces.records.iter().filter(|record| record["role"] == "user");
    let order: Vec<String> = users.flat_map(|record| texts(&record["content"])).collect();
    let taken: Vec<&String> = inbox.iter().filter(|message| order.contains(message)).collect();
    assert_eq!(order.iter().collect::<Vec<_>>(), taken, "in the order in which they came");
}

/// Every text in a record's blocks, the results' included.
fn texts(content: &Value) -> Vec<String> {
    let blocks = content.as_array().expect("blocks").iter();
    let text =
        |block: &Value| ["text", "content"].iter().find_map(|key| block[*key].as_str().map(str::to_owned));
    blocks.filter_map(text).collect()
}

/// The files of the Maildir, by name.
fn mails(options: &Options) -> BTreeSet<String> {
    let files = std::fs::read_dir(options.path("mail").join("new")).into_iter().flatten().flatten();
    files.map(|file| file.file_name().to_string_lossy().into_owned()).collect()
}

/// Asserts that each call for a mail has one delivery, and that each `sent` delivery has its file and one
/// journal entry.
async fn mails_are_sent_once(
    database: &Database,
    session_id: &str,
    traces: &Traces,
    mails: &mut BTreeSet<String>,
) {
    let deliveries: Vec<(String, String, String)> = sqlx::query_as(
        "select delivery_id, source_key, status from deliveries where session_id = $1 order by ordinal",
    )
    .bind(session_id)
    .fetch_all(&database.pool)
    .await
    .expect("deliveries");
    let calls =
        traces.calls.iter().filter(|call| call["name"] == "compose_email" && call["status"] == "done");
    assert_eq!(deliveries.len(), calls.count(), "a mail a call: {deliveries:?}");
    let mut sent: Vec<String> = Vec::new();
    for (delivery_id, _, status) in deliveries {
        assert_eq!(status, "sent", "{delivery_id}");
        assert!(mails.remove(&delivery_id), "{delivery_id} is sent and not there");
        sent.push(delivery_id);
    }
    let mut journalled: Vec<String> = traces
        .journal("GEN_SENT")
        .into_iter()
        .map(|payload| payload["delivery_id"].as_str().expect("an id").to_owned())
        .collect();
    journalled.sort();
    sent.sort();
    assert_eq!(journalled, sent, "each mail is journalled once");
}

/// The requests of the session whose messages are named after `number`.
fn asked_in(bodies: &[String], number: usize) -> Vec<String> {
    let opening = format!("s{number}m0 do ");
    let of_session = |body: &&String| {
        // Reading each request as JSON for each session would take longer than the storm.
        if !body.contains(&opening) {
            return false;
        }
        let body: Value = serde_json::from_str(body).expect("JSON");
        body["messages"][1]["content"].as_str().is_some_and(|text| text.starts_with(&opening))
    };
    bodies.iter().filter(of_session).cloned().collect()
}

/// Asserts that of any two requests the shorter one is the beginning of the longer one, and that only
/// messages differ.
fn what_is_asked_only_grows(bodies: &[String]) {
    let mut asked: Vec<Value> =
        distinct(bodies).into_iter().map(|body| serde_json::from_str(body).expect("JSON")).collect();
    let length = |body: &Value| body["messages"].as_array().expect("messages").len();
    asked.sort_by_key(length);
    for pair in asked.windows(2) {
        let (shorter, longer) = (&pair[0], &pair[1]);
        let prefix = &longer["messages"].as_array().expect("messages")[..length(shorter)];
        assert_eq!(
            shorter["messages"].as_array().expect("messages").as_slice(),
            prefix,
            "an earlier message was changed"
        );
        assert!(length(shorter) < length(longer), "two requests of one length: {shorter:#} {longer:#}");
        let mut rest = (shorter.clone(), longer.clone());
        rest.0["messages"] = Value::Null;
        rest.1["messages"] = Value::Null;
        assert_eq!(rest.0, rest.1, "tools and options stay as they are");
    }
}
