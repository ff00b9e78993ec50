//! Requests that grow: a session's next request begins with the bytes of its previous one.
//!
//! A [`Rendering`] keeps the bytes of the messages that no later message changes, and the state of their hash. The
//! next request renders and hashes only what came since. It has the same bytes as a request that is rendered from the
//! start, because the same code renders both, one message after the other.

use super::{Repairs, Request, repair};
use crate::agent::{ToolDefinition, Tools};
use crate::context::{Context, Message};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

/// A provider's protocol, with the settings of one model.
pub trait Protocol: Send + Sync {
    /// Begins the messages of a request whose system prompt is `system`.
    fn transcript(&self, system: &str) -> Box<dyn Transcript>;

    /// Returns the body without its messages. `system` is [`Transcript::system`].
    fn frame(&self, system: &str, tools: &[ToolDefinition]) -> Frame;
}

/// The messages of a request, in the shape of a protocol. Each one is given out as JSON.
pub trait Transcript: Send {
    /// Adds a message. Gives out the messages that no later message changes.
    fn add(&mut self, message: &Message, settled: &mut Vec<Vec<u8>>);

    /// Returns what follows the settled messages in a request that ends here. Changes nothing.
    fn end(&self, prefill: Option<&str>) -> End;

    /// Returns the system prompt, to which the first messages may have added.
    fn system(&self) -> &str;
}

/// The end of a request's messages.
#[derive(Clone, Debug, Default)]
pub struct End {
    /// The messages that a later message may still change.
    pub messages: Vec<Vec<u8>>,
    /// What was changed on all messages of the request.
    pub repairs: Repairs,
    /// The text that the reply continues, if the protocol takes it.
    pub prefill: Option<String>,
}

/// A body without its messages.
#[derive(Clone, Debug, Default)]
pub struct Frame {
    /// The bytes up to the first message. They must not depend on the system prompt's additions.
    pub before: Vec<u8>,
    /// The bytes after the last message.
    pub after: Vec<u8>,
    /// What was changed on the tools.
    pub repairs: Repairs,
}

impl Frame {
    /// Frames the list `messages` by the other `fields` of the body, all sorted by name.
    pub(super) fn of(mut fields: Map<String, Value>, repairs: Repairs) -> Frame {
        fields.remove("messages");
        let mut fields: Vec<(String, Value)> = fields.into_iter().collect();
        fields.sort_by(|a, b| a.0.cmp(&b.0));
        let (mut before, mut after) = (String::from("{"), String::from("]"));
        for (name, value) in fields {
            let field = format!("{}:{}", Value::String(name.clone()), repair::sorted(value));
            if name.as_str() < "messages" {
                before.push_str(&field);
                before.push(',');
            } else {
                after.push(',');
                after.push_str(&field);
            }
        }
        before.push_str("\"messages\":[");
        after.push('}');
        Frame { before: before.into_bytes(), after: after.into_bytes(), repairs }
    }
}

/// The bytes of a session's requests to one model, as far as no later message changes them.
pub struct Rendering {
    system: String,
    tools: Tools,
    /// The messages that `transcript` has.
    added: Vec<Message>,
    /// Of `added`.
    said_bytes: usize,
    transcript: Box<dyn Transcript>,
    /// [`Frame::before`] and the settled messages.
    bytes: Vec<u8>,
    /// Of `bytes`.
    sha256: Sha256,
    /// Whether `bytes` has a message.
    has_message: bool,
    frame: Frame,
    /// The system prompt of `frame`.
    framed: String,
}

/// A request that is not joined to one body yet.
pub struct Rendered<'a> {
    beginning: &'a Rendering,
    end: Vec<u8>,
    /// What the projection changed.
    pub repairs: Repairs,
    /// As [`Request::prefill`].
    pub prefill: Option<String>,
}

