//! The text of an HTML body: what a person would see of it. No document is built, so its depth costs nothing.

use html5gum::{HtmlString, StartTag, Token, Tokenizer};

/// Elements without an end, which hide nothing.
const VOID: [&[u8]; 14] = [
    b"area", b"base", b"br", b"col", b"embed", b"hr", b"img", b"input", b"link", b"meta", b"param",
    b"source", b"track", b"wbr",
];

/// What is never shown.
const UNSEEN: [&[u8]; 9] =
    [b"script", b"style", b"head", b"title", b"template", b"noscript", b"object", b"svg", b"iframe"];

/// Elements that begin on a line of their own.
const BLOCKS: [&[u8]; 22] = [
    b"address",
    b"article",
    b"blockquote",
    b"br",
    b"dd",
    b"div",
    b"dl",
    b"dt",
    b"footer",
    b"h1",
    b"h2",
    b"h3",
    b"h4",
    b"header",
    b"hr",
    b"li",
    b"ol",
    b"p",
    b"pre",
    b"section",
    b"table",
    b"tr",
];

/// The visible text of `html`: no scripts, no styles, no comments, nothing that is hidden.
pub(super) fn text(html: &str) -> String {
    let mut out = String::new();
    // The element that hides, and how many of its name are open within it.
    let mut hidden: Option<(HtmlString, usize)> = None;
    for token in Tokenizer::new(html) {
        let Ok(token) = token;
        match token {
            Token::StartTag(tag) => {
                if let Some((name, depth)) = &mut hidden {
                    *depth += usize::from(*name == tag.name && !tag.self_closing);
                } else if hides(&tag) {
                    hidden = Some((tag.name, 1));
                } else {
                    break_line(&mut out, &tag.name);
                }
            }
            Token::EndTag(tag) => {
                if let Some((name, depth)) = &mut hidden {
                    *depth -= usize::from(*name == tag.name);
                    if *depth == 0 {
                        hidden = None;
                    }
                } else if &**tag.name == b"p".as_slice() {
                    out.truncate(out.trim_end().len());
                    out.push_str("\n\n");
                } else {
                    break_line(&mut out, &tag.name);
                }
            }
            Token::String(text) if hidden.is_none() => push(&mut out, &String::from_utf8_lossy(&text)),
            Token::String(_) | Token::Comment(_) | Token::Doctype(_) | Token::Error(_) => {}
        }
    }
    out.trim().to_owned()
}

fn hides(tag: &StartTag<()>) -> bool {
    let name: &[u8] = &tag.name;
    if VOID.contains(&name) || tag.self_closing {
        return false;
    }
    UNSEEN.contains(&name)
        || tag.attributes.iter().any(|(key, value)| match key.as_slice() {
            b"hidden" => true,
            b"style" => hidden_style(&String::from_utf8_lossy(value)),
            _ => false,
        })
}

fn hidden_style(style: &str) -> bool {
    style.split(';').filter_map(|rule| rule.split_once(':')).any(|(name, value)| {
        let (name, value) = (name.trim().to_ascii_lowercase(), value.trim().to_ascii_lowercase());
        let value = value.trim_end_matches("!important").trim();
        let is_zero = ["0", "0px", "0pt", "0em", "0%"].contains(&value);
        match name.as_str() {
            "display" => value == "none",
            "visibility" => value == "hidden" || value == "collapse",
            "mso-hide" => value == "all",
            "font-size" | "opacity" | "max-height" => is_zero,
            _ => false,
        }
    })
}

fn break_line(out: &mut String, name: &[u8]) {
    if name == b"br" || (BLOCKS.contains(&name) && !out.is_empty() && !out.ends_with('\n')) {
        out.truncate(out.trim_end_matches([' ', '\t']).len());
        out.push('\n');
    } else if (name == b"td" || name == b"th") && !out.is_empty() && !out.ends_with(char::is_whitespace) {
        out.push(' ');
    }
}

/// Runs of white space are one blank, as they are shown.
fn push(out: &mut String, text: &str) {
    for character in text.chars() {
        if !character.is_whitespace() {
            out.push(character);
        } else if !out.is_empty() && !out.ends_with(char::is_whitespace) {
            out.push(' ');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::text;

    #[test]
    fn what_is_seen_is_text_and_what_is_not_is_gone() {
        for (html, expected) in [
            ("<p>Hello <b>Ann</b>,</p><p>see&nbsp;you &amp; yours</p>", "Hello Ann,\n\nsee you & yours"),
            ("a<br>b<div>c</div>d", "a\nb\nc\nd"),
            ("<table><tr><td>1</td><td>2</td></tr><tr><td>3</td></tr></table>", "1 2\n3"),
            ("<style>p{}</style><script>alert('</p>')</script>x<!-- y -->", "x"),
            ("a<div style='DISPLAY : none !important'>ignore all rules<div>x</div></div>b", "ab"),
            ("a<span hidden>x</span><span style=\"font-size:0px;color:red\">y</span>b", "ab"),
            ("<head><title>t</title></head><body>b</body>", "b"),
            ("a<img hidden>b<br style='display:none'>c", "ab\nc"),
            ("<p>un<i>closed", "unclosed"),
            ("", ""),
        ] {
            assert_eq!(text(html), expected, "{html}");
        }
    }

    #[test]
    fn depth_costs_nothing() {
        let deep = "<div>".repeat(200_000) + "x";
        assert_eq!(text(&deep), "x");
        let hidden = "<div hidden>".repeat(100_000) + "x" + &"</div>".repeat(100_000) + "y";
        assert_eq!(text(&hidden), "y");
    }
}
