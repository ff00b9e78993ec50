-- Sessions, what they saw at their start, and the conversations and runs around them.
--
-- The session row is the cache that everything reads: state, status, totals and pointers are written by the
-- statement that writes what they derive from. Its updates touch no indexed column, so they stay HOT; the
-- fill factor leaves the room for that.

create table conversation_counters (
    conversation_id text primary key,
    space_id text not null,
    mailbox_id text not null,
    -- Written when a run opens, pauses or closes; while one is open the session allocates.
    last_message_number bigint not null default 0,
    open_run_id text,
    queued_runs integer not null default 0 check (queued_runs >= 0),
    parent_conversation_id text,
    forked_at_message_number bigint,
    created_at timestamptz not null default now()
);

create table conversation_sessions (
    session_id text primary key,
    conversation_id text not null,
    space_id text not null,
    mailbox_id text not null,
    trigger_type text not null,
    trigger_id text not null,
    agent text not null,
    model_id text not null,
    model_context_window integer not null,
    status text not null default 'running'
        check (status in ('created', 'queued', 'running', 'waiting_input', 'needs_attention',
                          'completed', 'failed', 'archived', 'terminated')),
    cancel_requested boolean not null default false,
    policy jsonb,
    initial_state jsonb not null default '{}',
    state jsonb not null default '{}',
    tool_names text[],
    seed_message_count integer not null default 0,
    base_message_number bigint not null default 0,
    last_message_number bigint not null default 0,
    to_message_number bigint not null default 0,
    last_event_seq bigint not null default 0,
    last_step_number bigint not null default 0,
    wake_seq bigint not null default 0,
    total_turns integer not null default 0,
    total_input_tokens bigint not null default 0,
    total_output_tokens bigint not null default 0,
    total_cached_tokens bigint not null default 0,
    total_cache_write_tokens bigint not null default 0,
    total_cost_micros bigint not null default 0,
    -- Integer cents lose every step that costs less than one: micros are kept, cents are shown.
    total_cost_cents integer generated always as (((total_cost_micros + 5000) / 10000)::integer) stored,
    parent_session_id text,
    forked_from_message_id text,
    prefix_sha256 text,
    started_at timestamptz not null default now(),
    completed_at timestamptz,
    error text,
    check (to_message_number <= last_message_number),
    -- A trigger that is delivered twice finds the session it made.
    unique (space_id, mailbox_id, trigger_type, trigger_id)
) with (fillfactor = 70);

create index idx_sessions_conversation on conversation_sessions (conversation_id);
create index idx_sessions_space on conversation_sessions (space_id, mailbox_id, started_at desc);

create table session_seed_messages (
    session_id text not null references conversation_sessions (session_id),
    ordinal integer not null,
    role text not null check (role in ('system', 'user', 'assistant')),
    content text not null,
    is_new boolean not null default false,
    "timestamp" bigint,
    details jsonb,
    primary key (session_id, ordinal)
);

create table session_runs (
    run_id text primary key,
    session_id text not null,
    conversation_id text not null,
    status text not null
        check (status in ('queued', 'running', 'waiting_input', 'needs_attention', 'completed', 'failed')),
    -- The record that started it; null while it is queued.
    prompt_message_number bigint,
    steps bigint not null default 0,
    input_tokens bigint not null default 0,
    output_tokens bigint not null default 0,
    tool_calls bigint not null default 0,
    error text,
    -- W3C traceparent of what woke it.
    trace_context text,
    created_at timestamptz not null default clock_timestamp(),
    started_at timestamptz,
    completed_at timestamptz
) with (fillfactor = 80);

-- A conversation has one open run at most; pauses and queued runs are outside of it.
create unique index one_open_run_per_conversation on session_runs (conversation_id) where status = 'running';
create index session_runs_by_session on session_runs (session_id, created_at);
create index session_runs_queued on session_runs (conversation_id, created_at) where status = 'queued';

create table session_inbox (
    session_id text not null,
    inbox_id bigint generated always as identity,
    -- The sender's own key: the same one again is the same message.
    client_key text not null,
    content text not null,
    -- Who sent it, as the trigger names people.
    sender text,
    -- Of content and sender: what a duplicate is held against.
    content_sha256 text not null,
    status text not null default 'pending' check (status in ('pending', 'drained')),
    -- What the sender was answered, given again to a duplicate.
    run_id text not null,
    outcome text not null,
    created_at timestamptz not null default clock_timestamp(),
    primary key (session_id, inbox_id),
    unique (session_id, client_key)
);

create index session_inbox_pending on session_inbox (session_id, inbox_id) where status = 'pending';
