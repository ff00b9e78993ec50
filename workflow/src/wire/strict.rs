//! Validators that refuse what the strictest known server refuses. The laws check every projection with them.

use super::repair::is_blank;
use serde_json::{Map, Value};
use std::collections::BTreeSet;

type Checked = Result<(), String>;

macro_rules! demand {
    ($holds:expr, $($why:tt)*) => {
        if !$holds {
            return Err(format!($($why)*));
        }
    };
}

/// The rules of a model that accepts a prefill: the request may end with one text of the assistant.
pub(super) fn anthropic_prefilled(body: &[u8]) -> Checked {
    let mut body = parse(body)?;
    let messages = body["messages"].as_array_mut().ok_or("messages")?;
    if let Some(last) = messages.pop_if(|last| last["role"] == "assistant") {
        let [block] = last["content"].as_array().ok_or("content")?.as_slice() else {
            return Err("a prefill of several blocks".to_owned());
        };
        demand!(block["type"] == "text", "a prefill that is no text");
        text_block(object(block)?)?;
        let ends_blank =
            block["text"].as_str().is_some_and(|text| text.ends_with(|c| is_blank(&String::from(c))));
        demand!(!ends_blank, "a prefill with trailing white space");
    }
    anthropic(Value::Object(body).to_string().as_bytes())
}

pub(super) fn anthropic(body: &[u8]) -> Checked {
    let body = parse(body)?;
    only(&body, &["model", "max_tokens", "stream", "messages", "system", "tools"])?;
    demand!(body.get("model").is_some_and(Value::is_string), "model");
    demand!(body["max_tokens"].as_u64() > Some(0), "max_tokens");
    demand!(body["stream"] == true, "stream");
    let mut breakpoints = 0;
    for block in list(&body, "system")? {
        text_block(object(block)?)?;
        breakpoints += usize::from(block.get("cache_control").is_some());
    }
    for tool in list(&body, "tools")? {
        only(object(tool)?, &["name", "description", "input_schema", "cache_control"])?;
        breakpoints += usize::from(tool.get("cache_control").is_some());
    }
    tool_names(list(&body, "tools")?, |tool| tool, "input_schema")?;

    let messages = body["messages"].as_array().ok_or("messages")?;
    demand!(!messages.is_empty(), "no messages");
    demand!(messages[0]["role"] == "user", "first is not user");
    demand!(messages.last().is_some_and(|last| last["role"] == "user"), "prefill is not supported");
    let mut ids = BTreeSet::new();
    let mut asked: BTreeSet<String> = BTreeSet::new();
    let mut previous = "";
    for message in messages {
        only(object(message)?, &["role", "content"])?;
        let role = message["role"].as_str().ok_or("role")?;
        demand!(matches!(role, "user" | "assistant"), "role {role}");
        demand!(role != previous, "two turns of {role}");
        previous = role;
        let content = message["content"].as_array().ok_or("content is no list")?;
        demand!(!content.is_empty(), "empty message");

        let open = std::mem::take(&mut asked);
        let mut answered = BTreeSet::new();
        let mut results_are_over = false;
        for block in content {
            let fields = object(block)?;
            breakpoints += usize::from(block.get("cache_control").is_some());
            let kind = block["type"].as_str().ok_or("block without type")?;
            results_are_over |= kind != "tool_result";
            match (role, kind) {
                (_, "text") => {
                    text_block(fields)?;
                    demand!(role == "user" || asked.is_empty(), "text after tool_use");
                }
                ("assistant", "tool_use") => {
                    only(fields, &["type", "id", "name", "input"])?;
                    let id = word(&block["id"], 64)?;
                    word(&block["name"], 64)?;
                    demand!(block["input"].is_object(), "input is no object");
                    demand!(ids.insert(id.clone()), "duplicate id {id}");
                    asked.insert(id);
                }
                ("user", "tool_result") => {
                    only(fields, &["type", "tool_use_id", "content", "is_error", "cache_control"])?;
                    demand!(!results_are_over, "result after other blocks");
                    let id = word(&block["tool_use_id"], 64)?;
                    demand!(open.contains(&id), "result of {id}, which was not called");
                    demand!(!is_blank(block["content"].as_str().ok_or("result content")?), "blank result");
                    demand!(answered.insert(id.clone()), "two results of {id}");
                }
                ("user", "image" | "document") => {}
                ("assistant", "tool_result" | "image" | "document") | ("user", _) => {
                    return Err(format!("{kind} in a message of {role}"));
                }
                (_, _) => demand!(block.get("cache_control").is_none(), "breakpoint on {kind}"),
            }
        }
        demand!(answered == open, "calls without a result: {open:?}, results of {answered:?}");
    }
    demand!(asked.is_empty(), "calls without a result at the end");
    demand!(breakpoints <= 4, "{breakpoints} cache breakpoints");
    Ok(())
}

