//! Parses a mail. Hostile input is scanned before it is parsed, and a panic of the parser is caught.

use super::{html, unlabelled};
use mail_parser::{
    Addr, Address, HeaderValue, Message, MessageParser, MessagePart, MessagePartId, MimeHeaders, PartType,
};
use sha2::{Digest, Sha256};
use std::panic::{AssertUnwindSafe, catch_unwind};
use wakeful_store::wake::NewAttachment;
use wakeful_workflow::mail::scan::{self, Hostile};
use wakeful_workflow::mail::{AttachmentFacts, MailFacts, Person};
use wakeful_workflow::record::without_nul;

/// How much of a mail's text is shown; the whole text is an attachment.
const BODY_BYTES: usize = 64 << 10;
/// How much of an HTML body is converted to text.
const HTML_BYTES: usize = 2 << 20;
/// The longest subject.
const SUBJECT_BYTES: usize = 998;
/// The longest address (RFC 5321, with room).
const ADDRESS_BYTES: usize = 320;
const PEOPLE: usize = 200;
const IDS: usize = 100;
const ID_BYTES: usize = 998;
const ATTACHMENTS: usize = 200;
/// A larger file is named but not stored: on its way into the database it is held in memory several times.
const ATTACHMENT_BYTES: usize = 16 << 20;
const FILE_NAME_BYTES: usize = 200;
const MACHINE_HEADERS: usize = 50;
/// The size of the parser's stack. The parser handles nested mails recursively.
const STACK_BYTES: usize = 64 << 20;

/// Why a mail was not parsed. A retry helps only after [`Unreadable::NoThread`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    #[error("{0}")]
    Hostile(#[from] Hostile),
    #[error("this is not a mail: it has no readable header")]
    NoMail,
    /// This machine's fault, not the mail's.
    #[error("the mail could not be read just now: no thread could be started for it; send it again later")]
    NoThread,
}

/// A parsed mail.
#[derive(Debug)]
pub(super) struct Read {
    pub facts: MailFacts,
    pub files: Vec<NewAttachment>,
    /// Hash of the whole mail, in hexadecimal.
    pub sha256: String,
    /// Hash of its text.
    pub body_sha256: String,
}

/// Parses `raw`. Takes time in proportion to its length, so run it on a blocking thread.
///
/// # Errors
/// [`Unreadable`].
pub(super) fn read(raw: &[u8]) -> Result<Read, Unreadable> {
    let scanned = scan::scan(raw)?;
    let disarmed = scanned.disarm(raw);
    // Catch panics: in debug builds the parser's assertions fail on malformed mail.
    let parse = || catch_unwind(AssertUnwindSafe(|| parsed(&disarmed))).unwrap_or(Err(Unreadable::NoMail));
    let parsed = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("mail".to_owned()).stack_size(STACK_BYTES);
        let thread = thread.spawn_scoped(scope, parse).map_err(|_| Unreadable::NoThread)?;
        thread.join().unwrap_or(Err(Unreadable::NoMail))
    });
    let (facts, files) = parsed?;
    let body_sha256 = hex::encode(Sha256::digest(facts.body.trim().as_bytes()));
    Ok(Read { facts, files, sha256: hex::encode(Sha256::digest(raw)), body_sha256 })
}

fn parsed(raw: &[u8]) -> Result<(MailFacts, Vec<NewAttachment>), Unreadable> {
    let message = MessageParser::default().parse(raw).ok_or(Unreadable::NoMail)?;
    if message.parts.len() > scan::PARTS + 1 {
        return Err(Hostile::Parts.into());
    }
    // If the bytes are not a mail, the parser returns a header without a name.
    let named = |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic());
    if !message.headers().iter().any(|header| named(header.name.as_str())) {
        return Err(Unreadable::NoMail);
    }
    Ok(facts(&message))
}

fn facts(message: &Message<'_>) -> (MailFacts, Vec<NewAttachment>) {
    let (body, wholes) = body(message);
    let mut files = Files::default();
    for part in message.attachments() {
        files.part(part);
    }
    let body_cut = !wholes.is_empty();
    for (name, media_type, whole) in wholes {
        files.add(name.to_owned(), media_type.to_owned(), whole.into_bytes());
    }
    let headers = Headers::of(message);
    let from = &headers.from;
    let facts = MailFacts {
        message_id: message.message_id().and_then(id),
        // An address that cannot be read counts too. If it were skipped, the readable one beside it would be
        // believed, although the receiving server may have judged the other.
        from: if headers.froms == 1 && headers.senders == 1 { from.first().cloned() } else { None },
        reply_to: people(message.reply_to()),
        to: people(message.to()),
        cc: people(message.cc()),
        date: message.date().filter(|date| date.is_valid()).map(|date| date.to_rfc3339()),
        subject: bounded(message.subject().unwrap_or_default(), SUBJECT_BYTES),
        in_reply_to: ids(message.in_reply_to()),
        references: ids(message.references()),
        authentication_results: headers.authentication_results,
        machine_headers: headers.machine,
        return_path: headers.return_path,
        report: report_type(message),
        reported: reported(message),
        body,
        body_cut,
        attachments: files.facts,
    };
    (facts, files.files)
}

