-- Mails that came in: which conversation each belongs to, and which were kept from the agents, and why.
--
-- The row is written in the commit that wakes the mail's session. So a mail that was acknowledged is here, and one that comes
-- again finds what became of it.

create table mails (
    space_id text not null,
    mailbox_id text not null,
    -- The Message-ID, or a hash where it has none or a very long one.
    message_id text not null,
    conversation_id text,
    session_id text,
    from_address text,
    subject text not null,
    -- Equal for a mail and its replies.
    subject_key text not null,
    body_sha256 text not null,
    -- The ids of the messages that it answers.
    answers text[] not null,
    -- It goes on with a conversation that was there.
    joined boolean not null default false,
    -- Why it woke nobody.
    dropped text,
    -- As the sender's clock had it.
    sent_at text,
    received_at timestamptz not null default clock_timestamp(),
    primary key (space_id, mailbox_id, message_id),
    check ((session_id is null) = (dropped is not null)),
    check ((session_id is null) = (conversation_id is null))
);

create index mails_by_conversation on mails (conversation_id) where conversation_id is not null;
create index mails_by_sender on mails (space_id, mailbox_id, from_address, received_at);
create index mails_newest on mails (space_id, received_at desc);
