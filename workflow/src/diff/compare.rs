//! Compares two paired turns part by part.

use super::align::{self, Row};
use super::ids::Ids;
use super::report::{Difference, Level, Part, RequestMatch, SetupDifference, TurnDiff, TurnView};
use super::side::Side;
use super::sides::Sides;
use super::turn::Turn;
use super::value::{ValueDifference, ValueKind, Values};
use super::words::{Budget, Piece, WhichSide};
use crate::derive;
use crate::id::CallId;
use crate::record::{Block, Record, Role, ToolCall, ToolResult, text_of};
use serde_json::{Map, Value};
use std::collections::HashMap;

/// Maximum number of differences listed per turn.
const LISTED: usize = 200;
/// Length of an excerpt, in characters.
const EXCERPT: usize = 240;

/// Two sessions under comparison, and what each of their ids stands for.
pub(super) struct Comparison<'a> {
    left: &'a Side,
    right: &'a Side,
    ids: Sides<Ids<'a>>,
    budget: Budget,
}

/// The differences found in one turn so far.
#[derive(Default)]
struct Found {
    differences: Vec<Difference>,
    unlisted: usize,
    level: Option<Level>,
}

impl Found {
    fn add(&mut self, level: Level, part: Part) {
        self.level = self.level.max(Some(level));
        if self.differences.len() < LISTED {
            self.differences.push(Difference { level, part });
        } else {
            self.unlisted += 1;
        }
    }
}

