-- A step that the database itself fails again and again: since when and how often, on the job's row, by a statement that
-- touches no other table. Progress ends it.

alter table jobs
    add column fault_since timestamptz,
    add column faults integer not null default 0;

-- Few jobs are in it. Step commits write a null over a null.
create index jobs_with_faults on jobs (fault_since) where fault_since is not null;
