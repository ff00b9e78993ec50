-- Lists at 1,000,000 sessions: each comes from an index that has the caller's space first. Without the space an index leads
-- through the rows of all spaces, to find the few of a small one.

create index sessions_by_space_and_agent on conversation_sessions (space_id, agent, session_id);
create index sessions_by_space_and_trigger on conversation_sessions (space_id, trigger_type, session_id);
create index sessions_at_rest_by_space on conversation_sessions (space_id, status, session_id)
    where status not in ('queued', 'running', 'completed');

-- Failures of one agent.
create index sessions_at_rest_by_agent on conversation_sessions (space_id, agent, status, session_id)
    where status not in ('queued', 'running', 'completed');

create index search_sessions_by_space on search_sessions (space_id, active_at desc, session_id desc);

create index deliveries_by_space on deliveries (space_id, delivery_id);
create index deliveries_by_channel on deliveries (space_id, channel, delivery_id);
create index deliveries_by_conversation on deliveries (conversation_id, delivery_id);
create index deliveries_unsent_by_space on deliveries (space_id, delivery_id) where status <> 'sent';

create index mails_dropped on mails (space_id, received_at desc, message_id desc, mailbox_id desc) where dropped is not null;

create index batches_by_space on batches (space_id, batch_id);
-- The counts of a batch are read from this alone: it has the space too, because the policy asks for it.
create index batch_members_by_outcome on batch_members (batch_id, outcome, result) include (space_id);
create index batch_members_by_result on batch_members (batch_id, result, ordinal) where result is not null;

create index notifications_by_space on notifications (space_id, notification_id);
create index notifications_unsent on notifications (space_id, notification_id) where status <> 'sent';

create index messages_internal on conversation_records (session_id, message_number) where internal;

-- Every act adds a row here, so each of these is small: a column and the row's number.
create index audit_log_by_actor on audit_log (actor, audit_id);
create index audit_log_by_token on audit_log (token_id, audit_id) where token_id is not null;
create index audit_log_by_user on audit_log (user_id, audit_id) where user_id is not null;
create index audit_log_by_verb on audit_log (verb, audit_id);
create index audit_log_refused on audit_log (audit_id) where outcome = 'refused';
create index audit_log_by_space on audit_log (space_id, audit_id) where space_id is not null;
create index audit_log_by_time on audit_log (at);