impl<'a> Comparison<'a> {
    /// Gives each pair of calls in `rows` the same name on both sides.
    pub fn new(
        left: &'a Side,
        right: &'a Side,
        of_left: &[Turn<'a>],
        of_right: &[Turn<'a>],
        rows: &[Row],
    ) -> Comparison<'a> {
        let blind = Sides { left: Ids::blind(left), right: Ids::blind(right) };
        let mut ids = Sides { left: Ids::of(left), right: Ids::of(right) };
        let mut number = 0;
        for row in rows {
            let calls = Sides {
                left: row.left.map(|at| keyed(&of_left[at], &blind.left)).unwrap_or_default(),
                right: row.right.map(|at| keyed(&of_right[at], &blind.right)).unwrap_or_default(),
            };
            let keys = |calls: &[(String, &ToolCall)]| -> Vec<String> {
                calls.iter().map(|(key, _)| key.clone()).collect()
            };
            for pair in align::calls(&keys(&calls.left), &keys(&calls.right)) {
                number += 1;
                let alone = |of: &str| format!("call {number} of the {of}");
                let (on_left, on_right) = match (pair.left, pair.right) {
                    (Some(_), Some(_)) => (format!("call {number}"), format!("call {number}")),
                    (_, _) => (alone("left"), alone("right")),
                };
                if let Some(at) = pair.left {
                    ids.left.call(&calls.left[at].1.call_id, on_left);
                }
                if let Some(at) = pair.right {
                    ids.right.call(&calls.right[at].1.call_id, on_right);
                }
            }
        }
        Comparison { left, right, ids, budget: Budget::default() }
    }

    /// Differences in what the two sessions started with.
    pub fn setup(&mut self) -> Vec<SetupDifference> {
        let seeds = |side: &Side| {
            let said = side.seeds.iter().filter(|seed| seed.role != Role::System);
            said.map(|seed| format!("{}: {}", seed.role.as_str(), seed.content))
                .collect::<Vec<_>>()
                .join("\n\n")
        };
        let tools = |side: &Side| {
            let lines = side.tools.iter().map(|tool| {
                let effect = serde_json::to_value(tool.effect).unwrap_or_default();
                format!(
                    "{} ({}): {}\n{}",
                    tool.name,
                    effect.as_str().unwrap_or_default(),
                    tool.description,
                    tool.parameters
                )
            });
            lines.collect::<Vec<_>>().join("\n")
        };
        let (left, right) = (self.left, self.right);
        let given = [
            ("agent", left.agent.clone(), right.agent.clone()),
            ("model", left.model.clone(), right.model.clone()),
            ("system_prompt", left.system.clone(), right.system.clone()),
            ("tools", tools(left), tools(right)),
            ("seeds", seeds(left), seeds(right)),
        ];
        given
            .into_iter()
            .filter(|(_, one, other)| one != other)
            .map(|(what, one, other)| SetupDifference {
                what,
                words: self.budget.words((&one, &self.ids.left), (&other, &self.ids.right)),
            })
            .filter(|difference| !difference.words.is_empty())
            .collect()
    }

    /// Differences between the final states.
    pub fn state(&mut self) -> Vec<ValueDifference> {
        self.values(
            ValueKind::State,
            &Value::Object(self.left.state.clone()),
            &Value::Object(self.right.state.clone()),
        )
    }

    /// One row of the report.
    pub fn turn(&mut self, number: usize, left: Option<&Turn<'a>>, right: Option<&Turn<'a>>) -> TurnDiff {
        let mut found = Found::default();
        match (left, right) {
            (Some(left), Some(right)) if !self.is_same(left, right) => self.parts(&mut found, left, right),
            (Some(_), Some(_)) | (None, None) => {}
            (Some(turn), None) => alone(&mut found, WhichSide::Left, turn),
            (None, Some(turn)) => alone(&mut found, WhichSide::Right, turn),
        }
        found.differences.sort_by_key(|difference| std::cmp::Reverse(difference.level));
        let (left, right) =
            (left.map(|turn| view(self.left, turn)), right.map(|turn| view(self.right, turn)));
        let asked = |turn: &Option<TurnView>| turn.as_ref()?.answer.as_ref()?.request_sha256.clone();
        TurnDiff {
            turn: number,
            level: found.level.unwrap_or(Level::Equal),
            request: match (asked(&left), asked(&right)) {
                (Some(one), Some(other)) if one == other => RequestMatch::Equal,
                (Some(_), Some(_)) => RequestMatch::Differs,
                (_, _) => RequestMatch::Unknown,
            },
            left,
            right,
            differences: found.differences,
            unlisted: found.unlisted,
        }
    }

    /// Returns whether the turns have no difference that counts.
    fn is_same(&self, left: &Turn<'a>, right: &Turn<'a>) -> bool {
        let read = |turn: &Turn<'a>, ids: &Ids<'a>| -> Vec<Value> {
            turn.records().map(|record| ids.record(record)).collect()
        };
        order(left) == order(right) && read(left, &self.ids.left) == read(right, &self.ids.right)
    }

    fn parts(&mut self, found: &mut Found, left: &Turn<'a>, right: &Turn<'a>) {
        let pairs = self.calls(found, left, right);
        self.updates(found, left, right);
        self.results(found, left, right, &pairs);
        let inputs = |turn: &Turn<'a>| {
            turn.inputs.iter().map(|record| text_of(&record.content)).collect::<Vec<_>>().join("\n\n")
        };
        let answer = |turn: &Turn<'a>| turn.answer.map(Record::text).unwrap_or_default();
        let words = self.words(&inputs(left), &inputs(right));
        if !words.is_empty() {
            found.add(Level::Prose, Part::Input { words });
        }
        let words = self.words(&answer(left), &answer(right));
        if !words.is_empty() {
            found.add(Level::Prose, Part::Text { words });
        }
        let (one, other) = (finish_reason(left), finish_reason(right));
        if one != other {
            found.add(Level::Prose, Part::FinishReason { left: one, right: other });
        }
        // If one side has more messages, another part already reports it. Compare visibility and order only
        // if both sides have the same number.
        let as_many = left.records().count() == right.records().count();
        for (what, differs) in [
            ("the visibility of a message differs", as_many && internal(left) != internal(right)),
            ("the provider's own blocks differ", raw(left) != raw(right)),
            ("the messages came in another order", as_many && order(left) != order(right)),
        ] {
            if differs {
                found.add(Level::Prose, Part::Shape { what: what.to_owned() });
            }
        }
        if found.level.is_none() {
            found.add(
                Level::Prose,
                Part::Shape { what: "the blocks or the details of a message differ".to_owned() },
            );
        }
    }

