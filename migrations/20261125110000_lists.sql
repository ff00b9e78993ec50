-- Lists at 1,000,000 sessions: each comes from an index that has the caller's space first. Without the space an index leads
-- through the rows of all spaces, to find the few of a small one.

create index sessions_by_space_and_agent on conversation_sessions (space_id, agent, session_id);
create index sessions_by_space_and_trigger on conversation_sessions (space_id, trigger_type, session_id);
create index sessions_at_rest_by_space on conversation_sessions (space_id, status, session_id)
    where status not in ('queued', 'running', 'completed');
-- No statement reads it.
drop index idx_sessions_space;

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

-- The policy of each table, so written that Postgres expects nearly all rows to pass it. It took the setting for one of the spaces,
-- and expected to see one row of as many as there are spaces, besides the condition on the space that a list has of its own. So it
-- read and sorted all sessions of a space instead of its newest fifty.
create or replace function keep_spaces_apart(relation regclass) returns void
    language plpgsql set search_path = pg_catalog, public, pg_temp as $$
begin
    execute format('alter table %s enable row level security, force row level security', relation);
    -- One policy for all commands, so that reading and writing cannot differ. The sub-select reads the setting once for a
    -- statement and not once for a row. A row that is written is checked by the plain expression, because most statements
    -- write few rows of a table, and a sub-plan costs more to start than the expression costs for some rows.
    execute format(
        'create policy of_its_space on %s
            using (nullif((select current_setting(''wakeful.space'', true)) = any (array[space_id, ''*'']), false) is not null)
            with check (current_setting(''wakeful.space'', true) = any (array[space_id, ''*'']))',
        relation);
end
$$;

do $$
declare
    relation regclass;
begin
    for relation in select polrelid::regclass from pg_policy where polname = 'of_its_space' loop
        execute format(
            'alter policy of_its_space on %s
                using (nullif((select current_setting(''wakeful.space'', true)) = any (array[space_id, ''*'']), false) is not null)',
            relation);
    end loop;
end
$$;
