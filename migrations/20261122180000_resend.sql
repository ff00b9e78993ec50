-- A delivery that was not sent may be sent again by an operator, and one that cannot be sent is given up by the clock and not
-- by a number of attempts.

alter table deliveries
    -- Since when it has been tried, and when it was last taken in hand. Both null: its turn has not come.
    add column tried_since timestamptz,
    add column tried_at timestamptz,
    -- How often an operator sent it again, and when last: from there its age counts.
    add column resent integer not null default 0,
    add column resent_at timestamptz,
    -- The agent was told that it was not sent. If it is sent after all, that is news.
    add column told_unsent boolean not null default false,
    -- It came in a bundle: nothing of a bundle is ever sent.
    add column imported boolean not null default false;

-- What needs a person is a small part of all that was ever sent.
create index deliveries_unsent on deliveries (delivery_id) where status <> 'sent';

-- What an imported session has sent since is its own: the conversation is as old as its import.
update deliveries set imported = true
from conversation_sessions s, conversation_counters c
where s.session_id = deliveries.session_id
    and s.imported_from is not null
    and c.conversation_id = s.conversation_id
    and deliveries.created_at < c.created_at;
-- The error of an attempt before the one that went out.
update deliveries set last_error = null where status = 'sent' and last_error is not null;
