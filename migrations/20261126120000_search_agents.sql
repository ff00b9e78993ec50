-- The sessions of an agent by activity, and failed sessions by tool, at 1,000,000 sessions. A worker fills `search_sessions` beside the
-- steps, so none of this costs a step's commit anything.

alter table search_sessions
    -- The session's, which does not change.
    add column agent text;

-- A worker of the release before names no agent.
create function name_agent() returns trigger language plpgsql set search_path = pg_catalog, public, pg_temp as $$
begin
    if new.agent is null then
        select agent into new.agent from conversation_sessions where session_id = new.session_id;
    end if;
    return new;
end
$$;
create trigger name_agent before insert on search_sessions for each row execute function name_agent();
