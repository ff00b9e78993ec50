//! `wakeful batch`: shows, pauses, resumes and cancels batches. `wakeful session retry` and its like make them.

use super::output::{Cell, Column, Output, Table, Tone, age, print, printable, until_reader_goes};
use super::session::bulk::asked;
use super::{Exit, Usage};
use clap::builder::PossibleValuesParser;
use std::fmt::Write as _;
use std::time::Duration;
use wakeful_config::Config;
use wakeful_store::Store;
use wakeful_store::batch::{Batch, Member, OUTCOMES, RESULTS, STATUSES, Steer};

/// How often a batch that is waited for is read.
const EVERY: Duration = Duration::from_millis(300);

pub(super) type Args = super::Noun<Verb>;

#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Examples:
  wakeful session retry --filter status=failed --reason 'quota raised'     makes one
  wakeful batch list
  wakeful batch members batch_018f… --result failed_again
  wakeful batch resume batch_018f… --reason 'the two that fail are known'")]
pub(super) enum Verb {
    /// List batches, newest first.
    List {
        /// Only with this status.
        #[arg(long, value_parser = PossibleValuesParser::new(STATUSES))]
        status: Option<String>,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(i64).range(1..=10_000))]
        limit: i64,
    },
    /// Show a batch: how far it is, and why it is paused.
    Show {
        /// The batch's id.
        id: String,
    },
    /// List the members of a batch.
    Members {
        /// The batch's id.
        id: String,
        /// Only with this outcome.
        #[arg(long, value_parser = PossibleValuesParser::new(OUTCOMES))]
        outcome: Option<String>,
        /// Only with this result of a retry.
        #[arg(long, value_parser = PossibleValuesParser::new(RESULTS))]
        result: Option<String>,
        /// Show at most this many.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..=100_000))]
        limit: i64,
    },
    /// Pause a batch. What it did stays.
    Pause(Which),
    /// Let a paused batch go on, also one that paused by itself or after --prove.
    Resume(Which),
    /// End a batch. What it did stays.
    Cancel(Which),
    /// Wait until a batch has ended or is paused. Exit status 7 when not all went well.
    Wait {
        /// The batch's id.
        id: String,
    },
}

#[derive(Debug, clap::Args)]
pub(super) struct Which {
    /// The batch's id.
    id: String,
    /// The reason, for the list and the audit.
    #[arg(long)]
    reason: Option<String>,
}

pub(super) async fn run(config: Config, args: Args) -> anyhow::Result<Exit> {
    let store = super::open_store(&config, "wakeful batch").await?;
    let output = Output::new(&args.output);
    let ran = batch(&store, &output, args.space.named(), args.verb).await;
    store.close().await;
    until_reader_goes(ran)
}

async fn batch(store: &Store, output: &Output, space: Option<&str>, verb: Verb) -> anyhow::Result<Exit> {
    match verb {
        Verb::List { status, limit } => {
            let batches = store.batches(space, status.as_deref(), None, limit).await?;
            output.items(&batches, || table(&batches))?;
            if output.for_people() && batches.is_empty() {
                print("There is no batch.\n")?;
            }
        }
        Verb::Show { id } => {
            let batch = store.batch(space, &id).await?;
            output.one(&batch, || text_of(&batch))?;
        }
        Verb::Members { id, outcome, result, limit } => {
            store.batch(space, &id).await?;
            let members =
                store.batch_members(space, &id, outcome.as_deref(), result.as_deref(), None, limit).await?;
            output.items(&members, || members_table(&members))?;
        }
        Verb::Pause(which) => steer(store, output, space, which, Steer::Pause).await?,
        Verb::Resume(which) => steer(store, output, space, which, Steer::Resume).await?,
        Verb::Cancel(which) => steer(store, output, space, which, Steer::Cancel).await?,
        Verb::Wait { id } => {
            store.batch(space, &id).await?;
            return finish(store, output, &id, GoesOn::No).await;
        }
    }
    Ok(Exit::Ok)
}

async fn steer(
    store: &Store,
    output: &Output,
    space: Option<&str>,
    which: Which,
    steer: Steer,
) -> anyhow::Result<()> {
    if which.reason.as_ref().is_some_and(|reason| reason.len() > 1000 || reason.chars().any(char::is_control))
    {
        return Err(Usage("a reason has at most 1000 bytes and no control characters".to_owned()).into());
    }
    let batch = store.steer_batch(space, &which.id, steer, which.reason.as_deref()).await?;
    output.one(&batch, || format!("{} is {}\n", printable(&batch.batch_id), batch.status))
}

/// Whether a batch goes on after its dry tries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GoesOn {
    IfAllPass,
    /// A person is asked.
    IfToldTo,
    No,
}

/// Returns whether a batch rests because its dry tries are over.
fn waits_after_proof(batch: &Batch) -> bool {
    batch.proof.as_ref().is_some_and(|proof| batch.status_reason.as_ref() == Some(&proof.text))
}

