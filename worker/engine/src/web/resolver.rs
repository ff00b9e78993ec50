//! Resolves a host name and checks the addresses. The client connects to no other address than these.

use super::address::is_public;
use futures::future::BoxFuture;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use wakeful_workflow::policy::WebPolicy;

/// Looks a name up. A test has one of its own.
pub(super) type Lookup =
    Arc<dyn Fn(String) -> BoxFuture<'static, std::io::Result<Vec<IpAddr>>> + Send + Sync>;

/// Variables that name a proxy. The operator set them, so a proxy may have a private address.
const PROXIES: [&str; 6] =
    ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"];

/// Refuses a name with any address that is not public, unless the operator named the host.
#[derive(Clone)]
pub(super) struct Resolver {
    /// Hosts that may have any address.
    pub named: WebPolicy,
    pub lookup: Lookup,
    /// What the operator can do about an address that is not public.
    pub remedy: &'static str,
    /// Which addresses count as public.
    pub public: fn(IpAddr) -> bool,
}

/// Why a name has no address to connect to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unresolved {
    /// It was not found now.
    #[error("{0}")]
    NotFound(String),
    /// It has an address that may not be contacted.
    #[error("{0}")]
    NotPublic(String),
}

impl Default for Resolver {
    fn default() -> Resolver {
        Resolver {
            named: none(),
            lookup: Arc::new(|name| Box::pin(system(name))),
            remedy: "",
            public: is_public,
        }
    }
}

impl Resolver {
    /// Lets the hosts of `urls` have any address, and those of the environment's proxies.
    pub fn naming(urls: &[&str]) -> Resolver {
        let proxies = PROXIES.iter().filter_map(|name| std::env::var(name).ok());
        let proxies = proxies.map(|one| if one.contains("://") { one } else { format!("http://{one}") });
        let hosts = urls.iter().map(|url| (*url).to_owned()).chain(proxies).filter_map(|url| {
            let url = reqwest::Url::parse(&url).ok()?;
            Some(url.host_str()?.trim_end_matches('.').to_owned())
        });
        Resolver {
            named: WebPolicy { allow: Some(hosts.collect()), ..WebPolicy::default() },
            ..Resolver::default()
        }
    }

    /// Returns the addresses of `name`.
    ///
    /// # Errors
    /// When there is none, or one of them is not public.
    pub async fn addresses(&self, name: &str) -> Result<Vec<IpAddr>, Unresolved> {
        let found = (self.lookup)(name.to_owned())
            .await
            .map_err(|error| Unresolved::NotFound(format!("{name} was not found: {error}")))?;
        if found.is_empty() {
            return Err(Unresolved::NotFound(format!("{name} has no address")));
        }
        match found.iter().find(|ip| !(self.public)(**ip)) {
            Some(private) if !self.named.allows(name) => Err(Unresolved::NotPublic(format!(
                "{name} is {private}, which is not a public address{}",
                self.remedy
            ))),
            _ => Ok(found),
        }
    }
}

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let resolver = self.clone();
        Box::pin(async move {
            let found = resolver.addresses(name.as_str()).await?;
            // Port 0 means the port of the URL.
            let addresses: Addrs = Box::new(found.into_iter().map(|ip| SocketAddr::new(ip, 0)));
            Ok(addresses)
        })
    }
}

/// A policy that names no host.
fn none() -> WebPolicy {
    WebPolicy { allow: Some(Vec::new()), ..WebPolicy::default() }
}

async fn system(name: String) -> std::io::Result<Vec<IpAddr>> {
    Ok(tokio::net::lookup_host((name.as_str(), 0)).await?.map(|address| address.ip()).collect())
}

impl std::fmt::Debug for Resolver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resolver").field("named", &self.named).finish_non_exhaustive()
    }
}
