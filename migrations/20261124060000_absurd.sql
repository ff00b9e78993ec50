-- Tasks of Absurd that became sessions.

create table absurd_imports (
    space_id text not null,
    -- `absurd:` and the queue's name, as the session's trigger type.
    source text not null,
    task_id text not null,
    -- How often the task came: more than 1 only if it was given back and taken again.
    time integer not null,
    session_id text not null,
    task_name text not null,
    task_state text not null,
    shape text not null,
    idempotency_key text,
    -- Absurd ran it no more, because it was parked there.
    taken boolean not null,
    -- The journal's last entry when the session was written: a later one means that something happened to it here.
    event_seq bigint not null default 0,
    -- here: it is ours. returning: it must not run here any more, and Absurd does not have it yet. returned: Absurd has it.
    phase text not null default 'here' check (phase in ('here', 'returning', 'returned')),
    messages bigint not null default 0,
    steps bigint not null default 0,
    -- Bytes of the checkpoints in Absurd's table, and of our messages and steps.
    checkpoint_bytes bigint not null default 0,
    record_bytes bigint not null default 0,
    imported_at timestamptz not null default clock_timestamp(),
    primary key (space_id, source, task_id, time)
);

comment on table absurd_imports is 'Of the space of the session that the task became.';

-- Two imports at once: the second waits for the commit of the first, and finds that it has nothing to do.
create unique index absurd_imports_here on absurd_imports (space_id, source, task_id) where phase <> 'returned';
create index absurd_imports_by_session on absurd_imports (session_id);
create index absurd_imports_by_key on absurd_imports (space_id, source, idempotency_key) where idempotency_key is not null;

-- The steps of a task may come without usage. Then the counts are 0 and unknown.
alter table session_steps add column usage_unknown boolean not null default false;

select keep_spaces_apart('absurd_imports');
