//! The end of a run, as a part of the step commit's statement.
//!
//! A commit that closes its run also frees the conversation, ends the run's row and deletes the job. It needs no lock
//! beforehand, because conditions on the rows that it updates say whether it may: the conversation is this run's and no
//! other run waits for it, and nothing has woken the session since the plan. If a condition misses, the caller closes
//! the run in a transaction that locks these rows and finds out what to do.

use super::builder::Statement;
use crate::failure::VERSION;

impl Statement<'_> {
    /// What a run's end changes in the session's row and in the conversation's.
    pub(super) fn end(&mut self) {
        if !self.some(|commit| commit.closes.is_some()) {
            return;
        }
        self.given("closes", "boolean", |commit| commit.closes.is_some());
        self.given("error", "text", |commit| commit.closes.as_ref().and_then(|close| close.error.as_deref()));
        self.given("pauses", "boolean", |commit| commit.closes.as_ref().is_some_and(|close| close.pauses));
        self.sets.push_str(if self.all(|commit| commit.closes.is_some()) {
            ",
        error = given.error,
        completed_at = case when given.pauses then null else clock_timestamp() end,
        cancel_requested = false,
        cancel_reason = null"
        } else {
            ",
        error = case when given.closes then given.error else session.error end,
        completed_at = case
            when not given.closes then session.completed_at
            when given.pauses then null
            else clock_timestamp()
        end,
        cancel_requested = session.cancel_requested and not given.closes,
        cancel_reason = case when not given.closes then session.cancel_reason end"
        });
        if !self.some(|commit| commit.planned_wake_seq().is_some()) {
            return;
        }
        let conversation_ids =
            self.given("of_conversation", "text", |commit| commit.conversation_id.as_str());
        self.given("planned_wake_seq", "bigint", |commit| commit.planned_wake_seq());
        let of_conversation = self.among("conversation.conversation_id", "text", conversation_ids);
        self.before = format!(
            ", c as (
    update conversation_counters as conversation
    set open_run_id = null,
        last_message_number = given.last_message_number + given.record_count
    from given
    where {of_conversation}
        and conversation.conversation_id = given.of_conversation
        and conversation.space_id = given.of_space
        and given.planned_wake_seq is not null
        and conversation.open_run_id = given.run_id
        and conversation.queued_runs = 0
    returning given.session_id
)"
        );
        // The count makes Postgres lock all conversations before it locks the first session.
        self.demands.push_str(
            "
        and (select count(*) from c) = (select count(given.planned_wake_seq) from given)
        and (given.planned_wake_seq is null or session.wake_seq = given.planned_wake_seq)",
        );
    }

    /// The CTE `j`: the jobs whose lease is held. A job moves on, or it is deleted when its run ends.
    pub(super) fn jobs(&self) -> String {
        let key = self.key();
        // Of a lone commit this condition repeats the join, so that every plan finds the row by an index.
        let of_job = self.of_lone("job.job_id", "bigint", self.job_ids);
        let held = format!(
            "{of_job}s.{key} = given.{key}
        and job.space_id = s.space_id
        and job.job_id = given.job_id
        and job.lease = given.lease
        and job.step_number = given.step_number"
        );
        let moved = format!(
            "update jobs as job
    set step_number = given.step_number + given.ends_step::integer,
        stuck = case when given.progress then 0 else job.stuck end,
        died = case when given.progress then 0 else job.died end,
        outage_since = case when not given.progress then job.outage_since end,
        outage_faults = case when given.progress then 0 else job.outage_faults end,
        fault_since = case when not given.progress then job.fault_since end,
        faults = case when given.progress then 0 else job.faults end,
        held_since = case when not given.progress then job.held_since end,
        attempt = case when given.ends_step then 1 else job.attempt end,
        last_error = null,
        trace_context = given.trace_context
    from given, s
    where {held}"
        );
        let deleted = format!(
            "delete from jobs as job
    using given, s
    where {held}"
        );
        let run_at = |name| if self.starts_calls { name } else { "" };
        let returning = format!("given.{key}{}", run_at(", job.run_at"));
        let columns = format!("{key}{}", run_at(", run_at"));
        let ends = |commit: &super::rows::Rows| commit.planned_wake_seq().is_some();
        match (self.some(ends), self.all(ends)) {
            (false, _) => format!(", j as (\n    {moved}\n    returning {returning}\n)"),
            (true, true) => format!(", j as (\n    {deleted}\n    returning {returning}\n)"),
            (true, false) => format!(
                ", moved as (
    {moved}
        and given.planned_wake_seq is null
    returning {returning}
), deleted as (
    {deleted}
        and given.planned_wake_seq is not null
    returning {returning}
), j as (
    select {columns} from moved
    union all
    select {columns} from deleted
)"
            ),
        }
    }

    /// What a run failed with, for the groups of errors. A run that ends well has no such part.
    pub(super) fn failures(&mut self) {
        if !self.some(|commit| !commit.failures.is_empty()) {
            return;
        }
        let mut rows = self.rows(|commit| commit.failures.as_slice());
        self.column(&mut rows, "fingerprint", "text", |one| one.fingerprint.as_str());
        self.column(&mut rows, "kind", "text", |one| one.kind.as_str());
        self.column(&mut rows, "source", "text", |one| one.source.as_str());
        self.column(&mut rows, "normalised", "text", |one| one.text.as_str());
        self.column(&mut rows, "failed_with", "text", |one| one.error.as_deref());
        let joined = self.joined(rows);
        let version = self.bind(VERSION);
        self.part(format_args!(
            "failed as (
    insert into run_failures (session_id, run_id, space_id, fingerprint, kind, source, text, error, version)
    select b.session_id, b.run_id, b.space_id, r.fingerprint, r.kind, r.source, r.normalised, r.failed_with, ${version}::text
    from {joined}
)"
        ));
    }

    /// The end of the run's row, with what the run has used. Until then its steps say that: see `used_by_run` in the migrations.
    pub(super) fn of_run(&mut self) {
        if !self.some(|commit| commit.planned_wake_seq().is_some()) {
            return;
        }
        // The sums do not see the step that this statement writes.
        let own = if self.writes_step {
            ["b.ends_step::integer", "b.input_tokens", "b.output_tokens", "b.tool_calls"]
        } else {
            ["0"; 4]
        };
        let [steps, input_tokens, output_tokens, tool_calls] = own;
        let of_run = self.of_lone("run.run_id", "text", self.run_ids);
        self.part(format_args!(
            "of_run as (
    update session_runs as run
    set status = b.status,
        error = b.error,
        completed_at = case when b.pauses then null else clock_timestamp() end,
        (steps, input_tokens, output_tokens, tool_calls) = (
            select t.steps + {steps}, t.input_tokens + {input_tokens}, t.output_tokens + {output_tokens},
                t.tool_calls + {tool_calls}
            from run_totals(run.session_id, run.run_id, run.from_step) t
        )
    from b
    where {of_run}b.planned_wake_seq is not null
        and run.run_id = b.run_id
        and run.space_id = b.space_id
)"
        ));
    }
}
