-- An installation in which everything that the upkeep looks at has many rows, and few that it is to find.

-- The vacuum after it takes rows for old only when their commit is in the WAL.
set session synchronous_commit = on;

insert into conversation_counters (conversation_id, space_id, mailbox_id, last_message_number)
select 'default/c' || n, 'default', 'default', 1 from generate_series(1, 6000) n;

-- Five agents, so five prefixes. One in a thousand was imported, from the session before it.
insert into conversation_sessions (session_id, conversation_id, space_id, mailbox_id, trigger_type, trigger_id, agent, model_id,
    model_context_window, status, prefix_sha256, imported_from, started_at)
select 'sess_' || lpad(to_hex(n), 32, '0'), 'default/c' || n, 'default', 'default', 'chat', 't' || n, 'agent' || n % 5, 'm', 1,
    case when n > 4000 then 'running' else 'completed' end, encode(sha256(('prefix' || n % 5)::bytea), 'hex'),
    case when n % 1000 = 0 then jsonb_build_object('session_id', 'sess_' || lpad(to_hex(n - 1), 32, '0')) end,
    now() - make_interval(secs => 6000 - n)
from generate_series(1, 6000) n;

-- The runs that are open were told of long ago, but for the newest ten.
insert into session_runs (run_id, session_id, conversation_id, status, created_at, completed_at, delay_told_at, space_id)
select 'run_' || lpad(to_hex(n), 32, '0'), 'sess_' || lpad(to_hex(n), 32, '0'), 'default/c' || n,
    case when n > 4000 then 'running' else 'completed' end, now() - make_interval(secs => 6000 - n),
    case when n <= 4000 then now() end, case when n > 4000 and n <= 5990 then now() end, 'default'
from generate_series(1, 6000) n;

insert into session_events (session_id, seq, type, payload, space_id)
select 'sess_' || lpad(to_hex(n), 32, '0'), 1, case when n % 10 = 0 then 'WORKSPACE_SNAPSHOT' else 'MESSAGE_RECEIVED' end,
    case when n % 10 = 0
        then jsonb_build_object('packs', jsonb_build_array(jsonb_build_object('sha256', encode(sha256(('pack' || n)::bytea), 'hex'))))
        else '{}' end, 'default'
from generate_series(1, 6000) n;

insert into session_inbox (session_id, client_key, content, content_sha256, status, run_id, outcome, attachments, space_id)
select 'sess_' || lpad(to_hex(n), 32, '0'), 'k' || n, 'Hello.', 'x', 'drained', 'r' || n, 'new_run',
    case when n % 500 = 0 then jsonb_build_array(jsonb_build_object('sha256', encode(sha256(('file' || n)::bytea), 'hex'))) end,
    'default'
from generate_series(1, 6000) n;

insert into conversation_records (conversation_id, message_number, session_id, run_id, step_number, role, content, space_id)
select 'default/c' || n, 1, 'sess_' || lpad(to_hex(n), 32, '0'), 'run_' || n, 1, 'user',
    to_json('see ' || encode(sha256(('text' || n)::bytea), 'hex')), 'default'
from generate_series(1, 6000) n;

-- Packs that snapshots name, and twenty that none does.
insert into blobs (sha256, size, media_type, bytes, touched_at, space_id)
select encode(sha256(('pack' || n)::bytea), 'hex'), 4, 'application/vnd.wakeful.pack', 'pack', now() - interval '2 days', 'default'
from generate_series(1, 6000) n where n % 10 = 0 or n <= 20;
insert into blobs (sha256, size, media_type, bytes, touched_at, space_id)
select encode(sha256((kind || n)::bytea), 'hex'), 4, 'text/plain', 'text', now() - interval '2 days', 'default'
from generate_series(1, 500) n, unnest(array['text', 'file']) kind;
insert into blobs (sha256, size, media_type, bytes, space_id)
select encode(sha256(('prefix' || n)::bytea), 'hex'), 4, 'application/json', 'text', 'default' from generate_series(0, 4) n;

insert into blob_removals (sha256, space_id, store, remove_after)
select lpad(to_hex(n), 64, '0'), 'default', 'packs', now() - make_interval(secs => n) from generate_series(1, 5000) n;

insert into deliveries (delivery_id, space_id, conversation_id, channel, ordinal, session_id, source_key, content, status)
select 'dlv_' || n, 'default', 'default/c' || n, 'email', n, 'sess_' || lpad(to_hex(n), 32, '0'), 's', '{}', 'sent'
from generate_series(1, 6000) n;

-- All of one sender, and ten of the last hour.
insert into mails (space_id, mailbox_id, message_id, conversation_id, session_id, from_address, subject, subject_key, body_sha256,
    answers, received_at)
select 'default', 'default', n || '@example.org', 'default/c' || n, 'sess_' || lpad(to_hex(n), 32, '0'), 'ann@example.org', 'Order',
    'order', 'x', '{}', now() - make_interval(mins => 5 * n)
from generate_series(1, 6000) n;

-- Steps that wait for a gate, and a few that a worker holds.
insert into jobs (kind, runner, space_id, conversation_id, session_id, step_number, run_at, lease, worker_id)
select 'step', '', 'default', 'default/c' || n, 'sess_' || lpad(to_hex(n), 32, '0'), 1, now() + interval '1 hour',
    case when n % 100 = 0 then n end, case when n % 100 = 0 then 'worker' || n % 7 end
from generate_series(1, 5000) n;
insert into workers (worker_id, host, pid, version, concurrency)
select 'worker' || n, 'host', n, '1', 4 from generate_series(0, 99) n;

insert into idempotency_keys (space_id, principal, key, request, body_sha256, claim, claimed_until, status, answer, expires_at)
select 'default', 'robot', 'key' || n, 'POST /v1/chat/c' || n || '/messages', 'x', 'c', now(), 202,
    json_build_object('session_id', 'sess_' || lpad(to_hex(n), 32, '0')), now() + interval '1 day'
from generate_series(1, 6000) n;

-- The open sessions wait, and are looked at again in a while.
insert into search_sessions (session_id, space_id, due_at)
select 'sess_' || lpad(to_hex(n), 32, '0'), 'default', case when n > 4000 then now() + interval '3 minutes' end
from generate_series(1, 6000) n;

insert into queue_samples (at, ready, leased, delayed, oldest_ready_s)
select date_trunc('minute', now()) + make_interval(mins => n), 1, 1, 1, 1 from generate_series(-10, 2) n;

analyze;
