//! What happens in the sessions, a line each, as it is committed.
use std::collections::BTreeMap;

use anyhow::Result;
use chrono::{DateTime, Utc};
use serde_json::Value;
use wakeful_store::Store;
use wakeful_store::event::JournalEntry;

use super::super::samples::Sample;
use super::super::style::{Style, one_line};

/// A line's text is cut after so many characters.
const WIDTH: usize = 92;

/// One chat of the demo, and how much of it has been shown.
pub struct Chat {
    pub sample: Sample,
    pub session_id: String,
    /// Everything that its journal says, from the first entry on.
    pub journal: Vec<JournalEntry>,
    steps_shown: i64,
    generation_shown: Option<String>,
    /// The attempt at the model call that the journal speaks of.
    attempt: i64,
    /// Who has it, or had it last: the id of a worker.
    holder: Option<String>,
}

/// Prints, and remembers what it has printed.
pub struct Timeline {
    began: DateTime<Utc>,
    style: Style,
    /// Workers by their ids.
    names: BTreeMap<String, &'static str>,
    pub chats: Vec<Chat>,
}

struct Line {
    at: DateTime<Utc>,
    who: String,
    chat: &'static str,
    step: Option<i64>,
    attempt: Option<i64>,
    text: String,
}

impl Timeline {
    /// Prints the head.
    pub fn begin(style: Style) -> Timeline {
        let head = format!(
            "{:>7}  {:<8}  {:<6}  {:>4}  {:>3}  what happened",
            "time", "process", "chat", "step", "try"
        );
        println!("{}", style.bold(&head));
        Timeline { began: Utc::now(), style, names: BTreeMap::new(), chats: Vec::new() }
    }

    /// A line of the demo's own.
    pub fn say(&self, who: &str, text: &str) {
        self.print(&Line {
            at: Utc::now(),
            who: who.to_owned(),
            chat: "",
            step: None,
            attempt: None,
            text: text.to_owned(),
        });
    }

    /// How a worker is called here.
    pub fn name(&mut self, worker_id: String, name: &'static str) {
        self.names.insert(worker_id, name);
    }

    pub fn name_of(&self, worker_id: &str) -> String {
        self.names.get(worker_id).map_or_else(|| worker_id.to_owned(), |name| (*name).to_owned())
    }

    /// A session to follow. Known ones are known.
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

    /// The moment of the kill.
    pub fn killed(&self, sample: Sample, step: i64, pid: i32, lease_left_s: f64) {
        let line = |text: String| Line {
            at: Utc::now(),
            who: "worker A".to_owned(),
            chat: short(sample),
            step: Some(step),
            attempt: Some(1),
            text,
        };
        let text = format!("KILLED: kill -9 {pid}, in the middle of the model's sentence");
        self.print(&line(self.style.red(&text)));
        self.print(&Line {
            who: String::new(),
            ..line(format!(
                "its lease on the chat ends in {lease_left_s:.1} s, for no heartbeat renews it now"
            ))
        });
    }

    /// Prints what is new in every session, in the order in which it happened.
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
        let (names, style) = (&self.names, self.style);
        let name = |id: &str| names.get(id).map_or_else(|| id.to_owned(), |name| (*name).to_owned());
        let chat = &mut self.chats[at];
        let label = short(chat.sample);
        let session = store.session(None, &chat.session_id).await?;
        let job = session.job.unwrap_or(Value::Null);
        let live = store.live_generation(&chat.session_id, None, i64::MAX).await?;
        let seen = chat.journal.last().map_or(0, |entry| entry.seq);
        let news = store.journal(&chat.session_id, seen, 500).await?;
        let steps = store.steps(&chat.session_id, None, 100).await?;

