//! One message as other libraries write it, as our record, and back again.
//!
//! [`read`] knows the message formats of the Vercel AI SDK (4 and 5), of pi-ai, of OpenAI's chat completions and of Anthropic's
//! messages. It tells them by their fields, part by part, because programs mix them. Texts, calls and results become blocks. What
//! has no place in a block goes into [`Said::rest`], so [`restore`] gives the message back exactly. `wakeful absurd verify`
//! compares the two: if they are the same, nothing was lost.

use super::usage::{finish_of, usage_of};
use crate::record::{Block, FinishReason, Role, ToolCall, ToolResult, Usage};
use serde_json::{Map, Value, json};

/// The provider of blocks that only their own library understands, such as signed thinking. They stay in the record
/// and are never sent to a model.
pub const PROVIDER: &str = "absurd";

/// A message as our record has it.
#[derive(Clone, Debug, PartialEq)]
pub struct Said {
    pub role: Role,
    pub content: Vec<Block>,
    /// What the blocks do not hold: an object.
    pub rest: Value,
    /// pi-ai writes both into its messages.
    pub usage: Option<Usage>,
    pub finish: Option<FinishReason>,
}

/// Reads a message.
///
/// # Errors
/// Why it is not a message, as a text for people.
pub fn read(raw: &Value) -> Result<Said, String> {
    let Value::Object(fields) = raw else { return Err("a message is not an object".to_owned()) };
    let word = fields.get("role").and_then(Value::as_str).ok_or("a message has no role")?;
    let role = match word {
        "user" | "system" | "developer" => Role::User,
        "assistant" => Role::Assistant,
        "tool" | "toolResult" => Role::Tool,
        other => return Err(format!("a message has the role {other:?}")),
    };
    let mut more = fields.clone();
    more.remove("role");
    let (form, content, parts) = match role {
        Role::Tool if fields.contains_key("toolCallId") => ("pi", vec![pi_result(&mut more)?], Vec::new()),
        Role::Tool if fields.contains_key("tool_call_id") => {
            ("openai", vec![openai_result(&mut more)?], Vec::new())
        }
        Role::User | Role::Assistant | Role::Tool | Role::System => of_content(&mut more)?,
    };
    // Anthropic's results come in a message of the user.
    let results = content.iter().any(|block| matches!(block, Block::ToolResult(_)));
    let role = if results { Role::Tool } else { role };
    let usage = fields.get("usage").and_then(usage_of);
    let finish = ["stopReason", "stop_reason"].iter().find_map(|key| finish_of(fields.get(*key)?.as_str()?));
    let mut rest = Map::new();
    rest.insert("role".to_owned(), json!(word));
    rest.insert("form".to_owned(), json!(form));
    if !more.is_empty() {
        rest.insert("more".to_owned(), Value::Object(more));
    }
    if parts.iter().any(|part| !part.is_null()) {
        rest.insert("parts".to_owned(), Value::Array(parts));
    }
    Ok(Said { role, content, rest: Value::Object(rest), usage, finish })
}

/// The way back: the message that [`read`] read.
///
/// # Errors
/// The record cannot come from a message.
pub fn restore(content: &[Block], rest: &Value) -> Result<Value, String> {
    let mut fields = rest["more"].as_object().cloned().unwrap_or_default();
    fields.insert("role".to_owned(), rest["role"].clone());
    let none = || "a block is missing".to_owned();
    match rest["form"].as_str().ok_or("the record does not say where it comes from")? {
        "none" => {}
        "null" => {
            fields.insert("content".to_owned(), Value::Null);
        }
        "text" => {
            let Some(Block::Text { text }) = content.first() else { return Err(none()) };
            fields.insert("content".to_owned(), json!(text));
        }
        "parts" => {
            let parts = content.iter().enumerate().map(|(at, block)| part_back(block, &rest["parts"][at]));
            fields.insert("content".to_owned(), Value::Array(parts.collect::<Result<_, _>>()?));
        }
        "openai-calls" => openai_back(&mut fields, content, rest)?,
        "pi" => {
            let Some(Block::ToolResult(result)) = content.first() else { return Err(none()) };
            fields.insert("toolCallId".to_owned(), json!(result.call_id));
            if !result.name.is_empty() {
                fields.insert("toolName".to_owned(), json!(result.name));
            }
            if let Some(details) = &result.details {
                fields.insert("details".to_owned(), details.clone());
            }
            fields.entry("content").or_insert_with(|| json!([{"type": "text", "text": result.content}]));
        }
        "openai" => {
            let Some(Block::ToolResult(result)) = content.first() else { return Err(none()) };
            fields.insert("tool_call_id".to_owned(), json!(result.call_id));
            fields.entry("content").or_insert_with(|| json!(result.content));
        }
        other => return Err(format!("the form {other:?} is unknown")),
    }
    if content.len() > 1 && matches!(rest["form"].as_str(), Some("text" | "pi" | "openai" | "null" | "none"))
    {
        return Err("a block too many".to_owned());
    }
    Ok(Value::Object(fields))
}

