-- What a run has used: as its row says, or while it is open, as its steps say. For another run the key is null, so no step is read.
create function used_by_run(run session_runs)
    returns table (steps bigint, input_tokens bigint, output_tokens bigint, tool_calls bigint)
    language sql stable
begin atomic
    select run.steps, run.input_tokens, run.output_tokens, run.tool_calls
    where run.status <> 'running'
    union all
    select t.steps, t.input_tokens, t.output_tokens, t.tool_calls
    from run_totals(case when run.status = 'running' then run.session_id end, run.run_id, run.from_step) t
    where run.status = 'running';
end;
