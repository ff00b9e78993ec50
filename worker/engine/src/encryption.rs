//! Turns on `[encryption]` for a store.

use secrecy::ExposeSecret;
use std::collections::BTreeSet;
use wakeful_config::Config;
use wakeful_store::encryption::{Settings, master_key, name_of_store};
use wakeful_store::{Error, Store};

/// Turns encryption on if the configuration has it. Call it right after the store is connected.
///
/// # Errors
/// [`Error::Keys`] for a place that cannot hold keys, or a text that is not a master key.
pub fn turn_on(config: &Config, store: &Store) -> Result<(), Error> {
    let Some(encryption) = &config.encryption else { return Ok(()) };
    let old = encryption.old_master_key.as_ref();
    store.encrypt(Settings {
        keys: encryption.keys.expose_secret().to_owned(),
        agents: encryption.agents.clone(),
        master: master_key(encryption.master_key.expose_secret())?,
        old_master: old.map(|key| master_key(key.expose_secret())).transpose()?,
    })
}

/// The key store's place with each master key, as hashes that say nothing to somebody without that key. Two configurations that
/// have one in common can open the same texts.
pub fn key_stores(config: &Config) -> BTreeSet<String> {
    let Some(encryption) = &config.encryption else { return BTreeSet::new() };
    let masters = std::iter::once(&encryption.master_key).chain(&encryption.old_master_key);
    let masters = masters.filter_map(|key| master_key(key.expose_secret()).ok());
    masters.filter_map(|master| name_of_store(encryption.keys.expose_secret(), &master).ok()).collect()
}
