-- What the console draws: how often the runs of a group failed in each hour, and each try of a delivery.
create table error_hours (
    space_id text not null,
    fingerprint text not null,
    hour timestamptz not null,
    count bigint not null,
    primary key (space_id, fingerprint, hour)
);
select keep_spaces_apart('error_hours');

insert into error_hours (space_id, fingerprint, hour, count)
select f.space_id, f.fingerprint, date_bin('1 hour', f.at, timestamptz 'epoch'), count(*)
from run_failures f
join conversation_sessions s using (session_id)
where f.is_counted and f.at > now() - interval '8 days' and s.trigger_type <> 'replay'
group by 1, 2, 3;

-- Begin and end of each try that did not send it, the oldest first. No text, so there is nothing to seal or to erase.
alter table deliveries add column tries jsonb not null default '[]';

create function keep_tries(tries jsonb, began timestamptz, ended timestamptz) returns jsonb
    language sql stable parallel safe set search_path = pg_catalog, pg_temp as $$
    select case
        when began is null or (tries -> -1 ->> 'began')::timestamptz = began then tries
        else case when jsonb_array_length(tries) < 50 then tries else tries - 0 end
            || jsonb_build_array(jsonb_build_object('began', began, 'ended', ended))
    end
$$;
comment on function keep_tries(jsonb, timestamptz, timestamptz) is
    'The tries of a delivery with one more, at most the last fifty. Without an end, nobody knows when it ended.';
