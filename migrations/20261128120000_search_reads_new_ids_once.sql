-- The search found new sessions by reading all ids of the last minute at every look. That minute is now read every ten seconds, and the
-- looks between read what is newer than these ids.
alter table search_progress
    add column recent_run_id text not null default '',
    add column recent_session_id text not null default '',
    -- When the last minute was read.
    add column swept_at timestamptz not null default '-infinity';
