//! Wakeful's worker: it acts. See `ARCHITECTURE.md`.
pub mod config;
pub mod model;
pub mod telemetry;
pub mod tool;
