//! One sealed value: how a data key seals a text, and how it opens the sealed values within a text.
//!
//! A sealed value is ASCII without quotes, so it stands in a column, in JSON and in a list of values as any word does:
//!
//! `wks1s.<id of the data key>.<base64url of nonce, cipher text and tag>~`
//!
//! `s` is a text. `j` is a whole value of JSON, which stands in its place as a string. The `1` is the version of the format.

use super::Wrapped;
use crate::{Error, Result};
use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::{hkdf, hmac};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// What every sealed value begins with. The version is part of it.
pub(super) const MARK: &str = "wks1";

/// Digits of a data key's id.
pub(super) const ID_CHARS: usize = 16;

/// What is sealed. It is authenticated, so a text cannot be passed off as a value of JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Json,
}

impl Kind {
    fn letter(self) -> char {
        match self {
            Kind::Text => 's',
            Kind::Json => 'j',
        }
    }

    fn of(letter: u8) -> Option<Kind> {
        match letter {
            b's' => Some(Kind::Text),
            b'j' => Some(Kind::Json),
            _ => None,
        }
    }
}

/// The data key of a conversation, ready for use.
pub(super) struct DataKey {
    pub id: String,
    sealing: LessSafeKey,
    nonces: hmac::Key,
    /// Who the key belongs to. It is authenticated with each value.
    owner: String,
}

impl std::fmt::Debug for DataKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DataKey({})", self.id)
    }
}

impl DataKey {
    pub fn new(key: &Wrapped, secret: &[u8; 32]) -> Result<DataKey> {
        let wrong = |_| Error::corrupt("data key", "it cannot be used");
        let root = hkdf::Salt::new(hkdf::HKDF_SHA256, b"wakeful data key 1").extract(secret);
        let sealing = root.expand(&[b"values"], &AES_256_GCM).map_err(wrong)?;
        let nonces = root.expand(&[b"nonces"], hmac::HMAC_SHA256).map_err(wrong)?;
        Ok(DataKey {
            id: key.key_id.clone(),
            sealing: LessSafeKey::new(UnboundKey::from(sealing)),
            nonces: nonces.into(),
            owner: key.owner_sha256.clone(),
        })
    }

    fn authenticated(&self, kind: Kind) -> String {
        format!("{MARK}{}.{}.{}", kind.letter(), self.id, self.owner)
    }

    /// Seals a value. The same value gives the same sealed value, so that a commit that is repeated writes the same bytes. The
    /// nonce is a MAC of the value, so two values never share one by chance of a generator.
    pub fn seal(&self, kind: Kind, value: &str) -> String {
        let mut mac = hmac::Context::with_key(&self.nonces);
        mac.update(kind.letter().encode_utf8(&mut [0; 4]).as_bytes());
        mac.update(value.as_bytes());
        let mut nonce = [0; NONCE_LEN];
        nonce.copy_from_slice(&mac.sign().as_ref()[..NONCE_LEN]);
        let mut bytes = value.as_bytes().to_vec();
        let tag = self
            .sealing
            .seal_in_place_separate_tag(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(self.authenticated(kind)),
                &mut bytes,
            )
            .expect("AES-GCM seals what fits into memory");
        let whole = [nonce.as_slice(), &bytes, tag.as_ref()].concat();
        let mut sealed = format!("{MARK}{}.{}.", kind.letter(), self.id);
        URL_SAFE_NO_PAD.encode_string(whole, &mut sealed);
        sealed.push('~');
        sealed
    }

    /// A keyed hash, in the form of a SHA-256 in hex. It shows that two texts are the same, and only to an owner of the key.
    pub fn mac(&self, text: &str) -> String {
        let mut mac = hmac::Context::with_key(&self.nonces);
        mac.update(b"h");
        mac.update(text.as_bytes());
        hex::encode(mac.sign().as_ref())
    }

    /// Seals bytes, for a blob.
    pub fn seal_bytes(&self, bytes: &[u8]) -> Vec<u8> {
        let mut mac = hmac::Context::with_key(&self.nonces);
        mac.update(b"b");
        mac.update(bytes);
        let mut nonce = [0; NONCE_LEN];
        nonce.copy_from_slice(&mac.sign().as_ref()[..NONCE_LEN]);
        let mut sealed = bytes.to_vec();
        let tag = self
            .sealing
            .seal_in_place_separate_tag(
                Nonce::assume_unique_for_key(nonce),
                Aad::from(format!("{MARK}b.{}.{}", self.id, self.owner)),
                &mut sealed,
            )
            .expect("AES-GCM seals what fits into memory");
        [nonce.as_slice(), &sealed, tag.as_ref()].concat()
    }

