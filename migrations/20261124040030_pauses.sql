-- What operators have paused. A step asks its worker's copy of this table, and a job that a pause holds up leaves the claims'
-- way, so a claim costs the same with and without pauses.

create sequence pause_numbers;

create table pauses (
    pause_id text primary key,
    kind text not null
        check (kind in ('queue', 'space', 'agent', 'trigger', 'provider', 'tool', 'conversation', 'schedule')),
    -- Of a conversation or a schedule with its space; empty for the queue.
    name text not null,
    reason text not null,
    paused_by text,
    since timestamptz not null default clock_timestamp(),
    ends_at timestamptz,
    -- Not null: it has ended, and lets its jobs go, `rate` of them a second.
    resuming_since timestamptz,
    rate double precision check (rate > 0),
    tended_at timestamptz,
    -- A job with this pass goes through.
    number bigint not null default nextval('pause_numbers')
);
comment on table pauses is
    'Of the installation: its operators pause spaces, agents, providers and the queue alike. It holds no text of a session.';

alter table jobs
    -- The pause that holds the job, and since when. `run_at` is then only the time at which it looks by itself.
    add column held_by text,
    add column held_since timestamptz,
    -- The pauses that let it go, by their numbers.
    add column pause_passes bigint[];

create index jobs_held on jobs (held_by, held_since) where held_by is not null;
