//! model/anthropic
