//! The blocks of one message, which all copies share.

use super::block::Block;
use super::outline::{Outline, Outlined};
use serde::{Deserialize, Serialize, Serializer};
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

/// The blocks of one message. Copies share them, because the context of each model call holds all messages of its
/// session. They share the size too: each call weighs all messages, and a message is counted once.
#[derive(Clone, Debug, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(with = "Vec<Block>"))]
#[serde(from = "Vec<Block>")]
pub struct Content(Arc<Counted>);

#[derive(Clone, Debug, Default)]
struct Counted {
    blocks: Vec<Block>,
    outline: OnceLock<Outline>,
}

impl Content {
    /// Returns whether both are copies of one message. `false` also for equal messages that were read or made separately.
    pub fn is_shared_with(&self, other: &Content) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The blocks, to change them. Other copies keep theirs.
    pub fn to_mut(&mut self) -> &mut Vec<Block> {
        let counted = Arc::make_mut(&mut self.0);
        counted.outline = OnceLock::new();
        &mut counted.blocks
    }

    /// What the message weighs. It is counted once.
    pub fn outline(&self) -> &Outline {
        self.0.outline.get_or_init(|| Outline::of(self))
    }

    /// The bytes of what the model sees of the message.
    pub fn bytes(&self) -> usize {
        self.outline().bytes
    }
}

impl From<Outlined> for Content {
    /// A message without blocks, which weighs what the other one says.
    fn from(Outlined(outline): Outlined) -> Content {
        Content(Arc::new(Counted { blocks: Vec::new(), outline: outline.into() }))
    }
}

impl Deref for Content {
    type Target = [Block];

    fn deref(&self) -> &[Block] {
        &self.0.blocks
    }
}

impl From<Vec<Block>> for Content {
    fn from(blocks: Vec<Block>) -> Content {
        Content(Arc::new(Counted { blocks, outline: OnceLock::new() }))
    }
}

impl FromIterator<Block> for Content {
    fn from_iter<I: IntoIterator<Item = Block>>(blocks: I) -> Content {
        blocks.into_iter().collect::<Vec<_>>().into()
    }
}

impl<'a> IntoIterator for &'a Content {
    type Item = &'a Block;
    type IntoIter = std::slice::Iter<'a, Block>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl PartialEq for Content {
    fn eq(&self, other: &Content) -> bool {
        // Messages without blocks may be outlines.
        self.is_shared_with(other)
            || **self == **other && (!self.is_empty() || self.outline() == other.outline())
    }
}

impl<const N: usize> PartialEq<[Block; N]> for Content {
    fn eq(&self, other: &[Block; N]) -> bool {
        **self == *other
    }
}

impl Serialize for Content {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.blocks.serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{OutputPointer, ToolCall, ToolResult};
    use proptest::prelude::*;
    use serde_json::json;

    fn block() -> impl Strategy<Value = Block> {
        let id = "[a-z_\"\\\\\u{e9}]{1,9}";
        prop_oneof![
            any::<String>().prop_map(|text| Block::Text { text }),
            (id, any::<String>(), any::<f64>(), any::<Option<String>>()).prop_map(
                |(id, name, number, malformed)| {
                    let arguments = json!({"type": "text", "text": name, "number": number, "none": null});
                    Block::ToolCall(ToolCall { call_id: id.as_str().into(), name, arguments, malformed })
                }
            ),
            (id, 0..1500_usize, any::<bool>(), any::<Option<u32>>()).prop_map(
                |(id, bytes, is_error, whole)| {
                    let output =
                        whole.map(|bytes| OutputPointer { sha256: "00".into(), bytes: bytes as usize });
                    Block::ToolResult(ToolResult {
                        call_id: id.as_str().into(),
                        name: "tool".into(),
                        content: "\n\u{e9}x".repeat(bytes / 4),
                        is_error,
                        details: Some(json!({"content": 1})),
                        output,
                    })
                }
            ),
            any::<String>()
                .prop_map(|text| Block::Provider { provider: "p".into(), raw: json!({"text": text}) }),
        ]
    }

    proptest! {
        #[test]
        fn a_message_that_is_read_for_its_sizes_weighs_what_it_says(
            blocks in prop::collection::vec(block(), 0..5)
        ) {
            let text = serde_json::to_string(&blocks).unwrap();
            let outlined: Content = serde_json::from_str::<Outlined>(&text).unwrap().into();
            let content = Content::from(blocks);
            prop_assert_eq!(outlined.outline(), content.outline());
            for readable in [true, false] {
                let trimmed: Content = content
                    .iter()
                    .map(|block| match block {
                        Block::ToolResult(result) => {
                            Block::ToolResult(result.trimmed(readable).unwrap_or_else(|| result.clone()))
                        }
                        other => other.clone(),
                    })
                    .collect();
                prop_assert_eq!(content.outline().trimmed_bytes(readable), trimmed.bytes());
            }
        }
    }

    #[test]
    fn a_copy_that_was_changed_is_counted_again_and_the_other_keeps_its_size() {
        let first: Content = vec![Block::Text { text: "four".into() }].into();
        assert_eq!(first.bytes(), 4);
        let mut copy = first.clone();
        copy.to_mut().push(Block::Text { text: "five5".into() });
        assert_eq!((copy.bytes(), first.bytes()), (9, 4));
        copy.to_mut().clear();
        assert_eq!((copy.bytes(), first.bytes()), (0, 4));
    }
}
