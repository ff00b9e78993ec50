//! Object stores: `s3://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, `gs://BUCKET/PREFIX`.
//!
//! Credentials are found as the providers' own tools find them: in the environment (`AWS_ACCESS_KEY_ID`, `AWS_REGION`,
//! `AZURE_STORAGE_ACCOUNT_NAME`, `GOOGLE_SERVICE_ACCOUNT`, …) or from the host. They stand in no row and no log.

use super::{key, limited};
use futures::FutureExt as _;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path;
use object_store::{
    BackoffConfig, Error, GetOptions, GetRange, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions,
    PutPayload, RetryConfig,
};
use std::sync::Arc;
use std::time::Duration;
use wakeful_store::blob_store::{Answer, BlobName, BlobStore};

/// A bucket or a container, below a prefix.
#[derive(Debug)]
struct Cloud {
    name: String,
    store: Arc<dyn ObjectStore>,
    prefix: String,
    limit: Duration,
}

/// Opens the store at a URL.
pub(super) fn open(address: &str, limit: Duration) -> Result<Arc<dyn BlobStore>, String> {
    let wrong = |why: String| format!("[blobs] {address:?}: {why}");
    let url = address.trim_end_matches('/');
    let (scheme, rest) = url.split_once("://").ok_or_else(|| {
        wrong(
            "give an absolute folder, or s3://BUCKET/PREFIX, az://CONTAINER/PREFIX, gs://BUCKET/PREFIX"
                .to_owned(),
        )
    })?;
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() || bucket.contains(['@', '?', '#']) {
        return Err(wrong("it names no bucket; credentials do not belong here".to_owned()));
    }
    // The last answer comes before the time is over, so that it can be told.
    let backoff =
        BackoffConfig { init_backoff: limit / 50, max_backoff: limit / 5, ..BackoffConfig::default() };
    let retry = RetryConfig { backoff, max_retries: 5, retry_timeout: limit / 2 };
    let store: Result<Arc<dyn ObjectStore>, Error> = match scheme {
        "s3" => AmazonS3Builder::from_env()
            .with_bucket_name(bucket)
            .with_retry(retry)
            // Not every store that speaks S3 deletes in bulk, and one that does not know the request may answer "not found".
            .with_disable_bulk_delete(true)
            .build()
            .map(|store| Arc::new(store) as _),
        "az" => MicrosoftAzureBuilder::from_env()
            .with_container_name(bucket)
            .with_retry(retry)
            .build()
            .map(|store| Arc::new(store) as _),
        "gs" => GoogleCloudStorageBuilder::from_env()
            .with_bucket_name(bucket)
            .with_retry(retry)
            .build()
            .map(|s| Arc::new(s) as _),
        other => return Err(wrong(format!("there is no kind of store {other:?}; there are s3, az and gs"))),
    };
    let store = store.map_err(|error| wrong(error.to_string()))?;
    Ok(Arc::new(Cloud { name: url.to_owned(), store, prefix: prefix.to_owned(), limit }))
}

impl Cloud {
    fn path(&self, blob: BlobName<'_>) -> Result<Path, String> {
        let key = key(blob).ok_or("the blob's name is not a SHA-256 in a space")?;
        Ok(Path::from(format!("{}/{key}", self.prefix)))
    }
}

impl BlobStore for Cloud {
    fn name(&self) -> &str {
        &self.name
    }

    fn put<'a>(&'a self, blob: BlobName<'a>, bytes: &'a [u8]) -> Answer<'a, ()> {
        let payload = PutPayload::from(bytes.to_vec());
        limited(self.limit, async move {
            // If it is there, it stays: its name is that of its bytes.
            let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
            match self.store.put_opts(&self.path(blob)?, payload, options).await {
                Ok(_) | Err(Error::AlreadyExists { .. }) => Ok(()),
                Err(error) => Err(said(&error)),
            }
        })
        .boxed()
    }

    fn part<'a>(&'a self, blob: BlobName<'a>, start: u64, bytes: usize) -> Answer<'a, Option<Vec<u8>>> {
        limited(self.limit, async move {
            let range = Some(GetRange::Bounded(start..start.saturating_add(bytes as u64)));
            let options = GetOptions { range, ..GetOptions::default() };
            match self.store.get_opts(&self.path(blob)?, options).await {
                Ok(found) => {
                    found.bytes().await.map(|bytes| Some(bytes.to_vec())).map_err(|error| said(&error))
                }
                // Without its bucket a store is away; it has not lost its blobs.
                Err(error @ Error::NotFound { .. }) if is_of_bucket(&error) => Err(said(&error)),
                Err(Error::NotFound { .. }) => Ok(None),
                Err(error) => Err(said(&error)),
            }
        })
        .boxed()
    }

    fn delete<'a>(&'a self, blob: BlobName<'a>) -> Answer<'a, ()> {
        limited(self.limit, async move {
            match self.store.delete(&self.path(blob)?).await {
                Err(error @ Error::NotFound { .. }) if is_of_bucket(&error) => Err(said(&error)),
                Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(said(&error)),
            }
        })
        .boxed()
    }
}

/// Whether the bucket or the container is missing, as S3, Azure and Google Cloud Storage say it.
fn is_of_bucket(error: &Error) -> bool {
    let text = error.to_string();
    ["NoSuchBucket", "ContainerNotFound", "bucket does not exist"].iter().any(|code| text.contains(code))
}

/// What a provider said, in one line that a log and a row may have. A signed URL has a signature in its query.
fn said(error: &Error) -> String {
    let text = error.to_string();
    let mut words = text.split_whitespace().map(|word| match word.split_once('?') {
        Some((before, _)) if before.contains("://") => before,
        _ => word,
    });
    let mut line = String::new();
    while let Some(word) = words.next().filter(|_| line.len() < 400) {
        line.push_str(if line.is_empty() { "" } else { " " });
        line.push_str(word);
    }
    line
}
