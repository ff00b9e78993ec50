//! A part of a message, read in one pass.
//!
//! What serde derives for a tagged enum copies each block into a tree before it looks at the tag, because the tag may come
//! last. We write it first, so a block of ours is read straight into its fields. Hydration reads all messages of a session.
//! A block whose tag comes later is read the slow way.

use crate::id::CallId;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fmt;

/// One part of a message. The order of blocks must not change: providers reject signed thinking at another
/// position.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Block {
    /// Plain text.
    Text {
        /// May be empty.
        text: String,
    },
    /// A call that the model asks for.
    ToolCall(ToolCall),
    /// The result of such a call.
    ToolResult(ToolResult),
    /// A block of one provider (signed thinking, server tool use): sent back verbatim to that provider and dropped for any
    /// other. `provider` is the part of the model's name before the slash.
    Provider {
        /// The provider that sent the block.
        provider: String,
        /// The block as the provider sent it.
        raw: Value,
    },
}

/// A tool call that the model asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ToolCall {
    /// Unique within the session.
    pub call_id: CallId,
    /// The tool's name, as the model wrote it.
    pub name: String,
    /// Always an object. Empty if the model's text was not a JSON object. Then [`ToolCall::malformed`] has
    /// that text.
    pub arguments: Value,
    /// The raw argument text if it did not parse. The call then never runs and gets an error as its result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub malformed: Option<String>,
}

/// The result of one tool call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ToolResult {
    /// The id of the call whose result it is.
    pub call_id: CallId,
    /// The tool's name.
    pub name: String,
    /// Text for the model. Cut in its middle if the output is long; [`ToolResult::output`] points at the whole.
    pub content: String,
    /// The call failed, and `content` says why.
    #[serde(default)]
    pub is_error: bool,
    /// An object with a `type`, for [`mod@crate::derive`] and for operators. Never sent to the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub details: Option<Value>,
    /// Where the whole output is, when `content` is only its beginning and its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<OutputPointer>,
}

/// The blob that holds a tool's whole output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct OutputPointer {
    /// SHA-256 of the output, in lower-case hex.
    pub sha256: String,
    /// Size of the output.
    pub bytes: usize,
}

/// The name of the tag.
const TYPE: &str = "type";

/// The value of the tag.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Type {
    Text,
    ToolCall,
    ToolResult,
    Provider,
}

#[derive(Deserialize)]
struct Text {
    text: String,
}

#[derive(Deserialize)]
struct Provider {
    provider: String,
    raw: Value,
}

impl Type {
    /// Reads the other fields.
    fn fields<'de, D: Deserializer<'de>>(self, fields: D) -> Result<Block, D::Error> {
        Ok(match self {
            Type::Text => {
                let Text { text } = Text::deserialize(fields)?;
                Block::Text { text }
            }
            Type::ToolCall => Block::ToolCall(ToolCall::deserialize(fields)?),
            Type::ToolResult => Block::ToolResult(ToolResult::deserialize(fields)?),
            Type::Provider => {
                let Provider { provider, raw } = Provider::deserialize(fields)?;
                Block::Provider { provider, raw }
            }
        })
    }
}

struct BlockVisitor;

impl<'de> Visitor<'de> for BlockVisitor {
    type Value = Block;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object with a `type`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Block, A::Error> {
        let mut before = Map::new();
        while let Some(name) = map.next_key::<Name>()? {
            match name {
                Name::Type if before.is_empty() => {
                    return map.next_value::<Type>()?.fields(MapAccessDeserializer::new(map));
                }
                Name::Type => {
                    let of = map.next_value::<Type>()?;
                    while let Some((name, value)) = map.next_entry()? {
                        before.insert(name, value);
                    }
                    return of.fields(Value::Object(before)).map_err(A::Error::custom);
                }
                Name::Other(name) => {
                    before.insert(name, map.next_value()?);
                }
            }
        }
        Err(A::Error::missing_field(TYPE))
    }
}

/// A key. The tag's is not copied.
enum Name {
    Type,
    Other(String),
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Name, D::Error> {
        struct NameVisitor;

        impl Visitor<'_> for NameVisitor {
            type Value = Name;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a name")
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<Name, E> {
                Ok(if name == TYPE { Name::Type } else { Name::Other(name.to_owned()) })
            }
        }

        deserializer.deserialize_str(NameVisitor)
    }
}

impl<'de> Deserialize<'de> for Block {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Block, D::Error> {
        deserializer.deserialize_map(BlockVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{from_str, from_value, json};

    fn blocks() -> [Block; 4] {
        [
            Block::Text { text: "a table\n\"for two\"".into() },
            Block::ToolCall(ToolCall {
                call_id: "call_1".into(),
                name: "reserve".into(),
                arguments: json!({"type": "dinner", "people": 2, "price": 0.1}),
                malformed: Some("{".into()),
            }),
            Block::ToolResult(ToolResult {
                call_id: "call_1".into(),
                name: "reserve".into(),
                content: "done".into(),
                is_error: true,
                details: Some(json!({"type": "reserved"})),
                output: Some(OutputPointer { sha256: "00".into(), bytes: 3 }),
            }),
            Block::Provider {
                provider: "anthropic".into(),
                raw: json!({"type": "thinking", "signature": "x"}),
            },
        ]
    }

    #[test]
    fn a_block_is_what_was_written_wherever_its_type_stands() {
        for block in blocks() {
            let text = serde_json::to_string(&block).unwrap();
            assert!(text.starts_with(r#"{"type":"#), "{text} is read the slow way");
            assert_eq!(from_str::<Block>(&text).unwrap(), block);
            let Value::Object(fields) = from_str(&text).unwrap() else { panic!("{text} is no object") };
            assert_eq!(from_value::<Block>(Value::Object(fields.clone())).unwrap(), block);
            // The tag in each place.
            for at in 0..fields.len() {
                let mut names: Vec<_> = fields.keys().filter(|name| *name != "type").collect();
                let of = "type".to_owned();
                names.insert(at, &of);
                let fields: Vec<_> =
                    names.into_iter().map(|name| format!("{}:{}", json!(name), fields[name])).collect();
                let text = format!("{{\"later\":[1],{}}}", fields.join(","));
                assert_eq!(from_str::<Block>(&text).unwrap(), block, "{text}");
                assert_eq!(from_str::<Block>(&format!("{{{}}}", fields.join(","))).unwrap(), block);
            }
        }
    }

    #[test]
    fn what_is_no_block_is_named() {
        let wrong = [
            ("{}", "missing field `type`"),
            (r#"{"text":"a"}"#, "missing field `type`"),
            (r#"{"type":"text"}"#, "missing field `text`"),
            (r#"{"a":1,"type":"text"}"#, "missing field `text`"),
            (r#"{"type":"song","text":"a"}"#, "unknown variant `song`"),
            (r#"{"type":"text","text":1}"#, "invalid type: integer `1`, expected a string"),
            ("[]", "expected an object with a `type`"),
        ];
        for (text, says) in wrong {
            let error = from_str::<Block>(text).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
