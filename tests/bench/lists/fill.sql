-- A large installation, set by set. `{sessions}` is replaced by their number, `{messages}` by that of the longest one. One session every 30 seconds up to now: the
-- newest is number {sessions}. Rows of logs are only inserted, so their triggers see what they would see in production.
set session synchronous_commit = off;
set session work_mem = '256MB';

-- What the other tables are made from. Numbers that look random decide, so that no two properties always or never meet.
create function pg_temp.one_of(n bigint, salt bigint, many bigint) returns bigint language sql immutable as
    'select (hashint8extended(n, salt) & 1099511627775) % many';
create unlogged table filling as
select n, lpad(to_hex(at_ms), 12, '0') || lpad(to_hex(n), 20, '0') as hex, to_timestamp(at_ms / 1000.0) as at, space_id,
    'sess_' || lpad(to_hex(at_ms), 12, '0') || lpad(to_hex(n), 20, '0') as session_id,
    'run_' || lpad(to_hex(at_ms), 12, '0') || lpad(to_hex(n), 20, '0') as run_id,
    space_id || '/c' || n as conversation_id, trigger_type, agent, status,
    'room' || pg_temp.one_of(n, 6, 500) as room, 'person' || pg_temp.one_of(n, 7, 20000) || '@example.com' as person,
    case when pg_temp.one_of(n, 8, 100) = 0 then 'charge' when pg_temp.one_of(n, 8, 100) < 26 then 'reserve' end as tool,
    pg_temp.one_of(n, 9, 200) = 0 as call_failed, pg_temp.one_of(n, 10, 1000) as cents, pg_temp.one_of(n, 11, 60) as steps,
    case when pg_temp.one_of(n, 12, 50) = 0 then 'robot' else 'user' || n / 5 end as user_id,
    lpad(to_hex(pg_temp.one_of(n, 13, 50) * 200 + 31), 16, '0') as fingerprint
from (
    select n, (extract(epoch from now()) * 1000)::bigint - ({sessions} - n) * 30000 as at_ms,
        -- One space has most, one a fifth, fifty a little, and one nearly nothing, long ago.
        case when n <= 40 then 'tiny' when pg_temp.one_of(n, 1, 100) < 70 then 'default' when pg_temp.one_of(n, 1, 100) < 90 then 'large'
            else 's' || pg_temp.one_of(n, 2, 50) end as space_id,
        case pg_temp.one_of(n, 3, 100) when 0 then 'cron' when 1 then case n % 20 when 0 then 'replay' else 'herald' end
            else case when pg_temp.one_of(n, 3, 100) < 12 then 'email' else 'chat' end end as trigger_type,
        -- An agent that was retired long ago, one that is rare, and the others.
        case when n < {sessions} / 30 then 'retired' when pg_temp.one_of(n, 4, 5000) = 0 then 'rare'
            else 'agent' || pg_temp.one_of(n, 4, 17) end as agent,
        case
            -- An outage, half a year ago, and failures now and then.
            when n between {sessions} / 2 and {sessions} / 2 + {sessions} / 50 then 'failed'
            when n > {sessions} - 40 then 'running' when n > {sessions} - 2000 and n % 2 = 0 then 'queued'
            else case pg_temp.one_of(n, 5, 5000) when 0 then 'needs_attention' when 1 then 'waiting_input' when 2 then 'waiting_input'
                else case when pg_temp.one_of(n, 5, 5000) < 30 then 'failed' when pg_temp.one_of(n, 5, 5000) < 80 then 'archived'
                    when pg_temp.one_of(n, 5, 5000) < 100 then 'cancelled' else 'completed' end end end as status
    from generate_series(1::bigint, {sessions}) n
) numbered;

insert into conversation_counters (conversation_id, space_id, mailbox_id, user_id, last_message_number, created_at)
select conversation_id, space_id, 'default', user_id, 3, at from filling;

insert into conversation_sessions (session_id, conversation_id, space_id, mailbox_id, trigger_type, trigger_id, agent, model_id,
    model_context_window, status, policy, tool_names, started_at, completed_at, error, last_message_number, to_message_number,
    last_event_seq, last_step_number, total_turns, total_input_tokens, total_output_tokens, total_cost_micros, parent_session_id)
select session_id, conversation_id, space_id, 'default', trigger_type, 't' || n, agent, 'openai/gpt-' || n % 3, 200000, status, '{}',
    array['reserve', 'charge'], at, case when status in ('completed', 'failed', 'archived', 'cancelled') then at + interval '9 s' end,
    case when status = 'failed' then 'The provider answered 503 to request ' || n end, 3, 3, 4, 1, 1, 1000 + n % 5000, 100, cents * 1000,
    case when trigger_type = 'replay' then lag(session_id) over (order by n) end
