//! Which IP addresses a host name may resolve to.

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Resolves host names, and refuses a name with any address that is not public. The client connects only to
/// the addresses that were checked here.
#[derive(Debug)]
pub(super) struct Public;

impl Resolve for Public {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let addresses: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            if let Some(private) = addresses.iter().find(|address| !is_public(address.ip())) {
                let text = format!(
                    "{} is {}, an address of a private network: write the address itself, or set \
                     messenger.webhook.private_network = true",
                    name.as_str(),
                    private.ip()
                );
                return Err(text.into());
            }
            let addresses: Addrs = Box::new(addresses.into_iter());
            Ok(addresses)
        })
    }
}

/// Returns whether the URL's host is an IP address or `localhost`, which needs no DNS lookup.
pub(super) fn names_itself(url: &reqwest::Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok()
}

fn is_public(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => is_public_v4(ip),
        IpAddr::V6(ip) => match embedded(ip) {
            Some(ip) => is_public_v4(ip),
            None => is_public_v6(ip),
        },
    }
}

fn is_public_v4(ip: Ipv4Addr) -> bool {
    let [a, b, c, _] = ip.octets();
    let other = a == 0
        || a >= 240
        || (a == 100 && (64..128).contains(&b))
        || (a == 192 && b == 0 && c == 0)
        || (a == 198 && (b == 18 || b == 19));
    !(other
        || ip.is_private()
        || ip.is_loopback()
        || ip.is_link_local()
        || ip.is_multicast()
        || ip.is_documentation())
}

fn is_public_v6(ip: Ipv6Addr) -> bool {
    let first = ip.segments()[0];
    // Global unicast is 2000::/3. In it, 2001:db8::/32 is reserved for documentation.
    (0x2000..0x4000).contains(&first) && !(first == 0x2001 && ip.segments()[1] == 0xdb8)
}

/// The IPv4 address inside an IPv6 address: mapped, translated (64:ff9b::/96) or 6to4 (2002::/16).
fn embedded(ip: Ipv6Addr) -> Option<Ipv4Addr> {
    let segments = ip.segments();
    let of = |high: u16, low: u16| Ipv4Addr::from((u32::from(high) << 16) | u32::from(low));
    match segments {
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => Some(of(high, low)),
        _ => ip.to_ipv4_mapped(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_that_everybody_can_reach_are_public() {
        for public in ["1.1.1.1", "93.184.216.34", "2606:4700::1", "64:ff9b::101:101", "::ffff:1.1.1.1"] {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
        for private in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "192.0.0.8",
            "198.18.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fe80::1",
            "fd00::1",
            "ff02::1",
            "::ffff:10.0.0.1",
            "64:ff9b::a00:1",
            "2002:7f00:1::",
            "2001:db8::1",
        ] {
            assert!(!is_public(private.parse().unwrap()), "{private}");
        }
    }

    #[test]
    fn an_address_that_is_written_out_is_meant() {
        for (url, itself) in [
            ("http://127.0.0.1:8/x", true),
            ("http://[::1]/x", true),
            ("http://localhost/", true),
            ("http://example.org/", false),
            ("http://127.0.0.1.example.org/", false),
        ] {
            assert_eq!(names_itself(&url.parse().unwrap()), itself, "{url}");
        }
    }

    #[tokio::test]
    async fn a_name_of_a_private_address_is_not_resolved() {
        let Err(error) = Public.resolve("localhost".parse().unwrap()).await else {
            panic!("it was resolved");
        };
        assert!(error.to_string().contains("private_network = true"), "{error}");
    }
}
