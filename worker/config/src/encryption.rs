//! `[encryption]`: where the data keys of encrypted conversations are, and whose conversations are encrypted.

use super::read::Section;
use secrecy::SecretString;
use std::collections::BTreeSet;

/// Encryption of what people and models wrote.
#[derive(Clone, Debug)]
pub struct Encryption {
    /// `postgres://…` of a database of its own, or a directory. Secret, because a URL may hold a password.
    pub keys: SecretString,
    /// Whose new conversations are encrypted. `None`: those of every agent.
    pub agents: Option<Vec<String>>,
    /// 32 bytes in base64. It wraps the data keys.
    pub master_key: SecretString,
    /// An earlier one, which still opens the keys that it wrapped.
    pub old_master_key: Option<SecretString>,
}

/// Reads `[encryption]`. `None` if it is not there: then everything is in clear.
pub(super) fn read(mut section: Section<'_>, known: &BTreeSet<String>) -> Option<Encryption> {
    let origin = ["keys", "keys_file", "master_key", "master_key_file", "agents"]
        .into_iter()
        .find_map(|key| section.origin(key));
    let of_agents = section.origin("agents");
    let agents = section.list("agents");
    if let (Some(agents), Some(origin)) = (&agents, of_agents) {
        for agent in agents.iter().filter(|agent| !known.contains(*agent)) {
            section.problem(origin.clone(), format!("encryption.agents: there is no agent {agent:?}"));
        }
    }
    let is_key = |text: &str| {
        (!is_key(text)).then_some("must be 32 bytes in base64, such as of `openssl rand -base64 32`")
    };
    let keys = section.secret("keys", |place| {
        (!place.contains("://") && !place.starts_with('/'))
            .then_some("must be postgres://… or the absolute path of a directory")
    });
    let master_key = section.secret("master_key", is_key);
    let old_master_key = section.secret("old_master_key", is_key);
    let origin = origin?;
    match (keys, master_key) {
        (Some(keys), Some(master_key)) => {
            section.finish();
            Some(Encryption { keys, agents, master_key, old_master_key })
        }
        (keys, master_key) => {
            for (key, is_missing) in [("keys", keys.is_none()), ("master_key", master_key.is_none())] {
                if is_missing {
                    section.problem(
                        origin.clone(),
                        format!("encryption.{key} is missing or unusable: [encryption] needs it"),
                    );
                }
            }
            section.finish();
            None
        }
    }
}

/// Whether a text is 32 bytes in base64.
fn is_key(text: &str) -> bool {
    let text = text.trim_end();
    let is_digit = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'+' || byte == b'/';
    // 43 digits have 258 bits: the last two are zero, so the last digit is one of every fourth.
    text.strip_suffix('=').is_some_and(|digits| {
        digits.len() == 43 && digits.bytes().all(is_digit) && "AEIMQUYcgkosw048".contains(&digits[42..])
    })
}

#[cfg(test)]
mod tests {
    use super::is_key;

    #[test]
    fn a_key_is_32_bytes_in_base64() {
        assert!(is_key("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="));
        assert!(is_key("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n"));
        for wrong in [
            "",
            "AAAA",
            "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAB=",
            "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
        ] {
            assert!(!is_key(wrong), "{wrong}");
        }
    }
}
