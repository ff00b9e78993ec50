-- Notifications: what needs a person is noted where it happens, told in groups by the rules of `[[notify]]`, and may be acted on by a
-- link.
--
-- A trigger writes the transition in the transaction that makes it. A step that goes well fires none of them: each has a
-- condition on the new status, which Postgres checks before it calls anything. A batch that stops by itself writes its row itself, because
-- a person's pause looks the same. Processes follow this table, one at a time.

create table transitions (
    transition_id bigint generated always as identity primary key,
    -- '*': of the whole installation.
    space_id text not null,
    kind text not null,
    -- What the transition is of: a session, a delivery, a gate, a batch.
    subject text not null,
    session_id text,
    -- It ends what an earlier transition of this kind and subject began.
    ends boolean not null default false,
    at timestamptz not null default clock_timestamp()
);
comment on table transitions is 'The space is that of the session. Rows go away when they are read.';
select keep_spaces_apart('transitions');

create function note_session_transition() returns trigger language plpgsql
    set search_path = pg_catalog, public, pg_temp as $$
begin
    insert into transitions (space_id, kind, subject, session_id)
    values (new.space_id, new.status, new.session_id, new.session_id);
    return null;
end
$$;

create trigger note_transition after update of status on conversation_sessions
    for each row
    when (old.status is distinct from new.status and new.status in ('failed', 'needs_attention', 'waiting_input')
        and new.runner = '')
    execute function note_session_transition();

create function note_delivery_transition() returns trigger language plpgsql
    set search_path = pg_catalog, public, pg_temp as $$
begin
    insert into transitions (space_id, kind, subject, session_id)
    values (new.space_id, 'delivery_failed', new.delivery_id, new.session_id);
    return null;
end
$$;

create trigger note_transition after update of status on deliveries
    for each row
    when (old.status is distinct from new.status and new.status in ('failed', 'expired', 'uncertain') and not new.imported)
    execute function note_delivery_transition();

-- A gate is of all spaces, whatever its writer sees.
create function note_gate_transition() returns trigger language plpgsql security definer
    set search_path = pg_catalog, public, pg_temp set wakeful.space = '*' as $$
begin
    insert into transitions (space_id, kind, subject, ends) values ('*', 'gate_shut', new.provider, new.phase = 'open');
    return null;
end
$$;

create trigger note_transition after update of phase on provider_gates
    for each row
    when (old.phase is distinct from new.phase
        and (old.phase = 'open' and new.phase = 'shut' or new.phase = 'open'))
    execute function note_gate_transition();

-- What a look finds and no row's change says, such as jobs without a worker.
create table notify_conditions (
    condition text primary key,
    since timestamptz not null default clock_timestamp()
);
comment on table notify_conditions is 'Of the installation: what is wrong with the whole of it now.';

-- What is told together: one cause, by one rule.
create table notification_groups (
    group_id text primary key,
    space_id text not null,
    rule text not null,
    kind text not null,
    -- What its transitions have in common: an error group, an agent, a channel, a provider.
    cause text not null,
    -- The cause in words.
    label text not null,
    count bigint not null,
    first_at timestamptz not null,
    last_at timestamptz not null,
    -- How many of them were told, in how many messages, and when last.
    told bigint not null default 0,
    messages integer not null default 0,
    told_at timestamptz,
    -- The cause says of itself that it is over, such as a gate that opens.
    ended_at timestamptz,
    closed_at timestamptz
);
comment on table notification_groups is 'The space is the rule''s one space; * is a rule of several.';
create unique index notification_groups_open on notification_groups (rule, kind, cause, space_id) where closed_at is null;
select keep_spaces_apart('notification_groups');

-- Which transitions a group has. The key is what tells each of them once by each rule.
create table notification_members (
    rule text not null,
    transition_id bigint not null,
    -- Members get their numbers one look after another, so a message has all of them up to its last one.
    member_id bigint generated always as identity,
    group_id text not null,
    space_id text not null,
    subject text not null,
    session_id text,
    at timestamptz not null,
    primary key (rule, transition_id)
);
comment on table notification_members is 'The space is that of the transition.';
create index notification_members_of on notification_members (group_id, member_id);
create index notification_members_by_session on notification_members (session_id) where session_id is not null;
select keep_spaces_apart('notification_members');

-- One message to a person. It holds no text of a session: what it says is read when it is sent.
create table notifications (
    notification_id text primary key,
    space_id text not null,
    group_id text not null,
    rule text not null,
    kind text not null,
    phase text not null check (phase in ('began', 'more', 'over')),
    -- New in this message, and in its group so far.
    count bigint not null,
    total bigint not null,
    after_member bigint not null,
    through_member bigint not null,
    status text not null default 'queued' check (status in ('queued', 'sending', 'sent', 'failed', 'uncertain')),
    attempt integer not null default 0,
    -- The attempt that may write how it ended.
    claim text,
    next_at timestamptz not null default clock_timestamp(),
    tried_since timestamptz,
    last_error text,
    receipt json,
    created_at timestamptz not null default clock_timestamp(),
    settled_at timestamptz
) with (fillfactor = 70);
comment on table notifications is 'The space is the rule''s one space; * is a rule of several.';
create index notifications_due on notifications (next_at) where status in ('queued', 'sending');
create index notifications_by_rule on notifications (rule, created_at);
select keep_spaces_apart('notifications');

-- A link by which a person may act once, without a login. The token itself is in the message only.
create table act_links (
    token_sha256 text primary key,
    notification_id text not null,
    act text not null check (act in ('retry', 'answer', 'resolve', 'resend')),
    -- By which door it comes: the page of a link, or a button of Slack, whose request Slack signs.
    way text not null check (way in ('link', 'slack')),
    session_id text not null,
    -- A call or a delivery.
    effect_id text,
    -- What the act is about, when the link was made: what the person read, and no other arguments.
    bound_sha256 text not null,
    created_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null,
    used_at timestamptz,
    used_by text
);
comment on table act_links is
    'Of the installation: a link is looked up before its space is known. It holds no text of a session.';
create index act_links_by_session on act_links (session_id);
