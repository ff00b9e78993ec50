//! What a person typed into a form that was refused. The page that the person is led to has it in its form again.
//!
//! It is in memory and of one process, as the presses are: a person who is led to another process types again. The pages are our
//! own, so their forms are found in the text of the page; nothing in a page's values can look like a tag, because templates
//! escape them.

use crate::seal::random_word;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// How many forms are kept, and how many bytes they have together.
const MOST: usize = 64;
const BYTES: usize = 4 << 20;

/// Fields that every form has, with another word each time.
const WORDS: [&str; 2] = ["word", "press"];

/// Where the page says what was typed, if it does not have the form any more.
pub(crate) const ELSE: &str = "<div data-typed-else></div>";

/// The fields that a person writes texts into.
const TEXTS: [&str; 7] = ["text", "answer", "prompt", "append", "result", "reason", "note"];

/// The fields of a form that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Typed {
    /// Who typed them.
    pub login: String,
    /// Where the form was sent to, as the browser has it.
    pub action: String,
    pub fields: Vec<(String, String)>,
}

#[derive(Default)]
pub(crate) struct Kept(Mutex<VecDeque<(String, Typed)>>);

impl Kept {
    /// Keeps the fields for the next page, and returns the key that its note has. The oldest form gives way.
    pub fn keep(&self, typed: Typed) -> Option<String> {
        if typed.bytes() > BYTES {
            return None;
        }
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bytes: usize = kept.iter().map(|(_, typed)| typed.bytes()).sum();
        bytes += typed.bytes();
        while kept.len() >= MOST || bytes > BYTES {
            let Some((_, oldest)) = kept.pop_front() else { break };
            bytes -= oldest.bytes();
        }
        let key = random_word();
        kept.push_back((key.clone(), typed));
        Some(key)
    }

    /// Gives the fields back, once, to the one who typed them.
    pub fn take(&self, key: &str, login: &str) -> Option<Typed> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|(own, typed)| own == key && typed.login == login)?;
        kept.remove(at).map(|(_, typed)| typed)
    }
}

impl Typed {
    fn bytes(&self) -> usize {
        self.fields.iter().map(|(name, value)| name.len() + value.len()).sum()
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(own, _)| own == name).map(|(_, value)| value.as_str())
    }

    fn has(&self, name: &str, value: &str) -> bool {
        self.fields.iter().any(|(own, other)| own == name && escaped(other) == value)
    }

    /// The page with the fields in their form. A page that has no such form any more shows the texts.
    pub fn fill(&self, page: &str) -> String {
        let (mut filled, mut rest, mut is_filled) = (String::new(), page, false);
        while let Some(at) = rest.find("<form") {
            let end = rest[at..].find("</form>").map_or(rest.len(), |end| at + end);
            let form = &rest[at..end];
            filled.push_str(&rest[..at]);
            if self.is_of(form) {
                is_filled = true;
                // It may be folded away.
                let folds = filled.rfind("<details").filter(|at| !filled[*at..].contains("</details>"));
                if let Some(at) = folds {
                    filled.insert_str(at + "<details".len(), " open");
                }
                filled.push_str(&self.form(form));
            } else {
                filled.push_str(form);
            }
            rest = &rest[end..];
        }
        filled.push_str(rest);
        let instead = if is_filled { String::new() } else { self.texts() };
        filled.replacen(ELSE, &instead, 1)
    }

    /// The texts that were typed, to be copied.
    fn texts(&self) -> String {
        let texts = self
            .fields
            .iter()
            .filter(|(name, value)| TEXTS.contains(&name.as_str()) && !value.trim().is_empty());
        let texts: Vec<String> =
            texts.map(|(_, value)| format!("<pre tabindex=\"0\">{}</pre>", escaped(value))).collect();
        if texts.is_empty() {
            return String::new();
        }
        format!("<div class=\"strip quiet\"><strong>This is what you typed</strong>{}</div>", texts.concat())
    }

    /// Whether a form is the one: it is sent to the same place, and is about the same thing.
    fn is_of(&self, form: &str) -> bool {
        let tag = form.split_inclusive('>').next().unwrap_or_default();
        let hidden = form.split("<input").skip(1).filter_map(|rest| rest.split('>').next());
        let mut hidden = hidden.filter(|tag| attribute(tag, "type") == Some("hidden"));
        attribute(tag, "action") == Some(&escaped(&self.action))
            && hidden.all(|tag| {
                let (name, value) = (attribute(tag, "name"), attribute(tag, "value"));
                let name = name.unwrap_or_default();
                WORDS.contains(&name) || self.has(name, value.unwrap_or_default())
            })
    }

    fn form(&self, form: &str) -> String {
        let (mut filled, mut rest, mut chosen) = (String::new(), form, None);
        while let Some(at) = rest.find('<') {
            let end = rest[at..].find('>').map_or(rest.len(), |end| at + end + 1);
            filled.push_str(&rest[..at]);
            let tag = &rest[at..end];
            rest = &rest[end..];
            let value = attribute(tag, "name").and_then(|name| self.get(name));
            match tag[1..].split(|byte: char| !byte.is_ascii_alphanumeric() && byte != '/').next() {
                Some("input") => filled.push_str(&self.input(tag, value)),
                Some("textarea") if value.is_some() => {
                    filled.push_str(&with(tag, "data-typed", ""));
                    // Browsers leave out a first line that is empty.
                    filled.push('\n');
                    filled.push_str(&escaped(value.unwrap_or_default()));
                    rest = rest.find("</textarea>").map_or("", |end| &rest[end..]);
                }
                Some("select") => {
                    chosen = value;
                    filled.push_str(tag);
                }
                Some("/select") => {
                    chosen = None;
                    filled.push_str(tag);
                }
                Some("option") if chosen.is_some() => {
                    let text = rest.split('<').next().unwrap_or_default();
                    let is_it =
                        attribute(tag, "value").unwrap_or(text) == escaped(chosen.unwrap_or_default());
                    filled.push_str(&marked(tag, "selected", is_it));
                }
                _ => filled.push_str(tag),
            }
        }
        filled.push_str(rest);
        filled
    }

    fn input(&self, tag: &str, value: Option<&str>) -> String {
        match (attribute(tag, "type").unwrap_or("text"), value) {
            ("radio" | "checkbox", _) => {
                let (name, own) = (attribute(tag, "name"), attribute(tag, "value"));
                marked(tag, "checked", self.has(name.unwrap_or_default(), own.unwrap_or("on")))
            }
            ("hidden" | "password" | "submit" | "button", _) | (_, None) => tag.to_owned(),
            (_, Some(value)) => with(&with(tag, "value", value), "data-typed", ""),
        }
    }
}

