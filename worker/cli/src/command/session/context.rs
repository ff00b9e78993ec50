//! `wakeful session context`: shows what the model would see now.

use super::super::Usage;
use super::super::output::{Cell, Column, Output, Table, Tone, count, dollars};
use super::Exit;
use crate::App;
use std::fmt::Write as _;
use std::io::Write as _;
use wakeful_config::Config;
use wakeful_http::context::{Part, View, strategy, view};
use wakeful_store::Store;
use wakeful_workflow::record::{Block, text_of};
use wakeful_workflow::strategy::Strategy;

/// Number of characters shown from the start of each message.
const SHOWN_CHARS: usize = 200;

#[derive(Debug, clap::Args)]
pub(in crate::command) struct Args {
    /// The session's id.
    pub(super) id: String,
    /// Use this strategy instead of the agent's own: full, sliding_window, trim_tool_results, compaction.
    #[arg(long, value_name = "STRATEGY", value_parser = strategy)]
    strategy: Option<Strategy>,
    /// Print only the body of the request, exactly as it would be sent.
    #[arg(long)]
    raw: bool,
}

pub(super) async fn context(
    app: &App,
    store: &Store,
    config: &Config,
    output: &Output,
    args: Args,
) -> anyhow::Result<Exit> {
    super::super::say_without_file(config);
    // If the configuration names no model, as with `wakeful dev`, use the session's own.
    let session = store.session(None, &args.id).await?;
    let config = Config { fallback_model: Some(session.model_id), ..config.clone() };
    let (registry, models) = (app.registry(&config)?, app.models(&config)?);
    let part = if args.raw { Part::Request } else { Part::Messages };
    let read = store.hydrate(&args.id).await?;
    let view = view((&config, &registry, &models), &read, args.strategy, part);
    let view = view.map_err(|error| Usage(error.to_string()))?;
    match &view.request {
        Some(body) => {
            // Exactly the bytes of the request, so do not add a newline.
            let mut stdout = std::io::stdout().lock();
            stdout.write_all(body)?;
            stdout.flush()?;
        }
        None => output.one(&view, || text(&view, output))?,
    }
    Ok(Exit::Ok)
}

fn text(view: &View, output: &Output) -> String {
    let mut text = format!("{}  {}\n", output.paint(Tone::Head, &view.session_id), view.strategy.as_str());
    let mut facts = Table::new(&[Column::fixed(""), Column::flexible("")]);
    let mut fact = |name: &str, value: String| facts.row([Cell::new(name, Tone::Faint), value.into()]);
    fact("model", format!("{} sees {} tokens", view.model, view.window_tokens));
    let weight = view.weight;
    fact(
        "weighs",
        format!(
            "{}, {} bytes, about {} tokens",
            count(weight.messages as i64, "message"),
            weight.bytes,
            weight.tokens
        ),
    );
    fact(
        "begins with",
        format!("a system prompt of {} bytes, {}", view.system.len(), count(view.tools.len() as i64, "tool")),
    );
    if let Some(rebase) = &view.rebase {
        let mut parts = Vec::new();
        if let Some(number) = rebase.summary_message_number {
            parts.push(format!("the summary #{number} comes first"));
        }
        if rebase.keep_from_message_number > 0 {
            parts.push(format!("messages below #{} are left out", rebase.keep_from_message_number));
        }
        if let Some(number) = rebase.user_messages_from {
            parts.push(format!("but the user's from #{number} on"));
        }
        if let Some(number) = rebase.trim_results_before {
            parts.push(format!("results below #{number} are trimmed"));
        }
        let when = if view.rebased_now { "with the next call" } else { "now" };
        fact("rebased", format!("{when}: {}", parts.join(", ")));
    }
    if view.compaction_due {
        fact("due", "a summary is written before the next call".to_owned());
    }
    if view.compaction_failures > 0 {
        fact("failed", count(view.compaction_failures, "summary call"));
    }
    text.push_str(&output.aligned(&facts, 2));
    let _ = writeln!(text, "\n{}", output.paint(Tone::Head, "What the model would see"));
    text.push_str(&output.aligned(&messages(view), 2));
    let _ = writeln!(
        text,
        "\n{}",
        output.paint(Tone::Head, "What each strategy would weigh (tokens are estimated)")
    );
    text.push_str(&output.aligned(&strategies(view), 2));
    text
}

fn messages(view: &View) -> Table {
    let mut table = Table::new(&[
        Column::number("#"),
        Column::fixed("ROLE"),
        Column::number("BYTES"),
        Column::flexible("BEGINS"),
    ]);
    for message in view.shown.iter().flatten() {
        table.row([
            message.message_number.map_or("-".to_owned(), |number| number.to_string()).into(),
            message.role.into(),
            message.bytes.into(),
            beginning(&message.content).into(),
        ]);
    }
    table
}

/// Returns the start of a message's text and the names of the tools that it calls. Cells escape hostile
/// characters.
fn beginning(content: &[Block]) -> String {
    let calls: Vec<String> = content
        .iter()
        .filter_map(|block| match block {
            Block::ToolCall(call) => Some(format!("→ {}", call.name)),
            Block::Text { .. } | Block::ToolResult(_) | Block::Provider { .. } => None,
        })
        .collect();
    let said = text_of(content);
    let shown: String = said.trim().chars().take(SHOWN_CHARS).collect();
    [shown, calls.join(" ")].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
}

fn strategies(view: &View) -> Table {
    let mut table = Table::new(&[
        Column::fixed("STRATEGY"),
        Column::number("MESSAGES"),
        Column::number("BYTES"),
        Column::number("TOKENS"),
        Column::number("WINDOW"),
        Column::number("COST"),
        Column::number("IF CACHED"),
    ]);
    for one in &view.strategies {
        let tone = if one.current { Tone::Head } else { Tone::Plain };
        table.row([
            Cell::new(one.strategy.as_str(), tone),
            one.weight.messages.into(),
            one.weight.bytes.into(),
            one.weight.tokens.into(),
            format!("{:.1}%", one.window_percent).into(),
            dollars(one.cost_micros).into(),
            dollars(one.cached_cost_micros).into(),
        ]);
    }
    table
}
