-- What an autoscaler looks at: how much work waits, and for how long. It needs no other right.
create view queue_backlog as
select kind,
    count(*) filter (where lease is null and run_at <= now()) as ready,
    count(*) filter (where lease is not null) as leased,
    count(*) filter (where lease is null and run_at > now()) as delayed,
    coalesce(extract(epoch from now() - min(run_at) filter (where lease is null and run_at <= now())), 0)::float8
        as oldest_ready_s
from jobs
where runner = ''
group by kind;