/// Facts from the mail's headers that the parser does not offer.
#[derive(Default)]
struct Headers {
    /// How many `From` headers there are.
    froms: usize,
    /// How many addresses they list, readable or not.
    senders: usize,
    from: Vec<Person>,
    authentication_results: Vec<String>,
    machine: Vec<(String, String)>,
    return_path: Option<String>,
}

impl Headers {
    fn of(message: &Message<'_>) -> Headers {
        let mut headers = Headers::default();
        for header in message.headers() {
            let name = header.name.as_str().to_ascii_lowercase();
            let raw = message.raw_message.get(header.offset_start as usize..header.offset_end as usize);
            let value = || unfolded(raw.unwrap_or_default());
            match name.as_str() {
                "from" => {
                    headers.froms += 1;
                    if let HeaderValue::Address(address) = &header.value {
                        headers.senders += address.iter().count();
                        headers.from.extend(people(Some(address)));
                    }
                }
                "authentication-results" => headers.authentication_results.push(value()),
                "return-path" => {
                    let value = value();
                    let path = value.trim().trim_start_matches('<').trim_end_matches('>').trim();
                    headers.return_path.get_or_insert(path.to_owned());
                }
                "auto-submitted"
                | "precedence"
                | "x-auto-response-suppress"
                | "x-loop"
                | "x-autoreply"
                | "x-autorespond" => headers.machine.push((name, value())),
                _ if name.starts_with("list-") => headers.machine.push((name, value())),
                _ => {}
            }
        }
        headers.machine.truncate(MACHINE_HEADERS);
        headers
    }
}

/// The text to show, and the full originals of what was cut: name, type and content of each.
fn body(message: &Message<'_>) -> (String, Vec<(&'static str, &'static str, String)>) {
    let (mut whole, mut wholes) = texts(message, &message.text_body);
    if whole.trim().is_empty() {
        // Some programs put an empty text beside the HTML.
        (whole, wholes) = texts(message, &message.html_body);
    }
    if whole.trim().is_empty() {
        whole = unlabelled::without_parts(message);
    }
    let whole = without_nul(whole);
    if whole.len() <= BODY_BYTES {
        return (whole, wholes);
    }
    let shown = whole[..whole.floor_char_boundary(BODY_BYTES)].to_owned();
    wholes.push(("message.txt", "text/plain", whole));
    (shown, wholes)
}

/// The text of these parts, and the full originals of HTML that was cut.
fn texts(
    message: &Message<'_>,
    parts: &[MessagePartId],
) -> (String, Vec<(&'static str, &'static str, String)>) {
    let (mut whole, mut wholes) = (String::new(), Vec::new());
    for part in parts.iter().filter_map(|id| message.parts.get(*id as usize)) {
        let text = match &part.body {
            PartType::Text(text) => unlabelled::text(message, part, text).replace("\r\n", "\n"),
            PartType::Html(text) => {
                let text = unlabelled::text(message, part, text);
                if text.len() > HTML_BYTES {
                    wholes.push(("message.html", "text/html", without_nul(text.clone().into_owned())));
                }
                html::text(&text[..text.floor_char_boundary(HTML_BYTES)])
            }
            PartType::Binary(_)
            | PartType::InlineBinary(_)
            | PartType::Message(_)
            | PartType::Multipart(_) => {
                continue;
            }
        };
        if whole.is_empty() {
            whole = text;
        } else if !text.trim().is_empty() {
            whole.push_str("\n\n");
            whole.push_str(&text);
        }
    }
    (whole, wholes)
}

#[derive(Default)]
struct Files {
    facts: Vec<AttachmentFacts>,
    files: Vec<NewAttachment>,
}

impl Files {
    fn part(&mut self, part: &MessagePart<'_>) {
        let media_type = media_type(part);
        let bytes = match &part.body {
            PartType::Text(text) | PartType::Html(text) => text.as_bytes(),
            PartType::Binary(bytes) | PartType::InlineBinary(bytes) => bytes,
            PartType::Message(message) => message.raw_message(),
            PartType::Multipart(_) => return,
        };
        let number = self.facts.len() + 1;
        let name = file_name(part.attachment_name().unwrap_or_default());
        let name = if name.is_empty() { format!("attachment-{number}") } else { name };
        if !self.is_left_out(&name, &media_type, bytes.len()) {
            self.keep(name, media_type, bytes.to_vec());
        }
    }

    fn is_left_out(&mut self, name: &str, media_type: &str, bytes: usize) -> bool {
        let left_out = bytes > ATTACHMENT_BYTES || self.facts.len() >= ATTACHMENTS;
        if left_out {
            let (file_name, media_type) = (name.to_owned(), media_type.to_owned());
            self.facts.push(AttachmentFacts { file_name, media_type, bytes, left_out });
        }
        left_out
    }

    fn add(&mut self, file_name: String, media_type: String, bytes: Vec<u8>) {
        if !self.is_left_out(&file_name, &media_type, bytes.len()) {
            self.keep(file_name, media_type, bytes);
        }
    }

