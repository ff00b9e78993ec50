-- Of the jobs that have no lease and that nothing holds, by space: a claim in turn finds the next space that waits, and its oldest jobs,
-- without walking through the ready jobs of the others. A claimed job has no entry here, so the commit of a step does not write this
-- index. Jobs held by a pause or a missing agent have none either. Delayed jobs have one, also those that wait for a model's gate.
create index jobs_unclaimed_by_space on jobs (kind, runner, space_id, run_at)
    where lease is null and held_by is null;
