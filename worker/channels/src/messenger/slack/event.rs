//! Parses requests of Slack's Events API.

use super::super::without_nul;
use super::text::readable;
use serde_json::{Value, json};

/// One request of the Events API.
#[derive(Debug, PartialEq)]
pub(super) enum Event {
    /// Slack verifies that this address is ours.
    Challenge(String),
    Message(PersonMessage),
    /// The event is ignored, for this reason.
    NotForUs(&'static str),
}

/// A message from a person.
#[derive(Debug, PartialEq)]
pub(super) struct PersonMessage {
    pub team: String,
    pub channel: String,
    pub user: String,
    /// The message's id within its channel.
    pub ts: String,
    /// The id of the thread's first message, if the message is in a thread.
    thread_ts: Option<String>,
    is_direct: bool,
    /// The message mentions the agent, or is a direct message to it.
    pub addressed: bool,
    pub text: String,
}

impl PersonMessage {
    /// A thread is a conversation, and so is a direct-message channel.
    pub fn conversation_id(&self) -> String {
        let PersonMessage { team, channel, .. } = self;
        if self.is_direct {
            format!("slack/{team}/{channel}")
        } else {
            format!("slack/{team}/{channel}/{}", self.thread())
        }
    }

    /// `{"channel", "thread_ts"}`; direct messages have no `thread_ts`.
    pub fn reply_to(&self) -> Value {
        if self.is_direct {
            json!({"channel": self.channel})
        } else {
            json!({"channel": self.channel, "thread_ts": self.thread()})
        }
    }

    fn thread(&self) -> &str {
        self.thread_ts.as_deref().unwrap_or(&self.ts)
    }
}

/// Parses a request whose signature was verified.
pub(super) fn read(body: &Value) -> Event {
    match body["type"].as_str() {
        Some("url_verification") => match body["challenge"].as_str() {
            Some(challenge) => Event::Challenge(challenge.to_owned()),
            None => Event::NotForUs("the challenge is missing"),
        },
        Some("event_callback") => message_of(body).map_or_else(Event::NotForUs, Event::Message),
        Some(_) | None => Event::NotForUs("it is not an event"),
    }
}

fn message_of(body: &Value) -> Result<PersonMessage, &'static str> {
    let event = &body["event"];
    let is_mention = match event["type"].as_str() {
        Some("app_mention") => true,
        Some("message") => false,
        Some(_) | None => return Err("it is not a message"),
    };
    match event["subtype"].as_str() {
        None | Some("file_share" | "thread_broadcast" | "me_message") => {}
        // Edits, deletions, joins and messages from bots.
        Some(_) => return Err("it is an edit, a deletion or another service message"),
    }
    if event["hidden"] == true {
        return Err("it is hidden");
    }
    // The agent's own messages arrive as events too, from these users.
    let bots: Vec<&str> = body["authorizations"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|authorization| authorization["user_id"].as_str())
        .collect();
    let user = id(&event["user"]).ok_or("it has no sender")?;
    if event["bot_id"].is_string() || event["bot_profile"].is_object() || bots.contains(&user.as_str()) {
        return Err("a bot sent it");
    }
    let team = id(&body["team_id"]).or_else(|| id(&event["team"])).ok_or("it has no team")?;
    let channel = id(&event["channel"]).ok_or("it has no channel")?;
    let ts = id(&event["ts"]).ok_or("it has no ts")?;
    let written = event["text"].as_str().unwrap_or_default();
    let mentions_us = bots.iter().any(|bot| mentions(written, bot));
    let is_direct = event["channel_type"] == "im" || channel.starts_with('D');
    let text = text(written, &event["files"]);
    if text.is_empty() {
        return Err("it is empty");
    }
    Ok(PersonMessage {
        team,
        user,
        ts,
        thread_ts: id(&event["thread_ts"]),
        is_direct,
        addressed: is_mention || is_direct || mentions_us,
        text,
        channel,
    })
}

/// An id from Slack that is safe inside our own ids.
fn id(value: &Value) -> Option<String> {
    let id = value.as_str()?;
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-' || c == '_';
    (!id.is_empty() && id.len() <= 40 && id.chars().all(plain)).then(|| id.to_owned())
}

