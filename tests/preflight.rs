//! `wakeful preflight`: what stops open sessions is named before it is deployed, and what stops none is not.

mod command;

use serde_json::json;
use std::collections::BTreeSet;
use wakeful_config::Config;
use wakeful_engine::capabilities::capabilities;
use wakeful_engine::tool::registry::{self, Registry};
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::effect::Effect;
use wakeful_workflow::policy::{ReplyRoute, SessionPolicy};
use wakeful_workflow::preflight::{
    Capabilities, Kind, Need, OpenCall, ScheduleNeed, judge, judge_rule, judge_schedule,
};

const CONFIG: &str = r#"
[agents.support]
system_prompt = "You help."
model = "openai/big"
fallback = ["anthropic/other"]
tools = ["ship", "lookup", "fetch", "ask_user", "compose_email"]
recipients = ["*@example.org"]
web_allow = ["api.example.org"]
ask_expires_s = 86400
on_failed = "Sorry."
on_delayed = { after_s = 60, text = "It takes longer." }
on_uncertain = "needs_attention"
participants = "anyone"

[agents.support.limits]
steps = 50
tokens = 100000
attempts = 8
outage_s = 3600

[models."openai/big"]
context_window = 200000
input_usd = 1.0
output_usd = 2.0

[models."openai/large"]
context_window = 400000
input_usd = 1.0
output_usd = 2.0

[models."anthropic/other"]
input_usd = 3.0
output_usd = 4.0

[email]
maildir = "mail"
from = "help@example.org"

[email.mailboxes.help]
address = "help@example.org"
agent = "support"

[email.mailboxes.sales]
address = "sales@example.org"
agent = "support"

[messenger.telegram]
token = "123456:ABC-DEF"
webhook_secrets = ["0123456789abcdef"]
allow_users = ["*"]
agent = "support"

[schedules.morning]
cron = "30 7 * * *"
agent = "support"
prompt = "Say what is due."
mail_to = ["ann@example.org"]

[[notify]]
name = "ops"
when = ["failed"]
to = "webhook"
url = "https://example.org/hook"
secrets = ["whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="]

[workspace]
max_files = 1000
max_bytes = 1000000
"#;

/// What `ship` takes.
fn ship() -> ToolDefinition {
    let parameters = json!({
        "type": "object",
        "properties": {
            "to": {"type": "string"},
            "kind": {"type": "string", "enum": ["letter", "parcel"]},
            "grams": {"type": "integer", "maximum": 10000},
            "items": {"type": "array", "items": {"type": "object"}},
        },
        "required": ["to"],
    });
    ToolDefinition::new("ship", "Sends something.", parameters, Effect::Idempotent)
}

fn capabilities_of(config: &str) -> Capabilities {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("wakeful.toml");
    std::fs::write(&file, config).unwrap();
    let keys = [("OPENAI_API_KEY", "sk-1"), ("ANTHROPIC_API_KEY", "sk-2")];
    let env = keys.into_iter().map(|(name, key)| (name.to_owned(), key.to_owned()));
    let config = Config::load(Some(&file), env).unwrap_or_else(|error| panic!("{error}\n{config}"));
    let registry = Registry::built_in().unwrap();
    let mut capabilities =
        capabilities(&config, &registry, std::iter::empty(), ["email", "telegram"].into_iter());
    let parameters = || json!({"type": "object"});
    capabilities.tools.push(ship());
    capabilities.tools.push(ToolDefinition::new("lookup", "Looks.", parameters(), Effect::Pure));
    capabilities.tools.push(ToolDefinition::new("fetch", "Fetches.", parameters(), Effect::Pure));
    capabilities
}

