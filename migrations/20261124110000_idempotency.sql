-- What a POST with the header Idempotency-Key answered first.
create table idempotency_keys (
    space_id text not null,
    -- Whose key it is: a token, a user, the configured token, or this machine.
    principal text not null,
    key text not null,
    -- Method and path.
    request text not null,
    body_sha256 bytea not null,
    -- The request that works on it. If its process dies, the key is free after claimed_until.
    claim text not null,
    claimed_until timestamptz not null,
    -- Null: not answered yet.
    status integer,
    answer text,
    expires_at timestamptz not null,
    primary key (space_id, principal, key)
);
comment on table idempotency_keys is 'The space is that of the request.';

create index idempotency_keys_by_expiry on idempotency_keys (expires_at);

select keep_spaces_apart('idempotency_keys');
