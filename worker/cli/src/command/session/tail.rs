//! `wakeful session tail`: prints a session's journal, and with `--follow` its new entries.

use super::super::output::{Format, Output, Tone, printable};
use super::Exit;
use crate::journal::summary;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use wakeful_store::Store;
use wakeful_store::event::JournalEntry;
use wakeful_store::queue::News;

/// Number of entries read at a time, and number of the newest entries shown by default.
const PAGE: i64 = 500;
const LAST: i64 = 50;
/// Width of the columns before an entry's summary.
const PREFIX: usize = 54;
/// Poll interval: a notification may be lost.
const POLL: Duration = Duration::from_secs(1);

pub(super) async fn tail(
    store: &Store,
    output: &Output,
    id: &str,
    follow: bool,
    after: Option<i64>,
) -> anyhow::Result<Exit> {
    let last = store.last_event_seq(id).await?;
    let mut after = after.unwrap_or((last - LAST).max(0));
    if !follow && output.format() == Some(Format::Json) {
        // JSON is one document, so collect all entries first.
        let mut entries = Vec::new();
        loop {
            let page = store.journal(id, after, PAGE).await?;
            let Some(newest) = page.last() else { break };
            after = newest.seq;
            entries.extend(page);
        }
        output.one(&entries, String::new)?;
        return Ok(Exit::Ok);
    }
    // Listen before the first read, so that no entry falls in between.
    let stop = CancellationToken::new();
    let mut news = follow.then(|| News::listen(store, stop.clone()).sessions());
    loop {
        let page = store.journal(id, after, PAGE).await?;
        for entry in &page {
            output.line(entry, || line(entry, output))?;
            after = entry.seq;
        }
        if page.len() as i64 == PAGE {
            continue;
        }
        let Some(news) = &mut news else { return Ok(Exit::Ok) };
        let heard = async {
            loop {
                match news.recv().await {
                    Ok(session) if &*session == id || &*session == "*" => break,
                    Ok(_) => {}
                    Err(tokio::sync::broadcast::error::RecvError::Lagged(_)) => break,
                    Err(tokio::sync::broadcast::error::RecvError::Closed) => std::future::pending().await,
                }
            }
        };
        tokio::select! {
            () = heard => {}
            () = tokio::time::sleep(POLL) => {}
        }
    }
}

/// Formats an entry for people: time, number, step, type, and a summary of its payload.
fn line(entry: &JournalEntry, output: &Output) -> String {
    let step = entry.step_number.map_or_else(|| "-".to_owned(), |step| format!("step {step}"));
    let tone = match entry.kind.as_str() {
        "TOOL_FAILED_UNCERTAIN" | "GEN_FAILED" => Tone::Bad,
        "state_transition" | "checkpoint" => Tone::Faint,
        _ => Tone::Plain,
    };
    format!(
        "{}  {:>5}  {step:<8}  {}{}  {}\n",
        output.paint(Tone::Faint, &entry.ts.format("%H:%M:%S%.3f").to_string()),
        entry.seq,
        output.paint(tone, &entry.kind),
        " ".repeat(21_usize.saturating_sub(entry.kind.len())),
        output.paint(Tone::Plain, &shorten(&summary(entry), output.room(PREFIX))),
    )
}

/// Escapes `text` and cuts it to `room` characters, which are columns if each character takes one.
fn shorten(text: &str, room: usize) -> String {
    let shown = printable(text);
    match shown.char_indices().nth(room.saturating_sub(1)) {
        Some((end, last)) if end + last.len_utf8() < shown.len() => format!("{}…", &shown[..end]),
        Some(_) | None => shown.into_owned(),
    }
}
