//! model/sse
