//! Looking at a mail's bytes before anything parses them: one pass that allocates next to nothing, and refuses the shapes
//! that cost a parser time or memory out of all proportion.
//!
//! The pass follows the multiparts as RFC 2046 has them. Where two readers could see two structures (two boundaries in one
//! header, a boundary in pieces) the mail is refused, for what a parser would find there was not counted here.

/// The largest mail, in bytes.
pub const MAIL_BYTES: usize = 40 << 20;
/// All headers of a mail, or of a part of it.
pub const HEADER_BYTES: usize = 64 << 10;
/// Parts, and mails within mails.
pub const PARTS: usize = 1000;
/// Parts within parts.
pub const DEPTH: usize = 32;

/// Why a mail is not read. Trying again changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Hostile {
    #[error("the mail is larger than {} MiB", MAIL_BYTES >> 20)]
    TooLarge,
    #[error("the mail has more than {} KiB of headers in one part", HEADER_BYTES >> 10)]
    Headers,
    #[error("the mail has more than {PARTS} parts")]
    Parts,
    #[error("the parts of the mail are more than {DEPTH} deep")]
    Depth,
    #[error("the structure of the mail is ambiguous: a part declares its boundary in pieces, or twice")]
    Ambiguous,
}

/// What a pass has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scanned {
    /// Where the word `message` stands in the type of a part that holds a whole mail in an encoding: RFC 2046 forbids it, a
    /// parser would unpack it, and what is in it was not looked at. See [`Scanned::disarm`].
    encoded_mails: Vec<usize>,
}

/// Stands for `message` in the type of an encoded mail within a mail. As long as that word.
pub const ENCODED: &str = "x-email";

impl Scanned {
    /// The bytes with every mail that is encoded within this one made an ordinary attachment.
    pub fn disarm<'a>(&self, raw: &'a [u8]) -> std::borrow::Cow<'a, [u8]> {
        if self.encoded_mails.is_empty() {
            return raw.into();
        }
        let mut bytes = raw.to_vec();
        for at in &self.encoded_mails {
            bytes[*at..*at + ENCODED.len()].copy_from_slice(ENCODED.as_bytes());
        }
        bytes.into()
    }
}

enum Frame<'a> {
    Multipart(&'a [u8]),
    Mail,
}

/// The header block that is being read.
#[derive(Default)]
struct Block {
    bytes: usize,
    /// Where the `Content-Type` and its continuation lines are.
    content_type: Option<(usize, usize)>,
    content_types: usize,
    encoded: bool,
    /// The header that a continuation line belongs to.
    current: Header,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum Header {
    ContentType,
    #[default]
    Other,
}

/// Looks at `raw`.
///
/// # Errors
/// [`Hostile`].
pub fn scan(raw: &[u8]) -> Result<Scanned, Hostile> {
    if raw.len() > MAIL_BYTES {
        return Err(Hostile::TooLarge);
    }
    let mut scanned = Scanned::default();
    let mut stack: Vec<Frame<'_>> = Vec::new();
    let mut block = Some(Block::default());
    let (mut parts, mut at) = (0, 0);
    while at < raw.len() {
        let end = memchr::memchr(b'\n', &raw[at..]).map_or(raw.len(), |newline| at + newline + 1);
        let line = trim_end(&raw[at..end]);
        if let Some(rest) = line.strip_prefix(b"--")
            && let Some(found) = stack
                .iter()
                .rposition(|frame| matches!(frame, Frame::Multipart(boundary) if rest.starts_with(boundary)))
        {
            let Frame::Multipart(boundary) = &stack[found] else { return Err(Hostile::Ambiguous) };
            if rest[boundary.len()..].starts_with(b"--") {
                stack.truncate(found);
                block = None;
            } else {
                stack.truncate(found + 1);
                block = Some(Block::default());
                parts += 1;
            }
        } else if let Some(open) = &mut block {
            open.bytes += end - at;
            if open.bytes > HEADER_BYTES {
                return Err(Hostile::Headers);
            }
            if line.is_empty() {
                block = close(raw, open, &mut stack, &mut scanned)?.then(Block::default);
                parts += usize::from(block.is_some());
            } else {
                open.line(line, at);
            }
        }
        if parts > PARTS {
            return Err(Hostile::Parts);
        }
        if stack.len() > DEPTH {
            return Err(Hostile::Depth);
        }
        at = end;
    }
    Ok(scanned)
}

impl Block {
    fn line(&mut self, line: &[u8], at: usize) {
        if line[0] == b' ' || line[0] == b'\t' {
            if self.current == Header::ContentType
                && let Some((_, end)) = &mut self.content_type
            {
                *end = at + line.len();
            }
            return;
        }
        self.current = Header::Other;
        if named(line, b"content-type") {
            self.current = Header::ContentType;
            self.content_types += 1;
            self.content_type = Some((at, at + line.len()));
        } else if named(line, b"content-transfer-encoding") {
            self.encoded = contains(line, b"base64") || contains(line, b"quoted-printable");
        }
    }
}

/// What a header block that has ended begins: `true` is the headers of a mail within the mail.
fn close<'a>(
    raw: &'a [u8],
    block: &Block,
    stack: &mut Vec<Frame<'a>>,
    scanned: &mut Scanned,
) -> Result<bool, Hostile> {
    let Some((start, end)) = block.content_type else { return Ok(false) };
    let header = &raw[start..end];
    if let Some(boundary) = boundary(header)? {
        if block.content_types > 1 {
            return Err(Hostile::Ambiguous);
        }
        stack.push(Frame::Multipart(boundary));
        return Ok(false);
    }
    // A type that is given twice is read in one of two ways; the one that costs more is counted.
    let Some(mail) = find(header, b"message/").filter(|_| !contains(header, b"delivery-status")) else {
        return Ok(false);
    };
    if block.encoded {
        scanned.encoded_mails.push(start + mail);
        return Ok(false);
    }
    stack.push(Frame::Mail);
    Ok(true)
}