/// The open sessions: each meets some of the changes.
fn needs() -> Vec<Need> {
    let call = |name: &str, status: &str, effect, arguments| OpenCall {
        call_id: format!("call_{name}"),
        name: name.to_owned(),
        status: status.to_owned(),
        effect,
        arguments,
    };
    let of = |id: &str, status: &str| Need {
        session_id: format!("sess_{id}"),
        space_id: "default".to_owned(),
        status: status.to_owned(),
        agent: "support".to_owned(),
        trigger_type: "chat".to_owned(),
        pinned_tools: vec![
            ship(),
            ToolDefinition::new("lookup", "Looks.", json!({"type": "object"}), Effect::Pure),
        ],
        run_steps: 12,
        run_tokens: 30_000,
        context_tokens: 150_000,
        has_cost: true,
        ..Need::default()
    };
    let route = |channel: &str| {
        Some(ReplyRoute { channel: channel.to_owned(), to: json!({"chat_id": 1}), split_at: None })
    };
    let ships = json!({"to": "Ann", "kind": "letter", "grams": 5000, "items": []});
    let mail = json!({"to": ["ann@example.org"], "subject": "Hello", "body": "Here."});
    let url = json!({"url": "https://api.example.org:8443/v1?x=1"});
    vec![
        Need {
            calls: vec![
                call("ship", "started", Effect::Idempotent, ships),
                call("compose_email", "invoked", Effect::Guarded, mail),
                call("fetch", "invoked", Effect::Pure, url),
            ],
            files: 500,
            bytes: 400_000,
            ..of("works", "running")
        },
        Need {
            trigger_type: "message".to_owned(),
            policy: SessionPolicy { reply: route("telegram"), ..SessionPolicy::default() },
            senders: vec!["5".to_owned()],
            asked_s: 3600.0,
            calls: vec![call("ask_user", "waiting", Effect::Pure, json!({"question": "Which?"}))],
            ..of("waits", "waiting_input")
        },
        Need {
            trigger_type: "email".to_owned(),
            mailbox_id: "help@example.org".to_owned(),
            unsent: vec!["email".to_owned()],
            ..of("mails", "queued")
        },
        Need {
            attempts: 4,
            outage_s: 600.0,
            senders: vec!["ann".to_owned(), "bob".to_owned()],
            ..of("stands", "queued")
        },
        Need {
            calls: vec![call(
                "compose_email",
                "uncertain",
                Effect::Guarded,
                json!({"to": ["x@elsewhere.org"]}),
            )],
            ..of("unclear", "needs_attention")
        },
        Need {
            policy: SessionPolicy { model: Some("anthropic/other".to_owned()), ..SessionPolicy::default() },
            context_tokens: 1000,
            ..of("overrides", "running")
        },
    ]
}

fn schedules() -> Vec<ScheduleNeed> {
    let morning = ScheduleNeed {
        name: "morning".to_owned(),
        space_id: "default".to_owned(),
        of_config: true,
        agent: "support".to_owned(),
        mails: true,
    };
    vec![ScheduleNeed { name: "by-api".to_owned(), of_config: false, ..morning.clone() }, morning]
}

/// Each obstacle: its kind, the thing in words, and the remedy.
fn found(old: &Capabilities, new: &Capabilities) -> Vec<(Kind, String, String)> {
    let fits = |tool: &ToolDefinition, arguments: &_| registry::fits(tool, arguments);
    let of_sessions = needs().into_iter().flat_map(|need| judge(&need, old, new, &fits));
    let of_schedules = schedules().into_iter().flat_map(|one| judge_schedule(&one, new));
    // What the rule has gathered is not told yet.
    let of_rules = judge_rule("ops", Some("notify-webhook"), new).filter(|one| one.kind == Kind::RuleGone);
    let all = of_sessions.chain(of_schedules).chain(of_rules);
    all.map(|one| (one.kind, one.what.clone(), one.remedy(Some("sess_1")))).collect()
}

/// A change of the configuration, as one text that replaces another, or of the binary.
enum Change {
    Text(&'static str, &'static str),
    Binary(fn(&mut Capabilities)),
}
use Change::{Binary, Text};

impl Change {
    fn done(&self, old: &Capabilities) -> Capabilities {
        match self {
            Text(from, to) => {
                assert!(CONFIG.contains(from), "{from}");
                capabilities_of(&CONFIG.replace(from, to))
            }
            Binary(change) => {
                let mut new = old.clone();
                change(&mut new);
                assert_ne!(&new, old, "a change changes something");
                new
            }
        }
    }
}

fn tool<'a>(capabilities: &'a mut Capabilities, name: &str) -> &'a mut ToolDefinition {
    capabilities.tools.iter_mut().find(|tool| tool.name == name).unwrap()
}

fn ship_of(capabilities: &mut Capabilities) -> &mut serde_json::Value {
    &mut tool(capabilities, "ship").parameters
}

/// The agent is for another space only.
fn elsewhere(new: &mut Capabilities) {
    new.agents.get_mut("support").unwrap().spaces = Some(vec!["acme".to_owned()]);
}

fn gone(names: &mut BTreeSet<String>, name: &str) {
    assert!(names.remove(name), "{name} was there");
}

