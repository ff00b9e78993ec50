//! Where packs are kept: in Postgres, or in a store outside of it. The blob's row says which one.
//!
//! Only packs may be outside. Every other blob is small, and is written together with the row that names it.
//!
//! A row of `blob_removals` says that a blob may be in a store without a row of `blobs`: it is written before a blob is put
//! there, and by a trigger when a row of `blobs` goes or names another store. It goes when the blob is deleted there, or
//! has its row. So whatever dies at whatever moment, [`Store::remove_outside`] finds what is left over.
#![deny(missing_docs)]

mod removals;

use crate::workspace::{PACK_TYPE, name_of};
use crate::{Error, Result, Store};
use futures::future::BoxFuture;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// A blob that is put somewhere has this long to get its row.
const PUT: Duration = Duration::from_secs(3600);

/// The name of a blob: of its space, and its SHA-256 in hex.
#[derive(Clone, Copy, Debug)]
pub struct BlobName<'a> {
    /// The space, whose name is plain ASCII without a slash.
    pub space: &'a str,
    /// The SHA-256 of its bytes.
    pub sha256: &'a str,
}

/// Whose pack it is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Owner<'a> {
    Space(&'a str),
    Session(&'a str),
    /// An import into this space, as this session.
    Import(&'a str, &'a str),
}

impl<'a> Owner<'a> {
    /// The space if it is known, and the session.
    fn of(self) -> (Option<&'a str>, Option<&'a str>) {
        match self {
            Owner::Space(space) => (Some(space), None),
            Owner::Session(id) => (None, Some(id)),
            Owner::Import(space, id) => (Some(space), Some(id)),
        }
    }
}

/// The answer of a store, or what it said instead.
pub type Answer<'a, T> = BoxFuture<'a, std::result::Result<T, String>>;

/// A store of blobs outside of Postgres. Every call has a time limit of its own.
pub trait BlobStore: Send + Sync + Debug {
    /// Its address without secrets, as the configuration and the blobs' rows have it.
    fn name(&self) -> &str;

    /// Stores a blob, durably. A blob of this name that is there already is not touched.
    fn put<'a>(&'a self, blob: BlobName<'a>, bytes: &'a [u8]) -> Answer<'a, ()>;

    /// Reads up to `bytes` of a blob from `start` on. `None`: the store does not have it.
    fn part<'a>(&'a self, blob: BlobName<'a>, start: u64, bytes: usize) -> Answer<'a, Option<Vec<u8>>>;

    /// Deletes a blob. One that is not there is deleted.
    fn delete<'a>(&'a self, blob: BlobName<'a>) -> Answer<'a, ()>;
}

/// The stores that a process can reach.
#[derive(Clone, Debug, Default)]
pub struct BlobStores {
    /// Where new packs go. `None`: into Postgres.
    into: Option<Arc<dyn BlobStore>>,
    known: BTreeMap<String, Arc<dyn BlobStore>>,
}

impl BlobStores {
    /// New packs go to `into`, or to Postgres. Those that are in one of `others` are read there.
    pub fn new(into: Option<Arc<dyn BlobStore>>, others: Vec<Arc<dyn BlobStore>>) -> BlobStores {
        let known =
            into.iter().cloned().chain(others).map(|store| (store.name().to_owned(), store)).collect();
        BlobStores { into, known }
    }

    /// The name of the store that new packs go to, if it is not Postgres.
    pub fn new_go_to(&self) -> Option<&str> {
        self.into.as_deref().map(BlobStore::name)
    }

    /// The names of the stores outside of Postgres.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.known.keys().map(String::as_str)
    }

    /// Asks a store for a blob that does not exist, to see whether it answers.
    ///
    /// # Errors
    /// [`Error::BlobStore`].
    pub async fn ask(&self, name: &str) -> Result<()> {
        let nothing = BlobName { space: "wakeful", sha256: &"0".repeat(64) };
        self.get(name)?.part(nothing, 0, 1).await.map(drop).map_err(|reason| away(name, reason))
    }

    fn get(&self, name: &str) -> Result<&Arc<dyn BlobStore>> {
        self.known
            .get(name)
            .ok_or_else(|| away(name, "this process does not know it; name it in [blobs] also".to_owned()))
    }
}

