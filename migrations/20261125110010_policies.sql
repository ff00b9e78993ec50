-- The policy of each table, so written that Postgres expects nearly all rows to pass it. It took the setting for one of the spaces,
-- and expected to see one row of as many as there are spaces, besides the condition on the space that a list has of its own. So it
-- read and sorted all sessions of a space instead of its newest fifty.
create or replace function keep_spaces_apart(relation regclass) returns void
    language plpgsql set search_path = pg_catalog, public, pg_temp as $$
begin
    execute format('alter table %s enable row level security, force row level security', relation);
    -- One policy for all commands, so that reading and writing cannot differ. The sub-select reads the setting once for a
    -- statement and not once for a row. A row that is written is checked by the plain expression, because most statements
    -- write few rows of a table, and a sub-plan costs more to start than the expression costs for some rows.
    execute format(
        'create policy of_its_space on %s
            using (nullif((select current_setting(''wakeful.space'', true)) = any (array[space_id, ''*'']), false) is not null)
            with check (current_setting(''wakeful.space'', true) = any (array[space_id, ''*'']))',
        relation);
end
$$;

do $$
declare
    relation regclass;
begin
    for relation in select polrelid::regclass from pg_policy where polname = 'of_its_space' loop
        execute format(
            'alter policy of_its_space on %s
                using (nullif((select current_setting(''wakeful.space'', true)) = any (array[space_id, ''*'']), false) is not null)',
            relation);
    end loop;
end
$$;
