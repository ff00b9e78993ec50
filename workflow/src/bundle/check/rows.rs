//! Checks seeds, runs, messages and steps: no missing numbers, and sums that match.

use super::super::{BLOB_BYTES, Header, RecordRow, RunRow, SeedRow, SessionRow, StepRow, scan};
use super::fits::{CheckResult, MOST_NUMBER, times};
use crate::record::{Attachment, Block, Details, FinishReason, Role, Usage};
use std::collections::HashMap;

/// The part of the check that handles numbered rows.
pub(super) struct Rows {
    gaps: Vec<(i64, i64)>,
    gap: usize,
    /// Number of the last message that a fork got from its parent; 0 for any other session.
    forked_at: i64,
    last_step: i64,
    base_message: i64,
    last_message: i64,
    seeds: i32,
    run_ids: Vec<String>,
    runs: HashMap<String, Sums>,
    last_run: (String, String),
    /// Message numbers in order, with the speaker's role.
    records: Vec<(i64, Role)>,
    next_step: i64,
    ended: i64,
    totals: Sums,
    cached: [i64; 3],
    last_seq: i64,
}

/// Sums of a run or of all steps. A run starts with the sums in its row, and the check subtracts each of its
/// steps.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Sums {
    steps: i64,
    input: i64,
    output: i64,
    tools: i64,
}

impl Rows {
    pub(super) fn new(header: &Header) -> Rows {
        Rows {
            gaps: header.gaps.clone(),
            gap: 0,
            forked_at: 0,
            last_step: header.cut.step_number,
            base_message: 0,
            last_message: header.cut.message_number,
            seeds: 0,
            run_ids: Vec::new(),
            runs: HashMap::new(),
            last_run: (String::new(), String::new()),
            records: Vec::new(),
            next_step: 1,
            ended: 0,
            totals: Sums::default(),
            cached: [0; 3],
            last_seq: header.cut.event_seq,
        }
    }

    pub(super) fn session(&mut self, row: &SessionRow) {
        self.forked_at = row.forked_at_message_number.unwrap_or(0);
        self.next_step = row.base_step_number + 1;
        self.base_message = row.base_message_number;
        self.ended = row.forked_at_message_number.unwrap_or(row.base_message_number);
    }

    pub(super) fn seed(&mut self, row: &SeedRow) -> CheckResult {
        if row.ordinal != self.seeds {
            return Err(format!("seed {} stands where {} is due", row.ordinal, self.seeds));
        }
        self.seeds += 1;
        match row.role {
            Role::System | Role::User | Role::Assistant => Ok(()),
            Role::Tool => Err("a seed cannot be the result of a tool".to_owned()),
        }
    }

    pub(super) fn run(&mut self, row: &RunRow) -> CheckResult {
        if !scan::is_id(&row.run_id) {
            return Err("run_id: an id has letters, digits, _ and - only".to_owned());
        }
        times(&[
            ("created_at", Some(&row.created_at)),
            ("started_at", row.started_at.as_ref()),
            ("completed_at", row.completed_at.as_ref()),
        ])?;
        let place = (row.created_at.clone(), row.run_id.clone());
        if place <= self.last_run {
            return Err(format!("run {} is out of order", row.run_id));
        }
        self.last_run = place;
        let sums = Sums {
            steps: row.steps,
            input: row.input_tokens,
            output: row.output_tokens,
            tools: row.tool_calls,
        };
        if self.runs.insert(row.run_id.clone(), sums).is_some() {
            return Err(format!("run {} comes twice", row.run_id));
        }
        self.run_ids.push(row.run_id.clone());
        let prompt = row.prompt_message_number.unwrap_or(1);
        if !(1..=self.last_message.max(1)).contains(&prompt) {
            return Err(format!("its prompt is message {prompt}, which is not in here"));
        }
        Ok(())
    }

    pub(super) fn record(&mut self, row: &RecordRow) -> CheckResult {
        let number = row.message_number;
        let due = self.due(number);
        if number != due {
            return Err(format!("message {number} stands where {due} is due"));
        }
        if number > self.last_message {
            return Err(format!("message {number} lies beyond the cut"));
        }
        if !scan::is_id(&row.message_id) {
            return Err("message_id: an id has letters, digits, _ and - only".to_owned());
        }
        times(&[("created_at", Some(&row.created_at))])?;
        if !(0..=self.last_step + 1).contains(&row.step_number) {
            return Err(format!(
                "message {number} belongs to step {}, which does not exist",
                row.step_number
            ));
        }
        // Messages that a fork got from its parent keep the parent's run ids.
        let inherited = number <= self.forked_at;
        if !scan::is_id(&row.run_id) || (!inherited && !self.runs.contains_key(&row.run_id)) {
            return Err(format!("message {number} is of run {:?}, which is not in here", row.run_id));
        }
        if row.role == Role::System {
            return Err("a system prompt is a seed".to_owned());
        }
        self::usage(row)?;
        attachments(row)?;
        details(row)?;
        self.records.push((number, row.role));
        Ok(())
    }

