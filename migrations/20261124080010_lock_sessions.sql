-- A message to a session that rests with an open run in its inbox locks the session's row and not the conversation's. So who
-- decides what is erased locks both, in this order, and looks again then.

-- Locks the conversations and their sessions, and returns how many conversations have no run that is open or waits.
create or replace function lock_for_erasure(ids text[]) returns bigint
    language plpgsql security definer set search_path = pg_catalog, public, pg_temp as $$
begin
    perform is_of_retention();
    perform 1 from conversation_counters where conversation_id = any (ids) order by conversation_id for update;
    -- One at work has a run that is open or waits, so nothing of its conversation is erased; and none can begin to work now.
    perform 1 from conversation_sessions
    where conversation_id = any (ids) and status not in ('queued', 'running')
    order by session_id
    for update;
    -- A hold that is placed now waits until the erasure is decided.
    lock table legal_holds in share mode;
    return (select count(*) from conversation_counters
        where conversation_id = any (ids) and open_run_id is null and queued_runs = 0);
end
$$;
