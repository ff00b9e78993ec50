//! Wakeful's decisions: types and pure functions, without IO, clock, randomness or async.
//!
//! A step of the agent loop has three parts. [`plan::plan`] picks the next [`plan::Action`] from what is
//! still open in the session. The worker performs it. [`advance::advance`] turns the outcome into one
//! [`advance::Transition`], which the store commits. The same input always gives the same bytes. So a session
//! that was hydrated after a crash continues exactly as one that never crashed.
//!
//! | to know | read |
//! |---|---|
//! | what a session is | [`session`] |
//! | what was said | [`record`] |
//! | which messages the user is not shown | [`internal`] |
//! | what happened | [`event`], [`mod@recover`] |
//! | what created a session, and how it replies | [`trigger`], [`reply`] |
//! | which ticks of a schedule are due | [`schedule`] |
//! | what an agent may do, and the rules of a single session | [`agent`], [`policy`] |
//! | what to do next | [`plan`], [`advance`], [`mod@derive`] |
//! | how two sessions differ | [`mod@diff`] |
//! | what a worker does about an effect that it finds after a crash | [`effect`] |
//! | how a person settles an uncertain effect | [`resolve`] |
//! | which failures are retried | [`fault`] |
//! | how an interrupted model call is repeated | [`resume`] |
//! | how a mail is read, which session it joins, and whether it may wake one | [`mail`] |
//! | what a replay takes from its source session | [`replay`] |
//! | where a session may be forked, and which files it takes along | [`fork`], [`files`] |
//! | the files of a session at one moment | [`workspace`] |
//! | what the model sees | [`prefix`], [`context`], [`wire`] |
//! | how a session is carried to another database | [`bundle`] |
//! | what an upgrade would stop | [`preflight`] |
//! | how a task of Absurd becomes a session | [`mod@absurd`] |
//! | what a person is notified of, and when | [`notify`] |
//! | which kinds of ids exist | [`id`] |

pub mod absurd;
pub mod access;
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
pub mod failure;
pub mod fallback;
pub mod fault;
pub mod files;
pub mod fork;
pub mod gate;
pub mod generation;
pub mod id;
pub mod inbox;
pub mod internal;
pub mod mail;
pub mod notify;
pub mod pause;
pub mod plan;
pub mod policy;
pub mod prefix;
pub mod preflight;
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
pub mod told;
pub mod trigger;
mod turns;
pub mod wire;
pub mod workspace;

#[cfg(test)]
mod example;
