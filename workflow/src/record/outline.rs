//! The size of a message, without its text.

use super::block::{Block, OutputPointer, ToolResult, Type};
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::borrow::Cow;
use std::fmt;

/// Name of the tool that reads trimmed results. Not every agent has it.
pub(crate) const READ_OUTPUT: &str = "read_output";

/// A result up to this size is never trimmed: the placeholder would save too little.
const WORTH_TRIMMING_BYTES: usize = 512;

/// The sizes of one message, in bytes of what the model sees of it: of its texts, its calls' names and arguments, and a
/// provider's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outline {
    /// All of it.
    pub bytes: usize,
    /// The results that may be trimmed, which are part of `bytes`.
    pub trimmable_bytes: usize,
    /// The placeholders in their stead, for agents that can read a result again, and for others.
    pub placeholder_bytes: [usize; 2],
}

impl Outline {
    /// The size with placeholders for the results that may be trimmed.
    pub fn trimmed_bytes(&self, readable: bool) -> usize {
        self.bytes - self.trimmable_bytes + self.placeholder_bytes[usize::from(!readable)]
    }

    pub(super) fn of(blocks: &[Block]) -> Outline {
        let mut outline = Outline::default();
        for block in blocks {
            match block {
                Block::Text { text } => outline.bytes += text.len(),
                Block::ToolCall(call) => {
                    outline.bytes += call.name.len()
                        + call
                            .malformed
                            .as_ref()
                            .map_or_else(|| call.arguments.to_string().len(), String::len);
                }
                Block::ToolResult(result) => {
                    let ToolResult { call_id, content, is_error, output, .. } = result;
                    outline.result(call_id.as_str(), content.len(), *is_error, output.as_ref());
                }
                Block::Provider { raw, .. } => outline.bytes += raw.to_string().len(),
            }
        }
        outline
    }

    fn result(&mut self, call_id: &str, bytes: usize, is_error: bool, output: Option<&OutputPointer>) {
        self.bytes += bytes;
        if may_trim(is_error, bytes) {
            self.trimmable_bytes += bytes;
            let whole = output.map_or(bytes, |output| output.bytes);
            for (size, readable) in self.placeholder_bytes.iter_mut().zip([true, false]) {
                *size += placeholder(call_id, whole, readable).len();
            }
        }
    }
}

/// Errors stay, so that the model does not repeat the mistake.
fn may_trim(is_error: bool, bytes: usize) -> bool {
    !is_error && bytes > WORTH_TRIMMING_BYTES
}

/// The line in the place of a result of `bytes`. It says how to get the result again.
fn placeholder(call_id: &str, bytes: usize, readable: bool) -> String {
    if readable {
        return format!(
            "[The result of {bytes} bytes is not shown any more. Read it again with {READ_OUTPUT} and the call_id {call_id:?}.]"
        );
    }
    format!("[The result of {bytes} bytes is not shown any more. Call the tool again if you need it.]")
}

impl ToolResult {
    /// The result with a placeholder for its content. `None`: it is not trimmed.
    pub(crate) fn trimmed(&self, readable: bool) -> Option<ToolResult> {
        let ToolResult { call_id, name, content, is_error, details, output } = self;
        // Everything but the long content is copied.
        may_trim(*is_error, content.len()).then(|| ToolResult {
            call_id: call_id.clone(),
            name: name.clone(),
            content: placeholder(
                call_id.as_str(),
                output.as_ref().map_or(content.len(), |output| output.bytes),
                readable,
            ),
            is_error: *is_error,
            details: details.clone(),
            output: output.clone(),
        })
    }
}

/// A message that is read for its [`Outline`] alone. Its texts are counted where they lie, and not copied.
#[derive(Debug, Default)]
pub struct Outlined(pub(super) Outline);

/// A block with the fields of all types.
#[derive(Deserialize)]
struct Fields<'a> {
    #[serde(rename = "type")]
    of: Type,
    text: Option<Length>,
    content: Option<Length>,
    #[serde(borrow)]
    call_id: Option<Cow<'a, str>>,
    #[serde(default)]
    is_error: bool,
    output: Option<OutputPointer>,
    name: Option<Length>,
    arguments: Option<Value>,
    malformed: Option<Length>,
    raw: Option<Value>,
}

impl<'de> Deserialize<'de> for Outlined {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Outlined, D::Error> {
        let mut outline = Outline::default();
        for fields in Vec::<Fields<'de>>::deserialize(deserializer)? {
            let missing = D::Error::missing_field;
            match fields.of {
                Type::Text => outline.bytes += fields.text.ok_or_else(|| missing("text"))?.0,
                Type::ToolCall => {
                    outline.bytes += fields.name.ok_or_else(|| missing("name"))?.0;
                    let arguments = fields.arguments.ok_or_else(|| missing("arguments"))?;
                    outline.bytes +=
                        fields.malformed.map_or_else(|| arguments.to_string().len(), |raw| raw.0);
                }
                Type::ToolResult => {
                    let call_id = fields.call_id.ok_or_else(|| missing("call_id"))?;
                    let bytes = fields.content.ok_or_else(|| missing("content"))?.0;
                    outline.result(&call_id, bytes, fields.is_error, fields.output.as_ref());
                }
                Type::Provider => {
                    outline.bytes += fields.raw.ok_or_else(|| missing("raw"))?.to_string().len();
                }
            }
        }
        Ok(Outlined(outline))
    }
}

/// The bytes of a text.
struct Length(usize);

impl<'de> Deserialize<'de> for Length {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Length, D::Error> {
        struct LengthVisitor;

        impl Visitor<'_> for LengthVisitor {
            type Value = Length;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Length, E> {
                Ok(Length(text.len()))
            }
        }

        deserializer.deserialize_str(LengthVisitor)
    }
}
