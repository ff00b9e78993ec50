-- When the person who waits for a run was told that it takes long.
alter table session_runs add column delay_told_at timestamptz;

-- Sessions that wait for an operator: few.
create index sessions_in_need on conversation_sessions (session_id) where status = 'needs_attention';
