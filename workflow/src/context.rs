//! What the model sees: an ephemeral selection out of the session, made anew for each call.
//!
//! A [`Strategy`] says how the selection is made. All of them have one mechanism: a [`Rebase`], which points at where
//! the selection begins and copies nothing. It is journalled in the commit of the call that it was decided for, and it
//! is a function of the session alone, so that whoever finds that call cut off decides the same and sends the same
//! bytes. Between two rebases a request only grows, which is what a provider's prompt cache keys on.
#![doc = include_str!("context.md")]

pub mod compaction;
mod select;
mod strategy;
mod weight;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

pub(crate) use select::READ_OUTPUT;
pub use select::{Built, build, build_again, build_as, full, numbered};
pub use strategy::{ContextPolicy, Rebase, Strategy};
pub use weight::{Weight, weigh};

use crate::agent::ToolDefinition;
use crate::record::{Block, Role};

/// The input of one model call, before a provider's protocol shapes it. Equal contexts give equal request bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Context {
    /// The rendered system prompt.
    pub system: String,
    /// Sorted by name, so that the prefix of every request is the same.
    pub tools: Vec<ToolDefinition>,
    /// Seeds and records in order. Anything is legal here: repairs are made by [`crate::wire`] on its own copy.
    pub messages: Vec<Message>,
    /// What the answer is to begin with: the text that an attempt before this one had said when it was cut off.
    /// Protocols and models that take none leave it out.
    pub prefill: Option<String>,
}

/// One message of a [`Context`]. Its role is `user`, `assistant` or `tool`.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    pub role: Role,
    pub content: Vec<Block>,
}
