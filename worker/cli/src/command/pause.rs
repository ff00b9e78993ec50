//! `wakeful pause`: switches something off for a while. Works on the database and needs no server.

use super::output::{Cell, print};
use super::output::{Column, Output, Table, Tone, age, count, printable, span, until_reader_goes};
use super::{Exit, Usage};
use crate::App;
use chrono::Utc;
use std::collections::BTreeSet;
use std::time::Duration;
use wakeful_config::Config;
use wakeful_http::pauses::unknown;
use wakeful_store::Store;
use wakeful_store::pause::Pause;
use wakeful_workflow::pause::{Kind, LASTS_S, Subject};

pub(super) type Args = super::Noun<Verb>;

/// What may be paused.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct What {
    /// What to pause: queue, space, agent, trigger, provider, tool, conversation, schedule or channel.
    #[arg(value_name = "KIND", value_parser = kind)]
    kind: Kind,
    /// Its name: of a trigger its type, such as email; of a provider the part of a model before the slash; of a conversation or a
    /// schedule that of --space. The queue has none.
    #[arg(value_name = "NAME")]
    name: Option<String>,
}

#[derive(Debug, clap::Subcommand)]
pub(super) enum Verb {
    /// Pause it: its sessions wait without a worker. Messages are still accepted, and a step that runs ends first. Of a channel, the
    /// messages that would leave by it wait, and one that is being sent ends first.
    Begin {
        #[command(flatten)]
        what: What,
        #[command(flatten)]
        how: How,
    },
    /// End a pause: what waits goes on, the oldest first.
    End {
        #[command(flatten)]
        what: What,
        #[command(flatten)]
        pace: Pace,
    },
    /// List what is paused.
    List,
}

/// How long a pause lasts, and why.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct How {
    /// Why, for those who wait and those who look.
    #[arg(long)]
    reason: String,
    /// End the pause by itself after this time: 30m, 12h, 7d.
    #[arg(long = "for", value_name = "SPAN", value_parser = super::token::after)]
    lasts: Option<Duration>,
    /// When it ends, let this many sessions go on a second. Without this, all at once.
    #[arg(long, value_name = "N", value_parser = rate)]
    rate: Option<f64>,
}

/// How fast what waited goes on.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Pace {
    /// Let this many sessions go on a second. Without this, all at once.
    #[arg(long, value_name = "N", value_parser = rate)]
    rate: Option<f64>,
}

fn kind(word: &str) -> Result<Kind, String> {
    let kinds = || Kind::ALL.map(Kind::as_str).join(", ");
    Kind::parse(word).ok_or_else(|| format!("it is one of {}", kinds()))
}

fn rate(text: &str) -> Result<f64, &'static str> {
    let rate = text.parse().ok().filter(|rate| *rate > 0.0 && *rate <= 1000.0);
    rate.ok_or("a rate is above 0 and at most 1000 sessions a second")
}

pub(super) async fn run(app: &App, config: Config, args: Args) -> anyhow::Result<Exit> {
    let store = super::open_store(&config, "wakeful pause").await?;
    let output = Output::new(&args.output);
    let ran = pauses(app, &config, &store, &output, args.space.of_names(), args.verb).await;
    store.close().await;
    until_reader_goes(ran.map(|()| Exit::Ok))
}

async fn pauses(
    app: &App,
    config: &Config,
    store: &Store,
    output: &Output,
    space: &str,
    verb: Verb,
) -> anyhow::Result<()> {
    match verb {
        Verb::Begin { what, how } => {
            let subject = Subject::named(what.kind, what.name.as_deref(), space).map_err(Usage)?;
            begin(store, output, &subject, &how).await?;
            // It is paused. If this configuration is incomplete, only the check of the name is left out.
            let known: anyhow::Result<BTreeSet<String>> = match subject.kind {
                Kind::Provider => app.models(config).map(|all| all.providers().map(str::to_owned).collect()),
                Kind::Tool => app.registry(config).map(|all| all.names().map(str::to_owned).collect()),
                Kind::Channel => app.channels(config).map(|all| all.into_keys().collect()),
                _ => Ok(BTreeSet::new()),
            };
            if let Ok(known) = known
                && let Some(warning) = unknown(config, store, &subject, known).await?
            {
                eprintln!("wakeful: warning: {}", printable(&warning));
            }
            Ok(())
        }
        Verb::End { what, pace } => {
            let subjects = Subject::shown(what.kind, what.name.as_deref(), space).map_err(Usage)?;
            end(store, output, &subjects, &pace).await
        }
        Verb::List => {
            let pauses = store.pauses().await?;
            output.items(&pauses, || table(&pauses))?;
            if output.for_people() && pauses.is_empty() {
                print("Nothing is paused.\n")?;
            }
            Ok(())
        }
    }
}

/// Pauses it, and says so.
pub(super) async fn begin(
    store: &Store,
    output: &Output,
    subject: &Subject,
    how: &How,
) -> anyhow::Result<Pause> {
    if how.lasts.is_some_and(|lasts| !LASTS_S.contains(&lasts.as_secs())) {
        return Err(Usage("--for is from 1s to 366d; without it, `pause end` ends it".to_owned()).into());
    }
    let pause = store.pause(subject, &how.reason, how.lasts, how.rate).await?;
    output.one(&pause, || format!("{}\n", said(&pause)))?;
    Ok(pause)
}

/// Ends the first of these that is a pause, and says so.
pub(super) async fn end(
    store: &Store,
    output: &Output,
    subjects: &[Subject],
    pace: &Pace,
) -> anyhow::Result<()> {
    let subject = store.resume_first(subjects, pace.rate).await?;
    let body = serde_json::json!({"kind": subject.kind.as_str(), "name": subject.name});
    output.one(&body, || "What waits goes on: `wakeful pause list` shows how far it is.\n".to_owned())
}

fn table(pauses: &[Pause]) -> Table {
    let mut table = Table::new(&[
        Column::fixed("PAUSED"),
        Column::fixed("STATE"),
        Column::number("WAIT"),
        Column::number("SINCE"),
        Column::number("ENDS IN"),
        Column::flexible("REASON"),
    ]);
    for pause in pauses {
        let state = if pause.resuming_since.is_some() { "resuming" } else { "paused" };
        table.row([
            pause.what().into(),
            Cell::new(state, Tone::Busy),
            pause.waiting.into(),
            age(pause.since).into(),
            pause
                .until
                .map_or_else(|| "-".to_owned(), |at| span((at - Utc::now()).as_seconds_f64().max(0.0)))
                .into(),
            pause.reason.as_str().into(),
        ]);
    }
    table
}

/// A pause in one line.
pub(in crate::command) fn said(pause: &Pause) -> String {
    let by = pause.by.as_deref().map(|by| format!(" by {by}")).unwrap_or_default();
    let until = pause.until.filter(|at| *at > Utc::now());
    let until = until.map(|at| format!("; it ends in {}", span((at - Utc::now()).as_seconds_f64())));
    let since = (Utc::now() - pause.since).num_seconds();
    let since = if since < 1 { String::new() } else { format!(", {} ago", age(pause.since)) };
    let waiting = count(pause.waiting, "session");
    let wait = if pause.waiting == 1 { "waits" } else { "wait" };
    let state = if pause.resuming_since.is_some() { "goes on step by step, paused" } else { "is paused" };
    printable(&format!(
        "{} {state}{by}{since}: {}; {waiting} {wait}{}",
        pause.what(),
        pause.reason.trim_end_matches('.'),
        until.unwrap_or_default()
    ))
    .into_owned()
}
