//! What a tool fetches with: the rules of its agent and its session, redirects, and limits.
#![deny(missing_docs)]

use super::address::literal;
use super::causes;
use super::resolver::{Resolver, Unresolved};
use crate::tool::ToolError;
use reqwest::header::{
    ACCEPT_ENCODING, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderMap, HeaderName,
    HeaderValue, LOCATION, TRANSFER_ENCODING, UPGRADE,
};
use reqwest::{Method, Response, StatusCode, Url};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use wakeful_config::web::Web as Settings;
use wakeful_workflow::policy::WebPolicy;

/// Headers that a tool cannot set.
const OURS: [HeaderName; 6] = [HOST, CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING, UPGRADE, ACCEPT_ENCODING];

/// How many redirects of one fetch are followed.
const REDIRECTS: usize = 5;

/// Fetches from the web for one tool call.
///
/// It contacts only hosts that the agent's `web_allow` and `web_deny` and the session's policy permit, and only at public
/// addresses, except hosts of `[web] private_hosts`. It follows up to five redirects of a GET or HEAD and checks each
/// like a first request. It bounds the answer's size, the wait for its head, and the whole time.
#[derive(Clone, Debug)]
pub struct Web {
    shared: Arc<Shared>,
    /// All of them must permit a host.
    rules: Vec<WebPolicy>,
}

#[derive(Debug)]
struct Shared {
    client: Result<reqwest::Client, String>,
    resolver: Resolver,
    settings: Settings,
}

/// A request.
#[derive(Clone, Debug, Default)]
pub struct WebRequest {
    /// `GET` if it is empty.
    pub method: String,
    /// An `http://` or `https://` URL.
    pub url: String,
    /// Names and values. They are not sent to another host that a redirect leads to.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fetched {
    /// The HTTP status, whatever it is.
    pub status: u16,
    /// The URL that answered, after all redirects.
    pub url: String,
    /// The value of `Content-Type`, or nothing.
    pub content_type: String,
    /// The whole body.
    pub body: Vec<u8>,
}

impl Fetched {
    /// Returns the body as text. Bytes that are not UTF-8 become U+FFFD.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// Why nothing was fetched. The text is for the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WebError {
    /// A rule refuses the address. Nothing was sent to it.
    #[error("{0}")]
    Refused(String),
    /// No connection was made, so nothing was sent.
    #[error("{0}")]
    NotSent(String),
    /// The request was sent, and no whole answer came that could be taken. What it asked for may have happened.
    #[error("{0}")]
    Unknown(String),
}

/// Why [`Web::save`] did not get a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unsaved {
    /// The host does not answer, breaks off, or says that it fails now. Later it may have the file.
    Away(String),
    /// Another try changes nothing: a rule refuses the host, it has no such file, or the file is too large.
    Refused(String),
}

impl From<WebError> for Unsaved {
    fn from(error: WebError) -> Unsaved {
        match error {
            WebError::Refused(text) => Unsaved::Refused(text),
            WebError::NotSent(text) | WebError::Unknown(text) => Unsaved::Away(text),
        }
    }
}

impl From<WebError> for ToolError {
    fn from(error: WebError) -> ToolError {
        match error {
            WebError::Unknown(text) => ToolError::outcome_unknown(text),
            WebError::Refused(_) | WebError::NotSent(_) => ToolError::new(error.to_string()),
        }
    }
}

impl Default for Web {
    /// Public hosts only, with the default limits.
    fn default() -> Web {
        Web::of(Settings::default(), Resolver::default())
    }
}

impl Web {
    /// # Errors
    /// When the HTTP client cannot be built.
    pub(crate) fn checked(settings: &Settings) -> Result<Web, String> {
        let named = WebPolicy { allow: Some(settings.private_hosts.clone()), ..WebPolicy::default() };
        let remedy = "; an operator can list it in [web] private_hosts";
        let web = Web::of(settings.clone(), Resolver { named, remedy, ..Resolver::default() });
        match &web.shared.client {
            Ok(_) => Ok(web),
            Err(error) => Err(error.clone()),
        }
    }

    /// Creates what a process's tools fetch through.
    ///
    /// # Errors
    /// When the HTTP client cannot be built.
    #[doc(hidden)]
    pub fn new(settings: &Settings) -> anyhow::Result<Web> {
        Web::checked(settings).map_err(|error| anyhow::anyhow!("no HTTP client for tools: {error}"))
    }

    pub(super) fn of(settings: Settings, resolver: Resolver) -> Web {
        // A kept connection would answer for a name that resolves to something else by now.
        let client = super::client(super::Reach::Public("")).dns_resolver(Arc::new(resolver.clone()));
        let client = client.pool_max_idle_per_host(0).build().map_err(|error| error.to_string());
        Web { shared: Arc::new(Shared { client, resolver, settings }), rules: Vec::new() }
    }

