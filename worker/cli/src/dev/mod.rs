//! A Wakeful that needs no setup, used by `wakeful dev`, `wakeful demo` and the tests.
//!
//! Nothing is downloaded. [`Binaries`] finds the installed Postgres. [`Cluster`] is created on first use and
//! kept; [`exec()`] creates one for a single command and removes it. [`Home`] is the data directory of
//! `wakeful dev`, [`samples`] are its first chats, and [`demo`] plays them and kills a worker.
mod account;
mod banner;
mod binaries;
mod child;
pub mod demo;
mod directory;
mod exec;
mod home;
mod postgres;
pub mod samples;
mod style;

pub use banner::Banner;
pub use binaries::Binaries;
pub use child::Child;
pub use directory::{default_data_dir, reachable};
pub use exec::{Throwaway, exec};
pub use home::{DATABASE, Home, Lock};
pub use postgres::{Cluster, Options};
pub use style::Style;
