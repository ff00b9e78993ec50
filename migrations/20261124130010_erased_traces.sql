-- What an erasure takes out of rows that stay: groups of errors, batches, the list of imported tasks and groups of notifications name
-- sessions of others, too. Answers that were kept for a repeated key go whole.
-- The role that may delete may change nothing, so it does that through these functions.

create function forget_sessions(ids text[]) returns void
    language plpgsql security definer
    set search_path = pg_catalog, public, pg_temp set wakeful.space = '*' as $$
begin
    perform is_of_retention();
    -- The example is the error of a session of the sample. The newest that is left takes its place.
    update error_groups g
    set sample = array(
            select one from unnest(g.sample) with ordinality as u (one, n) where one <> all (ids) order by n
        ),
        example = coalesce(
            (select f.error from run_failures f
            where f.session_id = any (g.sample) and f.session_id <> all (ids) and f.space_id = g.space_id
                and f.fingerprint = g.fingerprint
            order by f.failure_id desc limit 1),
            g."text")
    where g.sample && ids;
    -- Nothing else has failed like that.
    delete from error_groups g
    where g.sample = '{}' and not exists (
            select from run_failures f where f.space_id = g.space_id and f.fingerprint = g.fingerprint
        );
    update batch_members set detail = null where session_id = any (ids) and detail is not null;
    update batch_proofs set error = null where (session_id = any (ids) or copy_session_id = any (ids)) and error is not null;
    update batches
    set status_reason = null,
        filter = filter - array['user', 'from', 'text', 'error'],
        proof = proof || '{"text": "", "errors": []}'
    where batch_id in (select batch_id from batch_members where session_id = any (ids));
    -- The row stays, so that the import does not bring the task back.
    update absurd_imports set idempotency_key = null where session_id = any (ids) and idempotency_key is not null;
    -- What was told of other sessions too keeps its words. Those of a group without a member were an erased session's.
    update notification_groups g set label = 'erased'
    where label <> 'erased' and not exists (select from notification_members m where m.group_id = g.group_id);
    delete from idempotency_keys k
    where exists (select from unnest(ids) id where position(id in concat_ws(' ', k.request, k.answer)) > 0);
end
$$;

-- A search for a person's sessions names the person, also where sessions of the person stay.
create function forget_person(space text, name text) returns void
    language plpgsql security definer
    set search_path = pg_catalog, public, pg_temp set wakeful.space = '*' as $$
begin
    perform is_of_retention();
    update batches set filter = filter - array['user', 'from', 'text', 'error']
    where space_id in (space, '*') and position(lower(name) in lower(filter::text)) > 0;
    delete from idempotency_keys k
    where k.space_id = space
        and position(lower(name) in lower(concat_ws(' ', k.principal, k.key, k.request, k.answer))) > 0;
end
$$;
