-- The files of a session: each step says which tree it left, and the journal's entry WORKSPACE_SNAPSHOT names the
-- blobs that hold it.
alter table session_steps add column workspace_sha256 text;
comment on column session_steps.workspace_sha256 is
    'The tree of the workspace when the step was committed; null while no step has changed the workspace.';

-- A worker reads the newest snapshot with the session. Most sessions have none, so the index stays small.
create index session_events_snapshots on session_events (session_id, seq) where type = 'WORKSPACE_SNAPSHOT';
