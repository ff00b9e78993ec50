//! How `session tail` and the timeline of the demo show a journal entry.

use serde_json::Value;
use wakeful_store::event::JournalEntry;

/// Summarizes an entry's payload in a few words. Its texts are not escaped and may have many lines.
pub(crate) fn summary(entry: &JournalEntry) -> String {
    let payload = &entry.payload;
    let text = |key: &str| payload[key].as_str().unwrap_or_default();
    let number = |key: &str| payload[key].as_i64().unwrap_or_default();
    match entry.kind.as_str() {
        "MESSAGE_RECEIVED" => text("text").to_owned(),
        "LLM_CALLED" => format!("{}, attempt {}", text("model"), number("attempt")),
        "GEN_START" => text("generation_id").to_owned(),
        "GEN_RESUMED" => {
            format!("{} in place of {} ({})", text("generation_id"), text("replaces"), text("strategy"))
        }
        "GEN_FAILED" => {
            let tokens = |key: &str| payload["estimated"][key].as_i64();
            let used = tokens("input_tokens").map(|input| {
                format!(" (about {input} tokens in, {} out)", tokens("output_tokens").unwrap_or_default())
            });
            format!("{}: {}{}", text("generation_id"), text("reason"), used.unwrap_or_default())
        }
        "ATTEMPT_FAILED" => {
            let of = payload["attempts"].as_i64().map(|limit| format!(" of {limit}")).unwrap_or_default();
            let next = payload["retry_in_ms"].as_i64().map_or_else(
                || "waits for the provider".to_owned(),
                |ms| format!("next in {:.1} s", ms as f64 / 1000.0),
            );
            format!("attempt {}{of} of {}: {}; {next}", number("attempt"), text("model"), text("reason"))
        }
        "PERSON_TOLD" => format!("{}: {}", text("reason"), text("text")),
        "GEN_COMPLETE" => {
            format!("#{} {}: {}", number("message_number"), text("reason"), text("text"))
        }
        "GEN_SENT" => format!("{} by {}", text("delivery_id"), text("channel")),
        "DELIVERY_FAILED" => {
            format!("{} by {} {}: {}", text("delivery_id"), text("channel"), text("status"), text("reason"))
        }
        "TOOL_INVOKED" => format!("{} ({})", text("name"), text("call_id")),
        "TOOL_RESULT" => {
            let ok = if payload["ok"] == Value::Bool(true) { "ok" } else { "error" };
            format!("#{} {} {ok}: {}", number("message_number"), text("name"), text("text"))
        }
        "TOOL_FAILED_UNCERTAIN" => {
            let why = payload["reason"].as_str().map(|why| format!(". {why}")).unwrap_or_default();
            format!("{} ({}): it is not known whether it took effect{why}", text("name"), text("call_id"))
        }
        "state_transition" => {
            let reason = payload["reason"].as_str().map(|why| format!(": {why}")).unwrap_or_default();
            format!("{} → {}{reason}", text("from_state"), text("to_state"))
        }
        "trigger_event" => format!("{} {}", text("trigger_type"), text("trigger_id")),
        "invocation_result" => {
            let error = payload["error"].as_str().map(|why| format!(": {why}")).unwrap_or_default();
            format!("{}{error}", text("status"))
        }
        "SESSION_IMPORTED" => format!("task {} {} of {}", text("task_name"), text("task_id"), text("source")),
        "SESSION_FORKED" => format!("from {} at #{}", text("parent_session_id"), number("at_message_number")),
        "SESSION_TERMINATED" => text("reason").to_owned(),
        "checkpoint" => format!("step {} up to #{}", number("step_number"), number("to_message_number")),
        "context_update" => format!("{} = {}", text("key"), payload["value"]),
        _ => payload.to_string(),
    }
}