fn mentions(text: &str, user: &str) -> bool {
    text.contains(&format!("<@{user}>")) || text.contains(&format!("<@{user}|"))
}

/// The message's text, and a line for each attached file. Files are not downloaded.
fn text(written: &str, files: &Value) -> String {
    let mut lines = vec![readable(written)];
    for file in files.as_array().into_iter().flatten() {
        let name = file["name"].as_str().or_else(|| file["title"].as_str()).unwrap_or("without a name");
        let kind = file["mimetype"].as_str().unwrap_or("unknown type");
        let size = file["size"].as_u64().map(|bytes| format!(", {bytes} bytes")).unwrap_or_default();
        let name: String = name.chars().filter(|c| !c.is_control()).take(200).collect();
        lines.push(format!("[file: {name}, {kind}{size}; it was not fetched]"));
    }
    without_nul(lines.join("\n").trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn callback(event: Value) -> Value {
        json!({"type": "event_callback", "team_id": "T1", "event_id": "Ev1", "event": event,
            "authorizations": [{"team_id": "T1", "user_id": "UBOT", "is_bot": true}]})
    }

    fn message(more: Value) -> Value {
        let mut event =
            json!({"type": "message", "channel": "C1", "user": "U1", "text": "hi", "ts": "1.000001"});
        for (key, value) in more.as_object().unwrap() {
            event[key] = value.clone();
        }
        event
    }

    fn accepted(more: Value) -> PersonMessage {
        match read(&callback(message(more))) {
            Event::Message(message) => message,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_thread_is_a_conversation_and_a_direct_one_has_none() {
        let root = accepted(json!({}));
        assert_eq!(root.conversation_id(), "slack/T1/C1/1.000001");
        assert_eq!(root.reply_to(), json!({"channel": "C1", "thread_ts": "1.000001"}));
        assert!(!root.addressed);
        let reply = accepted(json!({"ts": "2.000002", "thread_ts": "1.000001"}));
        assert_eq!(reply.conversation_id(), root.conversation_id());
        let direct = accepted(json!({"channel": "D1", "channel_type": "im", "thread_ts": "1.0"}));
        assert_eq!((direct.conversation_id().as_str(), direct.addressed), ("slack/T1/D1", true));
        assert_eq!(direct.reply_to(), json!({"channel": "D1"}));
    }

    #[test]
    fn whoever_mentions_the_agent_speaks_to_it() {
        assert!(accepted(json!({"text": "<@UBOT> hi"})).addressed);
        assert!(accepted(json!({"text": "hi <@UBOT|agent>"})).addressed);
        assert!(accepted(json!({"type": "app_mention"})).addressed);
        assert!(!accepted(json!({"text": "<@UBOTTOM> hi"})).addressed);
    }

    #[test]
    fn what_is_no_persons_message_is_not_taken() {
        for more in [
            json!({"bot_id": "B1"}),
            json!({"user": "UBOT"}),
            json!({"subtype": "bot_message"}),
            json!({"subtype": "message_changed"}),
            json!({"subtype": "message_deleted"}),
            json!({"subtype": "channel_join"}),
            json!({"hidden": true}),
            json!({"text": " "}),
            json!({"user": null}),
            json!({"channel": "C1/../x"}),
            json!({"ts": 5}),
            json!({"type": "reaction_added"}),
            // Two bots would answer each other endlessly.
            json!({"type": "app_mention", "bot_id": "B2"}),
        ] {
            let read = read(&callback(message(more.clone())));
            assert!(matches!(read, Event::NotForUs(_)), "{more}: {read:?}");
        }
        for body in
            [json!(null), json!([]), json!({"type": "event_callback"}), json!({"type": "url_verification"})]
        {
            assert!(matches!(read(&body), Event::NotForUs(_)), "{body}");
        }
    }

    #[test]
    fn files_are_told_of_and_not_fetched() {
        let files = json!([{"name": "a\nb.pdf", "mimetype": "application/pdf", "size": 7}]);
        let message = accepted(json!({"subtype": "file_share", "text": "look", "files": files}));
        assert_eq!(message.text, "look\n[file: ab.pdf, application/pdf, 7 bytes; it was not fetched]");
    }
}
