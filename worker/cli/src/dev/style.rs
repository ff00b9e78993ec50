//! Colours and line breaks of the output of `dev` and `demo`.
use std::io::IsTerminal;

/// Whether to use colours.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    pub color: bool,
}

impl Style {
    /// Uses colours if the stream is a terminal and `NO_COLOR` is not set.
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

    /// Returns the columns of the terminal on stdout, or 140 if it is not a terminal.
    pub fn columns() -> usize {
        // SAFETY: a winsize of zeros is valid, and the call writes only into it.
        let known = unsafe {
            let mut size: libc::winsize = std::mem::zeroed();
            (libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &raw mut size) == 0).then_some(size.ws_col)
        };
        known.filter(|columns| *columns > 0).map_or(140, usize::from)
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// Returns the start of a text on one line of at most `chars`, with control characters replaced by spaces.
pub fn one_line(text: &str, chars: usize) -> String {
    let visible = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>();
    let line = visible.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() <= chars {
        return line;
    }
    let cut: String = line.chars().take(chars.saturating_sub(1)).collect();
    format!("{}…", cut.trim_end())
}

/// Breaks the text at spaces into lines of at most `chars`. A longer word stays whole.
pub fn wrapped(text: &str, chars: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is always a line");
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= chars {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
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
    fn a_long_text_is_broken_at_blanks_and_a_long_word_is_not() {
        assert_eq!(wrapped("to be or not", 5), ["to be", "or", "not"]);
        assert_eq!(wrapped("unbreakable it is", 5), ["unbreakable", "it is"]);
        assert_eq!(wrapped("", 5), [""]);
    }

    #[test]
    fn without_colour_a_text_is_itself() {
        assert_eq!(Style { color: false }.red("x"), "x");
        assert_eq!(Style { color: true }.red("x"), "\x1b[1;31mx\x1b[0m");
    }
}
