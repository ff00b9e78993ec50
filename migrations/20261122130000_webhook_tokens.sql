-- Mailgun signs a token that may be used once, and not what it came with. Remembered with a digest of that, a token comes
-- again only as the same request sent twice.
create table webhook_tokens (
    source text not null,
    token text not null,
    digest bytea not null,
    expires_at timestamptz not null,
    primary key (source, token)
);
create index webhook_tokens_expire on webhook_tokens (expires_at);
