//! Parses an entry of the old cache: `{"messages": […], "state": {…}}`. The entry is not trusted.

use serde_json::{Map, Value};
use wakeful_store::legacy::Imported;
use wakeful_store::wake::NewSession;
use wakeful_workflow::record::{Role, storable, without_nul};
use wakeful_workflow::seed::Seed;

/// A chat as the cache kept it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chat {
    pub(super) seeds: Vec<Seed>,
    pub(super) said_at: Vec<Option<i64>>,
    pub(super) state: Map<String, Value>,
    /// How many messages cannot become seeds.
    pub(super) left_out: i64,
}

impl Chat {
    /// Returns the new session with the chat in it: today's system prompt first, then the old messages.
    pub(crate) fn into_session(self, mut new: NewSession) -> (NewSession, Imported) {
        let mut said_at = vec![None; new.seeds.len()];
        new.seeds.extend(self.seeds);
        said_at.extend(self.said_at);
        (new, Imported { state: self.state, said_at, left_out: self.left_out })
    }
}

/// An entry with more messages is refused.
const MESSAGES: usize = 20_000;

/// Parses the chat in `bytes`.
///
/// Messages of the user and the assistant become seeds, in order. A message without text, or of a tool, the
/// system or an unknown role, is left out and counted.
///
/// # Errors
/// A description that quotes nothing of the entry: it is not JSON, or has another shape.
pub(super) fn read(bytes: &[u8]) -> Result<Chat, String> {
    let entry: Value = serde_json::from_slice(bytes)
        .map_err(|error| format!("it is no JSON (line {}, column {})", error.line(), error.column()))?;
    let Value::Object(mut entry) = entry else { return Err("it is no JSON object".to_owned()) };
    let messages = match entry.remove("messages") {
        Some(Value::Array(messages)) => messages,
        Some(Value::Null) | None => Vec::new(),
        Some(_) => return Err("its `messages` are no list".to_owned()),
    };
    let state = match entry.remove("state") {
        Some(Value::Object(state)) => state,
        Some(Value::Null) | None => Map::new(),
        Some(_) => return Err("its `state` is no object".to_owned()),
    };
    if messages.len() > MESSAGES {
        return Err(format!("it has {} messages; {MESSAGES} are the most that is read", messages.len()));
    }
    let mut chat = Chat { seeds: Vec::new(), said_at: Vec::new(), state: Map::new(), left_out: 0 };
    if let Value::Object(state) = storable(Value::Object(state)) {
        chat.state = state;
    }
    for (index, message) in messages.iter().enumerate() {
        let Value::Object(message) = message else {
            return Err(format!("its message {index} is no object"));
        };
        let role = match message.get("role").and_then(Value::as_str) {
            Some("user" | "human") => Role::User,
            Some("assistant" | "ai") => Role::Assistant,
            Some(_) => {
                chat.left_out += 1;
                continue;
            }
            None => return Err(format!("its message {index} has no `role`")),
        };
        let content = text(message);
        if content.trim().is_empty() {
            chat.left_out += 1;
            continue;
        }
        chat.seeds.push(Seed { role, content: without_nul(content), is_new: false });
        chat.said_at.push(time(message));
    }
    Ok(chat)
}

/// The text of a message: a string, or the texts of its parts joined.
fn text(message: &Map<String, Value>) -> String {
    match message.get("content").or_else(|| message.get("text")) {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().filter_map(|part| part.as_str().or_else(|| part["text"].as_str()));
            texts.collect::<Vec<_>>().join("\n")
        }
        Some(Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_)) | None => String::new(),
    }
}

/// When the message was written, in milliseconds since 1970. Reads RFC 3339, or a number of seconds or
/// milliseconds.
fn time(message: &Map<String, Value>) -> Option<i64> {
    let at = ["timestamp", "created_at", "createdAt", "ts"].iter().find_map(|key| message.get(*key))?;
    match at {
        Value::String(text) => {
            chrono::DateTime::parse_from_rfc3339(text).ok().map(|time| time.timestamp_millis())
        }
        Value::Number(number) => {
            let number = number.as_f64().filter(|number| (0.0..1e14).contains(number))?;
            // A time in seconds reaches this number in the year 5138, so a larger one is in milliseconds.
            Some(if number < 1e11 { number * 1000.0 } else { number } as i64)
        }
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(entry: Value) -> Result<Chat, String> {
        read(entry.to_string().as_bytes())
    }

    #[test]
    fn what_was_said_becomes_seeds_in_order_and_the_rest_is_counted() {
        let chat = of(json!({
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "Hi\u{0}", "timestamp": 1_700_000_000},
                {"role": "assistant", "content": null, "tool_calls": [{"id": "c"}]},
                {"role": "tool", "content": "42"},
                {"role": "assistant", "content": [{"type": "text", "text": "It is"}, {"type": "image"}, "42."],
                 "createdAt": "2023-11-14T22:13:21Z"},
                {"role": "developer", "content": "x"},
                {"role": "user", "text": "Thanks", "ts": 1_700_000_002_000_i64},
            ],
            "state": {"name": "Ann\u{0}", "n": 1},
        }))
        .unwrap();
        let said: Vec<(Role, &str)> =
            chat.seeds.iter().map(|seed| (seed.role, seed.content.as_str())).collect();
        assert_eq!(
            said,
            [(Role::User, "Hi\u{fffd}"), (Role::Assistant, "It is\n42."), (Role::User, "Thanks")]
        );
        assert!(chat.seeds.iter().all(|seed| !seed.is_new));
        assert_eq!(chat.said_at, [Some(1_700_000_000_000), Some(1_700_000_001_000), Some(1_700_000_002_000)]);
        assert_eq!(chat.left_out, 4);
        assert_eq!(Value::Object(chat.state), json!({"name": "Ann\u{fffd}", "n": 1}));
    }

    #[test]
    fn an_entry_that_is_none_is_refused_without_being_quoted() {
        for (entry, reason) in [
            (b"secret\xff".to_vec(), "no JSON"),
            (b"[]".to_vec(), "no JSON object"),
            (json!({"messages": {"a": "secret"}}).to_string().into_bytes(), "no list"),
            (json!({"state": "secret"}).to_string().into_bytes(), "no object"),
            (json!({"messages": ["secret"]}).to_string().into_bytes(), "message 0 is no object"),
            (json!({"messages": [{"content": "secret"}]}).to_string().into_bytes(), "no `role`"),
            ([b"[".repeat(100_000)].concat(), "no JSON"),
        ] {
            let error = read(&entry).unwrap_err();
            assert!(error.contains(reason) && !error.contains("secret"), "{error}");
        }
        let many = json!({"messages": vec![json!({"role": "user", "content": "x"}); MESSAGES + 1]});
        assert!(of(many).unwrap_err().contains("20001 messages"));
    }

    #[test]
    fn an_empty_entry_is_an_empty_chat() {
        let chat = of(json!({})).unwrap();
        assert_eq!((chat.seeds.len(), chat.left_out, chat.state.len()), (0, 0, 0));
    }

    #[test]
    fn a_time_that_is_none_is_left_out() {
        for at in [json!("yesterday"), json!(-1), json!(1e300), json!({}), json!(null)] {
            let chat = of(json!({"messages": [{"role": "user", "content": "x", "timestamp": at}]})).unwrap();
            assert_eq!(chat.said_at, [None]);
        }
    }
}
