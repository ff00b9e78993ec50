-- Schedules, and what became of their ticks.
--
-- A schedule's row is what its scheduler decides from and is locked while it does: `last_tick` is the tick up to which
-- everything was decided, and moves in the transaction that wakes the sessions of the ticks.

create table schedules (
    -- Of space and name: the same again after it was deleted, so that no tick of it fires twice.
    schedule_id text primary key,
    space_id text not null,
    name text not null,
    source text not null check (source in ('config', 'api')),
    cron text not null,
    time_zone text not null,
    agent text not null,
    conversation_id text not null,
    prompt text not null,
    -- Addresses that its replies go to.
    mail_to text[] not null default '{}',
    missed text not null check (missed in ('skip', 'one', 'all')),
    missed_limit integer not null check (missed_limit between 1 and 100),
    overlap text not null check (overlap in ('skip', 'queue')),
    paused_at timestamptz,
    paused_by text check (paused_by in ('person', 'config')),
    last_tick timestamptz not null,
    -- Null: no tick follows.
    next_at timestamptz,
    -- Counts definitions: of several that write one, the last stands.
    revision bigint not null default 1,
    created_at timestamptz not null default clock_timestamp(),
    updated_at timestamptz not null default clock_timestamp(),
    unique (space_id, name),
    check ((paused_at is null) = (paused_by is null))
);

create index schedules_due on schedules (next_at) where paused_at is null;

-- The newest ones a schedule; older ones are deleted as these are written.
create table schedule_firings (
    firing_id bigint generated always as identity primary key,
    schedule_id text not null references schedules (schedule_id) on delete cascade,
    tick timestamptz not null,
    manual boolean not null default false,
    -- Fired, or skipped with a reason.
    session_id text,
    reason text,
    at timestamptz not null default clock_timestamp(),
    check ((session_id is null) <> (reason is null))
);

create index schedule_firings_by_schedule on schedule_firings (schedule_id, firing_id desc);
