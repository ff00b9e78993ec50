-- A model call that was cut off may be gone on from, where the next request is the same one with that text at its end.
-- The attempt that finds it has nothing but these rows to know it by.

alter table generations
    -- Hash of the request without its prefill. Null in rows of workers that did not write it: they are replaced.
    add column base_sha256 text,
    -- The attempt whose text this one went on from.
    add column resumes text,
    -- Cleared when more than text came, or when the provider refused to go on from a text.
    add column resumable boolean not null default true,
    -- What the projection changed on the request's copy of the transcript.
    add column repairs bigint not null default 0;
