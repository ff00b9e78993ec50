//! What the model sees: an ephemeral selection out of the session, made anew for each call.
//!
//! A [`Strategy`] says how the selection is made. All of them have one mechanism: a [`Rebase`], which points at where
//! the selection begins and copies nothing. It is journalled in the commit of the call that it was decided for, and it
//! is a function of the session alone, so that whoever finds that call cut off decides the same and sends the same
//! bytes. Between two rebases a request only grows, which is what a provider's prompt cache keys on.

pub mod compaction;
mod input;
mod select;
mod weight;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

pub use input::{Context, Message};
pub(crate) use select::READ_OUTPUT;
pub use select::{Built, build, build_again, build_as, full, numbered};
pub use weight::{Weight, weigh};
