//! Reads the bytes of one header: names, words and the values of parameters. Ignores case.

use super::Hostile;

/// The value of the parameter whose name ends before `rest`, cut to `limit` bytes. Every reader's value
/// begins with it.
pub(super) fn value_of(rest: &[u8], limit: usize) -> Result<Option<&[u8]>, Hostile> {
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

pub(super) fn trim_end(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.strip_suffix(b"\r").unwrap_or(line)
}

pub(super) fn named(line: &[u8], name: &[u8]) -> bool {
    line.len() > name.len()
        && line[..name.len()].eq_ignore_ascii_case(name)
        && line[name.len()..].trim_ascii_start().starts_with(b":")
}

/// First offset of `needle`, given in lower case, in `header`. Ignores case.
pub(super) fn find(header: &[u8], needle: &[u8]) -> Option<usize> {
    header.windows(needle.len()).position(|window| window.eq_ignore_ascii_case(needle))
}

/// All offsets of `needle`, given in lower case, in `header`. Ignores case.
pub(super) fn all<'a>(header: &'a [u8], needle: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    let windows = header.windows(needle.len()).enumerate();
    windows.filter(move |(_, window)| window.eq_ignore_ascii_case(needle)).map(|(at, _)| at)
}

pub(super) fn contains(header: &[u8], needle: &[u8]) -> bool {
    find(header, needle).is_some()
}