fn away(store: &str, reason: String) -> Error {
    Error::BlobStore { store: store.to_owned(), reason: crate::error::bounded(&reason) }
}

/// Blobs of one store.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct StoredBlobs {
    /// The store's address. `None`: Postgres.
    pub store: Option<String>,
    /// How many.
    pub blobs: i64,
    /// Their size.
    pub bytes: i64,
}

/// What a move did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct MovedBlobs {
    /// Blobs that are in another store now.
    pub blobs: i64,
    /// Their size.
    pub bytes: i64,
    /// Blobs that are not there or have other bytes than their name says. They stay where they are.
    pub unreadable: i64,
}

impl Store {
    /// Uses these stores for packs.
    #[must_use]
    pub fn with_blob_stores(mut self, stores: BlobStores) -> Store {
        self.blob_stores = Arc::new(stores);
        self
    }

    /// The stores outside of Postgres that this process can reach.
    pub fn blob_stores(&self) -> &BlobStores {
        &self.blob_stores
    }

    /// Stores a pack, for a session's commit or for an import.
    pub(crate) async fn put_for(&self, owner: Owner<'_>, sha256: &str, bytes: &[u8]) -> Result<()> {
        let into = self.blob_stores.into.as_ref();
        let stored: &[u8] = if into.is_some() { &[] } else { bytes };
        let (space, session_id) = owner.of();
        // The row before the bytes: from now on the pack is too young to be collected, and the erasure of its session finds it. With
        // the row comes the note that the bytes are on their way, or somebody who reads in between would miss them.
        let row = sqlx::query!(
            "with put as (
                insert into blobs (space_id, sha256, size, media_type, bytes, store, stored_for)
                select space_id, $3, $4, $5, $6, $7, $2
                from (
                    select coalesce($1, (select space_id from conversation_sessions where session_id = $2)) as space_id
                ) owner
                where space_id is not null
                -- An erasure of another session that stored it before leaves it.
                on conflict (sha256, space_id) do update
                    set touched_at = now(), stored_for = coalesce(excluded.stored_for, blobs.stored_for)
                returning space_id, store
            ), noted as (
                -- Waits for the one who deletes it there at this moment.
                insert into blob_removals (sha256, space_id, store, remove_after)
                select $3, space_id, store, now() + make_interval(secs => $8)
                from put where store is not null
                on conflict (sha256, space_id, store) do update set remove_after = excluded.remove_after
            )
            select space_id, store from put",
            space,
            session_id,
            sha256,
            bytes.len() as i64,
            PACK_TYPE,
            stored,
            into.map(|into| into.name()),
            PUT.as_secs_f64()
        )
        .fetch_optional(&self.pool)
        .await?;
        let missing = || Error::NotFound { what: "session", id: session_id.unwrap_or_default().to_owned() };
        let row = row.ok_or_else(missing)?;
        let Some(name) = row.store else { return Ok(()) };
        let blob = BlobName { space: &row.space_id, sha256 };
        self.blob_stores.get(&name)?.put(blob, bytes).await.map_err(|reason| away(&name, reason))?;
        crate::failpoint!("K30_outside");
        self.end_put(&name, blob).await
    }

    /// Notes that a blob is about to be in a store. Waits for the one who deletes it there at this moment.
    async fn begin_put(&self, store: &str, blob: BlobName<'_>) -> Result<()> {
        sqlx::query!(
            "insert into blob_removals (sha256, space_id, store, remove_after)
            values ($1, $2, $3, now() + make_interval(secs => $4))
            on conflict (sha256, space_id, store) do update set remove_after = excluded.remove_after",
            blob.sha256,
            blob.space,
            store,
            PUT.as_secs_f64()
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Takes the note back if the blob has its row. If an erasure took the row meanwhile, the blob is to go at once.
    async fn end_put(&self, store: &str, blob: BlobName<'_>) -> Result<()> {
        let mut tx = self.pool.begin().await?;
        // Holds off an erasure of the row until the note is gone; what deletes the row later writes it anew.
        let row = sqlx::query_scalar!(
            "select sha256 from blobs where sha256 = $1 and space_id = $2 and store = $3 for share",
            blob.sha256,
            blob.space,
            store
        )
        .fetch_optional(&mut *tx)
        .await?;
        if row.is_some() {
            sqlx::query!(
                "delete from blob_removals where sha256 = $1 and space_id = $2 and store = $3",
                blob.sha256,
                blob.space,
                store
            )
            .execute(&mut *tx)
            .await?;
        } else {
            sqlx::query!(
                "insert into blob_removals (sha256, space_id, store) values ($1, $2, $3)
                on conflict (sha256, space_id, store) do update set remove_after = now()",
                blob.sha256,
                blob.space,
                store
            )
            .execute(&mut *tx)
            .await?;
        }
        tx.commit().await?;
        Ok(())
    }

    /// Up to `bytes` of a pack, from `start` on, wherever it is. `what` names what the pack is of in the error.
    pub(crate) async fn part_for(
        &self,
        owner: Owner<'_>,
        sha256: &str,
        what: &'static str,
        start: u64,
        bytes: usize,
    ) -> Result<Vec<u8>> {
        let missing = |who: &str| Error::corrupt(what, format!("{who} no blob {sha256}"));
        let (space, session_id) = owner.of();
        let mut missed = None;
        loop {
            let row = sqlx::query!(
                r#"select space_id, store, substring(bytes from $4 for $5) as "part!" from blobs
                where sha256 = $3
                    and space_id = coalesce($1, (select space_id from conversation_sessions where session_id = $2))"#,
                space,
                session_id,
                sha256,
                i32::try_from(start.saturating_add(1)).unwrap_or(i32::MAX),
                i32::try_from(bytes).unwrap_or(i32::MAX)
            )
            .fetch_optional(&self.pool)
            .await?;
            let row = row.ok_or_else(|| missing("there is"))?;
            let Some(name) = row.store else { return Ok(row.part) };
            let blob = BlobName { space: &row.space_id, sha256 };
            let part = self.blob_stores.get(&name)?.part(blob, start, bytes).await;
            if let Some(part) = part.map_err(|reason| away(&name, reason))? {
                return Ok(part);
            }
            // It may have been moved between the two reads.
            if missed.as_ref() == Some(&name) {
                return Err(missing(&format!("the blob store {name} has")));
            }
            missed = Some(name);
        }
    }

    /// Returns a whole pack, whose bytes are those that its name stands for.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for one that is missing or has other bytes; [`Error::BlobStore`], [`Error::Database`].
    async fn whole_pack(&self, blob: BlobName<'_>, size: i64) -> Result<Vec<u8>> {
        let (owner, size) = (Owner::Space(blob.space), usize::try_from(size).unwrap_or(usize::MAX));
        let bytes = self.part_for(owner, blob.sha256, "blob", 0, size).await?;
        if name_of(&bytes) == blob.sha256 {
            Ok(bytes)
        } else {
            Err(Error::corrupt("blob", format!("{} has other bytes than its name says", blob.sha256)))
        }
    }

    /// Counts the blobs of each store, also of stores that this process does not know: of one space, or of all.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn blobs_by_store(&self, space: Option<&str>) -> Result<Vec<StoredBlobs>> {
        Ok(sqlx::query_as!(
            StoredBlobs,
            r#"select store, count(*) as "blobs!", sum(size)::bigint as "bytes!" from blobs
            where $1::text is null or space_id = $1
            group by store
            order by store"#,
            space
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// Moves packs that are elsewhere to where new ones go: of one space, or of all. Each is read, checked and written before
    /// its row says so, and deleted from its old store afterwards, so readers find it at each moment. Interrupted, it goes
    /// on with the next call, and others may move at the same time. Calls `moved` with the sum after each pack.
    ///
    /// # Errors
    /// [`Error::BlobStore`], [`Error::Database`].
    pub async fn move_blobs(
        &self,
        space: Option<&str>,
        mut moved: impl FnMut(MovedBlobs),
    ) -> Result<MovedBlobs> {
        let name = self.blob_stores.new_go_to();
        let mut sum = MovedBlobs::default();
        let mut after = (String::new(), String::new());
        loop {
            let row = sqlx::query!(
                "select sha256, space_id, size from blobs
                where media_type = $1 and store is distinct from $2 and (sha256, space_id) > ($3::text, $4::text)
                    and ($5::text is null or space_id = $5)
                order by sha256, space_id
                limit 1",
                PACK_TYPE,
                name,
                after.0,
                after.1,
                space
            )
            .fetch_optional(&self.pool)
            .await?;
            let Some(row) = row else { break };
            after = (row.sha256, row.space_id);
            let blob = BlobName { sha256: &after.0, space: &after.1 };
            match self.settled_pack(blob, row.size).await {
                Ok(Some(bytes)) => {
                    if self.move_one(blob, &bytes).await? {
                        (sum.blobs, sum.bytes) = (sum.blobs + 1, sum.bytes + row.size);
                        moved(sum);
                    }
                }
                Ok(None) => {}
                Err(Error::Corrupt { .. }) => sum.unreadable += 1,
                Err(error) => return Err(error),
            }
        }
        self.remove_outside().await?;
        Ok(sum)
    }

    /// Returns false if the pack was deleted meanwhile.
    async fn move_one(&self, blob: BlobName<'_>, bytes: &[u8]) -> Result<bool> {
        let Some(into) = self.blob_stores.into.as_ref() else {
            let updated = sqlx::query!(
                "update blobs set bytes = $3, store = null where sha256 = $1 and space_id = $2",
                blob.sha256,
                blob.space,
                bytes
            )
            .execute(&self.pool)
            .await?;
            return Ok(updated.rows_affected() == 1);
        };
        loop {
            self.begin_put(into.name(), blob).await?;
            into.put(blob, bytes).await.map_err(|reason| away(into.name(), reason))?;
            crate::failpoint!("K30_move");
            let mut tx = self.pool.begin().await?;
            let row = sqlx::query_scalar!(
                "select sha256 from blobs where sha256 = $1 and space_id = $2 for update",
                blob.sha256,
                blob.space
            )
            .fetch_optional(&mut *tx)
            .await?;
            if row.is_none() {
                tx.rollback().await?;
                self.end_put(into.name(), blob).await?;
                return Ok(false);
            }
            // While the note is there, the blob is there: who deletes it in the store holds the note's row until both are gone.
            let note = sqlx::query!(
                "delete from blob_removals where sha256 = $1 and space_id = $2 and store = $3",
                blob.sha256,
                blob.space,
                into.name()
            )
            .execute(&mut *tx)
            .await?;
            if note.rows_affected() == 0 {
                tx.rollback().await?;
                continue;
            }
            sqlx::query!(
                "update blobs set bytes = '', store = $3 where sha256 = $1 and space_id = $2",
                blob.sha256,
                blob.space,
                into.name()
            )
            .execute(&mut *tx)
            .await?;
            tx.commit().await?;
            return Ok(true);
        }
    }

    /// Reads a pack. `None`: it is deleted or put at this moment, so nothing can be said of it.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if it should be there, and is missing or has other bytes; [`Error::BlobStore`], [`Error::Database`].
    pub(crate) async fn settled_pack(&self, blob: BlobName<'_>, size: i64) -> Result<Option<Vec<u8>>> {
        match self.whole_pack(blob, size).await {
            Err(Error::Corrupt { .. }) => {}
            read => return read.map(Some),
        }
        // It may have been put during that reading. Then it is there now.
        if !self.is_settled(blob).await? {
            return Ok(None);
        }
        match self.whole_pack(blob, size).await {
            Err(Error::Corrupt { .. }) if !self.is_settled(blob).await? => Ok(None),
            read => read.map(Some),
        }
    }

    /// Whether a blob has its row, and no worker is putting it into a store at this moment.
    async fn is_settled(&self, blob: BlobName<'_>) -> Result<bool> {
        Ok(sqlx::query_scalar!(
            r#"select exists (select from blobs where sha256 = $1 and space_id = $2)
                and not exists (select from blob_removals where sha256 = $1 and space_id = $2) as "settled!""#,
            blob.sha256,
            blob.space
        )
        .fetch_one(&self.pool)
        .await?)
    }
}
