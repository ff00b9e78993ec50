//! The settings as written, before they are interpreted.
//!
//! This module lays the environment over the file. Every value remembers its origin, so that a problem can
//! name a line or a variable.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use toml::de::{DeTable, DeValue};

use super::problem::{Origin, Problem};

/// A value and where it was written.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub value: Value,
    pub origin: Origin,
}

pub(super) type Table = BTreeMap<String, Node>;

/// Numbers stay text, because a float would change a price.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Text(String),
    Number(String),
    Bool(bool),
    Date(String),
    List(Vec<Node>),
    Table(Table),
}

/// Parses one file. A file that is not TOML gives only its syntax problems.
pub(super) fn parse(text: &str, path: &Path) -> Result<Table, Vec<Problem>> {
    let path: Arc<Path> = Arc::from(path);
    let lines = Lines::of(text);
    let (table, errors) = DeTable::parse_recoverable(text);
    if errors.is_empty() {
        return Ok(read_table(table.into_inner(), &path, &lines));
    }
    // Take only the message: the error's own rendering quotes the line, which may hold a secret.
    let problem = |error: toml::de::Error| {
        let line = error.span().map_or(1, |span| lines.number(span.start));
        Problem::new(Origin::File { path: path.clone(), line }, format!("not TOML: {}", error.message()))
    };
    Err(errors.into_iter().map(problem).collect())
}

fn read_table(table: DeTable<'_>, path: &Arc<Path>, lines: &Lines) -> Table {
    table
        .into_iter()
        .map(|(key, value)| {
            let line = lines.number(key.span().start);
            (key.into_inner().into_owned(), read_value(value.into_inner(), path, lines, line))
        })
        .collect()
}

fn read_value(value: DeValue<'_>, path: &Arc<Path>, lines: &Lines, line: usize) -> Node {
    let value = match value {
        DeValue::String(text) => Value::Text(text.into_owned()),
        DeValue::Integer(number) => {
            let decimal = i128::from_str_radix(number.as_str(), number.radix());
            Value::Number(decimal.map_or_else(|_| number.to_string(), |number| number.to_string()))
        }
        DeValue::Float(number) => Value::Number(number.as_str().to_owned()),
        DeValue::Boolean(flag) => Value::Bool(flag),
        DeValue::Datetime(date) => Value::Date(date.to_string()),
        DeValue::Array(items) => Value::List(
            items
                .into_iter()
                .map(|item| {
                    let line = lines.number(item.span().start);
                    read_value(item.into_inner(), path, lines, line)
                })
                .collect(),
        ),
        DeValue::Table(table) => Value::Table(read_table(table, path, lines)),
    };
    Node { value, origin: Origin::File { path: path.clone(), line } }
}

/// Where the lines of a text begin.
struct Lines(Vec<usize>);

impl Lines {
    fn of(text: &str) -> Self {
        Lines(text.match_indices('\n').map(|(at, _)| at + 1).collect())
    }

    fn number(&self, offset: usize) -> usize {
        self.0.partition_point(|&start| start <= offset) + 1
    }
}

/// Variables with the prefix that are not settings.
const RESERVED: [&str; 7] =
    ["CONFIG", "URL", "INTERNAL_TOKEN", "TRIGGER_SECRET", "LOG", "LOG_FORMAT", "MUTANT"];

/// Variables with established names, and the setting of each. A variable that holds a secret has a `_FILE`
/// twin.
const OWN_NAMES: [(&str, &[&str]); 10] = [
    ("ANTHROPIC_API_KEY", &["providers", "anthropic", "api_key"]),
    ("ANTHROPIC_API_KEY_FILE", &["providers", "anthropic", "api_key_file"]),
    ("ANTHROPIC_BASE_URL", &["providers", "anthropic", "base_url"]),
    ("OPENAI_API_KEY", &["providers", "openai", "api_key"]),
    ("OPENAI_API_KEY_FILE", &["providers", "openai", "api_key_file"]),
    ("OPENAI_BASE_URL", &["providers", "openai", "base_url"]),
    ("DATABASE_URL", &["database", "url"]),
    ("DATABASE_URL_FILE", &["database", "url_file"]),
    ("WAKEFUL_TOKEN", &["server", "token"]),
    ("WAKEFUL_TOKEN_FILE", &["server", "token_file"]),
];

/// Lays the environment over `root` and returns warnings.
///
/// An empty variable counts as absent, because compose files and unit files pass on unset variables as empty.
pub(super) fn overlay(root: &mut Table, env: &BTreeMap<String, String>) -> Vec<String> {
    let mut warnings = Vec::new();
    let set = || env.iter().filter(|(_, text)| !text.trim().is_empty());
    for (variable, text) in set() {
        let Some(name) = without_prefix(variable) else { continue };
        if OWN_NAMES.iter().any(|(own, _)| variable.eq_ignore_ascii_case(own)) || name.starts_with("TEST_") {
            continue;
        }
        if name.contains("__") {
            let origin = Origin::Setting { variable: variable.clone() };
            let segments: Vec<&str> = name.split("__").collect();
            insert(root, &segments, text, origin);
        } else if !RESERVED.contains(&name.as_str()) {
            warnings.push(format!(
                "{variable} is not read: a setting is named WAKEFUL_SECTION__KEY, with two underscores between the levels"
            ));
        }
    }
    for (variable, text) in set() {
        let is_own = |own: &str| {
            variable == own || (own.starts_with("WAKEFUL_") && variable.eq_ignore_ascii_case(own))
        };
        if let Some((_, segments)) = OWN_NAMES.iter().find(|(own, _)| is_own(own)) {
            insert(root, segments, text, Origin::Own { variable: variable.clone() });
        }
    }
    warnings
}

fn without_prefix(variable: &str) -> Option<String> {
    variable.to_ascii_uppercase().strip_prefix("WAKEFUL_").map(str::to_owned)
}

fn insert(table: &mut Table, segments: &[&str], text: &str, origin: Origin) {
    let Some((first, rest)) = segments.split_first() else { return };
    // A shell cannot write `my-agent` or `openai/gpt-5` in a variable's name. So a segment matches an
    // existing key that differs only in case and punctuation.
    let key = table.keys().find(|key| fold(key) == fold(first)).cloned();
    let key = key.unwrap_or_else(|| first.to_ascii_lowercase());
    if rest.is_empty() {
        table.insert(key, Node { value: Value::Text(text.to_owned()), origin });
        return;
    }
    let node = table
        .entry(key)
        .or_insert_with(|| Node { value: Value::Table(Table::new()), origin: origin.clone() });
    // If the file gives this section as a plain value, the reader reports it later.
    if let Value::Table(inner) = &mut node.value {
        insert(inner, rest, text, origin);
    }
}

fn fold(key: &str) -> String {
    key.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' }).collect()
}
