//! Whether the key store has the keys of the encrypted conversations.

use super::Report;
use wakeful_config::Config;
use wakeful_store::{Error, Store};

/// Checks the key store against the rows of the database.
pub(super) async fn check(config: &Config, store: &Store, report: &mut Report) -> Result<(), Error> {
    if let Err(error) = wakeful_engine::encryption::turn_on(config, store) {
        report.problem("encryption", error.to_string(), "check `[encryption]` in wakeful.toml");
        return Ok(());
    }
    let status = match store.encryption_status().await {
        Ok(status) => status,
        Err(error @ Error::Keys { .. }) => {
            let remedy =
                "until it can be reached, encrypted sessions wait; `keys` of `[encryption]` says where it is";
            report.problem("encryption", error.to_string(), remedy);
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    if config.encryption.is_none() {
        if status.sealed_conversations > 0 {
            report.problem(
                "encryption",
                format!(
                    "{} conversations are encrypted, and there is no [encryption] here",
                    status.sealed_conversations
                ),
                "give every process the section that the others have: without it, their sessions wait",
            );
        }
        return Ok(());
    }
    if !status.missing.is_empty() {
        report.problem(
            "encryption",
            format!("the key store lacks {} keys, such as {}", status.missing.len(), status.missing[0]),
            "restore the key store: the texts of these conversations cannot be read",
        );
    } else {
        let old = status.keys - status.by_master.get(&status.master_id).copied().unwrap_or(0);
        let left = if old > 0 { format!(", {old} wrapped by an earlier master key") } else { String::new() };
        report.ok(
            "encryption",
            format!("{} conversations, {} keys{left}", status.sealed_conversations, status.keys),
        );
    }
    Ok(())
}
