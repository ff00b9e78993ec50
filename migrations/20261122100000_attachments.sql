-- The files that came with a message: pointers at blobs, as its record will have them.
alter table session_inbox add column attachments jsonb;
