-- Rolling deploys: which binaries the schema serves, what each worker has, and who drains.

create table schema_serves (
    one boolean primary key default true check (one),
    -- The oldest binary that this schema serves, named by the newest migration that it knows. A migration that only adds leaves it
    -- alone. One that takes something away raises it, in a release after the one that has stopped to use it.
    oldest bigint not null
);
comment on table schema_serves is 'Of the installation: the schema is one for all spaces.';
-- Binaries before this one refuse every newer schema.
insert into schema_serves (oldest) values (20261124120000);

alter table workers
    -- The newest migration that its binary knows. Null: a version before.
    add column schema_number bigint,
    -- The agents of its configuration: `NAME`, or `SPACE/NAME` if it has the agent for some spaces only.
    add column agents text[],
    -- An operator asked it to take no more jobs and to end.
    add column drain_asked_at timestamptz,
    add column drain_asked_by text;

-- A step whose agent its worker lacks waits with `held_by` = `lacks:NAME`, and only workers that have the agent claim it
-- (`jobs_held` is their way).
