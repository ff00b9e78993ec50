//! Outgoing requests. Every HTTP client of this project is made here, by [`client`]; a test reads the sources.
//!
//! Two kinds of hosts are contacted. The operator's configuration names some: providers, messengers, collectors. They
//! may have any address. Other hosts come from texts: from a model, from a mail, from a page that redirects. They may
//! only have public addresses, so that no text reaches the worker's own network or a cloud's metadata.
//!
//! A client resolves a name once and connects to the addresses that were checked, so an answer that changes between
//! check and connection changes nothing. It follows no redirect and unpacks nothing. [`Web`] follows redirects for tools, and
//! checks each like a first request.

mod address;
mod fetch;
mod named;
mod resolver;

pub use fetch::{Fetched, Web, WebError, WebRequest};
pub use named::fetch_named;

pub(crate) use fetch::Unsaved;

use resolver::Resolver;
use rustls::ClientConfig;
use rustls::crypto::aws_lc_rs;
use rustls_platform_verifier::BuilderVerifierExt as _;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How long a connection may take to open.
const CONNECT: Duration = Duration::from_secs(10);

/// Which hosts a client may contact.
#[derive(Clone, Copy, Debug)]
pub enum Reach<'a> {
    /// The hosts of these URLs, at any address, because the operator named them. Any other host only at public
    /// addresses.
    Named(&'a [&'a str]),
    /// Hosts with public addresses only. The text says what the operator can do if a host has another one.
    Public(&'static str),
}

/// Returns a builder of an HTTP client. It follows no redirect: a redirect would carry what the request holds,
/// keys too, to any host that it names. It unpacks no compressed answer, so an answer is as large as what was sent.
///
/// The client checks the addresses of names. A literal address in a URL reaches no resolver; [`Web`] checks that too.
pub fn client(reach: Reach<'_>) -> reqwest::ClientBuilder {
    let builder = reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT)
        .user_agent(concat!("wakeful/", env!("CARGO_PKG_VERSION")))
        .no_gzip()
        .no_brotli()
        .no_zstd()
        .no_deflate();
    let builder = match tls() {
        Some(tls) => builder.tls_backend_preconfigured(tls),
        // Building the client says what is wrong with the system's certificates.
        None => builder,
    };
    match reach {
        Reach::Named(urls) => builder.dns_resolver(Arc::new(Resolver::naming(urls))),
        // A proxy would resolve the name itself, and this process could not check the address.
        Reach::Public(remedy) => {
            builder.no_proxy().dns_resolver(Arc::new(Resolver { remedy, ..Resolver::default() }))
        }
    }
}

/// What every client trusts: the system's certificates. They are read once, because reading them takes longer than the rest of
/// a start, and each copy takes memory.
fn tls() -> Option<ClientConfig> {
    static TLS: OnceLock<Option<ClientConfig>> = OnceLock::new();
    TLS.get_or_init(|| of_the_system().ok()).clone()
}

fn of_the_system() -> Result<ClientConfig, rustls::Error> {
    let builder = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()));
    let builder = builder.with_safe_default_protocol_versions()?.with_platform_verifier()?;
    let mut tls = builder.with_no_client_auth();
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(tls)
}

/// An error and its causes, each once: some errors have the text of their cause in their own.
pub fn causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests;
