-- Every process asks twice a second which holders have jobs under a lease that lasts. Entries of finished jobs stay in an
-- index while some transaction still sees those jobs. By the lease's end, the question reads only the entries of the leases
-- of the last seconds.
drop index jobs_by_liveness_lock;
create index jobs_by_liveness_lock on jobs (run_at, liveness_lock)
    where liveness_lock is not null and lease is not null;
