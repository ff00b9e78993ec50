//! Makes hostile text harmless in several lines and in JSON. [`wakeful_engine::printable`] has the rules.

use serde::Serialize;

pub(super) use wakeful_engine::printable::{json_text, printable};

/// Like [`printable`], but keeps newlines and turns tabs into spaces.
pub(super) fn printable_lines(text: &str) -> String {
    let lines = text.split('\n').map(|line| {
        let line = line.strip_suffix('\r').unwrap_or(line).replace('\t', "    ");
        printable(&line).into_owned()
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Serializes `item` as JSON whose strings hold no character that acts on the terminal.
pub(super) fn json<T: Serialize>(item: &T, pretty: bool) -> Result<String, serde_json::Error> {
    let text = if pretty { serde_json::to_string_pretty(item)? } else { serde_json::to_string(item)? };
    Ok(json_text(text))
}
