-- A pack is stored a moment before the row that names it, and the blobs of an import long before its rows. An erasure that comes
-- between finds them unnamed, and must leave them: they say which session they are stored for.

alter table sealed_blobs add column stored_for text;
comment on column sealed_blobs.stored_for is 'The session whose step stored this pack last; null for every other blob.';
comment on column blobs.stored_for is
    'The session whose step stored this pack last, or whose import wrote this blob; null for every other blob.';

create function mark_blobs(names text[], erased text[]) returns table (name text, space text)
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
                select from conversation_sessions s where s.space_id = b.space_id and s.prefix_sha256 = b.sha256
            )
            -- Stored for the rows of another session, which may not be committed yet. If they never come, it is collected.
            and (b.stored_for is null or b.stored_for = any (erased) or b.touched_at < now() - interval '1 hour')
        returning b.sha256, b.space_id;
end
$$;
