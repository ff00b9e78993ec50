//! Mail as it came in: what of it counts, who may join a conversation by it, and what its session may do. No IO: reading the
//! bytes is the worker's.

pub mod auth;
pub mod policy;
pub mod scan;
pub mod text;
pub mod thread;

/// A mailbox in a header: an address, and the name beside it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Person {
    pub name: Option<String>,
    /// Plain and in lower case, without NUL or line breaks.
    pub address: String,
}

/// A file that came along.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachmentFacts {
    pub file_name: String,
    pub media_type: String,
    pub bytes: usize,
    /// It was too large to be kept: only its name is known.
    pub left_out: bool,
}

/// What one mail says, read once. Lists are bounded, and texts have no NUL.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MailFacts {
    /// Without angle brackets.
    pub message_id: Option<String>,
    /// `None` also where there are several, or several headers of that name: then nobody can be taken at their word.
    pub from: Option<Person>,
    pub reply_to: Vec<Person>,
    pub to: Vec<Person>,
    pub cc: Vec<Person>,
    /// RFC 3339, as the sender's clock had it.
    pub date: Option<String>,
    pub subject: String,
    /// Ids of messages, without angle brackets.
    pub in_reply_to: Vec<String>,
    pub references: Vec<String>,
    /// Each `Authentication-Results`, topmost first, unfolded.
    pub authentication_results: Vec<String>,
    /// The headers by which machines say that they are machines: names in lower case, values as they came.
    pub machine_headers: Vec<(String, String)>,
    /// The envelope's sender, or the `Return-Path` where nobody told. Empty: the null path, of what must not be answered.
    pub return_path: Option<String>,
    /// `multipart/report`, with its `report-type`.
    pub report: Option<String>,
    /// Of a report: the ids of the messages that it is about.
    pub reported: Vec<String>,
    /// What it says, as plain text.
    pub body: String,
    /// `body` was cut; the whole is the last attachment.
    pub body_cut: bool,
    pub attachments: Vec<AttachmentFacts>,
}

impl MailFacts {
    /// The ids of the messages that it answers: `In-Reply-To` first, then `References` from the newest on.
    pub fn answers(&self) -> impl Iterator<Item = &str> {
        self.in_reply_to.iter().chain(self.references.iter().rev()).map(String::as_str)
    }
}

/// The part of an address after its `@`.
pub fn domain_of(address: &str) -> &str {
    address.rsplit_once('@').map_or("", |(_, domain)| domain)
}

/// The subject without the marks of replies and forwards, in lower case: equal for all mails of one exchange.
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
