//! Verifies who sent a webhook: checks its signature over the raw body bytes, before anything is parsed.
//!
//! Pure: the caller passes the time. Comparisons run in constant time. Several secrets can be valid at once,
//! so an operator can rotate them without losing a message.

use axum::http::HeaderMap;
use base64::Engine;
use base64::engine::general_purpose;
use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretString};
use sha2::Sha256;
use subtle::{Choice, ConstantTimeEq};
use wakeful_config::webhook::{BASE64, webhook_key};

/// The most signatures that one request may carry: enough for a sender who rotates its secrets. Without a
/// limit, a stranger could make us compare thousands.
const SIGNATURES: usize = 16;

/// How far a webhook's timestamp may be from our clock, in seconds: five minutes, as Slack and Standard
/// Webhooks specify. An older request may be a replay.
const TOLERANCE_S: u64 = 300;

/// Why a webhook is refused. Never says what the right value would have been.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignatureError {
    #[error("the header `{0}` is missing or malformed; the signature needs it")]
    Header(&'static str),
    #[error(
        "the timestamp is more than {TOLERANCE_S} s away from this machine's clock; sign it again with the current time"
    )]
    Stale,
    #[error(
        "no configured secret gives this signature for this body; check the secret, and that \
         nothing on the way changes the body"
    )]
    Forged,
    #[error(
        "the header `X-Telegram-Bot-Api-Secret-Token` is missing or is not one of messenger.telegram.webhook_secrets; give \
         setWebhook one of them as its secret_token"
    )]
    Secret,
}

/// Slack's `v0`: `X-Slack-Signature` over `v0:TIMESTAMP:BODY`.
///
/// # Errors
/// [`SignatureError`].
pub fn slack(
    secrets: &[SecretString],
    headers: &HeaderMap,
    body: &[u8],
    now_unix_s: i64,
) -> Result<(), SignatureError> {
    let (timestamp, given) = slack_headers(headers, now_unix_s)?;
    let signed = [b"v0:", timestamp.as_bytes(), b":", body];
    let given = [given];
    let good = secrets.iter().any(|secret| is_mac(secret.expose_secret().as_bytes(), &signed, &given));
    if good { Ok(()) } else { Err(SignatureError::Forged) }
}

/// Like [`is_fresh`], for Slack's headers.
///
/// # Errors
/// [`SignatureError::Header`] and [`SignatureError::Stale`].
pub fn slack_is_fresh(headers: &HeaderMap, now_unix_s: i64) -> Result<(), SignatureError> {
    slack_headers(headers, now_unix_s).map(|_| ())
}

/// Slack's timestamp as it was written, and its signature.
fn slack_headers(headers: &HeaderMap, now_unix_s: i64) -> Result<(&str, Vec<u8>), SignatureError> {
    const SIGNATURE: &str = "x-slack-signature";
    let timestamp = timestamp(headers, "x-slack-request-timestamp", now_unix_s)?;
    let given = text(headers, SIGNATURE)?.strip_prefix("v0=").and_then(|hex| hex::decode(hex).ok());
    Ok((timestamp, given.ok_or(SignatureError::Header(SIGNATURE))?))
}

/// Standard Webhooks: `webhook-signature` (several `v1,BASE64`, separated by spaces) over `ID.TIMESTAMP.BODY`.
///
/// # Errors
/// [`SignatureError`].
pub fn standard_webhooks(
    secrets: &[SecretString],
    headers: &HeaderMap,
    body: &[u8],
    now_unix_s: i64,
) -> Result<(), SignatureError> {
    let id = webhook_id(headers)?;
    let timestamp = timestamp(headers, "webhook-timestamp", now_unix_s)?;
    let given: Vec<Vec<u8>> = webhook_signatures(headers)?
        .filter_map(|signature| signature.strip_prefix("v1,"))
        .filter_map(|signature| BASE64.decode(signature).ok())
        .collect();
    let signed = [id.as_bytes(), b".", timestamp.as_bytes(), b".", body];
    let good = secrets.iter().filter_map(webhook_key).any(|key| is_mac(&key, &signed, &given));
    if good { Ok(()) } else { Err(SignatureError::Forged) }
}

/// Checks that the signature headers of Standard Webhooks are present, and that the timestamp is recent. This
/// is all that can be checked before the body arrives.
///
/// # Errors
/// [`SignatureError::Header`] and [`SignatureError::Stale`].
pub fn is_fresh(headers: &HeaderMap, now_unix_s: i64) -> Result<(), SignatureError> {
    webhook_id(headers)?;
    timestamp(headers, "webhook-timestamp", now_unix_s)?;
    webhook_signatures(headers).map(|_| ())
}

