-- Who did what, on which row, why, from where, when, and how it ended. Append-only, like the logs.

create table audit_log (
    audit_id bigint generated always as identity primary key,
    at timestamptz not null default clock_timestamp(),
    -- token, configuration, machine (a server without a token), user, cli, stranger.
    actor_kind text not null,
    actor text not null,
    token_id text,
    user_id text,
    -- Such as session.retry; of a refused read, its route.
    verb text not null,
    target text,
    space_id text,
    reason text,
    address text,
    -- done, or refused with a status of HTTP.
    outcome text not null check (outcome in ('done', 'refused')),
    status integer,
    -- More than one: refusals of one address that were counted.
    times bigint not null default 1
);

create index audit_log_by_target on audit_log (target, audit_id) where target is not null;

create trigger append_only before update or delete on audit_log
    for each row execute function refuse_rewrite();
create trigger append_only_whole before truncate on audit_log
    for each statement execute function refuse_rewrite();
