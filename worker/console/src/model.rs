//! What the API answers, as far as pages show it. Fields that an answer lacks are empty, so that a page is not lost to one.

use crate::job::Job;
use crate::text::{Badge, Moment, badge, count, dollars, short, span};
use serde::Deserialize;
use serde_json::Value;

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Session {
    pub session_id: String,
    pub conversation_id: String,
    pub parent_session_id: Option<String>,
    pub forked_at_message_number: Option<i64>,
    pub trigger_type: String,
    pub agent: String,
    pub model_id: String,
    #[serde(default)]
    pub policy: Value,
    pub status: String,
    #[serde(default)]
    pub cancel_requested: bool,
    pub total_turns: i64,
    pub total_input_tokens: i64,
    pub total_output_tokens: i64,
    pub total_cached_tokens: i64,
    pub total_cost_micros: i64,
    #[serde(default)]
    pub state: Value,
    pub started_at: Moment,
    pub completed_at: Option<Moment>,
    pub error: Option<String>,
    pub question: Option<String>,
    /// What a person first said to it. Only lists have it.
    pub first_message: Option<String>,
    pub job: Option<Job>,
}

/// The name of a conversation. A fork's name is made of an id, whose end is enough.
fn conversation_name(id: &str) -> String {
    if id.starts_with("fork_") { short(id) } else { id.to_owned() }
}

/// A reason to wait for a person, without the command that stands at its end: here there is a button.
fn without_command(error: &str) -> String {
    let is_command = |end: &str| end.contains("`wakeful ") && !end.contains(". ");
    match error.rsplit_once(": ") {
        Some((reason, end)) if is_command(end) && !reason.contains("Remedy") => reason.to_owned(),
        _ => error.to_owned(),
    }
}

impl Session {
    pub fn badge(&self) -> Badge {
        badge(&self.status)
    }

    pub fn short(&self) -> String {
        short(&self.session_id)
    }

    pub fn name(&self) -> String {
        conversation_name(&self.conversation_id)
    }

    pub fn cost(&self) -> String {
        dollars(self.total_cost_micros)
    }

    pub fn tokens(&self) -> String {
        count(self.total_input_tokens + self.total_output_tokens)
    }

    /// What a person wants to know of it in a list: the question, the error, or what it waits for.
    pub fn line(&self) -> String {
        let text = match (&self.question, &self.error, &self.job) {
            (Some(question), ..) => question.clone(),
            (None, Some(error), _) => without_command(error),
            (None, None, Some(job)) => job.held().or_else(|| job.last_error.clone()).unwrap_or_default(),
            (None, None, None) => String::new(),
        };
        crate::text::cut(&text, 140)
    }

    /// What a person first said, in quotes: ids of conversations do not tell sessions apart.
    pub fn begins_with(&self) -> Option<String> {
        self.first_message.as_ref().map(|said| format!("“{}”", crate::text::cut(said, 110)))
    }

    /// The agent is at work, or will be as soon as a worker is free.
    pub fn is_busy(&self) -> bool {
        let waits = self.job.as_ref().is_some_and(Job::waits);
        matches!(self.status.as_str(), "queued" | "running") && !waits
    }

    pub fn took(&self) -> String {
        let end = self.completed_at.map_or_else(chrono::Utc::now, |at| at.0);
        span((end - self.started_at.0).num_milliseconds())
    }

    pub fn is_open(&self) -> bool {
        matches!(self.status.as_str(), "queued" | "running" | "waiting_input" | "needs_attention")
    }

    /// Whether a message may be sent to it.
    pub fn listens(&self) -> bool {
        !matches!(self.status.as_str(), "archived" | "terminated")
    }

    pub fn is_rehearsal(&self) -> bool {
        self.policy["tool_mode"].as_str().is_some_and(|mode| mode != "live")
    }

    pub fn tool_mode(&self) -> &str {
        self.policy["tool_mode"].as_str().unwrap_or("live")
    }

