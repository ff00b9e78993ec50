//! `wakeful session show`: shows a session's messages, steps, tool calls and deliveries.

use super::super::output::{Cell, Column, Output, Table, Tone, age, count, dollars, printable, span};
use super::effects::OPEN;
use super::job::note;
use super::why::{decide_call, resolve_call, resolve_delivery};
use super::{Exit, tokens};
use serde_json::Value;
use std::fmt::Write as _;
use wakeful_store::Store;
use wakeful_store::session::{
    CallView, DeliveryView, EarlierMessage, MessageView, RunView, SessionSummary, StepView,
};
use wakeful_workflow::access::Reach;
use wakeful_workflow::id::DEFAULT_SPACE;

/// Number of the newest runs, messages and steps shown.
const NEWEST: i64 = 50;
/// Size of the part of a message that is shown without --full.
const MESSAGE_LINES: usize = 12;
const MESSAGE_CHARS: usize = 1200;

pub(super) async fn show(store: &Store, output: &Output, id: &str, full: bool) -> anyhow::Result<Exit> {
    let detail = wakeful_http::sessions::detail(store, &Reach::default(), id).await?;
    let session = store.session(None, id).await?;
    let shown = Shown {
        runs: store.runs(id, None, NEWEST, i64::MAX).await?.items,
        earlier: store.earlier_messages(id, NEWEST, i64::MAX).await?,
        messages: store.messages(id, None, NEWEST).await?,
        steps: store.steps(id, None, NEWEST).await?,
        calls: store.calls(id).await?,
        deliveries: store.deliveries(id).await?,
        session,
    };
    output.one(&detail, || shown.text(output, full))?;
    Ok(Exit::Ok)
}

struct Shown {
    session: SessionSummary,
    runs: Vec<RunView>,
    earlier: Vec<EarlierMessage>,
    messages: Vec<MessageView>,
    steps: Vec<StepView>,
    calls: Vec<CallView>,
    deliveries: Vec<DeliveryView>,
}

impl Shown {
    fn text(&self, output: &Output, full: bool) -> String {
        let mut text = header(&self.session, output);
        text.push_str(&trouble(&self.session, output));
        heading(&mut text, output, "Transcript");
        for one in &self.earlier {
            say_earlier(&mut text, output, one, full);
        }
        if let Some(first) = self.messages.first().filter(|_| self.messages.len() as i64 == NEWEST) {
            let _ = writeln!(
                text,
                "  … messages before #{} are not shown; `-o json` has their cursor",
                first.message_number
            );
        }
        for message in &self.messages {
            say(&mut text, output, message, full);
        }
        section(&mut text, output, "Runs", &runs(&self.runs));
        section(&mut text, output, "Steps", &steps(&self.steps));
        section(&mut text, output, "Tool calls", &calls(&self.calls));
        section(&mut text, output, "Deliveries", &deliveries(&self.deliveries));
        // Of a run that has failed or was cancelled no call can be approved.
        let is_open = OPEN.contains(&self.session.status.as_str());
        let unapproved: Vec<&CallView> =
            self.calls.iter().filter(|call| is_open && call.status == "unapproved").collect();
        if !unapproved.is_empty() {
            heading(&mut text, output, "Waits for approval: it did not run yet");
        }
        for call in unapproved {
            let (shown, _) = beginning(call.arguments.as_deref().unwrap_or_default());
            text.push_str(&output.block(&format!("{} {}", call.name, printable(shown)), 2));
            text.push_str(&output.block(&decide_call(&self.session.session_id, &call.call_id), 2));
        }
        let commands = self.commands();
        if !commands.is_empty() {
            heading(&mut text, output, "Uncertain: look at the service behind it, then say what you found");
            for call in self.calls.iter().filter(|call| call.status == "uncertain") {
                if let Some(arguments) = &call.arguments {
                    let (shown, _) = beginning(arguments);
                    text.push_str(&output.block(&format!("{} {}", call.name, printable(shown)), 2));
                }
            }
            text.push_str(&output.block(&commands, 2));
        }
        let unsent = self.unsent();
        if !unsent.is_empty() {
            heading(&mut text, output, "Not sent: mend the cause, then send it again");
            text.push_str(&output.block(&format!("wakeful delivery resend {}", unsent.join(" ")), 2));
        }
        section(&mut text, output, "State", &state(&self.session.state));
        text
    }

