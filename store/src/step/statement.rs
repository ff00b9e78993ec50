//! The statement that commits a step.
//!
//! It is one statement with data-modifying CTEs, so it needs one round trip and no explicit transaction. The
//! CTE `s` locks and updates the session's row, but only if the row still is as it was planned on. The CTE
//! `j` does the same with the job's row, and checks the lease. Every other CTE selects from both. So if a
//! check fails, nothing is written.

use super::{Performance, to_json};
use crate::delivery::deliver_jobs;
use crate::queue::Lease;
use crate::{Error, Result, new_id};
use sqlx::PgConnection;
use wakeful_workflow::advance::{Next, Transition};
use wakeful_workflow::session::Session;

/// Writes `transition` and returns the session's `wake_seq`.
///
/// # Errors
/// [`Error::Database`] with a division by zero if the session or the job did not match: see
/// [`crate::error::missed_fence`].
pub(super) async fn write(
    connection: &mut PgConnection,
    lease: &Lease,
    session: &Session,
    transition: &Transition,
    performance: Performance,
) -> Result<i64> {
    let Transition { records, calls_opened, calls_closed, deliveries, .. } = transition;
    let closing = match &transition.next {
        Next::Close(closing) => Some(closing),
        Next::SameStep | Next::NextStep => None,
    };
    let events = transition.events.iter().chain(closing.iter().flat_map(|closing| &closing.events));
    let (event_types, event_payloads): (Vec<String>, Vec<String>) = events
        .map(|event| {
            let (kind, payload) = event.to_row();
            (kind, payload.to_string())
        })
        .unzip();
    let mut blobs: Vec<_> = transition.blobs.iter().chain(closing.map(|closing| &closing.snapshot)).collect();
    // Two commits that write the same blobs wait for each other. Both write in the same order, so they cannot
    // deadlock.
    blobs.sort_unstable_by(|a, b| a.sha256.cmp(&b.sha256));
    let step = transition.step.as_ref();
    let usage = step.map(|step| step.usage).unwrap_or_default();
    let state = (!transition.state_updates.is_empty()).then(|| {
        let updates = transition.state_updates.iter();
        serde_json::Value::Object(updates.map(|update| (update.key.clone(), update.value.clone())).collect())
    });
    let rebase = transition
        .rebase
        .as_ref()
        .map(serde_json::to_value)
        .transpose()
        .map_err(|error| Error::corrupt("rebase", error))?;
    let contents = records.iter().map(|record| to_json(&record.content)).collect::<Result<Vec<_>>>()?;
    let details = records.iter().map(|record| to_json(&record.details)).collect::<Result<Vec<_>>>()?;

    // The first CTE gives each parameter a name. Each line below holds a parameter's name and its value. "not
    // materialized" lets Postgres replace the name by the parameter, so the names cost nothing once the
    // statement is planned.
    //
    // `$rare` is SQL that few commits need, and `$more` its parameters. An insert without rows costs as much
    // as one with a few, so the other commits leave this SQL out.
    macro_rules! statement {
        ([$($rare:tt)+] $([$more:tt, $($more_value:tt)+])*) => {
            statement!(
                @named [$($rare)+]

                // The fence: the session's row must be as it was planned on, and this worker must hold the
                // job's lease.
                ["$1::text as session_id", session.session_id.as_str()]
                ["$2::bigint as last_message_number", session.last_message_number]
                ["$3::bigint as step_number", transition.step_number]
                ["$4::bigint as job_id", lease.job_id]
                ["$5::bigint as lease", lease.token]

                // The job.
                ["$6::boolean as progress", step.is_some() || !records.is_empty()]
                ["$7::text as trace_context", lease.trace_context.as_deref()]

                // The session.
                ["$8::text as run_id", transition.run_id.as_str()]
                ["$9::jsonb as state", state]
                ["$10::jsonb as rebase", rebase]
                ["$11::bigint as compaction_failures", transition.compaction_failures]
                ["$12::text as status", transition.status().map(|status| status.as_str())]
                ["$13::boolean as closes", closing.is_some()]
                ["$14::text as error", closing.and_then(|closing| closing.error.as_deref())]

                // The step, if this commit completes it.
                ["$15::boolean as ends_step", step.is_some()]
                ["$16::bigint as from_message_number", step.map(|step| step.from_message_number)]
                ["$17::bigint as to_message_number", step.map(|step| step.to_message_number)]
                ["$18::text as finish_reason", step.map(|step| step.finish_reason.as_str())]
                ["$19::bigint as input_tokens", usage.input_tokens]
                ["$20::bigint as output_tokens", usage.output_tokens]
                ["$21::bigint as cached_tokens", usage.cached_tokens]
                ["$22::bigint as cache_write_tokens", usage.cache_write_tokens]
                ["$23::bigint as cost_micros", usage.cost_micros]
                ["$24::integer as tool_calls", step.map_or(0, |step| step.executed_local_tool_count as i32)]
                ["$25::integer as attempt", performance.attempt]
                ["$26::text as worker_id", &*lease.worker_id]
                ["$27::float8 as elapsed_s", performance.elapsed_s]

                // Messages.
                ["$28::bigint as record_count", records.len() as i64]
                ["$29::bigint[] as record_numbers", &column(records, |record| record.message_number)]
                ["$30::text[] as record_roles", &column(records, |record| record.role.as_str()) as &[&str]]
                ["$31::text[] as record_contents", &contents]
                ["$32::boolean[] as record_internal", &column(records, |record| record.internal)]
                ["$33::text[] as record_details", &details]

                // Journal entries.
                ["$34::bigint as event_count", event_types.len() as i64]
                ["$35::text[] as event_types", &event_types]
                ["$36::text[] as event_payloads", &event_payloads]

                // The ledger: calls that the last message asks for, and rows whose status changes.
                ["$37::bigint as opened_by", records.last().map(|record| record.message_number)]
                ["$38::text[] as opened_ids", &column(calls_opened, |call| call.call_id.as_str()) as &[&str]]
                ["$39::text[] as opened_names", &column(calls_opened, |call| call.name.as_str()) as &[&str]]
                ["$40::text[] as opened_args", &column(calls_opened, |call| call.args_sha256.as_str()) as &[&str]]
                ["$41::text[] as opened_effects", &column(calls_opened, |call| call.effect.as_str()) as &[&str]]
                ["$42::text[] as closed_ids", &column(calls_closed, |call| call.call_id.as_str()) as &[&str]]
                ["$43::text[] as closed_statuses", &column(calls_closed, |call| call.status.as_str()) as &[&str]]
                ["$44::bigint[] as closed_numbers", &column(calls_closed, |call| call.message_number) as &[Option<i64>]]

                // The model call in flight.
                ["$45::boolean as generation_over", transition.generation_over]
                $([$more, $($more_value)+])*
            )
        };
        (@named [$($rare:tt)+] [$first:tt, $($first_value:tt)+] $([$name:tt, $($value:tt)+])*) => {
            sqlx::query_scalar!(
                "with given as not materialized (select " + $first $(+ ", " + $name)* + ")"
                    + r#", s as (
                update conversation_sessions as session
                set last_message_number = session.last_message_number + given.record_count,
                    last_event_seq = session.last_event_seq + given.event_count,
                    to_message_number = coalesce(given.to_message_number, session.to_message_number),
                    last_step_number = session.last_step_number + given.ends_step::integer,
                    total_turns = session.total_turns + given.ends_step::integer,
                    total_input_tokens = session.total_input_tokens + given.input_tokens,
                    total_output_tokens = session.total_output_tokens + given.output_tokens,
                    total_cached_tokens = session.total_cached_tokens + given.cached_tokens,
                    total_cache_write_tokens = session.total_cache_write_tokens + given.cache_write_tokens,
                    total_cost_micros = session.total_cost_micros + given.cost_micros,
                    state = case when given.state is null then session.state else session.state || given.state end,
                    status = coalesce(given.status, session.status),
                    error = case when given.closes then given.error else session.error end,
                    completed_at = case when given.closes then clock_timestamp() else session.completed_at end,
                    cancel_requested = session.cancel_requested and not given.closes,
                    cancel_reason = case when given.closes then null else session.cancel_reason end,
                    rebase = coalesce(given.rebase, session.rebase),
                    compaction_failures = coalesce(given.compaction_failures, session.compaction_failures)
                from given
                where session.session_id = given.session_id
                    and session.last_message_number = given.last_message_number
                    and session.last_step_number = given.step_number - 1
                    and session.status is distinct from given.status
                    and session.compaction_failures is distinct from given.compaction_failures
                returning session.session_id, session.conversation_id, session.space_id, session.last_event_seq,
                    session.wake_seq
            ), j as (
                update jobs as job
                set step_number = given.step_number + given.ends_step::integer,
                    stuck = case when given.progress then 0 else job.stuck end,
                    died = case when given.progress then 0 else job.died end,
                    attempt = case when given.ends_step then 1 else job.attempt end,
                    last_error = null,
                    trace_context = given.trace_context
                from given, s
                where job.job_id = given.job_id
                    and job.lease = given.lease
                    and job.step_number = given.step_number
                returning job.job_id
            ), records as (
                insert into conversation_records
                    (conversation_id, message_number, session_id, run_id, step_number, role, content, internal, details)
                select s.conversation_id, r.message_number, s.session_id, given.run_id, given.step_number, r.role,
                    r.content::json, r.internal, r.details::json
                from given, s, j, unnest(given.record_numbers, given.record_roles, given.record_contents,
                        given.record_internal, given.record_details)
                    as r (message_number, role, content, internal, details)
            ), events as (
                insert into session_events (session_id, seq, type, run_id, step_number, payload)
                select s.session_id, s.last_event_seq - given.event_count + e.ordinal, e.type, given.run_id,
                    given.step_number, e.payload::jsonb
                from given, s, j, unnest(given.event_types, given.event_payloads) with ordinality
                    as e (type, payload, ordinal)
            ), opened as (
                insert into tool_calls
                    (session_id, call_id, run_id, step_number, message_number, name, args_sha256, effect)
                select s.session_id, c.call_id, given.run_id, given.step_number, given.opened_by, c.name, c.args_sha256,
                    c.effect
                from given, s, j, unnest(given.opened_ids, given.opened_names, given.opened_args, given.opened_effects)
                    as c (call_id, name, args_sha256, effect)
            ), closed as (
                update tool_calls as call
                set status = case
                        -- The call's end was written after this was planned, so it is not uncertain any more.
                        when c.status = 'uncertain' and call.status in ('done', 'failed')
                            and call.outcome is not null then call.status
                        else c.status
                    end,
                    result_message_number = c.message_number,
                    settled_at = coalesce(call.settled_at, clock_timestamp())
                from given, s, j, unnest(given.closed_ids, given.closed_statuses, given.closed_numbers)
                    as c (call_id, status, message_number)
                where call.session_id = s.session_id
                    and call.call_id = c.call_id
                    -- Repeats the join, so that no plan reads every call of a long session.
                    and call.call_id = any (given.closed_ids)
            ), over as (
                delete from generations
                using given, s, j
                where given.generation_over
                    and generations.session_id = s.session_id
            ), forgotten as (
                delete from generation_chunks
                using given, s, j
                where given.generation_over
                    and generation_chunks.session_id = s.session_id
            ), step as (
                insert into session_steps
                    (session_id, step_number, run_id, from_message_number, to_message_number, finish_reason,
                     input_tokens, output_tokens, cached_tokens, cache_write_tokens, cost_micros,
                     executed_local_tool_count, attempt, event_seq, lease, worker_id, started_at)
                select s.session_id, given.step_number, given.run_id, given.from_message_number, given.to_message_number,
                    given.finish_reason, given.input_tokens::integer, given.output_tokens::integer,
                    given.cached_tokens::integer, given.cache_write_tokens::integer, given.cost_micros,
                    given.tool_calls, given.attempt, s.last_event_seq, given.lease, given.worker_id,
                    clock_timestamp() - make_interval(secs => given.elapsed_s)
                from given, s, j
                where given.ends_step
            ), of_run as (
                update session_runs as run
                set steps = run.steps + 1,
                    input_tokens = run.input_tokens + given.input_tokens,
                    output_tokens = run.output_tokens + given.output_tokens,
                    tool_calls = run.tool_calls + given.tool_calls
                from given, s, j
                where given.ends_step
                    and run.run_id = given.run_id
            )"#
                    + $($rare)+
                    // If a check failed, `s` or `j` is empty and this divides by zero. The caller reads that
                    // as a missed fence.
                    + r#"
            select max(s.wake_seq) / (1 / count(*)) as "wake_seq!"
            from s, j
        "#,
                $($first_value)+
                $(, $($value)+)*
            )
        };
    }
    macro_rules! with_rare_part {
        ($deliver_jobs:tt) => {
            statement!(
                [r#", sent as (
                insert into deliveries
                    (delivery_id, space_id, conversation_id, channel, ordinal, session_id, source_key, content)
                select d.delivery_id, s.space_id, s.conversation_id, d.channel, nextval('delivery_ordinals'),
                    s.session_id, d.source_key, d.content::json
                from given, s, j, unnest(given.delivery_ids, given.delivery_channels, given.delivery_keys,
                        given.delivery_contents)
                    as d (delivery_id, channel, source_key, content)
                on conflict (session_id, source_key, channel) do nothing
                returning space_id, conversation_id, channel, (select given.trace_context from given) as trace_context
            ), deliver_jobs as ("#
                + $deliver_jobs
                + r#"
            ), drained as (
                update session_inbox
                set status = 'drained'
                from given, s, j
                where session_inbox.session_id = s.session_id
                    and session_inbox.inbox_id = any (given.drained)
            ), pointed_at as (
                insert into blobs (sha256, size, media_type, bytes)
                select b.sha256, length(b.bytes), b.media_type, b.bytes
                from given, s, j, unnest(given.blob_names, given.blob_bytes, given.blob_types)
                    as b (sha256, bytes, media_type)
                on conflict (sha256) do nothing
            )"#]

                // The outbox.
                ["$46::text[] as delivery_ids", &column(deliveries, |_| new_id("dlv"))]
                ["$47::text[] as delivery_channels", &column(deliveries, |one| one.channel.as_str()) as &[&str]]
                ["$48::text[] as delivery_keys", &column(deliveries, |one| one.source_key.as_str()) as &[&str]]
                ["$49::text[] as delivery_contents", &column(deliveries, |one| one.content.to_string())]

                // Inbox rows that this commit takes into the transcript.
                ["$50::bigint[] as drained", &transition.inbox_drained]

                // Blobs that messages and journal entries point at.
                ["$51::text[] as blob_names", &column(&blobs, |blob| blob.sha256.as_str()) as &[&str]]
                ["$52::bytea[] as blob_bytes", &column(&blobs, |blob| blob.bytes.as_slice()) as &[&[u8]]]
                ["$53::text[] as blob_types", &column(&blobs, |blob| blob.media_type) as &[&str]]
            )
        };
    }
    let rare = !deliveries.is_empty() || !transition.inbox_drained.is_empty() || !blobs.is_empty();
    let wake_seq = if rare {
        deliver_jobs!(with_rare_part).fetch_one(connection).await?
    } else {
        statement!([""]).fetch_one(connection).await?
    };
    Ok(wake_seq)
}

/// Collects one value of each row, for an array parameter.
fn column<'a, T, C>(rows: &'a [T], value: impl Fn(&'a T) -> C) -> Vec<C> {
    rows.iter().map(value).collect()
}
