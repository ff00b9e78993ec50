-- Every row belongs to a space. Each table that has rows of sessions names the space in a column of its own, so that the
-- database can compare it without looking at another table, and a table of the installation says so in its comment.
--
-- An installation that never used another space has all its rows in `default`: for those the column's first default is the
-- whole backfill, and no row is rewritten. Rows of other spaces take theirs from their session. The logs refuse that to
-- all but this transaction of the owner, which takes their triggers away and puts them back.

alter table session_seed_messages add column space_id text not null default 'default';
alter table session_runs add column space_id text not null default 'default';
alter table session_inbox add column space_id text not null default 'default';
alter table conversation_records add column space_id text not null default 'default';
alter table session_events add column space_id text not null default 'default';
alter table session_steps add column space_id text not null default 'default';
alter table generations add column space_id text not null default 'default';
alter table generation_chunks add column space_id text not null default 'default';
alter table tool_calls add column space_id text not null default 'default';
alter table schedule_firings add column space_id text not null default 'default';

alter table conversation_records disable trigger append_only;
alter table session_events disable trigger append_only;

do $$
declare
    name text;
begin
    foreach name in array array['session_seed_messages', 'session_runs', 'session_inbox', 'conversation_records',
        'session_events', 'session_steps', 'generations', 'generation_chunks', 'tool_calls']
    loop
        execute format('update %I row set space_id = s.space_id from conversation_sessions s
            where s.space_id <> ''default'' and s.session_id = row.session_id', name);
    end loop;
end
$$;

update schedule_firings f set space_id = s.space_id
from schedules s
where s.space_id <> 'default' and s.schedule_id = f.schedule_id;

alter table conversation_records enable trigger append_only;
alter table session_events enable trigger append_only;

-- Two spaces that store the same bytes have a copy each. One copy for both would tell one space what the other has, and an
-- erasure in one would depend on the other.
alter table blobs add column space_id text not null default 'default';
alter table blobs drop constraint blobs_pkey;
alter table blobs add primary key (sha256, space_id);

-- A pointer is a SHA-256 in hex, wherever it stands.
create temporary view rows_with_pointers as
select space_id, concat(content::text, details::text) as text from conversation_records
union all
select space_id, content::text from deliveries
union all
select space_id, payload::text from session_events
union all
select space_id, attachments::text from session_inbox where attachments is not null
union all
select space_id, concat(outcome::text, receipt::text) from tool_calls
union all
select space_id, concat(prefix_sha256, state::text, initial_state::text) from conversation_sessions;

create temporary table moved_blobs as
select distinct rows.space_id, named[1] as sha256
from rows_with_pointers rows
cross join lateral regexp_matches(rows.text, '[0-9a-f]{64}', 'g') as named
where rows.space_id <> 'default';

insert into blobs (sha256, space_id, size, media_type, bytes, touched_at)
select b.sha256, moved.space_id, b.size, b.media_type, b.bytes, b.touched_at
from moved_blobs moved
join blobs b on b.sha256 = moved.sha256 and b.space_id = 'default';

delete from blobs
where space_id = 'default'
    and sha256 in (select sha256 from moved_blobs)
    and sha256 not in (
        select named[1]
        from rows_with_pointers rows
        cross join lateral regexp_matches(rows.text, '[0-9a-f]{64}', 'g') as named
        where rows.space_id = 'default'
    );

drop table moved_blobs;
drop view rows_with_pointers;

-- From now on a statement that forgets the space fails.
alter table session_seed_messages alter column space_id drop default;
alter table session_runs alter column space_id drop default;
alter table session_inbox alter column space_id drop default;
alter table conversation_records alter column space_id drop default;
alter table session_events alter column space_id drop default;
alter table session_steps alter column space_id drop default;
alter table generations alter column space_id drop default;
alter table generation_chunks alter column space_id drop default;
alter table tool_calls alter column space_id drop default;
alter table schedule_firings alter column space_id drop default;
alter table blobs alter column space_id drop default;

-- What these functions call is not for the caller's search_path to decide.
alter function refuse_rewrite() set search_path = pg_catalog, public, pg_temp;
alter function is_rehearsed(text) set search_path = pg_catalog, public, pg_temp;
alter function refuse_rehearsed_effect() set search_path = pg_catalog, public, pg_temp;

comment on table workers is 'Of the installation: processes work for all spaces.';
comment on table provider_gates is 'Of the installation: an outage of a provider is one for all spaces.';
comment on table legacy_chat_counts is 'Of the installation: counts by day.';
comment on table webhook_tokens is 'Of the installation: tokens of senders that were used, as digests.';
comment on table signing_keys is 'Of the installation: it signs for all spaces.';
comment on table api_tokens is 'Of the installation: a token is looked up before its space is known, and one without a space is of all.';
comment on table audit_log is 'Of the installation: only its own admin tokens read the audit. A row names the space that it is about.';
