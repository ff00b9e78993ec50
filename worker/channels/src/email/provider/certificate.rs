//! The certificates that SNS signs with. Fetched from Amazon's host and kept for a day.

use futures::StreamExt;
use reqwest::Url;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use wakeful_engine::web::{self, Reach};
use wakeful_http::problem::Problem;

/// The largest answer that is read, in bytes.
const ANSWER_BYTES: usize = 64 << 10;

const TIMEOUT: Duration = Duration::from_secs(10);

const KEPT: Duration = Duration::from_secs(86_400);

/// How many certificates are kept. SNS uses one per region at a time and changes it about once a year.
const KEPT_AT_ONCE: usize = 16;

/// Fetches from SNS, one request at a time, so that a flood of made-up certificate addresses causes no flood
/// of requests.
pub struct Certificates {
    client: Result<reqwest::Client, String>,
    /// Replaces the host, in tests.
    instead: Option<Url>,
    kept: Mutex<BTreeMap<String, (Instant, CertificateDer<'static>)>>,
    fetching: tokio::sync::Mutex<()>,
}

impl Certificates {
    /// `hosts` are the URLs of the hosts that sign for the configured topics. In a private network they may have
    /// private addresses.
    pub fn new(instead: Option<Url>, hosts: &[&str]) -> Certificates {
        let builder = web::client(Reach::Named(hosts)).timeout(TIMEOUT);
        let client = builder.https_only(instead.is_none()).build().map_err(|error| error.to_string());
        Certificates { client, instead, kept: Mutex::default(), fetching: tokio::sync::Mutex::default() }
    }

    /// The certificate at `url`, whose host the caller has checked.
    ///
    /// # Errors
    /// 401 when the address has no certificate; 503 when the host does not answer.
    pub async fn get(&self, url: &Url) -> Result<CertificateDer<'static>, Problem> {
        if let Some(kept) = self.kept(url) {
            return Ok(kept);
        }
        let _one = self.fetching.lock().await;
        if let Some(kept) = self.kept(url) {
            return Ok(kept);
        }
        let none =
            |why: &str| super::unauthorized(format!("there is no certificate at SigningCertURL: {why}"));
        let (status, pem) = self.fetch(url).await?;
        if status.is_client_error() {
            return Err(none(status.as_str()));
        }
        if !status.is_success() {
            return Err(unavailable(status.as_str()));
        }
        let certificate = CertificateDer::from_pem_slice(&pem).map_err(|error| none(&error.to_string()))?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= KEPT_AT_ONCE
            && let Some(oldest) = kept.iter().min_by_key(|(_, (at, _))| *at).map(|(url, _)| url.clone())
        {
            kept.remove(&oldest);
        }
        kept.insert(url.to_string(), (Instant::now(), certificate.clone()));
        Ok(certificate)
    }

    fn kept(&self, url: &Url) -> Option<CertificateDer<'static>> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, certificate) = kept.get(url.as_str())?;
        (at.elapsed() < KEPT).then(|| certificate.clone())
    }

    /// Requests `url`, whose host the caller has checked, and returns status and body.
    ///
    /// # Errors
    /// 503 when the host does not answer, or the answer is too large.
    pub async fn fetch(&self, url: &Url) -> Result<(reqwest::StatusCode, Vec<u8>), Problem> {
        let mut url = url.clone();
        if let Some(instead) = &self.instead {
            let (path, query) = (url.path().to_owned(), url.query().map(str::to_owned));
            url = instead.clone();
            url.set_path(&path);
            url.set_query(query.as_deref());
        }
        let client = self.client.as_ref().map_err(|error| unavailable(error))?;
        let answer =
            client.get(url).send().await.map_err(|error| unavailable(&error.without_url().to_string()))?;
        let status = answer.status();
        let mut chunks = answer.bytes_stream();
        let mut body = Vec::new();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|error| unavailable(&error.without_url().to_string()))?;
            if body.len() + chunk.len() > ANSWER_BYTES {
                return Err(unavailable("it says too much"));
            }
            body.extend_from_slice(&chunk);
        }
        Ok((status, body))
    }
}

fn unavailable(why: &str) -> Problem {
    Problem::unavailable(format!("SNS cannot be reached: {why}"), 5)
}