    /// Returns the deliveries that an operator may resend.
    fn unsent(&self) -> Vec<&str> {
        let unsent = self.deliveries.iter().filter(|delivery| {
            matches!(delivery.status.as_str(), "failed" | "expired") && !delivery.imported
        });
        unsent.map(|delivery| delivery.delivery_id.as_str()).collect()
    }

    /// Returns the commands that resolve uncertain calls and deliveries.
    fn commands(&self) -> String {
        let id = &self.session.session_id;
        let calls = self.calls.iter().filter(|call| call.status == "uncertain");
        let deliveries = self.deliveries.iter().filter(|delivery| delivery.status == "uncertain");
        calls
            .map(|call| resolve_call(id, &call.call_id))
            .chain(deliveries.map(|delivery| resolve_delivery(id, &delivery.delivery_id)))
            .collect()
    }
}

/// Formats a session's id, status, facts and totals.
pub(super) fn header(session: &SessionSummary, output: &Output) -> String {
    let mut text = format!(
        "{}  {}\n",
        output.paint(Tone::Head, &session.session_id),
        output.paint(Tone::of_status(&session.status), &session.status)
    );
    let ended = session.completed_at.map(|at| format!(", ended {} ago", age(at))).unwrap_or_default();
    let mut facts = Table::new(&[Column::fixed(""), Column::flexible("")]);
    let mut fact = |name: &str, value: String| facts.row([Cell::new(name, Tone::Faint), value.into()]);
    let source = session.trigger_source.as_str();
    let by = if source == session.trigger_type { "" } else { &format!(", by {source}") };
    fact("conversation", format!("{} ({}{by})", session.conversation_id, session.trigger_type));
    if let Some(parent) = &session.parent_conversation_id {
        let at = session.forked_at_message_number.map(|at| format!(" at #{at}")).unwrap_or_default();
        let of = session.parent_session_id.as_deref().map(|of| format!(" ({of})")).unwrap_or_default();
        fact("forked from", format!("{parent}{at}{of}"));
    }
    if session.space_id != DEFAULT_SPACE {
        fact("space", session.space_id.clone());
    }
    fact("agent", format!("{}, {}", session.agent, session.model_id));
    if !session.tool_names.is_empty() {
        fact("tools", session.tool_names.join(", "));
    }
    if let Some(repository) = &session.repository_id {
        fact("repository", repository.clone());
    }
    if session.policy.as_object().is_some_and(|policy| !policy.is_empty()) {
        fact("policy", session.policy.to_string());
    }
    fact("messages", messages_of(session));
    fact(
        "started",
        format!(
            "{} ({} ago{ended})",
            session.started_at.format("%Y-%m-%d %H:%M:%S UTC"),
            age(session.started_at)
        ),
    );
    fact("used", format!("{}, {}", count(session.total_turns.into(), "turn"), tokens(session)));
    text.push_str(&output.aligned(&facts, 2));
    text
}

/// Describes which message numbers of the conversation belong to the session, and up to where they are
/// committed.
fn messages_of(session: &SessionSummary) -> String {
    let seeds = count(session.seed_message_count.into(), "seed");
    let (first, last) = (session.base_message_number + 1, session.last_message_number);
    if last < first {
        return format!("{seeds}, none yet");
    }
    let committed = match session.to_message_number {
        to if to == last => String::new(),
        to => format!(", committed up to #{to}"),
    };
    format!("{seeds}, #{first} to #{last}{committed}")
}

/// Formats the session's open question and its error.
fn trouble(session: &SessionSummary, output: &Output) -> String {
    let mut text = String::new();
    if let Some(question) = &session.question {
        let _ = writeln!(text, "  {}", output.paint(Tone::Busy, "It asks:"));
        text.push_str(&output.block(question, 4));
    }
    if let Some(note) = session.job.as_ref().and_then(|job| note(job, None)) {
        let _ = writeln!(text, "  {}", output.paint(Tone::Busy, "Now:"));
        text.push_str(&output.block(&note, 4));
    }
    if let Some(error) = &session.error {
        let _ = writeln!(text, "  {}", output.paint(Tone::Bad, "Error:"));
        text.push_str(&output.block(error, 4));
        let _ = writeln!(
            text,
            "    {}",
            output.paint(Tone::Faint, &format!("wakeful session why {}", session.session_id))
        );
    }
    text
}

fn heading(text: &mut String, output: &Output, name: &str) {
    let _ = writeln!(text, "\n{}", output.paint(Tone::Head, name));
}

fn section(text: &mut String, output: &Output, name: &str, table: &Table) {
    if !table.is_empty() {
        heading(text, output, name);
        text.push_str(&output.aligned(table, 2));
    }
}

