-- Retention walks the conversations of a space from the oldest one. It reads their age in pages from here.
create index conversations_by_age on conversation_counters (space_id, created_at, conversation_id);
