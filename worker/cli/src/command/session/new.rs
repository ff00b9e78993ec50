//! `wakeful session new`: starts a new session in a conversation, to which the next message goes.

use super::super::output::{Output, printable};
use super::{Exit, Space, Usage};
use crate::App;
use wakeful_config::Config;
use wakeful_engine::new_session;
use wakeful_store::Store;
use wakeful_store::session::SessionFilter;
use wakeful_store::wake::NewSession;

#[derive(Debug, clap::Args)]
pub(in crate::command) struct Args {
    /// The conversation, as `session list` names it.
    conversation: String,
    /// The agent. Default: the one that the conversation has now.
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,
    /// The repository that the work is about.
    #[arg(long, value_name = "ID")]
    repository: Option<String>,
    /// An idempotency key: repeating the command with the same key returns the same session.
    #[arg(long, value_name = "KEY")]
    client_key: Option<String>,
}

pub(super) async fn new(
    app: &App,
    config: &Config,
    store: &Store,
    output: &Output,
    space: &Space,
    args: Args,
) -> anyhow::Result<Exit> {
    for (name, given) in [("--client-key", &args.client_key), ("--repository", &args.repository)] {
        if given
            .as_ref()
            .is_some_and(|text| text.is_empty() || text.len() > 256 || text.chars().any(char::is_control))
        {
            return Err(Usage(format!("{name} has 1 to 256 bytes and no control characters")).into());
        }
    }
    let conversation_id =
        space.conversation(&args.conversation).map_err(|problem| Usage(problem.to_string()))?;
    let filter = SessionFilter {
        conversation_id: Some(conversation_id.clone()),
        limit: 1,
        ..SessionFilter::default()
    };
    let before = store.sessions(&filter).await?.into_iter().next();
    let agent = match args.agent {
        Some(agent) => Some(agent),
        None => store.latest_agent(&conversation_id).await?,
    };
    // If the configuration names no model, as with `wakeful dev`, use the conversation's own.
    let config = Config { fallback_model: before.map(|session| session.model_id), ..config.clone() };
    let new = new_session::of_chat(&config, &app.registry(&config)?, conversation_id, agent.as_deref())
        .map_err(|cannot| Usage(cannot.to_string()))?;
    let new = NewSession { repository_id: args.repository, ..new };
    let begun = store.restart(&new, args.client_key.as_deref()).await?;
    output.one(&begun, || {
        let did = if begun.duplicate { "was begun before" } else { "takes the conversation's next message" };
        format!("{} {did}\n", printable(&begun.session_id))
    })?;
    Ok(Exit::Ok)
}
