//! A worker with one more provider of models.
//!
//! `WAKEFUL_AGENTS__DEFAULT__MODEL=echo/loud cargo run -p wakeful --example provider -- dev` starts it with a Postgres of
//! its own; the default agent then answers with what it was told.

use std::sync::Arc;
use wakeful::App;
use wakeful::model::{Block, Context, Deltas, Fault, FinishReason, Model, Reply, Request, Role, Usage};

/// Answers with the user's last message. A real provider sends the request over HTTP and streams the answer.
struct Echo {
    loud: bool,
}

#[async_trait::async_trait]
impl Model for Echo {
    // Pure: after a crash, a worker builds the same bytes from the same context.
    fn request(&self, context: &Context) -> Request {
        let last = context.messages.iter().rev().find(|message| message.role == Role::User);
        let texts = last.into_iter().flat_map(|message| &message.content).filter_map(|block| match block {
            Block::Text { text } => Some(text.as_str()),
            _ => None,
        });
        Request::new(texts.collect::<Vec<_>>().join("\n").into_bytes())
    }

    async fn call(&self, request: &Request, deltas: &mut dyn Deltas) -> Result<Reply, Fault> {
        let said = String::from_utf8_lossy(&request.body);
        let text = if self.loud { said.to_uppercase() } else { said.into_owned() };
        if text.trim().is_empty() {
            // The fault decides what happens next: this one is tried again.
            return Err(Fault::EmptyReply);
        }
        for word in text.split_inclusive(' ') {
            deltas.text(word);
        }
        Ok(Reply::new(vec![Block::Text { text }], FinishReason::Stop, Usage::default()))
    }
}

fn main() -> std::process::ExitCode {
    let factory = |name: &str| -> Result<Arc<dyn Model>, Fault> {
        match name {
            "loud" | "quiet" => Ok(Arc::new(Echo { loud: name == "loud" })),
            _ => Err(Fault::NotConfigured { message: format!("echo has no model {name:?}") }),
        }
    };
    App::new().provider("echo", factory).main()
}
