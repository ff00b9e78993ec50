-- What says that a key store is this database's: see store/src/encryption/identity.rs.

create table installation (
    only_one boolean primary key default true check (only_one),
    -- A dump has it too: a database that is restored goes on with its key store.
    installation_id text not null default replace(gen_random_uuid()::text, '-', '')
);
comment on table installation is 'Of the installation: its name for stores beside the database.';

insert into installation default values;

-- A data key that some conversation of any space has. A request sees one space.
create function some_data_key() returns text
    language sql stable security definer
    set search_path = pg_catalog, public, pg_temp set wakeful.space = '*' as $$
    select data_key from conversation_counters where data_key is not null limit 1
$$;

-- Those of these data keys that no row of any space has.
create function unused_data_keys(keys text[]) returns setof text
    language sql stable security definer
    set search_path = pg_catalog, public, pg_temp set wakeful.space = '*' as $$
    select unnest(keys)
    except select data_key from conversation_counters where data_key = any (keys)
    -- A conversation's row that is lost is made again from its sessions.
    except select data_key from conversation_sessions where data_key = any (keys)
    -- An erasure that died on its way deletes its keys itself.
    except select jsonb_array_elements_text(pending -> 'data_keys') from erasures where pending is not null
$$;
