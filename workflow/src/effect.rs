//! Effects: what a tool call may do to the world, and what may be left of it after a crash.
#![deny(missing_docs)]

use serde::{Deserialize, Serialize};

/// How often a tool may be run for one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// Changes nothing outside, so it may run any number of times.
    Pure,
    /// Each attempt of a call has the same idempotency key, so running it again has no further effect.
    Idempotent,
    /// Runs at most once. If a crash interrupts it, its outcome is uncertain.
    Guarded,
}

impl Effect {
    /// The word that is stored and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Effect::Pure => "pure",
            Effect::Idempotent => "idempotent",
            Effect::Guarded => "guarded",
        }
    }

    /// Reads the stored word.
    pub fn parse(word: &str) -> Option<Effect> {
        Some(match word {
            "pure" => Effect::Pure,
            "idempotent" => Effect::Idempotent,
            "guarded" => Effect::Guarded,
            _ => return None,
        })
    }
}
