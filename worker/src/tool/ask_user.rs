//! tool/ask_user
