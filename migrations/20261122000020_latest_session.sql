-- A chat goes on with the latest session of its conversation, whatever made that one: its first message, a fork, an
-- import, or somebody who began anew. So sessions need an order that no process' clock decides.
--
-- The number is drawn while the conversation's row is locked, or before anybody else can see the conversation: within a
-- conversation it is the order in which its sessions were made.

create sequence session_ordinals;

alter table conversation_sessions
    add column ordinal bigint,
    -- The key of who began it, where somebody began anew: the same one again finds it.
    add column client_key text,
    -- The repository that the work is about, in the words of who began it.
    add column repository_id text;

update conversation_sessions s
set ordinal = made.place
from (
    select session_id, row_number() over (order by session_id) as place from conversation_sessions
) made
where made.session_id = s.session_id;

select setval('session_ordinals', (select coalesce(max(ordinal), 0) + 1 from conversation_sessions), false);

alter table conversation_sessions
    alter column ordinal set default nextval('session_ordinals'),
    alter column ordinal set not null;

drop index idx_sessions_conversation;
create index idx_sessions_conversation on conversation_sessions (conversation_id, ordinal);
create unique index sessions_by_client_key on conversation_sessions (conversation_id, client_key)
    where client_key is not null;

-- Forks by what they were made of.
create index conversations_by_parent on conversation_counters (parent_conversation_id)
    where parent_conversation_id is not null;
