//! Decides which conversation a mail belongs to.
//!
//! A header alone never decides, because anybody can write `In-Reply-To`. A mail joins a conversation if it
//! was sent to an address that only the participants know (a signed plus-address), or if its sender is proved
//! and takes part in it. Every other mail begins its own conversation.

use super::{MailFacts, domain_of};
use crate::id::DEFAULT_SPACE;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

/// Prefix of the ids, without their space, of conversations that began with a mail.
pub const MAIL: &str = "mail-";

/// Length of an id and of a signature: 80 bits, 16 characters.
const BYTES: usize = 10;
const CHARACTERS: usize = 16;

/// Maximum length of a mailbox's local part in bytes (RFC 5321).
const LOCAL_PART: usize = 64;

const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";

/// The id, without its space, of the conversation that a mail begins. The same mail in the same mailbox gives
/// the same id.
pub fn conversation_id(mailbox_id: &str, mail_key: &str) -> String {
    let mut hash = Sha256::new();
    hash.update((mailbox_id.len() as u64).to_be_bytes());
    hash.update(mailbox_id);
    hash.update(mail_key);
    format!("{MAIL}{}", base32(&hash.finalize()[..BYTES]))
}

/// The address for mails that continue the conversation of this stored id, from any sender. `None` if the
/// conversation did not begin with a mail, or if the address would be too long.
pub fn plus_address(secret: &[u8], mailbox_address: &str, conversation_id: &str) -> Option<String> {
    let (space, id) = conversation_id.split_once('/')?;
    let thread = id.strip_prefix(MAIL).filter(|id| id.len() == CHARACTERS)?;
    let (local, domain) = mailbox_address.rsplit_once('@')?;
    let signature = &mac(secret, mailbox_address, space, thread).finalize().into_bytes()[..BYTES];
    let local = format!("{local}+{thread}{}", base32(signature));
    (local.len() <= LOCAL_PART).then(|| format!("{local}@{domain}"))
}

/// The stored id of the conversation for which `token`, the part after the plus sign, was made. `None` if the token
/// is malformed, or was made with another secret, for another mailbox or in another space. The comparison takes the
/// same time in each case.
pub fn conversation_of_token(
    secret: &[u8],
    mailbox_address: &str,
    space: &str,
    token: &str,
) -> Option<String> {
    // Servers may change the case of the local part.
    let token = token.to_ascii_lowercase();
    if !token.is_ascii() || token.len() != 2 * CHARACTERS {
        return None;
    }
    let (thread, signature) = token.split_at(CHARACTERS);
    let signature = unbase32(signature)?;
    unbase32(thread)?;
    mac(secret, mailbox_address, space, thread).verify_truncated_left(&signature).ok()?;
    Some(format!("{space}/{MAIL}{thread}"))
}

fn mac(secret: &[u8], mailbox_address: &str, space: &str, thread: &str) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("a key of any length will do");
    mac.update(b"wakeful mail thread\0");
    mac.update(mailbox_address.to_ascii_lowercase().as_bytes());
    mac.update(b"\0");
    mac.update(thread.as_bytes());
    // Addresses of the default space were sent out before mailboxes had spaces.
    if space != DEFAULT_SPACE {
        mac.update(b"\0");
        mac.update(space.as_bytes());
    }
    mac
}

fn base32(bytes: &[u8]) -> String {
    let mut out = String::new();
    let (mut bits, mut held) = (0_u32, 0);
    for byte in bytes {
        bits = (bits << 8) | u32::from(*byte);
        held += 8;
        while held >= 5 {
            held -= 5;
            out.push(char::from(ALPHABET[(bits >> held & 31) as usize]));
        }
    }
    out
}

fn unbase32(text: &str) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    let (mut bits, mut held) = (0_u32, 0);
    for character in text.bytes() {
        let value = ALPHABET.iter().position(|known| *known == character)?;
        bits = (bits << 5) | value as u32;
        held += 5;
        if held >= 8 {
            held -= 8;
            out.push((bits >> held & 255) as u8);
        }
    }
    Some(out)
}

/// A conversation that contains a message named by a mail's headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// As stored: `space/id`.
    pub conversation_id: String,
    /// Addresses of its participants.
    pub participants: Vec<String>,
}

