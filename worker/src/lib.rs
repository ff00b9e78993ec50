//! Wakeful's worker: it acts. See `ARCHITECTURE.md`.
<<<<<<< HEAD
pub mod config;
=======
pub mod dev;
>>>>>>> dev
pub mod model;
pub mod telemetry;
pub mod tool;
