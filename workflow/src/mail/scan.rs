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

/// Maximum size of a mail, in bytes.
pub const MAIL_BYTES: usize = 40 << 20;
/// Maximum size of all headers of a mail, or of one part.
const HEADER_BYTES: usize = 64 << 10;
/// Maximum number of parts and of mails within mails.
pub const PARTS: usize = 1000;
/// Maximum nesting of parts.
pub const DEPTH: usize = 32;
/// Maximum number of content types of a mail within the mail (`message/rfc822`), anywhere in the bytes.
/// Ordinary text may contain some.
const MAIL_TYPES: usize = 100;
/// Bytes of a boundary that tell it from others. RFC 2046 allows no longer ones.
const BOUNDARY_BYTES: usize = 70;

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

/// Counts what any reader could take for a boundary or for a mail within the mail, anywhere in the bytes.
/// Takes linear time: it reads each byte a bounded number of times.
fn loosely(raw: &[u8], scanned: &mut Scanned) -> Result<(), Hostile> {
    let (mut boundaries, mut mails): (Vec<&[u8]>, usize) = (Vec::new(), 0);
    let mut at = 0;
    while let Some(colon) = memchr::memchr(b':', &raw[at..]).map(|found| at + found) {
        at = colon + 1;
        if !is_content_type(&raw[..colon]) {
            continue;
        }
        let end = folded_end(raw, at);
        declared(&raw[at..end], &mut boundaries)?;
        for (start, end) in type_regions(raw, at, end) {
            let region = &raw[start..end];
            scanned.digests.extend(all(region, b"digest").map(|found| start + found));
            if !contains(region, b"rfc822") && !contains(region, b"global") {
                continue;
            }
            for found in all(region, b"message") {
                mails += 1;
                if mails > MAIL_TYPES {
                    return Err(Hostile::Depth);
                }
                if may_be_encoded(raw, start + found) {
                    scanned.encoded_mails.push(start + found);
                }
            }
        }
        at = end;
    }
    if delimiters(raw, boundaries) > PARTS { Err(Hostile::Parts) } else { Ok(()) }
}

/// Returns whether `before` ends with the header name `content-type`, which may contain spaces.
fn is_content_type(before: &[u8]) -> bool {
    let mut bytes = before.iter().rev().filter(|byte| **byte == b'\n' || !byte.is_ascii_whitespace());
    b"content-type"
        .iter()
        .rev()
        .all(|wanted| bytes.next().is_some_and(|byte| byte.eq_ignore_ascii_case(wanted)))
}

/// End of the header that continues at `from`, with its continuation lines.
fn folded_end(raw: &[u8], from: usize) -> usize {
    let mut newlines = memchr::memchr_iter(b'\n', &raw[from..]).map(|found| from + found);
    newlines.find(|at| !matches!(raw.get(at + 1), Some(b' ' | b'\t'))).unwrap_or(raw.len())
}

/// Collects the boundaries that a header, or a header within it, declares.
fn declared<'a>(header: &'a [u8], boundaries: &mut Vec<&'a [u8]>) -> Result<(), Hostile> {
    for at in all(header, b"boundary") {
        let Some(value) = value_of(&header[at + b"boundary".len()..], BOUNDARY_BYTES)? else { continue };
        if boundaries.last() != Some(&value) {
            boundaries.push(value);
        }
        // Repeated boundaries alone are no reason to refuse the mail.
        if boundaries.len() > 2 * PARTS {
            boundaries.sort_unstable();
            boundaries.dedup();
            if boundaries.len() > PARTS {
                return Err(Hostile::Parts);
            }
        }
    }
    Ok(())
}

/// The regions of a folded header that may be a type: everything before the first parameter, of the header
/// itself and of each `Content-Type` within it. In a comment a semicolon begins no parameter, so a header
/// with a comment is returned whole.
fn type_regions(raw: &[u8], from: usize, end: usize) -> Vec<(usize, usize)> {
    if memchr::memchr(b'(', &raw[from..end]).is_some() {
        return vec![(from, end)];
    }
    let (mut regions, mut start) = (Vec::new(), from);
    loop {
        let next = memchr::memchr_iter(b':', &raw[start..end])
            .map(|found| start + found)
            .find(|colon| is_content_type(&raw[start..*colon]));
        let until = next.unwrap_or(end);
        let region = memchr::memchr(b';', &raw[start..until]).map_or(until, |found| start + found);
        regions.push((start, region));
        match next {
            Some(colon) => start = colon + 1,
            None => return regions,
        }
    }
}

