//! How the screens of `dev` and `demo` look.
use std::io::IsTerminal;

/// Colours, or none.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    pub color: bool,
}

impl Style {
    /// Colours if the stream is a terminal and `NO_COLOR` is not set.
    pub fn of(stream: &impl IsTerminal) -> Style {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Style { color: stream.is_terminal() && !refused }
    }

    pub fn bold(self, text: &str) -> String {
        self.with("1", text)
    }

    pub fn dim(self, text: &str) -> String {
        self.with("2", text)
    }

    pub fn red(self, text: &str) -> String {
        self.with("1;31", text)
    }

    pub fn green(self, text: &str) -> String {
        self.with("32", text)
    }

    pub fn yellow(self, text: &str) -> String {
        self.with("33", text)
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// The beginning of a text on one line of at most `chars`, without what a terminal would obey.
pub fn one_line(text: &str, chars: usize) -> String {
    let visible = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>();
    let line = visible.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() <= chars {
        return line;
    }
    let cut: String = line.chars().take(chars.saturating_sub(1)).collect();
    format!("{}…", cut.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_line_and_commands_no_terminal() {
        assert_eq!(one_line("a\n\n b\x1b[2Jc", 20), "a b [2Jc");
        assert_eq!(one_line("äöü äöü", 5), "äöü…");
        assert_eq!(one_line("äöü", 3), "äöü");
    }

    #[test]
    fn without_colour_a_text_is_itself() {
        assert_eq!(Style { color: false }.red("x"), "x");
        assert_eq!(Style { color: true }.red("x"), "\x1b[1;31mx\x1b[0m");
    }
}
