//! The projection of a [`Context`](crate::context::Context) onto a provider's protocol.
//!
//! Pure, idempotent and total: whatever the transcript holds, the request is one that a strict server takes, and
//! nothing is ever written back. What had to be changed is counted in [`Repairs`] and logged, never stored.

pub mod anthropic;
pub mod openai;
mod repair;

#[cfg(test)]
pub(crate) mod laws;
#[cfg(test)]
mod rules;
#[cfg(test)]
mod strict;

pub use repair::tool_name;
pub(crate) use repair::without_blank_end;

/// A request body, ready to be sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The exact bytes of the JSON body.
    pub body: Vec<u8>,
    pub repairs: Repairs,
    /// What the request ends with, and so what the answer begins with.
    pub prefill: Option<String>,
}

impl Request {
    /// SHA-256 of the body in lower-case hex: equal for a replay of the same call.
    pub fn sha256(&self) -> String {
        use sha2::Digest;
        hex::encode(sha2::Sha256::digest(&self.body))
    }
}

/// What the projection had to change, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repairs {
    /// Consecutive turns of one role that were merged, where the protocol demands alternation.
    pub merged_turns: usize,
    /// Tool results without their call, turned into user text.
    pub orphan_results: usize,
    /// Calls without a result, which were given a synthetic one.
    pub unanswered_calls: usize,
    /// Empty text blocks and empty messages that were left out.
    pub dropped_blanks: usize,
    /// Ids or names outside the provider's alphabet or length.
    pub rewritten_ids: usize,
    /// Blocks that the protocol has no place for: moved, said in the user's voice, or left out (provider blocks of
    /// another provider are among these).
    pub misplaced_blocks: usize,
    /// User turns that were put in, because the protocol wants one first or last.
    pub added_turns: usize,
}

impl Repairs {
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
