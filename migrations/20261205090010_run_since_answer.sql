-- What a run has used since its model last answered, which its agent's limits count: a run goes on while people write faster than
-- they are answered, and each of their messages may cost as much as the first. An answer is a step whose reply is complete and asks for
-- no call. The names in this body are bound when it is created, so it needs no search_path.
create function run_since_answer(of_session text, of_run text, from_step bigint)
    returns table (steps bigint, tokens bigint)
    language sql stable
begin atomic
    select count(*), coalesce(sum(s.input_tokens + s.output_tokens), 0)
    from session_steps s
    where s.session_id = of_session and s.run_id = of_run and s.step_number >= coalesce((
        select a.step_number + 1
        from session_steps a
        where a.session_id = of_session and a.run_id = of_run and a.step_number >= from_step
            and a.finish_reason = 'stop' and a.executed_local_tool_count = 0
        order by a.step_number desc
        limit 1), from_step);
end;
