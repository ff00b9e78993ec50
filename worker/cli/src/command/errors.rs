//! `wakeful errors`: failed runs in groups. Works on the database and needs no server.

use super::output::{Cell, Column, Output, Table, Tone, age, count, print, printable, until_reader_goes};
use super::session::list::{list_table, when};
use super::{Exit, Usage};
use chrono::{DateTime, Utc};
use clap::builder::PossibleValuesParser;
use std::fmt::Write as _;
use std::time::Duration;
use wakeful_config::Config;
use wakeful_http::errors::{LONGEST_S, detail};
use wakeful_store::Store;
use wakeful_store::failure::{ErrorFilter, ErrorGroup};
use wakeful_store::session::SessionFilter;
use wakeful_workflow::failure::KINDS;

pub(super) type Args = super::Noun<Verb>;

#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Examples:
  wakeful errors list --since 24h
  wakeful errors show 9f2c4b1a7d3e5f60
  wakeful errors mute 9f2c4b1a7d3e5f60 --for 7d --reason 'ticket 311'
  wakeful session retry --filter error=9f2c4b1a7d3e5f60 --prove 50 --reason 'prompt mended'")]
pub(super) enum Verb {
    /// List groups of errors, the newest failure first.
    List {
        /// Only muted groups. By default muted ones are left out.
        #[arg(long, conflicts_with = "all")]
        muted: bool,
        /// Also muted groups.
        #[arg(long)]
        all: bool,
        /// Only groups with this in their text.
        #[arg(long)]
        text: Option<String>,
        /// Only this kind of fault.
        #[arg(long, value_parser = PossibleValuesParser::new(KINDS))]
        kind: Option<String>,
        /// Only what failed then or later: 2h, 7d (ago), 2026-11-23.
        #[arg(long, value_name = "WHEN", value_parser = when)]
        since: Option<DateTime<Utc>>,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(i64).range(1..=10_000))]
        limit: i64,
    },
    /// Show one group: its newest error, when it came, and its last sessions.
    Show {
        /// The fingerprint, as `errors list` shows it.
        id: String,
    },
    /// Leave a group out of the list.
    Mute {
        /// The fingerprint.
        id: String,
        /// For how long: 30m, 12h, 7d. Without this for good.
        #[arg(long = "for", value_name = "SPAN", value_parser = super::token::after)]
        length: Option<Duration>,
        /// List it again.
        #[arg(long, conflicts_with = "length")]
        off: bool,
        /// Why.
        #[arg(long)]
        reason: Option<String>,
    },
    /// Write a line for those who look next. An empty one removes it.
    Note {
        /// The fingerprint.
        id: String,
        /// The line.
        note: String,
    },
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    let store = super::open_store(&config, "wakeful errors").await?;
    let output = Output::new(&args.output);
    let ran = errors(&store, &output, args.space.named(), args.verb).await;
    store.close().await;
    until_reader_goes(ran.map(|()| Exit::Ok))
}

async fn errors(store: &Store, output: &Output, space: Option<&str>, verb: Verb) -> anyhow::Result<()> {
    let (id, did) = match verb {
        Verb::List { muted, all, text, kind, since, limit } => {
            let muted = if all { None } else { Some(muted) };
            let filter = ErrorFilter {
                space_id: space.map(str::to_owned),
                muted,
                text,
                kind,
                since,
                limit,
                ..ErrorFilter::default()
            };
            let groups = store.error_groups(&filter).await?;
            output.items(&groups, || table(&groups))?;
            if output.for_people() && groups.is_empty() {
                print("No run has failed like that.\n")?;
            }
            return Ok(());
        }
        Verb::Show { id } => return show(store, output, space, &id).await,
        Verb::Mute { id, length, off, reason } => {
            if length.is_some_and(|length| !(1..=LONGEST_S).contains(&length.as_secs())) {
                return Err(Usage(
                    "--for is from 1s to ten years; without it the group is muted for good, and --off lists it again"
                        .to_owned(),
                )
                .into());
            }
            let length = if off { Some(Duration::ZERO) } else { length };
            store.mute_errors(space, &id, length, reason.as_deref()).await?;
            (id, if off { "is listed again" } else { "is muted" })
        }
        Verb::Note { id, note } => {
            if note.len() > 1000 || note.chars().any(char::is_control) {
                return Err(
                    Usage("a note has at most 1000 bytes and no control characters".to_owned()).into()
                );
            }
            store.note_errors(space, &id, &note).await?;
            (id, if note.is_empty() { "has no note any more" } else { "is noted" })
        }
    };
    let group = store.error_group(space, &id).await?;
    output.one(&group, || format!("{} {did}\n", printable(&id)))
}

async fn show(store: &Store, output: &Output, space: Option<&str>, id: &str) -> anyhow::Result<()> {
    let group = store.error_group(space, id).await?;
    let failed_now = store.failed_now(space, id).await?;
    let filter = SessionFilter {
        error: Some(group.fingerprint.clone()),
        space_id: space.map(str::to_owned),
        limit: 10,
        ..SessionFilter::default()
    };
    let sessions = store.sessions(&filter).await?;
    output.one(&detail(&group, failed_now), || {
        let mut text = format!("{}\n", output.block(&group.example, 0).trim_end());
        let mut line = |name: &str, value: String| {
            let _ = writeln!(text, "{name:<9} {}", printable(&value));
        };
        let source = if group.source.is_empty() { String::new() } else { format!(" of {}", group.source) };
        line("group", group.fingerprint.clone());
        line("kind", format!("{}{source}", group.kind));
        line(
            "failed",
            format!("{}, {} still failed", count(group.count, "time"), count(failed_now, "session")),
        );
        line("first", format!("{} ago, version {}", age(group.first_at), group.first_version));
        line("last", format!("{} ago, version {}", age(group.last_at), group.last_version));
        if group.muted {
            let until =
                group.muted_until.map_or_else(|| "for good".to_owned(), |at| format!("until {at:.0}"));
            line("muted", format!("{until}{}", by(&group.muted_by, &group.mute_reason)));
        }
        if let Some(note) = &group.note {
            line("note", format!("{note}{}", by(&group.noted_by, &None)));
        }
        if failed_now > 0 {
            let _ = write!(text, "\n{}", output.aligned(&list_table(&sessions, None), 0));
            let _ = writeln!(
                text,
                "\nTo retry them:\n  wakeful session retry --filter error={} --prove 10 --reason …",
                group.fingerprint
            );
        }
        text
    })
}

fn by(who: &Option<String>, why: &Option<String>) -> String {
    let who = who.as_ref().map(|who| format!(", by {who}")).unwrap_or_default();
    who + &why.as_ref().map(|why| format!(": {why}")).unwrap_or_default()
}

fn table(groups: &[ErrorGroup]) -> Table {
    let mut table = Table::new(&[
        Column::fixed("GROUP"),
        Column::number("COUNT"),
        Column::number("LAST"),
        Column::number("FIRST").extra(),
        Column::fixed("KIND").extra(),
        Column::flexible("ERROR"),
    ]);
    for group in groups {
        let tone = if group.muted { Tone::Faint } else { Tone::Plain };
        let note = group.note.as_ref().map(|note| format!(" [{note}]")).unwrap_or_default();
        table.row([
            group.fingerprint.as_str().into(),
            group.count.into(),
            age(group.last_at).into(),
            age(group.first_at).into(),
            group.kind.as_str().into(),
            Cell::new(format!("{}{note}", group.text), tone),
        ]);
    }
    table
}
