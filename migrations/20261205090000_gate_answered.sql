-- Some requests fail by themselves: others are answered meanwhile. Whether that is so has to be known to every worker.
alter table provider_gates
    -- The last answer that was recorded: one that follows a fault, or a probe's.
    add column answered_at timestamptz;