from filling;

insert into session_runs (run_id, session_id, conversation_id, status, prompt_message_number, steps, input_tokens, output_tokens,
    error, created_at, started_at, completed_at, space_id)
select run_id, session_id, conversation_id, case status when 'archived' then 'completed' else status end, 2, 1, 1000, 100,
    case when status = 'failed' then 'The provider answered 503 to request ' || n end, at, at,
    case when status in ('completed', 'failed', 'archived', 'cancelled') then at + interval '9 s' end, space_id
from filling;

insert into session_inbox (session_id, client_key, content, sender, content_sha256, status, run_id, outcome, created_at, space_id)
select session_id, 'k' || n, 'A table for two, please: order ' || n, person, md5(n::text),
    'drained', run_id, 'new_run', at, space_id
from filling where n % 2 = 1;

insert into conversation_records (conversation_id, message_number, message_id, session_id, run_id, step_number, role, content,
    details, created_at, space_id)
select conversation_id, m, 'msg_' || m || substr(hex, 2), session_id, run_id, 1, case m when 2 then 'user' else 'assistant' end,
    json_build_array(json_build_object('type', 'text', 'text',
        case m when 2 then 'A table for two, please: order ' || n || ', as on Tuesday, by the window if there is one.'
            else 'The table by the window is yours at eight. I have written it down as reservation ' || n || ', for two people.' end)),
    '{}', at + make_interval(secs => m), space_id
from filling, generate_series(2, 3) m;

insert into session_events (session_id, seq, ts, type, run_id, step_number, payload, space_id)
select session_id, m, at + make_interval(secs => m),
    (array['MESSAGE_RECEIVED', 'GEN_START', 'GEN_COMPLETE', 'INVOCATION_RESULT'])[m], run_id, 1,
    (array['{"kind": "text"}', '{"stream": true, "generation_id": "gen_1"}',
        '{"reason": "stop", "generation_id": "gen_1", "message_number": 3}', '{"status": "completed"}']::jsonb[])[m], space_id
from filling, generate_series(1, 4) m;

insert into session_steps (session_id, step_number, run_id, from_message_number, to_message_number, finish_reason, input_tokens,
    output_tokens, cached_tokens, cache_write_tokens, cost_micros, executed_local_tool_count, attempt, event_seq, lease, worker_id,
    started_at, committed_at, space_id)
select session_id, 1, run_id, 2, 3, 'stop', 1000, 100, 900, 0, cents * 1000, 0, 1, 4, n, 'worker', at, at + interval '9 s', space_id
from filling;

insert into tool_calls (session_id, call_id, run_id, step_number, message_number, result_message_number, name, args_sha256, effect,
    status, attempts, started_at, settled_at, space_id)
select session_id, 'call_1', run_id, 1, 3, 3, tool, md5(n::text), 'idempotent',
    case when call_failed then 'failed' else 'done' end, 1, at, at, space_id
from filling where tool is not null;

insert into deliveries (delivery_id, space_id, conversation_id, channel, ordinal, session_id, source_key, content, status, attempt,
    last_error, created_at, tried_since, settled_at)
select 'dlv_' || hex, space_id, conversation_id, case trigger_type when 'email' then 'email' else 'slack' end, n, session_id, 'run/1',
    '{"text": "The table by the window is yours."}',
    case when n % 3000 = 1503 or n % 3001 = 0 then 'failed' when n > {sessions} - 200 then 'queued' when n % 30000 = 20 then 'uncertain' else 'sent' end,
    1, case when n % 3000 = 1503 then 'the receiver refused it' end, at, at, at
from filling where trigger_type <> 'replay' and (trigger_type = 'email' or n % 10 = 3);
select setval('delivery_ordinals', {sessions} + 1);

insert into mails (space_id, mailbox_id, message_id, conversation_id, session_id, from_address, subject, subject_key, body_sha256,
    answers, dropped, received_at)
select space_id, 'default', '<' || n || '@example.com>', case when n % 4000 <> 3 then conversation_id end,
    case when n % 4000 <> 3 then session_id end, person, 'A table for two', 'a table for two',
    md5(n::text), '{}', case when n % 4000 = 3 then 'it is an answer of a machine' end, at
from filling where trigger_type = 'email' or n % 4000 = 3;

