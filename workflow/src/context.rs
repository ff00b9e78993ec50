//! The context: what the model sees of a session. It is computed for each call and never stored.
//!
//! A [`Strategy`](crate::strategy::Strategy) selects it. Every strategy uses one mechanism: a
//! [`Rebase`](crate::strategy::Rebase), which points at where the selection begins and copies nothing. The
//! commit of a call journals the rebase that was decided for it. The decision depends only on the session and
//! its configuration, so a worker that repeats a call after a crash sends the same bytes. Between two rebases
//! a request only grows, so the provider's prompt cache hits.
#![doc = include_str!("context.md")]

pub mod compaction;
mod input;
mod select;
mod weight;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;

pub use input::{Context, Message};
pub use select::{Built, build, build_again, build_as, full, head, numbered, weigh_as};
pub use weight::{Weight, weigh};
