//! The blobs of a bundle, written before its rows, each at once and in a transaction of its own.
//!
//! Whoever else writes a blob of the same hash waits until this one is committed: a step's commit must not wait for a whole
//! import. A blob is what its name says, so one that no row points at, because the import failed later, harms nobody.

use crate::{Error, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sqlx::PgPool;
use wakeful_workflow::bundle::BlobPart;

/// The blob whose parts come. The check bounds it, and has held it against its hash when its last part is here.
#[derive(Default)]
pub(super) struct Blobs {
    bytes: Vec<u8>,
}

impl Blobs {
    /// The next part. One that is there already is left as it is.
    pub async fn write(&mut self, pool: &PgPool, part: &BlobPart) -> Result<()> {
        STANDARD.decode_vec(&part.base64, &mut self.bytes).map_err(|error| Error::corrupt("blob", error))?;
        if (self.bytes.len() as i64) < part.bytes {
            return Ok(());
        }
        sqlx::query!(
            "insert into blobs (sha256, size, media_type, bytes)
            values ($1, length($2::bytea), $3, $2)
            on conflict (sha256) do nothing",
            part.sha256,
            std::mem::take(&mut self.bytes),
            part.media_type
        )
        .execute(pool)
        .await?;
        Ok(())
    }
}