/// Waits until a batch rests, and prints it.
pub(super) async fn finish(
    store: &Store,
    output: &Output,
    id: &str,
    goes_on: GoesOn,
) -> anyhow::Result<Exit> {
    let mut told = String::new();
    loop {
        let batch = store.batch(None, id).await?;
        let line = progress(&batch);
        if line != told {
            eprintln!("{}", printable(&line));
            told = line;
        }
        match batch.status.as_str() {
            "running" | "proving" => {}
            "paused" if waits_after_proof(&batch) => {
                let goes_on = match goes_on {
                    GoesOn::IfAllPass => batch.proof.as_ref().is_some_and(|proof| proof.failed == 0),
                    GoesOn::IfToldTo => asked("Go on and retry them?")?,
                    GoesOn::No => false,
                };
                if !goes_on {
                    return over(output, &batch);
                }
                store.steer_batch(None, id, Steer::Resume, Some("the dry tries were seen")).await?;
            }
            _ => return over(output, &batch),
        }
        tokio::time::sleep(EVERY).await;
    }
}

fn acted(batch: &Batch) -> i64 {
    batch.counts.acted + batch.counts.refused
}

fn over(output: &Output, batch: &Batch) -> anyhow::Result<Exit> {
    output.one(batch, || text_of(batch))?;
    if batch.status == "paused" {
        eprintln!("To go on: wakeful batch resume {}", printable(&batch.batch_id));
    }
    let well = batch.status == "done" && batch.counts.refused == 0 && batch.counts.failed_again == 0;
    Ok(if well { Exit::Ok } else { Exit::Partial })
}

/// One line that says how far a batch is.
fn progress(batch: &Batch) -> String {
    if batch.status == "proving" {
        let proof = batch.proof.clone().unwrap_or_default();
        if proof.asked == 0 {
            return "the dry tries begin".to_owned();
        }
        return format!("tried dry: {} of {}", proof.passed + proof.failed, proof.asked);
    }
    let counts = batch.counts;
    let mut line = format!("{} of {}", acted(batch), batch.members);
    if batch.verb == "retry" {
        let _ = write!(
            line,
            ": {} passed, {} failed again, {} at work",
            counts.passed, counts.failed_again, counts.open
        );
    }
    if counts.refused > 0 {
        let _ = write!(line, ", {} refused", counts.refused);
    }
    line
}

pub(super) fn text_of(batch: &Batch) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(text, "{name:<9} {}", printable(value));
    };
    line("batch", &batch.batch_id);
    line("verb", &batch.verb);
    line("status", &batch.status);
    if let Some(why) = &batch.status_reason {
        line("why", why);
    }
    line("members", &progress(batch));
    if !batch.stages.is_empty() {
        line("stage", &format!("{} of {}", batch.stage + 1, batch.stages.len() + 1));
    }
    if let Some(decision) = &batch.decision {
        let result = decision.result.as_ref().map(|result| format!(": {result}")).unwrap_or_default();
        let told = if decision.tell { ", and the models are told" } else { "" };
        line("says", &format!("{}{result}{told}", decision.outcome.replace('_', " ")));
    }
    if let Some(proof) =
        batch.proof.as_ref().filter(|proof| batch.status_reason.as_ref() != Some(&proof.text))
    {
        line("proof", &proof.text);
    }
    line("reason", batch.reason.as_deref().unwrap_or("-"));
    line("by", &format!("{}, {} ago", batch.by, age(batch.created_at)));
    text
}

fn table(batches: &[Batch]) -> Table {
    let mut table = Table::new(&[
        Column::fixed("BATCH"),
        Column::fixed("VERB"),
        Column::fixed("STATUS"),
        Column::number("AGE"),
        Column::number("DONE"),
        Column::flexible("WHY").below(),
    ]);
    for batch in batches {
        let tone = match batch.status.as_str() {
            "paused" => Tone::Bad,
            "done" => Tone::Good,
            _ => Tone::Plain,
        };
        let why = batch.status_reason.as_deref().or(batch.reason.as_deref()).unwrap_or_default();
        table.row([
            batch.batch_id.as_str().into(),
            batch.verb.as_str().into(),
            Cell::new(&batch.status, tone),
            age(batch.created_at).into(),
            format!("{}/{}", acted(batch), batch.members).as_str().into(),
            why.into(),
        ]);
    }
    table
}

fn members_table(members: &[Member]) -> Table {
    let mut table = Table::new(&[
        Column::number("N"),
        Column::id("SESSION"),
        Column::fixed("OUTCOME"),
        Column::fixed("RESULT"),
        Column::flexible("DETAIL"),
    ]);
    for member in members {
        let effect = member.effect_id.as_ref().map(|effect| format!("/{effect}")).unwrap_or_default();
        table.row([
            member.ordinal.into(),
            format!("{}{effect}", member.session_id).into(),
            member.outcome.as_str().into(),
            member.result.as_deref().unwrap_or("-").into(),
            member.detail.as_deref().unwrap_or_default().into(),
        ]);
    }
    table
}