/// The value of a tag's attribute, as it stands there.
fn attribute<'a>(tag: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = tag.split_once(&format!(" {name}=\""))?;
    rest.split('"').next()
}

/// The tag with this value of an attribute.
fn with(tag: &str, name: &str, value: &str) -> String {
    let tag = match attribute(tag, name) {
        Some(own) => tag.replacen(&format!(" {name}=\"{own}\""), "", 1),
        None => tag.to_owned(),
    };
    format!("{} {name}=\"{}\">", tag.trim_end_matches('>'), escaped(value))
}

/// The tag with or without a mark that has no value.
fn marked(tag: &str, mark: &str, has: bool) -> String {
    let tag = tag.replacen(&format!(" {mark}"), "", 1);
    if has { format!("{} {mark}>", tag.trim_end_matches('>')) } else { tag }
}

/// A text as the templates write it.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => escaped.push_str("&#38;"),
            '<' => escaped.push_str("&#60;"),
            '>' => escaped.push_str("&#62;"),
            '"' => escaped.push_str("&#34;"),
            '\'' => escaped.push_str("&#39;"),
            char => escaped.push(char),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(action: &str, fields: &[(&str, &str)]) -> Typed {
        let fields = fields.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Typed { login: "ann".to_owned(), action: action.to_owned(), fields }
    }

    #[test]
    fn a_page_has_what_was_typed_in_the_form_that_was_refused_and_in_no_other() {
        let page = concat!(
            "<div data-typed-else></div>",
            r#"<details></details><details class="more"><form action="/a"><input type="hidden" name="word" value="w"><input type="hidden" name="call_id" value="1">"#,
            r#"<input name="reason" maxlength="300" value="old"><textarea name="text" rows="2">old</textarea>"#,
            r#"<select name="kind"><option value="x" selected>X</option><option>y</option></select>"#,
            r#"<input type="checkbox" name="all" value="true" checked><input type="radio" name="how" value="b"></form>"#,
            r#"<form action="/a"><input type="hidden" name="call_id" value="2"><input name="reason"></form>"#,
            r#"<form action="/b"><input name="reason"></form>"#,
        );
        let fields = [
            ("word", "v"),
            ("call_id", "1"),
            ("reason", "a \"b\""),
            ("text", "<1>\n2"),
            ("kind", "y"),
            ("how", "b"),
        ];
        let expected = concat!(
            r#"<details></details><details open class="more"><form action="/a"><input type="hidden" name="word" value="w"><input type="hidden" name="call_id" value="1">"#,
            r#"<input name="reason" maxlength="300" value="a &#34;b&#34;" data-typed="">"#,
            "<textarea name=\"text\" rows=\"2\" data-typed=\"\">\n&#60;1&#62;\n2</textarea>",
            r#"<select name="kind"><option value="x">X</option><option selected>y</option></select>"#,
            r#"<input type="checkbox" name="all" value="true"><input type="radio" name="how" value="b" checked></form>"#,
            r#"<form action="/a"><input type="hidden" name="call_id" value="2"><input name="reason"></form>"#,
            r#"<form action="/b"><input name="reason"></form>"#,
        );
        assert_eq!(typed("/a", &fields).fill(page), expected);
        let gone = typed("/gone", &fields).fill(page);
        assert!(
            gone.contains("This is what you typed")
                && gone.contains("<pre tabindex=\"0\">&#60;1&#62;\n2</pre>")
        );
    }

    #[test]
    fn fields_are_given_back_once_and_to_none_but_their_own_login() {
        let kept = Kept::default();
        let one = typed("/a", &[("text", "hello")]);
        let key = kept.keep(one.clone()).unwrap();
        assert_eq!(kept.take(&key, "bob"), None);
        assert_eq!(kept.take(&key, "ann"), Some(one));
        assert_eq!(kept.take(&key, "ann"), None);
        let large = "x".repeat(BYTES - 10);
        assert!(kept.keep(typed("/a", &[("text", &large), ("more", &large)])).is_none());
        let first = kept.keep(typed("/a", &[("text", "hello")])).unwrap();
        let second = kept.keep(typed("/a", &[("text", &large)])).unwrap();
        assert!(kept.take(&first, "ann").is_none() && kept.take(&second, "ann").is_some());
    }
}
