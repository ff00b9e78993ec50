-- A cancelled run and its session have a status of their own. Until now both were `failed`, with the error `cancelled`.

alter table conversation_sessions
    drop constraint conversation_sessions_status_check,
    add constraint conversation_sessions_status_check
        check (status in ('created', 'queued', 'running', 'waiting_input', 'needs_attention',
                          'completed', 'failed', 'cancelled', 'archived', 'terminated'));

alter table session_runs
    drop constraint session_runs_status_check,
    add constraint session_runs_status_check
        check (status in ('queued', 'running', 'waiting_input', 'needs_attention', 'completed', 'failed', 'cancelled'));

-- Runs of which the journal says that somebody cancelled them.
update session_runs r
set status = 'cancelled'
where r.status = 'failed' and r.error = 'cancelled'
    and exists (
        select from session_events e
        where e.session_id = r.session_id and e.run_id = r.run_id and e.type = 'state_transition'
            and e.payload ->> 'to_state' = 'failed' and e.payload ->> 'reason' like 'cancelled%'
    );

-- Their sessions. The journal is append-only, and the status is its fold. So an entry says that the status changed.
with corrected as (
    update conversation_sessions s
    set status = 'cancelled', last_event_seq = s.last_event_seq + 1
    where s.status = 'failed' and s.error = 'cancelled'
        and (
            select r.status from session_runs r
            where r.session_id = s.session_id
            order by r.created_at desc
            limit 1
        ) = 'cancelled'
    returning s.session_id, s.last_event_seq
)
insert into session_events (session_id, seq, type, payload)
select session_id, last_event_seq, 'state_transition',
    '{"from_state": "failed", "to_state": "cancelled", "reason": "its run was cancelled before that was a status of its own"}'::jsonb
from corrected;
