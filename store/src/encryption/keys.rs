//! Where data keys are kept, wrapped by the master key: in a database of their own, or in a directory of one host.
//!
//! Not beside the texts: a wrapped key in the same database would be in its WAL and in its backups, and erasing it would erase
//! nothing there.

use super::Wrapped;
use crate::{Error, Result};
use futures::future::BoxFuture;
use sqlx::Row;
use sqlx::postgres::{PgPool, PgPoolOptions};
use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::OnceCell;

/// How long a caller waits for the database of the keys.
const WAIT: Duration = Duration::from_secs(3);

/// A place for wrapped data keys.
pub(super) trait KeyStore: std::fmt::Debug + Send + Sync {
    /// Whose keys it has: the id of a database's installation. `None`: it has not been said yet.
    fn owner(&self) -> BoxFuture<'_, Result<Option<String>>>;
    /// Says whose keys it has from now on, unless it has an owner, and returns that.
    fn claim(&self, owner: String) -> BoxFuture<'_, Result<String>>;
    /// Keeps a new key. When this returns, the key is durable. `false`: the store is not this owner's, and nothing was written.
    fn put(&self, owner: String, key: Wrapped) -> BoxFuture<'_, Result<bool>>;
    /// Replaces a key that the master key `old` wraps. `false`: it is not there any more, or another one wraps it by now.
    fn replace(&self, old: String, key: Wrapped) -> BoxFuture<'_, Result<bool>>;
    /// Returns a key.
    fn get(&self, key_id: String) -> BoxFuture<'_, Result<Option<Wrapped>>>;
    /// Deletes keys, and returns how many were there.
    fn delete(&self, key_ids: Vec<String>) -> BoxFuture<'_, Result<u64>>;
    /// The ids of all keys, in order.
    fn ids(&self) -> BoxFuture<'_, Result<Vec<String>>>;
    /// Those that were written longer ago than this, by the store's clock.
    fn older_than(&self, age: Duration) -> BoxFuture<'_, Result<Vec<String>>>;
}

/// Opens the store that `place` names: a URL of Postgres, or a directory.
pub(super) fn open(place: &str) -> Result<Box<dyn KeyStore>> {
    if place.starts_with("postgres://") || place.starts_with("postgresql://") {
        let pool = PgPoolOptions::new().max_connections(2).acquire_timeout(WAIT).connect_lazy(place);
        return Ok(Box::new(Database { pool: pool.map_err(away)?, made: OnceCell::new() }));
    }
    Ok(Box::new(Directory { root: PathBuf::from(place) }))
}

fn away(error: impl std::fmt::Display) -> Error {
    Error::Keys { reason: error.to_string() }
}

/// A table of a database of its own.
#[derive(Debug)]
struct Database {
    pool: PgPool,
    made: OnceCell<()>,
}

impl Database {
    async fn pool(&self) -> Result<&PgPool> {
        let make = async {
            // Two processes may do this at once, and then one of them finds the table in spite of "if not exists".
            let there: bool = sqlx::query_scalar("select to_regclass('wakeful_data_keys') is not null")
                .fetch_one(&self.pool)
                .await?;
            if !there {
                sqlx::query(
                    "create table if not exists wakeful_data_keys (
                        key_id text primary key,
                        owner_sha256 text not null,
                        master_id text not null,
                        wrapped bytea not null,
                        created_at timestamptz not null default now()
                    )",
                )
                .execute(&self.pool)
                .await?;
            }
            let owned: bool = sqlx::query_scalar("select to_regclass('wakeful_key_store') is not null")
                .fetch_one(&self.pool)
                .await?;
            if !owned {
                sqlx::query(
                    "create table if not exists wakeful_key_store (
                        only_one boolean primary key default true check (only_one),
                        owner text not null
                    )",
                )
                .execute(&self.pool)
                .await?;
            }
            Ok::<_, sqlx::Error>(())
        };
        self.made.get_or_try_init(|| make).await.map_err(away)?;
        Ok(&self.pool)
    }
}

