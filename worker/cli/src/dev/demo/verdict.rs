//! Checks, from the final rows in the database, that the demo went as Wakeful promises.
use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use wakeful_store::Store;
use wakeful_store::session::{CallView, StepView};

use super::super::Style;
use super::timeline::{Chat, Timeline};
use super::{Killed, maildir, workspaces};

/// The checks: the name, the finding, and whether it is right.
#[derive(Debug)]
pub struct Verdict {
    checks: Vec<(&'static str, String, bool)>,
}

/// Checks every session.
pub async fn of(store: &Store, timeline: &Timeline, dir: &Path, killed: &Killed) -> Result<Verdict> {
    let mut all = Vec::new();
    for chat in &timeline.chats {
        all.push(Found::of(store, chat).await?);
    }
    let mut verdict = Verdict { checks: Vec::new() };
    let completed = all.iter().filter(|found| found.status == "completed").count();
    let replies: usize = all.iter().map(Found::final_replies).sum();
    verdict.check(
        "chats",
        format!("{completed} of 3 completed, {replies} final replies"),
        completed == 3 && all.len() == 3 && all.iter().all(|found| found.final_replies() == 1),
    );
    verdict.steps(timeline, &all);
    let messages: usize = all.iter().map(|found| found.messages.len()).sum();
    verdict.check(
        "messages",
        format!("{messages}, numbered without a gap"),
        // Message number 1 is the system prompt.
        all.iter().all(|found| is_dense(2, &found.messages)),
    );
    let entries: usize = all.iter().map(|found| found.journal.len()).sum();
    verdict.check(
        "journal",
        format!("{entries} entries, numbered without a gap"),
        all.iter().all(|found| is_dense(1, &found.journal)),
    );
    verdict.models(timeline, killed);
    let calls: Vec<&CallView> = all.iter().flat_map(|found| &found.calls).collect();
    let once = calls.iter().filter(|call| call.status == "done" && call.attempts <= 1).count();
    verdict.check(
        "tool calls",
        format!("{once} of {} done, none of them run twice", calls.len()),
        once == calls.len() && !calls.is_empty(),
    );
    let sent: usize = all.iter().map(|found| found.sent).sum();
    let (mails, notes) = (files(&maildir(dir).join("new")), notes(&workspaces(dir)));
    verdict.check(
        "effects",
        format!("{notes} note written, {sent} mail sent, {mails} in the Maildir"),
        (notes, sent, mails) == (1, 1, 1),
    );
    Ok(verdict)
}

impl Verdict {
    pub fn passed(&self) -> bool {
        self.checks.iter().all(|(_, _, well)| *well)
    }

    pub fn print(&self, style: Style) {
        println!("\n{}", style.bold("What the database holds in the end"));
        for (what, seen, well) in &self.checks {
            let mark = if *well { style.green("ok ") } else { style.red("BAD") };
            println!("  {mark}  {what:<12} {seen}");
        }
        if self.passed() {
            println!("\n{}", style.green("demo: passed"));
        } else {
            println!("\n{}", style.red("demo: FAILED: the lines marked BAD are not as Wakeful promises"));
        }
    }

    fn check(&mut self, what: &'static str, seen: String, well: bool) {
        self.checks.push((what, seen, well));
    }

    fn steps(&mut self, timeline: &Timeline, all: &[Found]) {
        let mut by_worker: BTreeMap<String, usize> = BTreeMap::new();
        for step in all.iter().flat_map(|found| &found.steps) {
            *by_worker.entry(timeline.name_of(&step.worker_id)).or_default() += 1;
        }
        let steps: usize = by_worker.values().sum();
        let shares: Vec<String> =
            by_worker.iter().map(|(name, steps)| format!("{steps} by {name}")).collect();
        let dense = all.iter().all(|found| {
            let numbers: Vec<i64> = found.steps.iter().map(|step| step.step_number).collect();
            is_dense(1, &numbers)
        });
        self.check(
            "steps",
            format!("{steps}, each committed once: {}", shares.join(", ")),
            dense && by_worker.len() == 2,
        );
    }

    /// Checks that at most one model call was repeated: the one that the kill interrupted.
    fn models(&mut self, timeline: &Timeline, killed: &Killed) {
        let calls =
            timeline.chats.iter().flat_map(|chat| &chat.journal).filter(|one| one.kind == "LLM_CALLED");
        let calls: Vec<_> = calls.collect();
        let repeated = calls.iter().filter(|call| call.payload["attempt"].as_i64() != Some(1)).count();
        let replaced: Vec<_> = timeline
            .chats
            .iter()
            .flat_map(|chat| &chat.journal)
            .filter(|entry| entry.kind == "GEN_RESUMED")
            .map(|entry| (entry.step_number, entry.payload["replaces"].as_str().unwrap_or_default()))
            .collect();
        let the_one = [(Some(killed.step_number), killed.generation_id.as_str())];
        // No call is repeated if the answer was committed just before the kill.
        let well = replaced.len() == repeated && (replaced.is_empty() || replaced == the_one);
        let which = if repeated == 1 { " (the one that the kill cut off)" } else { "" };
        self.check("model calls", format!("{}, {repeated} of them repeated{which}", calls.len()), well);
    }
}

/// One session as it is stored.
struct Found {
    status: String,
    messages: Vec<i64>,
    journal: Vec<i64>,
    steps: Vec<StepView>,
    calls: Vec<CallView>,
    sent: usize,
}

impl Found {
    async fn of(store: &Store, chat: &Chat) -> Result<Found> {
        let id = &chat.session_id;
        let messages = store.messages(id, None, 500).await?;
        let deliveries = store.deliveries(id).await?;
        Ok(Found {
            status: store.session(None, id).await?.status,
            messages: messages.iter().map(|message| message.message_number).collect(),
            journal: store.journal(id, 0, 500).await?.iter().map(|entry| entry.seq).collect(),
            steps: store.steps(id, None, 100).await?,
            calls: store.calls(id).await?,
            sent: deliveries.iter().filter(|one| one.status == "sent" && one.attempt == 1).count(),
        })
    }

    fn final_replies(&self) -> usize {
        self.steps.iter().filter(|step| step.finish_reason == "stop").count()
    }
}

fn is_dense(first: i64, numbers: &[i64]) -> bool {
    !numbers.is_empty() && numbers.iter().zip(first..).all(|(number, expected)| *number == expected)
}

fn files(dir: &Path) -> usize {
    std::fs::read_dir(dir).into_iter().flatten().flatten().count()
}

/// Counts the notes in the folders of all sessions.
fn notes(workspaces: &Path) -> usize {
    let sessions = std::fs::read_dir(workspaces).into_iter().flatten().flatten();
    sessions.map(|session| files(&session.path().join("notes"))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_a_repetition_and_nothing_are_not_dense() {
        assert!(is_dense(2, &[2, 3, 4]));
        assert!(!is_dense(2, &[2, 4]));
        assert!(!is_dense(2, &[2, 2, 3]));
        assert!(!is_dense(2, &[]));
    }
}