    /// Compares the calls and returns the pairs.
    fn calls(
        &mut self,
        found: &mut Found,
        left: &Turn<'a>,
        right: &Turn<'a>,
    ) -> Vec<(Option<&'a ToolCall>, Option<&'a ToolCall>)> {
        let (one, other) = (keyed(left, &self.ids.left), keyed(right, &self.ids.right));
        let key =
            |calls: &[(String, &ToolCall)]| calls.iter().map(|(key, _)| key.clone()).collect::<Vec<_>>();
        let rows = align::calls(&key(&one), &key(&other));
        let only = |on, call: &ToolCall| Part::CallOnly {
            on,
            name: call.name.clone(),
            arguments: call.arguments.clone(),
        };
        let mut pairs = Vec::new();
        for row in rows {
            let (at_left, at_right) = (row.left.map(|at| one[at].1), row.right.map(|at| other[at].1));
            pairs.push((at_left, at_right));
            match (at_left, at_right) {
                (Some(call), Some(beside)) => {
                    let arguments = self.values(ValueKind::Other, &call.arguments, &beside.arguments);
                    let malformed = call.malformed != beside.malformed;
                    if call.name != beside.name || malformed || !arguments.is_empty() {
                        let position = Sides {
                            left: row.left.map_or(0, |at| at + 1),
                            right: row.right.map_or(0, |at| at + 1),
                        };
                        let name = Sides { left: call.name.clone(), right: beside.name.clone() };
                        found.add(Level::Tools, Part::Call { position, name, arguments, malformed });
                    }
                }
                (Some(call), None) => found.add(Level::Tools, only(WhichSide::Left, call)),
                (None, Some(call)) => found.add(Level::Tools, only(WhichSide::Right, call)),
                (None, None) => {}
            }
        }
        pairs
    }

    /// Compares the turns' changes of the state.
    fn updates(&mut self, found: &mut Found, left: &Turn<'a>, right: &Turn<'a>) {
        let updates = |turn: &Turn<'a>| {
            let results = turn.records().flat_map(Record::tool_results);
            let updates = results.flat_map(derive::updates).map(|update| (update.key, update.value));
            Value::Object(Map::from_iter(updates))
        };
        let changes = self.values(ValueKind::State, &updates(left), &updates(right));
        if !changes.is_empty() {
            found.add(Level::State, Part::State { changes });
        }
    }

    /// Compares the results: first those of paired calls, then those that answer no call, in order.
    fn results(
        &mut self,
        found: &mut Found,
        left: &Turn<'a>,
        right: &Turn<'a>,
        pairs: &[(Option<&'a ToolCall>, Option<&'a ToolCall>)],
    ) {
        let (mut one, mut other) = (Results::of(left), Results::of(right));
        for (call, beside) in pairs {
            let given = call.map(|call| one.take(&call.call_id)).unwrap_or_default();
            let beside_it = beside.map(|call| other.take(&call.call_id)).unwrap_or_default();
            // A call on one side only is already reported. Its result belongs to that difference.
            if call.is_some() && beside.is_some() {
                self.given(found, &given, &beside_it);
            }
        }
        self.given(found, &one.rest(), &other.rest());
    }

    fn given(&mut self, found: &mut Found, left: &[&'a ToolResult], right: &[&'a ToolResult]) {
        for at in 0..left.len().max(right.len()) {
            let (one, other) = (left.get(at), right.get(at));
            let content =
                |result: Option<&&'a ToolResult>| result.map_or("", |result| result.content.as_str());
            let details = |result: Option<&&'a ToolResult>| {
                result.and_then(|result| result.details.clone()).unwrap_or_default()
            };
            let is_error =
                Sides { left: one.map(|result| result.is_error), right: other.map(|result| result.is_error) };
            let words = self.words(content(one), content(other));
            let details = self.values(ValueKind::Other, &details(one), &details(other));
            let ended = is_error.left != is_error.right;
            let named = |result: Option<&&'a ToolResult>| result.map(|result| result.name.clone());
            let name = Sides { left: named(one), right: named(other) };
            if ended || name.left != name.right || !words.is_empty() || !details.is_empty() {
                let level = if ended { Level::State } else { Level::Prose };
                found.add(level, Part::Result { name, is_error, words, details });
            }
        }
    }

    fn words(&mut self, left: &str, right: &str) -> Vec<Piece> {
        self.budget.words((left, &self.ids.left), (right, &self.ids.right))
    }

    fn values(&mut self, of: ValueKind, left: &Value, right: &Value) -> Vec<ValueDifference> {
        Values { left: &self.ids.left, right: &self.ids.right, budget: &mut self.budget, of }
            .differences(left, right)
    }
}

