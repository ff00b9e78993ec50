//! Orphans: packs of workspaces that were stored, and whose commit was never made; blobs of imports that failed. Every other blob
//! is written together with the row that names it.

use super::explained;
use crate::blob_store::BlobName;
use crate::workspace::PACK_TYPE;
use crate::{Result, Store};
use serde::Serialize;
use std::time::Duration;

/// Blobs that one statement of [`Store::check_blobs`] reads.
const PAGE: i64 = 100;

/// What a collection took, or would take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Collected {
    pub blobs: i64,
    pub bytes: i64,
}

/// What is wrong with the blobs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// Blobs that were read.
    pub blobs: i64,
    /// Sealed blobs of encrypted conversations. They are not read here: each is checked when it is opened.
    pub sealed: i64,
    /// Those whose bytes are not what their name says.
    pub wrong: Vec<String>,
    /// Packs that a snapshot names and that are not there.
    pub missing: Vec<String>,
}

impl Store {
    /// Deletes packs that no snapshot names and that were stored longer than `grace` ago: of one space, or of all.
    /// `dry_run` only counts them. Also deletes what imports left that failed; a dry run does not count that.
    ///
    /// A worker stores its packs right before each commit, and an import touches those that are there, so the pack of a
    /// commit to come is never that old.
    ///
    /// # Errors
    /// [`crate::Error::NotErased`] if the user of the database may not take the role that deletes;
    /// [`crate::Error::Database`].
    pub async fn collect_blobs(
        &self,
        space: Option<&str>,
        grace: Duration,
        dry_run: bool,
    ) -> Result<Collected> {
        let orphans = sqlx::query!(
            r#"select b.sha256, b.space_id, b.size from blobs b
            where b.media_type = $1
                and b.touched_at < now() - make_interval(secs => $2)
                and ($3::text is null or b.space_id = $3)
                and not exists (
                    select from session_events e
                    cross join lateral jsonb_array_elements(e.payload -> 'packs') pack
                    where e.type = 'WORKSPACE_SNAPSHOT'
                        and pack ->> 'sha256' = b.sha256 and e.space_id = b.space_id
                )
                -- Earlier versions stored what a sender called a pack as one.
                and not exists (
                    select from session_inbox i
                    cross join lateral jsonb_path_query(i.attachments, '$[*].sha256') file
                    where i.attachments is not null and file #>> '{}' = b.sha256 and i.space_id = b.space_id
                )
            order by b.sha256, b.space_id"#,
            PACK_TYPE,
            grace.as_secs_f64(),
            space
        )
        .fetch_all(&self.pool)
        .await?;
        let of = |rows: &mut dyn Iterator<Item = i64>| {
            let (mut blobs, mut bytes) = (0, 0);
            rows.for_each(|size| (blobs, bytes) = (blobs + 1, bytes + size));
            Collected { blobs, bytes }
        };
        let found = of(&mut orphans.iter().map(|row| row.size));
        if dry_run {
            return Ok(found);
        }
        self.delete_failed_imports(space, grace).await?;
        if orphans.is_empty() {
            // What an earlier call could not delete in its store.
            self.remove_outside().await?;
            return Ok(found);
        }
        let (names, spaces): (Vec<String>, Vec<String>) =
            orphans.into_iter().map(|row| (row.sha256, row.space_id)).unzip();
        let mut tx = self.retention().await?;
        // The conditions stand here again, for what was committed meanwhile. The one on `touched_at` is of the row itself: a worker
        // that stores the pack again at this moment keeps it, and so does a message that comes with the same file.
        let deleted = sqlx::query_scalar!(
            r#"delete from blobs b
            where (sha256, space_id) in
                    (select sha256, space_id from unnest($1::text[], $2::text[]) as b (sha256, space_id))
                and touched_at < now() - make_interval(secs => $3)
                and not exists (
                    select from session_events e
                    cross join lateral jsonb_array_elements(e.payload -> 'packs') pack
                    where e.type = 'WORKSPACE_SNAPSHOT'
                        and pack ->> 'sha256' = b.sha256 and e.space_id = b.space_id
                )
                and not exists (
                    select from session_inbox i
                    cross join lateral jsonb_path_query(i.attachments, '$[*].sha256') file
                    where i.attachments is not null and file #>> '{}' = b.sha256 and i.space_id = b.space_id
                )
            returning size"#,
            &names,
            &spaces,
            grace.as_secs_f64()
        )
        .fetch_all(&mut *tx)
        .await
        .map_err(|error| explained(error.into()))?;
        let collected = of(&mut deleted.into_iter());
        // The audit is written by another role than the one that deletes.
        tx.commit_part().await?;
        self.remove_outside().await?;
        Ok(collected)
    }

