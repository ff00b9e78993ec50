//! Webhooks that are signed as Standard Webhooks has it (<https://www.standardwebhooks.com>).

use axum::http::HeaderMap;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretString};
use sha2::Sha256;
use subtle::ConstantTimeEq;

/// How far the sender's clock and ours may be apart, either way.
const TOLERANCE_S: i64 = 300;
/// How many signatures a request may carry: two while a secret is rotated.
const SIGNATURES: usize = 8;

/// Why a request is not taken as its sender's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsigned {
    #[error("the headers webhook-id, webhook-timestamp and webhook-signature are needed")]
    Missing,
    #[error("webhook-timestamp is more than {TOLERANCE_S} s away from this server's time")]
    Stale,
    #[error("no signature of the request is of a secret that is configured here")]
    Wrong,
}

/// Whether one of `secrets` (`whsec_…`, or the base64 after that) signed `body`.
///
/// # Errors
/// [`Unsigned`]. The time that it takes does not tell which secret or how much of a signature was right.
pub fn standard_webhooks(
    secrets: &[SecretString],
    headers: &HeaderMap,
    body: &[u8],
    now_unix_s: i64,
) -> Result<(), Unsigned> {
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let (Some(id), Some(timestamp), Some(signatures)) =
        (header("webhook-id"), header("webhook-timestamp"), header("webhook-signature"))
    else {
        return Err(Unsigned::Missing);
    };
    let sent: i64 = timestamp.parse().map_err(|_| Unsigned::Stale)?;
    if now_unix_s.checked_sub(sent).is_none_or(|age_s| age_s.unsigned_abs() > TOLERANCE_S as u64) {
        return Err(Unsigned::Stale);
    }
    let mut right = subtle::Choice::from(0);
    for secret in secrets {
        let Some(key) = key(secret) else { continue };
        let mut mac = Hmac::<Sha256>::new_from_slice(&key).expect("a key of any length will do");
        for part in [id.as_bytes(), b".", timestamp.as_bytes(), b".", body] {
            mac.update(part);
        }
        let expected = mac.finalize().into_bytes();
        for signature in signatures.split(' ').filter_map(|one| one.strip_prefix("v1,")).take(SIGNATURES) {
            let given = STANDARD.decode(signature).unwrap_or_default();
            right |= expected.as_slice().ct_eq(&given);
        }
    }
    if bool::from(right) { Ok(()) } else { Err(Unsigned::Wrong) }
}

/// The bytes of a secret. `None`: it is none.
pub fn key(secret: &SecretString) -> Option<Vec<u8>> {
    let text = secret.expose_secret();
    let key = STANDARD.decode(text.strip_prefix("whsec_").unwrap_or(text)).ok()?;
    (!key.is_empty()).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    // The vector of the specification's own libraries.
    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const ID: &str = "msg_p5jXN8AQM9LWM0D4loKWxJek";
    const TIME: i64 = 1_614_265_330;
    const BODY: &[u8] = br#"{"test": 2432232314}"#;
    const SIGNATURE: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";

    fn verify(secrets: &[&str], signature: &str, body: &[u8], now: i64) -> Result<(), Unsigned> {
        let mut headers = HeaderMap::new();
        headers.insert("webhook-id", ID.parse().unwrap());
        headers.insert("webhook-timestamp", TIME.to_string().parse().unwrap());
        headers.insert("webhook-signature", signature.parse().unwrap());
        let secrets: Vec<SecretString> = secrets.iter().map(|one| SecretString::from(*one)).collect();
        standard_webhooks(&secrets, &headers, body, now)
    }

    #[test]
    fn what_a_secret_signed_is_taken_and_nothing_else() {
        let other = "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
        let two = format!("v1,AAAA {SIGNATURE}");
        let wrong = Err(Unsigned::Wrong);
        for (secrets, signature, body, now, expected) in [
            (&[SECRET][..], SIGNATURE, BODY, TIME, Ok(())),
            (&[other, SECRET], SIGNATURE, BODY, TIME + 300, Ok(())),
            (&[SECRET, other], two.as_str(), BODY, TIME - 300, Ok(())),
            (&[SECRET], SIGNATURE, BODY, TIME + 301, Err(Unsigned::Stale)),
            (&[SECRET], SIGNATURE, BODY, TIME - 301, Err(Unsigned::Stale)),
            (&[other], SIGNATURE, BODY, TIME, wrong),
            (&[], SIGNATURE, BODY, TIME, wrong),
            (&[""], SIGNATURE, BODY, TIME, wrong),
            (&[SECRET], SIGNATURE, br#"{"test": 2432232315}"#, TIME, wrong),
            (&[SECRET], &SIGNATURE[..20], BODY, TIME, wrong),
            (&[SECRET], "v1,", BODY, TIME, wrong),
            (&[SECRET], &SIGNATURE[3..], BODY, TIME, wrong),
            (&[SECRET], &SIGNATURE.replace("v1,", "v2,"), BODY, TIME, wrong),
        ] {
            assert_eq!(verify(secrets, signature, body, now), expected, "{signature} {now}");
        }
        assert_eq!(standard_webhooks(&[], &HeaderMap::new(), b"", 0), Err(Unsigned::Missing));
    }
}
