-- Packs of sessions' files may be outside of Postgres: in a folder, or in an object store.
alter table blobs add column store text;
comment on column blobs.store is 'The store outside of Postgres that has the bytes; null: they are here.';

-- The erasure of a session takes its packs too whose commit never came.
alter table blobs add column stored_for text;
comment on column blobs.stored_for is 'The session whose step stored this pack; null for every other blob.';
create index blobs_stored_for on blobs (stored_for) where stored_for is not null;

create table blob_removals (
    sha256 text not null,
    space_id text not null,
    store text not null,
    -- A blob that is being put there has an hour to get its row.
    remove_after timestamptz not null default now(),
    primary key (sha256, space_id, store)
);
comment on table blob_removals is
    'Blobs that are to be deleted in a store outside of Postgres, unless a row of blobs says that they are there. Space: that of the blob.';
select keep_spaces_apart('blob_removals');

-- Whatever deletes or moves a blob, its old store gets to know it. The one who deletes may not write here.
create function blob_left_its_store() returns trigger
    language plpgsql security definer
    set search_path = pg_catalog, public, pg_temp set wakeful.space = '*' as $$
begin
    if old.store is not null then
        insert into blob_removals (sha256, space_id, store) values (old.sha256, old.space_id, old.store)
        on conflict (sha256, space_id, store) do nothing;
    end if;
    -- Where it was being put, too: a deleted blob leaves every store.
    update blob_removals set remove_after = now()
    where sha256 = old.sha256 and space_id = old.space_id and (tg_op = 'DELETE' or store = old.store);
    return null;
end
$$;

create trigger blob_was_deleted after delete on blobs
    for each row when (old.media_type = 'application/vnd.wakeful.pack') execute function blob_left_its_store();
create trigger blob_was_moved after update of store on blobs
    for each row when (old.store is not null and old.store is distinct from new.store)
    execute function blob_left_its_store();
