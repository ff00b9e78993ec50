//! Which open sessions could not go on under another binary or configuration, found before it is deployed.
//!
//! [`Capabilities`] is what a binary with a configuration can do. [`Need`] is what one open session needs. [`judge`] compares the
//! need with what is offered now and with what would be offered. A change that concerns no open session is not an obstacle, and
//! neither is something that is missing already.
#![deny(missing_docs)]

mod judge;

pub use judge::{judge, judge_channel, judge_encryption, judge_resting, judge_rule, judge_schedule};

use crate::agent::{Agent, ToolDefinition};
use crate::effect::Effect;
use crate::policy::SessionPolicy;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// What a binary with a configuration can do. It holds no secret and no prompt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Capabilities {
    /// The binary's version.
    pub version: String,
    /// The newest migration that the binary knows.
    pub schema_number: i64,
    /// By name.
    pub agents: BTreeMap<String, OfferedAgent>,
    /// Every tool that the binary has.
    pub tools: Vec<ToolDefinition>,
    /// The providers whose models can be called: they are built in or registered, and have the key that they need.
    pub providers: BTreeSet<String>,
    /// The models with settings, by `provider/model`.
    pub models: BTreeMap<String, OfferedModel>,
    /// The context window of a model without settings.
    pub default_window: i64,
    /// The ways by which messages are sent.
    pub channels: BTreeSet<String>,
    /// The ways by which messages come in beside the API, such as `slack`.
    pub intakes: BTreeSet<String>,
    /// Who may write by a messenger, by its name. An older program says nothing of it.
    #[serde(default)]
    pub speakers: BTreeMap<String, Speakers>,
    /// Whether a mail is dropped if nothing proves its sender.
    #[serde(default)]
    pub drops_unproved: bool,
    /// The addresses of the mailboxes. Empty: all mail goes to one agent.
    pub mailboxes: BTreeSet<String>,
    /// The schedules of the configuration.
    pub schedules: BTreeSet<String>,
    /// The rules of `[[notify]]`.
    #[serde(default)]
    pub notify: BTreeSet<String>,
    /// The most files of a session.
    pub max_files: u64,
    /// The most bytes of a session's files.
    pub max_bytes: u64,
    /// The key store with each of its master keys, as hashes under that master key. Empty: nothing can be encrypted or opened.
    #[serde(default)]
    pub key_stores: BTreeSet<String>,
}

/// An agent of [`Capabilities`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OfferedAgent {
    /// Its settings. The prompt is left out, because sessions keep the one that they began with.
    #[serde(flatten)]
    pub agent: Agent,
    /// The only spaces whose sessions may use it.
    pub spaces: Option<Vec<String>>,
    /// After how many seconds a question without an answer is closed.
    pub ask_expires_s: Option<u64>,
    /// Whether the person is told when a run fails for good.
    pub tells_of_failure: bool,
    /// Whether the person is told when a run takes long.
    pub tells_of_delay: bool,
    /// Whether several users may write in one conversation.
    pub shared: bool,
}

/// Whose messages a messenger of [`Capabilities`] takes. A message must pass both lists.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Speakers {
    /// The space of its conversations.
    pub space: String,
    /// Ids of users; `*` for all of them. `None`: all.
    pub users: Option<Vec<String>>,
    /// Ids of channels or chats; `*` for all of them. `None`: all.
    pub channels: Option<Vec<String>>,
}

/// A model of [`Capabilities`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OfferedModel {
    /// Tokens that it sees.
    pub context_window: i64,
    /// Whether its calls have a price. Without one they count as free.
    pub priced: bool,
}

