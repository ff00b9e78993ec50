-- A message that the client sends again looks for its first attempt in all sessions of the conversation. The first attempt
-- may have found the session that was the latest before the conversation began anew, and not have written yet. So its
-- write must see on that session's own row that it is not the latest any more.
alter table conversation_sessions add column superseded boolean not null default false;

update conversation_sessions s
set superseded = true
where exists (
    select from conversation_sessions newer
    where newer.conversation_id = s.conversation_id and newer.ordinal > s.ordinal
);
