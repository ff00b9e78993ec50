//! What `conversation erase` and `person erase` share, and their holds.

use super::output::{Column, Output, Table, age, count, print};
use super::{Exit, Usage};
use serde_json::json;
use wakeful_config::Config;
use wakeful_store::Store;
use wakeful_store::erase::{Erasure, Subject};

#[derive(Debug, clap::Args)]
pub(super) struct EraseArgs {
    /// Only say what would be erased, what stays, and why it would be refused now.
    #[arg(long)]
    dry_run: bool,
    /// Erase without asking. Nothing brings it back.
    #[arg(long, conflicts_with = "dry_run")]
    yes: bool,
}

#[derive(Debug, clap::Args)]
pub(super) struct HoldArgs {
    /// Why. An erasure that the hold refuses says it.
    #[arg(long, value_name = "TEXT")]
    reason: String,
}

pub(super) async fn erase(
    config: &Config,
    store: &Store,
    output: &Output,
    space: &str,
    subject: &Subject,
    args: &EraseArgs,
) -> anyhow::Result<Exit> {
    if args.dry_run {
        let plan = store.plan_erasure(space, subject).await?;
        output.one(&plan, || text("This would be erased", &plan, config))?;
        return Ok(Exit::Ok);
    }
    if !args.yes {
        let text = "nothing brings back what is erased: look with --dry-run first, and then say --yes";
        return Err(Usage(text.to_owned()).into());
    }
    finish_earlier(config, store).await?;
    let erased = store.erase(space, subject).await?;
    remove_workspaces(config, &erased.sessions);
    output.one(&erased, || text("Erased", &erased, config))?;
    Ok(Exit::Ok)
}

/// Finishes erasures that were interrupted. Says which of them cannot be finished.
pub(super) async fn finish_earlier(config: &Config, store: &Store) -> anyhow::Result<()> {
    let earlier = store.finish_erasures().await?;
    if !earlier.sessions.is_empty() {
        eprintln!(
            "wakeful: an erasure that was interrupted is finished now: {}",
            count(earlier.sessions.len() as i64, "session")
        );
        remove_workspaces(config, &earlier.sessions);
    }
    for (id, error) in &earlier.failed {
        eprintln!(
            "wakeful: {id}, which was interrupted, is not finished, and the next one tries again: {error}"
        );
    }
    Ok(())
}

/// Removes the sessions' folders on this host.
pub(super) fn remove_workspaces(config: &Config, sessions: &[String]) {
    for session in sessions {
        for (left, error) in wakeful_engine::workspace::remove_session(config.workspace.folder(), session) {
            eprintln!("wakeful: {} is still there: {error}", left.display());
        }
    }
}

fn text(head: &str, erasure: &Erasure, config: &Config) -> String {
    let mut text = format!(
        "{head}: {} with {}\n",
        count(erasure.conversations.len() as i64, "conversation"),
        count(erasure.sessions.len() as i64, "session")
    );
    for conversation in &erasure.conversations {
        text += &format!("  {conversation}\n");
    }
    for (number, refused) in erasure.refused.iter().enumerate() {
        text += if number == 0 { "\nWould be refused\n" } else { "" };
        text += &format!("  {refused}\n");
    }
    text += "\nRows\n";
    for (table, rows) in erasure.rows.iter().filter(|(_, rows)| **rows > 0) {
        text += &format!("  {rows:>8}  {table}\n");
    }
    text += "\nStays\n";
    let folders = format!(
        "files of these sessions on other hosts than this one, in {}/SESSION",
        config.workspace.folder().display()
    );
    for stays in erasure.stays.iter().chain([&folders]) {
        text += &format!("  {stays}\n");
    }
    if let Some(id) = &erasure.erasure_id {
        text += &format!("\nThe receipt is {id}.\n");
    }
    super::printable::printable_lines(&text)
}

pub(super) async fn hold(
    store: &Store,
    output: &Output,
    space: &str,
    subject: &Subject,
    args: &HoldArgs,
) -> anyhow::Result<Exit> {
    let id = store.place_hold(space, subject, &args.reason).await?;
    output.one(&json!({"hold_id": id}), || format!("{id}\n"))?;
    Ok(Exit::Ok)
}

pub(super) async fn release(
    store: &Store,
    output: &Output,
    hold_id: &str,
    space: &str,
) -> anyhow::Result<Exit> {
    store.release_hold(space, hold_id).await?;
    output.one(&json!({"hold_id": hold_id, "released": true}), || format!("{hold_id} is released.\n"))?;
    Ok(Exit::Ok)
}

pub(super) async fn holds(store: &Store, output: &Output, space: &str) -> anyhow::Result<Exit> {
    let holds = store.legal_holds(space).await?;
    output.items(&holds, || {
        let mut table = Table::new(&[
            Column::number("AGE"),
            Column::fixed("HOLD"),
            Column::fixed("OF"),
            Column::fixed("STANDS"),
            Column::flexible("REASON"),
        ]);
        for hold in &holds {
            let of = hold.conversation_id.as_deref().or(hold.person.as_deref()).unwrap_or_default();
            table.row([
                age(hold.placed_at).into(),
                hold.hold_id.as_str().into(),
                of.into(),
                if hold.released_at.is_none() { "yes" } else { "no" }.into(),
                hold.reason.as_str().into(),
            ]);
        }
        table
    })?;
    if output.for_people() && holds.is_empty() {
        print("No hold was ever placed.\n")?;
    }
    Ok(Exit::Ok)
}
