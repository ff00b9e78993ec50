//! Email.

pub mod maildir;
