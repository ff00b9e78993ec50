//! What Wakeful decides: types and pure functions, no IO, no clock, no randomness, no async.
//!
//! A step of the agent loop is two decisions with one act between them. [`plan::plan`] folds everything that
//! a session still owes into one [`plan::Action`]; the worker performs it; [`advance::advance`] turns what
//! came of it into one [`advance::Transition`], which the store commits. Everything here can be called a
//! thousand times on the same input and gives the same bytes, which is what makes a session that was
//! hydrated after a crash indistinguishable from one that never died.
//!
//! | to know | read |
//! |---|---|
//! | what a session is | [`session`] |
//! | what was said | [`record`] |
//! | what of it its reader is not shown | [`internal`] |
//! | what happened | [`event`], [`mod@recover`] |
//! | what made a session, and how it replies | [`trigger`], [`reply`] |
//! | which ticks of a schedule are due | [`schedule`] |
//! | what an agent may do, and what holds for one session alone | [`agent`], [`policy`] |
//! | what to do next | [`plan`], [`advance`], [`mod@derive`] |
//! | how two sessions differ | [`mod@diff`] |
//! | what an effect may be found as after a crash | [`effect`] |
//! | what a person may say of an uncertain effect | [`resolve`] |
//! | what a failure means | [`fault`] |
//! | how a model call that was cut off goes on | [`resume`] |
//! | what a mail says, joins, and may do | [`mail`] |
//! | what a session that runs another one again takes from it | [`replay`] |
//! | where a session may be forked, and which files it takes along | [`fork`], [`files`] |
//! | what the model sees | [`prefix`], [`context`], [`wire`] |
//! | how a session is carried to another database | [`bundle`] |
//! | which ids there are | [`id`] |

pub mod advance;
pub mod agent;
pub mod blob;
pub mod bundle;
pub mod context;
pub mod delivery;
pub mod derive;
pub mod diff;
pub mod effect;
pub mod event;
pub mod fault;
pub mod files;
pub mod fork;
pub mod generation;
pub mod id;
pub mod inbox;
pub mod internal;
pub mod mail;
pub mod plan;
pub mod policy;
pub mod prefix;
pub mod record;
pub mod recover;
pub mod replay;
pub mod reply;
pub mod resolve;
pub mod resume;
pub mod schedule;
pub mod seed;
pub mod session;
pub mod state;
pub mod strategy;
pub mod trigger;
pub mod wire;

#[cfg(test)]
mod example;
