//! `wakeful absurd back`: gives back to Absurd what was taken and has not run here.

use super::super::output::count;
use super::{Desk, Exit};
use serde::Serialize;
use std::fmt::Write as _;
use wakeful_store::absurd::{GivenBack, Held, May, Unparked, Wanted};
use wakeful_workflow::absurd::TRIGGER_PREFIX;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The name of the tasks.
    name: String,
    /// Only these tasks. Default: all that were taken.
    #[arg(long = "task", value_name = "TASK_ID")]
    tasks: Vec<String>,
    /// At most this many.
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
}

#[derive(Debug, Default, Serialize)]
struct Report {
    returned: i64,
    /// Their event came meanwhile, so Absurd runs them at once.
    woken: i64,
    /// They ran here.
    refused: Vec<Held>,
    /// Somebody changed them in Absurd, so they are no more parked there.
    not_parked: Vec<String>,
}

pub(super) async fn back(desk: &Desk<'_>, args: &Args) -> anyhow::Result<Exit> {
    let store = desk.store(2).await?;
    let mut source = desk.source(May::Park).await?;
    let queue = desk.one_queue(&mut source).await?;
    let trigger = format!("{TRIGGER_PREFIX}{queue}");
    let mut report = Report::default();
    let (mut after, mut left) = (String::new(), args.limit.unwrap_or(usize::MAX));
    loop {
        let rows = store.absurd_taken(desk.space(), &trigger, &args.name, &after, 200).await?;
        let Some(last) = rows.last() else { break };
        after.clone_from(&last.task_id);
        for row in rows.iter().filter(|row| args.tasks.is_empty() || args.tasks.contains(&row.task_id)) {
            if left == 0 {
                break;
            }
            match store.absurd_give_back(&mut source, desk.space(), &queue, row).await? {
                GivenBack::Refused(held) => report.refused.push(held),
                GivenBack::Already => {}
                GivenBack::Returned(unparked) => {
                    left -= 1;
                    report.count(&row.task_id, unparked);
                }
            }
        }
    }
    // Parked ones that never became a session.
    let names = [args.name.clone()];
    let mut after = None::<String>;
    loop {
        let wanted = Wanted { names: &names, after: after.as_deref(), limit: 200, parked: true };
        let page = source.tasks(&queue, &wanted).await?;
        let Some(last) = page.last() else { break };
        after = Some(last.task_id.clone());
        let ids: Vec<String> = page.iter().map(|found| found.task_id.clone()).collect();
        let known = store.absurd_known(desk.space(), &trigger, &ids).await?;
        for id in
            ids.iter().filter(|id| !known.contains(id) && (args.tasks.is_empty() || args.tasks.contains(id)))
        {
            if left == 0 {
                break;
            }
            // A `take` beside this command may be importing it.
            let row = store.absurd_unclaimed(desk.space(), &trigger, id, &args.name).await?;
            let Some(row) = row else { continue };
            let given = store.absurd_give_back(&mut source, desk.space(), &queue, &row).await?;
            if let GivenBack::Returned(unparked) = given {
                left -= 1;
                report.count(id, unparked);
            }
        }
    }
    store.close().await;
    desk.output.one(&report, || text(&report))?;
    Ok(if report.refused.is_empty() && report.not_parked.is_empty() { Exit::Ok } else { Exit::Failed })
}

impl Report {
    fn count(&mut self, task_id: &str, unparked: Unparked) {
        match unparked {
            Unparked::AsBefore => self.returned += 1,
            Unparked::Woken => {
                self.returned += 1;
                self.woken += 1;
            }
            Unparked::WasNot => self.not_parked.push(task_id.to_owned()),
        }
    }
}

fn text(report: &Report) -> String {
    let mut text = format!("{} given back to Absurd\n", count(report.returned, "task"));
    if report.woken > 0 {
        let _ = writeln!(text, "  {} of them run at once, because their event came meanwhile", report.woken);
    }
    if !report.refused.is_empty() {
        let _ = writeln!(text, "{} stay here:", count(report.refused.len() as i64, "task"));
        for held in &report.refused {
            let _ = writeln!(text, "  {}  {}  {}", held.task_id, held.session_id, held.why);
        }
    }
    for id in &report.not_parked {
        let _ = writeln!(text, "  {id}  is not parked in Absurd any more");
    }
    text
}
