//! Markdown, which models write, as Slack's own marks. Slack shows `**bold**` as it stands, and has `*bold*` instead.
//!
//! Only marks that are plain are changed: those that stand at the border of a word and close on their line. A link becomes its
//! label and its address, because a label alone could hide where it leads. Code stays as it is.

use super::text::escaped;

/// Turns a model's Markdown into Slack's marks. Mentions in it become plain text, so that it calls no person.
pub(super) fn mrkdwn(markdown: &str) -> String {
    let mut fenced = false;
    let lines = markdown.split('\n').map(|line| {
        match line.trim_start().strip_prefix("```") {
            Some(rest) if !rest.contains("```") => {
                fenced = !fenced;
                // Slack would show the language as the first line of the code.
                if fenced { "```".to_owned() } else { line.to_owned() }
            }
            None if !fenced => of_line(line),
            Some(_) | None => line.to_owned(),
        }
    });
    escaped(&lines.collect::<Vec<_>>().join("\n"))
}

fn of_line(line: &str) -> String {
    let text = line.trim_start();
    let indent = &line[..line.len() - text.len()];
    let level = text.bytes().take_while(|byte| *byte == b'#').count();
    if (1..=6).contains(&level)
        && let Some(title) = text[level..].strip_prefix(' ')
    {
        let title = of_text(title.trim().trim_end_matches('#').trim_end());
        // A title that is bold already, or has a bold word, is bold as a whole.
        return format!("{indent}*{}*", title.replace('*', ""));
    }
    for bullet in ["- ", "* ", "+ "] {
        if let Some(item) = text.strip_prefix(bullet) {
            return format!("{indent}• {}", of_text(item));
        }
    }
    format!("{indent}{}", of_text(text))
}

/// Changes the marks of a text without line breaks, outside of code.
fn of_text(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(begin) = rest.find(['*', '_', '~', '[', '!', '`']) {
        let (before, at) = rest.split_at(begin);
        out.push_str(before);
        let taken = match () {
            () if at.starts_with('`') => code(at),
            () if at.starts_with('[') || at.starts_with("![") => link(at),
            // Inside of a word these are no marks: 2*3*4, snake_case_name.
            () if out.ends_with(char::is_alphanumeric) => None,
            () => [("**", "*"), ("__", "*"), ("~~", "~"), ("*", "_")]
                .iter()
                .find_map(|(mark, slack)| marked(at, mark, slack)),
        };
        let (written, length) = taken.unwrap_or_else(|| {
            // A run of one mark is one thing: the second `*` of a `**` that does not close begins nothing.
            let first = at.chars().next().unwrap_or_default();
            let run: String = at.chars().take_while(|c| *c == first).collect();
            (run.clone(), run.len())
        });
        out.push_str(&written);
        rest = &at[length..];
    }
    out.push_str(rest);
    out
}

/// The text between `mark` and `mark`, between Slack's marks, and how much of `at` that was.
fn marked(at: &str, mark: &str, slack: &str) -> Option<(String, usize)> {
    let inner = at.strip_prefix(mark)?;
    let end = inner.match_indices(mark).map(|(end, _)| end).find(|end| {
        let (text, after) = (&inner[..*end], &inner[end + mark.len()..]);
        !text.ends_with(char::is_whitespace)
            && !after.starts_with(|next: char| next.is_alphanumeric() || mark.starts_with(next))
    })?;
    let text = &inner[..end];
    if text.is_empty() || text.starts_with(char::is_whitespace) || mark.starts_with(text.chars().next()?) {
        return None;
    }
    Some((format!("{slack}{}{slack}", of_text(text)), 2 * mark.len() + end))
}

/// `[label](address)` as `label (address)`, and a picture likewise.
fn link(at: &str) -> Option<(String, usize)> {
    let label_at = at.find('[')? + 1;
    let (label, rest) = at[label_at..].split_once("](")?;
    let (address, _) = rest.split_once(')')?;
    if label.contains(['[', ']']) || address.contains(char::is_whitespace) || address.is_empty() {
        return None;
    }
    let length = label_at + label.len() + 2 + address.len() + 1;
    let label = of_text(label);
    Some((
        if label.is_empty() || label == address {
            address.to_owned()
        } else {
            format!("{label} ({address})")
        },
        length,
    ))
}

/// Code between backquotes, as it stands.
fn code(at: &str) -> Option<(String, usize)> {
    let ticks = at.bytes().take_while(|byte| *byte == b'`').count();
    let end = at[ticks..].find(&at[..ticks])?;
    let length = 2 * ticks + end;
    Some((at[..length].to_owned(), length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_become_slacks_own() {
        for (markdown, slack) in [
            ("**Two** tables, *please*.", "*Two* tables, _please_."),
            ("__Two__ and ~~three~~ and _four_", "*Two* and ~three~ and _four_"),
            ("## The **plan**\nText", "*The plan*\nText"),
            ("- one\n  * two\n+ **three**", "• one\n  • two\n• *three*"),
            (
                "See [the page](https://a.example/x?a=1&b=2).",
                "See the page (https://a.example/x?a=1&amp;b=2).",
            ),
            ("![A cat](https://a.example/cat.png)", "A cat (https://a.example/cat.png)"),
            ("[https://a.example](https://a.example)", "https://a.example"),
            ("**bold with *italic* in it**", "*bold with _italic_ in it*"),
        ] {
            assert_eq!(mrkdwn(markdown), slack, "{markdown}");
        }
    }

    #[test]
    fn what_is_no_mark_stays_as_it_is() {
        for text in [
            "2*3*4 = 24",
            "a * b * c",
            "snake_case_name",
            "5 ** 2",
            "`**not bold** [no](link)` here",
            "```\n# no title\n- no item\n**no**\n```",
            "#channel stays",
            "*",
            "**",
            "** open",
            "[half](",
            "a [note] (here)",
            "```all of it```\n2*3",
            "",
        ] {
            assert_eq!(mrkdwn(text), text, "{text}");
        }
        assert_eq!(mrkdwn("```rust\nlet a = *b;\n```"), "```\nlet a = *b;\n```");
    }

    #[test]
    fn no_text_refers_to_anybody_or_hides_an_address() {
        let out = mrkdwn("**<!everyone>** [bank](https://other.example) [<@U1>](x)");
        assert!(!out.contains('<') && out.contains("bank (https://other.example)"), "{out}");
    }
}
