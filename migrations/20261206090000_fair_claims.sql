-- Of the jobs that nobody has claimed, by space: a claim in turn finds the next space that waits, and its oldest job, without
-- walking through the jobs of the others. A claimed job has no entry here, so the commit of a step does not write this index.
-- A job that a pause or a missing agent holds is not ready, so it has none either.
create index jobs_unclaimed_by_space on jobs (kind, runner, space_id, run_at) where lease is null and held_by is null;
