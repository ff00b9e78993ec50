//! The scenario file of a scripted model: user texts and the replies to them.
//!
//! ```toml
//! chunk_ms = 40                      # optional: pause after each word, for every reply that has none of its own
//! delay_ms = 0                       # optional: pause before the first word, likewise
//!
//! [[turn]]                           # the first turn that fits the newest user text is taken
//! when = ["time", "what * day*"]     # a string or a list: part of the text, or a whole-text pattern with `*`;
//!                                    # upper and lower case are the same; without `when` it fits everything
//!
//! [[turn.reply]]                     # the answer to the user
//! text = "Let me look."
//! tool_calls = [{ name = "current_time", arguments = { utc_offset = "+02:00" } }]
//!
//! [[turn.reply]]                     # the answer to the results of those calls
//! text = "It is {{result}}."
//! ```
//!
//! A reply may also have `delay_ms`, `chunk_ms`, `finish_reason`, `usage = { input_tokens, output_tokens,
//! cached_tokens }` (each optional; the default is estimated from lengths) and `fault`, such as
//! `fault = { kind = "overloaded", status = 529, message = "busy" }`. With `fault`, every such call streams
//! the reply's text and then fails.

use super::template::{Template, Variables};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use wakeful_workflow::fault::Fault;
use wakeful_workflow::record::FinishReason;

/// A scenario file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    #[serde(default)]
    pub chunk_ms: u64,
    #[serde(default)]
    pub delay_ms: u64,
    #[serde(rename = "turn")]
    pub turns: Vec<ScriptedTurn>,
}

/// The replies to one user text, one for each model call.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptedTurn {
    #[serde(default)]
    when: When,
    #[serde(rename = "reply", deserialize_with = "some_replies")]
    pub replies: Vec<ReplyScript>,
}

/// One reply of the model.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "RawReply")]
pub struct ReplyScript {
    pub text: Option<Template>,
    pub tool_calls: Vec<CallScript>,
    pub delay_ms: Option<u64>,
    pub chunk_ms: Option<u64>,
    pub finish_reason: Option<FinishReason>,
    pub usage: UsageScript,
    pub fault: Option<Fault>,
}

/// One tool call of a reply.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CallScript {
    pub name: String,
    #[serde(default, deserialize_with = "arguments")]
    arguments: Map<String, Value>,
}

