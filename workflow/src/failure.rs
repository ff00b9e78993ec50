//! Groups of failed runs: what makes two failures the same.
//!
//! A person who has a thousand failed sessions has two or three causes. So the text of an error is normalised: numbers, ids, quoted
//! texts, addresses and hosts are replaced by signs. The kind of the fault, its source and this text make the fingerprint. It is
//! the same in every process and version.

use crate::fault::Fault;
use sha2::{Digest, Sha256};

/// The longest normalised text, in characters.
const LONGEST: usize = 300;

/// The kind of a run that failed because its session cannot be read.
pub const UNREADABLE: &str = "unreadable";

/// The kinds that a group may have: those of faults ([`Fault::kind`]), and [`UNREADABLE`].
pub const KINDS: [&str; 22] = [
    "rate_limited",
    "overloaded",
    "timeout",
    "unreachable",
    "stream_cut",
    "stalled",
    "bad_response",
    "empty_reply",
    "context_overflow",
    "unauthorized",
    "unknown_model",
    "refused",
    "not_configured",
    "step_limit",
    "token_limit",
    "malformed_calls",
    "worker_died",
    "stuck",
    "provider_down",
    "recording_over",
    "internal",
    UNREADABLE,
];

/// The group of failures that a failed run belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// 16 hexadecimal digits.
    pub fingerprint: String,
    /// The fault's kind: [`Fault::kind`].
    pub kind: String,
    /// The provider whose fault it is. Empty: no provider's.
    pub source: String,
    /// The normalised text.
    pub text: String,
}

impl Failure {
    /// The group of a fault. `model` is that of the call that failed, as `provider/name`.
    pub fn of(fault: &Fault, model: Option<&str>) -> Failure {
        let provider = model.and_then(|model| model.split_once('/')).map(|(provider, _)| provider);
        let source = match fault {
            Fault::ProviderDown { provider, .. } => provider.as_str(),
            Fault::RateLimited { .. }
            | Fault::Overloaded { .. }
            | Fault::Timeout { .. }
            | Fault::Unreachable { .. }
            | Fault::StreamCut
            | Fault::Stalled { .. }
            | Fault::BadResponse { .. }
            | Fault::EmptyReply
            | Fault::ContextOverflow { .. }
            | Fault::Unauthorized { .. }
            | Fault::UnknownModel { .. }
            | Fault::Refused { .. }
            | Fault::Stuck { .. } => provider.unwrap_or_default(),
            _ => "",
        };
        Failure::new(fault.kind(), source, &fault.to_string())
    }

    /// The group of an error that is known by its text alone.
    pub fn new(kind: &str, source: &str, error: &str) -> Failure {
        let text = normalised(error);
        let named = format!("{kind}\n{source}\n{}", text.to_lowercase());
        let fingerprint = hex::encode(Sha256::digest(named.as_bytes()))[..16].to_owned();
        Failure { fingerprint, kind: kind.to_owned(), source: source.to_owned(), text }
    }
}

