-- What was done to the world: tool calls (the ledger) and outgoing messages (the outbox).

create table tool_calls (
    session_id text not null,
    call_id text not null,
    run_id text not null,
    step_number bigint not null,
    -- The message that asked for it, and the one that holds its result.
    message_number bigint not null,
    result_message_number bigint,
    name text not null,
    args_sha256 text not null,
    effect text not null check (effect in ('pure', 'idempotent', 'guarded')),
    status text not null default 'invoked'
        check (status in ('invoked', 'started', 'done', 'failed', 'uncertain', 'waiting', 'abandoned')),
    -- Written by the compare-and-set that started it: only the call frame that knows it may run the tool.
    start_nonce text,
    attempts integer not null default 0,
    -- Until then a call found `started` may still be running somewhere.
    settled_by timestamptz,
    outcome json,
    receipt json,
    started_at timestamptz,
    settled_at timestamptz,
    primary key (session_id, call_id)
) with (fillfactor = 70);

create index tool_calls_open on tool_calls (session_id) where result_message_number is null;

create table deliveries (
    delivery_id text primary key,
    space_id text not null,
    conversation_id text not null,
    channel text not null,
    ordinal bigint not null,
    session_id text not null,
    -- The call that asked for it, or message number and part: the same step performed twice sends once.
    source_key text not null,
    content json not null,
    status text not null default 'queued'
        check (status in ('queued', 'sending', 'sent', 'failed', 'expired', 'uncertain')),
    attempt integer not null default 0,
    lease bigint,
    not_after timestamptz,
    receipt json,
    last_error text,
    created_at timestamptz not null default clock_timestamp(),
    settled_at timestamptz,
    unique (session_id, source_key, channel)
) with (fillfactor = 70);

create index deliveries_open on deliveries (conversation_id, channel, ordinal)
    where status in ('queued', 'sending');
create index deliveries_by_session on deliveries (session_id);

create sequence delivery_ordinals;
