-- The job queue. It holds live work only: done means deleted, or moved on to the next step. So a claim costs the
-- same after ten jobs and after ten million.
--
-- `run_at` is the visibility time: when the job may be claimed, and while it is leased the lease's end. Step commits
-- do not touch it, so that they stay HOT.

create sequence leases;

create table jobs (
    job_id bigint generated always as identity primary key,
    kind text not null check (kind in ('step', 'deliver')),
    space_id text not null,
    conversation_id text not null,
    session_id text,
    channel text,
    step_number bigint,
    -- deliver: how often something was enqueued; the job ends only if nothing was since the last look.
    pending bigint not null default 1,
    priority smallint not null default 0,
    run_at timestamptz not null default clock_timestamp(),
    -- The token of one claim, never used again. Null when nobody holds it.
    lease bigint,
    -- Claims without progress since, crashes included.
    stuck integer not null default 0,
    -- Claims of this step.
    attempt integer not null default 0,
    worker_id text,
    trace_context text,
    last_error text,
    created_at timestamptz not null default clock_timestamp(),
    check ((kind = 'step') = (session_id is not null and step_number is not null)),
    check ((kind = 'deliver') = (channel is not null))
) with (fillfactor = 50);

create unique index one_step_job_per_session on jobs (session_id) where kind = 'step';
create unique index one_deliver_job_per_channel on jobs (conversation_id, channel) where kind = 'deliver';
create index jobs_ready on jobs (kind, run_at);
-- A claim takes one suspect beside the ready jobs. Suspects are few: without an index of their own the search for one
-- would walk through everything that is pending. Progress is the first update that leaves the index, so step commits
-- stay HOT.
create index jobs_suspect on jobs (kind, run_at) where stuck >= 2 and lease is not null;

create table workers (
    worker_id text primary key,
    host text not null,
    pid integer not null,
    version text not null,
    concurrency integer not null,
    started_at timestamptz not null default clock_timestamp(),
    beat_at timestamptz not null default clock_timestamp()
);
