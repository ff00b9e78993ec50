-- What the columns of a step's tables may hold. Postgres prepares such a condition again for each statement, so an installation does
-- without them: see migrations/20261130100000_checks_of_steps.sql. Each database of a test has them, so each test finds a statement that breaks one.
alter table conversation_records add constraint conversation_records_role_check
    check (role in ('system', 'user', 'assistant', 'tool'));
alter table conversation_sessions add constraint conversation_sessions_check
    check (to_message_number <= last_message_number);
alter table conversation_sessions add constraint conversation_sessions_status_check
    check (status in ('created', 'queued', 'running', 'waiting_input', 'needs_attention', 'completed', 'failed', 'cancelled', 'archived', 'terminated'));
alter table deliveries add constraint deliveries_status_check
    check (status in ('queued', 'sending', 'sent', 'failed', 'expired', 'uncertain'));
alter table generations add constraint generations_purpose_check
    check (purpose in ('reply', 'compaction'));
alter table jobs add constraint jobs_check
    check ((kind = 'step') = ((session_id is not null) and (step_number is not null)));
alter table jobs add constraint jobs_check1
    check ((kind = 'deliver') = (channel is not null));
alter table jobs add constraint jobs_kind_check
    check (kind in ('step', 'deliver'));
alter table session_inbox add constraint session_inbox_status_check
    check (status in ('pending', 'drained'));
alter table session_runs add constraint session_runs_status_check
    check (status in ('queued', 'running', 'waiting_input', 'needs_attention', 'completed', 'failed', 'cancelled'));
alter table session_steps add constraint session_steps_worker_id_check
    check (length(worker_id) <= 32);
alter table tool_calls add constraint tool_calls_effect_check
    check (effect in ('pure', 'idempotent', 'guarded'));
alter table tool_calls add constraint tool_calls_status_check
    check (status in ('invoked', 'started', 'done', 'failed', 'uncertain', 'waiting', 'abandoned', 'unapproved'));
