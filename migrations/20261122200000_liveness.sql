-- A worker that dies frees its jobs within a second. Without this, they wait for the ends of their leases.

-- Keys of the advisory locks that worker processes hold while they live. A process takes a new key with each connection.
create sequence liveness_locks as integer cycle;

-- The key that the lease's holder had at its claim or its last heartbeat. Null: only the lease's end tells that the
-- holder is gone.
alter table jobs add column liveness_lock integer;

-- Every process asks twice a second which holders have jobs. Step commits write neither column, so they stay HOT.
create index jobs_by_liveness_lock on jobs (liveness_lock) where liveness_lock is not null and lease is not null;
