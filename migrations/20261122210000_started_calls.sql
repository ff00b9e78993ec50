-- A commit may start a call in the statement that records it. The rule for updates holds for such rows too: no call of a
-- session whose tools are not live is ever started.
create trigger not_rehearsed_at_once before insert on tool_calls
    for each row when (new.status = 'started')
    execute function refuse_rehearsed_effect();