fn say_earlier(text: &mut String, output: &Output, message: &EarlierMessage, full: bool) {
    let at = message.said_at.map(|at| at.format(", %Y-%m-%d %H:%M:%S").to_string()).unwrap_or_default();
    let _ = writeln!(
        text,
        "  {}{}",
        output.paint(Tone::Head, &message.role),
        output.paint(Tone::Faint, &format!("  before this session{at}"))
    );
    let shown = if full { message.text.as_str() } else { beginning(&message.text).0 };
    text.push_str(&output.block(shown, 4));
}

fn say(text: &mut String, output: &Output, message: &MessageView, full: bool) {
    let internal = if message.internal { ", internal" } else { "" };
    let failed = if message.role == "tool" { failed_results(&message.content) } else { 0 };
    let about =
        format!("  step {}{internal}, {}", message.step_number, message.created_at.format("%H:%M:%S"));
    let _ = writeln!(
        text,
        "  {}{}",
        output.paint(Tone::Head, &format!("#{} {}", message.message_number, message.role)),
        output.paint(Tone::Faint, &about)
    );
    if failed > 0 {
        let _ = writeln!(text, "    {}", output.paint(Tone::Bad, "✗ the call failed:"));
    }
    if !message.text.trim().is_empty() {
        let (shown, hidden) = if full { (message.text.as_str(), 0) } else { beginning(&message.text) };
        text.push_str(&output.block(shown, 4));
        if hidden > 0 {
            let hint = format!("… {hidden} more characters: --full");
            let _ = writeln!(text, "    {}", output.paint(Tone::Faint, &hint));
        }
    }
    for call in tool_calls(&message.content) {
        text.push_str(&output.block(&call, 4));
    }
}

/// Returns the start of a long text, and how many characters follow it.
fn beginning(text: &str) -> (&str, usize) {
    let by_lines = text.match_indices('\n').nth(MESSAGE_LINES - 1).map_or(text.len(), |(at, _)| at);
    let by_chars = text.char_indices().nth(MESSAGE_CHARS).map_or(text.len(), |(at, _)| at);
    let end = by_lines.min(by_chars);
    (&text[..end], text[end..].chars().count())
}

/// Counts the results of tool calls that failed.
fn failed_results(content: &Value) -> usize {
    let blocks = content.as_array().map(Vec::as_slice).unwrap_or_default();
    blocks.iter().filter(|block| block["type"] == "tool_result" && block["is_error"] == true).count()
}

/// Formats the tool calls of an assistant's message, one line each: `→ charge {"cents":5}`.
fn tool_calls(content: &Value) -> Vec<String> {
    let blocks = content.as_array().map(Vec::as_slice).unwrap_or_default();
    let calls = blocks.iter().filter(|block| block["type"] == "tool_call");
    calls
        .map(|call| {
            let arguments = match &call["malformed"] {
                Value::String(raw) => raw.clone(),
                _ => call["arguments"].to_string(),
            };
            let (shown, hidden) = beginning(&arguments);
            let more = if hidden > 0 { "…" } else { "" };
            // `printable` keeps each call on one line, even if its arguments hold newlines.
            format!("→ {} {}{more}", call["name"].as_str().unwrap_or_default(), printable(shown))
        })
        .collect()
}

fn runs(runs: &[RunView]) -> Table {
    let mut table = Table::new(&[
        Column::id("RUN"),
        Column::fixed("STATUS"),
        Column::number("STEPS"),
        Column::number("CALLS"),
        Column::number("TOKENS"),
        Column::number("TOOK"),
        Column::flexible("PROMPT"),
    ]);
    for run in runs {
        let took = run.started_at.map(|began| {
            let ended = run.completed_at.unwrap_or_else(chrono::Utc::now);
            span((ended - began).num_milliseconds().max(0) as f64 / 1000.0)
        });
        let prompt = run.prompt.as_deref().unwrap_or_default();
        table.row([
            run.run_id.as_str().into(),
            Cell::status(&run.status),
            run.steps.into(),
            run.tool_calls.into(),
            format!("{}+{}", run.input_tokens, run.output_tokens).into(),
            took.unwrap_or_else(|| "-".to_owned()).into(),
            // Only the first line: the transcript has the rest.
            Cell::new(prompt.lines().next().unwrap_or_default(), Tone::Faint),
        ]);
    }
    table
}

