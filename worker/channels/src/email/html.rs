//! Extracts the visible text of an HTML body. Builds no document tree, so deep nesting costs nothing.

use html5gum::{HtmlString, StartTag, Token, Tokenizer};

/// Elements without an end tag. A hidden one hides nothing after it.
const VOID: [&[u8]; 14] = [
    b"area", b"base", b"br", b"col", b"embed", b"hr", b"img", b"input", b"link", b"meta", b"param",
    b"source", b"track", b"wbr",
];

/// Elements whose content is never shown.
const UNSEEN: [&[u8]; 9] =
    [b"script", b"style", b"head", b"title", b"template", b"noscript", b"object", b"svg", b"iframe"];

/// Elements that start a new line.
const BLOCKS: [&[u8]; 33] = [
    b"address",
    b"article",
    b"aside",
    b"blockquote",
    b"br",
    b"center",
    b"dd",
    b"div",
    b"dl",
    b"dt",
    b"fieldset",
    b"figcaption",
    b"figure",
    b"footer",
    b"form",
    b"h1",
    b"h2",
    b"h3",
    b"h4",
    b"h5",
    b"h6",
    b"header",
    b"hr",
    b"li",
    b"main",
    b"nav",
    b"ol",
    b"p",
    b"pre",
    b"section",
    b"table",
    b"tr",
    b"ul",
];

/// A longer link address is not shown. All shown addresses together are no longer than the document.
const ADDRESS_BYTES: usize = 2_000;

/// The visible text of `html`, without scripts, styles, comments and hidden elements. A link becomes `text
/// (https://…)`, unless its text is the address.
pub(super) fn text(html: &str) -> String {
    let mut out = String::new();
    // The open link: its address, and where its text starts in `out`.
    let mut link: Option<(String, usize)> = None;
    let mut regions = Regions::default();
    for token in Tokenizer::new(html) {
        let Ok(token) = token;
        match token {
            Token::StartTag(tag) => {
                regions.start(&tag);
                if !regions.are_seen() {
                    continue;
                }
                if &**tag.name == b"a".as_slice() {
                    // Links do not nest: a new link ends the previous one.
                    append_link_address(&mut out, link.take());
                    link = address(&tag).map(|address| (address, out.len()));
                } else {
                    break_line(&mut out, &tag.name);
                }
            }
            Token::EndTag(tag) => {
                let was_seen = regions.are_seen();
                regions.end(&tag.name);
                if !was_seen {
                    continue;
                }
                if &**tag.name == b"a".as_slice() {
                    append_link_address(&mut out, link.take());
                } else if &**tag.name == b"p".as_slice() {
                    out.truncate(out.trim_end().len());
                    out.push_str("\n\n");
                } else {
                    break_line(&mut out, &tag.name);
                }
            }
            Token::String(text) if regions.are_seen() => push(&mut out, &String::from_utf8_lossy(&text)),
            Token::String(_) | Token::Comment(_) | Token::Doctype(_) | Token::Error(_) => {}
        }
    }
    append_link_address(&mut out, link);
    out.trim().to_owned()
}

/// The address of a link that a reader could follow from a mail.
fn address(tag: &StartTag<()>) -> Option<String> {
    let (_, value) = tag.attributes.iter().find(|(key, _)| key.as_slice() == b"href".as_slice())?;
    let text = String::from_utf8_lossy(value);
    // Read the address as browsers do: drop line breaks and tabs, and encode spaces.
    let address: String = text.trim().chars().filter(|c| !c.is_control()).collect();
    let address = address.split(char::is_whitespace).collect::<Vec<_>>().join("%20");
    let leads = ["http://", "https://", "mailto:"]
        .iter()
        .any(|scheme| address.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme)));
    (leads && address.len() <= ADDRESS_BYTES).then_some(address)
}

/// Appends the address of the link that ends here.
fn append_link_address(out: &mut String, link: Option<(String, usize)>) {
    let Some((address, start)) = link else { return };
    let shown = out[out.floor_char_boundary(start)..].trim();
    if shown.is_empty() || without_scheme(shown).eq_ignore_ascii_case(without_scheme(&address)) {
        return;
    }
    let behind = out.split_off(out.trim_end().len());
    out.push_str(&format!(" ({address})"));
    out.push_str(&behind);
}

fn without_scheme(address: &str) -> &str {
    let rest = ["http://", "https://", "mailto:"].iter().find_map(|scheme| {
        let (start, rest) = address.split_at_checked(scheme.len())?;
        start.eq_ignore_ascii_case(scheme).then_some(rest)
    });
    rest.unwrap_or(address).trim_end_matches('/')
}

/// How an element changes what is seen of its content.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sight {
    /// It has a size of its own, so it is seen although the text around it has none.
    Seen,
    /// Its text has the size 0. An element inside may have another one: mails made with MJML are built so.
    Tiny,
    Hidden,
}

/// More of them within each other change nothing any more.
const REGIONS: usize = 32;

/// The open elements that change what is seen, the outermost first. An element that a mail does not end ends with one around it.
#[derive(Default)]
struct Regions(Vec<Region>);

struct Region {
    name: HtmlString,
    /// How many elements of this name are open in it, with its own.
    depth: usize,
    sight: Sight,
}

impl Regions {
    fn are_seen(&self) -> bool {
        self.sight() == Sight::Seen
    }

    fn sight(&self) -> Sight {
        self.0.last().map_or(Sight::Seen, |region| region.sight)
    }

