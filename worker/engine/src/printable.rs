//! Makes hostile text harmless: control characters are shown as escapes and have no effect. Logs and the
//! command line use it.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Returns whether a character acts on the terminal, or changes the order of the text around it, instead of
/// being shown. Joiners do not count: scripts and emoji need them.
pub fn is_active_char(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}' | '\u{200e}' | '\u{200f}'
            | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e007f}')
}

/// Puts `text` on one line, with every character that acts on the terminal ([`is_active_char`]) shown as an
/// escape: `\n`, `\u{1b}`, `\u{202e}`.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(is_active_char) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_active_char(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

/// Returns JSON in which every character that acts on the terminal ([`is_active_char`]), and that JSON itself
/// does not escape, is written as `\u…`. Line breaks between its values stay.
pub fn json_text(text: String) -> String {
    let plain = |byte: u8| byte == b'\n' || (b' '..=b'~').contains(&byte);
    if text.bytes().all(plain) || !text.contains(|c| c != '\n' && is_active_char(c)) {
        return text;
    }
    let mut safe = String::with_capacity(text.len() + 16);
    let mut units = [0; 2];
    for c in text.chars() {
        if c == '\n' || !is_active_char(c) {
            safe.push(c);
        } else {
            for unit in c.encode_utf16(&mut units) {
                let _ = write!(safe, "\\u{unit:04x}");
            }
        }
    }
    safe
}
