//! DKIM (RFC 6376): signs outgoing mail for its sender's domain, with RSA or Ed25519 (RFC 8463),
//! canonicalization relaxed/relaxed.
//!
//! This file signs without a DKIM crate. The feature of lettre would add `rsa` (RUSTSEC-2023-0071, no fix)
//! and `ed25519-dalek` next to the crypto library that we use. The crate mail-auth would add a whole
//! resolver. The two primitives come from aws-lc-rs.

use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::encoding::AsDer;
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair, RSA_PKCS1_SHA256, RsaKeyPair};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;

/// The headers that a reader sees or that put the mail into a thread. Each is signed as often as it occurs.
const SIGNED: [&str; 13] = [
    "From",
    "To",
    "Cc",
    "Subject",
    "Date",
    "Message-ID",
    "In-Reply-To",
    "References",
    "Reply-To",
    "Auto-Submitted",
    "MIME-Version",
    "Content-Type",
    "Content-Transfer-Encoding",
];

/// Signs mail for one domain.
pub struct Signer {
    domain: String,
    selector: String,
    key: Key,
}

enum Key {
    Rsa(Box<RsaKeyPair>),
    Ed25519(Ed25519KeyPair),
}

impl Signer {
    /// Creates a signer for `domain` from the key in `pem`: RSA of 2048 bits or more (PKCS #1 or #8), or
    /// Ed25519 (PKCS #8).
    ///
    /// # Errors
    /// A sentence that reveals nothing of the key.
    pub fn new(domain: &str, selector: &str, pem: &[u8]) -> Result<Signer, String> {
        let der = PrivateKeyDer::from_pem_slice(pem)
            .map_err(|error| format!("it is not a private key in PEM format: {error}"))?;
        let key = match &der {
            PrivateKeyDer::Pkcs1(der) => RsaKeyPair::from_der(der.secret_pkcs1_der()).ok().map(rsa),
            PrivateKeyDer::Pkcs8(der) => {
                let der = der.secret_pkcs8_der();
                let ed25519 = Ed25519KeyPair::from_pkcs8_maybe_unchecked(der).ok().map(Key::Ed25519);
                ed25519.or_else(|| RsaKeyPair::from_pkcs8(der).ok().map(rsa))
            }
            _ => None,
        };
        let key = key.ok_or("it is neither RSA of 2048 bits or more nor Ed25519")?;
        Ok(Signer { domain: domain.to_lowercase(), selector: selector.to_owned(), key })
    }

    /// Returns whether this signer signs for `from_domain`: its own domain or a subdomain.
    pub fn is_for(&self, from_domain: &str) -> bool {
        let from = from_domain.to_lowercase();
        from == self.domain || from.strip_suffix(&self.domain).is_some_and(|rest| rest.ends_with('.'))
    }

    /// Returns `mail` with its signature in front.
    ///
    /// # Errors
    /// A sentence, when signing fails.
    pub fn sign(&self, mail: Vec<u8>) -> Result<Vec<u8>, String> {
        let end = mail.windows(4).position(|four| four == b"\r\n\r\n").map_or(mail.len(), |at| at + 2);
        let head = String::from_utf8_lossy(&mail[..end]).into_owned();
        let body = mail.get(end + 2..).unwrap_or_default();
        let headers = headers(&head);
        let (mut names, mut signed) = (Vec::new(), String::new());
        for name in SIGNED {
            // If a header occurs several times, sign the last one first, as a verifier reads them.
            for header in headers.iter().rev().filter(|header| header.0.eq_ignore_ascii_case(name)) {
                names.push(name);
                signed.push_str(&relaxed(header));
                signed.push_str("\r\n");
            }
        }
        let algorithm = match self.key {
            Key::Rsa(_) => "rsa-sha256",
            Key::Ed25519(_) => "ed25519-sha256",
        };
        let hash = BASE64.encode(digest(&SHA256, &relaxed_body(body)).as_ref());
        let unsigned = format!(
            "v=1; a={algorithm}; c=relaxed/relaxed; d={}; s={};\r\n h={};\r\n bh={hash};\r\n b=",
            self.domain,
            self.selector,
            names.join(":\r\n  ")
        );
        signed.push_str(&relaxed(&("DKIM-Signature", &unsigned)));
        let signature = self.signature(signed.as_bytes())?;
        let mut out = format!("DKIM-Signature: {unsigned}{}\r\n", folded(&signature)).into_bytes();
        out.extend_from_slice(&mail);
        Ok(out)
    }