impl Rendering {
    /// Renders `context` and keeps what its successor can use. Goes on from `kept`, if that is the beginning of
    /// `context`; otherwise it renders `context` from the start. `kept` must come from the same `protocol`.
    pub fn of(protocol: &dyn Protocol, context: &Context, kept: Option<Rendering>) -> Rendering {
        let mut rendering = kept
            .and_then(|kept| kept.if_beginning_of(context))
            .unwrap_or_else(|| Rendering::new(protocol, &context.system, &context.tools));
        rendering.add(&context.messages[rendering.added.len()..]);
        if rendering.framed != rendering.transcript.system() {
            rendering.framed = rendering.transcript.system().to_owned();
            rendering.frame = protocol.frame(&rendering.framed, &rendering.tools);
        }
        rendering
    }

    /// Returns the request for the context that was rendered last, with this prefill.
    pub fn rendered(&self, prefill: Option<&str>) -> Rendered<'_> {
        let End { messages, mut repairs, prefill } = self.transcript.end(prefill);
        let bytes: usize = messages.iter().map(|message| message.len() + 1).sum();
        let mut end = Vec::with_capacity(bytes + self.frame.after.len());
        let mut has_message = self.has_message;
        for message in &messages {
            append(&mut end, message, &mut has_message);
        }
        end.extend_from_slice(&self.frame.after);
        repairs.add(&self.frame.repairs);
        Rendered { beginning: self, end, repairs, prefill }
    }

    /// About how much memory it takes, with its messages: it shares them with the session, but may have them for longer.
    pub fn bytes(&self) -> usize {
        let frame = self.frame.before.len() + self.frame.after.len();
        size_of::<Rendering>()
            + self.bytes.capacity()
            + self.system.len()
            + self.framed.len()
            + frame
            + self.said_bytes
            + self.added.capacity() * size_of::<Message>()
    }

    fn new(protocol: &dyn Protocol, system: &str, tools: &Tools) -> Rendering {
        let frame = protocol.frame(system, tools);
        Rendering {
            system: system.to_owned(),
            tools: tools.clone(),
            added: Vec::new(),
            said_bytes: 0,
            transcript: protocol.transcript(system),
            bytes: frame.before.clone(),
            sha256: Sha256::new_with_prefix(&frame.before),
            has_message: false,
            frame,
            framed: system.to_owned(),
        }
    }

    /// Returns itself if `context` has the same messages and perhaps more.
    fn if_beginning_of(mut self, context: &Context) -> Option<Rendering> {
        if self.added.len() > context.messages.len()
            || self.system != context.system
            || self.tools != context.tools
        {
            return None;
        }
        for (kept, message) in self.added.iter_mut().zip(&context.messages) {
            if kept.role != message.role {
                return None;
            }
            if !kept.content.is_shared_with(&message.content) {
                if kept.content != message.content {
                    return None;
                }
                // The session was read again. From now on share its copy.
                kept.content = message.content.clone();
            }
        }
        Some(self)
    }

    fn add(&mut self, messages: &[Message]) {
        let mut settled = Vec::with_capacity(messages.len());
        self.added.reserve(messages.len());
        for message in messages {
            self.transcript.add(message, &mut settled);
            self.said_bytes += message.bytes();
            self.added.push(message.clone());
        }
        let from = self.bytes.len();
        self.bytes.reserve(settled.iter().map(|message| message.len() + 1).sum());
        for message in settled {
            append(&mut self.bytes, &message, &mut self.has_message);
        }
        self.sha256.update(&self.bytes[from..]);
    }
}

fn append(list: &mut Vec<u8>, message: &[u8], has_message: &mut bool) {
    if std::mem::replace(has_message, true) {
        list.push(b',');
    }
    list.extend_from_slice(message);
}

