//! End to end: the real process on a real Postgres, through HTTP. One binary; one file per property.
//!
//! `make test` gives every test the address of one server (`WAKEFUL_TEST_DATABASE_URL`). Each test has its
//! own database, copied from a migrated template. Tests wait for conditions, never for a fixed time.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot continue fails on the spot, and so do its helpers"
)]

mod support;

mod access;
mod ahead;
mod approve;
mod awake;
mod bad_input;
mod batches;
mod blobs;
mod bundle;
mod cancel;
mod chat;
mod cli;
mod compare;
mod console;
mod context;
mod conversations;
mod crash;
mod crash_stream;
mod crowded;
mod deliver;
mod demo;
mod dev;
mod diff;
mod doctor;
mod documents;
mod drain;
mod effects;
mod email_in;
mod email_out;
mod encryption;
mod erase;
mod expiry;
mod fork;
mod front;
mod gates;
mod heal;
mod herald;
mod histories;
mod house;
mod idempotency;
mod inbox;
mod ingest;
mod journal;
mod large;
mod leaks;
#[cfg(feature = "legacy-redis")]
mod legacy_chat;
mod mcp;
mod messenger;
mod monitoring;
mod notify;
mod obey;
mod openapi;
mod outage;
mod pauses;
mod peers;
mod poison;
mod prefix;
mod preflight;
mod providers;
mod readme;
mod refused;
mod replay;
mod reproduce;
mod resolve;
mod retention;
mod roles;
mod runner;
mod schedules;
mod search;
mod sessions;
mod spaces;
mod spiral;
mod startup;
mod statements;
mod statuses;
mod steer;
mod store;
mod storm;
mod stream;
mod telemetry;
mod thousand;
mod trial;
mod trigger;
mod troubles;
mod upgrade;
mod upkeep;
mod warm;
mod weight;
mod workspaces;
mod zombie;
