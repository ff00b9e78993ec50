-- Failed runs in groups: the same kind of fault, of the same provider, with the same text but for numbers, ids, quotes and hosts.

-- One row each time a run fails for good, written by the commit that ends the run.
create table run_failures (
    failure_id bigint generated always as identity primary key,
    session_id text not null,
    run_id text not null,
    space_id text not null,
    fingerprint text not null,
    kind text not null,
    source text not null,
    "text" text not null,
    error text not null,
    version text not null,
    at timestamptz not null default clock_timestamp(),
    -- Its group counts it.
    is_counted boolean not null default false
);
comment on table run_failures is 'The space is that of the session.';

create index run_failures_to_count on run_failures (failure_id) where not is_counted;
create index run_failures_by_session on run_failures (session_id);

-- A worker counts the rows above here, a moment later: runs that fail at once do not wait for one another.
create table error_groups (
    space_id text not null,
    fingerprint text not null,
    kind text not null,
    source text not null,
    "text" text not null,
    -- The newest error as it was.
    example text not null,
    count bigint not null,
    first_at timestamptz not null,
    last_at timestamptz not null,
    first_version text not null,
    last_version text not null,
    -- The last ten sessions, the newest first.
    sample text[] not null,
    -- 'infinity': for good.
    muted_until timestamptz,
    muted_by text,
    mute_reason text,
    note text,
    noted_by text,
    noted_at timestamptz,
    primary key (space_id, fingerprint)
);
comment on table error_groups is 'The space is that of the sessions that failed.';

create index error_groups_newest on error_groups (last_at desc, fingerprint);

select keep_spaces_apart('run_failures');
select keep_spaces_apart('error_groups');
