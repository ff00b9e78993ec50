//! What this program with a configuration can do, for `wakeful preflight`: see [`wakeful_workflow::preflight`].

use crate::tool::registry::Registry;
use std::collections::BTreeSet;
use wakeful_config::Config;
use wakeful_config::mailboxes::Unproved;
use wakeful_config::messenger::Allowed;
use wakeful_store::schema;
use wakeful_workflow::preflight::{Capabilities, OfferedAgent, OfferedModel, Speakers};

/// Providers that are built in.
const PROVIDERS: [&str; 3] = ["anthropic", "openai", "scripted"];

/// Returns what a program with these tools, providers and channels can do under `config`.
pub fn capabilities<'a>(
    config: &Config,
    tools: &Registry,
    providers: impl Iterator<Item = &'a str>,
    channels: impl Iterator<Item = &'a str>,
) -> Capabilities {
    let agents = config.agent_names().into_iter().filter_map(|name| {
        let mut agent = config.agent(&name).ok()?;
        agent.system_prompt.clear();
        let settings = config.agents.get(&name);
        let offered = OfferedAgent {
            agent,
            spaces: settings.and_then(|settings| settings.spaces.clone()),
            ask_expires_s: settings.and_then(|settings| settings.ask_expires_s),
            tells_of_failure: settings.is_some_and(|settings| settings.on_failed.is_some()),
            tells_of_delay: settings.is_some_and(|settings| settings.on_delayed.is_some()),
            shared: config.is_shared(&name),
        };
        Some((name, offered))
    });
    let models = config.models.iter().map(|(name, settings)| {
        let offered =
            OfferedModel { context_window: config.context_window(name), priced: settings.price.is_some() };
        (name.clone(), offered)
    });
    let has_key = |provider: &&str| config.missing_key(&format!("{provider}/any")).is_none();
    let messenger = &config.messenger;
    let intakes = [
        ("slack", !messenger.slack.signing_secrets.is_empty()),
        ("telegram", !messenger.telegram.webhook_secrets.is_empty()),
        ("webhook", !messenger.webhook.secrets.is_empty()),
    ];
    let speakers = |space: &str, allow: &Allowed| Speakers {
        space: space.to_owned(),
        users: allow.users.clone(),
        channels: allow.channels.clone(),
    };
    let speakers = [
        ("slack", speakers(messenger.slack.space(), &messenger.slack.allow)),
        ("telegram", speakers(messenger.telegram.space(), &messenger.telegram.allow)),
        ("webhook", speakers(messenger.webhook.space(), &Allowed::default())),
    ];
    Capabilities {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        schema_number: schema::number(),
        agents: agents.collect(),
        tools: tools.names().filter_map(|name| tools.definition(name).cloned()).collect(),
        providers: PROVIDERS.into_iter().chain(providers).filter(has_key).map(str::to_owned).collect(),
        models: models.collect(),
        default_window: config.context_window(""),
        channels: channels.map(str::to_owned).collect(),
        intakes: intakes.into_iter().filter(|(_, open)| *open).map(|(name, _)| name.to_owned()).collect(),
        speakers: speakers.into_iter().map(|(name, who)| (name.to_owned(), who)).collect(),
        drops_unproved: config.email.incoming.unproved == Unproved::Drop,
        mailboxes: config
            .email
            .incoming
            .mailboxes
            .iter()
            .map(|mailbox| mailbox.address.clone())
            .collect::<BTreeSet<_>>(),
        schedules: config.schedules.keys().cloned().collect(),
        notify: config.notify.iter().map(|one| one.rule.name.clone()).collect(),
        max_files: config.workspace.max_files,
        max_bytes: config.workspace.max_bytes,
        key_stores: crate::encryption::key_stores(config),
    }
}
