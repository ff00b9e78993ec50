//! A program's own channel, which replaces the built-in mail channel.

use crate::folder::Changes;
use async_trait::async_trait;
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;
use wakeful::channel::{Channel, Found, Outbound, SendError};

/// Sends by appending `KEY SUBJECT` to a file. An environment variable selects how it treats keys. A second
/// file selects its answer: `later WHY`, `refused WHY`, `unknown WHY` (the message was sent all the same), or
/// `receipt TEXT`, or `held BY`: the message is out, and the answer comes when the file says something else.
pub struct Post {
    behaviour: Behaviour,
    sent: PathBuf,
    says: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Behaviour {
    /// The receiver treats two messages with the same key as one.
    Idempotent,
    /// The receiver ignores keys, and the channel cannot tell whether a message was sent.
    Guarded,
    /// The receiver ignores keys, but the channel can look up whether a message was sent.
    Askable,
}

impl Post {
    /// The channel that `FIXTURE_POST` (`idempotent`, `guarded` or `askable`) asks for.
    pub fn from_env() -> Option<Post> {
        let behaviour = match std::env::var("FIXTURE_POST").ok()?.as_str() {
            "idempotent" => Behaviour::Idempotent,
            "askable" => Behaviour::Askable,
            _ => Behaviour::Guarded,
        };
        let path = |name| std::env::var_os(name).map(PathBuf::from).unwrap_or_default();
        Some(Post { behaviour, sent: path("FIXTURE_SENT"), says: path("FIXTURE_POST_SAYS") })
    }
}

#[async_trait]
impl Channel for Post {
    fn name(&self) -> &str {
        "email"
    }

    fn is_idempotent(&self) -> bool {
        self.behaviour == Behaviour::Idempotent
    }

    async fn send(&self, message: &Outbound<'_>) -> Result<Value, SendError> {
        let says = std::fs::read_to_string(&self.says).unwrap_or_default();
        let (answer, why) = says.split_once(' ').unwrap_or_default();
        match answer {
            "later" => return Err(SendError::Later(why.to_owned())),
            "refused" => return Err(SendError::Refused(why.to_owned())),
            _ => {}
        }
        let subject = message.content["subject"].as_str().unwrap_or_default();
        let written = std::fs::OpenOptions::new().create(true).append(true).open(&self.sent);
        let written = written.and_then(|mut file| {
            // Write the line in one call. Otherwise the lines of several deliveries could mix.
            file.write_all(format!("{} {subject}\n", message.delivery_id).as_bytes())?;
            file.sync_all()
        });
        written.map_err(|error| SendError::Unknown(error.to_string()))?;
        if answer == "held" {
            let is_held = || std::fs::read_to_string(&self.says).is_ok_and(|says| says.starts_with("held "));
            Changes::of(&self.says).until(|| !is_held()).await;
        }
        match answer {
            "unknown" => Err(SendError::Unknown(why.to_owned())),
            "receipt" => Ok(json!({ "said": why })),
            _ => Ok(json!({ "key": message.delivery_id })),
        }
    }

    async fn find(&self, delivery_id: &str) -> Result<Found, SendError> {
        if self.behaviour != Behaviour::Askable {
            return Ok(Found::Unknown);
        }
        let sent = std::fs::read_to_string(&self.sent).unwrap_or_default();
        let found = sent.lines().any(|line| line.split(' ').next() == Some(delivery_id));
        Ok(if found { Found::Sent { receipt: json!({ "found": delivery_id }) } } else { Found::NotSent })
    }
}
