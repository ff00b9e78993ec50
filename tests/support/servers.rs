//! The runtime of the servers that a tested process talks to.
//!
//! A test blocks its own runtime while it waits for a process to end. A server on that runtime would leave the last call of the
//! process unanswered, and the process would wait for it until its drain is over.

use std::sync::OnceLock;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Handle, Runtime};

pub fn runtime() -> &'static Handle {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let build = || Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    RUNTIME.get_or_init(build).handle()
}

/// Listens on a free port, in that runtime.
pub fn listen() -> TcpListener {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.set_nonblocking(true).expect("a socket that does not block");
    let _servers = runtime().enter();
    TcpListener::from_std(listener).expect("a listener")
}
