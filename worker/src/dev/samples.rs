//! The sample chats: what a first `wakeful dev` shows, and what `wakeful demo` is played with.
use std::time::{Duration, Instant};
use wakeful_store::wake::NewMessage;

use anyhow::{Context, Result};
use wakeful_store::Store;
use wakeful_store::session::{SessionFilter, SessionSummary};
use wakeful_workflow::session::SessionStatus;

use crate::Ctx;
use crate::api::{chat, stored_conversation_id};
use crate::config::DEFAULT_AGENT;

/// One chat.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub conversation: &'static str,
    pub text: &'static str,
}

/// One calls a tool.
pub const CLOCK: Sample = Sample { conversation: "sample-clock", text: "What time is it?" };
/// One writes a file, reads it, and sends a mail.
pub const NOTE: Sample = Sample {
    conversation: "sample-note",
    text: "Write a note about Friday's meeting and email it to me at you@example.com.",
};
/// One asks the user.
pub const COLOUR: Sample = Sample {
    conversation: "sample-colour",
    text: "Help me choose a colour for the bike shed. Ask me which one I like.",
};
pub const SAMPLES: [Sample; 3] = [CLOCK, NOTE, COLOUR];

/// What an answer to [`COLOUR`] may be.
pub const ANSWER: &str = "Green, please.";

/// A sample's session.
#[derive(Clone, Debug)]
pub struct State {
    pub conversation: &'static str,
    pub session_id: String,
    pub status: SessionStatus,
    /// Neither a step nor a delivery is to come.
    pub rests: bool,
    /// The newest reply, the open question, or the error.
    pub last: String,
}

/// Sends the samples that are missing, as POSTs would, unless somebody talks here already. Gives how many it sent.
///
/// A start that was killed on the way is completed by the next one: a sample's message is durable or it is missing.
pub async fn send(ctx: &Ctx) -> Result<usize> {
    let filter = SessionFilter { limit: SAMPLES.len() as i64 + 1, ..SessionFilter::default() };
    let sessions = ctx.store.sessions(&filter).await?;
    let is_sample = |id: &str| SAMPLES.iter().any(|sample| sample.conversation == id);
    if sessions.iter().any(|session| !is_sample(&session.conversation_id)) {
        return Ok(0);
    }
    let mut sent = 0;
    for sample in SAMPLES {
        if sessions.iter().any(|session| session.conversation_id == sample.conversation) {
            continue;
        }
        let id = stored_conversation_id(sample.conversation)?;
        let message = NewMessage {
            client_key: Some("wakeful-dev-sample".to_owned()),
            text: sample.text.to_owned(),
            sender: None,
            trace_context: None,
            attachments: Vec::new(),
        };
        let woken = chat::wake(ctx, id, Some(DEFAULT_AGENT), None, message).await;
        woken.with_context(|| format!("sample chat {}", sample.conversation))?;
        sent += 1;
    }
    Ok(sent)
}

/// Waits until the samples that there are rest, at most `limit`, and tells of each that comes to rest. Gives them
/// as they are then.
pub async fn wait(store: &Store, limit: Duration, mut rested: impl FnMut(&State)) -> Result<Vec<State>> {
    let began = Instant::now();
    let mut told: Vec<&str> = Vec::new();
    loop {
        let states = states(store).await?;
        for state in states.iter().filter(|state| state.rests) {
            if !told.contains(&state.conversation) {
                told.push(state.conversation);
                rested(state);
            }
        }
        if states.iter().all(|state| state.rests) || began.elapsed() > limit {
            return Ok(states);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The samples' sessions, those that there are.
pub async fn states(store: &Store) -> Result<Vec<State>> {
    let mut states = Vec::new();
    for sample in SAMPLES {
        let filter = SessionFilter {
            conversation_id: Some(stored_conversation_id(sample.conversation)?),
            limit: 1,
            ..SessionFilter::default()
        };
        if let Some(session) = store.sessions(&filter).await?.pop() {
            states.push(state(store, sample, session).await?);
        }
    }
    Ok(states)
}

async fn state(store: &Store, sample: Sample, session: SessionSummary) -> Result<State> {
    let status = SessionStatus::parse(&session.status)
        .with_context(|| format!("session {} has the status {:?}", session.session_id, session.status))?;
    let deliveries = store.deliveries(&session.session_id).await?;
    let to_send = deliveries.iter().any(|one| matches!(one.status.as_str(), "queued" | "sending"));
    let last = match (session.question, session.error) {
        (Some(question), _) => format!("asks: {question}"),
        (None, Some(error)) => error,
        (None, None) => {
            let messages = store.messages(&session.session_id, None, 50).await?;
            let reply =
                messages.into_iter().rev().find(|one| one.role == "assistant" && !one.text.is_empty());
            reply.map(|reply| reply.text).unwrap_or_default()
        }
    };
    Ok(State {
        conversation: sample.conversation,
        session_id: session.session_id,
        status,
        rests: !status.is_open() && !to_send,
        last,
    })
}
