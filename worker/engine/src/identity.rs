//! The name of this process among all that work on one database.

use std::sync::Arc;

/// Who this process is.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Unique among processes, at most 32 bytes.
    pub worker_id: Arc<str>,
    pub host: String,
}

impl Identity {
    /// A new one for this process.
    pub fn of_this_process() -> Identity {
        let host = host_name();
        Identity { worker_id: worker_id(&host), host }
    }
}

/// The name of this machine.
pub fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "localhost".to_owned() } else { name.to_owned() }
}

/// Returns the start of the host name, the pid, and a random suffix, because a restarted process can get the
/// same pid.
fn worker_id(host: &str) -> Arc<str> {
    let host: String = host.chars().filter(char::is_ascii_alphanumeric).take(8).collect();
    let random = wakeful_store::new_id("w");
    Arc::from(format!("{host}-{}-{}", std::process::id(), &random[random.len() - 6..]))
}
