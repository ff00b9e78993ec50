-- Where an imported session came from: what its bundle said of itself, for people. Its old ids and parents are data here
-- and nothing follows them; its columns for those are its own, and empty.

alter table conversation_sessions add column imported_from jsonb;