/// The calls of a turn, each with a key made of its name and its arguments.
fn keyed<'a>(turn: &Turn<'a>, ids: &Ids<'a>) -> Vec<(String, &'a ToolCall)> {
    turn.calls().map(|call| (format!("{}\0{}", call.name, ids.value(&call.arguments)), call)).collect()
}

/// The results of a turn. Each can be taken once.
struct Results<'a> {
    results: Vec<Option<&'a ToolResult>>,
    of: HashMap<&'a CallId, Vec<usize>>,
}

impl<'a> Results<'a> {
    fn of(turn: &Turn<'a>) -> Results<'a> {
        let results: Vec<_> = turn.records().flat_map(Record::tool_results).map(Some).collect();
        let mut of: HashMap<&CallId, Vec<usize>> = HashMap::new();
        for (at, result) in results.iter().flatten().enumerate() {
            of.entry(&result.call_id).or_default().push(at);
        }
        Results { results, of }
    }

    fn take(&mut self, call_id: &CallId) -> Vec<&'a ToolResult> {
        let at = self.of.remove(call_id).unwrap_or_default();
        at.into_iter().filter_map(|at| self.results[at].take()).collect()
    }

    fn rest(self) -> Vec<&'a ToolResult> {
        self.results.into_iter().flatten().collect()
    }
}

fn alone(found: &mut Found, on: WhichSide, turn: &Turn<'_>) {
    let calls = turn.calls().next().is_some();
    found.add(if calls { Level::Tools } else { Level::Prose }, Part::Turn { on });
}

fn view(side: &Side, turn: &Turn<'_>) -> TurnView {
    let numbers = || turn.records().map(|record| record.message_number);
    let texts: Vec<String> = turn.inputs.iter().map(|record| excerpt(&record.text())).collect();
    TurnView {
        first_message: numbers().min().unwrap_or(0),
        last_message: numbers().max().unwrap_or(0),
        answer_message: turn.answer.map(|record| record.message_number),
        calls: turn.calls().map(|call| call.name.clone()).collect(),
        input: excerpt(&texts.join(" ")),
        text: excerpt(&turn.answer.map(Record::text).unwrap_or_default()),
        finish_reason: finish_reason(turn),
        answer: turn.answer.and_then(|record| side.answers.get(&record.message_number).cloned()),
    }
}

/// The beginning of a text, on one line.
fn excerpt(text: &str) -> String {
    let mut line = String::new();
    // Stop early: a long text of white space adds nothing to the line.
    for (at, c) in text.chars().enumerate() {
        if at >= 4 * EXCERPT || line.chars().count() >= EXCERPT {
            line.push('…');
            break;
        }
        match c {
            c if !c.is_whitespace() => line.push(c),
            _ if line.is_empty() || line.ends_with(' ') => {}
            _ => line.push(' '),
        }
    }
    line.trim_end().to_owned()
}

fn finish_reason(turn: &Turn<'_>) -> Option<&'static str> {
    turn.answer?.details.finish_reason.map(|reason| reason.as_str())
}

fn internal(turn: &Turn<'_>) -> Vec<bool> {
    turn.records().map(|record| record.internal).collect()
}

/// The order of the roles, and which results came late.
fn order(turn: &Turn<'_>) -> (Vec<Role>, Vec<bool>) {
    let roles = turn.records().map(|record| record.role).collect();
    (roles, turn.results.iter().map(|result| result.late).collect())
}

fn raw<'a>(turn: &Turn<'a>) -> Vec<(&'a str, &'a Value)> {
    let blocks = turn.records().flat_map(|record| &record.content);
    blocks
        .filter_map(|block| match block {
            Block::Provider { provider, raw } => Some((provider.as_str(), raw)),
            Block::Text { .. } | Block::ToolCall(_) | Block::ToolResult(_) => None,
        })
        .collect()
}