impl Rendered<'_> {
    /// SHA-256 of the body in lower-case hex.
    pub fn sha256(&self) -> String {
        hex::encode(self.beginning.sha256.clone().chain_update(&self.end).finalize())
    }

    /// Joins the body.
    pub fn request(self) -> Request {
        let sha256 = self.sha256();
        let body = [self.beginning.bytes.as_slice(), &self.end].concat();
        Request { body, repairs: self.repairs, prefill: self.prefill, sha256: Some(sha256) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example;
    use crate::record::Block;
    use crate::wire::laws::{WIRES, any_context};
    use crate::wire::openai;
    use proptest::prelude::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn whole(context: &Context, rendering: &Rendering) -> Request {
        rendering.rendered(context.prefill.as_deref()).request()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_request_that_goes_on_is_the_one_that_was_rendered_from_the_start(
            context in any_context(),
            other in any_context(),
            cuts in proptest::collection::vec(0..16_usize, 1..5),
            changed in proptest::option::of(0..16_usize),
        ) {
            for wire in &WIRES {
                let protocol = (wire.protocol)();
                let mut kept = None;
                for cut in &cuts {
                    // A cut may also be shorter than the one before, as if a message was taken back.
                    let messages = context.messages[..(*cut).min(context.messages.len())].to_vec();
                    let shorter = Context { messages, ..context.clone() };
                    let rendering = Rendering::of(protocol.as_ref(), &shorter, kept.take());
                    let (request, expected) = (whole(&shorter, &rendering), (wire.project)(&shorter));
                    prop_assert_eq!(&request, &expected);
                    prop_assert_eq!(request.sha256(), Request::new(request.body.clone()).sha256());
                    kept = Some(rendering);
                }
                // Equal messages that were made apart, and perhaps one that differs.
                let mut apart = context.clone();
                for message in &mut apart.messages {
                    message.content = message.content.to_vec().into();
                }
                if let (Some(at), Some(message)) = (changed, other.messages.first())
                    && let Some(one) = apart.messages.get_mut(at)
                {
                    *one = message.clone();
                }
                let rendering = Rendering::of(protocol.as_ref(), &apart, kept.take());
                prop_assert_eq!(whole(&apart, &rendering), (wire.project)(&apart));
                let rendering = Rendering::of(protocol.as_ref(), &other, Some(rendering));
                prop_assert_eq!(whole(&other, &rendering), (wire.project)(&other));
            }
        }
    }

    /// Counts the messages that are rendered.
    struct Counting(openai::Options, Arc<AtomicUsize>);

    struct CountingTranscript(Box<dyn Transcript>, Arc<AtomicUsize>);

    impl Protocol for Counting {
        fn transcript(&self, system: &str) -> Box<dyn Transcript> {
            Box::new(CountingTranscript(self.0.transcript(system), Arc::clone(&self.1)))
        }

        fn frame(&self, system: &str, tools: &[ToolDefinition]) -> Frame {
            self.0.frame(system, tools)
        }
    }

    impl Transcript for CountingTranscript {
        fn add(&mut self, message: &Message, settled: &mut Vec<Vec<u8>>) {
            self.1.fetch_add(1, Ordering::Relaxed);
            self.0.add(message, settled);
        }

        fn end(&self, prefill: Option<&str>) -> End {
            let end = self.0.end(prefill);
            self.1.fetch_add(end.messages.len(), Ordering::Relaxed);
            end
        }

        fn system(&self) -> &str {
            self.0.system()
        }
    }

    #[test]
    fn each_message_of_a_growing_session_is_rendered_once() {
        const STEPS: i64 = 200;
        let count = Arc::new(AtomicUsize::new(0));
        let protocol = Counting(openai::Options::new("m", 7), Arc::clone(&count));
        let mut session = example::session();
        let mut kept = None;
        for step in 0..STEPS {
            let number = session.last_message_number + 1;
            let call_id = format!("call_{step}");
            let call = Block::ToolCall(example::tool_call(&call_id));
            session.records.push(example::assistant(number, example::RUN, vec![call]));
            session.records.push(example::result(number + 1, &call_id));
            session.last_message_number = number + 1;
            let context = crate::context::full(&session, Vec::new());
            let rendering = Rendering::of(&protocol, &context, kept.take());
            assert_eq!(whole(&context, &rendering), openai::project(&context, &protocol.0));
            kept = Some(rendering);
        }
        let rendered = count.load(Ordering::Relaxed);
        // Each message once when it is added, and the last one of each request.
        assert!(rendered <= session.seeds.len() + session.records.len() + STEPS as usize, "{rendered}");
    }
}
