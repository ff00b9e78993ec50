//! `wakeful conversation`: shows what a conversation and its forks did. Reads the database and needs no
//! server.

use super::Exit;
use super::erase;
use super::output::{Cell, Column, Output, Table, Tone, age, count, dollars, print};
use super::session::{list::list_table, show::missed};
use serde_json::Value;
use wakeful_config::Config;
use wakeful_store::Store;
use wakeful_store::erase::Subject;
use wakeful_store::history::{HistoryItem, HistoryTotals};

pub(super) type Args = super::Noun<Verb>;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Verb {
    /// List the sessions of a conversation, of those that it was forked from, and of its forks, newest first.
    Sessions {
        /// The conversation, as `session list` names it.
        id: String,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=10_000))]
        limit: i64,
    },
    /// Show the messages in and out, the tool calls and the answers, newest first. What another conversation of the
    /// line did, one that this was forked from or a fork of it, has that conversation under IN.
    History {
        /// The conversation, as `session list` names it.
        id: String,
        /// Also what replays of its sessions did.
        #[arg(long)]
        all: bool,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=10_000))]
        limit: i64,
    },
    /// Erase the conversation with its forks and the imports of its sessions: messages, journal, files, mails. Refused
    /// while a session is at work, or while a hold stands.
    ///
    /// Needs a user of the database who may take the role wakeful_retention. `wakeful dev` has one. Elsewhere a superuser runs
    /// deploy/roles.sql, and makes a user: `create role wakeful_cleaner login password '…' in role wakeful_runtime, wakeful_retention`.
    Erase {
        /// The conversation, as `session list` names it.
        id: String,
        #[command(flatten)]
        erase: super::erase::EraseArgs,
    },
    /// Place a legal hold: the conversation is not erased while it stands.
    Hold {
        /// The conversation, as `session list` names it. It need not exist yet.
        id: String,
        #[command(flatten)]
        hold: super::erase::HoldArgs,
    },
    /// List the legal holds of conversations and persons.
    Holds,
    /// Release a legal hold.
    Release {
        /// The hold, as `conversation holds` names it.
        hold_id: String,
    },
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    let store = super::open_store(&config, "wakeful conversation").await?;
    let output = Output::new(&args.output);
    let space = args.space;
    let ran = match args.verb {
        Verb::Sessions { id, limit } => sessions(&store, &output, &space.stored(&id), limit).await,
        Verb::History { id, all, limit } => history(&store, &output, &space.stored(&id), all, limit).await,
        Verb::Erase { id, erase: args } => {
            let subject = Subject::Conversation(space.stored(&id));
            erase::erase(&config, &store, &output, space.of_names(), &subject, &args).await
        }
        Verb::Hold { id, hold } => {
            let subject = Subject::Conversation(space.stored(&id));
            erase::hold(&store, &output, space.of_names(), &subject, &hold).await
        }
        Verb::Holds => erase::holds(&store, &output, space.of_names()).await,
        Verb::Release { hold_id } => erase::release(&store, &output, &hold_id, space.of_names()).await,
    };
    store.close().await;
    super::output::until_reader_goes(ran)
}

async fn sessions(store: &Store, output: &Output, id: &str, limit: i64) -> anyhow::Result<Exit> {
    let sessions = store.chain(id, None, limit).await?;
    output.items(&sessions, || list_table(&sessions, None))?;
    output.more(sessions.len(), limit);
    Ok(Exit::Ok)
}

async fn history(
    store: &Store,
    output: &Output,
    id: &str,
    replays: bool,
    limit: i64,
) -> anyhow::Result<Exit> {
    let items = store.history(id, replays, None, limit, i64::MAX).await?.items;
    output.items(&items, || table(&items, id))?;
    output.more(items.len(), limit);
    if output.for_people() {
        print(&format!("\n{}", output.block(&sums(&store.history_totals(id, replays).await?), 0)))?;
    }
    Ok(Exit::Ok)
}

/// The items of the line of the conversation `asked`, as stored.
fn table(items: &[HistoryItem], asked: &str) -> Table {
    let asked = asked.split_once('/').map_or(asked, |(_, id)| id);
    let mut table = Table::new(&[
        Column::number("AGE"),
        Column::fixed("WHAT"),
        Column::fixed("STATUS"),
        Column::id("IN"),
        Column::flexible("ABOUT"),
        Column::fixed("SESSION").extra(),
    ]);
    for item in items {
        let status = item.facts["status"].as_str().unwrap_or_default();
        let what = match item.kind.as_str() {
            "delivery" => item.facts["channel"].as_str().unwrap_or_default(),
            kind => kind,
        };
        table.row([
            age(item.at).into(),
            what.into(),
            if status.is_empty() { "".into() } else { Cell::status(status) },
            if item.conversation_id == asked { "" } else { item.conversation_id.as_str() }.into(),
            Cell::new(about(item), Tone::Plain),
            item.session_id.as_str().into(),
        ]);
    }
    table
}

/// Describes the item in one line, with the error of a delivery that did not go out.
fn about(item: &HistoryItem) -> String {
    let facts = &item.facts;
    let text =
        |value: &Value| value.as_str().unwrap_or_default().lines().next().unwrap_or_default().to_owned();
    match item.kind.as_str() {
        "session" => {
            format!("{} by {}, {}", text(&facts["agent"]), text(&facts["trigger_type"]), item.conversation_id)
        }
        _ if facts["earlier"] == true => format!("(before the session) {}", text(&facts["text"])),
        "message" => match facts["sender"].as_str() {
            Some(sender) => format!("{sender}: {}", text(&facts["text"])),
            None => text(&facts["text"]),
        },
        "tool_call" => text(&facts["name"]),
        "delivery" => delivery(facts),
        _ => text(&facts["text"]),
    }
}

fn delivery(facts: &Value) -> String {
    let content = &facts["content"];
    let mail = if content["type"] == "reply" { &content["to"] } else { content };
    let to: Vec<&str> = mail["to"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let said = mail["subject"].as_str().or(content["text"].as_str()).unwrap_or_default();
    let said = said.lines().next().unwrap_or_default();
    let to = if to.is_empty() { String::new() } else { format!("to {}: ", to.join(", ")) };
    let trouble = missed(&facts["undelivered"]).or_else(|| {
        let error = facts["last_error"].as_str().filter(|_| facts["status"] != "sent");
        error.map(str::to_owned)
    });
    format!("{to}{said}{}", trouble.map(|trouble| format!(" ({trouble})")).unwrap_or_default())
}

fn sums(totals: &HistoryTotals) -> String {
    format!(
        "{} in {}: {}, {} in, {} out, {}, {}; {} of {} went out ({} not sent, {} not to everybody)",
        count(totals.sessions, "session"),
        count(totals.conversations, "conversation"),
        count(totals.turns, "turn"),
        totals.input_tokens,
        totals.output_tokens,
        dollars(totals.cost_micros),
        count(totals.tool_calls, "tool call"),
        totals.deliveries_sent,
        count(totals.deliveries, "message"),
        totals.deliveries_not_sent,
        totals.deliveries_undelivered
    )
}