    /// Opens what [`DataKey::seal_bytes`] sealed.
    pub fn open_bytes(&self, sealed: &[u8]) -> Result<Vec<u8>> {
        let aad = format!("{MARK}b.{}.{}", self.id, self.owner);
        self.opened(sealed.to_vec(), aad)
    }

    fn opened(&self, mut whole: Vec<u8>, aad: String) -> Result<Vec<u8>> {
        let changed =
            // Without the key's id: who knows it can write what looks like a sealed value.
            || Error::corrupt("sealed value", "it was changed, cut or moved");
        if whole.len() < NONCE_LEN {
            return Err(changed());
        }
        let mut sealed = whole.split_off(NONCE_LEN);
        let nonce = Nonce::try_assume_unique_for_key(&whole).map_err(|_| changed())?;
        let open = self.sealing.open_in_place(nonce, Aad::from(aad), &mut sealed).map_err(|_| changed())?;
        let length = open.len();
        sealed.truncate(length);
        Ok(sealed)
    }

    fn open(&self, found: &Found<'_>) -> Result<String> {
        let whole = URL_SAFE_NO_PAD
            .decode(found.body)
            .map_err(|_| Error::corrupt("sealed value", "it is not base64"))?;
        let open = self.opened(whole, self.authenticated(found.kind))?;
        String::from_utf8(open).map_err(|error| Error::corrupt("sealed value", error))
    }

    /// Opens the sealed values of this key within `text`, which is JSON or any other text. `None`: there is none. A value
    /// under another key stays sealed: it was moved here, or somebody wrote what looks like one.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for a value of this key that was changed or cut.
    pub fn open_within(&self, text: &str, is_json: bool) -> Result<Option<String>> {
        let mut open: Option<String> = None;
        let (mut copied, mut from) = (0, 0);
        while let Some(at) = text[from..].find(MARK).map(|at| from + at) {
            from = at + MARK.len();
            let Some(found) = Found::at(text, at, &self.id)? else { continue };
            let value = self.open(&found)?;
            let open = open.get_or_insert_with(|| String::with_capacity(text.len()));
            open.push_str(&text[copied..at]);
            copied = at + found.length;
            match (is_json, found.kind) {
                (false, _) => open.push_str(&value),
                (true, Kind::Text) => {
                    let quoted = serde_json::Value::from(value).to_string();
                    open.push_str(&quoted[1..quoted.len() - 1]);
                }
                (true, Kind::Json) => {
                    // The value takes the place of the string, quotes included.
                    if !open.ends_with('"') || !text[copied..].starts_with('"') {
                        return Err(Error::corrupt("sealed value", "a value of JSON stands within a text"));
                    }
                    open.pop();
                    open.push_str(&value);
                    copied += 1;
                }
            }
            from = copied;
        }
        Ok(open.map(|mut open| {
            open.push_str(&text[copied..]);
            open
        }))
    }
}

/// The text with a word in place of each sealed value, for a reader who cannot have the key.
pub(crate) fn hide(text: &str) -> String {
    let mut hidden = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(MARK) {
        let (before, value) = rest.split_at(at);
        hidden.push_str(before);
        let end = value.find(|c: char| !c.is_ascii_alphanumeric() && !"-_.".contains(c));
        let end = end.filter(|end| value[*end..].starts_with('~'));
        hidden.push_str(if end.is_some() { "[encrypted]" } else { MARK });
        rest = &value[end.map_or(MARK.len(), |end| end + 1)..];
    }
    hidden.push_str(rest);
    hidden
}

/// A sealed value within a text.
struct Found<'t> {
    kind: Kind,
    body: &'t str,
    length: usize,
}