-- Two rows for three sessions: steering, sending, and refusals.
insert into audit_log (at, actor_kind, actor, token_id, user_id, verb, target, space_id, reason, outcome, status)
select at, 'token', 'person' || pg_temp.one_of(n, 14, 30), 'tok_' || pg_temp.one_of(n, 14, 30), case when n % 10 = 1 then user_id end,
    (array['session.retry', 'session.cancel', 'message.send', 'batch.create', 'schedule.change', 'session.archive'])[pg_temp.one_of(n, 15, 6) + 1],
    session_id, space_id, 'because', case when n % 500 = 1 then 'refused' else 'done' end, case when n % 500 = 1 then 403 end
from filling where n % 3 > 0;

-- Batches: some of 10,000 members.
insert into batches (batch_id, space_id, verb, reason, filter, status, rate, actor_kind, actor, request_sha256, members, created_at, started_at, ended_at)
select 'batch_' || hex, space_id, 'retry', 'the provider is back', '{"status": "failed"}',
    case when n > {sessions} - 2000 then 'paused' else 'done' end, 20, 'token', 'person', md5(n::text),
    case when n % 20000 < 2000 then 10000 else 20 end, at, at, at
from filling where n % 1000 = 1;
insert into batch_members (batch_id, ordinal, space_id, session_id, stage, outcome, acted_at, result, result_at)
select b.batch_id, f.n, b.space_id, f.session_id, 0, 'acted', b.created_at, case when f.n % 7 = 0 then 'failed_again' else 'passed' end, b.created_at
from batches b join filling f on f.n <= b.members;

insert into error_groups (space_id, fingerprint, kind, source, text, example, count, first_at, last_at, first_version, last_version, sample, muted_until)
select distinct on (space_id, fingerprint) space_id, fingerprint, (array['overloaded', 'refused', 'timeout', 'tool'])[n % 4 + 1],
    'openai', 'the provider answered N to request of kind ' || md5((n / 3)::text), 'The provider answered 503 to request ' || n, n % 900 + 1,
    at - interval '9 days', at, '0.1.0', '0.1.0', array[session_id], case when n % 1000 = 31 then 'infinity'::timestamptz end
from (select space_id, case when n % 7 = 0 then fingerprint else lpad(to_hex(n), 16, '0') end as fingerprint, n, at, session_id
    from filling where status = 'failed' or n % 200 = 31) failed
order by space_id, fingerprint, n desc;
insert into error_hours (space_id, fingerprint, hour, count)
select space_id, fingerprint, date_bin('1 hour', now(), timestamptz 'epoch') - make_interval(hours => ago), 3
from error_groups, generate_series(0, 160, 8) ago;
insert into run_failures (session_id, run_id, space_id, fingerprint, kind, source, text, error, version, at, is_counted)
select session_id, run_id, space_id, fingerprint, 'overloaded', 'openai', 'the provider answered N',
    'The provider answered 503 to request ' || n, '0.1.0', at, true
from filling where status = 'failed';

insert into schedules (schedule_id, space_id, name, source, cron, time_zone, agent, conversation_id, prompt, missed, missed_limit,
    overlap, last_tick, next_at)
select 'sched_' || hex, space_id, 'daily-' || n, 'api', '0 9 * * *', 'UTC', agent, 'schedule-' || n, 'What is new?', 'skip', 1,
    'skip', at, now() + interval '30 days'
from filling where n % 500 = 7;
insert into schedule_firings (schedule_id, tick, session_id, at, space_id)
select schedule_id, now() - make_interval(days => m), 'sess_none', now() - make_interval(days => m), space_id
from schedules, generate_series(1, 100) m;

insert into notification_groups (group_id, space_id, rule, kind, cause, label, count, first_at, last_at, closed_at)
select 'ngrp_' || hex, case when n % 2 = 1 then '*' else space_id end, 'ops', 'failed', 'fingerprint' || n, 'The provider answered 503', 3, at, at, at
from filling where n % 20 = 1 or n % 2000 = 2;
insert into notifications (notification_id, space_id, group_id, rule, kind, phase, count, total, after_member, through_member, status, created_at, settled_at)
select replace(group_id, 'ngrp_', 'ntf_'), space_id, group_id, rule, kind, 'began', 3, 3, 0, 3,
    case when count(*) over (order by group_id) % 5000 = 7 then 'failed' else 'sent' end, first_at, first_at
from notification_groups;