/// The boundary that a `Content-Type` declares.
fn boundary(header: &[u8]) -> Result<Option<&[u8]>, Hostile> {
    let Some(at) = find(header, b"boundary") else { return Ok(None) };
    let rest = &header[at + b"boundary".len()..];
    if find(rest, b"boundary=").is_some() || rest.starts_with(b"*") {
        return Err(Hostile::Ambiguous);
    }
    let Some(value) = rest.trim_ascii_start().strip_prefix(b"=") else { return Ok(None) };
    let value = value.trim_ascii_start();
    let value = match value.strip_prefix(b"\"") {
        Some(quoted) => quoted.split(|byte| *byte == b'"').next(),
        None => value.split(|byte| byte.is_ascii_whitespace() || *byte == b';').next(),
    };
    Ok(value.map(<[u8]>::trim_ascii_end).filter(|value| !value.is_empty()))
}

fn trim_end(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.strip_suffix(b"\r").unwrap_or(line)
}

fn named(line: &[u8], name: &[u8]) -> bool {
    line.len() > name.len()
        && line[..name.len()].eq_ignore_ascii_case(name)
        && line[name.len()..].trim_ascii_start().starts_with(b":")
}

/// Where `needle`, in lower case, begins in `header` in any case.
fn find(header: &[u8], needle: &[u8]) -> Option<usize> {
    header.windows(needle.len()).position(|window| window.eq_ignore_ascii_case(needle))
}

fn contains(header: &[u8], needle: &[u8]) -> bool {
    find(header, needle).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nested(depth: usize) -> String {
        let mut mail = String::from("From: a@b.c\r\n");
        for level in 0..depth {
            mail.push_str(&format!(
                "Content-Type: multipart/mixed; boundary=\"b{level}x\"\r\n\r\n--b{level}x\r\n"
            ));
        }
        mail + "\r\nhello\r\n"
    }

    #[test]
    fn what_is_counted_is_refused_one_above_the_limit_and_taken_at_it() {
        let parts = |count: usize| {
            "Content-Type: multipart/mixed; boundary=b\n\n".to_owned() + &"--b\n\nx\n".repeat(count)
        };
        let headers = |bytes: usize| format!("Subject: {}\n\nx", "a".repeat(bytes - 11));
        let mails = |depth: usize| "Content-Type: message/rfc822\n\n".repeat(depth) + "Subject: x\n\nhi";
        for (what, mail, expected) in [
            ("parts", parts(PARTS), Ok(())),
            ("parts", parts(PARTS + 1), Err(Hostile::Parts)),
            ("depth", nested(DEPTH), Ok(())),
            ("depth", nested(DEPTH + 1), Err(Hostile::Depth)),
            ("mails", mails(DEPTH), Ok(())),
            ("mails", mails(DEPTH + 1), Err(Hostile::Depth)),
            ("headers", headers(HEADER_BYTES), Ok(())),
            ("headers", headers(HEADER_BYTES + 1), Err(Hostile::Headers)),
            ("size", "a".repeat(MAIL_BYTES + 1), Err(Hostile::TooLarge)),
        ] {
            assert_eq!(scan(mail.as_bytes()).map(|_| ()), expected, "{what}");
        }
    }

    #[test]
    fn lines_that_look_like_boundaries_and_are_none_count_nothing() {
        let sql = "Subject: x\n\n".to_owned() + &"-- a comment\n--b\n".repeat(5000);
        assert!(scan(sql.as_bytes()).is_ok());
    }

    #[test]
    fn a_structure_that_two_readers_read_differently_is_refused() {
        for header in [
            "Content-Type: multipart/mixed; boundary=a; boundary=b",
            "Content-Type: multipart/mixed; boundary*0=a; boundary*1=b",
            "Content-Type: multipart/mixed;\n boundary=a\nContent-Type: multipart/mixed; boundary=b",
        ] {
            assert_eq!(scan(format!("{header}\n\nx").as_bytes()), Err(Hostile::Ambiguous), "{header}");
        }
    }

    #[test]
    fn a_mail_that_is_encoded_within_a_mail_is_disarmed() {
        let mail = b"Content-Type: Message/rfc822\nContent-Transfer-Encoding: BASE64\n\nU3ViamVjdDogeAo=";
        let disarmed = scan(mail).unwrap();
        let text = String::from_utf8(disarmed.disarm(mail).into_owned()).unwrap();
        assert!(text.starts_with("Content-Type: x-email/rfc822\n"), "{text}");
        assert_eq!(text.len(), mail.len());
        let plain = b"Content-Type: text/plain\n\nx";
        assert!(matches!(scan(plain).unwrap().disarm(plain), std::borrow::Cow::Borrowed(_)));
    }
}