    /// What a call of a rehearsal did not do, or an empty text.
    pub fn rehearsed(&self, call: &Call) -> &'static str {
        // The effect of this tool is the mail, which only a live session sends.
        let acts = call.effect != "pure" || call.name == "compose_email";
        match self.tool_mode() {
            "dry" if acts => "dry: not carried out",
            "dry" => "dry",
            "recorded" if acts => "recorded: not carried out",
            "recorded" => "recorded",
            _ => "",
        }
    }

    /// The verbs that the session accepts now, as `worker/http` has them.
    pub fn verbs(&self) -> &'static [&'static str] {
        match self.status.as_str() {
            "created" | "completed" | "cancelled" => &["archive", "terminate"],
            "queued" | "running" => &["cancel", "wake"],
            "waiting_input" => &["cancel"],
            "needs_attention" => &["retry", "cancel"],
            "failed" => &["retry", "archive", "terminate"],
            "archived" => &["terminate"],
            _ => &[],
        }
    }

    pub fn may(&self, verb: &str) -> bool {
        self.verbs().contains(&verb)
    }

    /// The share of the input that the provider had cached.
    pub fn cached_share(&self) -> String {
        if self.total_input_tokens == 0 {
            return "-".to_owned();
        }
        format!("{} %", self.total_cached_tokens * 100 / self.total_input_tokens)
    }
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Detail {
    #[serde(flatten)]
    pub session: Session,
    pub runs: Vec<Run>,
    pub steps: Vec<Step>,
    pub tool_calls: Vec<Call>,
    pub deliveries: Vec<Delivery>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Run {
    pub status: String,
    pub prompt: Option<String>,
    pub steps: i64,
    pub tool_calls: i64,
    pub created_at: Moment,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Message {
    pub message_number: i64,
    pub step_number: i64,
    pub role: String,
    #[serde(default)]
    pub text: String,
    #[serde(default)]
    pub content: Value,
    #[serde(default)]
    pub internal: bool,
    pub created_at: Moment,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Step {
    pub step_number: i64,
    pub finish_reason: String,
    #[serde(default)]
    pub usage: Usage,
    pub executed_local_tool_count: i64,
    pub attempt: i64,
    pub worker_id: String,
    pub started_at: Moment,
    pub committed_at: Moment,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Usage {
    pub input_tokens: i64,
    pub output_tokens: i64,
    pub cached_tokens: i64,
    pub cost_micros: i64,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Call {
    pub call_id: String,
    pub name: String,
    pub effect: String,
    pub status: String,
    pub attempts: i64,
    /// Of a call that a person has to judge.
    pub arguments: Option<String>,
    pub args_sha256: Option<String>,
    /// Why an uncertain call is uncertain.
    pub reason: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Delivery {
    pub delivery_id: String,
    #[serde(default)]
    pub session_id: String,
    #[serde(default)]
    pub conversation_id: String,
    pub channel: String,
    pub status: String,
    pub attempt: i64,
    #[serde(default)]
    pub tries: Vec<crate::draw::Try>,
    pub last_error: Option<String>,
    pub receipt: Option<Value>,
    #[serde(default)]
    pub undelivered: Value,
    pub created_at: Option<Moment>,
    pub settled_at: Option<Moment>,
    #[serde(default)]
    pub resent: i64,
    pub held_up_by: Option<String>,
    pub held_up_error: Option<String>,
    pub held_for: Option<String>,
    pub next_attempt_in_s: Option<f64>,
    pub content: Option<Value>,
}

impl Delivery {
    pub fn badge(&self) -> Badge {
        badge(&self.status)
    }

    pub fn may_resend(&self) -> bool {
        matches!(self.status.as_str(), "failed" | "expired")
    }

    pub fn next_attempt(&self) -> Option<String> {
        let s = self.next_attempt_in_s?;
        Some(if s > 0.0 { format!("in {}", crate::text::seconds(s)) } else { "now".to_owned() })
    }

    pub fn is_uncertain(&self) -> bool {
        self.status == "uncertain"
    }

    pub fn line(&self) -> String {
        if let Some(reason) = &self.held_for {
            return crate::text::cut(&format!("{} is paused: {reason}", self.channel), 160);
        }
        let text = match (&self.last_error, &self.held_up_by) {
            (Some(error), _) => error.clone(),
            (None, Some(by)) => {
                let why = self.held_up_error.as_deref().map(|why| format!(": {why}")).unwrap_or_default();
                format!("waits for {}{why}", short(by))
            }
            (None, None) => String::new(),
        };
        crate::text::cut(&text, 160)
    }
}

/// An entry of the journal.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Event {
    pub seq: i64,
    pub ts: Moment,
    #[serde(rename = "type")]
    pub kind: String,
    pub step_number: Option<i64>,
    #[serde(default)]
    pub payload: Value,
}

impl Event {
    pub fn text(&self, key: &str) -> &str {
        self.payload[key].as_str().unwrap_or_default()
    }

    pub fn number(&self, key: &str) -> Option<i64> {
        self.payload[key].as_i64()
    }
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Branch {
    pub session_id: String,
    pub conversation_id: String,
    pub depth: usize,
    pub forked_at_message_number: Option<i64>,
    pub model_id: String,
    pub status: String,
    pub total_turns: i64,
    pub total_cost_micros: i64,
    pub started_at: Moment,
}

impl Branch {
    pub fn name(&self) -> String {
        conversation_name(&self.conversation_id)
    }
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Worker {
    pub worker_id: String,
    pub host: String,
    pub pid: i64,
    pub version: String,
    pub concurrency: i64,
    pub started_at: Moment,
    pub beat_age_s: f64,
    pub leases: i64,
    pub alive: bool,
    pub state: String,
}

impl Worker {
    pub fn badge(&self) -> Badge {
        badge(&self.state)
    }

    /// It has died, and nothing waits for it.
    pub fn is_gone(&self) -> bool {
        self.state == "gone"
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Queue {
    pub queues: Vec<Depth>,
    #[serde(default)]
    pub spaces: Vec<WaitingSpace>,
    pub gates: Vec<Gate>,
    #[serde(default)]
    pub history: Vec<Sample>,
}

impl Queue {
    /// When the first reading of the history was made.
    pub fn since(&self) -> Option<Moment> {
        self.history.first().map(|one| one.at)
    }
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Depth {
    pub kind: String,
    pub ready: i64,
    pub leased: i64,
    pub delayed: i64,
    pub oldest_ready_s: f64,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct WaitingSpace {
    pub space_id: String,
    pub ready: i64,
    pub oldest_ready_s: f64,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Gate {
    pub provider: String,
    pub phase: String,
    pub since: Moment,
    pub next_probe_at: Option<Moment>,
    pub probes: i64,
    pub waiting: i64,
    pub last_error: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Sample {
    pub at: Moment,
    pub ready: i64,
    pub leased: i64,
    pub delayed: i64,
    pub oldest_ready_s: f64,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Schedule {
    pub schedule_id: String,
    pub name: String,
    pub cron: String,
    pub time_zone: String,
    pub agent: String,
    pub conversation_id: String,
    pub prompt: String,
    pub source: String,
    pub paused_at: Option<Moment>,
    pub paused_by: Option<String>,
    pub next_at: Option<Moment>,
}

impl Schedule {
    pub fn state(&self) -> &'static str {
        if self.paused_at.is_some() { "paused" } else { "active" }
    }
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Firing {
    pub tick: Moment,
    pub manual: bool,
    pub session_id: Option<String>,
    pub status: Option<String>,
    pub reason: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Mail {
    pub mailbox_id: String,
    pub message_id: String,
    pub from_address: Option<String>,
    pub subject: String,
    pub session_id: Option<String>,
    pub joined: bool,
    pub dropped: Option<String>,
    pub received_at: Moment,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Audited {
    pub audit_id: i64,
    pub at: Moment,
    pub actor_kind: String,
    pub actor: String,
    pub verb: String,
    pub target: Option<String>,
    pub space_id: Option<String>,
    pub reason: Option<String>,
    pub address: Option<String>,
    pub outcome: String,
    pub status: Option<i64>,
    pub times: i64,
}

impl Audited {
    /// What the actor is, unless the name says it: "this machine" is one.
    pub fn kind(&self) -> Option<&str> {
        Some(self.actor_kind.as_str()).filter(|kind| !self.actor.ends_with(kind))
    }
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Token {
    pub token_id: String,
    pub name: Option<String>,
    pub scope: String,
    pub space_id: Option<String>,
    pub agent: Option<String>,
    pub created_at: Moment,
    pub expires_at: Option<Moment>,
    pub revoked_at: Option<Moment>,
    pub last_used_at: Option<Moment>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_shown_without_the_command_at_its_end_and_a_remedy_stays() {
        let waits = "a call waits for approval: read it, then say `wakeful session approve` or `wakeful session decline`";
        assert_eq!(without_command(waits), "a call waits for approval");
        for whole in ["the limit: 5 steps", "it broke. Remedy: run `wakeful doctor`", "it broke"] {
            assert_eq!(without_command(whole), whole);
        }
    }
}
