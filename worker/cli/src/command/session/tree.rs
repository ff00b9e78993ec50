//! `wakeful session tree`: shows a session, the sessions that it was forked from, and its forks.

use super::super::output::{Cell, Column, Output, Table, Tone, dollars};
use super::Exit;
use wakeful_store::Store;
use wakeful_store::tree::{Branch, TREE_LIMIT};

pub(super) async fn tree(store: &Store, output: &Output, id: &str) -> anyhow::Result<Exit> {
    let branches = store.tree(id).await?;
    output.items(&branches, || table(&branches, id, output.for_people()))?;
    if output.for_people() && branches.len() as i64 == TREE_LIMIT {
        eprintln!("There may be more: at most {TREE_LIMIT} sessions of a tree are shown");
    }
    Ok(Exit::Ok)
}

fn table(branches: &[Branch], id: &str, for_people: bool) -> Table {
    let mut table = Table::new(&[
        Column::fixed("SESSION"),
        Column::number("CUT"),
        Column::fixed("STATUS"),
        Column::number("TURNS"),
        Column::number("COST"),
        Column::flexible("MODEL").extra(),
    ]);
    for branch in branches {
        // In a pipe the first column is the bare id.
        let indent =
            if for_people { "  ".repeat(usize::try_from(branch.depth).unwrap_or(0)) } else { String::new() };
        let tone = if branch.session_id == id { Tone::Head } else { Tone::Plain };
        let cut = branch.forked_at_message_number.map(|number| format!("#{number}")).unwrap_or_default();
        table.row([
            Cell::new(format!("{indent}{}", branch.session_id), tone),
            cut.into(),
            Cell::status(&branch.status),
            branch.total_turns.into(),
            dollars(branch.total_cost_micros).into(),
            branch.model_id.as_str().into(),
        ]);
    }
    table
}
