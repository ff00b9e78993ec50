//! Which IP addresses are public.

use reqwest::Url;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The address of Azure's platform, which serves credentials to each machine. It lies in a public range.
const AZURE_PLATFORM: Ipv4Addr = Ipv4Addr::new(168, 63, 129, 16);

/// Returns whether everybody can reach this address, so that a request to it reaches nothing that only the worker can.
pub fn is_public(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => is_public_v4(ip),
        IpAddr::V6(ip) => match embedded(ip) {
            Some(ip) => is_public_v4(ip),
            None => is_public_v6(ip),
        },
    }
}

/// The address that the URL's host is, if it is one. The URL library has read every spelling of it: `0x7f.1`,
/// `2130706433` and `0177.0.0.1` are all 127.0.0.1.
pub(super) fn literal(url: &Url) -> Option<IpAddr> {
    let host = url.host_str()?;
    host.trim_start_matches('[').trim_end_matches(']').parse().ok()
}

fn is_public_v4(ip: Ipv4Addr) -> bool {
    let [a, b, c, _] = ip.octets();
    let other = a == 0
        || a >= 240
        // Shared by the customers of a provider (RFC 6598).
        || (a == 100 && (64..128).contains(&b))
        || (a == 192 && b == 0 && c == 0)
        // Relays of 6to4.
        || (a == 192 && b == 88 && c == 99)
        // Benchmarks.
        || (a == 198 && (b == 18 || b == 19))
        || ip == AZURE_PLATFORM;
    !(other
        || ip.is_private()
        || ip.is_loopback()
        || ip.is_link_local()
        || ip.is_multicast()
        || ip.is_documentation())
}

fn is_public_v6(ip: Ipv6Addr) -> bool {
    let [first, second, ..] = ip.segments();
    // Global unicast is 2000::/3. The rest is loopback, local, multicast, translated and unassigned.
    (0x2000..0x4000).contains(&first)
        // 2001::/23: Teredo, which carries an IPv4 address, and protocols.
        && !(first == 0x2001 && second < 0x200)
        // Documentation: 2001:db8::/32 and 3fff::/20.
        && !(first == 0x2001 && second == 0xdb8)
        && !(first == 0x3fff && second < 0x1000)
        // 6to4 carries an IPv4 address, and is no longer in use.
        && first != 0x2002
}

/// The IPv4 address inside an IPv6 address: mapped, or translated (64:ff9b::/96, which a network without IPv4 uses for
/// every host that has only IPv4).
fn embedded(ip: Ipv6Addr) -> Option<Ipv4Addr> {
    match ip.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => {
            Some(Ipv4Addr::from((u32::from(high) << 16) | u32::from(low)))
        }
        _ => ip.to_ipv4_mapped(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_that_everybody_can_reach_are_public() {
        for public in [
            "1.1.1.1",
            "93.184.216.34",
            "100.63.255.255",
            "100.128.0.1",
            "172.15.255.255",
            "172.32.0.1",
            "192.0.1.1",
            "198.17.255.255",
            "198.20.0.1",
            "223.255.255.255",
            "2001:200::1",
            "2606:4700::1",
            "2a00:1450:4001::1",
            "64:ff9b::101:101",
            "::ffff:1.1.1.1",
        ] {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
        for private in [
            "0.0.0.0",
            "0.255.255.255",
            "10.0.0.0",
            "10.255.255.255",
            "100.64.0.1",
            "100.100.100.200",
            "100.127.255.255",
            "127.0.0.1",
            "127.255.255.254",
            "168.63.129.16",
            "169.254.0.1",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.8",
            "192.0.0.192",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::7f00:1",
            "::ffff:10.0.0.1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "64:ff9b::a00:1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::1",
            "100::1",
            "2001::1",
            "2001:0:7f00:1::1",
            "2001:10::1",
            "2001:20::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "2002:a9fe:a9fe::",
            "2002:101:101::",
            "3fff::1",
            "5f00::1",
            "fc00::1",
            "fd00::1",
            "fd00:ec2::254",
            "fd20:ce::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "ff0e::1",
        ] {
            assert!(!is_public(private.parse().unwrap()), "{private}");
        }
    }

    #[test]
    fn a_literal_address_is_known_in_every_spelling() {
        for host in [
            "127.0.0.1",
            "127.0.0.1.",
            "2130706433",
            "0x7f000001",
            "0x7F.0.0.1",
            "0177.0.0.1",
            "017700000001",
            "127.1",
            "127.0.1",
            "%31%32%37.0.0.1",
            "127。0。0。1",
            "①②⑦.0.0.1",
            "user@127.0.0.1",
            "[::ffff:127.0.0.1]",
            "[::FFFF:7f00:1]",
            "[0:0:0:0:0:0:0:1]",
            "[::1]",
            "2852039166",
            "0xa9fea9fe",
        ] {
            let url: Url = format!("http://{host}/x").parse().unwrap();
            assert!(literal(&url).is_some_and(|ip| !is_public(ip)), "{host} is {:?}", url.host_str());
        }
        for host in ["example.org", "127.0.0.1.example.org", "1.1.1.1"] {
            let url: Url = format!("http://{host}/x").parse().unwrap();
            assert!(literal(&url).is_none_or(is_public), "{host}");
        }
    }
}
