-- A claim takes one suspect (`stuck` of two or more) beside the ready jobs. Suspects are few, and without an index of
-- their own the search for one walked through everything that is pending: a claim grew dearer with the backlog.
--
-- Of the updates of `stuck`, only those that change it cost an entry here and HOT: the claim, which has moved `run_at`
-- anyway, and the first progress after it.

create index jobs_suspect on jobs (kind, run_at) where stuck >= 2;