const BREAKING: &[(&str, Kind, Change)] = &[
    ("the agent is gone", Kind::AgentGone, Text("support", "helper")),
    ("the agent is for other spaces", Kind::AgentNotInSpace, Binary(elsewhere)),
    ("the provider's key is gone", Kind::ModelGone, Binary(|new| gone(&mut new.providers, "openai"))),
    (
        "the key of a session's own model is gone",
        Kind::ModelGone,
        Binary(|new| gone(&mut new.providers, "anthropic")),
    ),
    (
        "the price is gone",
        Kind::PriceGone,
        Text("context_window = 200000\ninput_usd = 1.0\noutput_usd = 2.0", "context_window = 200000"),
    ),
    ("a model without a price", Kind::PriceGone, Text("model = \"openai/big\"", "model = \"openai/free\"")),
    ("a smaller window", Kind::WindowSmaller, Text("context_window = 200000", "context_window = 100000")),
    (
        "a model with a smaller window",
        Kind::WindowSmaller,
        Text("model = \"openai/big\"", "model = \"anthropic/other\""),
    ),
    ("no fallback", Kind::FallbackGone, Text("fallback = [\"anthropic/other\"]", "")),
    ("fewer steps", Kind::StepLimit, Text("steps = 50", "steps = 10")),
    ("fewer tokens", Kind::TokenLimit, Text("tokens = 100000", "tokens = 20000")),
    ("fewer attempts", Kind::AttemptLimit, Text("attempts = 8", "attempts = 3")),
    ("a shorter outage", Kind::OutageLimit, Text("outage_s = 3600", "outage_s = 300")),
    ("a tool is gone", Kind::ToolGone, Binary(|new| new.tools.retain(|tool| tool.name != "ship"))),
    (
        "the tool of a question is gone",
        Kind::ToolGone,
        Binary(|new| new.tools.retain(|tool| tool.name != "ask_user")),
    ),
    ("the agent may not use a tool", Kind::ToolGone, Text("\"ship\", ", "")),
    ("the agent may not use a tool that only the prefix has", Kind::ToolGone, Text("\"lookup\", ", "")),
    (
        "a new required argument",
        Kind::ToolNarrowed,
        Binary(|new| ship_of(new)["required"] = json!(["to", "sender"])),
    ),
    (
        "another type",
        Kind::ToolNarrowed,
        Binary(|new| ship_of(new)["properties"]["to"] = json!({"type": "object"})),
    ),
    (
        "a smaller enum",
        Kind::ToolNarrowed,
        Binary(|new| ship_of(new)["properties"]["kind"]["enum"] = json!(["parcel"])),
    ),
    (
        "a lower maximum",
        Kind::ToolNarrowed,
        Binary(|new| ship_of(new)["properties"]["grams"]["maximum"] = json!(2000)),
    ),
    (
        "a shorter text",
        Kind::ToolNarrowed,
        Binary(|new| ship_of(new)["properties"]["to"]["maxLength"] = json!(2)),
    ),
    (
        "a pattern",
        Kind::ToolNarrowed,
        Binary(|new| ship_of(new)["properties"]["to"]["pattern"] = json!("^[a-z]+$")),
    ),
    (
        "at least one item",
        Kind::ToolNarrowed,
        Binary(|new| ship_of(new)["properties"]["items"]["minItems"] = json!(1)),
    ),
    (
        "no other arguments",
        Kind::ToolNarrowed,
        Binary(|new| {
            let schema = ship_of(new);
            schema["additionalProperties"] = json!(false);
            schema["properties"].as_object_mut().unwrap().remove("grams");
        }),
    ),
    (
        "an idempotent tool is guarded",
        Kind::ToolEffect,
        Binary(|new| tool(new, "ship").effect = Effect::Guarded),
    ),
    ("fewer recipients", Kind::Recipients, Text("*@example.org", "bob@example.org")),
    ("fewer hosts", Kind::Web, Text("api.example.org", "other.example.org")),
    ("a host is denied", Kind::Web, Text("web_allow", "web_deny = [\"*.example.org\"]\nweb_allow")),
    ("no mail", Kind::ChannelGone, Binary(|new| gone(&mut new.channels, "email"))),
    ("no messages to Telegram", Kind::ChannelGone, Binary(|new| gone(&mut new.channels, "telegram"))),
    ("no messages from Telegram", Kind::IntakeGone, Text("webhook_secrets = [\"0123456789abcdef\"]", "")),
    (
        "fewer users of Telegram",
        Kind::SpeakerShutOut,
        Text("allow_users = [\"*\"]", "allow_users = [\"6\", \"7\"]"),
    ),
    (
        "fewer chats of Telegram",
        Kind::SpeakerShutOut,
        Text("allow_users = [\"*\"]", "allow_users = [\"*\"]\nallow_channels = [\"2\"]"),
    ),
    (
        "Telegram leads to another space",
        Kind::IntakeSpace,
        Text("[messenger.telegram]", "[messenger.telegram]\nspace = \"acme\""),
    ),
    (
        "mail of unproved senders is dropped",
        Kind::UnprovedMail,
        Text("maildir = \"mail\"", "maildir = \"mail\"\nunproved = \"drop\""),
    ),
    (
        "a mailbox is gone",
        Kind::MailboxGone,
        Text("address = \"help@example.org\"", "address = \"other@example.org\""),
    ),
    ("questions expire sooner", Kind::QuestionExpires, Text("ask_expires_s = 86400", "ask_expires_s = 600")),
    ("one user a conversation", Kind::SharedGone, Text("participants = \"anyone\"", "")),
    (
        "the model is told of uncertain effects",
        Kind::UncertainPolicy,
        Text("on_uncertain = \"needs_attention\"", ""),
    ),
    ("people are not told of a failure", Kind::FailureText, Text("on_failed = \"Sorry.\"", "")),
    (
        "people are not told of a delay",
        Kind::DelayText,
        Text("on_delayed = { after_s = 60, text = \"It takes longer.\" }", ""),
    ),
    ("fewer files", Kind::WorkspaceFiles, Text("max_files = 1000", "max_files = 100")),
    ("smaller files", Kind::WorkspaceBytes, Text("max_bytes = 1000000", "max_bytes = 100000")),
    ("the schedule is gone", Kind::ScheduleGone, Text("[schedules.morning]", "[schedules.evening]")),
    ("a rule of people to be told is gone", Kind::RuleGone, Text("name = \"ops\"", "name = \"people\"")),
    ("the agent of schedules is for other spaces", Kind::ScheduleAgent, Binary(elsewhere)),
];