    /// Returns the same under the rules of an agent and of a session.
    #[doc(hidden)]
    #[must_use]
    pub fn under(&self, agent: &WebPolicy, session: Option<&WebPolicy>) -> Web {
        let rules = std::iter::once(agent).chain(session).cloned().collect();
        Web { shared: Arc::clone(&self.shared), rules }
    }

    /// Fetches `url`.
    ///
    /// # Errors
    /// [`WebError`]. An answer of any status is returned as an answer.
    pub async fn get(&self, url: &str) -> Result<Fetched, WebError> {
        self.send(WebRequest { url: url.to_owned(), ..WebRequest::default() }).await
    }

    /// Sends a request. Redirects are followed only for GET and HEAD; the answer to another one may be a redirect.
    ///
    /// # Errors
    /// As for [`Web::get`].
    pub async fn send(&self, request: WebRequest) -> Result<Fetched, WebError> {
        let deadline = Instant::now() + self.shared.settings.total;
        let (answer, url) = self.answered(request, deadline).await?;
        self.whole(answer, url, deadline).await
    }

    /// Writes what `url` has into `file`, up to `limit` bytes and within `time`. Only an answer with status 200 counts.
    pub(crate) async fn save(
        &self,
        url: &str,
        mut file: &std::fs::File,
        limit: u64,
        time: Duration,
    ) -> Result<(), Unsaved> {
        let deadline = Instant::now() + time;
        let request = WebRequest { url: url.to_owned(), ..WebRequest::default() };
        let (mut answer, url) = self.answered(request, deadline).await?;
        let (host, status) = (host_of(&url), answer.status());
        if status != StatusCode::OK {
            let said = format!("{host} answers with status {}", status.as_u16());
            return Err(if fails_now(status) { Unsaved::Away(said) } else { Unsaved::Refused(said) });
        }
        let mut written = 0;
        while let Some(chunk) = next(&mut answer, &host, deadline).await? {
            written += chunk.len() as u64;
            if written > limit {
                return Err(Unsaved::Refused(format!("{host} answers with more than {limit} bytes")));
            }
            // Chunks are small, so the write does not hold up the task for long.
            let kept = std::io::Write::write_all(&mut file, &chunk);
            kept.map_err(|error| Unsaved::Refused(format!("it cannot be written: {error}")))?;
        }
        Ok(())
    }

    /// Sends a request, and follows the redirects of a GET or HEAD. Returns the answer without its body, and the URL that gave it.
    async fn answered(&self, request: WebRequest, deadline: Instant) -> Result<(Response, Url), WebError> {
        let method = if request.method.is_empty() { "GET" } else { request.method.as_str() };
        let method = Method::from_bytes(method.as_bytes())
            .map_err(|_| refused(format!("{method:?} is not an HTTP method")))?;
        let follows = matches!(method, Method::GET | Method::HEAD);
        let mut headers = headers(&request.headers)?;
        let mut url = parse(&request.url)?;
        for _ in 0..=REDIRECTS {
            self.check(&url)?;
            let answer = self.once(&method, &url, &headers, &request.body, deadline).await?;
            let location =
                answer.headers().get(LOCATION).filter(|_| follows && answer.status().is_redirection());
            let Some(location) = location else {
                return Ok((answer, url));
            };
            let target = location.to_str().ok().and_then(|location| url.join(location).ok());
            let target = target.ok_or_else(|| refused("the server redirects to no address"))?;
            if url.scheme() == "https" && target.scheme() != "https" {
                return Err(refused("the server redirects from https to an address without encryption"));
            }
            if target.origin() != url.origin() {
                headers.clear();
            }
            url = target;
        }
        Err(refused(format!("the server redirects more than {REDIRECTS} times")))
    }

    /// Resolves `host` for a tool that has a protocol of its own, and returns the addresses that it may connect to. It
    /// must connect to one of these: another lookup of the name may give another address.
    ///
    /// # Errors
    /// [`WebError::Refused`], or [`WebError::NotSent`] if the name was not found in time.
    pub async fn addresses(&self, host: &str, port: u16) -> Result<Vec<SocketAddr>, WebError> {
        let url = parse(&format!("http://{host}/"))?;
        self.check(&url)?;
        let of = |ip: IpAddr| SocketAddr::new(ip, port);
        if let Some(ip) = literal(&url) {
            return Ok(vec![of(ip)]);
        }
        let deadline = Instant::now() + self.shared.settings.first_byte;
        let found =
            timeout_at(deadline, self.shared.resolver.addresses(url.host_str().unwrap_or_default())).await;
        let found = found.map_err(|_| WebError::NotSent(format!("{host} was not resolved in time")))?;
        Ok(found.map_err(|error| refused(error.to_string()))?.into_iter().map(of).collect())
    }

