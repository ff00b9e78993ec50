//! Checks the bytes of a line before anything parses it, and its texts afterwards.

/// Maximum nesting of values. Wakeful writes less than ten levels; a tool's arguments may be deeper.
pub(super) const DEPTH: usize = 64;

/// Maximum number of values in one line. A parsed value needs many times its bytes in memory.
const VALUES: usize = 100_000;

/// Checks the bytes alone: UTF-8, no NUL in any spelling, not too deep, not too many values.
///
/// # Errors
/// The reason to refuse the line.
pub(super) fn bytes(line: &[u8]) -> Result<(), String> {
    if let Err(error) = std::str::from_utf8(line) {
        return Err(format!("it is not UTF-8: invalid at byte {}", error.valid_up_to()));
    }
    let (mut depth, mut values, mut in_text, mut escaped) = (0_usize, 0_usize, false, false);
    for (at, byte) in line.iter().enumerate() {
        match (in_text, byte) {
            (_, 0) => return Err(format!("it has a NUL at byte {at}")),
            (true, b'u') if escaped => {
                if line.get(at + 1..at + 5) == Some(b"0000") {
                    return Err(format!("it has an escaped NUL at byte {at}"));
                }
                escaped = false;
            }
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (true, b'"') => in_text = false,
            (true, _) => {}
            (false, b'"') => in_text = true,
            (false, b'[' | b'{') => {
                depth += 1;
                values += 1;
                if depth > DEPTH {
                    return Err(format!("it is nested more than {DEPTH} deep"));
                }
            }
            (false, b']' | b'}') => depth = depth.saturating_sub(1),
            (false, b',') => values += 1,
            (false, _) => {}
        }
    }
    if values > VALUES {
        return Err(format!("it holds more than {VALUES} values"));
    }
    Ok(())
}

/// Returns whether `written` serialises to exactly the bytes of `line`. Makes no copy.
pub(super) fn is_written_as(line: &[u8], written: &impl serde::Serialize) -> bool {
    let mut rest = Rest(line);
    serde_json::to_writer(&mut rest, written).is_ok() && rest.0.is_empty()
}

struct Rest<'a>(&'a [u8]);

impl std::io::Write for Rest<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self.0.strip_prefix(bytes) {
            Some(rest) => {
                self.0 = rest;
                Ok(bytes.len())
            }
            None => Err(std::io::ErrorKind::InvalidData.into()),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// One of Wakeful's ids: letters, digits, `_` and `-`, at most 128 of them.
pub(super) fn is_id(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    (1..=128).contains(&text.len()) && text.bytes().all(allowed)
}

/// A name from outside: of a tool, a model or a call.
pub(super) fn is_name(text: &str) -> bool {
    (1..=512).contains(&text.len()) && !text.chars().any(char::is_control)
}

/// The hash of a blob: 64 hexadecimal digits in lower case.
pub(super) fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// `2026-01-31T12:00:00.000000Z`: a time that exists, from 1970 to 9999.
pub(super) fn is_time(text: &str) -> bool {
    const FORM: &[u8] = b"0000-00-00T00:00:00.000000Z";
    let fits = |(byte, form): (u8, &u8)| if *form == b'0' { byte.is_ascii_digit() } else { byte == *form };
    if text.len() != FORM.len() || !text.bytes().zip(FORM).all(fits) {
        return false;
    }
    let number = |from: usize, to: usize| text[from..to].parse::<u32>().unwrap_or(u32::MAX);
    let (year, month, day) = (number(0, 4), number(5, 7), number(8, 10));
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let days = match month {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => 0,
    };
    year >= 1970
        && (1..=days).contains(&day)
        && number(11, 13) < 24
        && number(14, 16) < 60
        && number(17, 19) < 60
}

/// A path that stays in its folder: relative, without `..`, without control characters.
pub(super) fn is_path_within(path: &str) -> bool {
    !path.is_empty()
        && path.len() <= 4096
        && !path.starts_with('/')
        && !path.chars().any(char::is_control)
        && path.split(['/', '\\']).all(|part| part != "..")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nul_is_found_in_any_spelling_and_only_a_nul() {
        assert!(bytes(b"{\"a\":\"\\u0000\"}").unwrap_err().contains("escaped NUL"));
        assert!(bytes(b"{\"a\":\"\\\\\\u0000\"}").unwrap_err().contains("escaped NUL"));
        assert!(bytes(b"{\"a\":\"\0\"}").unwrap_err().contains("NUL"));
        assert!(bytes(b"{\"a\":\"\\\\u0000 \\u0001\"}").is_ok());
    }

    #[test]
    fn depth_and_number_of_values_are_bounded_outside_of_texts() {
        let nested = |deep: usize| [vec![b'['; deep], vec![b']'; deep]].concat();
        assert!(bytes(&nested(DEPTH)).is_ok());
        assert!(bytes(&nested(DEPTH + 1)).unwrap_err().contains("deep"));
        let text = format!("[\"{}\"]", "[{,\\\"".repeat(200_000));
        assert!(bytes(text.as_bytes()).is_ok());
        let many = format!("[{}0]", "0,".repeat(VALUES));
        assert!(bytes(many.as_bytes()).unwrap_err().contains("values"));
    }

    #[test]
    fn a_time_is_one_that_there_is() {
        assert!(is_time("2024-02-29T23:59:59.000001Z"));
        for no in [
            "2023-02-29T00:00:00.000000Z",
            "2024-13-01T00:00:00.000000Z",
            "2024-00-01T00:00:00.000000Z",
            "2024-01-00T00:00:00.000000Z",
            "2024-01-01T24:00:00.000000Z",
            "2024-01-01T00:00:60.000000Z",
            "1969-12-31T00:00:00.000000Z",
            "2024-01-01T00:00:00Z",
            "2024-01-01 00:00:00.000000Z",
            "infinity",
        ] {
            assert!(!is_time(no), "{no}");
        }
    }

    #[test]
    fn a_path_that_leads_out_is_none() {
        for yes in ["a", "notes/today.md", "a..b", "./a", "..a/b"] {
            assert!(is_path_within(yes), "{yes}");
        }
        for no in ["", "/etc/passwd", "..", "../a", "a/../../b", "a\\..\\b", "a\nb"] {
            assert!(!is_path_within(no), "{no}");
        }
    }
}
