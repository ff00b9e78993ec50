//! Texts that do not say what they are. Old programs write windows-1252 without saying so, or announce parts that do not follow.

use mail_parser::decoders::base64::base64_decode;
use mail_parser::decoders::charsets::map::charset_decoder;
use mail_parser::decoders::quoted_printable::quoted_printable_decode;
use mail_parser::{Encoding, Message, MessagePart, MimeHeaders};
use std::borrow::Cow;

/// What stands in a text for bytes that are no UTF-8.
const UNREADABLE: char = '\u{fffd}';

/// The text of `part`, which is `read`: as windows-1252, if it names no charset and has bytes that are no UTF-8.
pub(super) fn text<'a>(message: &Message<'_>, part: &MessagePart<'_>, read: &'a str) -> Cow<'a, str> {
    windows(message, part, read).map_or(Cow::Borrowed(read), Cow::Owned)
}

fn windows(message: &Message<'_>, part: &MessagePart<'_>, read: &str) -> Option<String> {
    let is_wrong = match part.content_type().and_then(|kind| kind.attribute("charset")) {
        None => read.contains(UNREADABLE),
        // It has no other characters, so the name is wrong.
        Some(named) if named.eq_ignore_ascii_case("us-ascii") => !read.is_ascii(),
        Some(_) => false,
    };
    if !is_wrong {
        return None;
    }
    let raw = message.raw_message.get(part.offset_body as usize..part.offset_end as usize)?;
    let decoded = match part.encoding {
        Encoding::None => raw.to_vec(),
        Encoding::QuotedPrintable => quoted_printable_decode(raw)?,
        Encoding::Base64 => base64_decode(raw)?,
    };
    match String::from_utf8(decoded) {
        Ok(text) => Some(text),
        Err(bytes) => Some(charset_decoder(b"windows-1252")?(bytes.as_bytes())),
    }
}

/// The text of a mail that calls itself a multipart and has no part. Empty: it has parts.
pub(super) fn without_parts(message: &Message<'_>) -> String {
    let [root] = &message.parts[..] else { return String::new() };
    if !root.content_type().is_some_and(|kind| kind.ctype().eq_ignore_ascii_case("multipart")) {
        return String::new();
    }
    let raw = String::from_utf8_lossy(&message.raw_message).replace("\r\n", "\n");
    raw.split_once("\n\n").map(|(_, body)| body.to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::parse::read;

    fn body(mail: &[u8]) -> String {
        read(mail).unwrap().facts.body.trim().to_owned()
    }

    #[test]
    fn a_text_without_a_charset_is_utf_8_or_else_windows_1252() {
        let mail = |head: &str, text: &[u8]| {
            let mut mail = format!("From: a@b.de\r\nMIME-Version: 1.0\r\n{head}\r\n").into_bytes();
            mail.extend(text);
            mail
        };
        for head in ["", "Content-Type: text/plain\r\n", "Content-Type: text/plain; charset=us-ascii\r\n"] {
            assert_eq!(body(&mail(head, b"Gr\xfc\xdfe, 5 \x80")), "Gr\u{fc}\u{df}e, 5 \u{20ac}", "{head}");
            assert_eq!(body(&mail(head, "Gr\u{fc}\u{df}e".as_bytes())), "Gr\u{fc}\u{df}e", "{head}");
        }
        let quoted = "Content-Type: text/plain\r\nContent-Transfer-Encoding: quoted-printable\r\n";
        assert_eq!(body(&mail(quoted, b"Gr=FC=DFe")), "Gr\u{fc}\u{df}e");
        let base64 = "Content-Type: text/html\r\nContent-Transfer-Encoding: base64\r\n";
        assert_eq!(body(&mail(base64, b"R3L832U=")), "Gr\u{fc}\u{df}e");
    }

    #[test]
    fn a_multipart_without_its_closing_boundary_keeps_its_body() {
        let mail =
            b"From: a@b.de\r\nMIME-Version: 1.0\r\nContent-Type: multipart/alternative; boundary=b\r\n\r\n\
            --b\r\nContent-Type: text/plain\r\n\r\nA table for two, please.\r\n";
        assert_eq!(body(mail), "A table for two, please.");
        let mail = b"From: a@b.de\r\nMIME-Version: 1.0\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n\
            No boundary follows at all.\r\n";
        assert_eq!(body(mail), "No boundary follows at all.");
    }
}
