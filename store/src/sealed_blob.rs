//! Files and long outputs of encrypted conversations, sealed under the conversation's key.

use crate::encryption::Seal;
use crate::{Result, Store};
use sqlx::PgConnection;
use wakeful_workflow::blob::Blob;

/// Stores a blob that is sealed already. One that is there stays.
pub(crate) async fn add(
    tx: &mut PgConnection,
    data_key: &str,
    space_id: &str,
    sha256: &str,
    size: usize,
    media_type: &str,
    bytes: &[u8],
) -> Result<()> {
    sqlx::query!(
        "insert into sealed_blobs (data_key, sha256, space_id, size, media_type, bytes)
        values ($1, $2, $3, $4, $5, $6)
        on conflict (data_key, sha256) do nothing",
        data_key,
        sha256,
        space_id,
        size as i64,
        media_type,
        bytes
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// Stores a blob of a session as that is stored: sealed, or in clear. One that is there stays.
pub(crate) async fn keep(tx: &mut PgConnection, seal: &Seal, space_id: &str, blob: &Blob) -> Result<()> {
    if let Some(data_key) = seal.key_id() {
        let bytes = seal.bytes(&blob.bytes);
        return add(tx, data_key, space_id, &blob.sha256, blob.bytes.len(), blob.media_type, &bytes).await;
    }
    sqlx::query!(
        "insert into blobs (space_id, sha256, size, media_type, bytes)
        values ($3, $1, length($2::bytea), $4, $2)
        -- An erasure that looks for it at this moment leaves it.
        on conflict (sha256, space_id) do update set touched_at = now() where blobs.touched_at = '-infinity'",
        blob.sha256,
        blob.bytes,
        space_id,
        blob.media_type
    )
    .execute(tx)
    .await?;
    Ok(())
}

/// A sealed blob that was opened.
pub(crate) struct Opened {
    pub media_type: String,
    pub bytes: Vec<u8>,
}

impl Store {
    /// Opens a whole blob of an encrypted conversation. `None`: there is none, so it is in clear or not there at all.
    ///
    /// # Errors
    /// [`crate::Error::Corrupt`], [`crate::Error::Database`].
    pub(crate) async fn sealed_blob(&self, seal: &Seal, sha256: &str) -> Result<Option<Opened>> {
        let Some(data_key) = seal.key_id() else { return Ok(None) };
        let row = sqlx::query!(
            "select media_type, bytes from sealed_blobs where data_key = $1 and sha256 = $2",
            data_key,
            sha256
        )
        .fetch_optional(&self.pool)
        .await?;
        let Some(row) = row else { return Ok(None) };
        let bytes = seal.open_bytes(row.bytes)?;
        Ok(Some(Opened { media_type: row.media_type, bytes }))
    }

    /// A part of a sealed blob: see [`Store::blob_part`](crate::outputs).
    pub(crate) async fn sealed_part(
        &self,
        seal: &Seal,
        sha256: &str,
        start: usize,
        bytes: usize,
    ) -> Result<Option<Vec<u8>>> {
        Ok(self.sealed_blob(seal, sha256).await?.map(|blob| {
            let start = start.min(blob.bytes.len());
            let end = start.saturating_add(bytes).min(blob.bytes.len());
            blob.bytes[start..end].to_vec()
        }))
    }
}