/// Token counts that replace the estimated ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UsageScript {
    pub input_tokens: Option<i64>,
    pub output_tokens: Option<i64>,
    pub cached_tokens: Option<i64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawReply {
    text: Option<Template>,
    #[serde(default)]
    tool_calls: Vec<CallScript>,
    delay_ms: Option<u64>,
    chunk_ms: Option<u64>,
    finish_reason: Option<FinishReason>,
    #[serde(default)]
    usage: UsageScript,
    #[serde(default, deserialize_with = "fault")]
    fault: Option<Fault>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
enum When {
    One(String),
    Any(Vec<String>),
    #[default]
    Always,
}

impl Scenario {
    /// Parses a scenario.
    ///
    /// # Errors
    /// The line, counted from 1, and a message that says what is wrong and what is expected.
    pub fn parse(text: &str) -> Result<Self, (usize, String)> {
        toml::from_str(text).map_err(|error| {
            let start = error.span().map_or(0, |span| span.start).min(text.len());
            let line = text.as_bytes()[..start].iter().filter(|&&byte| byte == b'\n').count() + 1;
            (line, error.message().trim().replace('\n', "; "))
        })
    }

    /// Returns the first turn that matches `user`.
    pub fn turn(&self, user: &str) -> Option<&ScriptedTurn> {
        let user = user.to_lowercase();
        self.turns.iter().find(|turn| turn.when.fits(&user))
    }
}

impl CallScript {
    /// Returns the arguments with the variables in their strings replaced.
    pub fn render(&self, variables: &Variables<'_>) -> Value {
        Value::Object(
            self.arguments.iter().map(|(key, value)| (key.clone(), render(value, variables))).collect(),
        )
    }
}

fn render(value: &Value, variables: &Variables<'_>) -> Value {
    match value {
        Value::String(text) => Value::String(match Template::try_from(text.clone()) {
            Ok(template) => template.render(variables),
            // Unreachable: `arguments` rejected such a text when the file was read.
            Err(_) => text.clone(),
        }),
        Value::Array(items) => Value::Array(items.iter().map(|item| render(item, variables)).collect()),
        Value::Object(map) => {
            Value::Object(map.iter().map(|(key, value)| (key.clone(), render(value, variables))).collect())
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
    }
}

impl When {
    /// Returns whether `user`, which must be in lower case, matches.
    fn fits(&self, user: &str) -> bool {
        match self {
            When::Always => true,
            When::One(pattern) => fits(pattern, user),
            When::Any(patterns) => patterns.iter().any(|pattern| fits(pattern, user)),
        }
    }
}

/// Returns whether `user`, in lower case, contains `pattern`. A pattern with `*` must match the whole text.
fn fits(pattern: &str, user: &str) -> bool {
    let pattern = pattern.to_lowercase();
    let Some((first, rest)) = pattern.split_once('*') else {
        return user.contains(&pattern);
    };
    let user = user.trim();
    let Some(mut user) = user.strip_prefix(first) else { return false };
    let mut pieces: Vec<&str> = rest.split('*').collect();
    let last = pieces.pop().unwrap_or_default();
    // Matching each piece as far left as possible leaves the most text for the rest.
    for piece in pieces {
        match user.split_once(piece) {
            Some((_, after)) => user = after,
            None => return false,
        }
    }
    user.ends_with(last)
}

impl TryFrom<RawReply> for ReplyScript {
    type Error = String;

    fn try_from(raw: RawReply) -> Result<Self, String> {
        let RawReply { text, tool_calls, delay_ms, chunk_ms, finish_reason, usage, fault } = raw;
        let text = text.filter(|text| !text.is_empty());
        if text.is_none() && tool_calls.is_empty() && fault.is_none() {
            return Err("a reply says nothing, expected `text`, `tool_calls` or `fault`".into());
        }
        Ok(ReplyScript { text, tool_calls, delay_ms, chunk_ms, finish_reason, usage, fault })
    }
}

fn some_replies<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<ReplyScript>, D::Error> {
    let replies = Vec::<ReplyScript>::deserialize(deserializer)?;
    if replies.is_empty() {
        return Err(serde::de::Error::custom("a turn has no reply, expected at least one [[turn.reply]]"));
    }
    Ok(replies)
}

fn arguments<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Map<String, Value>, D::Error> {
    let table = toml::Table::deserialize(deserializer)?;
    table
        .into_iter()
        .map(|(key, value)| Ok((key, json(value)?)))
        .collect::<Result<_, String>>()
        .map_err(serde::de::Error::custom)
}

/// Converts a TOML value to JSON, and checks every string as a template.
fn json(value: toml::Value) -> Result<Value, String> {
    Ok(match value {
        toml::Value::String(text) => {
            Template::try_from(text.clone())?;
            Value::String(text)
        }
        toml::Value::Integer(number) => Value::from(number),
        toml::Value::Float(number) => match serde_json::Number::from_f64(number) {
            Some(number) => Value::Number(number),
            None => return Err(format!("{number} is no JSON number")),
        },
        toml::Value::Boolean(truth) => Value::Bool(truth),
        toml::Value::Datetime(time) => Value::String(time.to_string()),
        toml::Value::Array(items) => Value::Array(items.into_iter().map(json).collect::<Result<_, _>>()?),
        toml::Value::Table(table) => Value::Object(
            table.into_iter().map(|(key, value)| Ok((key, json(value)?))).collect::<Result<_, String>>()?,
        ),
    })
}

fn fault<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Fault>, D::Error> {
    use serde::de::Error;
    let table = toml::Table::deserialize(deserializer)?;
    let fault: Fault = table.clone().try_into().map_err(|error: toml::de::Error| {
        D::Error::custom(format!("no fault of a model call: {}", error.message().trim()))
    })?;
    // Serde ignores unknown keys of a tagged enum, so a misspelt key would go unnoticed.
    let known = serde_json::to_value(&fault).map_err(D::Error::custom)?;
    match table.keys().find(|key| known.get(key.as_str()).is_none()) {
        Some(key) => {
            Err(D::Error::custom(format!("unknown key `{key}` of a fault of kind `{}`", fault.kind())))
        }
        None => Ok(Some(fault)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fault_of(text: &str) -> (usize, String) {
        Scenario::parse(text).unwrap_err()
    }

    #[test]
    fn a_pattern_is_a_part_of_the_text_or_a_glob_of_all_of_it() {
        for (pattern, user, expected) in [
            ("time", "what TIME is it", true),
            ("TIME", "what time is it", true),
            ("time", "what", false),
            ("what*it", "what time is it", true),
            ("what*it", "so what time is it", false),
            ("*time*", "what time is it", true),
            ("*time", "what time is it", false),
            ("*a*b*", "xaxbx", true),
            ("*a*b*", "xbxax", false),
            ("aa*aa", "aaa", false),
            ("*", "", true),
            ("hi*", " hi there ", true),
        ] {
            assert_eq!(fits(pattern, &user.to_lowercase()), expected, "{pattern} on {user}");
        }
    }

    #[test]
    fn the_first_turn_that_fits_is_taken() {
        let scenario = Scenario::parse(
            "[[turn]]\nwhen = 'a'\nreply = [{text = '1'}]\n[[turn]]\nwhen = ['b', 'a']\nreply = [{text = '2'}]\n",
        )
        .unwrap();
        assert_eq!(scenario.turn("xAx"), Some(&scenario.turns[0]));
        assert_eq!(scenario.turn("b"), Some(&scenario.turns[1]));
        assert_eq!(scenario.turn("c"), None);
    }

    #[test]
    fn arguments_keep_their_types_and_have_their_variables_replaced() {
        let scenario = Scenario::parse(
            "[[turn]]\n[[turn.reply]]\ntool_calls = [{ name = 't', arguments = { s = '<{{user}}>', n = 1, f = 1.5, \
             b = true, d = 2025-01-02, l = ['{{result}}', { x = 'y' }] } }, { name = 'bare' }]\n",
        )
        .unwrap();
        let calls = &scenario.turns[0].replies[0].tool_calls;
        let variables = Variables { user: "U", results: vec!["R"] };
        assert_eq!(
            calls[0].render(&variables),
            json!({"s": "<U>", "n": 1, "f": 1.5, "b": true, "d": "2025-01-02", "l": ["R", {"x": "y"}]})
        );
        assert_eq!(calls[1].render(&variables), json!({}));
    }

    #[test]
    fn a_fault_is_read_with_its_own_fields() {
        let scenario = Scenario::parse(
            "[[turn]]\nreply = [{fault = {kind = 'rate_limited', retry_after_ms = 5}}, {fault = {kind = 'stream_cut'}}]",
        )
        .unwrap();
        let replies = &scenario.turns[0].replies;
        assert_eq!(replies[0].fault, Some(Fault::RateLimited { retry_after_ms: Some(5) }));
        assert_eq!(replies[1].fault, Some(Fault::StreamCut));
    }

    #[test]
    fn a_mistake_is_told_with_its_line_and_what_is_expected() {
        let head = "# a scenario\n[[turn]]\nwhen = 'x'\n\n[[turn.reply]]\n";
        for (tail, line, expected) in [
            ("txt = 'hello'\n", 6, "unknown field `txt`"),
            ("text = 5\n", 6, "expected a string"),
            ("text = 'ok'\ntext2 = ''\n", 7, "unknown field `text2`"),
            ("text = '{{usr}}'\n", 6, "unknown variable `{{usr}}`, expected"),
            ("text = 'x'\ntool_calls = [{ nam = 't' }]\n", 7, "unknown field `nam`, expected `name`"),
            (
                "text = 'x'\ntool_calls = [{ name = 't', arguments = { a = '{{b}}' } }]\n",
                7,
                "unknown variable",
            ),
            ("text = 'x'\ntool_calls = [{ name = 't', arguments = 1 }]\n", 7, "expected"),
            ("delay_ms = -1\ntext = 'x'\n", 6, "expected u64"),
            ("text = 'x'\nusage = { tokens = 1 }\n", 7, "unknown field `tokens`"),
            ("text = 'x'\nfinish_reason = 'end'\n", 7, "unknown variant `end`"),
            ("fault = { kind = 'meltdown' }\n", 6, "unknown variant `meltdown`"),
            ("fault = { kind = 'stream_cut', times = 2 }\n", 6, "unknown key `times`"),
            ("fault = { kind = 'refused' }\n", 6, "missing field `status`"),
            ("delay_ms = 5\n", 5, "a reply says nothing"),
            ("text = '  '\n", 5, "a reply says nothing"),
            ("text = 'open\n", 6, ""),
        ] {
            let (found, message) = fault_of(&format!("{head}{tail}"));
            assert_eq!(found, line, "{tail}: {message}");
            assert!(message.contains(expected), "{tail}: {message}");
        }
        let (line, message) = fault_of("\n[[turn]]\nwhen = 5\nreply = [{text = 'x'}]\n");
        assert_eq!((line, message.as_str()), (3, "expected a string or a list of strings"));
        assert!(fault_of("[[turn]]\nreply = []\n").1.contains("at least one"));
        assert!(fault_of("[[turn]]\nwhen = 'x'\n").1.contains("missing field `reply`"));
        assert!(fault_of("turns = []\n").1.contains("unknown field `turns`"));
        assert!(fault_of("").1.contains("missing field `turn`"));
    }
}