    fn start(&mut self, tag: &StartTag<()>) {
        let name: &[u8] = &tag.name;
        if name == b"body" {
            // The end tag of `head` may be left out.
            let head = self.0.iter().position(|region| &**region.name == b"head".as_slice());
            self.0.truncate(head.unwrap_or(self.0.len()));
        }
        if VOID.contains(&name) || tag.self_closing {
            return;
        }
        for region in self.0.iter_mut().filter(|region| region.name == tag.name) {
            region.depth += 1;
        }
        let sight = match (self.sight(), changed_sight(tag)) {
            (Sight::Seen | Sight::Tiny, Some(Sight::Hidden)) => Sight::Hidden,
            (Sight::Seen, Some(Sight::Tiny)) => Sight::Tiny,
            (Sight::Tiny, Some(Sight::Seen)) => Sight::Seen,
            _ => return,
        };
        if self.0.len() < REGIONS {
            self.0.push(Region { name: tag.name.clone(), depth: 1, sight });
        }
    }

    fn end(&mut self, name: &HtmlString) {
        for region in self.0.iter_mut().filter(|region| region.name == *name) {
            region.depth -= 1;
        }
        if let Some(ended) = self.0.iter().position(|region| region.depth == 0) {
            self.0.truncate(ended);
        }
    }
}

fn changed_sight(tag: &StartTag<()>) -> Option<Sight> {
    let attribute = |name: &[u8]| tag.attributes.iter().find(|(key, _)| key.as_slice() == name);
    if UNSEEN.contains(&&**tag.name) || attribute(b"hidden").is_some() {
        return Some(Sight::Hidden);
    }
    let (_, style) = attribute(b"style")?;
    sight_of_style(&String::from_utf8_lossy(style))
}

fn sight_of_style(style: &str) -> Option<Sight> {
    let mut sight = None;
    for (name, value) in style.split(';').filter_map(|rule| rule.split_once(':')) {
        let (name, value) = (name.trim().to_ascii_lowercase(), value.trim().to_ascii_lowercase());
        let value = value.trim_end_matches("!important").trim();
        let is_zero = ["0", "0px", "0pt", "0em", "0rem", "0%"].contains(&value);
        let is_hidden = match name.as_str() {
            "display" => value == "none",
            "visibility" => value == "hidden" || value == "collapse",
            "mso-hide" => value == "all",
            "opacity" | "max-height" => is_zero,
            _ => false,
        };
        if is_hidden {
            return Some(Sight::Hidden);
        }
        if name == "font-size" {
            // A part of the size around it may be a part of nothing.
            let is_relative = value.ends_with('%') || (value.ends_with("em") && !value.ends_with("rem"));
            sight = if is_zero { Some(Sight::Tiny) } else { (!is_relative).then_some(Sight::Seen) };
        }
    }
    sight
}

fn break_line(out: &mut String, name: &[u8]) {
    if name == b"br" || (BLOCKS.contains(&name) && !out.is_empty() && !out.ends_with('\n')) {
        out.truncate(out.trim_end_matches([' ', '\t']).len());
        out.push('\n');
    } else if (name == b"td" || name == b"th") && !out.is_empty() && !out.ends_with(char::is_whitespace) {
        out.push(' ');
    }
}

/// Collapses runs of white space to one space, as browsers do.
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
            (
                "<td style='font-size:0px;padding:9px'>x<div style='font-size:13px'>Hi <b>Ann</b></div>y</td>z",
                "Hi Ann\nz",
            ),
            (
                "<td style='font-size:0'><div style='display:none'><p style='font-size:9px'>x</p></div></td>b",
                "b",
            ),
            ("<td style='font-size:0'><p style='font-size:9pt'>a<td style='font-size:0'>x</td></td>b", "a b"),
            ("<td style='font-size:0'><div style='font-size:100%'>x</div></td>b", "b"),
            ("<html><head><meta charset=x><title>t</title><body>b", "b"),
            ("", ""),
        ] {
            assert_eq!(text(html), expected, "{html}");
        }
    }

    #[test]
    fn a_link_says_where_it_leads_and_stands_apart_from_what_is_before_it() {
        let long = format!("<a href='https://example.org/{}'>x</a>", "y".repeat(2_000));
        for (html, expected) in [
            (
                "<a href='https://example.org/c?a=1&amp;b=2'>Confirm</a>.",
                "Confirm (https://example.org/c?a=1&b=2).",
            ),
            (
                "<ul><li>one<li>two</ul><a href='https://example.org'>More</a>",
                "one\ntwo\nMore (https://example.org)",
            ),
            ("<a href='https://example.org/'>example.org</a> b", "example.org b"),
            ("<a href='mailto:ann@example.org'>Ann@example.org</a>", "Ann@example.org"),
            ("<a href='HTTPS://evil.org'>https://bank.org</a>", "https://bank.org (HTTPS://evil.org)"),
            ("<a href='https://example.org'><div>Pay</div></a>now", "Pay (https://example.org)\nnow"),
            ("<a href=' https://example.org/a\n b '>x</a>", "x (https://example.org/a%20b)"),
            (
                "<a href='https://one.org'>a<a href='https://two.org'>b",
                "a (https://one.org)b (https://two.org)",
            ),
            ("<a href='https://example.org'><img src=x></a><a name=y>z</a>", "z"),
            (
                "<a href='https://example.org'><b hidden>x</b></a>a<a hidden href='https://example.org'>y</a>",
                "a",
            ),
            ("<a href='javascript:alert(1)'>a</a> <a href='#top'>b</a> <a href>c</a>", "a b c"),
            (&long, "x"),
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
        let links = "<a href='https://example.org'>x".repeat(5_000);
        assert_eq!(text(&links).len(), 5_000 * "x (https://example.org)".len());
    }
}