fn steps(steps: &[StepView]) -> Table {
    let mut table = Table::new(&[
        Column::number("STEP"),
        Column::number("TRY"),
        Column::fixed("MESSAGES"),
        Column::fixed("FINISH"),
        Column::number("TOOLS"),
        Column::number("TOKENS"),
        Column::number("COST"),
        Column::number("TOOK"),
        Column::flexible("WORKER"),
    ]);
    for step in steps {
        let took = (step.committed_at - step.started_at).num_milliseconds().max(0) as f64 / 1000.0;
        let usage = |key: &str| step.usage[key].as_i64().unwrap_or(0);
        table.row([
            step.step_number.into(),
            Cell::new(step.attempt.to_string(), if step.attempt > 1 { Tone::Busy } else { Tone::Plain }),
            format!("{}→{}", step.from_message_number, step.to_message_number).into(),
            step.finish_reason.as_str().into(),
            step.executed_local_tool_count.into(),
            match step.usage.is_null() {
                true => "-".into(),
                false => format!("{}+{}", usage("input_tokens"), usage("output_tokens")).into(),
            },
            dollars(usage("cost_micros")).into(),
            span(took).into(),
            step.worker_id.as_str().into(),
        ]);
    }
    table
}

fn calls(calls: &[CallView]) -> Table {
    let mut table = Table::new(&[
        Column::fixed("CALL"),
        Column::fixed("EFFECT"),
        Column::fixed("STATUS"),
        Column::number("STARTED"),
        Column::flexible("ID"),
    ]);
    for call in calls {
        table.row([
            call.name.as_str().into(),
            call.effect.as_str().into(),
            Cell::status(&call.status),
            // The ledger records no attempts of pure calls.
            if call.attempts == 0 { "-".into() } else { format!("{}×", call.attempts).into() },
            call.call_id.as_str().into(),
        ]);
    }
    table
}

fn deliveries(deliveries: &[DeliveryView]) -> Table {
    let mut table = Table::new(&[
        Column::fixed("CHANNEL"),
        Column::fixed("STATUS"),
        Column::number("TRIES"),
        Column::flexible("ID"),
        Column::flexible("NOTE"),
    ]);
    for delivery in deliveries {
        let receipt = delivery.receipt.as_ref().map(Value::to_string);
        let missed = missed(&delivery.undelivered);
        let note =
            missed.as_deref().or(delivery.last_error.as_deref()).or(receipt.as_deref()).unwrap_or_default();
        table.row([
            delivery.channel.as_str().into(),
            Cell::status(&delivery.status),
            delivery.attempt.into(),
            delivery.delivery_id.as_str().into(),
            Cell::new(note, Tone::Faint),
        ]);
    }
    table
}

/// Lists the recipients that a sent message did not reach: `bob@example.org bounced (5.1.1), …`.
pub(in crate::command) fn missed(undelivered: &Value) -> Option<String> {
    let missed = undelivered.as_array().filter(|missed| !missed.is_empty())?;
    let word = |one: &Value, key: &str| one[key].as_str().unwrap_or_default().to_owned();
    let one =
        |one: &Value| format!("{} {} ({})", word(one, "recipient"), word(one, "how"), word(one, "reason"));
    Some(missed.iter().map(one).collect::<Vec<_>>().join(", "))
}

fn state(state: &Value) -> Table {
    let mut table = Table::new(&[Column::flexible("KEY"), Column::flexible("VALUE")]);
    for (key, value) in state.as_object().into_iter().flatten() {
        table.row([key.as_str().into(), value.to_string().into()]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_long_text_is_cut_by_lines_and_by_characters() {
        assert_eq!(beginning("short"), ("short", 0));
        let lines = "line\n".repeat(20);
        let (shown, hidden) = beginning(&lines);
        assert_eq!((shown.lines().count(), shown.len() + hidden), (MESSAGE_LINES, lines.len()));
        let wide = "é".repeat(MESSAGE_CHARS + 7);
        assert_eq!(beginning(&wide).1, 7);
    }

    #[test]
    fn a_call_is_one_line_of_characters_that_do_nothing() {
        let content = json!([
            {"type": "text", "text": "hm"},
            {"type": "tool_call", "call_id": "c", "name": "charge", "arguments": {"note": "\u{202e}x"}},
            {"type": "tool_call", "call_id": "d", "name": "charge", "arguments": {}, "malformed": "{\n\u{1b}"},
        ]);
        assert_eq!(tool_calls(&content), ["→ charge {\"note\":\"\\u{202e}x\"}", "→ charge {\\n\\u{1b}"]);
    }
}
