-- Where a session's context begins. The journal has every rebase; the newest one is kept in the row, because each model call
-- needs it and the journal is not read to make one.

alter table conversation_sessions
    -- The newest CONTEXT_REBASED. Null: the context has everything.
    add column rebase jsonb,
    -- Summaries of the context that failed since one succeeded or the run began: after a few none is tried again.
    add column compaction_failures bigint not null default 0;

alter table generations
    -- A call for a summary is shown to no reader.
    add column purpose text not null default 'reply' check (purpose in ('reply', 'compaction')),
    -- How its context was selected, for the entry of a call that was cut off.
    add column context_strategy text not null default 'full';
