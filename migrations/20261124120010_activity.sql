-- Lists by activity, and sessions with failed tool calls. A worker fills both beside the steps, as it fills the search.

alter table search_sessions
    -- The time of its newest journal entry when it was looked at.
    add column active_at timestamptz not null default clock_timestamp(),
    -- Tool calls that returned an error, panicked or took too long.
    add column failed_calls bigint not null default 0;

update search_sessions h set active_at = coalesce(s.completed_at, s.started_at)
from conversation_sessions s
where s.session_id = h.session_id;

update search_sessions h set failed_calls = failed.calls
from (select session_id, count(*) as calls from tool_calls where status = 'failed' group by session_id) failed
where failed.session_id = h.session_id;

create index search_sessions_by_activity on search_sessions (active_at desc, session_id desc);
create index search_sessions_by_failed_calls on search_sessions (session_id) where failed_calls > 0;
