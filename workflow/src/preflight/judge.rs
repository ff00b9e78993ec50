//! Compares what an open session needs with what a binary offers.

use super::{Capabilities, Kind, Need, Obstacle, OfferedAgent, OpenCall, ScheduleNeed, Speakers};
use crate::agent::{OnUncertain, ToolDefinition};
use crate::effect::Effect;
use crate::policy::may_write_to;
use crate::strategy::Strategy;
use crate::trigger;
use serde_json::Value;

/// Returns what stops `need` under `new`. What a person or an operator was promised under `old` counts too. `fits` says whether
/// arguments fit a tool's schema.
pub fn judge(
    need: &Need,
    old: &Capabilities,
    new: &Capabilities,
    fits: &dyn Fn(&ToolDefinition, &Value) -> Result<(), String>,
) -> Vec<Obstacle> {
    let mut found = obstacles(need, old, new, fits);
    found.sort();
    found.dedup();
    found
}

/// Returns what stops a schedule under `new`.
pub fn judge_schedule(schedule: &ScheduleNeed, new: &Capabilities) -> Vec<Obstacle> {
    let mut found = Vec::new();
    let mut find = |kind, what| found.push(Obstacle::of(kind, what, &schedule.name));
    let name = &schedule.name;
    if schedule.of_config && !new.schedules.contains(name) {
        find(Kind::ScheduleGone, format!("schedule {name} of the configuration would fire no more"));
        return found;
    }
    if agent_in(new, &schedule.agent, &schedule.space_id).is_none() {
        find(
            Kind::ScheduleAgent,
            format!("schedule {name} fires for agent {}, which its space does not have", schedule.agent),
        );
    }
    if schedule.mails && !new.channels.contains("email") {
        find(Kind::ChannelGone, format!("schedule {name} mails its replies, and nothing sends mail"));
    }
    found
}

/// Returns what would keep conversations at rest from a reply to their next message: their agent is there now, and would not be.
pub fn judge_resting(
    agent: &str,
    space_id: &str,
    old: &Capabilities,
    new: &Capabilities,
) -> Option<Obstacle> {
    agent_in(old, agent, space_id)?;
    if agent_in(new, agent, space_id).is_some() {
        return None;
    }
    let gone = match new.agents.contains_key(agent) {
        true => format!("agent {agent} is not for space {space_id}"),
        false => format!("agent {agent} is gone"),
    };
    let what =
        format!("{gone}: the next message of conversations that rest in space {space_id} would wait for it");
    Some(Obstacle::of(Kind::AgentOfResting, what, agent))
}

/// Returns what stops the messages that are still to be sent by `channel`.
pub fn judge_channel(channel: &str, new: &Capabilities) -> Option<Obstacle> {
    let is_gone = !new.channels.contains(channel);
    is_gone.then(|| Obstacle::new(Kind::ChannelGone, format!("nothing sends by {channel}")))
}

/// Returns what stops the messages that a rule of `[[notify]]` has still to send, by this channel if it is known.
pub fn judge_rule(rule: &str, channel: Option<&str>, new: &Capabilities) -> Option<Obstacle> {
    if !new.notify.contains(rule) {
        let what = format!(
            "rule {rule} of [[notify]] is gone, so the messages that it gathered would never be sent"
        );
        return Some(Obstacle::new(Kind::RuleGone, what));
    }
    channel.and_then(|channel| judge_channel(channel, new))
}

/// Returns what keeps `sealed` encrypted conversations, ended ones too, from being read under `new`.
pub fn judge_encryption(sealed: i64, old: &Capabilities, new: &Capabilities) -> Option<Obstacle> {
    // The configuration of now may be without keys already.
    if sealed == 0 || old.key_stores.is_empty() || !old.key_stores.is_disjoint(&new.key_stores) {
        return None;
    }
    let how = if new.key_stores.is_empty() {
        "without [encryption]"
    } else {
        "with another key store or master key"
    };
    let what = format!("{sealed} encrypted conversations could not be read {how}");
    Some(Obstacle::new(Kind::KeysGone, what))
}

