-- Of the jobs that have no lease and that nothing holds, by space: a claim in turn finds the next space that waits, and its oldest jobs,
-- without walking through the jobs of the others. A claimed job has no entry here, so the commit of a step does not write this index. One
-- that a pause, a missing agent or a shut gate holds has none either; one that is delayed has.
create index jobs_unclaimed_by_space on jobs (kind, runner, space_id, run_at)
    where lease is null and held_by is null and waits_for is null;
