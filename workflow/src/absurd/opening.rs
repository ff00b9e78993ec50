//! What a task's params say: the system prompt, earlier messages and the user's message.

use super::declared::Declared;
use crate::record::{Role, without_nul};
use crate::seed::Seed;
use serde_json::Value;

/// What a session begins with.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Opening {
    /// Replaces the agent's own system prompt.
    pub system: Option<String>,
    /// Earlier messages.
    pub history: Vec<Seed>,
    /// The message that the task was spawned for.
    pub prompt: String,
    pub conversation: Option<String>,
    pub trigger: Option<String>,
}

/// Fields of params that usually hold the user's message, the first that exists.
const PROMPTS: [&str; 8] = ["prompt", "userMessage", "message", "input", "text", "question", "query", "task"];
/// Fields that usually hold a system prompt.
const SYSTEMS: [&str; 4] = ["systemPrompt", "system", "instructions", "system_prompt"];
const CONVERSATIONS: [&str; 2] = ["conversationId", "conversation_id"];
const TRIGGERS: [&str; 2] = ["triggerId", "trigger_id"];

impl Opening {
    /// Reads params. A declared path goes before the usual names. If neither finds the user's message, all params are the
    /// message: a text as it is, anything else as JSON.
    pub fn of(params: &Value, declared: Option<&Declared>) -> Opening {
        let text = |key: &str, names: &[&str]| {
            let found = declared.and_then(|declared| declared.text(key, params));
            found.or_else(|| names.iter().find_map(|name| params[*name].as_str().map(str::to_owned)))
        };
        let mut history: Vec<Seed> =
            params["messages"].as_array().into_iter().flatten().filter_map(seed).collect();
        let prompt = text("prompt", &PROMPTS).or_else(|| match history.last() {
            Some(last) if last.role == Role::User => history.pop().map(|seed| seed.content),
            _ => None,
        });
        let prompt = prompt.unwrap_or_else(|| match params {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        });
        let mut system = text("system", &SYSTEMS);
        if let Some(first) = history.first().filter(|seed| seed.role == Role::System) {
            system = system.or_else(|| Some(first.content.clone()));
            history.remove(0);
        }
        Opening {
            system: system.map(without_nul),
            history,
            prompt: without_nul(prompt),
            conversation: text("conversation", &CONVERSATIONS).filter(|id| !id.is_empty()),
            trigger: text("trigger", &TRIGGERS).filter(|id| !id.is_empty()),
        }
    }
}

fn seed(message: &Value) -> Option<Seed> {
    let role = match message["role"].as_str()? {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        // A seed cannot be a tool's result.
        _ => return None,
    };
    let texts = |parts: &Vec<Value>| {
        let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
        texts.join("\n\n")
    };
    let content = match &message["content"] {
        Value::String(text) => text.clone(),
        Value::Array(parts) => texts(parts),
        _ => return None,
    };
    Some(Seed { role, content: without_nul(content), is_new: true })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_usual_names_are_found_and_anything_else_is_the_message_itself() {
        let of = |params: Value| Opening::of(&params, None);
        assert_eq!(of(json!("Hi")).prompt, "Hi");
        let pi = of(json!({"systemPrompt": "Be brief.", "userMessage": "Hi", "conversationId": "c1"}));
        assert_eq!((pi.system.as_deref(), pi.prompt.as_str()), (Some("Be brief."), "Hi"));
        assert_eq!(pi.conversation.as_deref(), Some("c1"));
        let chat = of(
            json!({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}]}, {"role": "user", "content": "c"}]}),
        );
        assert_eq!((chat.system.as_deref(), chat.prompt.as_str(), chat.history.len()), (Some("S"), "c", 2));
        assert_eq!(of(json!({"mail": 7})).prompt, r#"{"mail":7}"#);
    }
}