/// The stored id of the conversation that the mail continues. `signed` is the conversation of its
/// plus-address, which the caller has looked up. `named` are the conversations that its headers name, nearest
/// first.
pub fn joins(
    facts: &MailFacts,
    signed: Option<String>,
    dmarc_passed: bool,
    named: &[Candidate],
) -> Option<String> {
    if signed.is_some() {
        return signed;
    }
    let from = &facts.from.as_ref()?.address;
    if !dmarc_passed || domain_of(from).is_empty() {
        return None;
    }
    named
        .iter()
        .find(|candidate| candidate.participants.iter().any(|one| one.eq_ignore_ascii_case(from)))
        .map(|candidate| candidate.conversation_id.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mail::Person;

    const SECRET: &[u8] = b"a secret of thirty-two bytes, ok";
    const BOX: &str = "support@example.org";

    #[test]
    fn a_signed_address_leads_back_and_nothing_else_does() {
        let id = conversation_id(BOX, "a@x");
        assert_eq!(id, conversation_id(BOX, "a@x"));
        assert_ne!(id, conversation_id("other@example.org", "a@x"));
        let id = format!("default/{id}");
        let address = plus_address(SECRET, BOX, &id).unwrap();
        let token = address.strip_prefix("support+").unwrap().strip_suffix("@example.org").unwrap();
        assert!(address.len() <= 64 + 12, "{address}");
        let of = |secret: &[u8], mailbox: &str, token: &str| {
            conversation_of_token(secret, mailbox, "default", token)
        };
        assert_eq!(of(SECRET, BOX, token), Some(id.clone()));
        assert_eq!(of(SECRET, "Support@Example.org", &token.to_uppercase()), Some(id.clone()));
        assert_eq!(of(b"another", BOX, token), None);
        assert_eq!(of(SECRET, "sales@example.org", token), None);
        assert_eq!(conversation_of_token(SECRET, BOX, "acme", token), None, "of another space");
        let acmes = plus_address(SECRET, BOX, &id.replace("default", "acme")).unwrap();
        let acmes = acmes.strip_prefix("support+").unwrap().strip_suffix("@example.org").unwrap();
        assert_eq!(conversation_of_token(SECRET, BOX, "acme", acmes), Some(id.replace("default", "acme")));
        assert_eq!(of(SECRET, BOX, acmes), None, "of another space");
        for at in 0..token.len() {
            let other = if &token[at..=at] == "a" { "b" } else { "a" };
            let forged = format!("{}{other}{}", &token[..at], &token[at + 1..]);
            assert_eq!(of(SECRET, BOX, &forged), None, "{forged}");
        }
        for hostile in ["", "a", &token[..31], &format!("{token}a"), &"é".repeat(16), &"1".repeat(32)] {
            assert_eq!(of(SECRET, BOX, hostile), None, "{hostile}");
        }
        assert_eq!(plus_address(SECRET, BOX, "default/c1"), None, "a chat has no address");
        assert_eq!(plus_address(SECRET, &format!("{}@x.org", "l".repeat(32)), &id), None, "too long");
        assert!(plus_address(SECRET, &format!("{}@x.org", "l".repeat(31)), &id).is_some());
    }

    #[test]
    fn a_conversation_is_joined_by_a_signature_or_by_a_proved_participant() {
        let facts = |from: &str| MailFacts {
            from: Some(Person { name: None, address: from.to_owned() }),
            ..MailFacts::default()
        };
        let named = [
            Candidate { conversation_id: "default/one".into(), participants: vec!["bob@example.com".into()] },
            Candidate { conversation_id: "default/two".into(), participants: vec!["Ann@example.com".into()] },
        ];
        let signed = Some("default/signed".to_owned());
        for (what, from, signed, dmarc, named, joined) in [
            ("signed", "eve@evil.org", signed.clone(), false, &named[..], Some("default/signed")),
            ("proved", "ann@example.com", None, true, &named, Some("default/two")),
            ("a header alone", "ann@example.com", None, false, &named, None),
            ("a proved stranger", "eve@evil.org", None, true, &named, None),
            ("names nothing", "ann@example.com", None, true, &[], None),
            ("signed and proved", "ann@example.com", signed, true, &named, Some("default/signed")),
        ] {
            assert_eq!(joins(&facts(from), signed, dmarc, named).as_deref(), joined, "{what}");
        }
        assert_eq!(joins(&MailFacts::default(), None, true, &named), None, "of nobody");
    }
}