/// The entries of the header `webhook-signature`.
fn webhook_signatures(headers: &HeaderMap) -> Result<std::str::Split<'_, char>, SignatureError> {
    const NAME: &str = "webhook-signature";
    let entries = text(headers, NAME)?.split(' ');
    if entries.clone().count() > SIGNATURES { Err(SignatureError::Header(NAME)) } else { Ok(entries) }
}

/// The header `webhook-id`. It stays the same when the sender repeats a message.
///
/// # Errors
/// When the header is missing, or longer than 200 bytes, or not printable ASCII.
pub fn webhook_id(headers: &HeaderMap) -> Result<&str, SignatureError> {
    let id = text(headers, "webhook-id")?;
    let fits = !id.is_empty() && id.len() <= 200 && id.bytes().all(|byte| byte.is_ascii_graphic());
    if fits { Ok(id) } else { Err(SignatureError::Header("webhook-id")) }
}

/// The header `webhook-signature` of an outgoing request: one signature per secret, so the receiver can
/// rotate its secret.
pub fn sign_webhook(secrets: &[SecretString], id: &str, timestamp_unix_s: i64, body: &[u8]) -> String {
    let timestamp = timestamp_unix_s.to_string();
    let signed = [id.as_bytes(), b".", timestamp.as_bytes(), b".", body];
    let signatures = secrets.iter().filter_map(webhook_key).map(|key| {
        let mac = mac(&key, &signed).finalize().into_bytes();
        format!("v1,{}", general_purpose::STANDARD.encode(mac))
    });
    signatures.collect::<Vec<_>>().join(" ")
}

/// Checks Telegram's header `X-Telegram-Bot-Api-Secret-Token`. Telegram signs nothing; the header is the
/// secret itself.
///
/// # Errors
/// [`SignatureError`].
pub fn telegram(secrets: &[SecretString], headers: &HeaderMap) -> Result<(), SignatureError> {
    let given = text(headers, "x-telegram-bot-api-secret-token").map_err(|_| SignatureError::Secret)?;
    let is = |secret: &SecretString| bool::from(secret.expose_secret().as_bytes().ct_eq(given.as_bytes()));
    if secrets.iter().any(is) { Ok(()) } else { Err(SignatureError::Secret) }
}

fn text<'h>(headers: &'h HeaderMap, name: &'static str) -> Result<&'h str, SignatureError> {
    let value = headers.get(name).and_then(|value| value.to_str().ok());
    value.ok_or(SignatureError::Header(name))
}

/// The timestamp as it was written, because the signature covers that text.
fn timestamp<'h>(
    headers: &'h HeaderMap,
    name: &'static str,
    now_unix_s: i64,
) -> Result<&'h str, SignatureError> {
    let written = text(headers, name)?;
    let at: i64 = written.parse().map_err(|_| SignatureError::Header(name))?;
    if at.abs_diff(now_unix_s) > TOLERANCE_S { Err(SignatureError::Stale) } else { Ok(written) }
}

fn mac(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes a key of any length");
    for part in parts {
        mac.update(part);
    }
    mac
}

