//! The statement that a step is committed by.

use super::{Performance, to_json};
use crate::queue::Lease;
use crate::{Error, Result, new_id};
use sqlx::PgConnection;
use wakeful_workflow::advance::{Closing, Next, Transition};
use wakeful_workflow::blob::Blob;
use wakeful_workflow::session::Session;

/// The statement. Every insert selects from both updated rows, so a predicate that misses writes nothing anywhere,
/// and the division makes sure that the caller hears of it.
pub(super) async fn write(
    connection: &mut PgConnection,
    lease: &Lease,
    session: &Session,
    transition: &Transition,
    performance: Performance,
) -> Result<i64> {
    let closing = match &transition.next {
        Next::Close(closing) => Some(closing),
        Next::SameStep | Next::NextStep => None,
    };
    let events: Vec<(String, String)> = transition
        .events
        .iter()
        .chain(closing.map(|closing| closing.events.iter()).into_iter().flatten())
        .map(|event| {
            let (kind, payload) = event.to_row();
            (kind, payload.to_string())
        })
        .collect();
    let (event_types, event_payloads): (Vec<String>, Vec<String>) = events.into_iter().unzip();
    let mut blobs: Vec<&Blob> =
        transition.blobs.iter().chain(closing.map(|closing| &closing.snapshot)).collect();
    // Two commits that write the same blobs wait for each other; in one order they do not deadlock.
    blobs.sort_unstable_by(|a, b| a.sha256.cmp(&b.sha256));
    let blob_names: Vec<&str> = blobs.iter().map(|blob| blob.sha256.as_str()).collect();
    let blob_bytes: Vec<&[u8]> = blobs.iter().map(|blob| blob.bytes.as_slice()).collect();
    let blob_types: Vec<&str> = blobs.iter().map(|blob| blob.media_type).collect();
    let step = transition.step.as_ref();
    let usage = step.map(|step| step.usage).unwrap_or_default();
    let state = (!transition.state_updates.is_empty()).then(|| {
        transition
            .state_updates
            .iter()
            .map(|update| (update.key.clone(), update.value.clone()))
            .collect::<serde_json::Map<_, _>>()
    });
    let rebase = transition
        .rebase
        .as_ref()
        .map(serde_json::to_value)
        .transpose()
        .map_err(|error| Error::corrupt("rebase", error))?;
    let progress = step.is_some() || !transition.records.is_empty();

    let numbers: Vec<i64> = transition.records.iter().map(|record| record.message_number).collect();
    let roles: Vec<&str> = transition.records.iter().map(|record| record.role.as_str()).collect();
    let contents =
        transition.records.iter().map(|record| to_json(&record.content)).collect::<Result<Vec<_>>>()?;
    let details =
        transition.records.iter().map(|record| to_json(&record.details)).collect::<Result<Vec<_>>>()?;
    let internal: Vec<bool> = transition.records.iter().map(|record| record.internal).collect();

    let opened_ids: Vec<&str> = transition.calls_opened.iter().map(|call| call.call_id.as_str()).collect();
    let opened_names: Vec<&str> = transition.calls_opened.iter().map(|call| call.name.as_str()).collect();
    let opened_args: Vec<&str> =
        transition.calls_opened.iter().map(|call| call.args_sha256.as_str()).collect();
    let opened_effects: Vec<&str> = transition.calls_opened.iter().map(|call| call.effect.as_str()).collect();
    let opened_by = transition.records.last().map(|record| record.message_number);

    let closed_ids: Vec<&str> = transition.calls_closed.iter().map(|call| call.call_id.as_str()).collect();
    let closed_statuses: Vec<&str> =
        transition.calls_closed.iter().map(|call| call.status.as_str()).collect();
    let closed_numbers: Vec<Option<i64>> =
        transition.calls_closed.iter().map(|call| call.message_number).collect();

    let delivery_ids: Vec<String> = transition.deliveries.iter().map(|_| new_id("dlv")).collect();
    let delivery_channels: Vec<&str> = transition.deliveries.iter().map(|one| one.channel.as_str()).collect();
    let delivery_keys: Vec<&str> = transition.deliveries.iter().map(|one| one.source_key.as_str()).collect();
    let delivery_contents: Vec<String> =
        transition.deliveries.iter().map(|one| one.content.to_string()).collect();

    // What only some commits write is left out of the text where there is nothing of it to write: starting an insert
    // that then finds no row costs as much as many a row, and most commits are without all of these.
    macro_rules! statement {
        ($seldom:tt $(, $($argument:tt)*)?) => {
            sqlx::query_scalar!(
                r#"
            with s as (
                update conversation_sessions
                set last_message_number = last_message_number + $4,
                    last_event_seq = last_event_seq + $5,
                    to_message_number = coalesce($6, to_message_number),
                    last_step_number = last_step_number + case when $6::bigint is null then 0 else 1 end,
                    total_turns = total_turns + case when $6::bigint is null then 0 else 1 end,
                    total_input_tokens = total_input_tokens + $7,
                    total_output_tokens = total_output_tokens + $8,
                    total_cached_tokens = total_cached_tokens + $9,
                    total_cache_write_tokens = total_cache_write_tokens + $10,
                    total_cost_micros = total_cost_micros + $11,
                    state = case when $12::jsonb is null then state else state || $12::jsonb end,
                    status = coalesce($13, status),
                    error = case when $14 then $15 else error end,
                    completed_at = case when $14 then clock_timestamp() else completed_at end,
                    cancel_requested = cancel_requested and not $14,
                    cancel_reason = case when $14 then null else cancel_reason end,
                    rebase = coalesce($43, rebase),
                    compaction_failures = coalesce($44, compaction_failures)
                where session_id = $1
                    and last_message_number = $2
                    and last_step_number = $3::bigint - 1
                    and status is distinct from $13
                    and compaction_failures is distinct from $44
                returning session_id, conversation_id, space_id, last_event_seq, wake_seq
            ), j as (
                update jobs
                set step_number = $3 + case when $6::bigint is null then 0 else 1 end,
                    stuck = case when $16 then 0 else stuck end,
                    died = case when $16 then 0 else died end,
                    attempt = case when $6::bigint is null then attempt else 1 end,
                    last_error = null,
                    trace_context = $35
                from s
                where jobs.job_id = $17
                    and jobs.lease = $18
                    and jobs.step_number = $3
                returning jobs.job_id
            ), records as (
                insert into conversation_records
                    (conversation_id, message_number, session_id, run_id, step_number, role, content, internal, details)
                select s.conversation_id, r.message_number, s.session_id, $19, $3, r.role, r.content::json, r.internal,
                    r.details::json
                from s, j, unnest($20::bigint[], $21::text[], $22::text[], $23::boolean[], $24::text[])
                    as r (message_number, role, content, internal, details)
            ), events as (
                insert into session_events (session_id, seq, type, run_id, step_number, payload)
                select s.session_id, s.last_event_seq - $5 + e.ordinal, e.type, $19, $3, e.payload::jsonb
                from s, j, unnest($25::text[], $26::text[]) with ordinality as e (type, payload, ordinal)
            ), opened as (
                insert into tool_calls
                    (session_id, call_id, run_id, step_number, message_number, name, args_sha256, effect)
                select s.session_id, c.call_id, $19, $3, $27, c.name, c.args_sha256, c.effect
                from s, j, unnest($28::text[], $29::text[], $30::text[], $31::text[])
                    as c (call_id, name, args_sha256, effect)
            ), closed as (
                update tool_calls
                set status = case
                        -- What came of it was written down after this was planned: it is known after all.
                        when c.status = 'uncertain' and tool_calls.status in ('done', 'failed')
                            and tool_calls.outcome is not null then tool_calls.status
                        else c.status
                    end,
                    result_message_number = c.message_number,
                    settled_at = coalesce(tool_calls.settled_at, clock_timestamp())
                from s, j, unnest($32::text[], $33::text[], $34::bigint[]) as c (call_id, status, message_number)
                where tool_calls.session_id = s.session_id
                    and tool_calls.call_id = c.call_id
                    -- Says again what the join says, so that no plan walks through every call of a long session.
                    and tool_calls.call_id = any ($32::text[])
            ), over as (
                delete from generations
                using s, j
                where $36
                    and generations.session_id = s.session_id
            ), forgotten as (
                delete from generation_chunks
                using s, j
                where $36
                    and generation_chunks.session_id = s.session_id
            ), step as (
                insert into session_steps
                    (session_id, step_number, run_id, from_message_number, to_message_number, finish_reason,
                     input_tokens, output_tokens, cached_tokens, cache_write_tokens, cost_micros,
                     executed_local_tool_count, attempt, event_seq, lease, worker_id, started_at)
                select s.session_id, $3, $19, $37, $6, $38,
                    $7::bigint::integer, $8::bigint::integer, $9::bigint::integer, $10::bigint::integer, $11, $39, $40,
                    s.last_event_seq, $18, $41, clock_timestamp() - make_interval(secs => $42)
                from s, j
                where $6::bigint is not null
            ), of_run as (
                update session_runs
                set steps = steps + 1,
                    input_tokens = input_tokens + $7,
                    output_tokens = output_tokens + $8,
                    tool_calls = tool_calls + $39
                from s, j
                where $6::bigint is not null
                    and session_runs.run_id = $19
            )"#
                    + $seldom
                    + r#"
            select max(s.wake_seq) / (1 / count(*)) as "wake_seq!"
            from s, j
        "#,
                session.session_id.as_str(),
                session.last_message_number,
                transition.step_number,
                transition.records.len() as i64,
                event_types.len() as i64,
                step.map(|step| step.to_message_number),
                usage.input_tokens,
                usage.output_tokens,
                usage.cached_tokens,
                usage.cache_write_tokens,
                usage.cost_micros,
                state.map(serde_json::Value::Object),
                transition.status().map(|status| status.as_str()),
                closing.is_some(),
                closing.and_then(|closing: &Closing| closing.error.as_deref()),
                progress,
                lease.job_id,
                lease.token,
                transition.run_id.as_str(),
                &numbers,
                &roles as &[&str],
                &contents,
                &internal,
                &details,
                &event_types,
                &event_payloads,
                opened_by,
                &opened_ids as &[&str],
                &opened_names as &[&str],
                &opened_args as &[&str],
                &opened_effects as &[&str],
                &closed_ids as &[&str],
                &closed_statuses as &[&str],
                &closed_numbers as &[Option<i64>],
                lease.trace_context.as_deref(),
                transition.generation_over,
                step.map_or(0, |step| step.from_message_number),
                step.map_or("", |step| step.finish_reason.as_str()),
                step.map_or(0, |step| step.executed_local_tool_count as i32),
                performance.attempt,
                &*lease.worker_id,
                performance.elapsed_s,
                rebase,
                transition.compaction_failures,
                $($($argument)*)?
            )
        };
    }
    let seldom =
        !transition.deliveries.is_empty() || !transition.inbox_drained.is_empty() || !blobs.is_empty();
    let wake_seq = if seldom {
        statement!(
            r#", sent as (
            insert into deliveries
                (delivery_id, space_id, conversation_id, channel, ordinal, session_id, source_key, content)
            select d.delivery_id, s.space_id, s.conversation_id, d.channel, nextval('delivery_ordinals'),
                s.session_id, d.source_key, d.content::json
            from s, j, unnest($45::text[], $46::text[], $47::text[], $48::text[])
                as d (delivery_id, channel, source_key, content)
            on conflict (session_id, source_key, channel) do nothing
            returning conversation_id, space_id, channel
        ), deliver_jobs as (
            insert into jobs (kind, space_id, conversation_id, channel, trace_context)
            select distinct 'deliver', sent.space_id, sent.conversation_id, sent.channel, $35::text
            from sent
            on conflict (conversation_id, channel) where kind = 'deliver'
                do update set pending = jobs.pending + 1
        ), drained as (
            update session_inbox
            set status = 'drained'
            from s, j
            where session_inbox.session_id = s.session_id
                and session_inbox.inbox_id = any ($49::bigint[])
        ), pointed_at as (
            insert into blobs (sha256, size, media_type, bytes)
            select b.sha256, length(b.bytes), b.media_type, b.bytes
            from s, j, unnest($50::text[], $51::bytea[], $52::text[]) as b (sha256, bytes, media_type)
            on conflict (sha256) do nothing
        )"#,
            &delivery_ids,
            &delivery_channels as &[&str],
            &delivery_keys as &[&str],
            &delivery_contents,
            &transition.inbox_drained,
            &blob_names as &[&str],
            &blob_bytes as &[&[u8]],
            &blob_types as &[&str],
        )
        .fetch_one(connection)
        .await?
    } else {
        statement!("").fetch_one(connection).await?
    };
    Ok(wake_seq)
}
