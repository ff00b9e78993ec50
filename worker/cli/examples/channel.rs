//! A worker with one more channel, and a trigger whose conversations are answered through it.
//!
//! `cargo run -p wakeful --example channel -- dev` starts it with a Postgres of its own. Then, with the address
//! that it prints: `curl ADDRESS/notes -d 'Hello'`. The answers are appended to the file `notes.txt`, as JSON.

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use serde_json::{Value, json};
use std::io::Write;
use wakeful::channel::{Channel, Found, Outbound, SendError};
use wakeful::trigger::{Incoming, Refused};
use wakeful::{App, Process};

const FILE: &str = "notes.txt";

/// Writes each message to a file, after its delivery id.
struct Notes;

#[async_trait::async_trait]
impl Channel for Notes {
    fn name(&self) -> &str {
        "notes"
    }

    // Writing a message twice is visible, so Wakeful must not repeat a delivery by itself.
    fn is_idempotent(&self) -> bool {
        false
    }

    async fn send(&self, message: &Outbound<'_>) -> Result<Value, SendError> {
        let mut file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(FILE)
            .map_err(|error| SendError::Later(error.to_string()))?;
        // From here on the message may be in the file, whatever the error says.
        writeln!(file, "{} {}", message.delivery_id, message.content)
            .map_err(|error| SendError::Unknown(error.to_string()))?;
        Ok(json!({"file": FILE}))
    }

    // After a crash, Wakeful asks here first.
    async fn find(&self, delivery_id: &str) -> Result<Found, SendError> {
        let Ok(text) = std::fs::read_to_string(FILE) else { return Ok(Found::NotSent) };
        let found = text.lines().any(|line| line.split(' ').next() == Some(delivery_id));
        Ok(if found { Found::Sent { receipt: json!({"file": FILE}) } } else { Found::NotSent })
    }
}

/// The trigger. Nothing guards its routes: a real one verifies the request first.
fn routes(process: Process) -> Router {
    let accept = move |text: String| async move {
        let message = Incoming::new("notes:1", text).reply_by("notes", json!({}));
        match process.accept(message).await {
            // 202 only now: the message is committed.
            Ok(accepted) => (StatusCode::ACCEPTED, accepted.session_id),
            Err(error @ Refused::Full) => (StatusCode::TOO_MANY_REQUESTS, error.to_string()),
            Err(error) => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()),
        }
    };
    Router::new().route("/notes", post(accept))
}

fn main() -> std::process::ExitCode {
    App::new().channel(Notes).routes(routes).main()
}
