//! The master key, which wraps the data keys.

use super::Wrapped;
use crate::{Error, Result};
use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::{hmac, rand};
use sha2::{Digest, Sha256};

/// The key that wraps data keys.
pub(super) struct Master {
    pub id: String,
    key: LessSafeKey,
    mac: hmac::Key,
}

impl Master {
    pub fn new(secret: &[u8; 32]) -> Result<Master> {
        let key =
            UnboundKey::new(&AES_256_GCM, secret).map_err(|_| Error::corrupt("master key", "unusable"))?;
        let id = Sha256::new().chain_update(b"wakeful master key").chain_update(secret).finalize();
        let mac = Sha256::new().chain_update(b"wakeful master mac").chain_update(secret).finalize();
        let mac = hmac::Key::new(hmac::HMAC_SHA256, &mac);
        Ok(Master { id: hex::encode(&id[..6]), key: LessSafeKey::new(key), mac })
    }

    /// A hash of a text. Only the owner of the master key can compute it.
    pub fn mac(&self, text: &str) -> String {
        hex::encode(hmac::sign(&self.mac, text.as_bytes()).as_ref())
    }

    fn aad(key_id: &str, owner: &str) -> String {
        format!("wakeful data key 1 {key_id} {owner}")
    }

    pub fn wrap(&self, key_id: String, owner_sha256: String, secret: &[u8; 32]) -> Result<Wrapped> {
        let mut nonce = [0; NONCE_LEN];
        rand::fill(&mut nonce).map_err(|_| no_random())?;
        let aad = Aad::from(Master::aad(&key_id, &owner_sha256));
        let mut wrapped = secret.to_vec();
        let tag = self
            .key
            .seal_in_place_separate_tag(Nonce::assume_unique_for_key(nonce), aad, &mut wrapped)
            .map_err(|_| Error::corrupt("data key", "it cannot be wrapped"))?;
        let wrapped = [nonce.as_slice(), &wrapped, tag.as_ref()].concat();
        Ok(Wrapped { key_id, owner_sha256, master_id: self.id.clone(), wrapped })
    }

    pub fn unwrap(&self, key: &Wrapped) -> Result<[u8; 32]> {
        let wrong =
            || Error::corrupt("data key", format!("{} does not open under its master key", key.key_id));
        if key.wrapped.len() < NONCE_LEN {
            return Err(wrong());
        }
        let (nonce, sealed) = key.wrapped.split_at(NONCE_LEN);
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| wrong())?;
        let aad = Aad::from(Master::aad(&key.key_id, &key.owner_sha256));
        let mut sealed = sealed.to_vec();
        let secret = self.key.open_in_place(nonce, aad, &mut sealed).map_err(|_| wrong())?;
        <[u8; 32]>::try_from(&*secret).map_err(|_| wrong())
    }
}

pub(super) fn no_random() -> Error {
    Error::corrupt("data key", "the system gives no random bytes")
}
