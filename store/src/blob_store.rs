//! Where packs are kept: in Postgres, or in a store outside of it. The blob's row says which one.
//!
//! Only packs may be outside. Every other blob is small, and is written together with the row that names it.
#![deny(missing_docs)]

use crate::workspace::{PACK_TYPE, name_of};
use crate::{Error, Result, Store};
use futures::future::BoxFuture;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

/// A store of blobs outside of Postgres. Every call has a time limit of its own.
pub trait BlobStore: Send + Sync + Debug {
    /// Its address without secrets, as the configuration and the blobs' rows have it.
    fn name(&self) -> &str;

    /// Stores a blob, durably. A blob of this name that is there already is not touched.
    fn put<'a>(&'a self, sha256: &'a str, bytes: &'a [u8]) -> BoxFuture<'a, std::result::Result<(), String>>;

    /// Reads up to `bytes` of a blob from `start` on. `None`: there is no such blob.
    fn part<'a>(
        &'a self,
        sha256: &'a str,
        start: u64,
        bytes: usize,
    ) -> BoxFuture<'a, std::result::Result<Option<Vec<u8>>, String>>;

    /// Deletes a blob. One that is not there is deleted.
    fn delete<'a>(&'a self, sha256: &'a str) -> BoxFuture<'a, std::result::Result<(), String>>;
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
        let known = into.iter().cloned().chain(others).map(|store| (store.name().to_owned(), store)).collect();
        BlobStores { into, known }
    }

    fn get(&self, name: &str) -> Result<&Arc<dyn BlobStore>> {
        self.known.get(name).ok_or_else(|| {
            away(name, "this process does not have it: name it in [blobs] also, or move its blobs".to_owned())
        })
    }
}

fn away(store: &str, reason: String) -> Error {
    Error::BlobStore { store: store.to_owned(), reason }
}

/// What a move did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct MovedBlobs {
    /// Blobs that are in another store now.
    pub blobs: i64,
    /// Their size.
    pub bytes: i64,
}

impl Store {
    /// Uses these stores for packs.
    #[must_use]
    pub fn with_blob_stores(mut self, stores: BlobStores) -> Store {
        self.blob_stores = Arc::new(stores);
        self
    }

    /// Stores a pack. A commit then names it. If the blob is there already, it counts as new again: it waits for its
    /// commit.
    ///
    /// # Errors
    /// [`Error::BlobStore`], [`Error::Database`].
    pub async fn put_pack(&self, sha256: &str, bytes: &[u8]) -> Result<()> {
        let into = self.blob_stores.into.as_ref();
        if let Some(into) = into {
            // The bytes first: a row says that they are there.
            into.put(sha256, bytes).await.map_err(|reason| away(into.name(), reason))?;
        }
        sqlx::query!(
            "insert into blobs (sha256, size, media_type, bytes, store)
            values ($1, $2, $3, $4, $5)
            on conflict (sha256) do update set touched_at = now()",
            sha256,
            bytes.len() as i64,
            PACK_TYPE,
            if into.is_some() { &[] } else { bytes },
            into.map(|into| into.name())
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Returns up to `bytes` of a pack, from `start` on.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where its blob is not there; [`Error::BlobStore`], [`Error::Database`].
    pub async fn pack_part(&self, sha256: &str, start: u64, bytes: usize) -> Result<Vec<u8>> {
        let row = sqlx::query!(
            r#"select store, substring(bytes from $2 for $3) as "part!" from blobs where sha256 = $1"#,
            sha256,
            i32::try_from(start.saturating_add(1)).unwrap_or(i32::MAX),
            i32::try_from(bytes).unwrap_or(i32::MAX)
        )
        .fetch_optional(&self.pool)
        .await?;
        let missing = || Error::corrupt("workspace", format!("there is no blob {sha256}"));
        let row = row.ok_or_else(missing)?;
        let Some(name) = row.store else { return Ok(row.part) };
        let store = self.blob_stores.get(&name)?;
        let part = store.part(sha256, start, bytes).await.map_err(|reason| away(&name, reason))?;
        part.ok_or_else(|| Error::corrupt("workspace", format!("{name} has no blob {sha256}")))
    }

    /// Returns a whole pack, whose bytes are those that its name stands for.
    ///
    /// # Errors
    /// Those of [`Store::pack_part`]; [`Error::Corrupt`] also for other bytes.
    pub async fn whole_pack(&self, sha256: &str, size: i64) -> Result<Vec<u8>> {
        let bytes = self.pack_part(sha256, 0, usize::try_from(size).unwrap_or(usize::MAX)).await?;
        if name_of(&bytes) == sha256 {
            Ok(bytes)
        } else {
            Err(Error::corrupt("blob", format!("{sha256} has other bytes than its name says")))
        }
    }

    /// Moves packs that are elsewhere to where new ones go. Each is read, checked and written before its row says so, and
    /// deleted from its old store afterwards: so readers find it at each moment. Interrupted, it goes on with the next
    /// call.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for a pack that cannot be read; [`Error::BlobStore`], [`Error::Database`].
    pub async fn move_blobs(&self, mut moved: impl FnMut(MovedBlobs)) -> Result<MovedBlobs> {
        let into = self.blob_stores.into.as_ref();
        let name = into.map(|into| into.name().to_owned());
        let mut sum = MovedBlobs::default();
        loop {
            let row = sqlx::query!(
                "select sha256, size, store from blobs
                where media_type = $1 and store is distinct from $2
                order by sha256
                limit 1",
                PACK_TYPE,
                name
            )
            .fetch_optional(&self.pool)
            .await?;
            let Some(row) = row else { return Ok(sum) };
            let bytes = self.whole_pack(&row.sha256, row.size).await?;
            if let Some(into) = into {
                into.put(&row.sha256, &bytes).await.map_err(|reason| away(into.name(), reason))?;
            }
            sqlx::query!(
                "update blobs set bytes = $2, store = $3 where sha256 = $1",
                row.sha256,
                if into.is_some() { &[] } else { bytes.as_slice() },
                name
            )
            .execute(&self.pool)
            .await?;
            if let Some(old) = &row.store {
                let deleted = self.blob_stores.get(old)?.delete(&row.sha256).await;
                deleted.map_err(|reason| away(old, reason))?;
            }
            (sum.blobs, sum.bytes) = (sum.blobs + 1, sum.bytes + row.size);
            moved(sum);
        }
    }

    /// Deletes blobs whose rows are gone from the stores that had them.
    pub(crate) async fn delete_outside(&self, gone: Vec<(String, Option<String>)>) -> Result<()> {
        for (sha256, store) in gone {
            if let Some(name) = store {
                let deleted = self.blob_stores.get(&name)?.delete(&sha256).await;
                deleted.map_err(|reason| away(&name, reason))?;
            }
        }
        Ok(())
    }
}
