-- The two logs of a session and the pointers into them.
--
-- No foreign keys here: each insert would lock the session row, which the commit has locked already and a
-- reader must not wait for. What a key would guarantee, the commit's own statement does: rows are inserted
-- only out of the rows that it has updated.

create table conversation_records (
    conversation_id text not null,
    message_number bigint not null,
    message_id text not null default 'msg_' || replace(gen_random_uuid()::text, '-', ''),
    session_id text not null,
    run_id text not null,
    step_number bigint not null,
    role text not null check (role in ('system', 'user', 'assistant', 'tool')),
    -- json, not jsonb: the text comes back as it went in, numbers and all.
    content json not null,
    internal boolean not null default false,
    details json not null default '{}',
    created_at timestamptz not null default now(),
    primary key (conversation_id, message_number)
);

create index conversation_records_by_session on conversation_records (session_id, message_number);

create table session_events (
    session_id text not null,
    seq bigint not null,
    ts timestamptz not null default clock_timestamp(),
    type text not null,
    run_id text,
    step_number bigint,
    payload jsonb not null default '{}',
    dedupe_key text,
    primary key (session_id, seq)
);

create unique index session_events_dedupe on session_events (session_id, dedupe_key) where dedupe_key is not null;

create function refuse_rewrite() returns trigger language plpgsql as $$
begin
    if tg_op = 'DELETE' and current_user = 'wakeful_retention' then
        return old;
    end if;
    raise exception '% is append-only: % is refused', tg_table_name, lower(tg_op)
        using errcode = 'integrity_constraint_violation',
              hint = 'Only retention, in its own role wakeful_retention, may delete.';
end
$$;

create trigger append_only before update or delete on conversation_records
    for each row execute function refuse_rewrite();
create trigger append_only before update or delete on session_events
    for each row execute function refuse_rewrite();
create trigger append_only_whole before truncate on conversation_records
    for each statement execute function refuse_rewrite();
create trigger append_only_whole before truncate on session_events
    for each statement execute function refuse_rewrite();

-- The cached result of a step. It points at messages and never holds one: at most 256 bytes a row.
create table session_steps (
    session_id text not null,
    step_number bigint not null,
    run_id text not null,
    from_message_number bigint not null,
    to_message_number bigint not null,
    finish_reason text not null,
    input_tokens integer not null,
    output_tokens integer not null,
    cached_tokens integer not null,
    cache_write_tokens integer not null,
    cost_micros bigint not null,
    executed_local_tool_count integer not null,
    attempt integer not null,
    event_seq bigint not null,
    lease bigint not null,
    worker_id text not null,
    started_at timestamptz not null,
    committed_at timestamptz not null default clock_timestamp(),
    primary key (session_id, step_number),
    check (length(worker_id) <= 32)
);

-- A model call in flight and what readers were shown of it. These two tables alone may lose their newest rows in
-- a crash of the server (asynchronous commit): the answer itself is a record.
create table generations (
    session_id text not null,
    generation_id text not null,
    step_number bigint not null,
    attempt bigint not null,
    model text not null,
    request_sha256 text not null,
    started_at timestamptz not null default clock_timestamp(),
    primary key (session_id, generation_id)
);

create table generation_chunks (
    session_id text not null,
    generation_id text not null,
    chunk_no bigint not null,
    "text" text not null,
    primary key (session_id, generation_id, chunk_no)
);

create table blobs (
    sha256 text primary key,
    size bigint not null,
    media_type text not null,
    bytes bytea not null,
    touched_at timestamptz not null default now()
);
