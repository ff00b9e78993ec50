//! The pass that ignores the structure of the mail. It counts what a lenient parser could find.

use super::header::{all, contains, value_of};
use super::{HEADER_BYTES, Hostile, PARTS, Scanned};

/// Maximum number of content types of a mail within the mail (`message/rfc822`), anywhere in the bytes.
/// Ordinary text may contain some.
pub(super) const MAIL_TYPES: usize = 100;
/// Bytes of a boundary that tell it from others. RFC 2046 allows no longer ones.
const BOUNDARY_BYTES: usize = 70;

/// Counts what any reader could take for a boundary or for a mail within the mail, anywhere in the bytes.
/// Takes linear time: it reads each byte a bounded number of times.
pub(super) fn loosely(raw: &[u8], scanned: &mut Scanned) -> Result<(), Hostile> {
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
