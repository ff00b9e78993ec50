//! The sample messages of a first `wakeful dev`, some of which `wakeful demo` uses too. One table holds the
//! text and the trigger of each. They are sent to the running process as outside requests.
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use secrecy::SecretString;
use serde_json::json;
use wakeful_store::Store;
use wakeful_store::session::{SessionFilter, SessionSummary};
use wakeful_workflow::schedule::{Missed, Overlap};
use wakeful_workflow::session::SessionStatus;

use super::Home;
use crate::client::{Client, Trigger, Via};
use wakeful_config::DEFAULT_AGENT;
use wakeful_config::cron::{DEFAULT_ZONE, MISSED_LIMIT, Schedule};
use wakeful_engine::ctx::Ctx;
use wakeful_workflow::id::{DEFAULT_SPACE, stored_conversation_id};

/// Longest time that a scheduler takes to start.
const SCHEDULER: Duration = Duration::from_secs(20);

/// A sample message.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Its name: the conversation's id, or a part of the trigger's id.
    pub conversation: &'static str,
    pub text: &'static str,
    pub kind: TriggerKind,
}

/// The trigger that a sample uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TriggerKind {
    Chat,
    Email,
    /// The signed webhook, as an example of all messengers.
    Webhook,
    /// A schedule of the sample's name, fired by hand.
    Cron,
    Herald,
}

/// A chat that calls a tool.
pub const CLOCK: Sample =
    Sample { conversation: "sample-clock", text: "What time is it?", kind: TriggerKind::Chat };
/// A chat that writes a file, reads it, and sends a mail.
pub const NOTE: Sample = Sample {
    conversation: "sample-note",
    text: "Write a note about Friday's meeting and email it to me at you@example.com.",
    kind: TriggerKind::Chat,
};
/// A chat that asks the user a question.
pub const COLOUR: Sample = Sample {
    conversation: "sample-colour",
    text: "Help me choose a colour for the bike shed. Ask me which one I like.",
    kind: TriggerKind::Chat,
};
/// What the scripted model takes its time for. It is not among the samples.
pub const REPORT: &str = "Write a report";
/// A mail.
pub const EMAIL: Sample =
    Sample { conversation: "sample-email", text: "What time is it?", kind: TriggerKind::Email };
/// A messenger's message.
const WEBHOOK: Sample =
    Sample { conversation: "sample-webhook", text: "What time is it?", kind: TriggerKind::Webhook };
/// A schedule's firing. Its text is the prompt of [`schedule`].
pub const CRON: Sample = Sample { conversation: "sample-cron", text: "", kind: TriggerKind::Cron };
/// A notice from another system.
pub const HERALD: Sample = Sample {
    conversation: "sample-herald",
    text: "The nightly backup took an hour more than it should.",
    kind: TriggerKind::Herald,
};

/// The samples that a first start sends, in this order.
const SAMPLES: &[Sample] = &[CLOCK, NOTE, COLOUR, EMAIL, WEBHOOK, CRON, HERALD];

/// The schedule of [`CRON`].
pub fn schedule() -> Schedule {
    Schedule {
        cron: "0 9 * * MON-FRI".to_owned(),
        time_zone: DEFAULT_ZONE.to_owned(),
        agent: DEFAULT_AGENT.to_owned(),
        space: DEFAULT_SPACE.to_owned(),
        conversation: None,
        prompt: "What time is it?".to_owned(),
        mail_to: Vec::new(),
        missed: Missed::One,
        missed_limit: MISSED_LIMIT,
        overlap: Overlap::Queue,
    }
}

impl Sample {
    /// Builds the trigger to send. `secret` signs a webhook's message.
    pub fn trigger(&self, secret: &SecretString) -> Trigger {
        let name = self.conversation.to_owned();
        match self.kind {
            TriggerKind::Chat => Trigger::Chat {
                conversation_id: name,
                text: self.text.to_owned(),
                user_id: None,
                agent: Some(DEFAULT_AGENT.to_owned()),
                client_key: Some("wakeful-dev-sample".to_owned()),
            },
            TriggerKind::Email => Trigger::Email {
                raw: format!(
                    "From: You <you@example.com>\r\nTo: Wakeful <wakeful@localhost>\r\nSubject: A question\r\n\
                     Message-ID: <{name}@example.com>\r\nDate: {}\r\nMIME-Version: 1.0\r\n\
                     Content-Type: text/plain; charset=utf-8\r\n\r\n{}\r\n",
                    chrono::Utc::now().to_rfc2822(),
                    self.text
                )
                .into_bytes(),
            },
            TriggerKind::Webhook => Trigger::Message {
                via: Via::Webhook,
                body: Via::Webhook
                    .message(self.conversation, "you", self.text, self.conversation, 0)
                    .to_string()
                    .into_bytes(),
                secret: secret.clone(),
                message_id: name,
            },
            TriggerKind::Cron => Trigger::Cron { schedule: name },
            TriggerKind::Herald => Trigger::Herald {
                body: json!({
                    "conversation_id": name,
                    "client_key": name,
                    "notice": {"title": "A sample notice", "body": self.text},
                })
                .to_string()
                .into_bytes(),
            },
        }
    }

