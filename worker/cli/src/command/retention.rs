//! `wakeful retention`: deletes what ended longer ago than `[retention]` keeps it. Works on the database and needs no server.

use super::audit::delete_older;
use super::output::{Cell, Column, Output, Table, Tone, age, count, until_reader_goes};
use super::{Exit, Usage, erase, printable::printable};
use chrono::{DateTime, Utc};
use serde::Serialize;
use std::collections::BTreeMap;
use wakeful_config::Config;
use wakeful_config::retention::Days;
use wakeful_store::Store;
use wakeful_store::audit::act;
use wakeful_store::erase::retention::{Page, Rules};

/// Conversations that one transaction looks at, and mails that one deletes.
const PAGE: i64 = 500;

pub(super) type Args = super::Noun<Verb>;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Verb {
    /// Show what `run` would delete in each space. Writes nothing.
    Plan,
    /// Delete it, in small transactions. If it dies, the next run goes on. Run it once a day (deploy/systemd has a timer).
    ///
    /// Needs a user of the database who may take the role wakeful_retention. `wakeful dev` has one. Elsewhere a superuser runs
    /// deploy/roles.sql, and makes a user: `create role wakeful_cleaner login password '…' in role wakeful_runtime, wakeful_retention`.
    ///
    /// With --space it deletes in that space only. First it always finishes erasures that died on their way, also those of other
    /// spaces.
    Run {
        /// Delete what is old in the audit, and nothing else. It needs a user of the database that may take the role
        /// wakeful_auditor, so it has a timer of its own.
        #[arg(long)]
        audit: bool,
    },
}

/// What is due, or was deleted, in one space.
#[derive(Debug, Serialize)]
struct Line {
    space: String,
    conversations: u64,
    sessions: u64,
    /// Conversations that are due, and that a hold keeps.
    held: u64,
    /// When the oldest of the conversations began.
    oldest: Option<DateTime<Utc>>,
    /// Deleted rows by table.
    rows: BTreeMap<String, i64>,
    /// The receipts.
    erasures: Vec<String>,
}

impl Line {
    fn add(&mut self, page: Page) {
        self.conversations += page.conversations.len() as u64;
        self.sessions += page.sessions.len() as u64;
        self.held += page.held.len() as u64;
        self.oldest = self.oldest.or(page.oldest);
        for (table, rows) in page.rows {
            *self.rows.entry(table).or_default() += rows;
        }
        self.erasures.extend(page.erasure_id);
    }
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    let output = Output::new(&args.output);
    if let Verb::Run { audit: true } = args.verb {
        return until_reader_goes(retain_audit(&config, &output).await.map(|()| Exit::Ok));
    }
    if !config.retention.any() && config.retention.audit.is_none() {
        let text =
            "nothing is ever deleted: `[retention]` in wakeful.toml has no key, such as ended_days = 90";
        return Err(Usage(text.to_owned()).into());
    }
    let store = super::open_store(&config, "wakeful retention").await?;
    let ran = retain(&config, &store, &output, args.space.named(), args.verb).await;
    store.close().await;
    until_reader_goes(ran.map(|()| Exit::Ok))
}

/// Deletes what is old in the audit.
async fn retain_audit(config: &Config, output: &Output) -> anyhow::Result<()> {
    let Some(days) = config.retention.audit else {
        let text =
            "the audit is kept without limit: `[retention]` in wakeful.toml has no audit_days, such as 400";
        return Err(Usage(text.to_owned()).into());
    };
    act::because(Some(&format!("audit older than {days} days")));
    delete_older(config, output, "wakeful retention", days.into()).await
}

async fn retain(
    config: &Config,
    store: &Store,
    output: &Output,
    space: Option<&str>,
    verb: Verb,
) -> anyhow::Result<()> {
    let deletes = matches!(verb, Verb::Run { .. });
    if deletes {
        erase::finish_earlier(config, store).await?;
    }
    let spaces = match space {
        Some(space) => vec![space.to_owned()],
        None => store.spaces().await?,
    };
    let mut lines = Vec::new();
    for space in spaces {
        let days = config.retention.of(&space);
        if days.any() {
            lines.push(of_space(config, store, space, days, deletes).await?);
        }
    }
    output.items(&lines, || table(&lines, deletes))?;
    // A space has no audit of its own.
    if let (Some(days), None, false) = (config.retention.audit, space, deletes) {
        let due = count(store.old_audit(days).await?, "row");
        eprintln!("wakeful: {due} of the audit are due: `wakeful retention run --audit` deletes them");
    }
    Ok(())
}

async fn of_space(
    config: &Config,
    store: &Store,
    space: String,
    days: Days,
    deletes: bool,
) -> anyhow::Result<Line> {
    let rules = Rules {
        ended_days: days.ended,
        failed_days: days.failed,
        waiting_days: days.waiting,
        dropped_mails_days: days.dropped_mails,
    };
    let mut line = Line {
        space,
        conversations: 0,
        sessions: 0,
        held: 0,
        oldest: None,
        rows: BTreeMap::new(),
        erasures: Vec::new(),
    };
    let mut after = None;
    loop {
        let page = if deletes {
            store.retain(&line.space, &rules, after.as_ref(), PAGE).await?
        } else {
            store.plan_retention(&line.space, &rules, after.as_ref(), PAGE).await?
        };
        if deletes {
            erase::remove_workspaces(config, &page.sessions);
        }
        after.clone_from(&page.next);
        line.add(page);
        if after.is_none() {
            break;
        }
    }
    if let Some(days) = rules.dropped_mails_days {
        let mails = line.rows.entry("mails".to_owned()).or_default();
        if deletes {
            loop {
                let deleted = store.retain_dropped_mails(&line.space, days, PAGE).await?;
                *mails += deleted;
                if deleted < PAGE {
                    break;
                }
            }
        } else {
            *mails = store.old_dropped_mails(&line.space, days).await?;
        }
    }
    Ok(line)
}

fn table(lines: &[Line], deletes: bool) -> Table {
    let mut table = Table::new(&[
        Column::fixed("SPACE"),
        Column::number(if deletes { "DELETED CONVERSATIONS" } else { "DUE CONVERSATIONS" }),
        Column::number("SESSIONS"),
        Column::number("MAILS"),
        Column::number("HELD"),
        Column::number("OLDEST"),
    ]);
    for line in lines {
        let held = if line.held > 0 { Tone::Bad } else { Tone::Plain };
        table.row([
            printable(&line.space).to_string().as_str().into(),
            (line.conversations as i64).into(),
            (line.sessions as i64).into(),
            line.rows.get("mails").copied().unwrap_or_default().into(),
            Cell::new(line.held.to_string(), held),
            line.oldest.map_or_else(|| "-".to_owned(), age).into(),
        ]);
    }
    table
}
