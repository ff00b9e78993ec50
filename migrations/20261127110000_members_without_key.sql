-- A member of a batch whose key cannot be had now is tried again after the others.

alter table batch_members
    -- When it was tried last and could not be acted on. Null: it was not tried, or nothing was in the way. `detail` says what was.
    add column tried_at timestamptz;