    fn signature(&self, message: &[u8]) -> Result<String, String> {
        match &self.key {
            Key::Rsa(key) => {
                let mut signature = vec![0; key.public_modulus_len()];
                key.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), message, &mut signature)
                    .map_err(|_| "signing with the DKIM key failed".to_owned())?;
                Ok(BASE64.encode(signature))
            }
            // RFC 8463 signs the hash of the message.
            Key::Ed25519(key) => Ok(BASE64.encode(key.sign(digest(&SHA256, message).as_ref()))),
        }
    }

    /// The TXT record for `SELECTOR._domainkey.DOMAIN`.
    pub fn record(&self) -> String {
        let (kind, public) = match &self.key {
            Key::Rsa(key) => {
                let der = AsDer::<aws_lc_rs::encoding::PublicKeyX509Der<'_>>::as_der(key.public_key());
                ("rsa", der.map(|der| BASE64.encode(der.as_ref())).unwrap_or_default())
            }
            Key::Ed25519(key) => ("ed25519", BASE64.encode(key.public_key().as_ref())),
        };
        format!("v=DKIM1; k={kind}; p={public}")
    }
}

fn rsa(key: RsaKeyPair) -> Key {
    Key::Rsa(Box::new(key))
}

/// Name and value of each header in order, still folded. `head` ends with a line break.
fn headers(head: &str) -> Vec<(&str, &str)> {
    let mut headers = Vec::new();
    let mut rest = head;
    while !rest.is_empty() {
        let mut end = 0;
        loop {
            end = rest[end..].find("\r\n").map_or(rest.len(), |at| end + at + 2);
            if !rest[end..].starts_with([' ', '\t']) {
                break;
            }
        }
        if let Some((name, value)) = rest[..end].split_once(':') {
            headers.push((name, value));
        }
        rest = &rest[end..];
    }
    headers
}

/// Canonicalizes a header: RFC 6376, 3.4.2.
fn relaxed((name, value): &(&str, &str)) -> String {
    let words = value.split([' ', '\t', '\r', '\n']).filter(|word| !word.is_empty());
    format!("{}:{}", name.trim_end().to_ascii_lowercase(), words.collect::<Vec<_>>().join(" "))
}

/// Canonicalizes the body: RFC 6376, 3.4.4.
fn relaxed_body(body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(body.len());
    let mut lines: Vec<&[u8]> = Vec::new();
    let mut rest = body;
    while let Some(at) = rest.windows(2).position(|two| two == b"\r\n") {
        lines.push(&rest[..at]);
        rest = &rest[at + 2..];
    }
    lines.push(rest);
    let mut empty = 0;
    for line in lines {
        let before = out.len();
        let mut blank = false;
        let mut kept = Vec::with_capacity(line.len());
        for byte in line {
            if matches!(byte, b' ' | b'\t') {
                blank = true;
                continue;
            }
            if std::mem::take(&mut blank) {
                kept.push(b' ');
            }
            kept.push(*byte);
        }
        if kept.is_empty() {
            empty += 1;
            continue;
        }
        for _ in 0..std::mem::take(&mut empty) {
            out.extend_from_slice(b"\r\n");
        }
        out.extend_from_slice(&kept);
        out.extend_from_slice(b"\r\n");
        debug_assert!(out.len() > before);
    }
    out
}

