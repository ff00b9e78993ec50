//! Chats: what was said before there were sessions.
#![doc = include_str!("README.md")]

pub mod legacy;
mod reading;
