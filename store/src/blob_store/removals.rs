//! Deletes blobs in their stores whose rows are gone.

use super::{BlobName, StoredBlobs, away};
use crate::{Result, Store};

impl Store {
    /// Deletes in their stores what has no row any more, in the stores that this process knows. Returns how many blobs that
    /// were.
    ///
    /// # Errors
    /// [`Error::BlobStore`](crate::Error::BlobStore): the next call goes on; [`Error::Database`](crate::Error::Database).
    pub async fn remove_outside(&self) -> Result<i64> {
        let known: Vec<String> = self.blob_stores.names().map(str::to_owned).collect();
        let mut removed = 0;
        loop {
            let mut tx = self.pool.begin_long().await?;
            // Who puts this blob again waits for the row until it is gone there.
            let row = sqlx::query!(
                r#"select r.sha256, r.space_id, r.store,
                    exists (
                        select from blobs b
                        where b.sha256 = r.sha256 and b.space_id = r.space_id and b.store = r.store
                    ) as "stays!"
                from blob_removals r
                where r.store = any($1) and r.remove_after <= clock_timestamp()
                order by r.remove_after
                limit 1
                for update of r skip locked"#,
                &known
            )
            .fetch_optional(&mut *tx)
            .await?;
            let Some(row) = row else { return Ok(removed) };
            if !row.stays {
                let blob = BlobName { space: &row.space_id, sha256: &row.sha256 };
                let deleted = self.blob_stores.get(&row.store)?.delete(blob).await;
                deleted.map_err(|reason| away(&row.store, reason))?;
                removed += 1;
            }
            sqlx::query!(
                "delete from blob_removals where sha256 = $1 and space_id = $2 and store = $3",
                row.sha256,
                row.space_id,
                row.store
            )
            .execute(&mut *tx)
            .await?;
            tx.commit().await?;
        }
    }

    /// Counts blobs that are to be deleted in a store, and are still there.
    ///
    /// # Errors
    /// [`Error::Database`](crate::Error::Database).
    pub async fn removals_due(&self) -> Result<Vec<StoredBlobs>> {
        Ok(sqlx::query_as!(
            StoredBlobs,
            r#"select store, count(*) as "blobs!", 0::bigint as "bytes!" from blob_removals
            where remove_after <= clock_timestamp()
            group by store
            order by store"#
        )
        .fetch_all(&self.pool)
        .await?)
    }
}
