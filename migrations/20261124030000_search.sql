-- What `session list` and GET /v1/sessions search in. A worker fills it beside the steps: no commit of a step writes here.

-- One row for each session that was looked at: how far its messages are in the index, and what it can be found by.
create table search_sessions (
    session_id text primary key,
    space_id text not null,
    -- Messages up to this number are in `search_documents`.
    through_message_number bigint not null default 0,
    parts integer not null default 0,
    -- The tools that its model asked for, and who wrote to it.
    tools text[] not null default '{}',
    senders text[] not null default '{}',
    cost_micros bigint not null default 0,
    steps bigint not null default 0,
    -- The group of its newest failure: see `run_failures`.
    fingerprint text,
    -- When to look at it again. Null: when a run of it opens.
    due_at timestamptz,
    indexed_at timestamptz not null default clock_timestamp()
);
-- Under a policy, Postgres uses no index for words and arrays: their operators may run only on rows that the policy has let
-- through. So these two tables have none. Every statement that a caller's space may reach joins the session, whose policy decides.
comment on table search_sessions is 'Without a policy: it would keep tools and senders from their indexes. The space is that of the session, which every search joins.';

create index search_sessions_due on search_sessions (due_at) where due_at is not null;
create index search_sessions_by_tool on search_sessions using gin (tools);
create index search_sessions_by_sender on search_sessions using gin (senders);
create index search_sessions_by_cost on search_sessions (cost_micros);
create index search_sessions_by_steps on search_sessions (steps);
create index search_sessions_by_fingerprint on search_sessions (fingerprint, session_id) where fingerprint is not null;

-- The words of a stretch of a session's messages. Long sessions have many.
create table search_documents (
    session_id text not null,
    part integer not null,
    space_id text not null,
    words tsvector not null,
    primary key (session_id, part)
);
comment on table search_documents is 'Without a policy: it would keep words from their index. The space is that of the session, which every search joins.';

create index search_documents_by_word on search_documents using gin (words);

-- Sessions that go on with a run that was opened before: a retry, an answer. New runs and new sessions are found by their ids,
-- which grow with time. Rows are only added and deleted, so adding one waits for no lock.
create table search_due (
    due_id bigint generated always as identity primary key,
    session_id text not null,
    space_id text not null
);
comment on table search_due is 'The space is that of the session. Rows go away when they are read.';

-- How far the search has read. One row.
create table search_progress (
    only_one boolean primary key default true check (only_one),
    run_id text not null default '',
    session_id text not null default ''
);
comment on table search_progress is 'Of the installation: how far the search has read in all spaces.';
insert into search_progress default values;

-- A list by one of these reads its newest rows in the order of the ids, and sorts nothing.
create index sessions_by_space on conversation_sessions (space_id, session_id);
create index sessions_by_agent on conversation_sessions (agent, session_id);
create index sessions_by_trigger on conversation_sessions (trigger_type, session_id);
-- Statuses in which sessions rest that somebody looks for. Completed ones are the many: their list is the list.
create index sessions_at_rest on conversation_sessions (status, session_id)
    where status not in ('queued', 'running', 'completed');
create index conversations_by_user on conversation_counters (user_id) where user_id is not null;

select keep_spaces_apart('search_due');
