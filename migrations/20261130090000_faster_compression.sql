-- no-transaction
-- Postgres compresses rows of more than 2 KB, by default with pglz. A message of 2 KB took it about 40 microseconds, a good part of
-- what the message's commit costs; LZ4 takes a tenth of that, and its result is a quarter larger. What is stored already stays as it is.
-- Each table has a transaction of its own: a worker that has one of them locked may wait for another one.
do $$
declare
    target record;
begin
    for target in
        select * from (values
            ('conversation_records', 'content'), ('conversation_records', 'details'), ('session_inbox', 'content'),
            ('session_seed_messages', 'content'), ('session_events', 'payload'), ('generation_chunks', 'text'),
            ('tool_calls', 'outcome'), ('deliveries', 'content'), ('blobs', 'bytes'), ('search_documents', 'words')
        ) as targets (in_table, in_column)
    loop
        begin
            execute format('alter table %I alter column %I set compression lz4', target.in_table, target.in_column);
        exception
            -- This server was built without LZ4. It goes on with pglz.
            when feature_not_supported then exit;
        end;
        commit;
    end loop;
end
$$;
