-- Each run changes its rows here a few times, and each change leaves a dead one. By default Postgres cleans a table when a fifth of it
-- is dead, so an old installation would carry ever more of them. It cleans these at a fixed number, whatever their size.
alter table conversation_sessions set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);
alter table session_runs set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);
alter table tool_calls set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);
alter table conversation_counters set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);
alter table session_inbox set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);
alter table search_sessions set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000);
