-- A fork begins with messages and steps that are copies: what it does itself follows them. Its logs say nothing of the
-- steps behind the copies, so that where its own begin has to stand in its row.

alter table conversation_sessions
    -- The last step that it copied; its first own one is the next.
    add column base_step_number bigint not null default 0,
    -- The last message that it copied. Null for a session that is no fork.
    add column forked_at_message_number bigint;

-- Its forks, for the tree.
create index conversation_sessions_by_parent on conversation_sessions (parent_session_id)
    where parent_session_id is not null;
