//! Writes outgoing mail into a Maildir. `wakeful dev` uses it; any mail reader can open it.

use super::compose::compose;
use async_trait::async_trait;
use lettre::message::Mailbox;
use serde_json::{Value, json};
use std::fs::{File, Permissions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use wakeful_engine::channel::{Channel, Found, Outbound, SendError};

/// A Maildir with one file per message. The file is named after the delivery, so a repeated attempt adds no
/// second file.
#[derive(Clone, Debug)]
pub struct Maildir {
    dir: PathBuf,
    from: Mailbox,
}

impl Maildir {
    /// Uses the Maildir at `dir`, which the first write creates. `from` is an address, with or without a
    /// name.
    ///
    /// # Errors
    /// When `from` is not an address.
    pub fn new(dir: PathBuf, from: &str) -> Result<Maildir, String> {
        let from = from.parse().map_err(|error| format!("{from:?} is not an email address: {error}"))?;
        Ok(Maildir { dir, from })
    }
}

#[async_trait]
impl Channel for Maildir {
    fn name(&self) -> &str {
        "email"
    }

    fn is_idempotent(&self) -> bool {
        true
    }

    async fn send(&self, message: &Outbound<'_>) -> Result<Value, SendError> {
        let bytes = compose(Some(&self.from), message)?.bytes;
        let (dir, name) = (self.dir.clone(), message.delivery_id.to_owned());
        let written = tokio::task::spawn_blocking(move || write(&dir, &name, &bytes))
            .await
            .map_err(|error| SendError::Later(error.to_string()))?;
        let path =
            written.map_err(|error| SendError::Later(format!("the Maildir cannot be written: {error}")))?;
        Ok(json!({ "maildir": path }))
    }

    /// A mail reader moves seen mail to `cur` or deletes it, so a missing file does not prove that the mail
    /// was never written.
    async fn find(&self, delivery_id: &str) -> Result<Found, SendError> {
        let (dir, name) = (self.dir.clone(), delivery_id.to_owned());
        let path = tokio::task::spawn_blocking(move || look(&dir, &name))
            .await
            .map_err(|error| SendError::Later(error.to_string()))?;
        let path = path.map_err(|error| SendError::Later(format!("the Maildir cannot be read: {error}")))?;
        Ok(path.map_or(Found::Unknown, |path| Found::Sent { receipt: json!({ "maildir": path }) }))
    }
}

/// Writes into `tmp`, then renames into `new`, as Maildir requires. So a reader never sees half a message. What this
/// makes is for its own user only, whatever the umask.
fn write(dir: &Path, name: &str, bytes: &[u8]) -> std::io::Result<PathBuf> {
    for folder in ["tmp", "new", "cur"] {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir.join(folder))?;
    }
    let (unfinished, finished) = (dir.join("tmp").join(name), dir.join("new").join(name));
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
    // An attempt that died may have left the file.
    file.set_permissions(Permissions::from_mode(0o600))?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&unfinished, &finished)?;
    File::open(dir.join("new"))?.sync_all()?;
    Ok(finished)
}

/// The message in `new`, or in `cur`, where mail readers append flags to its name.
fn look(dir: &Path, name: &str) -> std::io::Result<Option<PathBuf>> {
    let unread = dir.join("new").join(name);
    if unread.try_exists()? {
        return Ok(Some(unread));
    }
    let seen = match std::fs::read_dir(dir.join("cur")) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        seen => seen?,
    };
    for entry in seen {
        let path = entry?.path();
        let file = path.file_name().and_then(|file| file.to_str()).unwrap_or_default();
        if file.split(':').next() == Some(name) {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_same_delivery_twice_is_one_message() {
        let dir = tempfile::tempdir().unwrap();
        let maildir = Maildir::new(dir.path().to_owned(), "Agent <agent@example.com>").unwrap();
        let content = json!({"to": ["ann@example.com"], "subject": "Grüße", "body": "Hello"});
        let message = Outbound::new("dlv_1", &content);
        maildir.send(&message).await.unwrap();
        maildir.send(&message).await.unwrap();
        let files: Vec<_> = std::fs::read_dir(dir.path().join("new")).unwrap().collect();
        assert_eq!(files.len(), 1);
        let text = std::fs::read_to_string(dir.path().join("new/dlv_1")).unwrap();
        assert!(text.contains("Message-ID: <dlv_1@example.com>"), "{text}");
        assert!(text.contains("To: ann@example.com"), "{text}");
    }

    #[tokio::test]
    async fn an_address_that_is_none_is_refused_for_good() {
        let dir = tempfile::tempdir().unwrap();
        let maildir = Maildir::new(dir.path().to_owned(), "agent@example.com").unwrap();
        let content = json!({"to": ["nobody"], "subject": "s", "body": "b"});
        let sent = maildir.send(&Outbound::new("dlv_1", &content)).await;
        assert!(matches!(sent, Err(SendError::Refused(_))), "{sent:?}");
    }

    #[tokio::test]
    async fn a_message_is_found_until_its_reader_deletes_it() {
        let dir = tempfile::tempdir().unwrap();
        let maildir = Maildir::new(dir.path().to_owned(), "agent@example.com").unwrap();
        assert_eq!(maildir.find("dlv_1").await.unwrap(), Found::Unknown);
        let content = json!({"to": ["ann@example.com"], "subject": "s", "body": "b"});
        let receipt = maildir.send(&Outbound::new("dlv_1", &content)).await.unwrap();
        assert_eq!(maildir.find("dlv_1").await.unwrap(), Found::Sent { receipt });
        let seen = dir.path().join("cur/dlv_1:2,S");
        std::fs::rename(dir.path().join("new/dlv_1"), &seen).unwrap();
        let receipt = json!({ "maildir": seen });
        assert_eq!(maildir.find("dlv_1").await.unwrap(), Found::Sent { receipt });
        assert_eq!(maildir.find("dlv_10").await.unwrap(), Found::Unknown);
        std::fs::remove_file(seen).unwrap();
        assert_eq!(maildir.find("dlv_1").await.unwrap(), Found::Unknown);
    }
}