    /// Deletes the blobs of imports that wrote no session, unless another row names them.
    async fn delete_failed_imports(&self, space: Option<&str>, grace: Duration) -> Result<()> {
        let left = sqlx::query!(
            r#"select b.sha256, b.stored_for as "stored_for!" from blobs b
            where b.stored_for is not null
                and b.media_type <> $1
                and b.touched_at < now() - make_interval(secs => $2)
                and ($3::text is null or b.space_id = $3)
                and not exists (select from conversation_sessions s where s.session_id = b.stored_for)"#,
            PACK_TYPE,
            grace.as_secs_f64(),
            space
        )
        .fetch_all(&self.pool)
        .await?;
        let (blobs, sessions): (Vec<String>, Vec<String>) =
            left.into_iter().map(|row| (row.sha256, row.stored_for)).unzip();
        if !blobs.is_empty() {
            self.delete_unused_blobs(&blobs, &sessions).await.map_err(explained)?;
        }
        Ok(())
    }

    /// Reads every blob of one space, or of all, and compares its bytes with its name. Says which packs of snapshots are
    /// missing.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn check_blobs(&self, space: Option<&str>) -> Result<Checked> {
        let mut checked = Checked::default();
        let mut after = (String::new(), String::new());
        loop {
            let page = sqlx::query!(
                r#"select sha256, space_id, size, store is not null as "outside!",
                    store is null and encode(sha256(bytes), 'hex') <> sha256 as "wrong!"
                from blobs
                where (sha256, space_id) > ($1::text, $2::text) and ($4::text is null or space_id = $4)
                order by sha256, space_id
                limit $3"#,
                after.0,
                after.1,
                PAGE,
                space
            )
            .fetch_all(&self.pool)
            .await?;
            let Some(last) = page.last() else { break };
            after = (last.sha256.clone(), last.space_id.clone());
            checked.blobs += page.len() as i64;
            for row in page {
                let blob = BlobName { space: &row.space_id, sha256: &row.sha256 };
                if row.wrong || row.outside && self.is_wrong_outside(blob, row.size).await? {
                    checked.wrong.push(row.sha256);
                }
            }
        }
        checked.sealed = sqlx::query_scalar!(
            r#"select count(*) as "count!" from sealed_blobs where $1::text is null or space_id = $1"#,
            space
        )
        .fetch_one(&self.pool)
        .await?;
        checked.missing = sqlx::query_scalar!(
            r#"select distinct pack ->> 'sha256' as "sha256!"
            from session_events e
            cross join lateral jsonb_array_elements(e.payload -> 'packs') pack
            where e.type = 'WORKSPACE_SNAPSHOT'
                and ($1::text is null or e.space_id = $1)
                and not exists (
                    select from blobs b where b.sha256 = pack ->> 'sha256' and b.space_id = e.space_id
                )
                and not exists (
                    select from conversation_sessions s
                    join sealed_blobs k on k.data_key = s.data_key and k.sha256 = pack ->> 'sha256'
                    where s.session_id = e.session_id
                )
            order by 1"#,
            space
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(checked)
    }

    /// A blob that is being put into its store may not be there yet.
    async fn is_wrong_outside(&self, blob: BlobName<'_>, size: i64) -> Result<bool> {
        match self.settled_pack(blob, size).await {
            Ok(_) => Ok(false),
            Err(crate::Error::Corrupt { .. }) => Ok(true),
            Err(error) => Err(error),
        }
    }
}
