//! Turns on `[encryption]` for a store.

use secrecy::ExposeSecret;
use wakeful_config::Config;
use wakeful_store::encryption::{Settings, master_key};
use wakeful_store::{Error, Store};

/// Turns encryption on if the configuration has it. Call it right after the store is connected.
///
/// # Errors
/// [`Error::Keys`] for a place that cannot hold keys, or a master key that is none.
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
