//! What `read_output` and `read_attachment` share: both read a text in parts of limited size.

use super::ToolError;
use serde_json::{Value, json};
use std::fmt::Display;
use wakeful_store::outputs::OutputSlice;

/// Bytes read if the model names no amount.
pub(super) const USUAL_BYTES: usize = 8 * 1024;
/// Maximum number of bytes read at once. A larger output would itself be shortened.
pub(super) const MOST_BYTES: usize = 12 * 1024;

/// Returns the JSON schema of a tool that takes `name`, `offset` and `bytes`. `description` is that of `name`.
pub(super) fn parameters(name: &str, description: &str) -> Value {
    json!({
        "type": "object",
        "properties": {
            name: {
                "type": "string",
                "description": description,
                "minLength": 1,
                "maxLength": 256,
            },
            "offset": {
                "type": "integer",
                "description": "The byte to begin at. 0 if left out.",
                "minimum": 0,
                "maximum": i32::MAX,
            },
            "bytes": {
                "type": "integer",
                "description": format!("How many bytes to read. {USUAL_BYTES} if left out."),
                "minimum": 1,
                "maximum": MOST_BYTES,
            },
        },
        "required": [name],
        "additionalProperties": false,
    })
}

/// Returns the number of bytes to read for the argument `bytes`.
pub(super) fn amount(bytes: Option<usize>) -> usize {
    bytes.unwrap_or(USUAL_BYTES).clamp(1, MOST_BYTES)
}

/// Refuses an offset that is not below the size `whole` of `what`.
pub(super) fn check_offset(what: impl Display, offset: usize, whole: usize) -> Result<(), ToolError> {
    if offset >= whole {
        return Err(ToolError::new(format!(
            "{what} has {whole} bytes, so nothing is at {offset}. Begin below that."
        )));
    }
    Ok(())
}

/// Formats a part of a text of `whole` bytes, with a last line that says which part it is. `bytes` begins that line.
pub(super) fn shown(part: &OutputSlice, bytes: &str, whole: usize) -> String {
    let end = part.offset + part.text.len();
    let rest = if end < whole { format!("; read on at offset {end}") } else { String::new() };
    format!("{}\n\n[{bytes} {} to {end} of {whole}{rest}]", part.text, part.offset)
}
