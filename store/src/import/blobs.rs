//! Writes the blobs of a bundle before its rows, each in a transaction of its own.
//!
//! Another writer of the same blob waits for this transaction, and a step's commit must not wait for a whole
//! import. If the import fails later, blobs without rows remain. They do no harm, because a blob's name is
//! its hash.

use crate::blob_store::Owner;
use crate::encryption::Seal;
use crate::workspace::PACK_TYPE;
use crate::{Error, Result, Store, sealed_blob};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use wakeful_workflow::bundle::BlobPart;

/// The blob whose parts are being read. The check limits its size, and has verified its hash before the last
/// part gets here.
#[derive(Default)]
pub(super) struct Blobs {
    bytes: Vec<u8>,
}

impl Blobs {
    /// Adds a part. The last part writes the blob, unless the space has it already.
    pub async fn write(
        &mut self,
        store: &Store,
        seal: &Seal,
        prefix_sha256: Option<&str>,
        (space_id, session_id): (&str, &str),
        part: &BlobPart,
    ) -> Result<()> {
        STANDARD.decode_vec(&part.base64, &mut self.bytes).map_err(|error| Error::corrupt("blob", error))?;
        if (self.bytes.len() as i64) < part.bytes {
            return Ok(());
        }
        let bytes = std::mem::take(&mut self.bytes);
        // A prefix is the agent's, and sessions share it.
        if seal.is_on() && prefix_sha256 != Some(part.sha256.as_str()) {
            let media_type = part.media_type.as_str();
            let (data_key, sealed) = (seal.key_id().unwrap_or_default(), seal.bytes(&bytes));
            let mut connection = store.pool.acquire().await?;
            return sealed_blob::add(
                &mut connection,
                data_key,
                space_id,
                &part.sha256,
                bytes.len(),
                media_type,
                &sealed,
            )
            .await;
        }
        if part.media_type == PACK_TYPE {
            return store.put_for(Owner::Import(space_id, session_id), &part.sha256, &bytes).await;
        }
        sqlx::query!(
            "insert into blobs (space_id, sha256, size, media_type, bytes, stored_for)
            values ($4, $1, length($2::bytea), $3, $2, $5)
            -- One that is there counts as new again, and as this import's: its rows come later.
            on conflict (sha256, space_id) do update set touched_at = now(), stored_for = excluded.stored_for",
            part.sha256,
            bytes,
            part.media_type,
            space_id,
            session_id
        )
        .execute(&store.pool)
        .await?;
        Ok(())
    }
}
