-- no-transaction
-- What a run used is counted when it ends, out of its steps: a commit of a step writes one row less. And the session's cost is
-- rounded to cents where it is read: Postgres prepares the expression of a generated column again for each statement that updates the row.
-- Workers of before know neither, so this schema serves none of them (schema::OLDEST).
do $$
declare
    change text;
    is_done boolean;
begin
    foreach change in array array[
        -- The run has no step before this one, so that run_totals need not read those. 0 is for runs from before and for imported ones.
        'alter table session_runs add column if not exists from_step bigint not null default 0',
        'alter table conversation_sessions drop column if exists total_cost_cents'
    ] loop
        loop
            begin
                -- Behind it, all workers would wait for whoever reads the table for long, such as a dump.
                set local lock_timeout = '2s';
                execute change;
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
