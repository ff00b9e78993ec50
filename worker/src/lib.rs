//! Wakeful's worker: it acts. See `ARCHITECTURE.md`.
pub mod dev;
pub mod model;
pub mod tool;
