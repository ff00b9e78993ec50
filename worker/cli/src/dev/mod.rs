//! A Wakeful without a setup: what `wakeful dev`, `wakeful demo` and the tests run on.
//!
//! Nothing is downloaded. The installed Postgres binaries are found ([`Binaries`]), a cluster is made on first
//! use and kept ([`Cluster`]), or made for one command and removed after it ([`exec()`]). [`Home`] is the data
//! directory of `wakeful dev`, [`samples`] are its first chats, and [`demo`] plays them with a worker killed.
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
pub use directory::{default_data_dir, reachable};
pub use exec::{Throwaway, exec};
pub use home::{Home, Lock};
pub use postgres::{Cluster, Options};
pub use style::Style;