insert into jobs (kind, space_id, conversation_id, session_id, step_number, run_at)
select 'step', space_id, conversation_id, session_id, 2, now() + interval '30 days' from filling where status in ('queued', 'running');
insert into queue_samples (at, ready, leased, delayed, oldest_ready_s)
select date_trunc('minute', now()) - make_interval(mins => n), n % 90, n % 7, 3, n % 30 from generate_series(1, 2000) n;
insert into workers (worker_id, host, pid, version, concurrency) select 'worker' || n, 'host' || n, n, '0.1.0', 4 from generate_series(1, 50) n;

insert into search_sessions (session_id, space_id, through_message_number, parts, tools, senders, cost_micros, steps, fingerprint,
    active_at, failed_calls)
select session_id, space_id, 3, 1, case when tool is null then '{}' else array[tool] end,
    case when n % 2 = 1 then array[person] else '{}' end, cents * 1000, steps, case when status = 'failed' then fingerprint end,
    at + interval '9 s', case when call_failed then 1 else 0 end
from filling;
insert into search_documents (session_id, part, space_id, words)
select session_id, 0, space_id, to_tsvector('simple', 'A table for two, please: order' || n
    || ' ' || room || '. The table by the window is yours at eight, reservation' || n)
from filling;
update search_progress set run_id = (select max(run_id) from session_runs), session_id = (select max(session_id) from conversation_sessions);

-- One session of {messages} messages, the newest of its agent.
create temp table long_one as select *, 'call_' as prefix from filling where n = {sessions} - 41;
update conversation_sessions s set last_message_number = {messages}, to_message_number = {messages}, last_event_seq = 3 * {messages},
    last_step_number = {messages} / 2, total_turns = {messages} / 2, agent = 'long', status = 'completed', trigger_type = 'chat' from long_one l where s.session_id = l.session_id;
update conversation_counters c set last_message_number = {messages} from long_one l where c.conversation_id = l.conversation_id;
insert into conversation_records (conversation_id, message_number, message_id, session_id, run_id, step_number, role, content, created_at, space_id)
select conversation_id, m, 'msg_long' || m, session_id, run_id, m / 2, case when m % 10 = 0 then 'user' when m % 2 = 0 then 'tool' else 'assistant' end,
    case when m % 10 <> 0 and m % 2 = 0
        then json_build_array(json_build_object('type', 'tool_result', 'call_id', 'call_' || m / 2, 'name', 'reserve', 'content',
            repeat('The table by the window is free at eight. ', 20), 'is_error', false))
        when m % 10 in (1, 3, 5, 7)
        then json_build_array(json_build_object('type', 'text', 'text', repeat('I look at the table by the window. ', 20)),
            json_build_object('type', 'tool_call', 'call_id', 'call_' || (m + 1) / 2, 'name', 'reserve', 'arguments', json_build_object('table', m)))
        else json_build_array(json_build_object('type', 'text', 'text', repeat('What about the next evening, at the same place? ', 20))) end,
    at + make_interval(secs => m), space_id
from long_one, generate_series(4, {messages}) m;
insert into session_events (session_id, seq, ts, type, run_id, step_number, payload, space_id)
select session_id, m, at + make_interval(secs => m / 3.0),
    (array['GEN_COMPLETE', 'GEN_START', 'TOOL_RESULT'])[m % 3 + 1], run_id, m / 6,
    (array['{"reason": "tool_calls", "generation_id": "gen_1", "message_number": 3}', '{"stream": true, "generation_id": "gen_1"}',
        '{"call_id": "call_1", "message_number": 4}']::jsonb[])[m % 3 + 1], space_id
from long_one, generate_series(5, 3 * {messages}) m;
insert into session_steps (session_id, step_number, run_id, from_message_number, to_message_number, finish_reason, input_tokens,
    output_tokens, cached_tokens, cache_write_tokens, cost_micros, executed_local_tool_count, attempt, event_seq, lease, worker_id,
    started_at, committed_at, space_id)
select session_id, m, run_id, 2 * m - 1, 2 * m, 'tool_calls', 1000, 100, 900, 0, 1000, 1, 1, m * 6, m, 'worker', at + make_interval(secs => m * 2),
    at + make_interval(secs => m * 2 + 1), space_id
from long_one, generate_series(2, {messages} / 2) m;
insert into tool_calls (session_id, call_id, run_id, step_number, message_number, result_message_number, name, args_sha256, effect,
    status, attempts, started_at, settled_at, space_id)
select session_id, 'call_' || m, run_id, m, 2 * m - 1, 2 * m, 'reserve', md5(m::text), 'idempotent', 'done', 1, at, at, space_id
from long_one, generate_series(2, {messages} / 2) m
where (2 * m) % 10 <> 0
on conflict do nothing;

drop table filling;
