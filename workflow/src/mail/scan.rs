//! Scans a mail's bytes before anything parses them, and refuses structures that would cost a parser
//! excessive time or memory. Allocates almost nothing.
//!
//! The main pass follows multiparts as RFC 2046 defines them. It refuses a mail in which two readers could
//! see different structures (two boundaries in one header, a boundary in pieces), because it could not count
//! what a parser finds there.
//!
//! A parser is more lenient than RFC 2046: it accepts a boundary in the middle of a line, and a header in
//! unexpected places. So another pass (`loosely`) ignores the structure, and counts everything that any
//! reader could take for one of these.

mod header;
mod loosely;

use header::{contains, find, named, trim_end, value_of};
use loosely::loosely;

/// Maximum size of a mail, in bytes.
pub const MAIL_BYTES: usize = 40 << 20;
/// Maximum size of all headers of a mail, or of one part.
const HEADER_BYTES: usize = 64 << 10;
/// Maximum number of parts and of mails within mails.
pub const PARTS: usize = 1000;
/// Maximum nesting of parts.
pub const DEPTH: usize = 32;

/// Why a mail is refused. Trying again does not help.
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
    #[error(
        "the structure of the mail is ambiguous: a part declares its boundary in pieces, escaped, or twice"
    )]
    Ambiguous,
}

/// The findings of a scan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scanned {
    /// Offsets of the word `message` in the types of parts that hold an encoded mail. RFC 2046 forbids that,
    /// but a parser would decode it, and the scan has not checked its contents. See [`Scanned::disarm`].
    encoded_mails: Vec<usize>,
    /// Offsets of the word `digest` in types. A part of a digest is a mail without saying so, and may be
    /// encoded too.
    digests: Vec<usize>,
}

/// Replaces `message` in the type of an encoded mail within a mail. Has the same length.
pub const ENCODED: &str = "x-email";
/// Replaces `digest`. The space keeps the length; it has no meaning after a type.
const MIXED: &[u8; 6] = b"mixed ";

impl Scanned {
    /// The bytes with each encoded mail within this one turned into an ordinary attachment, and digests into
    /// ordinary parts.
    pub fn disarm<'a>(&self, raw: &'a [u8]) -> std::borrow::Cow<'a, [u8]> {
        if self.encoded_mails.is_empty() && self.digests.is_empty() {
            return raw.into();
        }
        let mut bytes = raw.to_vec();
        for at in &self.encoded_mails {
            bytes[*at..*at + ENCODED.len()].copy_from_slice(ENCODED.as_bytes());
        }
        for at in &self.digests {
            bytes[*at..*at + MIXED.len()].copy_from_slice(MIXED);
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
    /// Start and end of the `Content-Type` with its continuation lines.
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

/// Scans `raw`.
///
/// # Errors
/// [`Hostile`] if a limit is exceeded or the structure is ambiguous.
pub fn scan(raw: &[u8]) -> Result<Scanned, Hostile> {
    if raw.len() > MAIL_BYTES {
        return Err(Hostile::TooLarge);
    }
    let mut scanned = Scanned::default();
    loosely(raw, &mut scanned)?;
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

/// Handles the end of a header block. Returns `true` if the headers of a mail within the mail follow.
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
    // Two readers may read a duplicate type differently, so count the reading that costs more.
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
    value_of(rest, usize::MAX)
}

#[cfg(test)]
mod tests;
