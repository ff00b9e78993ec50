-- What a person asked to have erased, and what must be kept although somebody asks.

-- A legal hold: while one stands, what it covers is not erased.
create table legal_holds (
    hold_id text primary key default 'hold_' || replace(gen_random_uuid()::text, '-', ''),
    space_id text not null,
    -- It covers a conversation, or all that a person (an address or a user id) takes part in.
    conversation_id text,
    person text,
    reason text not null,
    placed_at timestamptz not null default clock_timestamp(),
    released_at timestamptz,
    check ((conversation_id is null) <> (person is null))
);

-- The receipt of an erasure. It names what was erased by a hash alone.
create table erasures (
    erasure_id text primary key,
    space_id text not null,
    -- SHA-256 of `conversation:ID` or `person:NAME`.
    subject_sha256 text not null,
    -- The ids that are still to be deleted from the logs. Null when all is done.
    pending jsonb,
    -- Rows by table.
    counts jsonb not null default '{}',
    begun_at timestamptz not null default clock_timestamp(),
    done_at timestamptz
);

create index erasures_unfinished on erasures (erasure_id) where pending is not null;

-- The role that may delete may neither lock rows nor write the receipt. These doors do that for it, and open for its members
-- only.
create function is_of_retention() returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if not pg_has_role(session_user, 'wakeful_retention', 'member') then
        raise exception 'only members of wakeful_retention may erase' using errcode = 'insufficient_privilege';
    end if;
end
$$;

-- Locks the conversations and returns how many of them have no run that is open or waits.
create function lock_for_erasure(ids text[]) returns bigint
    language plpgsql security definer set search_path = pg_catalog, public, pg_temp as $$
begin
    perform is_of_retention();
    perform 1 from conversation_counters where conversation_id = any (ids) order by conversation_id for update;
    -- A hold that is placed now waits until the erasure is decided.
    lock table legal_holds in share mode;
    return (select count(*) from conversation_counters
        where conversation_id = any (ids) and open_run_id is null and queued_runs = 0);
end
$$;

-- `act` is the row of the audit.
create function begin_erasure(id text, space text, subject text, what jsonb, act jsonb) returns void
    language plpgsql security definer set search_path = pg_catalog, public, pg_temp as $$
begin
    perform is_of_retention();
    insert into erasures (erasure_id, space_id, subject_sha256, pending) values (id, space, subject, what);
    insert into audit_log (actor_kind, actor, token_id, user_id, verb, target, space_id, reason, address, outcome)
    select a.actor_kind, a.actor, a.token_id, a.user_id, a.verb, id, space, a.reason, a.address, 'done'
    from jsonb_to_record(act) as a (actor_kind text, actor text, token_id text, user_id text, verb text, reason text,
        address text)
    where act is not null;
end
$$;

create function end_erasure(id text, rows_by_table jsonb) returns void
    language plpgsql security definer set search_path = pg_catalog, public, pg_temp as $$
begin
    perform is_of_retention();
    update erasures set pending = null, counts = rows_by_table, done_at = clock_timestamp()
    where erasure_id = id and pending is not null;
end
$$;
