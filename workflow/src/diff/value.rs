//! Compares two JSON values path by path.

use super::ids::Ids;
use super::words::{Budget, Piece};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of paths listed per value. Further differences are left out.
const LISTED: usize = 100;
/// Values nested deeper are compared whole.
const DEPTH: usize = 64;
/// Texts up to this many bytes are not compared word by word.
const GLANCE: usize = 40;

/// Where two values differ.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ValueDifference {
    /// A JSON pointer (RFC 6901); empty for the whole.
    pub path: String,
    /// `None` where there is nothing at that path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub right: Option<Value>,
    /// Two longer texts compared word by word.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub words: Vec<Piece>,
}

/// Compares the values of two sides.
pub(super) struct Values<'b, 'a> {
    pub left: &'b Ids<'a>,
    pub right: &'b Ids<'a>,
    pub budget: &'b mut Budget,
    pub of: ValueKind,
}

/// What the values are.
#[derive(Clone, Copy, Debug)]
pub(super) enum ValueKind {
    /// The top-level keys may end in a call id.
    State,
    Other,
}

impl Values<'_, '_> {
    /// Where `left` and `right` differ, by path.
    pub fn differences(mut self, left: &Value, right: &Value) -> Vec<ValueDifference> {
        let mut found = Vec::new();
        self.walk(&mut String::new(), 0, Some(left), Some(right), &mut found);
        found
    }

    fn walk<'v>(
        &mut self,
        path: &mut String,
        depth: usize,
        left: Option<&'v Value>,
        right: Option<&'v Value>,
        found: &mut Vec<ValueDifference>,
    ) {
        if found.len() >= LISTED {
            return;
        }
        match (left, right) {
            (Some(Value::Object(one)), Some(Value::Object(other))) if depth < DEPTH => {
                let (one, other) = (self.read(one, depth, self.left), self.read(other, depth, self.right));
                let keys: BTreeSet<&String> = one.keys().chain(other.keys()).collect();
                for key in keys {
                    let (there, here) = (one.get(key), other.get(key));
                    // Show the key as it is spelled if both sides spell it the same, or if only one side has
                    // it.
                    let name = match (there, here) {
                        (Some((name, _)), Some((beside, _))) if name != beside => key.as_str(),
                        (Some((name, _)), _) | (None, Some((name, _))) => name,
                        (None, None) => key.as_str(),
                    };
                    let value = |of: Option<&(&String, &'v Value)>| of.map(|(_, value)| *value);
                    self.step(path, &escaped(name), depth, value(there), value(here), found);
                }
            }
            (Some(Value::Array(one)), Some(Value::Array(other))) if depth < DEPTH => {
                for at in 0..one.len().max(other.len()) {
                    self.step(path, &at.to_string(), depth, one.get(at), other.get(at), found);
                    if found.len() >= LISTED {
                        return;
                    }
                }
            }
            (left, right) => {
                let same = match (left, right) {
                    (Some(one), Some(other)) => self.left.value(one) == self.right.value(other),
                    (one, other) => one.is_none() && other.is_none(),
                };
                if !same {
                    let words = match (left, right) {
                        (Some(Value::String(one)), Some(Value::String(other)))
                            if one.len().max(other.len()) > GLANCE =>
                        {
                            self.budget.words((one, self.left), (other, self.right))
                        }
                        (_, _) => Vec::new(),
                    };
                    found.push(ValueDifference {
                        path: path.clone(),
                        left: left.cloned(),
                        right: right.cloned(),
                        words,
                    });
                }
            }
        }
    }

    fn step(
        &mut self,
        path: &mut String,
        name: &str,
        depth: usize,
        left: Option<&Value>,
        right: Option<&Value>,
        found: &mut Vec<ValueDifference>,
    ) {
        let before = path.len();
        path.push('/');
        path.push_str(name);
        self.walk(path, depth + 1, left, right, found);
        path.truncate(before);
    }

    /// The map's entries by key, with the ids in the keys replaced by their meaning.
    fn read<'m>(
        &self,
        map: &'m Map<String, Value>,
        depth: usize,
        ids: &Ids<'_>,
    ) -> BTreeMap<String, (&'m String, &'m Value)> {
        let read = |key: &str| match self.of {
            ValueKind::State if depth == 0 => ids.key(key),
            ValueKind::State | ValueKind::Other => ids.text(key).into_owned(),
        };
        map.iter().map(|(key, value)| (read(key), (key, value))).collect()
    }
}

/// Escapes one name of a JSON pointer, and removes the mark of replaced ids.
fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1").replace('\u{1}', "")
}
