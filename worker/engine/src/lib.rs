//! Wakeful's engine. It performs what the workflow decides and commits the results. It does not depend on the
//! HTTP server, on any medium, or on the command line.
//!
//! This crate is internal and not stable. Programs use the crate `wakeful`.
//!
//! | to see | read |
//! |---|---|
//! | one step, hop by hop | [`jobs::step`] |
//! | the only caller of models and tools | [`perform`] |
//! | how a message comes in, and how much comes in at once | [`ingest`], [`new_session`] |
//! | how a message goes out | [`jobs::deliver`], [`channel`] |
//! | how a program starts a session and continues it | [`handle`] |
//! | how a replay gets its source's messages | [`replay`] |
//! | what a process keeps of its sessions in memory | [`kept`], [`warm`], [`outlines`] |
//! | how an outcome is recorded while the database is away | [`outcome`] |
//! | how a cancel reaches a step in flight | [`cancels`] |
//! | how a provider's outage is waited for | [`gates`] |
//! | how code that never yields is stopped | [`watchdog`] |
//! | which tools and models there are, and how one is added | [`tool`], [`model`] |
//! | stores of files outside of Postgres | [`blobs`] |
//! | the objects that all of these share | [`ctx`] |
//! | the only maker of HTTP clients, and what they may reach | [`web`] |
//! | how hostile text is shown | [`printable`] |
//! | how the process is seen from outside | [`telemetry`] |

pub mod blobs;
pub mod cancels;
pub mod capabilities;
pub mod channel;
pub mod ctx;
pub mod encryption;
pub mod gates;
pub mod handle;
pub mod identity;
pub mod ingest;
pub mod jobs;
pub mod kept;
pub mod model;
pub mod new_session;
mod notify;
pub mod outcome;
pub mod outlines;
pub mod pauses;
pub mod perform;
pub mod printable;
pub mod replay;

pub mod telemetry;
pub mod tool;
pub mod warm;
pub mod watchdog;
pub mod web;
pub mod workspace;
