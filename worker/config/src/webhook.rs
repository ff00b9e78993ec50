//! The secrets of Standard Webhooks.

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use secrecy::{ExposeSecret, SecretString};

/// Base64 with its padding or without.
pub const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Returns the key in a secret of Standard Webhooks: Base64, after an optional `whsec_`. `None` when the text is not Base64,
/// or when the key is shorter than the 24 bytes that the specification asks for.
pub fn webhook_key(secret: &SecretString) -> Option<Vec<u8>> {
    let text = secret.expose_secret();
    let key = BASE64.decode(text.strip_prefix("whsec_").unwrap_or(text)).ok()?;
    (key.len() >= 24).then_some(key)
}