        if let Some(worker_id) = job["worker_id"].as_str()
            && chat.holder.as_deref() != Some(worker_id)
        {
            if let Some(former) = chat.holder.replace(worker_id.to_owned()) {
                let found = steps.len();
                let text = if job["attempt"].as_i64() > Some(1) {
                    let tools = chat.journal.iter().filter(|entry| entry.kind == "TOOL_RESULT").count();
                    let text = format!(
                        "RESUMES: the lease of {} has ended. Found committed: {found} step, {tools} tool result",
                        name(&former)
                    );
                    style.green(&text)
                } else {
                    format!("takes up what {} left waiting, {found} step in", name(&former))
                };
                lines.push(Line {
                    at: Utc::now(),
                    who: name(worker_id),
                    chat: label,
                    step: job["step_number"].as_i64(),
                    attempt: job["attempt"].as_i64(),
                    text,
                });
            }
        }
        let holder = chat.holder.as_deref().map(name).unwrap_or_default();
        if let Some(live) = live
            && chat.generation_shown.as_ref() != Some(&live.generation_id)
        {
            chat.generation_shown = Some(live.generation_id);
            let text = if live.attempt > 1 {
                "calls the model again: of the call that was cut off nothing was committed"
            } else {
                "calls the model"
            };
            lines.push(Line {
                at: Utc::now(),
                who: holder.clone(),
                chat: label,
                step: Some(live.step_number),
                attempt: Some(live.attempt),
                text: text.to_owned(),
            });
        }
        for entry in news {
            if entry.kind == "LLM_CALLED" {
                chat.attempt = entry.payload["attempt"].as_i64().unwrap_or(1);
            }
            if let Some(text) = told(&entry) {
                let from_outside = entry.kind == "MESSAGE_RECEIVED";
                lines.push(Line {
                    at: entry.ts,
                    who: if from_outside { "api".to_owned() } else { holder.clone() },
                    chat: label,
                    step: entry.step_number,
                    attempt: entry.step_number.map(|_| chat.attempt),
                    text,
                });
            }
            chat.journal.push(entry);
        }
        let shown = chat.steps_shown;
        for step in steps.into_iter().filter(|step| step.step_number > shown) {
            chat.steps_shown = step.step_number;
            chat.attempt = 1;
            lines.push(Line {
                at: step.committed_at,
                who: name(&step.worker_id),
                chat: label,
                step: Some(step.step_number),
                attempt: Some(i64::from(step.attempt)),
                text: style.bold(&format!("step {} committed", step.step_number)),
            });
        }
        Ok(())
    }

    fn print(&self, line: &Line) {
        let number = |number: Option<i64>| number.map(|number| number.to_string()).unwrap_or_default();
        let offset = (line.at - self.began).as_seconds_f64().max(0.0);
        println!(
            "{}  {:<8}  {:<6}  {:>4}  {:>3}  {}",
            self.style.dim(&format!("{offset:>6.2}s")),
            line.who,
            line.chat,
            number(line.step),
            number(line.attempt),
            line.text
        );
    }
}

/// The chat's name without what all of them begin with.
fn short(sample: Sample) -> &'static str {
    sample.conversation.strip_prefix("sample-").unwrap_or(sample.conversation)
}

/// What a journal entry says to a person, if anything.
fn told(entry: &JournalEntry) -> Option<String> {
    let payload = &entry.payload;
    let text = |key: &str| payload[key].as_str().unwrap_or_default();
    let line = match entry.kind.as_str() {
        "MESSAGE_RECEIVED" => format!("message received: {}", text("text")),
        "GEN_RESUMED" => {
            let chunks = payload["prior_chunks"].as_i64().unwrap_or(0);
            format!("writes down that its call replaces the one that was cut off after {chunks} chunks")
        }
        "GEN_COMPLETE" if !text("text").trim().is_empty() => format!("model says: {}", text("text")),
        "TOOL_INVOKED" => format!("model asks for {}", text("name")),
        "TOOL_RESULT" => format!("{} gives: {}", text("name"), text("text")),
        "TOOL_FAILED_UNCERTAIN" => format!("nobody knows whether {} took effect", text("name")),
        "GEN_SENT" => format!("{} sent", text("channel")),
        "state_transition" => match text("to_state") {
            "waiting_input" => "waits for the user's answer; no process is busy with it".to_owned(),
            "completed" => "the chat is answered".to_owned(),
            "failed" => format!("the run failed: {}", text("reason")),
            "needs_attention" => "the run needs attention".to_owned(),
            _ => return None,
        },
        _ => return None,
    };
    Some(one_line(&line, WIDTH))
}
