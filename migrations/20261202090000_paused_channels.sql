-- An operator may pause a channel: its messages wait.

alter table pauses
    drop constraint pauses_kind_check,
    add constraint pauses_kind_check check (
        kind in ('queue', 'space', 'agent', 'trigger', 'provider', 'tool', 'conversation', 'schedule', 'channel'));