    /// The number that the next message must have. A fork's first message may lie before its base.
    fn due(&mut self, number: i64) -> i64 {
        let mut due = match self.records.last() {
            Some((last, _)) => last + 1,
            None if (1..=self.base_message).contains(&number) => return number,
            None => self.base_message + 1,
        };
        while let Some((first, last)) = self.gaps.get(self.gap).filter(|(first, _)| *first <= due) {
            if *first == due {
                due = last + 1;
            }
            self.gap += 1;
        }
        due
    }

    pub(super) fn step(&mut self, row: &StepRow) -> CheckResult {
        let number = row.step_number;
        if number != self.next_step {
            return Err(format!("step {number} stands where {} is due", self.next_step));
        }
        self.next_step += 1;
        if row.from_message_number != self.ended {
            return Err(format!("step {number} does not begin where the one before ended"));
        }
        if row.to_message_number < row.from_message_number || row.to_message_number > self.last_message {
            return Err(format!("step {number} does not end at a message"));
        }
        self.ended = row.to_message_number;
        let counts = [
            i64::from(row.input_tokens),
            i64::from(row.output_tokens),
            i64::from(row.cached_tokens),
            i64::from(row.cache_write_tokens),
            row.cost_micros,
            i64::from(row.executed_local_tool_count),
            i64::from(row.attempt),
        ];
        if counts.into_iter().any(|count| !(0..=MOST_NUMBER).contains(&count)) {
            return Err(format!("step {number} has a number that is negative or beyond reason"));
        }
        if !(0..=self.last_seq).contains(&row.event_seq) {
            return Err(format!("step {number} points at a journal entry beyond the cut"));
        }
        if serde_json::from_value::<FinishReason>(row.finish_reason.as_str().into()).is_err() {
            return Err(format!("step {number} has a finish_reason that this version does not know"));
        }
        times(&[("started_at", Some(&row.started_at)), ("committed_at", Some(&row.committed_at))])?;
        let Some(run) = self.runs.get_mut(&row.run_id) else {
            return Err(format!("step {number} is of run {:?}, which is not in here", row.run_id));
        };
        let [input, output, cached, cache_write, cost, tools, _] = counts;
        let less = |have: i64, count: i64| have.saturating_sub(count);
        run.steps = less(run.steps, 1);
        run.input = less(run.input, input);
        run.output = less(run.output, output);
        run.tools = less(run.tools, tools);
        self.totals.steps += 1;
        self.totals.input += input;
        self.totals.output += output;
        self.totals.tools += tools;
        self.cached[0] += cached;
        self.cached[1] += cache_write;
        self.cached[2] += cost;
        Ok(())
    }

    /// Role of the message with this number.
    pub(super) fn role(&self, number: i64) -> Option<Role> {
        let at = self.records.binary_search_by_key(&number, |(number, _)| *number).ok()?;
        Some(self.records[at].1)
    }

    /// Returns whether the run is in the bundle.
    pub(super) fn has_run(&self, run_id: &str) -> bool {
        self.runs.contains_key(run_id)
    }

    pub(super) fn last_message(&self) -> i64 {
        self.last_message
    }

    pub(super) fn last_step(&self) -> i64 {
        self.last_step
    }

    pub(super) fn close(&self, session: &SessionRow) -> CheckResult {
        let newest = self.records.last().map_or(self.base_message, |(number, _)| *number);
        if newest.max(self.base_message) != self.last_message {
            return Err(format!("the last message is {newest}, the cut is at {}", self.last_message));
        }
        if self.next_step - 1 != self.last_step {
            return Err(format!(
                "the last step is {}, the session says {}",
                self.next_step - 1,
                self.last_step
            ));
        }
        if self.ended != session.to_message_number {
            return Err(format!(
                "the last step ends at message {}, the session's checkpoint is at {}",
                self.ended, session.to_message_number
            ));
        }
        let [cached, cache_write, cost] = self.cached;
        let sums = [self.totals.steps, self.totals.input, self.totals.output, cached, cache_write, cost];
        let totals = [
            i64::from(session.total_turns),
            session.total_input_tokens,
            session.total_output_tokens,
            session.total_cached_tokens,
            session.total_cache_write_tokens,
            session.total_cost_micros,
        ];
        if sums != totals {
            return Err(format!("the session's totals {totals:?} are not the sums of its steps {sums:?}"));
        }
        match self.run_ids.iter().find(|id| self.runs[*id] != Sums::default()) {
            Some(run_id) => Err(format!("the sums of run {run_id} are not those of its steps")),
            None => Ok(()),
        }
    }
}

