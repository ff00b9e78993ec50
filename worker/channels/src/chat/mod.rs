//! Chats that were kept before Wakeful had sessions.

pub mod legacy;
mod reading;
