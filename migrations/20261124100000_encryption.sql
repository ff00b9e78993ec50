-- Texts that are sealed by a data key of their conversation: see store/src/encryption.rs.

-- The id of the data key. Null: the conversation began in clear, and stays so. A fork has its parent's.
alter table conversation_counters add column data_key text;
alter table conversation_sessions add column data_key text;

-- An erasure asks whether another conversation has the key too.
create index conversations_by_data_key on conversation_counters (data_key) where data_key is not null;

-- Files and long outputs of encrypted conversations. Each conversation has its own, so no other one keeps them from being erased.
create table sealed_blobs (
    data_key text not null,
    -- Of the bytes before they were sealed: messages point at them by it.
    sha256 text not null,
    space_id text not null,
    size bigint not null,
    media_type text not null,
    bytes bytea not null,
    created_at timestamptz not null default clock_timestamp(),
    primary key (data_key, sha256)
);
comment on table sealed_blobs is 'The space is that of the conversations that have the key.';

select keep_spaces_apart('sealed_blobs');
