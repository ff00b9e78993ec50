-- Replays run beside the deployed workers, on the same tables. A developer's replay must not be taken by a worker that
-- serves users, nor the other way round; and whatever a replay in dry-run does, nothing of it may leave.

-- The process that takes a session's jobs, by the name that it claims under. Empty: the deployed workers. Not null,
-- for a claim compares it, and only `=` reads an index.
alter table jobs add column runner text not null default '';
alter table conversation_sessions
    add column runner text not null default '',
    -- When the report of a replay was made: the same command after that begins another one.
    add column replayed_at timestamptz;

-- A replay that nobody goes on with leaves its job behind, and it is the oldest one: without the runner in front, every
-- claim of the deployed workers would walk past it.
drop index jobs_ready;
drop index jobs_suspect;
create index jobs_ready on jobs (kind, runner, run_at);
create index jobs_suspect on jobs (kind, runner, run_at) where stuck >= 2 and lease is not null;
create index sessions_by_runner on conversation_sessions (runner, started_at) where runner <> '';

-- The code makes no delivery and starts no call of such a session. These hold where the code does not.
create function is_rehearsed(session text) returns boolean language sql stable as $$
    select coalesce(
        (select policy ->> 'tool_mode' from conversation_sessions where session_id = session), 'live') <> 'live'
$$;

create function refuse_rehearsed_effect() returns trigger language plpgsql as $$
begin
    if is_rehearsed(new.session_id) then
        raise exception 'the tools of session % are not live: nothing may leave it', new.session_id
            using errcode = 'integrity_constraint_violation';
    end if;
    return new;
end
$$;

create trigger not_rehearsed before insert on deliveries
    for each row execute function refuse_rehearsed_effect();
create trigger not_rehearsed before update on tool_calls
    for each row when (new.status = 'started' and old.status <> 'started')
    execute function refuse_rehearsed_effect();