/// `alternate`: whether a chat template requires user and assistant turns to alternate.
pub(super) fn openai(body: &[u8], alternate: bool) -> Checked {
    let body = parse(body)?;
    let limits = ["max_tokens", "max_completion_tokens"];
    only(&body, &["model", "stream", "stream_options", "messages", "tools", limits[0], limits[1]])?;
    demand!(limits.iter().filter(|limit| body.contains_key(**limit)).count() == 1, "limit");
    demand!(body["stream"] == true && body["stream_options"]["include_usage"] == true, "stream");
    let function = |tool: &Value| tool["type"] == "function";
    demand!(list(&body, "tools")?.iter().all(function), "tool type");
    tool_names(list(&body, "tools")?, |tool| &tool["function"], "parameters")?;

    let messages = body["messages"].as_array().ok_or("messages")?;
    let mut ids = BTreeSet::new();
    let mut asked: BTreeSet<String> = BTreeSet::new();
    let mut previous = "";
    for (at, message) in messages.iter().enumerate() {
        let fields = object(message)?;
        let role = message["role"].as_str().ok_or("role")?;
        demand!(asked.is_empty() || role == "tool", "{role} before all calls are answered");
        demand!(
            at > usize::from(previous == "system") || matches!(role, "system" | "user"),
            "first is {role}"
        );
        demand!(!(alternate && role != "tool" && role == previous), "two turns of {role}");
        match role {
            "system" => {
                only(fields, &["role", "content"])?;
                demand!(at == 0, "system at {at}");
                demand!(message["content"].as_str().is_some_and(|text| !is_blank(text)), "system");
            }
            "user" => {
                only(fields, &["role", "content"])?;
                parts(&message["content"], &["image_url", "input_audio", "file"])?;
            }
            "assistant" => {
                only(fields, &["role", "content", "tool_calls"])?;
                let calls = message.get("tool_calls");
                match calls.map(|calls| calls.as_array().ok_or("tool_calls")).transpose()? {
                    Some(calls) => {
                        demand!(!calls.is_empty(), "empty tool_calls");
                        for call in calls {
                            only(object(call)?, &["id", "type", "function"])?;
                            let id = word(&call["id"], 40)?;
                            word(&call["function"]["name"], 64)?;
                            let arguments = call["function"]["arguments"].as_str().ok_or("arguments")?;
                            object(&serde_json::from_str(arguments).map_err(|e| e.to_string())?)?;
                            demand!(ids.insert(id.clone()), "duplicate id {id}");
                            asked.insert(id);
                        }
                        if !message["content"].is_null() {
                            parts(&message["content"], &["refusal"])?;
                        }
                    }
                    None => parts(&message["content"], &["refusal"])?,
                }
            }
            "tool" => {
                only(fields, &["role", "content", "tool_call_id"])?;
                let id = word(&message["tool_call_id"], 40)?;
                demand!(asked.remove(&id), "result of {id}, which is not open");
                demand!(!is_blank(message["content"].as_str().ok_or("result")?), "blank result");
            }
            _ => return Err(format!("role {role}")),
        }
        previous = role;
    }
    demand!(asked.is_empty(), "calls without a result at the end");
    demand!(matches!(previous, "user" | "tool"), "ends with {previous}");
    Ok(())
}

fn parse(body: &[u8]) -> Result<Map<String, Value>, String> {
    let value: Value = serde_json::from_slice(body).map_err(|e| e.to_string())?;
    object(&value).cloned()
}

fn object(value: &Value) -> Result<&Map<String, Value>, String> {
    value.as_object().ok_or_else(|| format!("not an object: {value}"))
}

/// An absent list is fine, an empty one is not.
fn list<'a>(body: &'a Map<String, Value>, field: &str) -> Result<&'a [Value], String> {
    match body.get(field) {
        None => Ok(&[]),
        Some(Value::Array(list)) if !list.is_empty() => Ok(list),
        Some(other) => Err(format!("{field} is {other}")),
    }
}

fn only(fields: &Map<String, Value>, allowed: &[&str]) -> Checked {
    match fields.keys().find(|field| !allowed.contains(&field.as_str())) {
        Some(field) => Err(format!("extra field {field}")),
        None => Ok(()),
    }
}

fn word(value: &Value, max_bytes: usize) -> Result<String, String> {
    let text = value.as_str().ok_or("id or name is no string")?;
    let fits = text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    demand!(fits && !text.is_empty() && text.len() <= max_bytes, "id or name {text:?}");
    Ok(text.to_owned())
}

fn text_block(fields: &Map<String, Value>) -> Checked {
    only(fields, &["type", "text", "cache_control"])?;
    demand!(fields["text"].as_str().is_some_and(|text| !is_blank(text)), "blank text");
    Ok(())
}

fn parts(content: &Value, kinds: &[&str]) -> Checked {
    if let Some(text) = content.as_str() {
        demand!(!is_blank(text), "blank text");
        return Ok(());
    }
    let parts = content.as_array().ok_or_else(|| format!("content {content}"))?;
    demand!(!parts.is_empty(), "empty content");
    for part in parts {
        let kind = part["type"].as_str().ok_or("part without type")?;
        match kind {
            "text" => text_block(object(part)?)?,
            _ => demand!(kinds.contains(&kind), "part {kind}"),
        }
    }
    Ok(())
}

fn tool_names(tools: &[Value], inner: fn(&Value) -> &Value, schema: &str) -> Checked {
    let mut names = BTreeSet::new();
    for tool in tools.iter().map(inner) {
        let name = word(&tool["name"], 64)?;
        demand!(names.insert(name.clone()), "duplicate tool {name}");
        demand!(
            tool[schema]["type"] == "object" && tool[schema]["properties"].is_object(),
            "schema of {name}"
        );
    }
    Ok(())
}