impl KeyStore for Database {
    fn owner(&self) -> BoxFuture<'_, Result<Option<String>>> {
        Box::pin(async move {
            sqlx::query_scalar("select owner from wakeful_key_store")
                .fetch_optional(self.pool().await?)
                .await
                .map_err(away)
        })
    }

    fn claim(&self, owner: String) -> BoxFuture<'_, Result<String>> {
        Box::pin(async move {
            sqlx::query("insert into wakeful_key_store (owner) values ($1) on conflict do nothing")
                .bind(owner)
                .execute(self.pool().await?)
                .await
                .map_err(away)?;
            let owner = sqlx::query_scalar("select owner from wakeful_key_store");
            owner.fetch_one(self.pool().await?).await.map_err(away)
        })
    }

    fn put(&self, owner: String, key: Wrapped) -> BoxFuture<'_, Result<bool>> {
        Box::pin(async move {
            let put = sqlx::query(
                "insert into wakeful_data_keys (key_id, owner_sha256, master_id, wrapped)
                select $1, $2, $3, $4 from wakeful_key_store where owner = $5",
            )
            .bind(key.key_id)
            .bind(key.owner_sha256)
            .bind(key.master_id)
            .bind(key.wrapped)
            .bind(owner)
            .execute(self.pool().await?)
            .await
            .map_err(away)?;
            Ok(put.rows_affected() == 1)
        })
    }

    fn older_than(&self, age: Duration) -> BoxFuture<'_, Result<Vec<String>>> {
        Box::pin(async move {
            sqlx::query_scalar(
                "select key_id from wakeful_data_keys where created_at < now() - make_interval(secs => $1) order by key_id",
            )
            .bind(age.as_secs_f64())
            .fetch_all(self.pool().await?)
            .await
            .map_err(away)
        })
    }

    fn replace(&self, old: String, key: Wrapped) -> BoxFuture<'_, Result<bool>> {
        Box::pin(async move {
            let replaced = sqlx::query(
                "update wakeful_data_keys set master_id = $3, wrapped = $4 where key_id = $1 and master_id = $2",
            )
            .bind(key.key_id)
            .bind(old)
            .bind(key.master_id)
            .bind(key.wrapped)
            .execute(self.pool().await?)
            .await
            .map_err(away)?;
            Ok(replaced.rows_affected() == 1)
        })
    }

    fn get(&self, key_id: String) -> BoxFuture<'_, Result<Option<Wrapped>>> {
        Box::pin(async move {
            let row = sqlx::query(
                "select owner_sha256, master_id, wrapped from wakeful_data_keys where key_id = $1",
            )
            .bind(&key_id)
            .fetch_optional(self.pool().await?)
            .await
            .map_err(away)?;
            let Some(row) = row else { return Ok(None) };
            Ok(Some(Wrapped {
                key_id,
                owner_sha256: row.try_get(0).map_err(away)?,
                master_id: row.try_get(1).map_err(away)?,
                wrapped: row.try_get(2).map_err(away)?,
            }))
        })
    }

    fn delete(&self, key_ids: Vec<String>) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let deleted = sqlx::query("delete from wakeful_data_keys where key_id = any($1)")
                .bind(key_ids)
                .execute(self.pool().await?)
                .await
                .map_err(away)?;
            Ok(deleted.rows_affected())
        })
    }

    fn ids(&self) -> BoxFuture<'_, Result<Vec<String>>> {
        Box::pin(async move {
            sqlx::query_scalar("select key_id from wakeful_data_keys order by key_id")
                .fetch_all(self.pool().await?)
                .await
                .map_err(away)
        })
    }
}

/// A file for each key, below a directory that only this user may read.
#[derive(Debug)]
struct Directory {
    root: PathBuf,
}

/// The word of the files' names.
const ENDING: &str = "key";

/// The file that says whose keys these are.
const OWNER: &str = "owner";

impl Directory {
    fn path(root: &Path, key_id: &str) -> PathBuf {
        let folder = key_id.get(..2).unwrap_or("__");
        root.join(folder).join(format!("{key_id}.{ENDING}"))
    }