/// What one open session needs to go on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Need {
    /// The session.
    pub session_id: String,
    /// Its space.
    pub space_id: String,
    /// Its status: `queued`, `running`, `waiting_input` or `needs_attention`.
    pub status: String,
    /// Its agent.
    pub agent: String,
    /// What made it.
    pub trigger_type: String,
    /// The mailbox that its mails come to.
    pub mailbox_id: String,
    /// Its own rules.
    pub policy: SessionPolicy,
    /// The tools of its pinned prefix.
    pub pinned_tools: Vec<ToolDefinition>,
    /// What its run has used so far.
    pub run_steps: i64,
    /// Input and output tokens of its run.
    pub run_tokens: i64,
    /// Claims of its step without progress.
    pub attempts: i64,
    /// Seconds for which a provider's outage has held up its step.
    pub outage_s: f64,
    /// Input tokens of its last model call.
    pub context_tokens: i64,
    /// Whether its calls have cost anything so far.
    pub has_cost: bool,
    /// Seconds since it asked its user. 0: it has not asked.
    pub asked_s: f64,
    /// The users that wrote to it.
    pub senders: Vec<String>,
    /// Calls without a result, and uncertain ones.
    pub calls: Vec<OpenCall>,
    /// Channels of its messages that are not sent yet.
    pub unsent: Vec<String>,
    /// Files of its newest snapshot.
    pub files: u64,
    /// Bytes of them.
    pub bytes: u64,
}

/// A call of a [`Need`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpenCall {
    /// Its id.
    pub call_id: String,
    /// The tool.
    pub name: String,
    /// As the ledger has it: `invoked`, `unapproved`, `started`, `waiting`, `uncertain`.
    pub status: String,
    /// As it was when the call was recorded.
    pub effect: Effect,
    /// What the model gave it.
    pub arguments: Value,
}

/// A schedule that fires.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ScheduleNeed {
    /// Its name.
    pub name: String,
    /// Its space.
    pub space_id: String,
    /// Whether the configuration defines it.
    pub of_config: bool,
    /// Its agent.
    pub agent: String,
    /// Whether it mails its replies.
    pub mails: bool,
}

/// What stops a session, or changes what was promised to its person.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The schema does not serve the binary.
    Schema,
    /// The agent does not exist.
    AgentGone,
    /// The agent is there, for other spaces only.
    AgentNotInSpace,
    /// The agent of conversations that rest is gone, or is for other spaces: their next message would wait.
    AgentOfResting,
    /// The model's provider cannot be called.
    ModelGone,
    /// Calls of the model would count as free.
    PriceGone,
    /// The conversation is longer than what the model sees, and nothing shortens it.
    WindowSmaller,
    /// No other model is called while the provider fails.
    FallbackGone,
    /// The run has used more steps.
    StepLimit,
    /// The run has used more tokens.
    TokenLimit,
    /// The step has used up its attempts.
    AttemptLimit,
    /// The outage has lasted for longer.
    OutageLimit,
    /// The binary does not have the tool, or the agent may not use it.
    ToolGone,
    /// The arguments of an open call do not fit the tool's schema any more.
    ToolNarrowed,
    /// An open call of an idempotent tool would count as one that must not run twice.
    ToolEffect,
    /// An open mail goes to a recipient that the agent may not write to.
    Recipients,
    /// An open call fetches from a host that the agent may not contact.
    Web,
    /// A message has no way out.
    ChannelGone,
    /// An answer has no way in.
    IntakeGone,
    /// A user who wrote to the session may not write by its messenger any more, or not in its channel.
    SpeakerShutOut,
    /// What its messenger takes goes to conversations of another space.
    IntakeSpace,
    /// Mail is dropped if nothing proves its sender, and was taken.
    UnprovedMail,
    /// Mail to the session's address is refused.
    MailboxGone,
    /// The session's question would be closed at once.
    QuestionExpires,
    /// Users other than the first are refused.
    SharedGone,
    /// An uncertain effect would no longer wait for an operator.
    UncertainPolicy,
    /// The person is no longer told that a run failed.
    FailureText,
    /// The person is no longer told that a run takes long.
    DelayText,
    /// The session has more files than are allowed.
    WorkspaceFiles,
    /// The session's files are larger than what is allowed.
    WorkspaceBytes,
    /// The configuration does not have the schedule any more.
    ScheduleGone,
    /// The schedule's agent is gone, or is for other spaces.
    ScheduleAgent,
    /// A rule of `[[notify]]` is gone, and what it gathered was not told yet.
    RuleGone,
    /// Encrypted conversations could not be read.
    KeysGone,
}

