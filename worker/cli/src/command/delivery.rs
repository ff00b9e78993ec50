//! `wakeful delivery`: lists and shows outgoing messages, and resends them. Works on the database and needs
//! no server.

use super::output::{Cell, Column, Output, Table, Tone, age, count, printable, span, until_reader_goes};
use super::session::show::missed;
use super::space::Space;
use super::{Exit, Usage, exit_of};
use std::fmt::Write as _;
use wakeful_config::Config;
use wakeful_store::outbox::{Delivery, DeliveryFilter, statuses};
use wakeful_store::resend::{Resend, Resent};
use wakeful_store::{Error, Store};

pub(super) type Args = super::Noun<Verb>;

#[derive(Debug, clap::Subcommand)]
pub(super) enum Verb {
    /// List outgoing messages, newest first.
    List {
        /// Only deliveries with this status: waiting (queued or sending), queued, sending, sent, failed,
        /// expired, uncertain.
        #[arg(long, value_name = "STATUS")]
        status: Option<String>,
        /// Only deliveries of this session.
        #[arg(long, value_name = "ID")]
        session: Option<String>,
        /// Only deliveries of this conversation.
        #[arg(long, value_name = "ID")]
        conversation: Option<String>,
        /// Only deliveries of this channel: email, slack, telegram, webhook, …
        #[arg(long, value_name = "NAME")]
        channel: Option<String>,
        /// Also list those of replays and imports. By default they are left out, unless --session or --conversation is given.
        #[arg(long)]
        all: bool,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(i64).range(1..=10_000))]
        limit: i64,
    },
    /// Show an outgoing message, its status, and what it waits for.
    Show {
        /// The delivery's id.
        id: String,
    },
    /// Send failed or expired messages again, under the same ids. Each keeps its place in the order.
    Resend {
        /// The deliveries' ids.
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
        /// The reason, for the journal.
        #[arg(long)]
        reason: Option<String>,
        /// The person who asks for it, for the journal.
        #[arg(long, value_name = "WHO")]
        by: Option<String>,
    },
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    let store = super::open_store(&config, "wakeful delivery").await?;
    let (output, space) = (Output::new(&args.output), args.space);
    let ran = match args.verb {
        Verb::List { status, session, conversation, channel, all, limit } => {
            let statuses = status.as_deref().map(statuses).transpose().map_err(Usage);
            let filter = DeliveryFilter {
                only_live: !all && session.is_none() && conversation.is_none(),
                session_id: session,
                space_id: space.named().map(str::to_owned),
                conversation_id: conversation.map(|id| space.stored(&id)),
                channel,
                statuses: statuses?,
                limit,
                ..DeliveryFilter::default()
            };
            list(&store, &output, &filter).await
        }
        Verb::Show { id } => show(&store, &output, &space, &id).await,
        Verb::Resend { ids, reason, by } => resend(&store, &output, &space, &ids, reason, by).await,
    };
    store.close().await;
    until_reader_goes(ran)
}

async fn list(store: &Store, output: &Output, filter: &DeliveryFilter) -> anyhow::Result<Exit> {
    let deliveries = store.outbox(filter).await?;
    output.page(&deliveries, filter.limit, "No deliveries match.\n", || table(&deliveries))?;
    Ok(Exit::Ok)
}

fn table(deliveries: &[Delivery]) -> Table {
    let mut table = Table::new(&[
        Column::fixed("DELIVERY"),
        Column::fixed("STATUS"),
        Column::fixed("CHANNEL"),
        Column::number("TRIES"),
        Column::number("AGE"),
        Column::flexible("SESSION").extra(),
        Column::flexible("NOTE"),
    ]);
    for delivery in deliveries {
        table.row([
            delivery.delivery_id.as_str().into(),
            Cell::status(&delivery.status),
            delivery.channel.as_str().into(),
            delivery.attempt.into(),
            age(delivery.created_at).into(),
            delivery.session_id.as_str().into(),
            Cell::new(note(delivery), Tone::Faint),
        ]);
    }
    table
}

/// The fact about a delivery that an operator needs first: what it waits for, or why it failed.
fn note(delivery: &Delivery) -> String {
    if delivery.waits() {
        let error = delivery.last_error.as_deref().map(|error| format!(": {error}")).unwrap_or_default();
        return format!("{}{error}", waits_for(delivery));
    }
    missed(&delivery.undelivered).or_else(|| delivery.last_error.clone()).unwrap_or_default()
}

/// Says what an unsent delivery waits for.
pub(super) fn waits_for(delivery: &Delivery) -> String {
    let next = match (&delivery.worker_id, delivery.next_attempt_in_s) {
        (_, None) => "there is no job to send it".to_owned(),
        (Some(worker), Some(_)) => format!("a worker has it ({worker})"),
        (None, Some(due_in_s)) if due_in_s > 0.0 => format!("next attempt in {}", span(due_in_s)),
        (None, Some(due_in_s)) => format!("ready for {}", span(due_in_s)),
    };
    let next = match &delivery.held_for {
        Some(reason) => format!("{} is paused: {reason}", delivery.channel),
        None => next,
    };
    let Some(head) = &delivery.held_up_by else { return next };
    let since = delivery.held_up_since.map(|since| format!(" since {} ago", age(since))).unwrap_or_default();
    let error = delivery.held_up_error.as_deref().map(|error| format!(" ({})", error.trim_end_matches('.')));
    format!("held up by {head}{since}{}; {next}", error.unwrap_or_default())
}

