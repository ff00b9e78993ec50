//! The files that come with a message. They become blobs, and the message points at them.

use super::NewAttachment;
use crate::encryption::Seal;
use crate::workspace::PACK_TYPE;
use crate::{Error, Result, sealed_blob};
use sqlx::PgConnection;
use wakeful_workflow::record::{Attachment, without_nul};

/// Stores the files of a message as blobs, and returns the pointers to them as JSON.
pub(super) async fn attach(
    tx: &mut PgConnection,
    seal: &Seal,
    space_id: &str,
    files: &[NewAttachment],
) -> Result<Option<serde_json::Value>> {
    use sha2::Digest;
    let named: Vec<(String, &NewAttachment)> =
        files.iter().map(|file| (hex::encode(sha2::Sha256::digest(&file.bytes)), file)).collect();
    // Sort, so that two messages with the same two files cannot deadlock.
    let mut sorted: Vec<_> = named.iter().collect();
    sorted.sort_by(|a, b| a.0.cmp(&b.0));
    for (sha256, file) in sorted {
        if let Some(data_key) = seal.key_id() {
            let (bytes, media_type) = (seal.bytes(&file.bytes), stored_type(&file.media_type));
            sealed_blob::add(&mut *tx, data_key, space_id, sha256, file.bytes.len(), media_type, &bytes)
                .await?;
            continue;
        }
        sqlx::query!(
            "insert into blobs (space_id, sha256, size, media_type, bytes)
            values ($4, $1, length($2::bytea), $3, $2)
            -- One that is there counts as new again: it may be a pack that is about to be collected.
            on conflict (sha256, space_id) do update set touched_at = now()",
            sha256,
            file.bytes,
            stored_type(&file.media_type),
            space_id
        )
        .execute(&mut *tx)
        .await?;
    }
    let attachments: Vec<Attachment> = named
        .into_iter()
        .map(|(sha256, file)| Attachment {
            file_name: without_nul(file.file_name.clone()),
            media_type: without_nul(file.media_type.clone()),
            bytes: file.bytes.len(),
            sha256,
        })
        .collect();
    if attachments.is_empty() {
        return Ok(None);
    }
    let mut attachments =
        serde_json::to_value(attachments).map_err(|error| Error::corrupt("attachments", error))?;
    seal.value(&mut attachments);
    Ok(Some(attachments))
}

/// The type of a blob that came with a message. Only a worker stores packs of workspaces, whatever a sender says.
fn stored_type(media_type: &str) -> &str {
    if media_type == PACK_TYPE { "application/octet-stream" } else { media_type }
}
