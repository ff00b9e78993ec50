//! The events in the sessions, printed one line each as they are committed.
use std::collections::BTreeMap;

use anyhow::Result;
use chrono::{DateTime, Utc};
use serde_json::Value;
use wakeful_store::Store;
use wakeful_store::event::JournalEntry;

use super::super::samples::Sample;
use super::super::style::{Style, one_line, wrapped};
use crate::journal::summary;

/// Width of the columns before a line's text.
const MARGIN: usize = 38;

/// One chat of the demo, and how much of it has been shown.
pub struct Chat {
    pub sample: Sample,
    pub session_id: String,
    /// Its whole journal so far.
    pub journal: Vec<JournalEntry>,
    steps_shown: i64,
    generation_shown: Option<String>,
    /// The attempt of the model call that the journal last mentioned.
    attempt: i64,
    /// Id of the worker that holds the chat, or held it last.
    holder: Option<String>,
}

/// Prints the events and remembers which ones it has printed.
pub struct Timeline {
    began: DateTime<Utc>,
    style: Style,
    /// Width of a line's text.
    width: usize,
    /// Names of the workers, by worker id.
    names: BTreeMap<String, &'static str>,
    pub chats: Vec<Chat>,
}

struct Line {
    at: DateTime<Utc>,
    who: String,
    chat: &'static str,
    step: Option<i64>,
    attempt: Option<i64>,
    tone: Tone,
    text: String,
}

#[derive(Clone, Copy)]
enum Tone {
    /// A journal entry, cut to one line.
    Quoted,
    /// A text of the demo itself.
    Plain,
    Committed,
    Killed,
    Resumed,
}

impl Timeline {
    /// Prints the column heads.
    pub fn begin(style: Style) -> Timeline {
        let head = format!(
            "{:>7}  {:<8}  {:<6}  {:>4}  {:>3}  what happened",
            "time", "process", "chat", "step", "try"
        );
        println!("{}", style.bold(&head));
        let width = Style::columns().clamp(80, 140) - MARGIN;
        Timeline { began: Utc::now(), style, width, names: BTreeMap::new(), chats: Vec::new() }
    }

    /// Prints a line of the demo's own.
    pub fn say(&self, who: &str, text: &str) {
        self.print(&Line {
            at: Utc::now(),
            who: who.to_owned(),
            chat: "",
            step: None,
            attempt: None,
            tone: Tone::Plain,
            text: text.to_owned(),
        });
    }

    /// Sets the name to show for a worker.
    pub fn name(&mut self, worker_id: String, name: &'static str) {
        self.names.insert(worker_id, name);
    }

    pub fn name_of(&self, worker_id: &str) -> String {
        self.names.get(worker_id).map_or_else(|| worker_id.to_owned(), |name| (*name).to_owned())
    }

    /// Adds a session to follow, unless it is already followed.
    pub fn chat(&mut self, sample: Sample, session_id: &str) {
        if self.chat_of(sample).is_none() {
            self.chats.push(Chat {
                sample,
                session_id: session_id.to_owned(),
                journal: Vec::new(),
                steps_shown: 0,
                generation_shown: None,
                attempt: 1,
                holder: None,
            });
        }
    }

    pub fn chat_of(&self, sample: Sample) -> Option<&Chat> {
        self.chats.iter().find(|chat| chat.sample.conversation == sample.conversation)
    }

    /// Prints that the worker was killed.
    pub fn killed(&self, sample: Sample, step: i64, pid: i32, lease_left_s: f64) {
        let line = Line {
            at: Utc::now(),
            who: "worker A".to_owned(),
            chat: short(sample),
            step: Some(step),
            attempt: Some(1),
            tone: Tone::Killed,
            text: format!("KILLED: kill -9 {pid}, while the model speaks"),
        };
        self.print(&line);
        let text = format!(
            "its lease on the chat has {lease_left_s:.1} s left, but the server drops its liveness lock at once"
        );
        self.print(&Line { who: String::new(), step: None, attempt: None, tone: Tone::Plain, text, ..line });
    }

    /// Prints the new events of every session, in the order in which they happened.
    pub async fn follow(&mut self, store: &Store) -> Result<()> {
        let mut lines = Vec::new();
        for at in 0..self.chats.len() {
            self.look(store, at, &mut lines).await?;
        }
        lines.sort_by_key(|line| line.at);
        lines.iter().for_each(|line| self.print(line));
        Ok(())
    }