/// Returns whether the header block around `at` may say that its part is encoded. The block lies between the
/// nearest empty lines. If these are too far away, the block may say anything, and the answer is yes.
fn may_be_encoded(raw: &[u8], at: usize) -> bool {
    let (first, last) = (at.saturating_sub(HEADER_BYTES), raw.len().min(at + HEADER_BYTES));
    let (before, after) = (&raw[first..at], &raw[at..last]);
    let empty: [&[u8]; 2] = [b"\n\n", b"\n\r\n"];
    let start = empty.iter().filter_map(|line| memchr::memmem::rfind(before, line)).max();
    let end = empty.iter().filter_map(|line| memchr::memmem::find(after, line)).min();
    if (start.is_none() && first > 0) || (end.is_none() && last < raw.len()) {
        return true;
    }
    let block = &raw[first + start.unwrap_or(0)..at + end.unwrap_or(after.len())];
    contains(block, b"base64") || contains(block, b"quoted-printable") || contains(block, b"=?")
}

/// How often any of `boundaries` follows two dashes, anywhere. Stops counting one above [`PARTS`].
fn delimiters(raw: &[u8], mut boundaries: Vec<&[u8]>) -> usize {
    boundaries.sort_unstable();
    // A shorter boundary matches wherever a longer one with the same beginning matches, so drop the longer
    // ones. Then the only candidate at a position is the greatest boundary that is not greater than the bytes
    // there.
    boundaries.dedup_by(|longer, shorter| longer.starts_with(shorter));
    if boundaries.is_empty() {
        return 0;
    }
    let dashes = memchr::memmem::Finder::new(b"--");
    let (mut count, mut at) = (0, 0);
    while count <= PARTS
        && let Some(found) = dashes.find(&raw[at..])
    {
        at += found + 1;
        let rest = &raw[at + 1..];
        let rest = &rest[..rest.len().min(BOUNDARY_BYTES)];
        let after = boundaries.partition_point(|boundary| *boundary <= rest);
        count += usize::from(after > 0 && rest.starts_with(boundaries[after - 1]));
    }
    count
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

/// The value of the parameter whose name ends before `rest`, cut to `limit` bytes. Every reader's value
/// begins with it.
fn value_of(rest: &[u8], limit: usize) -> Result<Option<&[u8]>, Hostile> {
    let after_name =
        rest.iter().position(|byte| !byte.is_ascii_whitespace() && !matches!(byte, b'"' | b'\\'));
    let rest = &rest[after_name.unwrap_or(rest.len())..];
    if rest.starts_with(b"*") {
        return Err(Hostile::Ambiguous);
    }
    let Some(value) = rest.strip_prefix(b"=") else { return Ok(None) };
    let value = value.trim_ascii_start();
    let (value, is_quoted) = match value.strip_prefix(b"\"") {
        Some(quoted) => (quoted, true),
        None => (value, false),
    };
    let value = &value[..value.len().min(limit)];
    let ends = |byte: &u8| *byte == b'"' || (!is_quoted && (byte.is_ascii_whitespace() || *byte == b';'));
    let value = &value[..value.iter().position(ends).unwrap_or(value.len())];
    // Some readers remove escapes, comments, encoded words and line ends, and others keep them. Within quotes
    // a parenthesis has no meaning, and some mail servers write one.
    let is_ambiguous = |byte: &u8| match byte {
        b'\\' | b'\n' => true,
        b'(' => !is_quoted,
        _ => !byte.is_ascii(),
    };
    let blank = value.trim_ascii_end().is_empty() && !value.is_empty();
    if blank || value.iter().any(is_ambiguous) || memchr::memmem::find(value, b"=?").is_some() {
        return Err(Hostile::Ambiguous);
    }
    Ok(Some(value.trim_ascii_end()).filter(|value| !value.is_empty()))
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

/// First offset of `needle`, given in lower case, in `header`. Ignores case.
fn find(header: &[u8], needle: &[u8]) -> Option<usize> {
    header.windows(needle.len()).position(|window| window.eq_ignore_ascii_case(needle))
}

/// All offsets of `needle`, given in lower case, in `header`. Ignores case.
fn all<'a>(header: &'a [u8], needle: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    let windows = header.windows(needle.len()).enumerate();
    windows.filter(move |(_, window)| window.eq_ignore_ascii_case(needle)).map(|(at, _)| at)
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
    fn what_a_lenient_reader_would_find_is_counted_too() {
        let multipart = "Content-Type: multipart/mixed; boundary=b\n\n--b\n\n";
        let mails = |name: &str, count: usize| format!("{name}: message/rfc822\n\n").repeat(count);
        let inner = "--b\nContent-Type: multipart/mixed; boundary=\"inner\"\n\n--inner\n\nx\n--b\n\n";
        let popped = |count: usize| multipart.to_owned() + inner + &"--inner\n\nx\n".repeat(count);
        let within = |mails: String| format!("{multipart}x--b\n{mails}");
        for (what, mail, expected) in [
            ("mails", within(mails("Content-Type", MAIL_TYPES)), Ok(())),
            ("mails", within(mails("Content-Type", MAIL_TYPES + 1)), Err(Hostile::Depth)),
            ("spaced", within(mails("CONTENT - type ", MAIL_TYPES + 1)), Err(Hostile::Depth)),
            ("boundaries", multipart.to_owned() + &"x--b\n\n".repeat(PARTS - 1), Ok(())),
            ("boundaries", multipart.to_owned() + &"x--b\n\n".repeat(PARTS), Err(Hostile::Parts)),
            ("popped", popped(10), Ok(())),
            ("popped", popped(PARTS), Err(Hostile::Parts)),
            ("prose", "Subject: x\n\n".to_owned() + &"message/rfc822, says Ann.\n".repeat(1000), Ok(())),
            ("a line", "\nContent-Type: x; boundary=".to_owned() + &"boundary=".repeat(100_000), Ok(())),
        ] {
            assert_eq!(scan(mail.as_bytes()).map(|_| ()), expected, "{what}");
        }
    }

    #[test]
    fn a_boundary_that_is_escaped_or_commented_is_refused_and_one_with_a_parenthesis_is_not() {
        for value in [
            r#""a\"b""#,
            "(c)a",
            "a(c)",
            "=?utf-8?q?a?=",
            "\"=?utf-8?q?a?=\"",
            "\"a\n b\"",
            "\"\u{e9}\"",
            "\" \"",
        ] {
            for header in ["Content-Type", "Subject: x\n\nx--a\nContent-Type"] {
                let mail = format!("{header}: multipart/mixed; boundary={value}\n\nx");
                assert_eq!(scan(mail.as_bytes()), Err(Hostile::Ambiguous), "{mail}");
            }
        }
        let ordinary =
            b"Content-Type: multipart/mixed; boundary=\"Boundary_(ID_x)\"\n\n--Boundary_(ID_x)\n\nx";
        assert!(scan(ordinary).is_ok());
    }

    #[test]
    fn mails_that_only_a_lenient_reader_would_decode_are_disarmed() {
        let mail = b"Content-Type: multipart/digest; boundary=b\n\nx--b\nContent-Transfer - Encoding: Base64\n\
            Content-Type: \"message\" / rfc822\n\nU3ViamVjdDogeAo=\n--b\nContent-Type: message/rfc822\n\nSubject: x\n\nx";
        let disarmed = scan(mail).unwrap();
        let text = String::from_utf8(disarmed.disarm(mail).into_owned()).unwrap();
        assert!(text.starts_with("Content-Type: multipart/mixed ; boundary=b\n"), "{text}");
        assert!(text.contains("Content-Type: \"x-email\" / rfc822\n"), "{text}");
        assert!(text.contains("Content-Type: message/rfc822\n"), "{text}");
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
