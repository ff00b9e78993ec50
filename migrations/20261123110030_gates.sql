-- Providers' outages. A step that a provider's faults hold up has a budget by the clock, which the job's row carries, so that
-- it survives crashes and other workers. A gate keeps the fleet from calling a provider that is down.

alter table jobs
    -- Since when a provider's faults, or the wait for its gate, keep the step from progress; and how many calls failed since.
    add column outage_since timestamptz,
    add column outage_faults integer not null default 0,
    -- The gate that the job waits for, and since when. `run_at` is then only the time at which it looks by itself.
    add column waits_for text,
    add column waits_since timestamptz,
    -- The opening at which the gate let this job through.
    add column gate_pass bigint;

-- The process that opens a gate frees the jobs that wait for it, the oldest first. Step commits do not touch these columns.
create index jobs_waiting on jobs (waits_for, waits_since) where waits_for is not null;

-- One row for each provider and credential that has failed. Only faults and what follows them write here.
create table provider_gates (
    gate_id text primary key,
    provider text not null,
    phase text not null default 'open' check (phase in ('open', 'shut', 'opening')),
    -- Faults without a success between them.
    faults integer not null default 0,
    last_fault_at timestamptz,
    last_error text,
    -- shut and opening: since when the provider has been failing.
    since timestamptz,
    -- shut: when the next probe may be made, and how many have failed.
    probe_at timestamptz,
    probes integer not null default 0,
    -- The job that makes the probe, and until when it holds it. Its worker renews this while it waits for the answer.
    probe_job bigint,
    probe_until timestamptz,
    -- opening: the number of the next wave of jobs that are let through.
    wave integer not null default 0,
    -- Increases with each opening.
    opening bigint not null default 0,
    -- When the next jobs may be woken. The process that moves it on wakes them.
    wake_at timestamptz,
    check ((phase = 'open') = (since is null)),
    check ((phase = 'shut') = (probe_at is not null))
);
