//! Object stores: `s3://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, `gs://BUCKET/PREFIX`.
//!
//! Credentials are found as the providers' own tools find them: in the environment (`AWS_ACCESS_KEY_ID`, `AWS_REGION`,
//! `AZURE_STORAGE_ACCOUNT_NAME`, `GOOGLE_SERVICE_ACCOUNT`, …) or from the host. They stand in no row and no log.

use super::limited;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path;
use object_store::{
    BackoffConfig, Error, GetOptions, GetRange, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions, PutPayload,
    RetryConfig,
};
use std::sync::Arc;
use std::time::Duration;
use wakeful_store::blob_store::BlobStore;

/// A bucket or a container, below a prefix.
#[derive(Debug)]
struct Cloud {
    name: String,
    store: Arc<dyn ObjectStore>,
    prefix: String,
}

/// Opens the store at a URL.
pub(super) fn open(address: &str) -> Result<Arc<dyn BlobStore>, String> {
    let wrong = |why: String| format!("[blobs] {address:?}: {why}");
    let url = address.trim_end_matches('/');
    let (scheme, rest) = url.split_once("://").ok_or_else(|| {
        wrong("give an absolute folder, or s3://BUCKET/PREFIX, az://CONTAINER/PREFIX, gs://BUCKET/PREFIX".to_owned())
    })?;
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() || bucket.contains(['@', '?', '#']) {
        return Err(wrong("it names no bucket; credentials do not belong here".to_owned()));
    }
    let retry = RetryConfig {
        backoff: BackoffConfig::default(),
        max_retries: 5,
        retry_timeout: Duration::from_secs(40),
    };
    let store: Result<Arc<dyn ObjectStore>, Error> = match scheme {
        "s3" => AmazonS3Builder::from_env().with_bucket_name(bucket).with_retry(retry).build().map(|s| Arc::new(s) as _),
        "az" => MicrosoftAzureBuilder::from_env()
            .with_container_name(bucket)
            .with_retry(retry)
            .build()
            .map(|store| Arc::new(store) as _),
        "gs" => {
            GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket).with_retry(retry).build().map(|s| Arc::new(s) as _)
        }
        other => return Err(wrong(format!("there is no kind of store {other:?}; there are s3, az and gs"))),
    };
    let store = store.map_err(|error| wrong(error.to_string()))?;
    Ok(Arc::new(Cloud { name: url.to_owned(), store, prefix: prefix.to_owned() }))
}

impl Cloud {
    fn path(&self, sha256: &str) -> Path {
        Path::from(format!("{}/{}/{sha256}", self.prefix, sha256.get(..2).unwrap_or_default()))
    }
}

impl BlobStore for Cloud {
    fn name(&self) -> &str {
        &self.name
    }

    fn put<'a>(&'a self, sha256: &'a str, bytes: &'a [u8]) -> BoxFuture<'a, Result<(), String>> {
        let payload = PutPayload::from(bytes.to_vec());
        limited(async move {
            let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
            match self.store.put_opts(&self.path(sha256), payload, options).await {
                Ok(_) | Err(Error::AlreadyExists { .. }) => Ok(()),
                Err(error) => Err(error.to_string()),
            }
        })
        .boxed()
    }

    fn part<'a>(
        &'a self,
        sha256: &'a str,
        start: u64,
        bytes: usize,
    ) -> BoxFuture<'a, Result<Option<Vec<u8>>, String>> {
        limited(async move {
            let range = Some(GetRange::Bounded(start..start + bytes as u64));
            let options = GetOptions { range, ..GetOptions::default() };
            match self.store.get_opts(&self.path(sha256), options).await {
                Ok(found) => {
                    found.bytes().await.map(|bytes| Some(bytes.to_vec())).map_err(|error| error.to_string())
                }
                Err(Error::NotFound { .. }) => Ok(None),
                Err(error) => Err(error.to_string()),
            }
        })
        .boxed()
    }

    fn delete<'a>(&'a self, sha256: &'a str) -> BoxFuture<'a, Result<(), String>> {
        limited(async move {
            match self.store.delete(&self.path(sha256)).await {
                Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(error.to_string()),
            }
        })
        .boxed()
    }
}
