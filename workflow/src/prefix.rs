//! The pinned prefix: the beginning of every request of a session, fixed when the session is created.
//!
//! Storing tool names alone is not enough: a deploy that changes a tool's schema would change the next request of every open
//! session. The provider's prompt cache would miss, a replay would differ, and models that sign their thinking would refuse
//! the request. So the rendered system prompt and the tools' definitions are stored as a blob, which sessions with the same
//! prefix share.
#![doc = include_str!("prefix.md")]

use crate::agent::{ToolDefinition, Tools};
use crate::blob::Blob;
use crate::record::Role;
use crate::seed::Seed;
use serde::{Deserialize, Serialize};

/// The rendered system prompt and the tool definitions that the model gets.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Prefix {
    pub system: String,
    /// Sorted by name.
    pub tools: Tools,
}

impl Prefix {
    /// Builds the prefix of a session that begins with `seeds` and offers `tools`.
    pub fn new(seeds: &[Seed], mut tools: Vec<ToolDefinition>) -> Prefix {
        tools.sort_by(|a, b| a.name.cmp(&b.name));
        Prefix { system: system_of(seeds), tools: tools.into() }
    }

    /// Returns the prefix as a blob. Equal prefixes give equal bytes: fields keep their order, keys of
    /// schemas are sorted.
    pub fn blob(&self) -> Blob {
        Blob::of(serde_json::to_vec(self).expect("text and JSON values serialise"))
    }

    /// Reads what [`Prefix::blob`] wrote under the name `sha256`.
    ///
    /// # Errors
    /// An error text, if the bytes do not match the hash or are not a prefix.
    pub fn read(sha256: &str, bytes: &[u8]) -> Result<Prefix, String> {
        if Blob::of(bytes.to_vec()).sha256 != sha256 {
            return Err(format!("the bytes stored as {sha256} have another hash"));
        }
        serde_json::from_slice(bytes).map_err(|error| error.to_string())
    }

    /// The definition of the tool called `name`.
    pub fn tool(&self, name: &str) -> Option<&ToolDefinition> {
        self.tools.iter().find(|tool| tool.name == name)
    }
}

/// Joins the system messages among `seeds` to one system prompt.
pub(crate) fn system_of(seeds: &[Seed]) -> String {
    let system: Vec<&str> =
        seeds.iter().filter(|seed| seed.role == Role::System).map(|seed| seed.content.as_str()).collect();
    system.join("\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::effect::Effect;
    use serde_json::json;

    fn tool(name: &str) -> ToolDefinition {
        ToolDefinition {
            name: name.into(),
            description: "d".into(),
            parameters: json!({"type": "object", "properties": {"b": {"type": "number"}, "a": {}}}),
            effect: Effect::Pure,
        }
    }

    fn seed(role: Role, content: &str) -> Seed {
        Seed { role, content: content.into(), is_new: true }
    }

    #[test]
    fn the_order_of_tools_makes_no_difference_and_the_bytes_read_back() {
        let seeds = [seed(Role::System, "Be brief."), seed(Role::User, "earlier")];
        let prefix = Prefix::new(&seeds, vec![tool("b"), tool("a")]);
        assert_eq!(prefix, Prefix::new(&seeds, vec![tool("a"), tool("b")]));
        assert_eq!(prefix.system, "Be brief.");
        let blob = prefix.blob();
        assert_eq!(Prefix::read(&blob.sha256, &blob.bytes).unwrap(), prefix);
    }

    #[test]
    fn other_bytes_under_its_name_are_refused() {
        let blob = Prefix::default().blob();
        let other = Prefix { system: "x".into(), tools: Tools::default() }.blob();
        assert!(Prefix::read(&blob.sha256, &other.bytes).unwrap_err().contains("another hash"));
    }
}
