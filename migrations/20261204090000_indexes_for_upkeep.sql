-- What an erasure, a collection of blobs and the timers look for, and found by reading whole tables.

-- An erasure asks whether a session has this prefix, while it keeps others from storing blobs.
create index sessions_by_prefix on conversation_sessions (prefix_sha256, space_id) where prefix_sha256 is not null;
-- An erasure looks for the copies of a session.
create index sessions_imported on conversation_sessions (session_id) where imported_from is not null;
-- Files of messages: a collection of blobs leaves those alone. No step changes them.
create index session_inbox_with_files on session_inbox (space_id) where attachments is not null;
create index blob_removals_due on blob_removals (remove_after);
-- Runs whose person may wait, and was not told so. A step changes none of these columns, and a run that ends changes its status in
-- any case.
create index session_runs_untold on session_runs (created_at)
    where delay_told_at is null and status in ('queued', 'running', 'needs_attention');

-- As before, but for the question about prefixes. "offset 0" has Postgres ask it for each blob on its own: then it answers from the index
-- alone. As a join it reads the sessions of a whole space if it expects one blob.
create or replace function mark_blobs(names text[], erased text[]) returns table (name text, space text)
    language plpgsql security definer
    set search_path = pg_catalog, public, pg_temp set wakeful.space = '*' as $$
begin
    perform is_of_retention();
    -- Who stores a blob with the row that names it holds a lock that this waits for.
    lock table blobs in share row exclusive mode;
    return query
        update blobs b set touched_at = '-infinity'
        where b.sha256 = any (names)
            and not exists (
                select from conversation_sessions s where s.prefix_sha256 = b.sha256 and s.space_id = b.space_id offset 0
            )
            -- Stored for the rows of another session, which may not be committed yet. If they never come, it is collected.
            and (b.stored_for is null or b.stored_for = any (erased) or b.touched_at < now() - interval '1 hour')
        returning b.sha256, b.space_id;
end
$$;

-- By how many events a session was known at the last look. Null: by an earlier version, which did not say.
alter table search_sessions add column last_event_seq bigint;
comment on column search_sessions.last_event_seq is 'The last event of the session that the last look has seen.';

-- As before, but for the last statement, which compared each answer with each id, and for what a batch's maker wrote of its members: its
-- reason, and the result that it gave to uncertain calls.
create or replace function forget_sessions(ids text[]) returns void
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
        reason = null,
        decision = decision - 'result',
        filter = filter - array['user', 'from', 'text', 'error'],
        proof = proof || '{"text": "", "errors": []}'
    where batch_id in (select batch_id from batch_members where session_id = any (ids));
    -- The row stays, so that the import does not bring the task back.
    update absurd_imports set idempotency_key = null where session_id = any (ids) and idempotency_key is not null;
    -- What was told of other sessions too keeps its words. Those of a group without a member were an erased session's.
    update notification_groups g set label = 'erased'
    where label <> 'erased' and not exists (select from notification_members m where m.group_id = g.group_id);
    -- Every session's id is `sess_` and digits in hex.
    delete from idempotency_keys k
    where exists (
            select from regexp_matches(concat_ws(' ', k.request, k.answer), 'sess_[0-9a-f]+', 'g') m where m[1] = any (ids)
        );
end
$$;