    /// Returns the trigger type of the sample's session.
    fn trigger_type(&self) -> &'static str {
        match self.kind {
            TriggerKind::Chat => "chat",
            TriggerKind::Email => "email",
            TriggerKind::Webhook => "message",
            TriggerKind::Cron => "cron",
            TriggerKind::Herald => "herald",
        }
    }

    /// Returns whether the sample started this session.
    fn made(&self, session: &SessionSummary) -> bool {
        match self.kind {
            TriggerKind::Chat => session.conversation_id == self.conversation,
            TriggerKind::Email | TriggerKind::Webhook | TriggerKind::Cron | TriggerKind::Herald => {
                session.trigger_type == self.trigger_type()
                    && (session.trigger_id.contains(self.conversation)
                        || session.conversation_id.contains(self.conversation))
            }
        }
    }

    /// Returns the sample's newest session.
    async fn session(&self, store: &Store) -> Result<Option<SessionSummary>> {
        let filter = match self.kind {
            TriggerKind::Chat => SessionFilter {
                conversation_id: Some(stored_conversation_id(self.conversation)?),
                limit: 1,
                ..SessionFilter::default()
            },
            TriggerKind::Email | TriggerKind::Webhook | TriggerKind::Cron | TriggerKind::Herald => {
                SessionFilter {
                    trigger_type: Some(self.trigger_type().to_owned()),
                    limit: 100,
                    ..SessionFilter::default()
                }
            }
        };
        Ok(store.sessions(&filter).await?.into_iter().find(|session| self.made(session)))
    }
}

/// A possible answer to [`COLOUR`].
pub const ANSWER: &str = "Green, please.";

/// A sample's session.
#[derive(Clone, Debug)]
pub struct State {
    pub conversation: &'static str,
    pub session_id: String,
    pub status: SessionStatus,
    /// No step and no delivery is pending.
    pub rests: bool,
    /// The newest reply, the open question, or the error.
    pub last: String,
}

/// Sends the missing samples to the process that listens here, unless other sessions exist already. Returns
/// how many it sent.
///
/// If a start is killed in between, the next start sends the rest: each sample is either durable or missing.
pub async fn send(ctx: &Ctx, listen: SocketAddr, home: &Home) -> Result<usize> {
    let filter = SessionFilter { limit: SAMPLES.len() as i64 + 1, ..SessionFilter::default() };
    let sessions = ctx.store.sessions(&filter).await?;
    if sessions.iter().any(|session| !SAMPLES.iter().any(|sample| sample.made(session))) {
        return Ok(0);
    }
    // A configuration with schedules of its own has not the sample's.
    let is_there = |sample: &&Sample| {
        sample.kind != TriggerKind::Cron || ctx.config.schedules.contains_key(sample.conversation)
    };
    let missing: Vec<&Sample> = SAMPLES
        .iter()
        .filter(|sample| !sessions.iter().any(|session| sample.made(session)))
        .filter(is_there)
        .collect();
    if missing.is_empty() {
        return Ok(0);
    }
    let ip = if listen.ip().is_unspecified() { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { listen.ip() };
    let url = format!("http://{}", SocketAddr::new(ip, listen.port()));
    let client =
        Client::new(&url, ctx.config.server.token.clone())?.context("the address of this process")?;
    // The server checks the user's own secrets, if there are any.
    let secret = match ctx.config.messenger.webhook.secrets.first() {
        Some(secret) => secret.clone(),
        None => home.webhook_secret()?,
    };
    let mut sent = 0;
    for sample in &missing {
        if sample.kind == TriggerKind::Cron {
            defined(&ctx.store, sample.conversation).await?;
        }
        let request = sample.trigger(&secret).request(chrono::Utc::now().timestamp())?;
        match client.send(request).await {
            Ok(_) => sent += 1,
            Err(failed) => {
                eprintln!("wakeful: warning: the sample {} was not sent: {failed}", sample.conversation)
            }
        }
    }
    Ok(sent)
}

/// Waits until this process's scheduler has stored the configured schedules, which it does when it starts.
async fn defined(store: &Store, schedule: &str) -> Result<()> {
    let began = Instant::now();
    loop {
        match store.schedule(DEFAULT_SPACE, schedule).await {
            Err(wakeful_store::Error::NotFound { .. }) if began.elapsed() < SCHEDULER => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            found => {
                found?;
                return Ok(());
            }
        }
    }
}

/// Waits until every sample with a session has nothing left to do, at most `limit`. Reports each one as soon
/// as it has finished. Returns their final states.
pub async fn wait(store: &Store, limit: Duration, mut rested: impl FnMut(&State)) -> Result<Vec<State>> {
    let began = Instant::now();
    let mut seen: Vec<&str> = Vec::new();
    loop {
        let states = states(store).await?;
        for state in states.iter().filter(|state| state.rests) {
            if !seen.contains(&state.conversation) {
                seen.push(state.conversation);
                rested(state);
            }
        }
        if states.iter().all(|state| state.rests) || began.elapsed() > limit {
            return Ok(states);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Returns the states of the samples that have a session.
pub async fn states(store: &Store) -> Result<Vec<State>> {
    let mut states = Vec::new();
    for sample in SAMPLES {
        if let Some(session) = sample.session(store).await? {
            states.push(state(store, *sample, session).await?);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sample_goes_to_its_door() {
        let secret = SecretString::from("whsec_c2VjcmV0");
        for (sample, door) in [
            (CLOCK, "v1/chat/sample-clock/messages"),
            (EMAIL, "v1/triggers/email/raw"),
            (WEBHOOK, "v1/triggers/messenger/webhook"),
            (CRON, "v1/schedules/sample-cron/trigger"),
            (HERALD, "v1/triggers/herald"),
        ] {
            let request = sample.trigger(&secret).request(1_700_000_000).unwrap();
            assert_eq!(request.path.join("/"), door);
            let body = String::from_utf8(request.body).unwrap();
            assert!(body.contains(sample.text), "{body}");
        }
    }
}
