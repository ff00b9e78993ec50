-- What the healer looks for, what a person said of an uncertain effect, and why a run was cancelled.

-- Sessions that should have a job, or wait for the conversation. A step commit writes the status that is there, so it
-- stays HOT; only a run's beginning and its end touch this index.
create index sessions_open on conversation_sessions (session_id) where status in ('queued', 'running');

-- Conversations whose count of queued runs can be wrong in a way that matters.
create index conversations_with_queued_runs on conversation_counters (conversation_id) where queued_runs > 0;

alter table conversation_sessions add column cancel_reason text;

-- {"outcome", "result", "by", "reason", "run_id"}: the person's decision, as it was answered.
alter table tool_calls add column resolution jsonb;
alter table deliveries add column resolution jsonb;
