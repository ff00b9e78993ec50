//! What a person reads of an effect before they act on it.

use crate::{Result, Store};
use serde_json::Value;
use std::fmt::Write as _;

/// The longest beginning of a message's text, in characters.
const BEGINNING: usize = 500;

impl Store {
    /// A call with its arguments, or a message with its recipients and its beginning. `None`: the effect does not exist.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn effect_in_words(&self, session_id: &str, effect_id: &str) -> Result<Option<String>> {
        let calls = self.calls(session_id).await?;
        if let Some(call) = calls.into_iter().find(|call| call.call_id == effect_id) {
            return Ok(Some(format!("{} {}", call.name, call.arguments.unwrap_or_default())));
        }
        let row = sqlx::query!(
            r#"select d.channel, d.last_error, d.content::text as "content!", c.data_key
            from deliveries d
            join conversation_sessions c using (session_id)
            where d.session_id = $1 and d.delivery_id = $2"#,
            session_id,
            effect_id
        )
        .fetch_optional(&self.pool)
        .await?;
        let Some(row) = row else { return Ok(None) };
        let seal = self.vault.seal(row.data_key.as_deref()).await?;
        let content = if seal.is_on() { seal.open_json(row.content)? } else { row.content };
        let content: Value = serde_json::from_str(&content).unwrap_or_default();
        let error = seal.open_some(row.last_error)?;
        Ok(Some(message(&row.channel, &content, error.as_deref())))
    }
}

/// A message in words.
fn message(channel: &str, content: &Value, error: Option<&str>) -> String {
    let mut said = format!("a message by {channel}");
    if let Some(to) = recipients(&content["to"]) {
        let _ = write!(said, " to {to}");
    }
    if let Some(error) = error {
        let _ = write!(said, ": {error}");
    }
    if let Some(subject) = content["subject"].as_str().or_else(|| content["to"]["subject"].as_str()) {
        let _ = write!(said, "\nSubject: {subject}");
    }
    let text = ["text", "body"].into_iter().find_map(|name| content[name].as_str());
    if let Some(text) = text {
        let beginning: String = text.chars().take(BEGINNING).collect();
        let more = if beginning.len() < text.len() { "…" } else { "" };
        let _ = write!(said, "\n{beginning}{more}");
    }
    said
}

/// Addresses of a mail, or the place of a messenger.
fn recipients(to: &Value) -> Option<String> {
    let addresses = |list: &Value| {
        let list = list.as_array()?.iter().filter_map(Value::as_str).collect::<Vec<_>>();
        (!list.is_empty()).then(|| list.join(", "))
    };
    match to {
        Value::Object(fields) => {
            let named = ["to", "cc", "bcc"].into_iter().filter_map(|name| addresses(&to[name]));
            let named: Vec<String> = named.collect();
            if !named.is_empty() {
                return Some(named.join(", "));
            }
            let places = fields.iter().filter(|(_, value)| value.is_string() || value.is_number());
            let places: Vec<String> = places.map(|(name, value)| format!("{name} {value}")).collect();
            (!places.is_empty()).then(|| places.join(", "))
        }
        Value::String(one) => Some(one.clone()),
        list => addresses(list),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_message_says_whom_it_is_for_and_how_it_begins() {
        let mail = json!({"type": "reply", "to": {"to": ["ann@example.org"], "cc": ["bob@example.org"], "subject": "Your order"},
            "text": "It is ready."});
        assert_eq!(
            message("email", &mail, Some("refused")),
            "a message by email to ann@example.org, bob@example.org: refused\nSubject: Your order\nIt is ready."
        );
        let composed = json!({"to": ["ann@example.org"], "subject": "S", "body": "x".repeat(600)});
        let said = message("email", &composed, None);
        assert!(said.starts_with("a message by email to ann@example.org\nSubject: S\nxxx"), "{said}");
        assert!(said.ends_with("x…") && said.chars().count() < 600, "{said}");
        let chat = json!({"to": {"channel": "C1"}, "text": "Hello."});
        assert_eq!(message("slack", &chat, None), "a message by slack to channel \"C1\"\nHello.");
    }
}