/// Returns whether a word can be a fingerprint.
pub fn is_fingerprint(word: &str) -> bool {
    word.len() == 16 && word.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Replaces what differs between two occurrences of one error: numbers and ids by `#`, quoted texts by `"…"`, mail addresses by
/// `ADDRESS`, URLs and hosts by `HOST`. The status of an answer (`status 503`) stays.
pub fn normalised(error: &str) -> String {
    let mut text = String::new();
    let mut rest = error;
    let mut after_status = false;
    while let Some(first) = rest.chars().next() {
        if let Some(len) = quoted(rest, text.chars().next_back()) {
            push(&mut text, "\"…\"");
            rest = &rest[len..];
            after_status = false;
            continue;
        }
        if !is_of_word(first) {
            let shown = if first.is_whitespace() || first.is_control() { ' ' } else { first };
            // Several blanks count as one.
            if shown != ' ' || !(text.is_empty() || text.ends_with(' ')) {
                text.push(shown);
            }
            rest = &rest[first.len_utf8()..];
            continue;
        }
        let len = rest.find(|char| !is_of_word(char)).unwrap_or(rest.len());
        let word = &rest[..len];
        let core = word.trim_end_matches(['.', ':', '/', '@', '-', '_']);
        let sign = sign(core, after_status);
        push(&mut text, sign);
        // A URL's last slash belongs to it.
        text.push_str(word[core.len()..].trim_start_matches(|char| sign == "HOST" && char == '/'));
        after_status = core.eq_ignore_ascii_case("status");
        rest = &rest[len..];
    }
    let text = text.trim_end();
    text.chars().take(LONGEST).collect()
}

/// Appends a word. A sign that is there already is not repeated: `# #` would count the ids of a list.
fn push(text: &mut String, word: &str) {
    let is_sign = matches!(word, "#" | "HOST" | "ADDRESS" | "\"…\"");
    let before = text.trim_end_matches([',', ' ']);
    if is_sign && before.len() < text.len() && before.ends_with(word) {
        text.truncate(before.len());
        return;
    }
    text.push_str(word);
}

/// Letters and digits, and what joins them to ids, hosts, addresses and URLs.
fn is_of_word(char: char) -> bool {
    char.is_alphanumeric() || matches!(char, '.' | ':' | '/' | '@' | '-' | '_' | '%' | '?' | '&' | '=' | '+')
}

/// What stands for a word.
fn sign(word: &str, after_status: bool) -> &str {
    if word.contains("://") {
        return "HOST";
    }
    if let Some((name, host)) = word.split_once('@')
        && !name.is_empty()
        && host.contains('.')
    {
        return "ADDRESS";
    }
    let digits = word.chars().filter(char::is_ascii_digit).count();
    if after_status && word.len() == 3 && digits == 3 {
        return word;
    }
    if is_host(word) {
        return "HOST";
    }
    if digits > 0 {
        return "#";
    }
    word
}

/// `api.example.com`, with a port or a path or without, and `[::1]:443` without its brackets.
fn is_host(word: &str) -> bool {
    let host = word.split(['/', ':']).next().unwrap_or_default();
    let labels: Vec<&str> = host.split('.').collect();
    let is_label = |label: &&str| {
        !label.is_empty() && label.chars().all(|char| char.is_ascii_alphanumeric() || char == '-')
    };
    let is_address = labels.len() == 4 && labels.iter().all(|label| label.parse::<u8>().is_ok());
    let last_is_name = labels
        .last()
        .is_some_and(|last| last.len() >= 2 && last.chars().all(|char| char.is_ascii_lowercase()));
    let begins_lower = host.starts_with(|char: char| char.is_ascii_lowercase() || char.is_ascii_digit());
    is_address || (labels.len() >= 2 && labels.iter().all(is_label) && last_is_name && begins_lower)
}

/// The bytes of the quoted text that `rest` begins with. An apostrophe inside a word begins none.
fn quoted(rest: &str, before: Option<char>) -> Option<usize> {
    let open = rest.chars().next()?;
    let close = match open {
        '"' | '`' => open,
        '\'' if !before.is_some_and(char::is_alphanumeric) => open,
        '“' => '”',
        '‘' => '’',
        '«' => '»',
        _ => return None,
    };
    let inner = &rest[open.len_utf8()..];
    let end = inner.char_indices().take(2000).find(|(at, char)| {
        *char == close && (close != '\'' || !inner[at + 1..].starts_with(char::is_alphanumeric))
    })?;
    Some(open.len_utf8() + end.0 + close.len_utf8())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn same(a: &str, b: &str) {
        assert_eq!(normalised(a), normalised(b));
    }

    #[test]
    fn what_differs_between_two_occurrences_is_left_out() {
        same("request req_018f3a failed after 1200 ms", "request req_99 failed after 7 ms");
        same("cannot reach api.openai.com:443", "cannot reach eu.example.org:8443");
        same("GET https://a.example/x?y=1 failed", "GET http://127.0.0.1:7070/ failed");
        same("no mailbox \"ann\" of ann@example.com", "no mailbox \"bob and co\" of b.c@mail.example.org");
        same("the ids 1, 2, 3 are taken", "the ids 4 are taken");
        same("it's user 'ann' again", "it's user 'bob' again");
        same("a  b\n c", "a b c");
    }

    #[test]
    fn what_tells_causes_apart_stays() {
        for (a, b) in [
            ("status 503: overloaded", "status 401: overloaded"),
            ("no such tool reserve", "no such tool book"),
            ("table or view is missing", "column is missing"),
        ] {
            assert_ne!(normalised(a), normalised(b));
        }
        assert_eq!(
            normalised("the model's provider refused the request (status 400): max_tokens 9000 > 8192."),
            "the model's provider refused the request (status 400): max_tokens # > #."
        );
    }

    #[test]
    fn a_failure_is_of_a_kind_and_a_provider() {
        let fault = Fault::Unauthorized { message: "key sk-12ab is wrong".to_owned() };
        let of = |model| Failure::of(&fault, model);
        assert_eq!(of(Some("openai/gpt-5")), of(Some("openai/gpt-5-mini")));
        assert_ne!(of(Some("openai/gpt-5")).fingerprint, of(Some("anthropic/x")).fingerprint);
        assert_eq!((of(None).kind.as_str(), of(None).source.as_str()), ("unauthorized", ""));
        let limit = |limit| Failure::of(&Fault::StepLimit { limit }, Some("openai/x"));
        assert_eq!(limit(3), limit(50));
        assert!(is_fingerprint(&limit(3).fingerprint) && !is_fingerprint("a text of 16 by"));
        // A fingerprint is stored: another version must find the same.
        assert_eq!(Failure::new("refused", "openai", "no model 7").fingerprint, "578e4591f0a18a23");
    }

    #[test]
    fn the_kinds_are_those_of_faults_and_the_one_of_sessions_that_cannot_be_read() {
        // The parser lists every kind of a fault.
        let said = serde_json::from_str::<Fault>(r#"{"kind": "nosuch"}"#).unwrap_err().to_string();
        let kinds: Vec<&str> = said.split('`').skip(3).step_by(2).chain([UNREADABLE]).collect();
        assert_eq!(kinds, KINDS);
    }

    proptest! {
        #[test]
        fn a_normalised_text_is_short_and_on_one_line(error in ".{0,600}") {
            let once = normalised(&error);
            prop_assert!(once.chars().count() <= LONGEST);
            prop_assert!(!once.chars().any(char::is_control));
        }
    }
}