async fn show(store: &Store, output: &Output, space: &Space, id: &str) -> anyhow::Result<Exit> {
    let delivery = store.delivery(space.named(), id).await?;
    output.one(&delivery, || details(output, &delivery))?;
    Ok(Exit::Ok)
}

fn details(output: &Output, delivery: &Delivery) -> String {
    let mut text = format!(
        "{}  {}\n",
        output.paint(Tone::Head, &delivery.delivery_id),
        output.paint(Tone::of_status(&delivery.status), &delivery.status)
    );
    let mut facts = Table::new(&[Column::fixed(""), Column::flexible("")]).wrapped();
    let mut fact = |name: &str, value: String| facts.row([Cell::new(name, Tone::Faint), value.into()]);
    fact("channel", delivery.channel.clone());
    fact("session", delivery.session_id.clone());
    fact("conversation", delivery.conversation_id.clone());
    fact("made", format!("{} ago", age(delivery.created_at)));
    if let Some(at) = delivery.resent_at {
        fact("sent again", format!("{}, {} ago", count(delivery.resent.into(), "time"), age(at)));
    }
    let since = delivery.tried_since.map(|since| format!(", since {} ago", age(since))).unwrap_or_default();
    fact("attempts", format!("{}{since}", delivery.attempt));
    if delivery.waits() {
        fact("waits", waits_for(delivery));
    }
    if let Some(at) = delivery.settled_at {
        fact("ended", format!("{} ago", age(at)));
    }
    if let Some(error) = &delivery.last_error {
        fact("last error", error.clone());
    }
    if let Some(missed) = missed(&delivery.undelivered) {
        fact("not reached", missed);
    }
    if let Some(receipt) = &delivery.receipt {
        fact("receipt", receipt.to_string());
    }
    text.push_str(&output.aligned(&facts, 2));
    if let Some(remedy) = remedy(delivery) {
        let _ = writeln!(text, "\n{}", output.paint(Tone::Head, "Remedy"));
        text.push_str(&output.block(&remedy, 2));
    }
    if let Some(content) = &delivery.content {
        let _ = writeln!(text, "\n{}", output.paint(Tone::Head, "Content"));
        text.push_str(&output.block(&serde_json::to_string_pretty(content).unwrap_or_default(), 2));
    }
    text
}

/// Says what to do about a delivery that was not sent. `session why` prints the same text.
pub(super) fn remedy(delivery: &Delivery) -> Option<String> {
    let id = &delivery.delivery_id;
    match delivery.status.as_str() {
        "failed" | "expired" if delivery.imported => None,
        "failed" => Some(format!("Mend the cause, then send it again:\nwakeful delivery resend {id}")),
        "expired" => Some(format!("If it still matters, send it late:\nwakeful delivery resend {id}")),
        "uncertain" => Some(format!(
            "Look at the channel, then say what you found; only the second sends it again:\n{}",
            super::session::why::resolve_delivery(&delivery.session_id, id).trim_end()
        )),
        "queued" | "sending" if delivery.next_attempt_in_s.is_none() => {
            Some(format!("A worker heals it, or at once:\nwakeful session wake {}", delivery.session_id))
        }
        "queued" | "sending" => delivery
            .held_up_by
            .as_ref()
            .map(|head| format!("Look at the one before it:\nwakeful delivery show {head}")),
        _ => None,
    }
}

async fn resend(
    store: &Store,
    output: &Output,
    space: &Space,
    ids: &[String],
    reason: Option<String>,
    by: Option<String>,
) -> anyhow::Result<Exit> {
    let asked = Resend { by, reason, trace_context: wakeful_engine::telemetry::trace_context() };
    let (mut resent, mut exit, mut broken) = (Vec::new(), Exit::Ok, None);
    for id in ids {
        let one = store.resend(space.named(), id, &asked).await;
        if let Ok(one) = &one
            && let Err(error) = store.announce(&one.session_id).await
        {
            // Not fatal: workers poll and find the job without this notification.
            eprintln!("wakeful: {}", printable(&error.to_string()));
        }
        match one {
            Ok(one) => resent.push(one),
            // This one cannot be resent; go on with the others.
            Err(error @ (Error::NotFound { .. } | Error::Refused { .. })) => {
                eprintln!("wakeful: {}", printable(&error.to_string()));
                exit = exit_of(&error.into());
            }
            Err(error) => {
                broken = Some(error);
                break;
            }
        }
    }
    // Print what was resent even when a later id failed.
    output.items(&resent, || resent_table(&resent))?;
    broken.map_or(Ok(exit), |error| Err(error.into()))
}

fn resent_table(resent: &[Resent]) -> Table {
    let mut table = Table::new(&[
        Column::fixed("DELIVERY"),
        Column::fixed("STATUS"),
        Column::fixed("CHANNEL"),
        Column::flexible("NOTE"),
    ]);
    for one in resent {
        let note = if one.duplicate { "asked for before" } else { "is sent again" };
        table.row([
            one.delivery_id.as_str().into(),
            Cell::status(&one.status),
            one.channel.as_str().into(),
            Cell::new(note, Tone::Faint),
        ]);
    }
    table
}
