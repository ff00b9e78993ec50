-- Questions that wait for an answer: where an agent lets them expire, the workers look for those that waited too long.
create index sessions_waiting on conversation_sessions (session_id) where status = 'waiting_input';

-- How often the cache of chats from before there were sessions was asked, and what it knew: when nothing comes out of it
-- any more, it can be turned off. A row a day and outcome, of all processes and over their restarts.
create table legacy_chat_counts (
    day date not null,
    outcome text not null check (outcome in ('imported', 'missed', 'failed')),
    chats bigint not null default 0,
    messages_left_out bigint not null default 0,
    last_at timestamptz not null default clock_timestamp(),
    primary key (day, outcome)
);
