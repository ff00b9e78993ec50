//! What a redacted bundle says of the type of a file. The sender wrote it, and may have written anything.

/// Types that are so common that they tell nothing.
const COMMON: [&str; 22] = [
    "application/gzip",
    "application/json",
    "application/msword",
    "application/pdf",
    "application/rtf",
    "application/vnd.ms-excel",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    "application/xml",
    "application/zip",
    "audio/mpeg",
    "audio/ogg",
    "image/gif",
    "image/jpeg",
    "image/png",
    "image/svg+xml",
    "image/webp",
    "message/rfc822",
    "text/calendar",
    "text/csv",
    "text/html",
    "text/plain",
];

/// The type, without parameters, if it is a common one.
pub fn media_type(given: &str) -> &'static str {
    let plain = given.split(';').next().unwrap_or_default().trim();
    let known = COMMON.into_iter().find(|known| known.eq_ignore_ascii_case(plain));
    known.unwrap_or("application/octet-stream")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_common_types_are_kept() {
        for (given, kept) in [
            ("text/plain", "text/plain"),
            ("Image/PNG; name=\"secret.png\"", "image/png"),
            ("application/json", "application/json"),
            ("application/x-secret", "application/octet-stream"),
            ("text/plain secret", "application/octet-stream"),
            ("", "application/octet-stream"),
        ] {
            assert_eq!(media_type(given), kept, "{given}");
        }
    }
}
