-- What a run has used so far: the sums of its steps from `from_step` on. The names in this body are bound when it is created, so it needs no
-- search_path; with one, Postgres could not put the query in the place of the call.
create function run_totals(of_session text, of_run text, from_step bigint)
    returns table (steps bigint, input_tokens bigint, output_tokens bigint, tool_calls bigint)
    language sql stable
begin atomic
    select count(*), coalesce(sum(s.input_tokens), 0), coalesce(sum(s.output_tokens), 0),
        coalesce(sum(s.executed_local_tool_count), 0)
    from session_steps s
    where s.session_id = of_session and s.run_id = of_run and s.step_number >= from_step;
end;