const HARMLESS: &[(&str, Change)] = &[
    ("nothing", Text("You help.", "You help.")),
    ("another prompt", Text("You help.", "You help briefly.")),
    ("another agent", Text("[agents.support]", "[agents.more]\nmodel = \"openai/big\"\n\n[agents.support]")),
    ("a model that sees more", Text("model = \"openai/big\"", "model = \"openai/large\"")),
    ("another fallback", Text("[\"anthropic/other\"]", "[\"openai/large\"]")),
    ("more fallbacks", Text("[\"anthropic/other\"]", "[\"anthropic/other\", \"openai/large\"]")),
    ("one more tool", Text("tools = [", "tools = [\"current_time\", ")),
    ("another order of tools", Text("\"ship\", \"lookup\"", "\"lookup\", \"ship\"")),
    ("more recipients", Text("[\"*@example.org\"]", "[\"*\"]")),
    ("more hosts", Text("[\"api.example.org\"]", "[\"*.example.org\"]")),
    ("another host is denied", Text("web_allow", "web_deny = [\"evil.example.org\"]\nweb_allow")),
    ("questions expire later", Text("ask_expires_s = 86400", "ask_expires_s = 172800")),
    ("questions never expire", Text("ask_expires_s = 86400", "")),
    ("another text of failure", Text("Sorry.", "Sorry. We were told.")),
    ("another text of delay", Text("after_s = 60", "after_s = 90")),
    ("more steps", Text("steps = 50", "steps = 60")),
    ("fewer steps, but enough", Text("steps = 50", "steps = 20")),
    ("more tokens", Text("tokens = 100000", "tokens = 200000")),
    ("more attempts", Text("attempts = 8", "attempts = 9")),
    ("a longer outage", Text("outage_s = 3600", "outage_s = 7200")),
    ("another time of a tool", Text("steps = 50", "steps = 50\ntool_s = 30")),
    ("another price", Text("input_usd = 1.0", "input_usd = 1.5")),
    ("a larger window", Text("context_window = 200000", "context_window = 300000")),
    (
        "a summary instead of everything",
        Text(
            "[models.\"openai/big\"]\ncontext_window = 200000",
            "[agents.support.context]\nstrategy = \"compaction\"\n\n[models.\"openai/big\"]\ncontext_window = 100000",
        ),
    ),
    ("a journal of checkpoints", Text("participants =", "journal = \"checkpoint\"\nparticipants =")),
    (
        "another mailbox",
        Text(
            "[email.mailboxes.sales]",
            "[email.mailboxes.more]\naddress = \"more@example.org\"\nagent = \"support\"\n\n[email.mailboxes.sales]",
        ),
    ),
    (
        "a mailbox without sessions is gone",
        Text("address = \"sales@example.org\"", "address = \"buy@example.org\""),
    ),
    ("fewer users of Telegram, but those who write", Text("allow_users = [\"*\"]", "allow_users = [\"5\"]")),
    (
        "fewer chats of Telegram, but those that are open",
        Text("allow_users = [\"*\"]", "allow_users = [\"*\"]\nallow_channels = [\"1\"]"),
    ),
    (
        "users of Slack",
        Text("[messenger.telegram]", "[messenger.slack]\nallow_users = [\"U1\"]\n\n[messenger.telegram]"),
    ),
    ("another secret of Telegram", Text("0123456789abcdef", "fedcba9876543210")),
    ("another time of the schedule", Text("30 7 * * *", "0 8 * * *")),
    ("another prompt of the schedule", Text("Say what is due.", "Say what is due today.")),
    (
        "one more schedule",
        Text(
            "[schedules.morning]",
            "[schedules.evening]\ncron = \"0 20 * * *\"\nagent = \"support\"\nprompt = \"Sum up.\"\n\n[schedules.morning]",
        ),
    ),
    ("a rule tells another place", Text("https://example.org/hook", "https://example.net/hook")),
    ("a rule tells more", Text("when = [\"failed\"]", "when = [\"failed\", \"gate_shut\"]")),
    ("more files", Text("max_files = 1000", "max_files = 2000")),
    ("more workers", Text("[workspace]", "[queue]\nconcurrency = 64\n\n[workspace]")),
    ("retention", Text("[workspace]", "[retention]\nended_days = 30\n\n[workspace]")),
    ("another description", Binary(|new| tool(new, "ship").description = "Ships something.".to_owned())),
    ("an optional argument", Binary(|new| ship_of(new)["properties"]["note"] = json!({"type": "string"}))),
    (
        "a larger enum",
        Binary(|new| ship_of(new)["properties"]["kind"]["enum"] = json!(["letter", "parcel", "crate"])),
    ),
    ("a higher maximum", Binary(|new| ship_of(new)["properties"]["grams"]["maximum"] = json!(20000))),
    ("nothing is required", Binary(|new| ship_of(new)["required"] = json!([]))),
    ("a pure tool is idempotent", Binary(|new| tool(new, "fetch").effect = Effect::Idempotent)),
    ("an unused tool is gone", Binary(|new| new.tools.retain(|tool| tool.name != "write_file"))),
    ("one more way to send", Binary(|new| new.channels.extend(["slack".to_owned()]))),
    ("a newer binary", Binary(|new| new.schema_number += 1)),
];