/// Splits Base64 into header lines.
fn folded(base64: &str) -> String {
    let pieces: Vec<&str> =
        base64.as_bytes().chunks(72).filter_map(|piece| std::str::from_utf8(piece).ok()).collect();
    pieces.join("\r\n ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_is_canonical_as_the_standard_shows_it() {
        // RFC 6376, 3.4.5.
        assert_eq!(relaxed_body(b" C \r\nD \t E\r\n\r\n\r\n"), b" C\r\nD E\r\n");
        assert_eq!(relaxed_body(b""), b"");
        assert_eq!(relaxed_body(b"\r\n\r\n"), b"");
        assert_eq!(relaxed_body(b"no end"), b"no end\r\n");
    }

    #[test]
    fn headers_are_canonical_as_the_standard_shows_them() {
        let head = "A: X\r\nB : Y\t\r\n\tZ  \r\n";
        let relaxed: Vec<String> = headers(head).iter().map(relaxed).collect();
        assert_eq!(relaxed, ["a:X", "b:Y Z"]);
    }

    fn signer() -> Signer {
        let pair = Ed25519KeyPair::generate().unwrap();
        let der = AsDer::<aws_lc_rs::encoding::Pkcs8V1Der<'_>>::as_der(&pair).unwrap();
        let pem = format!(
            "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n",
            BASE64.encode(der.as_ref())
        );
        Signer::new("Example.org", "s1", pem.as_bytes()).unwrap()
    }

    #[test]
    fn whatever_its_reader_is_shown_is_signed() {
        let signer = signer();
        let headers = [
            "From: a@example.org",
            "To: b@example.com",
            "Cc: c@example.com",
            "Subject: Hi",
            "Date: Sun, 22 Nov 2026 12:00:00 +0000",
            "Message-ID: <dlv_1@example.org>",
            "In-Reply-To: <m1@example.com>",
            "References: <m1@example.com>",
            "Reply-To: desk@example.org",
            "Auto-Submitted: auto-replied",
            "MIME-Version: 1.0",
            "Content-Type: text/plain",
            "Content-Transfer-Encoding: 7bit",
        ];
        let mail = |headers: &[String]| format!("{}\r\n\r\nHello\r\n", headers.join("\r\n"));
        // Ed25519 is deterministic: the same bytes always get the same signature.
        let signature = |mail: &str| {
            let signed = String::from_utf8(signer.sign(mail.as_bytes().to_vec()).unwrap()).unwrap();
            signed.strip_suffix(mail).unwrap().to_owned()
        };
        let headers = headers.map(str::to_owned);
        let whole = signature(&mail(&headers));
        for at in 0..headers.len() {
            let mut changed = headers.clone();
            changed[at].push('x');
            assert_ne!(signature(&mail(&changed)), whole, "{}", headers[at]);
        }
        assert_ne!(signature(&mail(&headers).replace("Hello", "Pay me")), whole, "the body");
        let unsigned = mail(&headers).replace("Subject:", "X-Other: x\r\nSubject:");
        assert_eq!(signature(&unsigned), whole, "a header that a server adds on the way");
    }

    #[test]
    fn only_its_own_domain_is_signed_for_and_the_same_mail_gets_the_same_signature() {
        let signer = signer();
        assert!(signer.is_for("example.org") && signer.is_for("desk.EXAMPLE.org"));
        assert!(!signer.is_for("badexample.org") && !signer.is_for("org"));
        let mail = b"From: a@example.org\r\nTo: b@example.com\r\nSubject: Hi\r\n\r\nHello\r\n".to_vec();
        let signed = signer.sign(mail.clone()).unwrap();
        assert_eq!(signed, signer.sign(mail.clone()).unwrap());
        assert!(signed.ends_with(&mail));
        assert!(
            signed.starts_with(
                b"DKIM-Signature: v=1; a=ed25519-sha256; c=relaxed/relaxed; d=example.org; s=s1;"
            )
        );
        assert!(signer.record().starts_with("v=DKIM1; k=ed25519; p="));
        assert!(Signer::new("example.org", "s1", b"nothing").is_err());
    }
}
