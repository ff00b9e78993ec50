-- The audit says what retention erased, so retention may not delete from it. A role of its own may, by age.
create function refuse_rewrite_of_audit() returns trigger language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if tg_op = 'DELETE' and current_user = 'wakeful_auditor' then
        if old.at < clock_timestamp() - interval '30 days' then
            return old;
        end if;
        raise exception 'a row of the audit is kept for 30 days at least' using errcode = 'integrity_constraint_violation';
    end if;
    raise exception '% is append-only: % is refused', tg_table_name, lower(tg_op)
        using errcode = 'integrity_constraint_violation',
              hint = 'Only the role wakeful_auditor may delete, and only what is old: `wakeful audit delete`.';
end
$$;

drop trigger append_only on audit_log;
drop trigger append_only_whole on audit_log;
create trigger append_only before update or delete on audit_log
    for each row execute function refuse_rewrite_of_audit();
create trigger append_only_whole before truncate on audit_log
    for each statement execute function refuse_rewrite_of_audit();

-- Bundles of erased sessions that somebody took, as the audit knew of them: who, when, where to.
alter table erasures add column exports jsonb not null default '[]';

create or replace function end_erasure(id text, rows_by_table jsonb) returns void
    language plpgsql security definer set search_path = pg_catalog, public, pg_temp as $$
begin
    perform is_of_retention();
    update erasures
    set pending = null, counts = rows_by_table, exports = coalesce(pending -> 'exports', '[]'), done_at = clock_timestamp()
    where erasure_id = id and pending is not null;
end
$$;
