//! Incoming mail: the facts that count, the conversation that it joins, and what its session may do. No IO;
//! the worker reads the bytes.

pub mod auth;
pub mod policy;
pub mod scan;
pub mod text;
pub mod thread;

/// A mailbox in a header: an address, and an optional name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Person {
    pub name: Option<String>,
    /// Plain and in lower case, without NUL or line breaks.
    pub address: String,
}

/// A file attached to a mail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachmentFacts {
    pub file_name: String,
    pub media_type: String,
    pub bytes: usize,
    /// Whether the file was too large to keep. Then only these facts are known.
    pub left_out: bool,
}

/// The facts of one mail. Lists are bounded, and texts contain no NUL.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MailFacts {
    /// Without angle brackets.
    pub message_id: Option<String>,
    /// `None` also if the header lists several addresses or occurs several times, because then the sender is
    /// unclear.
    pub from: Option<Person>,
    pub reply_to: Vec<Person>,
    pub to: Vec<Person>,
    pub cc: Vec<Person>,
    /// RFC 3339, by the sender's clock.
    pub date: Option<String>,
    pub subject: String,
    /// Ids of messages, without angle brackets.
    pub in_reply_to: Vec<String>,
    pub references: Vec<String>,
    /// Each `Authentication-Results`, topmost first, unfolded.
    pub authentication_results: Vec<String>,
    /// Headers by which programs mark their mails as automatic: names in lower case, values unchanged.
    pub machine_headers: Vec<(String, String)>,
    /// The envelope's sender, or the `Return-Path` if the envelope is unknown. Empty means the null path:
    /// never answer such a mail.
    pub return_path: Option<String>,
    /// The `report-type` of a `multipart/report`.
    pub report: Option<String>,
    /// Ids of the messages that a report is about.
    pub reported: Vec<String>,
    /// The mail's text, as plain text.
    pub body: String,
    /// Whether `body` was cut. The last attachment is then the whole text.
    pub body_cut: bool,
    pub attachments: Vec<AttachmentFacts>,
}

impl MailFacts {
    /// Ids of the messages that this mail answers: `In-Reply-To` first, then `References`, newest first.
    pub fn answers(&self) -> impl Iterator<Item = &str> {
        self.in_reply_to.iter().chain(self.references.iter().rev()).map(String::as_str)
    }
}

/// The address in `Name <address>`, or the text itself if it has no name.
pub fn plain_address(text: &str) -> &str {
    let text = text.trim();
    let named = text.strip_suffix('>').and_then(|text| text.rsplit_once('<'));
    named.map_or(text, |(_, address)| address.trim())
}

/// The part of an address after its `@`.
pub fn domain_of(address: &str) -> &str {
    address.rsplit_once('@').map_or("", |(_, domain)| domain)
}

/// The subject in lower case, without the marks of replies and forwards. Equal for all mails of one exchange.
pub fn subject_key(subject: &str) -> String {
    let mut rest = subject.trim();
    while let Some((mark, after)) = rest.split_once(':') {
        let mark = mark.trim().trim_end_matches(|c: char| c == ']' || c == '[' || c.is_ascii_digit());
        let is_mark = ["re", "fw", "fwd", "aw", "wg", "antw", "sv", "tr", "rv", "res"]
            .iter()
            .any(|known| mark.eq_ignore_ascii_case(known));
        if !is_mark {
            break;
        }
        rest = after.trim_start();
    }
    rest.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_no_part_of_an_address() {
        for text in ["ann@example.com", " ann@example.com ", "<ann@example.com>", "Ann <ann@example.com> "] {
            assert_eq!(plain_address(text), "ann@example.com", "{text}");
        }
        assert_eq!(plain_address("\"a < b\" <ann@example.com>"), "ann@example.com");
        assert_eq!(plain_address("ann <"), "ann <");
    }

    #[test]
    fn the_marks_of_replies_are_no_part_of_a_subject() {
        for (subject, key) in [
            ("Lunch", "lunch"),
            ("Re: Lunch", "lunch"),
            ("RE: AW: Re[2]: Fwd:  Lunch  now", "lunch now"),
            ("Note: Lunch", "note: lunch"),
            ("", ""),
        ] {
            assert_eq!(subject_key(subject), key, "{subject}");
        }
    }
}