    async fn look(&mut self, store: &Store, at: usize, lines: &mut Vec<Line>) -> Result<()> {
        let names = &self.names;
        let name = |id: &str| names.get(id).map_or_else(|| id.to_owned(), |name| (*name).to_owned());
        let chat = &mut self.chats[at];
        let label = short(chat.sample);
        // Read the steps before the journal, so that the journal holds all that these steps wrote.
        let steps = store.steps(&chat.session_id, None, 100).await?;
        let seen = chat.journal.last().map_or(0, |entry| entry.seq);
        let news = store.journal(&chat.session_id, seen, 500).await?;
        // Read the job after the journal: its worker is the one that wrote the new entries.
        let job = store.session(None, &chat.session_id).await?.job.unwrap_or(Value::Null);
        let live = store.live_generation(&chat.session_id, None, i64::MAX).await?;

        if let Some(worker_id) = job["worker_id"].as_str()
            && chat.holder.as_deref() != Some(worker_id)
            && let Some(former) = chat.holder.replace(worker_id.to_owned())
        {
            let former = name(&former);
            let found = plural(steps.len(), "step");
            let (tone, text) = if job["attempt"].as_i64() > Some(1) {
                let tools = chat.journal.iter().filter(|entry| entry.kind == "TOOL_RESULT").count();
                let tools = plural(tools, "tool result");
                let text = format!("RESUMES: {former} is dead. Finds committed, and keeps: {found}, {tools}");
                (Tone::Resumed, text)
            } else {
                (Tone::Plain, format!("takes up what {former} left waiting after {found}"))
            };
            let written = news.iter().filter(|entry| entry.kind != "MESSAGE_RECEIVED");
            lines.push(Line {
                at: written.map(|entry| entry.ts).min().unwrap_or_else(Utc::now),
                who: name(worker_id),
                chat: label,
                step: job["step_number"].as_i64(),
                attempt: job["attempt"].as_i64(),
                tone,
                text,
            });
        }
        let holder = chat.holder.as_deref().map(name).unwrap_or_default();
        if let Some(live) = live
            && chat.generation_shown.as_ref() != Some(&live.generation_id)
        {
            chat.generation_shown = Some(live.generation_id);
            let text = if live.attempt > 1 {
                "calls the model again: nothing of the call that was cut off was committed"
            } else {
                "calls the model"
            };
            lines.push(Line {
                at: Utc::now(),
                who: holder.clone(),
                chat: label,
                step: Some(live.step_number),
                attempt: Some(live.attempt),
                tone: Tone::Plain,
                text: text.to_owned(),
            });
        }
        for entry in news {
            match entry.kind.as_str() {
                "LLM_CALLED" => chat.attempt = entry.payload["attempt"].as_i64().unwrap_or(1),
                // From this entry on, a new attempt replaces the interrupted call.
                "GEN_RESUMED" => chat.attempt += 1,
                _ => {}
            }
            if let Some((tone, text)) = format_entry(&entry) {
                // Entries without a step come from the API process that accepted a message. This includes the
                // tool result that a user's answer becomes.
                let from_outside = entry.kind == "MESSAGE_RECEIVED" || entry.step_number.is_none();
                lines.push(Line {
                    at: entry.ts,
                    who: if from_outside { "api".to_owned() } else { holder.clone() },
                    chat: label,
                    step: entry.step_number,
                    attempt: entry.step_number.map(|_| chat.attempt),
                    tone,
                    text,
                });
            }
            chat.journal.push(entry);
        }
        let shown = chat.steps_shown;
        for step in steps.into_iter().filter(|step| step.step_number > shown) {
            chat.steps_shown = step.step_number;
            // One statement commits the step and its entries. Sort the step's line after its entries.
            let written = chat.journal.iter().filter(|entry| {
                entry.step_number == Some(step.step_number)
                    && !matches!(entry.kind.as_str(), "state_transition" | "invocation_result" | "checkpoint")
            });
            let at = written.map(|entry| entry.ts).max().unwrap_or(step.committed_at);
            lines.push(Line {
                at,
                who: name(&step.worker_id),
                chat: label,
                step: Some(step.step_number),
                attempt: Some(i64::from(step.attempt)),
                tone: Tone::Committed,
                text: format!("step {} committed", step.step_number),
            });
        }
        Ok(())
    }

    fn print(&self, line: &Line) {
        let number = |number: Option<i64>| number.map(|number| number.to_string()).unwrap_or_default();
        let offset = (line.at - self.began).as_seconds_f64().max(0.0);
        print!(
            "{}  {:<8}  {:<6}  {:>4}  {:>3}  ",
            self.style.dim(&format!("{offset:>6.2}s")),
            line.who,
            line.chat,
            number(line.step),
            number(line.attempt),
        );
        let (style, text) = (self.style, &line.text);
        let lines = match line.tone {
            Tone::Quoted => vec![one_line(text, self.width)],
            Tone::Plain | Tone::Committed | Tone::Killed | Tone::Resumed => wrapped(text, self.width),
        };
        for (at, text) in lines.iter().enumerate() {
            let text = match line.tone {
                Tone::Quoted | Tone::Plain => text.clone(),
                Tone::Committed => style.bold(text),
                Tone::Killed => style.red(text),
                Tone::Resumed => style.green(text),
            };
            println!("{:margin$}{text}", "", margin = if at == 0 { 0 } else { MARGIN });
        }
    }
}

fn plural(count: usize, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

/// Returns the chat's name without the common prefix `sample-`.
fn short(sample: Sample) -> &'static str {
    sample.conversation.strip_prefix("sample-").unwrap_or(sample.conversation)
}

/// Returns the entry as `session tail` shows it, or `None` if the demo leaves it out.
fn format_entry(entry: &JournalEntry) -> Option<(Tone, String)> {
    let text = |key: &str| entry.payload[key].as_str().unwrap_or_default();
    let of_interest = match entry.kind.as_str() {
        "GEN_COMPLETE" => !text("text").trim().is_empty(),
        "state_transition" => {
            matches!(text("to_state"), "waiting_input" | "completed" | "failed" | "needs_attention")
        }
        kind => matches!(
            kind,
            "MESSAGE_RECEIVED"
                | "GEN_RESUMED"
                | "TOOL_INVOKED"
                | "TOOL_RESULT"
                | "TOOL_FAILED_UNCERTAIN"
                | "GEN_SENT"
                | "DELIVERY_FAILED"
        ),
    };
    of_interest.then(|| (Tone::Quoted, format!("{}  {}", entry.kind, summary(entry))))
}
