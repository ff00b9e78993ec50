-- Retry, cancel, archive or wake many sessions: a batch, which workers carry out at a bounded rate.

create table batches (
    batch_id text primary key,
    -- '*': of the whole installation, made by the command line. Its members have the spaces of their sessions.
    space_id text not null,
    verb text not null check (verb in ('retry', 'cancel', 'archive', 'wake')),
    reason text,
    -- As it was asked for. Members are chosen when the batch is made.
    filter jsonb not null,
    status text not null check (status in ('proving', 'running', 'paused', 'done', 'cancelled')),
    status_reason text,
    -- Members a second.
    rate double precision not null check (rate > 0),
    -- When workers may act on the next members. The worker that moves it on acts.
    next_at timestamptz not null default clock_timestamp(),
    -- The numbers of members of the stages before the last one, which has the rest.
    stages integer[] not null default '{}',
    stage integer not null default 0,
    -- Of a retry: the share of a stage's members that may fail again.
    stop_share double precision check (stop_share between 0 and 1),
    -- Of a retry: how many members are tried dry before, and with which model.
    prove integer not null default 0,
    model text,
    model_context_window integer,
    proof jsonb,
    -- Who made it: every act on a member is this person's.
    actor_kind text not null,
    actor text not null,
    token_id text,
    user_id text,
    address text,
    client_key text,
    request_sha256 text not null,
    members integer not null,
    created_at timestamptz not null default clock_timestamp(),
    started_at timestamptz,
    -- What failed again before this does not pause it any more.
    resumed_at timestamptz,
    ended_at timestamptz,
    unique (space_id, client_key)
);
comment on table batches is 'The space is that of the token that made it; * is the whole installation.';

create index batches_at_work on batches (next_at) where status in ('running', 'proving');

create table batch_members (
    batch_id text not null references batches (batch_id) on delete cascade,
    ordinal integer not null,
    space_id text not null,
    session_id text not null,
    stage integer not null,
    -- acted: done, in the commit that wrote this word. refused: its status had changed before.
    outcome text not null default 'pending' check (outcome in ('pending', 'acted', 'refused')),
    detail text,
    run_id text,
    acted_at timestamptz,
    -- Of a retry: how the run ended then.
    result text check (result in ('passed', 'failed_again', 'cancelled')),
    result_at timestamptz,
    primary key (batch_id, ordinal),
    unique (batch_id, session_id)
);
comment on table batch_members is 'The space is that of the session.';

create index batch_members_pending on batch_members (batch_id, ordinal) where outcome = 'pending';
create index batch_members_open on batch_members (batch_id, ordinal) where outcome = 'acted' and result is null;
create index batch_members_by_session on batch_members (session_id);

-- A member that is tried dry before the batch acts: a copy of the session, which has no effects.
create table batch_proofs (
    batch_id text not null references batches (batch_id) on delete cascade,
    ordinal integer not null,
    space_id text not null,
    session_id text not null,
    -- Null: not begun.
    copy_session_id text,
    result text check (result in ('passed', 'failed')),
    error text,
    fingerprint text,
    -- It failed with the error that it had failed with before.
    same boolean,
    primary key (batch_id, ordinal)
);
comment on table batch_proofs is 'The space is that of the session.';

create index batch_proofs_open on batch_proofs (batch_id, ordinal) where result is null;

select keep_spaces_apart('batches');
select keep_spaces_apart('batch_members');
select keep_spaces_apart('batch_proofs');
