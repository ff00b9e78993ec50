-- What an operator's overview counts. Only troubled sessions are in it, so a session that goes well writes nothing to it.
create index sessions_troubled on conversation_sessions (session_id) where status in ('needs_attention', 'failed');

-- The queue's depth, once a minute, for the drawing of a day.
create table queue_samples (
    at timestamptz primary key,
    ready bigint not null,
    leased bigint not null,
    delayed bigint not null,
    oldest_ready_s float8 not null
);
comment on table queue_samples is
    'The installation''s, of no space: how many jobs there were at each minute of the last two days.';
