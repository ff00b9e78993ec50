//! Stores of packs outside of Postgres: a directory, and with the feature `object-stores` S3, Azure and Google Cloud
//! Storage.

#[cfg(feature = "object-stores")]
mod cloud;

use futures::FutureExt as _;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use wakeful_store::blob_store::{Answer, BlobName, BlobStore, BlobStores};
use wakeful_workflow::access::is_space;

/// Opens the stores of a configuration.
///
/// # Errors
/// A sentence that says what is wrong with one of them.
pub fn stores(config: &wakeful_config::Blobs) -> Result<BlobStores, String> {
    let limit = config.timeout;
    let into = config.store.as_deref().map(|address| open(address, limit)).transpose()?;
    let others = config.also.iter().map(|address| open(address, limit)).collect::<Result<_, _>>()?;
    Ok(BlobStores::new(into, others))
}

/// Opens the store at `address`: a folder, or a URL.
fn open(address: &str, limit: Duration) -> Result<Arc<dyn BlobStore>, String> {
    if Path::new(address).is_absolute() {
        return Ok(Arc::new(Directory {
            name: address.trim_end_matches('/').to_owned(),
            root: address.into(),
            limit,
        }));
    }
    #[cfg(feature = "object-stores")]
    return cloud::open(address, limit);
    #[cfg(not(feature = "object-stores"))]
    Err(format!(
        "[blobs] {address:?}: this build has no object stores: build it with --features object-stores"
    ))
}

/// Where a blob is below the root of a store: `in-SPACE/SHA256`. `None`: the name is not a blob's. The word before the space
/// keeps a space whose name is `..` below the root.
fn key(BlobName { space, sha256 }: BlobName<'_>) -> Option<String> {
    let is_sha256 = sha256.len() == 64 && sha256.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_sha256 && is_space(space)).then(|| format!("in-{space}/{sha256}"))
}

/// Runs `work` within the time limit.
async fn limited<T>(limit: Duration, work: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    match tokio::time::timeout(limit, work).await {
        Ok(done) => done,
        Err(_) => Err(format!("it did not answer within {} seconds", limit.as_secs_f64())),
    }
}

/// A directory. Processes on several hosts may share it.
#[derive(Debug)]
struct Directory {
    name: String,
    root: PathBuf,
    limit: Duration,
}

impl Directory {
    /// `None`: the name is not a blob's.
    fn path(&self, blob: BlobName<'_>) -> Option<PathBuf> {
        key(blob).map(|key| self.root.join(key))
    }
}

async fn on_disk<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, String> {
    limited(limit, async move {
        match tokio::task::spawn_blocking(work).await {
            Ok(done) => done.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    })
    .await
}

impl BlobStore for Directory {
    fn name(&self) -> &str {
        &self.name
    }

    fn put<'a>(&'a self, blob: BlobName<'a>, bytes: &'a [u8]) -> Answer<'a, ()> {
        let (root, path, bytes) = (self.root.clone(), self.path(blob), bytes.to_vec());
        on_disk(self.limit, move || put(&root, &path.ok_or(ErrorKind::InvalidInput)?, &bytes)).boxed()
    }

    fn part<'a>(&'a self, blob: BlobName<'a>, start: u64, bytes: usize) -> Answer<'a, Option<Vec<u8>>> {
        let (root, path) = (self.root.clone(), self.path(blob));
        on_disk(self.limit, move || {
            let file = match File::open(path.ok_or(ErrorKind::InvalidInput)?) {
                // A store whose folder is gone is away; it has not lost its blobs.
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    fs::metadata(&root)?;
                    return Ok(None);
                }
                file => file?,
            };
            let rest = file.metadata()?.len().saturating_sub(start);
            let mut part = vec![0; bytes.min(usize::try_from(rest).unwrap_or(usize::MAX))];
            file.read_exact_at(&mut part, start)?;
            Ok(Some(part))
        })
        .boxed()
    }

    fn delete<'a>(&'a self, blob: BlobName<'a>) -> Answer<'a, ()> {
        let (root, path) = (self.root.clone(), self.path(blob));
        on_disk(self.limit, move || match fs::remove_file(path.ok_or(ErrorKind::InvalidInput)?) {
            // If the folder is away too, the blob may still be in it. So this is a success only if the folder is there.
            Err(error) if error.kind() == ErrorKind::NotFound => fs::metadata(&root).map(drop),
            deleted => deleted,
        })
        .boxed()
    }
}

/// Writes the file under another name, makes it durable, and gives it its name.
fn put(root: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|metadata| metadata.len() == bytes.len() as u64) {
        return Ok(());
    }
    // The root itself is not made: an unmounted disk must not look like an empty store.
    fs::metadata(root)?;
    let folder = path.parent().unwrap_or(root);
    match fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let mut part = tempfile::Builder::new().prefix(".part-").tempfile_in(folder)?;
    part.write_all(bytes)?;
    part.as_file().sync_all()?;
    part.persist(path).map_err(|error| error.error)?;
    File::open(folder)?.sync_all()?;
    File::open(root)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::{Digest as _, Sha256};

    #[tokio::test]
    async fn a_directory_keeps_what_it_was_given_and_is_away_when_it_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("blobs");
        let store = open(root.to_str().unwrap(), Duration::from_secs(25)).unwrap();
        let bytes = vec![7; 1000];
        let sha256 = hex::encode(Sha256::digest(&bytes));
        let blob = BlobName { space: "acme", sha256: &sha256 };
        assert!(store.put(blob, &bytes).await.is_err(), "it does not make its folder");
        assert!(store.part(blob, 0, 10).await.is_err());
        assert!(store.delete(blob).await.is_err());
        fs::create_dir(&root).unwrap();
        assert_eq!(store.part(blob, 0, 10).await.unwrap(), None);
        store.put(blob, &bytes).await.unwrap();
        store.put(blob, &bytes).await.unwrap();
        assert_eq!(store.part(blob, 990, 100).await.unwrap().unwrap(), vec![7; 10]);
        assert_eq!(store.part(blob, 5000, 100).await.unwrap().unwrap(), Vec::<u8>::new());
        let of_others = BlobName { space: "other", ..blob };
        assert_eq!(store.part(of_others, 0, 10).await.unwrap(), None);
        store.put(of_others, &bytes).await.unwrap();
        store.delete(blob).await.unwrap();
        store.delete(blob).await.unwrap();
        assert_eq!(store.part(blob, 0, 10).await.unwrap(), None);
        assert!(store.part(of_others, 0, 10).await.unwrap().is_some(), "each space has its own");
    }

    #[tokio::test]
    async fn no_name_leads_out_of_a_directory() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("blobs");
        fs::create_dir(&root).unwrap();
        let store = open(root.to_str().unwrap(), Duration::from_secs(25)).unwrap();
        let sha256 = "a".repeat(64);
        for (space, sha256) in
            [("a", "../../etc/passwd"), ("a", ""), ("a", &"x".repeat(64)), ("a/b", &sha256), ("", &sha256)]
        {
            let blob = BlobName { space, sha256 };
            assert!(store.put(blob, b"x").await.is_err(), "{blob:?}");
            assert!(store.part(blob, 0, 10).await.is_err(), "{blob:?}");
        }
        // Names that a space may have.
        for space in ["..", ".", "a.b"] {
            store.put(BlobName { space, sha256: &sha256 }, b"x").await.unwrap();
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert_eq!(fs::read_dir(&root).unwrap().count(), 3);
    }
}
