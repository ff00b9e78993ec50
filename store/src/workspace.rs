//! Snapshots of sessions' files: their packs, and which one a session had at a message.
#![deny(missing_docs)]

use crate::blob_store::Owner;
use crate::{Error, Result, Store};
use sha2::Digest as _;
use sqlx::PgConnection;
use wakeful_workflow::workspace::Snapshot;

/// What a pack's row says it is.
pub const PACK_TYPE: &str = "application/vnd.wakeful.pack";

/// The name of these bytes.
pub fn name_of(bytes: &[u8]) -> String {
    hex::encode(sha2::Sha256::digest(bytes))
}

impl Store {
    /// Stores a pack of the session's space. A commit then names it. If the blob is there already, it counts as new again, because it
    /// waits for this commit.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a session that was erased; [`Error::BlobStore`], [`Error::Database`].
    pub async fn put_pack(&self, session_id: &str, sha256: &str, bytes: &[u8]) -> Result<()> {
        let seal = self.seal_of(session_id).await?;
        if let Some(data_key) = seal.key_id() {
            return self.put_sealed_pack(session_id, data_key, sha256, bytes.len(), &seal.bytes(bytes)).await;
        }
        self.put_for(Owner::Session(session_id), sha256, bytes).await
    }

    async fn put_sealed_pack(
        &self,
        session_id: &str,
        data_key: &str,
        sha256: &str,
        size: usize,
        sealed: &[u8],
    ) -> Result<()> {
        sqlx::query!(
            "insert into sealed_blobs (data_key, sha256, space_id, size, media_type, bytes, stored_for)
            select $1, $2, space_id, $3, $4, $5, session_id from conversation_sessions where session_id = $6
            -- An erasure of a fork that stored it before leaves it.
            on conflict (data_key, sha256) do update set stored_for = excluded.stored_for",
            data_key,
            sha256,
            size as i64,
            PACK_TYPE,
            sealed,
            session_id
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Opens a whole pack of an encrypted session. `None`: it is in clear, or not there at all.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Keys`], [`Error::Database`].
    pub async fn sealed_pack(&self, session_id: &str, sha256: &str) -> Result<Option<Vec<u8>>> {
        let seal = self.seal_of(session_id).await?;
        Ok(self.sealed_blob(&seal, sha256).await?.map(|blob| blob.bytes))
    }

    /// Returns up to `bytes` of a pack of the session's space, from `start` on.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where its blob is not there; [`Error::BlobStore`], [`Error::Database`].
    pub async fn pack_part(
        &self,
        session_id: &str,
        sha256: &str,
        start: u64,
        bytes: usize,
    ) -> Result<Vec<u8>> {
        let seal = self.seal_of(session_id).await?;
        let from = usize::try_from(start).unwrap_or(usize::MAX);
        if let Some(part) = self.sealed_part(&seal, sha256, from, bytes).await? {
            return Ok(part);
        }
        self.part_for(Owner::Session(session_id), sha256, "workspace", start, bytes).await
    }

    /// The blob stores outside of Postgres that a snapshot is in, and the one that a new one would go to.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn stores_of(&self, session_id: &str, snapshot: Option<&Snapshot>) -> Result<Vec<String>> {
        let packs: Vec<&str> =
            snapshot.into_iter().flat_map(|one| one.packs.iter().map(|pack| pack.sha256.as_str())).collect();
        let mut stores = sqlx::query_scalar!(
            r#"select distinct b.store as "store!" from blobs b
            where b.sha256 = any($1) and b.store is not null
                and b.space_id = (select space_id from conversation_sessions where session_id = $2)"#,
            &packs as &[&str],
            session_id
        )
        .fetch_all(&self.pool)
        .await?;
        if let Some(into) = self.blob_stores.new_go_to()
            && !stores.iter().any(|store| store == into)
        {
            stores.push(into.to_owned());
        }
        Ok(stores)
    }

    /// Returns the files that a session had after `message_number`, or has now. `None`: no step had changed them.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Refused`] for a session from a redacted bundle, [`Error::Corrupt`], [`Error::Database`].
    pub async fn workspace_at(
        &self,
        session_id: &str,
        message_number: Option<i64>,
    ) -> Result<Option<Snapshot>> {
        self.has_its_texts(session_id, "such a bundle has no files").await?;
        let mut tx = self.pool.begin().await?;
        let known = sqlx::query_scalar!(
            r#"select exists (select from conversation_sessions where session_id = $1) as "known!""#,
            session_id
        )
        .fetch_one(&mut *tx)
        .await?;
        if !known {
            return Err(Error::NotFound { what: "session", id: session_id.to_owned() });
        }
        newest(&mut tx, session_id, message_number.unwrap_or(i64::MAX)).await
    }
}

/// The newest snapshot at or before `message_number`: of the session, or of those that it was forked from.
pub(crate) async fn newest(
    tx: &mut PgConnection,
    session_id: &str,
    message_number: i64,
) -> Result<Option<Snapshot>> {
    let payload = sqlx::query_scalar!(
        r#"
        with recursive line as (
            select s.session_id, s.parent_session_id, s.forked_at_message_number, $2::bigint as upto, 0 as depth
            from conversation_sessions s
            where s.session_id = $1
            union all
            select p.session_id, p.parent_session_id, p.forked_at_message_number,
                least(line.upto, line.forked_at_message_number), line.depth + 1
            from line
            join conversation_sessions p on p.session_id = line.parent_session_id
        )
        select e.payload
        from line
        join session_events e on e.session_id = line.session_id and e.type = 'WORKSPACE_SNAPSHOT'
        where (e.payload ->> 'message_number')::bigint <= line.upto
        order by line.depth, e.seq desc
        limit 1
        "#,
        session_id,
        message_number
    )
    .fetch_optional(tx)
    .await?;
    payload.map(serde_json::from_value).transpose().map_err(|error| Error::corrupt("snapshot", error))
}