impl Kind {
    /// What helps. NAME and ID stand for what [`Obstacle::remedy`] names.
    fn remedy(self) -> &'static str {
        match self {
            Kind::Schema => "deploy a newer binary, or do not migrate yet",
            Kind::AgentGone => {
                "keep the agent until its sessions have ended, or run one worker that has it; or cancel them"
            }
            Kind::AgentNotInSpace => "add the space to the agent's `spaces`",
            Kind::AgentOfResting => {
                "keep the agent, or archive these conversations, so that their next message begins a new session: wakeful session \
                 archive --filter agent=NAME --reason …"
            }
            Kind::ModelGone => {
                "set the provider's key, register the provider, or give the agent another model"
            }
            Kind::PriceGone => "give the model its prices in [models.\"NAME\"]",
            Kind::WindowSmaller => {
                "keep the larger context_window, or set [agents.NAME.context] strategy = \"compaction\""
            }
            Kind::FallbackGone => "keep a `fallback` until the provider answers again",
            Kind::StepLimit => "keep [agents.NAME.limits] steps above what is used",
            Kind::TokenLimit => "keep [agents.NAME.limits] tokens above what is used",
            Kind::AttemptLimit => "keep [agents.NAME.limits] attempts above what is used",
            Kind::OutageLimit => "keep [agents.NAME.limits] outage_s above how long the outage has lasted",
            Kind::ToolGone => "keep the tool, and the agent's right to it, until these sessions have ended",
            Kind::ToolNarrowed => {
                "let the tool's schema accept what the open calls have, until they have ended"
            }
            Kind::ToolEffect => "keep the tool's effect until the open calls have ended",
            Kind::Recipients => "keep these addresses in `recipients` until the mails have left",
            Kind::Web => "keep these hosts allowed until the calls have ended",
            Kind::ChannelGone => "keep the channel configured until its messages have left",
            Kind::IntakeGone => "keep the messenger's secrets until the answers have come",
            Kind::SpeakerShutOut => {
                "keep them in `allow_users` and `allow_channels` until their conversations have ended"
            }
            Kind::IntakeSpace => "keep the messenger's `space` until its conversations have ended",
            Kind::UnprovedMail => "keep email.unproved = \"take\" until these conversations have ended",
            Kind::MailboxGone => "keep the mailbox until its conversations have ended",
            Kind::QuestionExpires => "keep `ask_expires_s` above how long the questions have waited",
            Kind::SharedGone => "keep participants = \"anyone\" for this agent",
            Kind::UncertainPolicy => "resolve the uncertain effects first: wakeful session why ID",
            Kind::FailureText => "keep `on_failed`",
            Kind::DelayText => "keep `on_delayed`",
            Kind::WorkspaceFiles => "keep [workspace] max_files above what these sessions have",
            Kind::WorkspaceBytes => "keep [workspace] max_bytes above what these sessions have",
            Kind::ScheduleGone => {
                "keep the schedule's section, or delete the schedule: wakeful schedule delete NAME"
            }
            Kind::KeysGone => {
                "keep [encryption] with its `keys`, and with the present master key as `old_master_key` until `wakeful encryption rotate` has run"
            }
            Kind::ScheduleAgent => "keep the agent for the schedule's space, or edit the schedule",
            Kind::RuleGone => {
                "keep the rule in [[notify]] until its messages have left: wakeful notification list"
            }
        }
    }
}

/// Something that stops a session.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Obstacle {
    /// What kind of thing.
    pub kind: Kind,
    /// The thing in words, the same for all sessions that it stops.
    pub what: String,
    /// The agent, the model or the schedule that the remedy names. Empty if it names none.
    pub about: String,
}

impl Obstacle {
    /// An obstacle whose remedy names nothing.
    pub fn new(kind: Kind, what: String) -> Obstacle {
        Obstacle { kind, what, about: String::new() }
    }

    /// An obstacle whose remedy names this agent, model or schedule.
    pub fn of(kind: Kind, what: String, about: &str) -> Obstacle {
        Obstacle { kind, what, about: about.to_owned() }
    }

    /// What helps. `session`: one that it stops.
    pub fn remedy(&self, session: Option<&str>) -> String {
        let remedy = self.kind.remedy().replace("NAME", &self.about);
        match session {
            Some(id) => remedy.replace("why ID", &format!("why {id}")),
            None => remedy,
        }
    }
}
