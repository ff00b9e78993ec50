//! Chats: what was said before there were sessions.