    fn keep(&mut self, file_name: String, media_type: String, bytes: Vec<u8>) {
        self.facts.push(AttachmentFacts {
            file_name: file_name.clone(),
            media_type: media_type.clone(),
            bytes: bytes.len(),
            left_out: false,
        });
        self.files.push(NewAttachment { file_name, media_type, bytes });
    }
}

fn media_type(part: &MessagePart<'_>) -> String {
    let given = part.content_type().map(|of| match of.subtype() {
        Some(subtype) => format!("{}/{subtype}", of.ctype()).to_ascii_lowercase(),
        None => of.ctype().to_ascii_lowercase(),
    });
    let plain = |text: &String| {
        text.len() <= 100 && text.contains('/') && text.bytes().all(|b| b.is_ascii_graphic() && b != b'"')
    };
    match (given, &part.body) {
        (Some(given), _) if given == format!("{}/rfc822", scan::ENCODED) => "message/rfc822".to_owned(),
        (Some(given), _) if given == format!("{}/global", scan::ENCODED) => "message/global".to_owned(),
        (Some(given), _) if plain(&given) => given,
        (_, PartType::Text(_)) => "text/plain".to_owned(),
        (_, PartType::Html(_)) => "text/html".to_owned(),
        (_, PartType::Message(_)) => "message/rfc822".to_owned(),
        (_, PartType::Binary(_) | PartType::InlineBinary(_) | PartType::Multipart(_)) => {
            "application/octet-stream".to_owned()
        }
    }
}

/// A file name that is safe to show and to store: no path, no control characters, not too long, and never
/// `..`.
fn file_name(given: &str) -> String {
    let last = given.rsplit(['/', '\\']).next().unwrap_or_default();
    // Also without the characters that disguise a name.
    let hides = |c: char| {
        c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
    };
    let plain: String = last.chars().filter(|c| !hides(*c)).collect();
    let plain = plain.trim().trim_start_matches('.').trim();
    bounded(plain, FILE_NAME_BYTES)
}

fn people(address: Option<&Address<'_>>) -> Vec<Person> {
    let Some(address) = address else { return Vec::new() };
    address.iter().filter_map(person).take(PEOPLE).collect()
}

fn person(address: &Addr<'_>) -> Option<Person> {
    // Only ASCII is folded: the Kelvin sign becomes a `k` in lower case, and its mailbox would be another person's.
    let plain = address.address()?.trim().to_ascii_lowercase();
    let is_address = plain.len() <= ADDRESS_BYTES
        && plain.contains('@')
        && !plain.chars().any(|c| c.is_control() || c.is_whitespace() || matches!(c, '<' | '>' | '"' | ','));
    let name = address.name().map(|name| bounded(name, ADDRESS_BYTES)).filter(|name| !name.is_empty());
    is_address.then_some(Person { name, address: plain })
}

fn ids(value: &HeaderValue<'_>) -> Vec<String> {
    let list = value.as_text_list().unwrap_or_default();
    let mut ids: Vec<String> = list.iter().rev().filter_map(|one| id(one)).take(IDS).collect();
    ids.reverse();
    ids
}

fn id(text: &str) -> Option<String> {
    let plain = text.trim().trim_start_matches('<').trim_end_matches('>');
    let fits = !plain.is_empty()
        && plain.len() <= ID_BYTES
        && !plain.chars().any(|c| c.is_control() || c.is_whitespace() || matches!(c, '<' | '>'));
    fits.then(|| plain.to_owned())
}

fn report_type(message: &Message<'_>) -> Option<String> {
    let of = message.content_type().filter(|_| message.is_content_type("multipart", "report"))?;
    Some(bounded(of.attribute("report-type").unwrap_or("of no type"), 60))
}

/// The ids of the mails that a report returns, whole or as headers.
fn reported(message: &Message<'_>) -> Vec<String> {
    if report_type(message).is_none() {
        return Vec::new();
    }
    let mut found = Vec::new();
    for part in &message.parts {
        match &part.body {
            PartType::Message(inner) => found.extend(inner.message_id().and_then(id)),
            PartType::Text(text) if part.is_content_type("text", "rfc822-headers") => {
                found.extend(
                    MessageParser::default()
                        .parse_headers(text.as_bytes())
                        .and_then(|inner| inner.message_id().and_then(id)),
                );
            }
            PartType::Text(_)
            | PartType::Html(_)
            | PartType::Binary(_)
            | PartType::InlineBinary(_)
            | PartType::Multipart(_) => {}
        }
    }
    found.truncate(IDS);
    found
}

fn unfolded(raw: &[u8]) -> String {
    let text = String::from_utf8_lossy(raw);
    let text: String = text.chars().filter(|c| !matches!(c, '\r' | '\n')).collect();
    without_nul(text.trim().to_owned())
}

fn bounded(text: &str, bytes: usize) -> String {
    without_nul(text[..text.floor_char_boundary(bytes.min(text.len()))].trim().to_owned())
}

#[cfg(test)]
#[path = "parse_tests.rs"]
mod tests;