    fn write(root: &Path, key: &Wrapped) -> std::io::Result<()> {
        let path = Directory::path(root, &key.key_id);
        let folder = path.parent().unwrap_or(root);
        // The directory itself must be there: where its disk is not mounted, a key is not written beside it.
        match fs::DirBuilder::new().mode(0o700).create(folder) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => {}
        }
        // Files that are made by `tempfile` are for their user only.
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.as_file().set_permissions(fs::Permissions::from_mode(0o600))?;
        file.write_all(&serde_json::to_vec(key)?)?;
        file.as_file().sync_all()?;
        file.persist(&path)?;
        for folder in [folder, root] {
            fs::File::open(folder)?.sync_all()?;
        }
        Ok(())
    }

    fn owner_of(root: &Path) -> std::io::Result<Option<String>> {
        match fs::read_to_string(root.join(OWNER)) {
            Ok(owner) => Ok(Some(owner.trim().to_owned())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                fs::metadata(root)?;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn claimed(root: &Path, owner: &str) -> std::io::Result<String> {
        let _lock = Directory::lock(root)?;
        if let Some(owner) = Directory::owner_of(root)? {
            return Ok(owner);
        }
        let mut file = tempfile::NamedTempFile::new_in(root)?;
        writeln!(file, "{owner}")?;
        file.as_file().sync_all()?;
        file.persist(root.join(OWNER))?;
        fs::File::open(root)?.sync_all()?;
        Ok(owner.to_owned())
    }

    fn read(root: &Path, key_id: &str) -> std::io::Result<Option<Wrapped>> {
        match fs::read(Directory::path(root, key_id)) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|error| {
                std::io::Error::new(ErrorKind::InvalidData, format!("the file of {key_id}: {error}"))
            }),
            // The directory itself must be there. A disk that is not mounted has erased no key.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                fs::metadata(root)?;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Only one process at a time replaces or removes keys. The lock ends with the file.
    fn lock(root: &Path) -> std::io::Result<fs::File> {
        let folder = fs::File::open(root)?;
        folder.lock()?;
        Ok(folder)
    }

    fn replace(root: &Path, old: &str, key: &Wrapped) -> std::io::Result<bool> {
        let _lock = Directory::lock(root)?;
        let is_there = Directory::read(root, &key.key_id)?.is_some_and(|there| there.master_id == old);
        if is_there {
            Directory::write(root, key)?;
        }
        Ok(is_there)
    }

    fn remove(root: &Path, key_ids: &[String]) -> std::io::Result<u64> {
        let _lock = Directory::lock(root)?;
        let mut removed = 0;
        for key_id in key_ids {
            let path = Directory::path(root, key_id);
            match fs::OpenOptions::new().write(true).open(&path) {
                Ok(mut file) => {
                    // On a disk that writes in place, the old bytes are gone at once.
                    let length = file.metadata()?.len();
                    file.write_all(&vec![0; usize::try_from(length).unwrap_or(0)])?;
                    file.sync_all()?;
                    fs::remove_file(&path)?;
                    removed += 1;
                    if let Some(folder) = path.parent() {
                        fs::File::open(folder)?.sync_all()?;
                    }
                }
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    fs::metadata(root)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(removed)
    }

    fn list(root: &Path, age: Duration) -> std::io::Result<Vec<String>> {
        let before = std::time::SystemTime::now().checked_sub(age);
        let mut ids = Vec::new();
        for folder in fs::read_dir(root)? {
            let folder = folder?.path();
            if !folder.is_dir() {
                continue;
            }
            for file in fs::read_dir(folder)? {
                let path = file?.path();
                if path.extension().is_some_and(|ending| ending == ENDING)
                    && let Some(id) = path.file_stem().and_then(|id| id.to_str())
                    && (age.is_zero()
                        || before.is_some_and(|before| {
                            fs::metadata(&path).and_then(|file| file.modified()).is_ok_and(|at| at < before)
                        }))
                {
                    ids.push(id.to_owned());
                }
            }
        }
        ids.sort();
        Ok(ids)
    }

    fn with<T: Send + 'static>(
        &self,
        act: impl FnOnce(&Path) -> std::io::Result<T> + Send + 'static,
    ) -> BoxFuture<'_, Result<T>> {
        let root = self.root.clone();
        Box::pin(async move {
            let shown = root.display().to_string();
            let done = tokio::task::spawn_blocking(move || act(&root)).await.map_err(away)?;
            done.map_err(|error| match error.kind() {
                // One file says nothing about the others.
                ErrorKind::InvalidData | ErrorKind::UnexpectedEof => Error::corrupt("data key", error),
                _ => away(format!("{shown}: {error}")),
            })
        })
    }
}

impl KeyStore for Directory {
    fn owner(&self) -> BoxFuture<'_, Result<Option<String>>> {
        self.with(Directory::owner_of)
    }

    fn claim(&self, owner: String) -> BoxFuture<'_, Result<String>> {
        self.with(move |root| Directory::claimed(root, &owner))
    }

    fn put(&self, owner: String, key: Wrapped) -> BoxFuture<'_, Result<bool>> {
        self.with(move |root| {
            let is_ours = Directory::owner_of(root)?.is_some_and(|one| one == owner);
            if is_ours {
                Directory::write(root, &key)?;
            }
            Ok(is_ours)
        })
    }

    fn older_than(&self, age: Duration) -> BoxFuture<'_, Result<Vec<String>>> {
        self.with(move |root| Directory::list(root, age))
    }

    fn replace(&self, old: String, key: Wrapped) -> BoxFuture<'_, Result<bool>> {
        self.with(move |root| Directory::replace(root, &old, &key))
    }

    fn get(&self, key_id: String) -> BoxFuture<'_, Result<Option<Wrapped>>> {
        self.with(move |root| Directory::read(root, &key_id))
    }

    fn delete(&self, key_ids: Vec<String>) -> BoxFuture<'_, Result<u64>> {
        self.with(move |root| Directory::remove(root, &key_ids))
    }

    fn ids(&self) -> BoxFuture<'_, Result<Vec<String>>> {
        self.with(|root| Directory::list(root, Duration::ZERO))
    }
}
