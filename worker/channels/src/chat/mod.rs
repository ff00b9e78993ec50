//! Chats that were kept before Wakeful had sessions.
#![doc = include_str!("README.md")]

pub mod legacy;
mod reading;
