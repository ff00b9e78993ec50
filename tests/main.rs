//! End to end: the real process on a real Postgres, through HTTP. One binary; one file a property.
//!
//! `make test` gives every test the address of one server (`WAKEFUL_TEST_DATABASE_URL`); each test has its own database, copied
//! from a migrated template. Tests wait for what they wait for and never for a time to pass.

mod support;

mod bad_input;
mod chat;
mod cli;
mod demo;
mod dev;
mod inbox;
mod peers;
mod startup;
mod steer;
mod store;
mod stream;
mod telemetry;
