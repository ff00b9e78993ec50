//! The input of one model call.
#![deny(missing_docs)]

use crate::agent::Tools;
use crate::record::{Content, Role};

/// The input of one model call, before a provider's protocol shapes it. Equal contexts give equal request bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Context {
    /// The rendered system prompt.
    pub system: String,
    /// Sorted by name, so that the prefix of every request is the same.
    pub tools: Tools,
    /// Seeds and records in order. Any sequence of roles is legal here: [`crate::wire`] repairs its own copy.
    pub messages: Vec<Message>,
    /// The text that an earlier attempt had produced when it was interrupted. The reply begins with it.
    /// Protocols and models without prefill leave it out.
    pub prefill: Option<String>,
}

/// One message of a [`Context`]. Its role is `user`, `assistant` or `tool`.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// In the order in which it was said.
    pub content: Content,
}

impl Message {
    /// Size of the content in bytes.
    pub fn bytes(&self) -> usize {
        self.content.bytes()
    }
}
