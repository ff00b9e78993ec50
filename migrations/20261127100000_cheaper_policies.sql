-- The policies cost a third of what they did. `any (array[space_id, '*'])` built an array for every row. A `case` looks at the
-- setting once, stops at the first match, and builds nothing.
create or replace function keep_spaces_apart(relation regclass) returns void
    language plpgsql set search_path = pg_catalog, public, pg_temp as $$
begin
    execute format('alter table %s enable row level security, force row level security', relation);
    -- One policy for all commands, so that reading and writing cannot differ. The sub-select reads the setting once for a
    -- statement and not once for a row. A row that is written is checked by the plain expression, because most statements
    -- write few rows of a table, and a sub-plan costs more to start than the expression costs for some rows.
    -- Postgres expects nearly all rows to pass `is not null`, so it plans a list as if there were no policy.
    execute format(
        'create policy of_its_space on %s
            using (case (select current_setting(''wakeful.space'', true)) when ''*'' then true when space_id then true end is not null)
            with check (case current_setting(''wakeful.space'', true) when ''*'' then true when space_id then true else false end)',
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
                using (case (select current_setting(''wakeful.space'', true)) when ''*'' then true when space_id then true end is not null)
                with check (case current_setting(''wakeful.space'', true) when ''*'' then true when space_id then true else false end)',
            relation);
    end loop;
end
$$;
