//! Says in plain words why a value could not be read. The parsers' own texts speak of Rust's types.

/// A time, as an example.
const A_TIME: &str = "a time such as 2026-11-23T08:00:00Z";

/// What serde says of the value at `path`, in plain words. Without a path it says it of the whole.
pub fn reason(path: &str, said: &str) -> String {
    let (said, place) = match said.rsplit_once(" at line ") {
        Some((said, place)) => (said, format!(", at line {place}")),
        None => (said, String::new()),
    };
    let what = if matches!(path, "" | ".") { "it".to_owned() } else { format!("`{path}`") };
    let named = |what: &str| said.strip_prefix(what).and_then(|rest| rest.split_once('`'));
    let text = if let Some((name, rest)) = named("unknown field `") {
        let known =
            rest.trim_start_matches(", expected ").trim_start_matches(", ").trim_start_matches("one of ");
        format!("there is no `{name}`; there is {known}")
    } else if let Some((name, _)) = named("missing field `") {
        format!("`{name}` is missing")
    } else if let Some((name, _)) = named("duplicate field `") {
        format!("`{name}` is given more than once")
    } else if let Some((word, rest)) = named("unknown variant `") {
        format!("{what} is `{word}`: it must be {}", rest.trim_start_matches(", expected "))
    } else if let Some((found, wanted)) = said
        .strip_prefix("invalid ")
        .and_then(|rest| rest.split_once(": "))
        .and_then(|(_, rest)| rest.split_once(", expected "))
    {
        format!("{what} is {}: it must be {}", found_in_words(found), wanted_in_words(wanted))
    } else if said.starts_with("data did not match any variant") {
        format!("{what} has none of the forms that it may have")
    } else {
        match value(said) {
            Some(wanted) => format!("{what} must be {wanted}"),
            None if what == "it" => said.to_owned(),
            None => format!("{what}: {said}"),
        }
    };
    text + &place
}

/// What a text must be, if a parser of numbers, booleans or times refused it with the words `said`.
pub fn value(said: &str) -> Option<&'static str> {
    let starts = |beginnings: &[&str]| beginnings.iter().any(|beginning| said.starts_with(beginning));
    if starts(&["invalid digit", "cannot parse integer", "number too"]) {
        Some("a whole number that fits")
    } else if starts(&["invalid float", "cannot parse float"]) {
        Some("a number such as 0.25")
    } else if said.contains("`true` or `false`") {
        Some("`true` or `false`")
    } else if starts(&["input ", "premature end of input", "trailing input", "no possible date"]) {
        Some(A_TIME)
    } else {
        None
    }
}

fn found_in_words(found: &str) -> String {
    match found {
        "map" => "an object".to_owned(),
        "sequence" => "a list".to_owned(),
        _ => {
            let kinds = ["integer ", "floating point ", "boolean ", "string "];
            let bare = kinds.iter().find_map(|kind| found.strip_prefix(kind)).unwrap_or(found);
            bare.trim_matches('`').to_owned()
        }
    }
}

fn wanted_in_words(wanted: &str) -> &str {
    match wanted {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number, 0 or more, that fits",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number that fits",
        "f32" | "f64" => "a number such as 0.25",
        "a boolean" => "`true` or `false`",
        "a sequence" => "a list",
        "a map" | "map" => "an object",
        wanted if wanted.starts_with("struct ") || wanted.starts_with("internally tagged enum ") => {
            "an object"
        }
        wanted if wanted.contains("date and time") => A_TIME,
        wanted => wanted,
    }
}

#[cfg(test)]
mod tests {
    use super::reason;

    #[test]
    fn what_a_parser_says_is_told_in_plain_words() {
        for (path, said, told) in [
            (
                "for_s",
                "invalid value: integer `-5`, expected u64 at line 1 column 12",
                "`for_s` is -5: it must be a whole number, 0 or more, that fits, at line 1 column 12",
            ),
            ("text", "invalid type: integer `5`, expected a string", "`text` is 5: it must be a string"),
            ("text", "invalid type: map, expected a string", "`text` is an object: it must be a string"),
            (
                "verb",
                "unknown variant `eat`, expected one of `retry`, `cancel`",
                "`verb` is `eat`: it must be one of `retry`, `cancel`",
            ),
            (".", "missing field `text`", "`text` is missing"),
            (
                ".",
                "unknown field `txt`, expected `text` or `agent`",
                "there is no `txt`; there is `text` or `agent`",
            ),
            (
                "since",
                "input contains invalid characters",
                "`since` must be a time such as 2026-11-23T08:00:00Z",
            ),
            (
                ".",
                "EOF while parsing a value at line 1 column 8",
                "EOF while parsing a value, at line 1 column 8",
            ),
        ] {
            assert_eq!(reason(path, said), told);
        }
    }
}
