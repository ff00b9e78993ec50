//! Rebuilds a mail when its provider posts the parts instead of the whole.
//!
//! The headers are the original ones. The MIME parts are new, with the same contents. The same parts always
//! give the same bytes, so a repeated request is recognised as the same mail.

use lettre::message::header::{ContentTransferEncoding, ContentType};
use lettre::message::{Attachment, Body, MultiPart, MultiPartKind, SinglePart};
use sha2::{Digest, Sha256};

/// The line length at which headers are folded.
const LINE: usize = 78;

#[derive(Clone, Debug, Default)]
pub struct Parts {
    pub headers: Vec<(String, String)>,
    pub text: Option<String>,
    pub html: Option<String>,
    pub files: Vec<File>,
}

#[derive(Clone, Debug)]
pub struct File {
    pub name: String,
    pub media_type: String,
    /// The id by which the HTML refers to this file.
    pub content_id: Option<String>,
    pub bytes: Vec<u8>,
}

/// An address in the form of a header.
pub fn mailbox(name: &str, address: &str) -> String {
    if name.trim().is_empty() {
        return address.to_owned();
    }
    let name = name.replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{name}\" <{address}>")
}

impl Parts {
    /// Returns whether a header of this name exists, ignoring case.
    pub fn has(&self, name: &str) -> bool {
        self.headers.iter().any(|(known, _)| known.eq_ignore_ascii_case(name))
    }

    /// The bytes of the whole message.
    pub fn formatted(self) -> Vec<u8> {
        let mut message = Vec::new();
        for (name, value) in &self.headers {
            // The MIME structure is new, so the headers that describe the old one are dropped.
            let lower = name.to_ascii_lowercase();
            let is_name = !name.is_empty() && name.bytes().all(|b| b.is_ascii_graphic() && b != b':');
            if is_name && lower != "mime-version" && !lower.starts_with("content-") {
                write(&mut message, name, value);
            }
        }
        message.extend_from_slice(b"MIME-Version: 1.0\r\n");
        message.extend_from_slice(&self.body());
        message
    }

    /// The MIME headers, an empty line, and the body.
    fn body(self) -> Vec<u8> {
        let boundary = self.boundary();
        let multipart =
            |kind, which: &str| MultiPart::builder().kind(kind).boundary(format!("{boundary}-{which}"));
        let (inline, attached): (Vec<File>, Vec<File>) =
            self.files.into_iter().partition(|file| file.content_id.as_deref().is_some_and(is_content_id));
        let text = self.text.map(SinglePart::plain);
        let html = self.html.map(SinglePart::html);
        let alternative = match (text, html) {
            (text, None) => Content::Single(text.unwrap_or_else(|| SinglePart::plain(String::new()))),
            (None, Some(html)) => Content::Single(html),
            (Some(text), Some(html)) => {
                let both =
                    multipart(MultiPartKind::Alternative, "alternative").singlepart(text).singlepart(html);
                Content::Multi(both)
            }
        };
        let related = alternative.beside(multipart(MultiPartKind::Related, "related"), inline);
        related.beside(multipart(MultiPartKind::Mixed, "mixed"), attached).formatted()
    }

    /// A boundary that cannot occur in the content: it is a hash of the whole content.
    fn boundary(&self) -> String {
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        for (name, value) in &self.headers {
            part(name.as_bytes());
            part(value.as_bytes());
        }
        part(self.text.as_deref().unwrap_or_default().as_bytes());
        part(self.html.as_deref().unwrap_or_default().as_bytes());
        for file in &self.files {
            part(file.name.as_bytes());
            part(&file.bytes);
        }
        hex::encode(&hash.finalize()[..16])
    }
}

enum Content {
    Single(SinglePart),
    Multi(MultiPart),
}

impl Content {
    /// The content alone, or together with the files.
    fn beside(self, builder: lettre::message::MultiPartBuilder, files: Vec<File>) -> Content {
        if files.is_empty() {
            return self;
        }
        let first = match self {
            Content::Single(part) => builder.singlepart(part),
            Content::Multi(part) => builder.multipart(part),
        };
        Content::Multi(files.into_iter().fold(first, |all, file| all.singlepart(part(file))))
    }

    fn formatted(&self) -> Vec<u8> {
        match self {
            Content::Single(part) => part.formatted(),
            Content::Multi(part) => part.formatted(),
        }
    }
}

fn part(file: File) -> SinglePart {
    // A mail reader would treat a file of such a type as a container of parts, and not as a file.
    let container =
        ["multipart/", "message/"].iter().any(|kind| file.media_type.to_ascii_lowercase().starts_with(kind));
    let known = if container { None } else { ContentType::parse(&file.media_type).ok() };
    let name = plain(&file.name);
    let attachment = match file.content_id.filter(|id| is_content_id(id)) {
        Some(id) => Attachment::new_inline_with_name(id, name),
        None => Attachment::new(name),
    };
    // Always base64, so no byte of a file looks like a line break.
    let body = Body::new_with_encoding(file.bytes, ContentTransferEncoding::Base64);
    attachment.body(body.expect("base64 holds any bytes"), known.unwrap_or_else(octets))
}