/// Messengers, whose answers come in by webhooks of their own.
const MESSENGERS: [&str; 3] = ["slack", "telegram", "webhook"];

fn agent_in<'a>(capabilities: &'a Capabilities, agent: &str, space_id: &str) -> Option<&'a OfferedAgent> {
    let is_here = |one: &&OfferedAgent| {
        one.spaces.as_ref().is_none_or(|spaces| spaces.iter().any(|one| one == space_id))
    };
    capabilities.agents.get(agent).filter(is_here)
}

fn obstacles(
    need: &Need,
    old: &Capabilities,
    new: &Capabilities,
    fits: &dyn Fn(&ToolDefinition, &Value) -> Result<(), String>,
) -> Vec<Obstacle> {
    let mut found = Vec::new();
    // A replay brings its own model and tools.
    if need.policy.replay.is_some() {
        return found;
    }
    ways(need, new, &mut found);
    speakers(need, old, new, &mut found);
    let (agent, space) = (&need.agent, &need.space_id);
    let Some(offered) = agent_in(new, agent, space) else {
        found.push(match new.agents.contains_key(agent) {
            true => Obstacle::new(Kind::AgentNotInSpace, format!("agent {agent} is not for space {space}")),
            false => Obstacle::new(Kind::AgentGone, format!("agent {agent} is gone")),
        });
        return found;
    };
    model(need, new, offered, &mut found);
    limits(need, offered, &mut found);
    tools(need, new, offered, fits, &mut found);
    prices(need, old, new, offered, &mut found);
    if let Some(before) = agent_in(old, agent, space) {
        promises(need, before, offered, &mut found);
    }
    found
}

/// How its messages leave and come in, and its files.
fn ways(need: &Need, capabilities: &Capabilities, found: &mut Vec<Obstacle>) {
    let reply = need.policy.reply.as_ref().map(|route| route.channel.as_str());
    for channel in need.unsent.iter().map(String::as_str).chain(reply) {
        found.extend(judge_channel(channel, capabilities));
    }
    let mut find = |kind, what| found.push(Obstacle::new(kind, what));
    if let Some(by) = reply.filter(|by| MESSENGERS.contains(by))
        && need.status == "waiting_input"
        && !capabilities.intakes.contains(by)
    {
        find(Kind::IntakeGone, format!("no answer comes in by {by}"));
    }
    if need.trigger_type == "email"
        && need.mailbox_id.contains('@')
        && !capabilities.mailboxes.is_empty()
        && !capabilities.mailboxes.contains(&need.mailbox_id)
    {
        find(Kind::MailboxGone, format!("mailbox {} is gone", need.mailbox_id));
    }
    if need.files > capabilities.max_files {
        find(Kind::WorkspaceFiles, format!("more than {} files", capabilities.max_files));
    }
    if need.bytes > capabilities.max_bytes {
        find(Kind::WorkspaceBytes, format!("more than {} bytes of files", capabilities.max_bytes));
    }
}

/// Whether those who wrote to it may go on writing.
fn speakers(need: &Need, old: &Capabilities, new: &Capabilities, found: &mut Vec<Obstacle>) {
    let mut find = |kind, what| found.push(Obstacle::new(kind, what));
    if need.trigger_type == "email" && new.drops_unproved && !old.drops_unproved {
        find(Kind::UnprovedMail, "mail is dropped whose sender nothing proves".to_owned());
    }
    let Some(route) = &need.policy.reply else { return };
    let by = &route.channel;
    let (Some(before), Some(after)) = (old.speakers.get(by), new.speakers.get(by)) else { return };
    if before.space == need.space_id && after.space != need.space_id {
        find(Kind::IntakeSpace, format!("what comes in by {by} goes to space {}", after.space));
    }
    // As Slack names it, and Telegram.
    let place = match (&route.to["channel"], &route.to["chat_id"]) {
        (Value::String(channel), _) => Some(channel.clone()),
        (_, chat @ Value::Number(_)) => Some(chat.to_string()),
        _ => None,
    };
    let has = |list: &Option<Vec<String>>, id: &str| {
        list.as_ref().is_none_or(|list| list.iter().any(|one| one == "*" || one == id))
    };
    let is_shut_out = |list: fn(&Speakers) -> &Option<Vec<String>>, id: &str| {
        has(list(before), id) && !has(list(after), id)
    };
    for user in need.senders.iter().filter(|user| is_shut_out(|one| &one.users, user)) {
        find(Kind::SpeakerShutOut, format!("{by} takes no message of user {user}"));
    }
    if let Some(place) = place.filter(|place| is_shut_out(|one| &one.channels, place)) {
        find(Kind::SpeakerShutOut, format!("{by} takes no message of channel {place}"));
    }
}

