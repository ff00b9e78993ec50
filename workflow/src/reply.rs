//! Outgoing replies: turns what a session says into deliveries on its route. One commit stores both.

use crate::derive::NewDelivery;
use crate::policy::ReplyRoute;
use serde_json::json;

/// The deliveries of `text`, in order. There are several if the route limits the length. `source` names the
/// reply and is the same in every attempt, so each part is sent once.
///
/// The content of each is `{"type": "reply", "text", "to", "part", "parts"}`, where `to` is the route's own address.
pub fn outgoing(route: &ReplyRoute, source: &str, text: &str) -> Vec<NewDelivery> {
    let parts = parts(text, route.split_at.unwrap_or(usize::MAX));
    let count = parts.len();
    parts
        .into_iter()
        .zip(1..)
        .map(|(text, part)| NewDelivery {
            source_key: format!("{source}/{part}"),
            channel: route.channel.clone(),
            content: json!({"type": "reply", "text": text, "to": route.to, "part": part, "parts": count}),
        })
        .collect()
}

/// `text` in parts of at most `limit` UTF-16 units. Cuts at the end of a paragraph in the second half of a
/// part, otherwise at the end of a line there, otherwise at a space, otherwise between two characters. Only
/// white space at a cut is lost, and no part is blank.
pub fn parts(text: &str, limit: usize) -> Vec<String> {
    let limit = limit.max(2);
    let mut rest = text.trim();
    let mut parts = Vec::new();
    while !rest.is_empty() {
        let end = end_within(rest, limit);
        if end == rest.len() {
            parts.push(rest.to_owned());
            break;
        }
        let fits = &rest[..end];
        let cut = [("\n\n", end / 2), ("\n", end / 2), (" ", 1)]
            .into_iter()
            .filter_map(|(boundary, least)| fits.rfind(boundary).filter(|cut| *cut >= least))
            .next()
            .filter(|cut| !fits[..*cut].trim().is_empty())
            .unwrap_or(end);
        parts.push(rest[..cut].trim_end().to_owned());
        rest = rest[cut..].trim_start();
    }
    parts
}

/// The byte offset where the first `limit` UTF-16 units of `text` end, between two characters.
fn end_within(text: &str, limit: usize) -> usize {
    let mut units = 0;
    for (at, character) in text.char_indices() {
        units += character.len_utf16();
        if units > limit {
            return at;
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_long_text_is_cut_where_a_reader_would_cut_it() {
        assert_eq!(parts("one two three", 100), ["one two three"]);
        assert_eq!(parts("one two three", 8), ["one two", "three"]);
        assert_eq!(parts("first\n\nsecond third", 16), ["first\n\nsecond", "third"]);
        assert_eq!(parts("a paragraph\n\nand more", 14), ["a paragraph", "and more"]);
        assert_eq!(parts("abcdefgh", 3), ["abc", "def", "gh"]);
        assert_eq!(parts(" \n ", 3), Vec::<String>::new());
        assert_eq!(parts("\u{1f600}\u{1f600}", 3), ["\u{1f600}", "\u{1f600}"]);
    }

    #[test]
    fn every_part_has_a_key_of_its_own() {
        let route = ReplyRoute { channel: "slack".into(), to: json!({"channel": "C1"}), split_at: Some(4) };
        let out = outgoing(&route, "reply/7", "one two");
        assert_eq!(out.len(), 2);
        assert_eq!((out[0].source_key.as_str(), out[1].source_key.as_str()), ("reply/7/1", "reply/7/2"));
        assert_eq!(
            out[1].content,
            json!({"type": "reply", "text": "two", "to": {"channel": "C1"}, "part": 2, "parts": 2})
        );
    }

    proptest! {
        #[test]
        fn nothing_is_lost_and_nothing_is_too_long(text in "[a-z\u{1f600} \n]{0,200}", limit in 2_usize..40) {
            let parts = parts(&text, limit);
            for part in &parts {
                prop_assert!(part.encode_utf16().count() <= limit);
                prop_assert!(!part.trim().is_empty());
            }
            let said = |text: &str| text.chars().filter(|c| !c.is_whitespace()).collect::<String>();
            prop_assert_eq!(said(&parts.concat()), said(&text));
        }
    }
}
