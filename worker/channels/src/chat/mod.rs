//! Chats: what was said before there were sessions.

pub mod legacy;
mod reading;