type Content = (&'static str, Vec<Block>, Vec<Value>);

/// Reads a message's `content`, and OpenAI's `tool_calls` beside it.
fn of_content(more: &mut Map<String, Value>) -> Result<Content, String> {
    if let Some(Value::Array(calls)) = more.get("tool_calls").cloned()
        && !matches!(more.get("content"), Some(Value::Array(_)))
    {
        more.remove("tool_calls");
        return openai_calls(more, &calls);
    }
    match more.remove("content") {
        None => Ok(("none", Vec::new(), Vec::new())),
        Some(Value::Null) => Ok(("null", Vec::new(), Vec::new())),
        Some(Value::String(text)) => Ok(("text", vec![Block::Text { text }], Vec::new())),
        Some(Value::Array(parts)) => {
            let own: Vec<String> = results_within(&parts);
            let (mut content, mut kept) = (Vec::new(), Vec::new());
            for part in parts {
                let (block, rest) = part_of(part, &own);
                content.push(block);
                kept.push(rest);
            }
            Ok(("parts", content, kept))
        }
        Some(Value::Bool(_) | Value::Number(_) | Value::Object(_)) => {
            Err("a message's content is neither text nor a list of parts".to_owned())
        }
    }
}

/// The calls that the provider ran itself: their results stand in the message that asks for them.
fn results_within(parts: &[Value]) -> Vec<String> {
    let asked: Vec<&str> = parts.iter().filter(|part| is_call(part)).filter_map(id_of).collect();
    let results = parts.iter().filter(|part| !is_call(part)).filter_map(id_of);
    results.filter(|id| asked.contains(id)).map(str::to_owned).collect()
}

fn is_call(part: &Value) -> bool {
    matches!(part["type"].as_str(), Some("tool-call" | "toolCall" | "tool_use"))
}

fn id_of(part: &Value) -> Option<&str> {
    let key = match part["type"].as_str()? {
        "tool-call" | "tool-result" => "toolCallId",
        "toolCall" | "tool_use" => "id",
        "tool_result" => "tool_use_id",
        _ => return None,
    };
    part[key].as_str()
}

/// Reads a part. The second value is what the block does not hold, or null.
fn part_of(part: Value, own: &[String]) -> (Block, Value) {
    let raw = |part: Value| (Block::Provider { provider: PROVIDER.to_owned(), raw: part }, Value::Null);
    if id_of(&part).is_some_and(|id| own.iter().any(|own| own == id)) {
        return raw(part);
    }
    let kind = part["type"].as_str().unwrap_or_default().to_owned();
    let Value::Object(mut fields) = part.clone() else { return raw(part) };
    let taken = match kind.as_str() {
        "text" => match fields.remove("text") {
            Some(Value::String(text)) => Some((Block::Text { text }, String::new())),
            _ => None,
        },
        "tool-call" if fields.contains_key("input") => call(&mut fields, "toolCallId", "toolName", "input"),
        "tool-call" => call(&mut fields, "toolCallId", "toolName", "args"),
        "toolCall" => call(&mut fields, "id", "name", "arguments"),
        "tool_use" => call(&mut fields, "id", "name", "input"),
        "tool-result" => vercel_result(&mut fields),
        "tool_result" => anthropic_result(&mut fields),
        _ => None,
    };
    let Some((block, note)) = taken else { return raw(part) };
    fields.remove("type");
    let mut rest = Map::new();
    if kind != "text" {
        rest.insert("type".to_owned(), json!(kind));
    }
    if !note.is_empty() {
        rest.insert("as".to_owned(), json!(note));
    }
    if !fields.is_empty() {
        rest.insert("more".to_owned(), Value::Object(fields));
    }
    (block, if rest.is_empty() { Value::Null } else { Value::Object(rest) })
}

fn part_back(block: &Block, rest: &Value) -> Result<Value, String> {
    let mut fields = rest["more"].as_object().cloned().unwrap_or_default();
    let kind = rest["type"].as_str().unwrap_or("text");
    let note = rest["as"].as_str().unwrap_or_default();
    match (block, kind) {
        (Block::Provider { raw, .. }, _) => return Ok(raw.clone()),
        (Block::Text { text }, "text") => {
            fields.insert("text".to_owned(), json!(text));
        }
        (Block::ToolCall(call), "tool-call" | "toolCall" | "tool_use") => {
            let (id, name) = if kind == "tool-call" { ("toolCallId", "toolName") } else { ("id", "name") };
            fields.insert(id.to_owned(), json!(call.call_id));
            fields.insert(name.to_owned(), json!(call.name));
            fields.insert(note.to_owned(), input_back(call)?);
        }
        (Block::ToolResult(result), "tool-result") => {
            fields.insert("toolCallId".to_owned(), json!(result.call_id));
            fields.insert("toolName".to_owned(), json!(result.name));
            let value = value_back(&result.content, note.ends_with("/text"))?;
            match note.strip_prefix("output:").and_then(|note| note.rsplit_once('/')) {
                Some((kind, _)) => {
                    let mut output = fields.remove("output").unwrap_or_else(|| json!({}));
                    output["type"] = json!(kind);
                    output["value"] = value;
                    fields.insert("output".to_owned(), output);
                }
                None => {
                    fields.insert("result".to_owned(), value);
                }
            }
        }
        (Block::ToolResult(result), "tool_result") => {
            fields.insert("tool_use_id".to_owned(), json!(result.call_id));
            if !note.is_empty() {
                fields.insert("content".to_owned(), value_back(&result.content, note == "text")?);
            }
        }
        (Block::Text { .. } | Block::ToolCall(_) | Block::ToolResult(_), _) => {
            return Err(format!("a part of the type {kind:?} became another block"));
        }
    }
    fields.insert("type".to_owned(), json!(kind));
    Ok(Value::Object(fields))
}

fn text_field(fields: &mut Map<String, Value>, key: &str) -> Option<String> {
    match fields.get(key) {
        Some(Value::String(_)) => match fields.remove(key) {
            Some(Value::String(text)) => Some(text),
            _ => None,
        },
        _ => None,
    }
}

fn call(fields: &mut Map<String, Value>, id: &str, name: &str, input: &str) -> Option<(Block, String)> {
    let (call_id, name) = (text_field(fields, id)?, text_field(fields, name)?);
    let given = fields.remove(input)?;
    Some((Block::ToolCall(tool_call(call_id, name, given)), input.to_owned()))
}

fn tool_call(call_id: String, name: String, given: Value) -> ToolCall {
    let (arguments, malformed) = match given {
        Value::Object(_) => (given, None),
        other => (json!({}), Some(other.to_string())),
    };
    ToolCall { call_id: call_id.into(), name, arguments, malformed }
}

fn input_back(call: &ToolCall) -> Result<Value, String> {
    match &call.malformed {
        None => Ok(call.arguments.clone()),
        Some(text) => serde_json::from_str(text).map_err(|error| error.to_string()),
    }
}

/// A result's text for the model: a text as it is, anything else as JSON.
fn text_of(value: Value) -> (String, bool) {
    match value {
        Value::String(text) => (text, true),
        other => (other.to_string(), false),
    }
}

fn value_back(text: &str, is_text: bool) -> Result<Value, String> {
    if is_text { Ok(json!(text)) } else { serde_json::from_str(text).map_err(|error| error.to_string()) }
}

fn result(call_id: String, name: String, content: String, is_error: bool) -> ToolResult {
    ToolResult { call_id: call_id.into(), name, content, is_error, details: None, output: None }
}

/// Version 5 has `output`, an object with a `type` and a `value`; version 4 has `result`.
fn vercel_result(fields: &mut Map<String, Value>) -> Option<(Block, String)> {
    let (call_id, name) = (text_field(fields, "toolCallId")?, text_field(fields, "toolName")?);
    let is_error = fields.get("isError") == Some(&Value::Bool(true));
    if let Some(Value::Object(mut output)) = fields.get("output").cloned() {
        let kind = text_field(&mut output, "type")?;
        let (content, is_text) = text_of(output.remove("value")?);
        match output.is_empty() {
            true => fields.remove("output"),
            false => fields.insert("output".to_owned(), Value::Object(output)),
        };
        let is_error = is_error || kind.starts_with("error");
        let note = format!("output:{kind}/{}", if is_text { "text" } else { "json" });
        return Some((Block::ToolResult(result(call_id, name, content, is_error)), note));
    }
    let (content, is_text) = text_of(fields.remove("result")?);
    let note = if is_text { "result/text" } else { "result/json" };
    Some((Block::ToolResult(result(call_id, name, content, is_error)), note.to_owned()))
}

fn anthropic_result(fields: &mut Map<String, Value>) -> Option<(Block, String)> {
    let call_id = text_field(fields, "tool_use_id")?;
    let is_error = fields.get("is_error") == Some(&Value::Bool(true));
    let (content, note) = match fields.remove("content") {
        None => (String::new(), ""),
        Some(value) => match text_of(value) {
            (text, true) => (text, "text"),
            (text, false) => (text, "json"),
        },
    };
    Some((Block::ToolResult(result(call_id, String::new(), content, is_error)), note.to_owned()))
}

/// pi-ai's `toolResult`: one message for each result, with `details` for the program.
fn pi_result(more: &mut Map<String, Value>) -> Result<Block, String> {
    let call_id = text_field(more, "toolCallId").ok_or("a result has no toolCallId")?;
    let named = more.get("toolName").is_some_and(|name| name != "");
    let name = if named { text_field(more, "toolName").unwrap_or_default() } else { String::new() };
    let is_error = more.get("isError") == Some(&Value::Bool(true));
    let content = match more.get("content") {
        Some(Value::Array(parts)) => match parts.as_slice() {
            [Value::Object(part)]
                if part.len() == 2
                    && part.get("type") == Some(&json!("text"))
                    && part.contains_key("text") =>
            {
                part["text"].as_str().map(str::to_owned)
            }
            _ => None,
        },
        _ => None,
    };
    let content = match content {
        Some(text) => {
            more.remove("content");
            text
        }
        None => more.get("content").map(texts).unwrap_or_default(),
    };
    // The files themselves do not come along, so a state that names them would promise too much.
    let details = more.get("details").filter(|of| of.is_object() && of["type"] != "fileWritten").cloned();
    if details.is_some() {
        more.remove("details");
    }
    Ok(Block::ToolResult(ToolResult { details, ..result(call_id, name, content, is_error) }))
}

fn openai_result(more: &mut Map<String, Value>) -> Result<Block, String> {
    let call_id = text_field(more, "tool_call_id").ok_or("a result has no tool_call_id")?;
    let name = more.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
    let content = match text_field(more, "content") {
        Some(text) => text,
        None => more.get("content").map(texts).unwrap_or_default(),
    };
    Ok(Block::ToolResult(result(call_id, name, content, false)))
}

/// The texts of a list of parts, or the one text.
fn texts(content: &Value) -> String {
    if let Value::String(text) = content {
        return text.clone();
    }
    let texts: Vec<&str> =
        content.as_array().into_iter().flatten().filter_map(|part| part["text"].as_str()).collect();
    texts.join("\n")
}

fn openai_calls(more: &mut Map<String, Value>, calls: &[Value]) -> Result<Content, String> {
    let (mut content, mut parts) = (Vec::new(), Vec::new());
    if let Some(text) = text_field(more, "content") {
        content.push(Block::Text { text });
        parts.push(Value::Null);
    }
    for one in calls {
        let (id, function) = (one["id"].as_str(), &one["function"]);
        let (Some(id), Some(name), Some(given)) =
            (id, function["name"].as_str(), function["arguments"].as_str())
        else {
            return Err("an entry of tool_calls has no id, function.name or function.arguments".to_owned());
        };
        let (arguments, malformed) = match serde_json::from_str::<Value>(given) {
            Ok(arguments @ Value::Object(_)) => (arguments, None),
            Ok(_) | Err(_) => (json!({}), Some(given.to_owned())),
        };
        let mut kept = one.clone();
        if let Some(fields) = kept.as_object_mut() {
            fields.remove("id");
            if let Some(function) = fields.get_mut("function").and_then(Value::as_object_mut) {
                function.remove("name");
                // Only the spelling of the text tells it from the parsed arguments.
                let spelled = arguments.to_string();
                if malformed.is_some() || spelled == given {
                    function.remove("arguments");
                }
            }
        }
        parts.push(kept);
        content.push(Block::ToolCall(ToolCall {
            call_id: id.into(),
            name: name.to_owned(),
            arguments,
            malformed,
        }));
    }
    Ok(("openai-calls", content, parts))
}

fn openai_back(fields: &mut Map<String, Value>, content: &[Block], rest: &Value) -> Result<(), String> {
    let mut calls = Vec::new();
    for (at, block) in content.iter().enumerate() {
        match block {
            Block::Text { text } if at == 0 => {
                fields.insert("content".to_owned(), json!(text));
            }
            Block::ToolCall(call) => {
                let mut one = rest["parts"][at].clone();
                one["id"] = json!(call.call_id);
                one["function"]["name"] = json!(call.name);
                if one["function"]["arguments"].is_null() {
                    let given = call.malformed.clone().unwrap_or_else(|| call.arguments.to_string());
                    one["function"]["arguments"] = json!(given);
                }
                calls.push(one);
            }
            Block::Text { .. } | Block::ToolResult(_) | Block::Provider { .. } => {
                return Err("a block that OpenAI's messages do not have".to_owned());
            }
        }
    }
    fields.insert("tool_calls".to_owned(), Value::Array(calls));
    Ok(())
}

#[cfg(test)]
#[path = "message_tests.rs"]
mod tests;