fn octets() -> ContentType {
    ContentType::parse("application/octet-stream").expect("a media type")
}

fn is_content_id(id: &str) -> bool {
    !id.is_empty() && id.len() <= 255 && id.bytes().all(|b| b.is_ascii_graphic() && b != b'<' && b != b'>')
}

/// Replaces control characters by spaces. A line break in a header's value would start another header.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Writes a header, folded at spaces; a reader joins the lines again.
fn write(message: &mut Vec<u8>, name: &str, value: &str) {
    message.extend_from_slice(name.as_bytes());
    message.push(b':');
    let mut column = name.len() + 1;
    let value = plain(value);
    for (at, word) in value.trim().split(' ').enumerate() {
        // For some readers, a line with only spaces would end the headers.
        if at > 0 && !word.is_empty() && column + 1 + word.len() > LINE {
            message.extend_from_slice(b"\r\n");
            column = 0;
        }
        message.push(b' ');
        message.extend_from_slice(word.as_bytes());
        column += 1 + word.len();
    }
    message.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(parts: Parts) -> String {
        String::from_utf8(parts.formatted()).unwrap()
    }

    fn file(name: &str, media_type: &str, content_id: Option<&str>) -> File {
        let content_id = content_id.map(str::to_owned);
        File {
            name: name.to_owned(),
            media_type: media_type.to_owned(),
            content_id,
            bytes: b"bytes".to_vec(),
        }
    }

    #[test]
    fn a_header_of_two_lines_stays_one_header() {
        let headers = vec![
            ("Subject".to_owned(), "hello\r\nBcc: eve@example.com\r\n\r\nbody".to_owned()),
            ("X: y\r\nEvil".to_owned(), "1".to_owned()),
            ("X-One".to_owned(), "1".to_owned()),
        ];
        let text = text(Parts { headers, text: Some("Hi".into()), ..Parts::default() });
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(!head.lines().any(|line| line.starts_with("Bcc") || line.starts_with("Evil")), "{head}");
        assert!(head.contains("X-One: 1\r\n"), "{head}");
        assert_eq!(body, "Hi\r\n");
    }

    #[test]
    fn the_structure_is_what_the_parts_need_and_no_more() {
        let parts = |html: bool, files: Vec<File>| Parts {
            headers: vec![("Content-Type".into(), "multipart/mixed; boundary=old".into())],
            text: Some("Hi".into()),
            html: html.then(|| "<b>Hi</b>".into()),
            files,
        };
        let kinds = |parts: Parts| {
            let text = text(parts);
            assert!(!text.contains("boundary=old"), "{text}");
            let kinds = ["mixed", "related", "alternative"];
            kinds.into_iter().filter(|kind| text.contains(&format!("multipart/{kind}"))).collect::<Vec<_>>()
        };
        assert!(kinds(parts(false, vec![])).is_empty());
        assert_eq!(kinds(parts(true, vec![])), ["alternative"]);
        assert_eq!(
            kinds(parts(true, vec![file("a.png", "image/png", Some("a@x"))])),
            ["related", "alternative"]
        );
        assert_eq!(kinds(parts(false, vec![file("a.txt", "text/plain", None)])), ["mixed"]);
        let all = vec![file("a.png", "image/png", Some("a@x")), file("b.pdf", "application/pdf", None)];
        assert_eq!(kinds(parts(true, all)), ["mixed", "related", "alternative"]);
    }

    #[test]
    fn a_file_that_calls_itself_a_container_is_octets() {
        for kind in ["multipart/mixed; boundary=x", "message/rfc822", "Message/Partial", "nonsense"] {
            let parts = Parts { files: vec![file("a", kind, None)], ..Parts::default() };
            let text = text(parts);
            assert!(text.contains("application/octet-stream"), "{kind}: {text}");
        }
    }

    #[test]
    fn the_same_parts_are_the_same_bytes() {
        let parts = Parts {
            headers: vec![("From".into(), mailbox("Ann \"A\" Lee", "ann@example.com"))],
            text: Some("Grüße".into()),
            html: Some("<p>Grüße</p>".into()),
            files: vec![file("ä.txt", "text/plain", None)],
        };
        assert_eq!(parts.clone().formatted(), parts.clone().formatted());
        assert!(text(parts).starts_with("From: \"Ann \\\"A\\\" Lee\" <ann@example.com>\r\n"));
    }

    #[test]
    fn a_long_header_is_folded_and_reads_the_same() {
        let long: String = (0..100).map(|n| format!("<id-{n}@example.com> ")).collect();
        let parts = Parts { headers: vec![("References".into(), long.clone())], ..Parts::default() };
        let text = text(parts);
        let head = text.split_once("MIME-Version").unwrap().0;
        assert!(head.lines().all(|line| line.len() <= LINE), "{head}");
        assert_eq!(head.replace("\r\n ", " ").trim(), format!("References: {}", long.trim()));
    }
}
