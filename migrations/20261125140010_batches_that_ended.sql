-- What a batch that has ended came to, and since when a member is tried dry.

alter table batches
    -- Of a batch that is done or cancelled: its counts, which do not change any more.
    add column ended_counts jsonb;

alter table batch_proofs
    -- When it was tried last and first. Null: never. One whose key cannot be had is tried again after the others.
    add column tried_at timestamptz,
    add column tried_since timestamptz;

create function count_batch(id text) returns jsonb language sql stable set search_path = pg_catalog, public, pg_temp as $$
    select jsonb_build_object(
        'pending', count(*) filter (where outcome = 'pending'),
        'acted', count(*) filter (where outcome = 'acted'),
        'refused', count(*) filter (where outcome = 'refused'),
        'passed', count(*) filter (where result = 'passed'),
        'failed_again', count(*) filter (where result = 'failed_again'),
        'open', count(*) filter (where outcome = 'acted' and result is null
            and (select verb = 'retry' from batches where batch_id = id)))
    from batch_members where batch_id = id
$$;

update batches set ended_counts = count_batch(batch_id) where status in ('done', 'cancelled');