fn model_of<'a>(need: &'a Need, offered: &'a OfferedAgent) -> &'a str {
    need.policy.model.as_deref().unwrap_or(&offered.agent.model)
}

fn provider(model: &str) -> &str {
    model.split_once('/').map_or(model, |(provider, _)| provider)
}

fn model(need: &Need, capabilities: &Capabilities, offered: &OfferedAgent, found: &mut Vec<Obstacle>) {
    let mut find = |kind, what| found.push(Obstacle::of(kind, what, &need.agent));
    let model = model_of(need, offered);
    if !capabilities.providers.contains(provider(model)) {
        find(Kind::ModelGone, format!("model {model} of agent {} cannot be called", need.agent));
    }
    let window = capabilities
        .models
        .get(model)
        .map_or(capabilities.default_window, |settings| settings.context_window);
    let shortens = matches!(offered.agent.context.strategy, Strategy::SlidingWindow | Strategy::Compaction);
    if need.context_tokens > window && !shortens {
        find(Kind::WindowSmaller, format!("model {model} sees {window} tokens"));
    }
}

fn limits(need: &Need, offered: &OfferedAgent, found: &mut Vec<Obstacle>) {
    let mut find = |kind, what| found.push(Obstacle::of(kind, what, &need.agent));
    let (agent, limits) = (&need.agent, &offered.agent.limits);
    if need.run_steps >= limits.steps {
        find(Kind::StepLimit, format!("agent {agent}: at most {} steps a run", limits.steps));
    }
    if need.run_tokens >= limits.tokens {
        find(Kind::TokenLimit, format!("agent {agent}: at most {} tokens a run", limits.tokens));
    }
    if need.attempts >= limits.attempts {
        find(Kind::AttemptLimit, format!("agent {agent}: at most {} attempts a step", limits.attempts));
    }
    if need.outage_s * 1000.0 > limits.outage_ms as f64 {
        find(
            Kind::OutageLimit,
            format!("agent {agent}: at most {} s of a provider's outage", limits.outage_ms / 1000),
        );
    }
    if let Some(expires) = offered.ask_expires_s
        && need.asked_s > expires as f64
    {
        find(Kind::QuestionExpires, format!("agent {agent}: a question is closed after {expires} s"));
    }
}

fn tools(
    need: &Need,
    capabilities: &Capabilities,
    offered: &OfferedAgent,
    fits: &dyn Fn(&ToolDefinition, &Value) -> Result<(), String>,
    found: &mut Vec<Obstacle>,
) {
    let mut find = |kind, what| found.push(Obstacle::new(kind, what));
    let allowed = need.policy.tools.as_ref().unwrap_or(&offered.agent.tools);
    let missing = |name: &str| match capabilities.tools.iter().find(|tool| tool.name == name) {
        None => Some(format!("tool {name} is gone from the binary")),
        Some(_) if !allowed.iter().any(|one| one == name) => {
            Some(format!("agent {} may not use tool {name}", need.agent))
        }
        Some(_) => None,
    };
    let open = need.calls.iter().filter(|call| call.status != "uncertain").map(|call| call.name.as_str());
    // The model knows the tools of its prefix, and calls them.
    for name in open.chain(need.pinned_tools.iter().map(|tool| tool.name.as_str())) {
        if let Some(what) = missing(name) {
            find(Kind::ToolGone, what);
        }
    }
    for call in
        need.calls.iter().filter(|call| matches!(call.status.as_str(), "invoked" | "started" | "unapproved"))
    {
        let Some(tool) = capabilities.tools.iter().find(|tool| tool.name == call.name) else { continue };
        if fits(tool, &call.arguments).is_err() {
            find(Kind::ToolNarrowed, format!("tool {} does not accept what open calls have", call.name));
        }
        if call.status == "started" && call.effect != Effect::Guarded && tool.effect == Effect::Guarded {
            find(Kind::ToolEffect, format!("tool {} must not run twice any more", call.name));
        }
        mail(need, offered, call, &mut find);
        if let Some(host) = host_of(&call.arguments)
            && !offered.agent.web.allows(host)
        {
            find(Kind::Web, format!("agent {} may not contact {host}", need.agent));
        }
    }
}

