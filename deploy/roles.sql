-- The roles of Wakeful's database. Run it in Wakeful's database as a superuser once the schema is there, and again after
-- each migration, then as wakeful_owner or a superuser. Running it again changes nothing that is right already.
--
--     psql --dbname=wakeful --set=ON_ERROR_STOP=1 --file=deploy/roles.sql
--
-- | role              | for                          | may                                                          |
-- |-------------------|------------------------------|--------------------------------------------------------------|
-- | wakeful_owner     | `wakeful migrate`            | everything in this schema: it owns the tables                |
-- | wakeful_runtime   | `wakeful serve`, commands    | work: no DDL, no truncate, and logs are insert and select    |
-- | wakeful_reader    | dashboards, analysts         | look, but not at the hashes of tokens and at signing keys,   |
-- |                   |                              | nor at the search's words and senders                        |
-- | wakeful_retention | deleting what is old         | look and delete; the only one that may delete from the logs, |
-- |                   |                              | but not from the audit                                       |
-- | wakeful_auditor   | deleting what is old of the  | see the audit, and delete rows of it older than 30 days;     |
-- |                   | audit                        | `wakeful audit delete` takes this role                       |
-- | wakeful_scaler    | an autoscaler                | see the one view queue_backlog                               |
--
-- Row-level security binds all of them: they see the rows of the space that the setting wakeful.space names, or of all spaces if it
-- is `*`. Only search_sessions and search_documents have no policy, because it would keep words from their index; so a reader may
-- not read those two. For owner, reader and retention this file makes `*` the default in this database. The runtime role has none, because
-- `serve` and the commands say for each piece of work what it is about. A reader of one space only:
--
--     create role acme_reader login in role wakeful_reader;
--     alter role acme_reader in database wakeful set wakeful.space = 'acme';
--
-- It can change that setting as `serve` can, so this keeps mistakes out and not somebody who wants more.
-- They have no password yet, so they cannot log in over the network: `alter role wakeful_runtime password '…'`.

do $$
declare
    role text;
begin
    foreach role in array array['wakeful_owner', 'wakeful_runtime', 'wakeful_reader', 'wakeful_retention', 'wakeful_scaler',
        'wakeful_auditor']
    loop
        -- The owner may run this file again, and may not make roles.
        continue when exists (select from pg_roles where rolname = role);
        begin
            execute format('create role %I login nosuperuser nocreatedb nocreaterole noreplication nobypassrls', role);
        exception
            -- Somebody makes it at this moment, in another database of this server.
            when duplicate_object or unique_violation then null;
        end;
    end loop;
end
$$;

do $$
declare
    role text;
begin
    foreach role in array array['wakeful_owner', 'wakeful_reader', 'wakeful_retention']
    loop
        -- What somebody has set stays. The owner may run this file again, and may not change other roles.
        continue when exists (
            select from pg_db_role_setting s
            join pg_database d on d.oid = s.setdatabase and d.datname = current_database()
            join pg_roles r on r.oid = s.setrole and r.rolname = role
            cross join lateral unnest(s.setconfig) as setting
            where starts_with(setting, 'wakeful.space=')
        );
        execute format('alter role %I in database %I set wakeful.space = %L', role, current_database(), '*');
    end loop;
end
$$;

-- Migrations make functions that see all spaces. Who is no superuser needs a right for that.
do $$
begin
    if not has_parameter_privilege('wakeful_owner', 'wakeful.space', 'set') then
        grant set on parameter wakeful.space to wakeful_owner;
    end if;
end
$$;

-- Other roles have only the rights that this file gives.
alter schema public owner to wakeful_owner;
revoke all on schema public from public;
grant usage on schema public to wakeful_runtime, wakeful_reader, wakeful_retention, wakeful_scaler, wakeful_auditor;

do $$
declare
    one record;
    logs constant text[] := array['conversation_records', 'session_events', 'audit_log'];
    -- What goes away when it is done.
    passing constant text[] := array['jobs', 'generations', 'generation_chunks', 'workers', 'webhook_tokens', 'schedules',
        'schedule_firings', 'search_due', 'queue_samples', 'error_hours', 'pauses', 'idempotency_keys',
        'blob_removals',
        'transitions', 'notify_conditions', 'act_links',
        'notifications', 'notification_groups', 'notification_members'];
    secrets constant text[] := array['api_tokens', 'signing_keys'];
    -- Rows of all spaces without a policy.
    unguarded constant text[] := array['search_sessions', 'search_documents'];
begin
    for one in
        select c.relname as name, c.relkind as kind
        from pg_class c
        join pg_namespace n on n.oid = c.relnamespace
        where n.nspname = 'public' and c.relkind in ('r', 'p', 'v', 'S')
            -- A sequence of an identity column follows its table.
            and not exists (select from pg_depend d
                where d.objid = c.oid and d.deptype = 'i' and d.classid = 'pg_class'::regclass)
            -- Changing the owner waits for all who use the table. The second time there is nothing to wait for.
            and c.relowner <> 'wakeful_owner'::regrole
    loop
        execute format('alter %s public.%I owner to wakeful_owner',
            case one.kind when 'v' then 'view' when 'S' then 'sequence' else 'table' end, one.name);
    end loop;
    for one in
        select p.oid::regprocedure as name
        from pg_proc p
        join pg_namespace n on n.oid = p.pronamespace
        where n.nspname = 'public'
            and not exists (select from pg_depend d where d.objid = p.oid and d.deptype = 'e')
    loop
        execute format('alter function %s owner to wakeful_owner', one.name);
    end loop;
    for one in
        select c.relname as name
        from pg_class c
        join pg_namespace n on n.oid = c.relnamespace
        where n.nspname = 'public' and c.relkind in ('r', 'p')
    loop
        execute format('revoke all on public.%I from public, wakeful_runtime, wakeful_reader, wakeful_retention, wakeful_scaler,
            wakeful_auditor', one.name);
        if one.name in ('_sqlx_migrations', 'schema_serves', 'installation') then
            execute format('grant select on public.%I to wakeful_runtime, wakeful_reader, wakeful_retention, wakeful_auditor',
                one.name);
            continue;
        end if;
        if one.name = 'erasures' then
            -- Only the functions of an erasure write receipts.
            execute format('grant select on public.%I to wakeful_runtime, wakeful_reader, wakeful_retention', one.name);
            continue;
        end if;
        execute format('grant select, insert on public.%I to wakeful_runtime', one.name);
        if one.name <> all (logs) then
            execute format('grant update on public.%I to wakeful_runtime', one.name);
        end if;
        if one.name = any (passing) then
            execute format('grant delete on public.%I to wakeful_runtime', one.name);
        end if;
        continue when one.name = any (secrets);
        execute format('grant select on public.%I to wakeful_retention', one.name);
        if one.name <> all (unguarded) then
            execute format('grant select on public.%I to wakeful_reader', one.name);
        end if;
        if one.name = 'audit_log' then
            -- It writes who deleted.
            execute format('grant select, delete on public.%I to wakeful_auditor', one.name);
            -- But not when: a row that says that it is old could be deleted at once.
            execute format('grant insert (actor_kind, actor, token_id, user_id, verb, target, space_id, reason, address,
                outcome, status, times) on public.%I to wakeful_auditor', one.name);
        elsif one.name <> 'legal_holds' then
            execute format('grant delete on public.%I to wakeful_retention', one.name);
        end if;
    end loop;
end
$$;

grant usage, select on all sequences in schema public to wakeful_runtime;
grant select on queue_backlog to wakeful_runtime, wakeful_reader, wakeful_retention, wakeful_scaler;