create index search_sessions_by_agent on search_sessions (agent, active_at desc, session_id desc);
create index search_sessions_by_space_and_agent on search_sessions (space_id, agent, active_at desc, session_id desc);

-- Few sessions have failed, so this is small: of a tool that one session in a hundred asks for, it has those that failed.
create index search_sessions_failed on search_sessions using gin (tools, senders) where fingerprint is not null;
create index search_sessions_failed_by_activity on search_sessions (active_at desc, session_id desc)
    where fingerprint is not null;
create index search_sessions_failed_by_space on search_sessions (space_id, active_at desc, session_id desc)
    where fingerprint is not null;