/// A step may take over its message's usage, so both have the same bounds.
fn usage(row: &RecordRow) -> CheckResult {
    let Some(usage) = row.details.get("usage") else { return Ok(()) };
    let Ok(usage) = serde_json::from_value::<Option<Usage>>(usage.clone()) else {
        return Err(format!("message {} has an invalid usage", row.message_number));
    };
    let Usage { input_tokens, output_tokens, cached_tokens, cache_write_tokens, cost_micros } =
        usage.unwrap_or_default();
    let tokens = [input_tokens, output_tokens, cached_tokens, cache_write_tokens];
    let is_tokens = |count: i64| (0..=i64::from(i32::MAX)).contains(&count);
    if !tokens.into_iter().all(is_tokens) || !(0..=MOST_NUMBER).contains(&cost_micros) {
        return Err(format!("message {} has a usage that is negative or beyond reason", row.message_number));
    }
    Ok(())
}

/// Hydration parses a message's attachments, so they must have the right form.
fn attachments(row: &RecordRow) -> CheckResult {
    let Some(files) = row.details.get("attachments") else { return Ok(()) };
    match serde_json::from_value::<Vec<Attachment>>(files.clone()) {
        Ok(files) if files.iter().all(|file| file.bytes as i64 <= BLOB_BYTES) => Ok(()),
        Ok(_) | Err(_) => Err(format!("message {} has invalid attachments", row.message_number)),
    }
}

/// Hydration parses all details of a message.
fn details(row: &RecordRow) -> CheckResult {
    match serde_json::from_value::<Details>(row.details.clone().into()) {
        Ok(_) => Ok(()),
        Err(_) => Err(format!("message {} has invalid details", row.message_number)),
    }
}

/// The call ids in a message, with `false` for a call and `true` for a result.
pub(super) fn calls_of(row: &RecordRow) -> impl Iterator<Item = (&str, bool)> {
    row.content.iter().filter_map(|block| match block {
        Block::ToolCall(call) => Some((call.call_id.as_str(), false)),
        Block::ToolResult(result) => Some((result.call_id.as_str(), true)),
        Block::Text { .. } | Block::Provider { .. } => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bundle::{Counts, Cut};
    use serde_json::{Value, json};

    /// Rows of a session with one run and two messages.
    fn rows() -> Rows {
        let mut rows = Rows::new(&Header {
            wakeful_bundle: 1,
            session_id: "sess_1".to_owned(),
            redacted: false,
            cut: Cut { message_number: 2, step_number: 1, event_seq: 9 },
            counts: Counts::default(),
            gaps: Vec::new(),
        });
        rows.runs.insert("run_1".to_owned(), Sums::default());
        rows
    }

    const AT: &str = "2026-01-31T12:00:00.000000Z";

    fn record(details: &Value) -> CheckResult {
        let row = json!({"message_number": 1, "message_id": "msg_1", "run_id": "run_1", "step_number": 1,
            "role": "assistant", "content": [], "internal": false, "details": details, "created_at": AT});
        rows().record(&serde_json::from_value(row).unwrap())
    }

    fn step(finish_reason: &str) -> CheckResult {
        let row = json!({"step_number": 1, "run_id": "run_1", "from_message_number": 0, "to_message_number": 1,
            "finish_reason": finish_reason, "input_tokens": 1, "output_tokens": 1, "cached_tokens": 0,
            "cache_write_tokens": 0, "cost_micros": 0, "executed_local_tool_count": 0, "attempt": 1, "event_seq": 1,
            "started_at": AT, "committed_at": AT});
        rows().step(&serde_json::from_value(row).unwrap())
    }

    /// Otherwise the session would be imported, and could never be read.
    #[test]
    fn what_hydration_could_not_read_is_refused() {
        for good in [json!({}), json!({"finish_reason": "tool_calls"}), json!({"inbox_id": 3, "later": [1]})]
        {
            assert_eq!(record(&good), Ok(()), "{good}");
        }
        for bad in [
            json!({"finish_reason": "stopped"}),
            json!({"finish_reason": 1}),
            json!({"inbox_id": "x"}),
            json!({"origin_message_id": []}),
        ] {
            let refused = record(&bad).unwrap_err();
            assert!(refused.contains("message 1 has invalid details"), "{bad}: {refused}");
        }
        assert_eq!(step("stop"), Ok(()));
        assert!(step("stopped").unwrap_err().contains("finish_reason"));
    }
}
