-- Mail that was sent and did not arrive: the sending server refuses one recipient of several, or a bounce comes back
-- days later. Neither changes that the delivery was sent, so both are kept beside its status, a recipient once each.

alter table deliveries
    -- [{"recipient", "how": "refused" | "bounced", "status", "reason", "at"}]
    add column undelivered jsonb not null default '[]',
    -- The agent has not been told yet: the conversation's next message brings it along.
    add column untold boolean not null default false;

create index deliveries_untold on deliveries (conversation_id) where untold;
