//! Parses an update from Telegram.

use super::super::without_nul;
use serde_json::{Value, json};

/// A message from a person.
#[derive(Debug, PartialEq)]
pub(super) struct PersonMessage {
    /// Negative for a group.
    pub chat: i64,
    /// The message's number in its chat.
    pub number: i64,
    /// The forum topic that the message is in.
    topic: Option<i64>,
    pub user: String,
    pub text: String,
}

impl PersonMessage {
    /// A chat is a conversation. In a chat with topics, each topic is one.
    pub fn conversation_id(&self, bot: &str) -> String {
        let chat = format!("telegram/{bot}/{}", self.chat);
        self.topic.map_or(chat.clone(), |topic| format!("{chat}/{topic}"))
    }

    /// `{"chat_id", "message_thread_id"}`.
    pub fn reply_to(&self) -> Value {
        let mut to = json!({"chat_id": self.chat});
        if let Some(topic) = self.topic {
            to["message_thread_id"] = json!(topic);
        }
        to
    }
}

/// Attachments. A line in the text names them; they are not downloaded.
const FILES: [&str; 8] =
    ["photo", "document", "audio", "video", "voice", "video_note", "animation", "sticker"];

/// Parses an update whose secret was verified.
///
/// # Errors
/// The reason why the message is not for the agent.
pub(super) fn read(update: &Value) -> Result<PersonMessage, &'static str> {
    if !update["update_id"].is_i64() {
        return Err("it is not an update");
    }
    // Edits, button presses and channel posts are in other fields.
    let message = &update["message"];
    if !message.is_object() {
        return Err("it is not a new message");
    }
    if message["from"]["is_bot"] == true || message["via_bot"].is_object() {
        return Err("a bot sent it");
    }
    let user = message["from"]["id"].as_i64().ok_or("it has no sender")?;
    let chat = message["chat"]["id"].as_i64().ok_or("it has no chat")?;
    let number = message["message_id"].as_i64().ok_or("it has no number")?;
    // In an ordinary group, `message_thread_id` names the message that this one answers.
    let topic =
        (message["is_topic_message"] == true).then(|| message["message_thread_id"].as_i64()).flatten();
    let text = text(message);
    if text.is_empty() {
        return Err("it has no text and no file");
    }
    Ok(PersonMessage { chat, number, topic, user: user.to_string(), text })
}

fn text(message: &Value) -> String {
    let written = message["text"].as_str().or_else(|| message["caption"].as_str()).unwrap_or_default();
    let mut lines = vec![written.to_owned()];
    for kind in FILES.into_iter().filter(|kind| !message[*kind].is_null()) {
        let file = &message[kind];
        let name = file["file_name"].as_str().unwrap_or_default();
        let name: String = name.chars().filter(|c| !c.is_control()).take(200).collect();
        let name = if name.is_empty() { String::new() } else { format!(" {name}") };
        lines.push(format!("[{kind}{name}; it was not fetched]"));
    }
    without_nul(lines.join("\n").trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn update(more: Value) -> Value {
        let mut message = json!({"message_id": 7, "from": {"id": 5, "is_bot": false}, "chat": {"id": -42},
            "text": "hi"});
        for (key, value) in more.as_object().unwrap() {
            message[key] = value.clone();
        }
        json!({"update_id": 1, "message": message})
    }

    #[test]
    fn a_chat_is_a_conversation_and_so_is_a_topic() {
        let message = read(&update(json!({"message_thread_id": 3}))).unwrap();
        assert_eq!(message.conversation_id("99"), "telegram/99/-42");
        assert_eq!(message.reply_to(), json!({"chat_id": -42}));
        let message = read(&update(json!({"message_thread_id": 3, "is_topic_message": true}))).unwrap();
        assert_eq!(message.conversation_id("99"), "telegram/99/-42/3");
        assert_eq!(message.reply_to(), json!({"chat_id": -42, "message_thread_id": 3}));
    }

    #[test]
    fn what_is_no_persons_new_message_is_not_taken() {
        let message = update(json!({}))["message"].clone();
        for update in [
            json!({"update_id": 1, "edited_message": message}),
            json!({"update_id": 1, "channel_post": message}),
            json!({"update_id": 1, "callback_query": {"message": message}}),
            json!({"message": message}),
            json!([]),
            update(json!({"from": {"id": 5, "is_bot": true}})),
            update(json!({"from": null})),
            update(json!({"text": " "})),
            update(json!({"message_id": "x"})),
        ] {
            assert!(read(&update).is_err(), "{update}");
        }
    }

    #[test]
    fn files_are_told_of_and_not_fetched() {
        let more = json!({"text": null, "caption": "look", "document": {"file_name": "a.pdf"}});
        assert_eq!(read(&update(more)).unwrap().text, "look\n[document a.pdf; it was not fetched]");
    }
}
