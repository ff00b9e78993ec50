//! What a server needs beyond a configuration that loads.

use crate::problem::{Origin, Problem};
use crate::{Config, ConfigError};
use secrecy::{ExposeSecret, SecretString};

/// The fewest characters of a token that guards the server: a shorter one can be guessed.
const TOKEN_BYTES: usize = 16;

impl Config {
    /// Checks what production needs beyond a configuration that loads: a token if the process `listens`, the
    /// models' keys if it `works`. Call it after applying the command line's options.
    ///
    /// # Errors
    /// [`ConfigError`] with everything that is missing: a database, a model or a key for an agent, a token
    /// for an address that others can reach.
    pub fn check_serve(&self, listens: bool, works: bool) -> Result<(), ConfigError> {
        let mut problems = Vec::new();
        let mut missing = |text: String| problems.push(Problem::new(Origin::Nowhere, text));
        if self.database.url.is_none() {
            missing("no database: set DATABASE_URL (or database.url)".to_owned());
        }
        if listens && self.server.token.is_none() && !self.server.listen.ip().is_loopback() {
            missing(format!(
                "server.listen = \"{}\" is reachable from other machines and needs a token: set WAKEFUL_TOKEN (or \
                 server.token), or listen on 127.0.0.1",
                self.server.listen
            ));
        }
        if listens && works && self.server.drain_delay > self.queue.drain {
            missing(format!(
                "server.drain_delay_s is {} and queue.drain_s is {}: a process that works ends after the latter",
                self.server.drain_delay.as_secs(),
                self.queue.drain.as_secs_f64()
            ));
        }
        let is_short = |token: &SecretString| token.expose_secret().len() < TOKEN_BYTES;
        for (key, tokens) in [
            ("server.token (WAKEFUL_TOKEN)", self.server.token.as_slice()),
            ("server.internal_tokens", &self.server.internal_tokens),
        ] {
            if listens && tokens.iter().any(is_short) {
                missing(format!(
                    "{key} must have at least {TOKEN_BYTES} characters, such as what `openssl rand -hex 32` prints"
                ));
            }
        }
        if let Some(lmtp) = self.email.incoming.lmtp_listen
            && listens
            && !lmtp.ip().is_loopback()
            && self.email.incoming.lmtp_peers.is_empty()
        {
            missing(format!(
                "email.lmtp_listen = \"{lmtp}\" is reachable from other machines, and LMTP asks for no password: set \
                 email.lmtp_peers to the addresses of your mail servers, or listen on 127.0.0.1"
            ));
        }
        for name in self.agent_names() {
            match self.agent(&name) {
                Err(error) => missing(error.to_string()),
                Ok(agent) => {
                    if let Some(variable) = self.missing_key(&agent.model)
                        && works
                    {
                        missing(format!("agent {name:?} uses {} but {variable} is not set", agent.model));
                    }
                }
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(ConfigError::new(problems)) }
    }
}