#[test]
fn each_of_thirty_breaking_changes_is_named_and_no_harmless_one() {
    assert!(BREAKING.len() >= 30 && HARMLESS.len() >= 30);
    let old = capabilities_of(CONFIG);
    assert_eq!(found(&old, &old), [], "all goes on as it is");
    for (name, kind, change) in BREAKING {
        let found = found(&old, &change.done(&old));
        assert!(found.iter().any(|(of, ..)| of == kind), "{name}: {kind:?} is not in {found:?}");
        for (kind, _, remedy) in found {
            let names = match kind {
                Kind::WindowSmaller => "set [agents.support.context] strategy",
                Kind::StepLimit | Kind::TokenLimit | Kind::AttemptLimit => "[agents.support.limits]",
                Kind::PriceGone => "[models.\"",
                Kind::ScheduleGone => "wakeful schedule delete morning",
                Kind::UncertainPolicy => "wakeful session why sess_1",
                _ => "",
            };
            let is_whole = !remedy.contains("NAME") && !remedy.contains(" ID") && !remedy.is_empty();
            assert!(is_whole && remedy.contains(names), "{kind:?}: {remedy}");
        }
    }
    for (name, change) in HARMLESS {
        assert_eq!(found(&old, &change.done(&old)), [], "{name}");
    }
}