fn mail(need: &Need, offered: &OfferedAgent, call: &OpenCall, find: &mut impl FnMut(Kind, String)) {
    if call.name != "compose_email" {
        return;
    }
    let allowed = need.policy.recipients.as_ref().unwrap_or(&offered.agent.recipients);
    for key in ["to", "cc", "bcc"] {
        let addresses = call.arguments[key].as_array().into_iter().flatten().filter_map(Value::as_str);
        for address in addresses {
            if !may_write_to(allowed, &need.policy.participants, address) {
                find(Kind::Recipients, format!("agent {} may not write to {address}", need.agent));
            }
        }
    }
}

/// The host of the argument `url`, as tools that fetch call it.
fn host_of(arguments: &Value) -> Option<&str> {
    let (_, rest) = arguments["url"].as_str()?.split_once("://")?;
    let authority = rest.split(['/', '?', '#']).next()?;
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let host = match host.strip_prefix('[') {
        Some(literal) => literal.split(']').next()?,
        None => host.split(':').next()?,
    };
    (!host.is_empty()).then_some(host)
}

/// What the person or the operator was promised.
fn promises(need: &Need, before: &OfferedAgent, after: &OfferedAgent, found: &mut Vec<Obstacle>) {
    let mut find = |kind, what| found.push(Obstacle::new(kind, what));
    let agent = &need.agent;
    let runs = matches!(need.status.as_str(), "queued" | "running");
    let of_person = !matches!(need.trigger_type.as_str(), trigger::CRON | trigger::HERALD | "import");
    if before.tells_of_failure && !after.tells_of_failure && of_person {
        find(Kind::FailureText, format!("agent {agent} does not tell the person that a run failed"));
    }
    if before.tells_of_delay && !after.tells_of_delay && of_person && runs {
        find(Kind::DelayText, format!("agent {agent} does not tell the person that a run takes long"));
    }
    if before.shared && !after.shared && need.senders.len() > 1 {
        find(Kind::SharedGone, format!("agent {agent}: only the first user of a conversation may write"));
    }
    if !before.agent.fallback.is_empty()
        && after.agent.fallback.is_empty()
        && need.policy.model.is_none()
        && need.outage_s > 0.0
    {
        find(Kind::FallbackGone, format!("agent {agent} has no fallback, and its provider fails"));
    }
    let asks = |one: &OfferedAgent| one.agent.on_uncertain == OnUncertain::NeedsAttention;
    let may_be_uncertain = need.calls.iter().any(|call| {
        call.effect == Effect::Guarded && matches!(call.status.as_str(), "started" | "uncertain")
    });
    if asks(before) && !asks(after) && may_be_uncertain {
        find(Kind::UncertainPolicy, format!("agent {agent}: an uncertain effect waits for no operator"));
    }
}

fn prices(
    need: &Need,
    old: &Capabilities,
    new: &Capabilities,
    offered: &OfferedAgent,
    found: &mut Vec<Obstacle>,
) {
    let model = model_of(need, offered);
    let priced =
        |capabilities: &Capabilities| capabilities.models.get(model).is_some_and(|settings| settings.priced);
    if !priced(new) && (priced(old) || need.has_cost) {
        let what = format!("model {model} has no price: its calls count as free");
        found.push(Obstacle::of(Kind::PriceGone, what, model));
    }
}
