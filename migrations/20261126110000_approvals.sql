-- A call of a tool that its agent lists under `approve` is recorded as `unapproved`, and runs only after a person said yes.
--
-- The rows that exist fit the narrower checks, so they need not be read again.

alter table tool_calls
    drop constraint tool_calls_status_check,
    add constraint tool_calls_status_check
        check (status in ('invoked', 'started', 'done', 'failed', 'uncertain', 'waiting', 'abandoned', 'unapproved'))
        not valid;

alter table act_links
    drop constraint act_links_act_check,
    add constraint act_links_act_check check (act in ('retry', 'answer', 'resolve', 'resend', 'approve')) not valid;
