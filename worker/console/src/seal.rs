//! What the console hands to a browser and takes back: sealed, so that the browser can neither read nor change it.

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use aws_lc_rs::hmac;
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The key of one console.
///
/// It is made of the server's own token, so that all processes of a deployment open each other's cookies, and so that a
/// new token logs everybody out. A server without a token serves this machine only and makes a key when it starts.
pub(crate) struct Seal {
    cookies: RandomizedNonceKey,
    forms: hmac::Key,
}

impl Seal {
    /// # Panics
    /// Never: both keys have the length that their algorithm asks for.
    pub fn new(token: Option<&str>) -> Seal {
        let secret = token.map_or_else(random, |token| token.as_bytes().to_vec());
        let base = hmac::Key::new(hmac::HMAC_SHA256, &secret);
        let derived = |purpose: &str| hmac::sign(&base, purpose.as_bytes());
        Seal {
            cookies: RandomizedNonceKey::new(&AES_256_GCM, derived("wakeful console: cookies").as_ref())
                .expect("a SHA-256 is as long as the key"),
            forms: hmac::Key::new(hmac::HMAC_SHA256, derived("wakeful console: forms").as_ref()),
        }
    }

    /// Seals a value for the cookie of this name.
    pub fn seal(&self, name: &str, value: &impl Serialize) -> Option<String> {
        let mut bytes = serde_json::to_vec(value).ok()?;
        let nonce = self.cookies.seal_in_place_append_tag(Aad::from(name.as_bytes()), &mut bytes).ok()?;
        let sealed = [nonce.as_ref(), bytes.as_slice()].concat();
        Some(BASE64_URL_SAFE_NO_PAD.encode(sealed))
    }

    /// Opens what [`Seal::seal`] sealed under this name. `None` for everything else.
    pub fn open<T: DeserializeOwned>(&self, name: &str, sealed: &str) -> Option<T> {
        let mut bytes = BASE64_URL_SAFE_NO_PAD.decode(sealed).ok()?;
        if bytes.len() < NONCE_LEN {
            return None;
        }
        let mut rest = bytes.split_off(NONCE_LEN);
        let nonce = Nonce::try_assume_unique_for_key(&bytes).ok()?;
        let opened = self.cookies.open_in_place(nonce, Aad::from(name.as_bytes()), &mut rest).ok()?;
        serde_json::from_slice(opened).ok()
    }

    /// The word that a form carries: one half is of its login, the other one also of the space of its page.
    pub fn form_word(&self, login: &str, space: &str) -> String {
        format!("{}{}", self.half(login), self.half(&of_space(login, space)))
    }

    /// Whether a form carries the word of this login and space.
    pub fn knows(&self, login: &str, space: &str, word: &str) -> bool {
        is_same(&self.form_word(login, space), word)
    }

    /// Whether a form carries the word of this login, whatever the space of its page.
    pub fn knows_login(&self, login: &str, word: &str) -> bool {
        let own = self.half(login);
        word.get(..own.len()).is_some_and(|half| is_same(&own, half))
    }

    fn half(&self, text: &str) -> String {
        hex::encode(&hmac::sign(&self.forms, text.as_bytes()).as_ref()[..16])
    }
}

/// Neither a login's id nor a space has a NUL in it.
fn of_space(login: &str, space: &str) -> String {
    format!("{login}\0{space}")
}

fn is_same(expected: &str, given: &str) -> bool {
    aws_lc_rs::constant_time::verify_slices_are_equal(expected.as_bytes(), given.as_bytes()).is_ok()
}

/// A word that cannot be guessed.
pub(crate) fn random_word() -> String {
    hex::encode(&random()[..16])
}

fn random() -> Vec<u8> {
    let mut bytes = vec![0; 32];
    aws_lc_rs::rand::fill(&mut bytes).expect("the system gives random bytes");
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_opens_under_its_name_and_key_only() {
        let (seal, other) = (Seal::new(Some("a token of the tests")), Seal::new(Some("another token")));
        let sealed = seal.seal("session", &"wkt_secret").unwrap();
        assert!(!sealed.contains("secret"));
        assert_eq!(seal.open::<String>("session", &sealed).as_deref(), Some("wkt_secret"));
        assert_eq!(seal.open::<String>("note", &sealed), None);
        assert_eq!(other.open::<String>("session", &sealed), None);
        let twin = Seal::new(Some("a token of the tests"));
        assert_eq!(twin.open::<String>("session", &sealed).as_deref(), Some("wkt_secret"));
        for broken in ["", "x", "AAAA", &sealed[1..], &sealed[..sealed.len() - 2]] {
            assert_eq!(seal.open::<String>("session", broken), None, "{broken}");
        }
    }

    #[test]
    fn a_form_s_word_is_of_one_login_and_one_space() {
        let seal = Seal::new(None);
        let word = seal.form_word("a", "acme");
        assert!(seal.knows("a", "acme", &word) && seal.knows_login("a", &word));
        assert!(!seal.knows("a", "other", &word));
        assert!(!seal.knows("b", "acme", &word) && !seal.knows_login("b", &word));
        assert!(!Seal::new(None).knows("a", "acme", &word));
        for part in ["", &word[..32], &word[32..]] {
            assert!(!seal.knows("a", "acme", part), "{part}");
        }
        assert!(!seal.knows_login("a", "") && !seal.knows_login("a", "ä"));
    }
}
