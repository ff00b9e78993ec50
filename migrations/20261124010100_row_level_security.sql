-- The database keeps the spaces apart: row-level security on every table that has rows of spaces.
--
-- A connection says in the setting `wakeful.space` which space it works for, or `*` for all of them: the loop of the
-- workers, migrations, erasures, and operators with rights on the database. Without the setting it sees no row and writes
-- none. `serve` sets it for each request to the space of the caller's token, so a statement that forgets its condition
-- finds nothing of another space.
--
-- A policy has no say over superusers and roles with BYPASSRLS. It is forced, so that it binds the owner of the tables too.
-- Who may run any SQL may also set the setting: this defends against mistakes of our statements, not against
-- somebody with the runtime role's password.

create function keep_spaces_apart(relation regclass) returns void
    language plpgsql set search_path = pg_catalog, public, pg_temp as $$
begin
    execute format('alter table %s enable row level security, force row level security', relation);
    -- One policy for all commands, so that reading and writing cannot differ. The sub-select reads the setting once for a
    -- statement and not once for a row. A row that is written is checked by the plain expression, because most statements
    -- write few rows of a table, and a sub-plan costs more to start than the expression costs for some rows.
    execute format(
        'create policy of_its_space on %s
            using ((select current_setting(''wakeful.space'', true)) = any (array[space_id, ''*'']))
            with check (current_setting(''wakeful.space'', true) = any (array[space_id, ''*'']))',
        relation);
end
$$;

comment on function keep_spaces_apart(regclass) is 'A migration calls it for each new table with rows of spaces.';

do $$
declare
    name text;
begin
    foreach name in array array['conversation_counters', 'conversation_sessions', 'session_seed_messages', 'session_runs',
        'session_inbox', 'conversation_records', 'session_events', 'session_steps', 'generations', 'generation_chunks',
        'blobs', 'tool_calls', 'deliveries', 'jobs', 'mails', 'schedules', 'schedule_firings', 'legal_holds', 'erasures']
    loop
        perform keep_spaces_apart(name::regclass);
    end loop;
end
$$;

-- An autoscaler sees the counts of all spaces and no row, so its view reads through a function that looks at all of them.
create function backlog_of_all_spaces()
    returns table (kind text, ready bigint, leased bigint, delayed bigint, oldest_ready_s float8)
    language sql stable security definer
    set search_path = pg_catalog, public, pg_temp set wakeful.space = '*' as $$
    select kind,
        count(*) filter (where lease is null and run_at <= now()),
        count(*) filter (where lease is not null),
        count(*) filter (where lease is null and run_at > now()),
        coalesce(extract(epoch from now() - min(run_at) filter (where lease is null and run_at <= now())), 0)::float8
    from jobs
    where runner = ''
    group by kind
$$;

create or replace view queue_backlog as
select kind, ready, leased, delayed, oldest_ready_s from backlog_of_all_spaces();
