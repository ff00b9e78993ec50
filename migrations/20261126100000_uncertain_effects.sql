-- Uncertain effects across sessions: a list, and batches that resolve them.

-- An effect is uncertain rarely, so these are small.
create index tool_calls_uncertain on tool_calls (space_id, session_id, call_id) where status = 'uncertain';
create index deliveries_uncertain on deliveries (space_id, session_id, delivery_id) where status = 'uncertain';

alter table batches drop constraint batches_verb_check;
alter table batches add constraint batches_verb_check
    check (verb in ('retry', 'cancel', 'archive', 'wake', 'resolve'));
alter table batches
    -- Of a resolve: what is said of each effect, `{"outcome", "result", "tell"}`.
    add column decision jsonb,
    add constraint batches_decide check ((verb = 'resolve') = (decision is not null));

alter table batch_members
    -- Of a resolve: the effect, by its kind and by its id in the session. Several effects of one session are several members.
    add column effect_kind text check (effect_kind in ('call', 'delivery')),
    add column effect_id text,
    add constraint batch_members_effect check ((effect_kind is null) = (effect_id is null));
alter table batch_members drop constraint batch_members_batch_id_session_id_key;
create unique index batch_members_once on batch_members (batch_id, session_id, coalesce(effect_id, ''));