    /// Checks what can be checked without resolving a name.
    fn check(&self, url: &Url) -> Result<(), WebError> {
        if !matches!(url.scheme(), "http" | "https") {
            return Err(refused(format!("{}: only http and https addresses can be fetched", url.scheme())));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(refused("an address with a user name or a password in it is not fetched"));
        }
        let host = url.host_str().unwrap_or_default();
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if !self.rules.iter().all(|rules| rules.allows(host)) {
            return Err(refused(format!(
                "{host} may not be contacted: the operator's web_allow and web_deny say which hosts may, and the conversation \
                 cannot change them"
            )));
        }
        let resolver = &self.shared.resolver;
        match literal(url) {
            Some(ip) if !(resolver.public)(ip) && !resolver.named.allows(host) => {
                Err(refused(format!("{host} may not be contacted: it is not a public address")))
            }
            _ => Ok(()),
        }
    }

    async fn once(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        body: &[u8],
        deadline: Instant,
    ) -> Result<Response, WebError> {
        let client = self.shared.client.as_ref().map_err(|error| WebError::NotSent(error.clone()))?;
        let request = client
            .request(method.clone(), url.clone())
            .headers(headers.clone())
            .header(ACCEPT_ENCODING, "identity")
            .body(body.to_vec());
        let first = deadline.min(Instant::now() + self.shared.settings.first_byte);
        match timeout_at(first, request.send()).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => {
                let error = error.without_url();
                let text = format!("{} did not answer: {}", host_of(url), shorten(&causes(&error)));
                Err(if is_not_public(&error) {
                    WebError::Refused(text)
                } else if error.is_connect() || error.is_builder() {
                    WebError::NotSent(text)
                } else {
                    WebError::Unknown(text)
                })
            }
            Err(_) => Err(WebError::Unknown(format!("{} did not answer in time", host_of(url)))),
        }
    }

    /// Reads the body, up to the limit.
    async fn whole(&self, mut answer: Response, url: Url, deadline: Instant) -> Result<Fetched, WebError> {
        let header = |name: HeaderName| {
            answer.headers().get(name).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
        };
        let host = host_of(&url);
        // What was packed could unpack to a thousand times its size, and it was not asked for.
        if let Some(packed) = header(CONTENT_ENCODING).filter(|one| !one.is_empty() && one != "identity") {
            return Err(WebError::Unknown(format!("{host} sent a packed answer ({})", shorten(&packed))));
        }
        let (status, content_type) = (answer.status().as_u16(), header(CONTENT_TYPE).unwrap_or_default());
        let limit = self.shared.settings.max_bytes;
        let too_large = || WebError::Unknown(format!("{host} answers with more than {limit} bytes"));
        if answer.content_length().is_some_and(|length| length > limit as u64) {
            return Err(too_large());
        }
        let mut body = Vec::new();
        while let Some(chunk) = next(&mut answer, &host, deadline).await? {
            if body.len() + chunk.len() > limit {
                return Err(too_large());
            }
            body.extend_from_slice(&chunk);
        }
        Ok(Fetched { status, url: url.into(), content_type, body })
    }
}

/// Whether an answer says that the host fails now, or has no time.
fn fails_now(status: StatusCode) -> bool {
    const BUSY: [StatusCode; 3] =
        [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_EARLY, StatusCode::TOO_MANY_REQUESTS];
    status.is_server_error() || BUSY.contains(&status)
}

/// Whether the resolver refused the address of a name.
fn is_not_public(error: &reqwest::Error) -> bool {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if matches!(cause.downcast_ref(), Some(Unresolved::NotPublic(_))) {
            return true;
        }
        source = cause.source();
    }
    false
}

/// The next part of a body.
async fn next(
    answer: &mut Response,
    host: &str,
    deadline: Instant,
) -> Result<Option<bytes::Bytes>, WebError> {
    let chunk = timeout_at(deadline, answer.chunk()).await;
    let chunk = chunk.map_err(|_| WebError::Unknown(format!("{host} did not finish its answer in time")))?;
    chunk.map_err(|error| {
        WebError::Unknown(format!(
            "the answer of {host} broke off: {}",
            shorten(&causes(&error.without_url()))
        ))
    })
}

fn parse(url: &str) -> Result<Url, WebError> {
    Url::parse(url).map_err(|error| refused(format!("{:?} is not an address: {error}", shorten(url))))
}

fn headers(given: &[(String, String)]) -> Result<HeaderMap, WebError> {
    let mut headers = HeaderMap::new();
    for (name, value) in given {
        let wrong = || refused(format!("{:?} is not a header that can be sent", shorten(name)));
        let known = HeaderName::from_bytes(name.as_bytes()).map_err(|_| wrong())?;
        // They say which host is meant and where the request ends, which was checked and is ours to say.
        if OURS.contains(&known) {
            return Err(wrong());
        }
        headers.append(known, HeaderValue::from_str(value).map_err(|_| wrong())?);
    }
    Ok(headers)
}

fn refused(text: impl Into<String>) -> WebError {
    WebError::Refused(text.into())
}

fn host_of(url: &Url) -> String {
    url.host_str().unwrap_or_default().to_owned()
}

fn shorten(text: &str) -> String {
    text.chars().take(200).collect()
}
