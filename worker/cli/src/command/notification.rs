//! `wakeful notification`: what people were told by the rules of `[[notify]]`. Works on the database and needs no server.

use super::output::{Cell, Column, Output, Table, Tone, age, until_reader_goes};
use super::space::Space;
use super::{Exit, Usage};
use std::fmt::Write as _;
use wakeful_config::Config;
use wakeful_store::notify::outbox::{Notification, NotificationFilter, Told, statuses};
use wakeful_store::{Error, Store};

pub(super) type Args = super::Noun<Verb>;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Verb {
    /// List notifications, newest first.
    List {
        /// Only those with this status: waiting (queued or sending), queued, sending, sent, failed, uncertain.
        #[arg(long, value_name = "STATUS")]
        status: Option<String>,
        /// Only those of this rule.
        #[arg(long, value_name = "NAME")]
        rule: Option<String>,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(i64).range(1..=10_000))]
        limit: i64,
    },
    /// Show a notification with what it told.
    Show {
        /// The notification's id.
        id: String,
    },
    /// Send a notification again that failed, or that may not have been sent.
    Resend {
        /// The notification's id.
        id: String,
    },
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    let store = super::open_store(&config, "wakeful notification").await?;
    let (output, space) = (Output::new(&args.output), args.space);
    let ran = match args.verb {
        Verb::List { status, rule, limit } => {
            let statuses = status.as_deref().map(statuses).transpose().map_err(Usage);
            let filter = NotificationFilter { statuses: statuses?, rule, limit, ..filter(&space) };
            list(&store, &output, &filter).await.map(|()| Exit::Ok)
        }
        Verb::Show { id } => show(&store, &output, &space, &id).await.map(|()| Exit::Ok),
        Verb::Resend { id } => resend(&store, &output, &space, &id).await,
    };
    store.close().await;
    until_reader_goes(ran)
}

/// Without a space: all of them.
fn filter(space: &Space) -> NotificationFilter {
    NotificationFilter {
        space_id: space.named().map(str::to_owned),
        limit: 1,
        ..NotificationFilter::default()
    }
}

async fn list(store: &Store, output: &Output, filter: &NotificationFilter) -> anyhow::Result<()> {
    let found = store.notifications(filter).await?;
    output.page(&found, filter.limit, "No notifications match.\n", || table(&found))
}

fn table(found: &[Notification]) -> Table {
    let mut table = Table::new(&[
        Column::fixed("NOTIFICATION"),
        Column::fixed("STATUS"),
        Column::fixed("RULE").below(),
        Column::flexible("KIND"),
        Column::number("COUNT"),
        Column::number("AGE"),
        Column::flexible("NOTE").below(),
    ]);
    for one in found {
        table.row([
            one.notification_id.as_str().into(),
            Cell::status(&one.status),
            one.rule.as_str().into(),
            kind(one).into(),
            one.count.into(),
            age(one.created_at).into(),
            Cell::new(one.last_error.as_deref().unwrap_or(&one.label), Tone::Faint),
        ]);
    }
    table
}

/// The kind, and which message of its group it is.
fn kind(one: &Notification) -> String {
    match one.phase.as_str() {
        "began" => one.kind.clone(),
        phase => format!("{} ({phase})", one.kind),
    }
}

async fn one(store: &Store, space: &Space, id: &str) -> anyhow::Result<Notification> {
    let filter = NotificationFilter { notification_id: Some(id.to_owned()), ..filter(space) };
    let found = store.notifications(&filter).await?.pop();
    Ok(found.ok_or_else(|| Error::NotFound { what: "notification", id: id.to_owned() })?)
}

async fn show(store: &Store, output: &Output, space: &Space, id: &str) -> anyhow::Result<()> {
    let found = one(store, space, id).await?;
    let told = store.told_by(id).await?;
    let mut body = serde_json::to_value(&found)?;
    body["items"] = serde_json::to_value(&told)?;
    output.one(&body, || details(output, &found, &told))
}

fn details(output: &Output, found: &Notification, told: &[Told]) -> String {
    let mut text = format!(
        "{}  {}\n",
        output.paint(Tone::Head, &found.notification_id),
        output.paint(Tone::of_status(&found.status), &found.status)
    );
    let mut facts = Table::new(&[Column::fixed(""), Column::flexible("")]).wrapped();
    let mut fact = |name: &str, value: String| facts.row([Cell::new(name, Tone::Faint), value.into()]);
    fact("rule", found.rule.clone());
    fact("kind", kind(found));
    fact("cause", found.label.clone());
    fact("told", format!("{} of {} so far", found.count, found.total));
    fact("made", format!("{} ago", age(found.created_at)));
    fact("attempts", found.attempt.to_string());
    if let Some(error) = &found.last_error {
        fact("last error", error.clone());
    }
    if let Some(receipt) = &found.receipt {
        fact("receipt", receipt.to_string());
    }
    text.push_str(&output.aligned(&facts, 2));
    if matches!(found.status.as_str(), "failed" | "uncertain") {
        let remedy = format!(
            "Mend the cause, then send it again:\nwakeful notification resend {}",
            found.notification_id
        );
        let _ = writeln!(text, "\n{}", output.paint(Tone::Head, "Remedy"));
        text.push_str(&output.block(&remedy, 2));
    }
    let _ = writeln!(text, "\n{}", output.paint(Tone::Head, "What it told"));
    let mut items = Table::new(&[Column::fixed(""), Column::fixed(""), Column::flexible("")]);
    for one in told {
        let about = one.question.as_deref().or(one.error.as_deref()).unwrap_or_default();
        let status = one.status.as_deref().unwrap_or("-");
        items.row([one.subject.as_str().into(), Cell::status(status), Cell::new(about, Tone::Faint)]);
    }
    text.push_str(&output.aligned(&items, 2));
    text
}

async fn resend(store: &Store, output: &Output, space: &Space, id: &str) -> anyhow::Result<Exit> {
    let before = one(store, space, id).await?;
    if !store.resend_notification(id).await? {
        let text = format!(
            "notification {id} is {}: only a failed or an uncertain one is sent again",
            before.status
        );
        eprintln!("wakeful: {text}");
        return Ok(Exit::Conflict);
    }
    let after = one(store, space, id).await?;
    output.one(&after, || format!("{id} is sent again\n"))?;
    Ok(Exit::Ok)
}
