//! `wakeful absurd show`: shows one task's transcript beside its raw checkpoints. Writes nothing.

use super::super::output::{Tone, printable};
use super::{Desk, Exit, Shapes};
use serde::Serialize;
use serde_json::Value;
use std::fmt::Write as _;
use wakeful_store::Error;
use wakeful_store::absurd::{Looked, May};
use wakeful_workflow::absurd::message::Said;
use wakeful_workflow::record::Block;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The task's id.
    task: String,
    /// Show only the transcript, without the raw checkpoints.
    #[arg(long)]
    brief: bool,
}

#[derive(Debug, Serialize)]
struct Shown {
    task_id: String,
    queue: String,
    name: String,
    state: &'static str,
    shape: Option<&'static str>,
    conversation: Option<String>,
    trigger: Option<String>,
    system: Option<String>,
    prompt: String,
    messages: Vec<Message>,
    others: Vec<String>,
    hidden: Vec<String>,
    cannot_come: Option<String>,
}

#[derive(Debug, Serialize)]
struct Message {
    checkpoint: String,
    role: &'static str,
    content: Vec<Block>,
    raw: Value,
}

pub(super) async fn show(desk: &Desk<'_>, args: &Args) -> anyhow::Result<Exit> {
    let mut source = desk.source(May::Read).await?;
    let missing = || Error::NotFound { what: "task", id: args.task.clone() };
    let queue = match &desk.queue {
        Some(queue) => queue.clone(),
        None => source.queue_of(&args.task).await?.ok_or_else(missing)?,
    };
    // The first look finds the name, which decides how the second one reads.
    let name = source.look(&queue, &args.task, None, "", |_, _, _| {}).await?.ok_or_else(missing)?.task.name;
    let mut shapes = Shapes::new(desk, &queue);
    shapes.tell(&mut source, &name).await?;
    let told = shapes.of(&name).ok_or_else(missing)?;
    let mut messages = Vec::new();
    let looked = source
        .look(
            &queue,
            &args.task,
            told.shape.as_ref(),
            &told.settings.records_sql,
            |checkpoint, raw, said: &Said| {
                messages.push(Message {
                    checkpoint: checkpoint.to_owned(),
                    role: said.role.as_str(),
                    content: said.content.clone(),
                    raw: raw.clone(),
                });
            },
        )
        .await?
        .ok_or_else(missing)?;
    let shown = shown(looked, queue, messages);
    desk.output.one(&shown, || text(desk, &shown, args.brief))?;
    Ok(if shown.cannot_come.is_some() { Exit::Failed } else { Exit::Ok })
}

fn shown(looked: Looked, queue: String, messages: Vec<Message>) -> Shown {
    let names =
        |listed: Vec<wakeful_workflow::absurd::Listed>| listed.into_iter().map(|one| one.name).collect();
    Shown {
        task_id: looked.task.task_id,
        queue,
        name: looked.task.name,
        state: looked.task.state.as_str(),
        shape: looked.shape.map(|shape| shape.as_str()),
        conversation: looked.opening.conversation,
        trigger: looked.opening.trigger,
        system: looked.opening.system,
        prompt: looked.opening.prompt,
        messages,
        others: names(looked.others),
        hidden: names(looked.hidden),
        cannot_come: looked.why,
    }
}

fn text(desk: &Desk<'_>, shown: &Shown, brief: bool) -> String {
    let output = &desk.output;
    let mut text = format!(
        "{}  {} in queue {}, {}, read as {}\n",
        output.paint(Tone::Head, &shown.task_id),
        printable(&shown.name),
        printable(&shown.queue),
        shown.state,
        shown.shape.unwrap_or("nothing")
    );
    for (what, value) in [
        ("conversation", shown.conversation.as_ref()),
        ("trigger", shown.trigger.as_ref()),
        ("system", shown.system.as_ref()),
        ("prompt", Some(&shown.prompt)),
    ] {
        if let Some(value) = value {
            let _ = writeln!(text, "{}", output.paint(Tone::Faint, what));
            text.push_str(&output.block(value, 2));
        }
    }
    for (at, message) in shown.messages.iter().enumerate() {
        let head = format!("{} {}", at + 1, message.role);
        let _ = writeln!(text, "\n{}  {}", output.paint(Tone::Head, &head), printable(&message.checkpoint));
        for block in &message.content {
            text.push_str(&output.block(&said(block), 2));
        }
        if !brief {
            text.push_str(&output.block(&format!("raw: {}", message.raw), 4));
        }
    }
    for (what, names) in
        [("other checkpoints, kept in the state", &shown.others), ("hidden by Absurd", &shown.hidden)]
    {
        if !names.is_empty() {
            let _ = writeln!(text, "\n{}", output.paint(Tone::Faint, what));
            text.push_str(&output.block(&names.join("\n"), 2));
        }
    }
    if let Some(why) = &shown.cannot_come {
        let _ = writeln!(text, "\n{}", output.paint(Tone::Bad, &format!("It cannot come: {why}")));
    }
    text
}

fn said(block: &Block) -> String {
    match block {
        Block::Text { text } => text.clone(),
        Block::ToolCall(call) => match &call.malformed {
            Some(malformed) => format!("→ {} {malformed}  [{}]", call.name, call.call_id),
            None => format!("→ {} {}  [{}]", call.name, call.arguments, call.call_id),
        },
        Block::ToolResult(result) => {
            let mark = if result.is_error { "✗" } else { "←" };
            format!("{mark} {} [{}]\n{}", result.name, result.call_id, result.content)
        }
        Block::Provider { raw, .. } => {
            format!("kept, never sent: {}", raw["type"].as_str().unwrap_or("a part"))
        }
    }
}