/// Returns whether one of the given codes is this key's. Reads the body once, however many are given.
fn is_mac(key: &[u8], parts: &[&[u8]], given: &[Vec<u8>]) -> bool {
    let mac = mac(key, parts).finalize().into_bytes();
    given.iter().fold(Choice::from(0), |any, one| any | mac[..].ct_eq(&one[..])).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_531_420_618;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    fn secrets(texts: &[&str]) -> Vec<SecretString> {
        texts.iter().map(|text| SecretString::from(*text)).collect()
    }

    /// The example from Slack's documentation.
    const SLACK_SECRET: &str = "8f742231b10e8888abcd99yyyzzz85a5";
    const SLACK_BODY: &[u8] = b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text=&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c";
    const SLACK_SIGNATURE: &str = "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503";

    #[test]
    fn slacks_own_example_is_good_and_nothing_that_differs_from_it_is() {
        let signed = |timestamp: &str, signature: &str| {
            headers(&[("x-slack-request-timestamp", timestamp), ("x-slack-signature", signature)])
        };
        let good = signed("1531420618", SLACK_SIGNATURE);
        let keys = secrets(&["another", SLACK_SECRET]);
        assert_eq!(slack(&keys, &good, SLACK_BODY, NOW), Ok(()));
        assert_eq!(slack(&keys, &good, SLACK_BODY, NOW + 300), Ok(()));
        assert_eq!(slack(&keys, &good, SLACK_BODY, NOW + 301), Err(SignatureError::Stale));
        assert_eq!(slack(&keys, &good, SLACK_BODY, NOW - 301), Err(SignatureError::Stale));
        let cut = &SLACK_BODY[..SLACK_BODY.len() - 1];
        assert_eq!(slack(&keys, &good, cut, NOW), Err(SignatureError::Forged));
        assert_eq!(slack(&secrets(&["another"]), &good, SLACK_BODY, NOW), Err(SignatureError::Forged));
        assert_eq!(slack(&[], &good, SLACK_BODY, NOW), Err(SignatureError::Forged));
        // Changing the timestamp breaks the signature.
        let moved = signed("1531420619", SLACK_SIGNATURE);
        assert_eq!(slack(&keys, &moved, SLACK_BODY, NOW), Err(SignatureError::Forged));
        for bad in ["", "v0=", "v0=zz", "v1=00", &SLACK_SIGNATURE[..SLACK_SIGNATURE.len() - 2]] {
            assert!(slack(&keys, &signed("1531420618", bad), SLACK_BODY, NOW).is_err(), "{bad}");
        }
        let none = headers(&[("x-slack-signature", SLACK_SIGNATURE)]);
        let missing = SignatureError::Header("x-slack-request-timestamp");
        assert_eq!(slack(&keys, &none, SLACK_BODY, NOW), Err(missing));
        let far = signed("-9223372036854775808", SLACK_SIGNATURE);
        assert_eq!(slack(&keys, &far, SLACK_BODY, NOW), Err(SignatureError::Stale));
    }

    const WEBHOOK_SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

    /// The example from the specification's own libraries.
    #[test]
    fn the_specifications_own_example_is_good_and_what_we_sign_is_too() {
        let now = 1_614_265_330;
        let body = br#"{"test": 2432232314}"#;
        let (id, signature) =
            ("msg_p5jXN8AQM9LWM0D4loKWxJek", "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
        let signed = |signature: &str| {
            headers(&[
                ("webhook-id", id),
                ("webhook-timestamp", "1614265330"),
                ("webhook-signature", signature),
            ])
        };
        let keys = secrets(&["whsec_no", WEBHOOK_SECRET]);
        assert_eq!(standard_webhooks(&keys, &signed(signature), body, now), Ok(()));
        assert_eq!(sign_webhook(&keys, id, now, body), signature);
        let several = format!("v1a,AAAA v1,AAAA {signature} nonsense");
        assert_eq!(standard_webhooks(&keys, &signed(&several), body, now), Ok(()));
        // A good signature counts among the first sixteen. A header with more is refused, whatever they are.
        let among = |others: usize| format!("{}{signature}", "v1,AAAA ".repeat(others));
        assert_eq!(standard_webhooks(&keys, &signed(&among(15)), body, now), Ok(()));
        let many = Err(SignatureError::Header("webhook-signature"));
        assert_eq!(standard_webhooks(&keys, &signed(&among(16)), body, now), many);
        assert_eq!(is_fresh(&signed(&among(16)), now), many, "before the body comes");
        assert_eq!(is_fresh(&signed(&among(15)), now), Ok(()));
        for forged in ["", "v1,", "v1,AAAA", "v2,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="] {
            let refused = standard_webhooks(&keys, &signed(forged), body, now);
            assert_eq!(refused, Err(SignatureError::Forged), "{forged}");
        }
        assert_eq!(
            standard_webhooks(&keys, &signed(signature), &body[1..], now),
            Err(SignatureError::Forged)
        );
        assert_eq!(standard_webhooks(&keys, &signed(signature), body, now + 301), Err(SignatureError::Stale));
        // A secret that cannot be decoded is ignored, and without a valid secret every signature is refused.
        let unusable = secrets(&["", "whsec_", "whsec_!", "whsec_c2hvcnQ="]);
        assert_eq!(standard_webhooks(&unusable, &signed(signature), body, now), Err(SignatureError::Forged));
    }

    #[test]
    fn telegrams_token_is_one_of_those_that_are_configured() {
        let given = |token: &str| headers(&[("x-telegram-bot-api-secret-token", token)]);
        let tokens = secrets(&["old-token", "new-token"]);
        assert_eq!(telegram(&tokens, &given("old-token")), Ok(()));
        assert_eq!(telegram(&tokens, &given("new-token")), Ok(()));
        for wrong in ["", "new-toke", "new-token-", "NEW-TOKEN"] {
            assert_eq!(telegram(&tokens, &given(wrong)), Err(SignatureError::Secret), "{wrong:?}");
        }
        assert!(telegram(&tokens, &HeaderMap::new()).is_err());
        assert!(telegram(&[], &given("new-token")).is_err());
    }
}