impl Found<'_> {
    /// The sealed value of the key `id` that begins at `at`. `None`: there is none of this key.
    fn at<'t>(text: &'t str, at: usize, id: &str) -> Result<Option<Found<'t>>> {
        let rest = &text[at + MARK.len()..];
        let Some(kind) = rest.bytes().next().and_then(Kind::of) else { return Ok(None) };
        let Some(rest) = rest[1..].strip_prefix('.').and_then(|rest| rest.strip_prefix(id)) else {
            return Ok(None);
        };
        let Some(rest) = rest.strip_prefix('.') else { return Ok(None) };
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '_');
        match end {
            Some(end) if rest[end..].starts_with('~') => {
                Ok(Some(Found { kind, body: &rest[..end], length: MARK.len() + 3 + ID_CHARS + end + 1 }))
            }
            _ => Err(Error::corrupt("sealed value", "its end is missing")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(id: &str, owner: &str, secret: u8) -> DataKey {
        let wrapped = Wrapped {
            key_id: id.to_owned(),
            owner_sha256: owner.to_owned(),
            master_id: String::new(),
            wrapped: Vec::new(),
        };
        DataKey::new(&wrapped, &[secret; 32]).unwrap()
    }

    const ONE: &str = "00000000000000aa";
    const TWO: &str = "00000000000000bb";

    #[test]
    fn a_text_comes_back_byte_for_byte_and_the_same_text_is_sealed_alike() {
        let key = key(ONE, "c1", 1);
        for text in ["", "hello", "a \"quoted\" \\ line\nand \u{1}\u{fffd} é", "wks1s.is how they begin~"] {
            let sealed = key.seal(Kind::Text, text);
            assert_eq!(sealed, key.seal(Kind::Text, text));
            assert!(!sealed.contains("hello") && sealed.is_ascii());
            assert_eq!(key.open_within(&sealed, false).unwrap().as_deref(), Some(text));
            let json = format!("{{\"a\":[\"{sealed}\"],\"b\":1}}");
            let open = key.open_within(&json, true).unwrap().unwrap();
            assert_eq!(open, serde_json::json!({"a": [text], "b": 1}).to_string());
        }
    }

    #[test]
    fn values_are_opened_wherever_they_stand_in_a_text() {
        let key = key(ONE, "c1", 1);
        let text = format!("{}, {} and wks1", key.seal(Kind::Text, "a"), key.seal(Kind::Text, "b"));
        assert_eq!(key.open_within(&text, false).unwrap().unwrap(), "a, b and wks1");
        assert_eq!(key.open_within("nothing here", false).unwrap(), None);
    }

    #[test]
    fn a_value_of_json_takes_its_place_again() {
        let key = key(ONE, "c1", 1);
        let sealed = key.seal(Kind::Json, "{\"n\":1.50}");
        let json = format!("[{{\"arguments\":\"{sealed}\"}}]");
        assert_eq!(key.open_within(&json, true).unwrap().unwrap(), "[{\"arguments\":{\"n\":1.50}}]");
        assert_eq!(key.open_within(&sealed, false).unwrap().unwrap(), "{\"n\":1.50}");
        let within = format!("[\"x {sealed}\"]");
        assert!(key.open_within(&within, true).is_err());
    }

    #[test]
    fn under_another_key_it_stays_sealed() {
        let sealed = key(ONE, "c1", 1).seal(Kind::Text, "secret");
        assert_eq!(key(TWO, "c2", 2).open_within(&sealed, false).unwrap(), None);
    }

    #[test]
    fn it_does_not_open_when_the_key_the_owner_the_kind_or_a_byte_is_another() {
        let own = key(ONE, "c1", 1);
        let sealed = own.seal(Kind::Text, "secret");
        let refused = |key: &DataKey, text: &str| key.open_within(text, false).is_err();
        // The same id with another secret, and the same key in the hands of another conversation.
        assert!(refused(&key(ONE, "c1", 2), &sealed));
        assert!(refused(&key(ONE, "c2", 1), &sealed));
        assert!(refused(&own, &sealed.replacen("wks1s", "wks1j", 1)));
        for at in MARK.len() + 3 + ID_CHARS..sealed.len() - 1 {
            let mut bytes = sealed.clone().into_bytes();
            bytes[at] = if bytes[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(bytes).unwrap();
            assert!(changed == sealed || refused(&own, &changed), "byte {at}");
        }
        for length in MARK.len() + 3 + ID_CHARS..sealed.len() {
            assert!(refused(&own, &sealed[..length]), "cut after {length}");
        }
    }

    #[test]
    fn bytes_come_back_and_a_changed_byte_does_not_open() {
        let key = key(ONE, "c1", 1);
        let mut sealed = key.seal_bytes(b"\0\xff file");
        assert_eq!(key.open_bytes(&sealed).unwrap(), b"\0\xff file");
        sealed[3] ^= 1;
        assert!(key.open_bytes(&sealed).is_err());
        assert!(key.open_bytes(&sealed[..5]).is_err());
    }

    #[test]
    fn who_lacks_the_key_is_shown_a_word_in_its_place() {
        let sealed = key(ONE, "c1", 1).seal(Kind::Text, "secret");
        assert_eq!(hide(&format!("[\"{sealed}\", \"wks1\"]")), "[\"[encrypted]\", \"wks1\"]");
        assert_eq!(hide("wks1s.cut"), "wks1s.cut");
    }

    #[test]
    fn a_hash_under_a_key_is_not_the_plain_one() {
        assert_eq!(key(ONE, "c1", 1).mac("yes"), key(ONE, "c1", 1).mac("yes"));
        assert_ne!(key(ONE, "c1", 1).mac("yes"), key(ONE, "c1", 2).mac("yes"));
    }
}
