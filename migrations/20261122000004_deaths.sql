-- What a claim's end tells: a holder that gave its job back met a fault, one that did not is dead. The two are counted
-- apart, because a process that dies takes the claims of its neighbours along.

-- Claims since the last progress, of those without any, whose holder never gave the job back.
alter table jobs add column died integer not null default 0;

-- When the delivery's present attempt began: until some time after it, "it is not there" proves nothing.
alter table deliveries
    add column sending_at timestamptz,
    -- Until then nobody may say that it did not happen.
    add column settled_by timestamptz;
