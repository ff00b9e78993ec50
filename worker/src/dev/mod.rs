//! Postgres without a setup: the server that `wakeful dev`, `wakeful demo` and the tests run on.
//!
//! Nothing is downloaded. The installed server binaries are found ([`Binaries`]), a cluster is made on first
//! use and kept ([`Cluster`]), or made for one command and removed after it ([`exec()`]).
mod account;
mod binaries;
mod directory;
mod exec;
mod postgres;

pub use binaries::Binaries;
pub use directory::{default_data_dir, reachable};
pub use exec::{Throwaway, exec};
pub use postgres::{Cluster, Options};
