-- An erasure reads all logs for names of the blobs that it may delete. It does so without a lock: it marks the blobs before, who stores one
-- of them again takes the mark away, and only what is still marked is deleted.

create function mark_blobs(names text[]) returns table (name text, space text)
    language plpgsql security definer
    set search_path = pg_catalog, public, pg_temp set wakeful.space = '*' as $$
begin
    perform is_of_retention();
    -- Who has stored a blob and has not committed the row that names it holds a lock that this waits for.
    lock table blobs in share row exclusive mode;
    return query
        update blobs b set touched_at = '-infinity'
        where b.sha256 = any (names)
            and not exists (
                select from conversation_sessions s where s.space_id = b.space_id and s.prefix_sha256 = b.sha256
            )
        returning b.sha256, b.space_id;
end
$$;
