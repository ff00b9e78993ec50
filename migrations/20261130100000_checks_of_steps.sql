-- no-transaction
-- Postgres parses and prepares each CHECK of a table again for each statement that writes there, and the commit of a step
-- writes to nine tables. What these conditions say is held by the program: its enums, and how it makes a job. A database of the tests has them still
-- (tests/support/checks.sql), so each test of the product finds a statement that breaks one. The one on
-- conversation_counters stays: it refuses what a count that drifted would become.
-- Each table has a transaction of its own: a worker that has one of them locked may wait for another one. And each waits for two seconds at a
-- time only: behind it, all workers would wait for whoever reads the table for long, such as a dump.
do $$
declare
    target record;
    is_done boolean;
begin
    for target in
        select * from (values
            ('conversation_sessions', '{conversation_sessions_check,conversation_sessions_status_check}'::text[]),
            ('conversation_records', '{conversation_records_role_check}'),
            ('session_inbox', '{session_inbox_status_check}'),
            ('session_runs', '{session_runs_status_check}'),
            ('session_steps', '{session_steps_worker_id_check}'),
            ('generations', '{generations_purpose_check}'),
            ('tool_calls', '{tool_calls_effect_check,tool_calls_status_check}'),
            ('deliveries', '{deliveries_status_check}'),
            ('jobs', '{jobs_check,jobs_check1,jobs_kind_check}')
        ) as targets (of_table, names)
    loop
        loop
            begin
                set local lock_timeout = '2s';
                execute format('alter table %I ', target.of_table)
                    || (select string_agg(format('drop constraint if exists %I', name), ', ') from unnest(target.names) as name);
                is_done := true;
            exception
                when lock_not_available then is_done := false;
            end;
            commit;
            exit when is_done;
            perform pg_sleep(1);
        end loop;
    end loop;
end
$$;
