-- Tokens of the HTTP interface, the key that signs tokens of users, and the user that a conversation belongs to.

create table api_tokens (
    -- Public: it is part of the token, and names it in lists and in the audit.
    token_id text primary key,
    name text,
    scope text not null check (scope in ('read', 'operate', 'admin')),
    -- Null: of the whole installation.
    space_id text,
    -- Null: sessions of every agent.
    agent text,
    -- The token itself is kept nowhere. Its secret has 256 random bits, so one hash is enough.
    secret_sha256 bytea not null check (length(secret_sha256) = 32),
    created_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz,
    revoked_at timestamptz,
    -- To the minute.
    last_used_at timestamptz
);

-- Keys that this installation signs with. All its processes read the same.
create table signing_keys (
    purpose text primary key,
    key bytea not null check (length(key) = 32),
    created_at timestamptz not null default clock_timestamp()
);

-- The user that the conversation belongs to: the first that a message spoke for. Null: none yet.
alter table conversation_counters add column user_id text;
