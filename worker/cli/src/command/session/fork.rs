//! `wakeful session fork`: makes a new session that begins with messages of this one.

use super::super::Usage;
use super::super::output::{Output, count, printable};
use super::Exit;
use super::bulk::asked;
use crate::App;
use anyhow::Context as _;
use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use wakeful_config::Config;
use wakeful_store::Store;
use wakeful_store::fork::{ForkRequest, Forked, Model};
use wakeful_workflow::fork::{CutPoint, SystemPromptPatch};
use wakeful_workflow::policy::ToolMode;

#[derive(Debug, clap::Args)]
pub(in crate::command) struct Args {
    /// The session's id.
    pub(super) id: String,
    /// The message to cut after: its number or its id, start, end, last-user, last-tool, step:N or event:N.
    /// Default: the last message; with --text the last one of a user.
    #[arg(long, value_name = "PLACE")]
    at: Option<CutPoint>,
    /// Use another model, as provider/model.
    #[arg(long)]
    model: Option<String>,
    /// Use another system prompt, from a file.
    #[arg(long, value_name = "FILE")]
    system_prompt: Option<PathBuf>,
    /// Add this text to the end of the system prompt.
    #[arg(long, value_name = "TEXT", conflicts_with = "system_prompt")]
    append_system_prompt: Option<String>,
    /// Use only these tools, separated by commas; an empty list means no tools.
    #[arg(long, value_name = "NAMES")]
    tools: Option<String>,
    /// Replace the text of the user's message at the cut.
    #[arg(long)]
    text: Option<String>,
    /// Add one more user message.
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// How tool calls are handled. Default: as in the parent.
    #[arg(long, value_name = "MODE", value_enum)]
    tool_mode: Option<Mode>,
    /// The fork belongs to the user of the parent's conversation, who sees it then. Default: it belongs to no user.
    #[arg(long)]
    for_user: bool,
    /// Start no run: the fork waits for a message.
    #[arg(long, conflicts_with_all = ["text", "prompt"])]
    no_start: bool,
    /// An idempotency key: repeating the command with the same key makes no second fork.
    #[arg(long, value_name = "KEY")]
    client_key: Option<String>,
    /// Confirm that live tools may do again what the session did after the cut.
    #[arg(long)]
    yes: bool,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Mode {
    /// Tools run and act on the real world.
    Live,
    /// Pure tools run; the others only say what they would have done.
    Dry,
    /// Each call gets the result recorded in the parent.
    Recorded,
}

pub(super) async fn fork(
    store: &Store,
    app: &App,
    config: &Config,
    output: &Output,
    args: Args,
) -> anyhow::Result<Exit> {
    let yes = args.yes;
    let request = request(app, config, args)?;
    if !yes && !confirmed(&store.effects_after_cut(&request).await?)? {
        return Err(Usage("nothing was forked".to_owned()).into());
    }
    let forked = store.fork(&request).await?;
    if forked.run_id.is_some() && !forked.duplicate {
        store.announce(&forked.session_id).await?;
    }
    output.one(&forked, || format_fork(&forked))?;
    Ok(Exit::Ok)
}

/// Asks before a fork that may do again what the session did after the cut.
fn confirmed(effects: &[String]) -> anyhow::Result<bool> {
    if effects.is_empty() {
        return Ok(true);
    }
    let shown: Vec<String> = effects.iter().take(5).map(|call| printable(call).into_owned()).collect();
    let more = if effects.len() > shown.len() { ", …" } else { "" };
    let what = format!(
        "the session made {} after the cut, which took effect or may have: {}{more}. The fork's tools are live, so its model may \
         make them again",
        count(effects.len() as i64, "call"),
        shown.join(", ")
    );
    if !std::io::stdin().is_terminal() {
        return Err(Usage(format!("{what}: say --yes, or --tool-mode dry")).into());
    }
    eprintln!("wakeful: {what}.");
    asked("Fork it live?")
}

fn request(app: &App, config: &Config, args: Args) -> anyhow::Result<ForkRequest> {
    let edited = args.text.is_some();
    let tool_mode = args.tool_mode.map(|mode| match mode {
        Mode::Live => ToolMode::Live,
        Mode::Dry => ToolMode::Dry,
        Mode::Recorded => ToolMode::Recorded,
    });
    for (option, text) in [("--text", &args.text), ("--prompt", &args.prompt)] {
        if let Some(text) = text
            && (text.trim().is_empty() || text.len() > wakeful_http::body::BODY_LIMIT_BYTES)
        {
            let limit = wakeful_http::body::BODY_LIMIT_BYTES;
            return Err(Usage(format!("{option} has 1 to {limit} bytes, and not spaces alone")).into());
        }
    }
    if let Some(key) = &args.client_key
        && (key.is_empty() || key.len() > 256 || key.chars().any(char::is_control))
    {
        return Err(Usage("--client-key has 1 to 256 bytes and no control characters".to_owned()).into());
    }
    let system_prompt = match (args.system_prompt, args.append_system_prompt) {
        (Some(file), _) => Some(SystemPromptPatch::Replace(prompt_of(&file)?)),
        (None, Some(text)) => Some(SystemPromptPatch::Append(text)),
        (None, None) => None,
    };
    let model = match args.model {
        Some(id) => {
            app.models(config)?.get(&id).map_err(|fault| Usage(format!("--model: {fault}")))?;
            Some(Model { context_window: i32::try_from(config.context_window(&id)).unwrap_or(i32::MAX), id })
        }
        None => None,
    };
    let tools = match &args.tools {
        Some(names) => {
            let names: Vec<&str> = names.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
            let known = app.registry(config)?.definitions(&names);
            Some(known.map_err(|error| Usage(format!("--tools: {error}")))?)
        }
        None => None,
    };
    Ok(ForkRequest {
        model,
        system_prompt,
        tools,
        text: args.text,
        prompt: args.prompt,
        tool_mode,
        for_user: args.for_user,
        start: !args.no_start,
        client_key: args.client_key,
        trace_context: wakeful_engine::telemetry::trace_context(),
        ..ForkRequest::new(
            &args.id,
            args.at.unwrap_or(if edited { CutPoint::LastUser } else { CutPoint::End }),
        )
    })
}

fn prompt_of(file: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(file).with_context(|| format!("{} cannot be read", file.display()))?;
    if text.contains('\0') || text.len() > wakeful_http::body::BODY_LIMIT_BYTES {
        let limit = wakeful_http::body::BODY_LIMIT_BYTES;
        let what = format!("{}: a prompt has no NUL and at most {limit} bytes", file.display());
        return Err(Usage(what).into());
    }
    Ok(text)
}

fn format_fork(forked: &Forked) -> String {
    let mut text = format!(
        "{}: forked from {} after message {}",
        printable(&forked.session_id),
        printable(&forked.parent_session_id),
        forked.at_message_number
    );
    // Writing to a string cannot fail.
    let _ = match &forked.run_id {
        Some(run_id) => writeln!(text, "; {} begins", printable(run_id)),
        None => writeln!(text, "; it waits for a message"),
    };
    let _ = writeln!(text, "  conversation {}", printable(&forked.conversation_id));
    if let Some(moved) = &forked.moved {
        let _ = writeln!(text, "  {}", printable(moved));
    }
    if forked.duplicate {
        text.push_str("  (this fork was made before with the same key)\n");
    }
    text
}
