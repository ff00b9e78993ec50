//! The certificates that SNS signs with, fetched from its own host and kept for a day.

use futures::StreamExt;
use reqwest::Url;
use reqwest::redirect::Policy;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use wakeful_http::problem::Problem;

/// What an answer may have.
const ANSWER_BYTES: usize = 64 << 10;

const TIMEOUT: Duration = Duration::from_secs(10);

const KEPT: Duration = Duration::from_secs(86_400);

/// How many are kept. SNS uses one at a time in a region, and changes it about once a year.
const KEPT_AT_ONCE: usize = 16;

/// Fetches from SNS, one request at a time: a stranger who names certificates makes us ask for them one by one.
pub struct Certificates {
    client: Result<reqwest::Client, String>,
    /// In place of the host, in tests.
    instead: Option<Url>,
    kept: Mutex<BTreeMap<String, (Instant, CertificateDer<'static>)>>,
    fetching: tokio::sync::Mutex<()>,
}

impl Certificates {
    pub fn new(instead: Option<Url>) -> Certificates {
        // No redirect: it would lead away from the one host that is trusted.
        let builder = reqwest::Client::builder().redirect(Policy::none()).timeout(TIMEOUT);
        let client = builder.https_only(instead.is_none()).build().map_err(|error| error.to_string());
        Certificates { client, instead, kept: Mutex::default(), fetching: tokio::sync::Mutex::default() }
    }

    /// The certificate at `url`, whose host the caller has checked.
    ///
    /// # Errors
    /// 401 when there is none at that address; 503 when the host does not answer.
    pub async fn get(&self, url: &Url) -> Result<CertificateDer<'static>, Problem> {
        if let Some(kept) = self.kept(url) {
            return Ok(kept);
        }
        let _one = self.fetching.lock().await;
        if let Some(kept) = self.kept(url) {
            return Ok(kept);
        }
        let none = |why: &str| super::unproved(format!("there is no certificate at SigningCertURL: {why}"));
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

    /// Asks a host that the caller has checked, and gives what it says.
    ///
    /// # Errors
    /// 503 when it does not answer, or says too much.
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
    Problem::unavailable(format!("SNS cannot be asked: {why}"), 5)
}
