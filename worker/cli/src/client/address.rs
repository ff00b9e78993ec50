//! Which server the commands of a client talk to.

use crate::dev::Home;
use secrecy::ExposeSecret as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use wakeful_config::Config;

/// The variable that names the server.
pub const VARIABLE: &str = "WAKEFUL_URL";

/// An address, and who gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub url: String,
    /// Somebody named it, so a server has to be there.
    pub named: bool,
}

/// Returns the server that `given` names (an option or the environment), else the one of the `wakeful dev` whose database
/// is DATABASE_URL, else the one that it runs in its default place, else the one on `[server] listen`. `None`: that is port 0.
pub fn server(given: Option<&str>, config: &Config) -> Option<Address> {
    if let Some(url) = given.filter(|url| !url.trim().is_empty()) {
        return Some(Address { url: url.to_owned(), named: true });
    }
    let database = config.database.url.as_ref().and_then(|url| Home::of_database(url.expose_secret()));
    let mut homes = database.into_iter().chain(Home::at(None).ok());
    if let Some(listen) = homes.find_map(|home| home.address()) {
        return Some(Address { url: format!("http://{}", reachable(listen)), named: false });
    }
    let listen = config.server.listen;
    (listen.port() != 0).then(|| Address { url: format!("http://{}", reachable(listen)), named: false })
}

/// An address that listens everywhere is asked on this machine.
pub fn reachable(listen: SocketAddr) -> SocketAddr {
    match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), listen.port()),
        IpAddr::V6(ip) if ip.is_unspecified() => SocketAddr::new(Ipv6Addr::LOCALHOST.into(), listen.port()),
        IpAddr::V4(_) | IpAddr::V6(_) => listen,
    }
}
