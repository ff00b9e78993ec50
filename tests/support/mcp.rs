//! A small MCP server: what it answers. The fixture program speaks it by standard input and output, tests by HTTP.

use serde_json::{Value, json};
use std::io::Write as _;
use std::path::Path;

/// Answers one message; `None` to a notification. Files in `folder` say how, and hold what was called:
///
/// | file | |
/// |---|---|
/// | `calls` | a line for each call: its tool and its idempotency key |
/// | `words` | the description of each tool, if it is there |
pub fn answer(message: &Value, folder: &Path) -> Option<Value> {
    let id = message.get("id")?;
    let result = match message["method"].as_str() {
        Some("initialize") => json!({
            "protocolVersion": message["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "desk", "version": "1.0"},
        }),
        Some("tools/list") => json!({"tools": tools(folder)}),
        Some("tools/call") => called(&message["params"], folder),
        Some("ping") => json!({}),
        other => {
            let error = json!({"code": -32601, "message": format!("no method {other:?}")});
            return Some(json!({"jsonrpc": "2.0", "id": id, "error": error}));
        }
    };
    Some(json!({"jsonrpc": "2.0", "id": id, "result": result}))
}

/// `look` changes nothing, `book` may be repeated, and of `pay` the server says nothing.
fn tools(folder: &Path) -> Value {
    let words = std::fs::read_to_string(folder.join("words")).ok();
    let tool = |name: &str, hints: Value| {
        let description = words.clone().unwrap_or_else(|| format!("Lets the desk {name}."));
        let schema = json!({"type": "object", "properties": {"table": {"type": "integer"}}});
        json!({"name": name, "description": description, "inputSchema": schema, "annotations": hints})
    };
    json!([
        tool("look", json!({"readOnlyHint": true})),
        tool("book", json!({"idempotentHint": true})),
        tool("pay", json!({}))
    ])
}

/// Keeps a call, and returns its result.
fn called(call: &Value, folder: &Path) -> Value {
    let name = call["name"].as_str().unwrap_or_default();
    let key = call["_meta"]["wakeful/idempotencyKey"].as_str().unwrap_or("none");
    let kept = std::fs::OpenOptions::new().create(true).append(true).open(folder.join("calls"));
    // In one write, because two servers may share the folder.
    let kept = kept.and_then(|mut file| file.write_all(format!("{name} {key}\n").as_bytes()));
    let (text, failed) = match kept {
        Ok(()) if call["arguments"]["table"] == 13 => ("There is no table 13.".to_owned(), true),
        Ok(()) => (format!("{name}: table {}", call["arguments"]["table"]), false),
        Err(error) => (error.to_string(), true),
    };
    json!({"content": [{"type": "text", "text": text}], "isError": failed})
}
