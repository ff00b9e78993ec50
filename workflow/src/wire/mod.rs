//! The projection of a [`Context`](crate::context::Context) onto a provider's protocol.
//!
//! The projection is pure, idempotent and total: it turns any transcript into a request that a strict server
//! accepts. It counts its changes in [`Repairs`], which the caller logs. It never writes them back to the
//! transcript.
#![deny(missing_docs)]

pub mod anthropic;
pub mod openai;
mod rendering;
mod repair;

#[cfg(test)]
pub(crate) mod laws;
#[cfg(test)]
mod rules;
#[cfg(test)]
mod strict;

pub use rendering::{End, Frame, Protocol, Rendered, Rendering, Transcript};
pub use repair::tool_name;
pub(crate) use repair::without_blank_end;

/// A request body, ready to be sent.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Request {
    /// The exact bytes of the JSON body.
    pub body: Vec<u8>,
    /// What the projection changed. The engine logs it.
    pub repairs: Repairs,
    /// The assistant's text that ends the request; the reply continues it.
    pub prefill: Option<String>,
    /// Hash of the body, if it is known already.
    sha256: Option<String>,
}

impl Request {
    /// Builds the request for `context` from the start.
    pub fn of(protocol: &dyn Protocol, context: &crate::context::Context) -> Request {
        Rendering::of(protocol, context, None).rendered(context.prefill.as_deref()).request()
    }

    /// Creates a request of these bytes, without repairs and without prefill.
    pub fn new(body: Vec<u8>) -> Request {
        Request { body, repairs: Repairs::default(), prefill: None, sha256: None }
    }

    /// SHA-256 of the body in lower-case hex. A replay of the same call has the same hash.
    pub fn sha256(&self) -> String {
        use sha2::Digest;
        self.sha256.clone().unwrap_or_else(|| hex::encode(sha2::Sha256::digest(&self.body)))
    }
}

/// How often the projection changed something, by kind of change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repairs {
    /// Consecutive turns of one role that were merged, where the protocol demands alternation.
    pub merged_turns: usize,
    /// Tool results without their call, turned into user text.
    pub orphan_results: usize,
    /// Calls without a result. The projection adds a synthetic one.
    pub unanswered_calls: usize,
    /// Empty text blocks and empty messages that were left out.
    pub dropped_blanks: usize,
    /// Ids or names outside the provider's alphabet or length.
    pub rewritten_ids: usize,
    /// Blocks that the protocol does not allow where they are: moved, turned into user text, or left out.
    /// Includes provider blocks of another provider.
    pub misplaced_blocks: usize,
    /// User turns that were added, because the protocol requires one at the start or at the end.
    pub added_turns: usize,
}

impl Repairs {
    fn add(&mut self, other: &Repairs) {
        self.merged_turns += other.merged_turns;
        self.orphan_results += other.orphan_results;
        self.unanswered_calls += other.unanswered_calls;
        self.dropped_blanks += other.dropped_blanks;
        self.rewritten_ids += other.rewritten_ids;
        self.misplaced_blocks += other.misplaced_blocks;
        self.added_turns += other.added_turns;
    }

    /// How many changes were made in all.
    pub fn total(&self) -> usize {
        self.merged_turns
            + self.orphan_results
            + self.unanswered_calls
            + self.dropped_blanks
            + self.rewritten_ids
            + self.misplaced_blocks
            + self.added_turns
    }
}
