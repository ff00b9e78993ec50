-- Apart from the new column, so that lists are read meanwhile: half a minute or more for 1,000,000 sessions.

-- Failed sessions are found by their fingerprint. Those that failed before there were fingerprints have none.
update search_sessions h
set agent = s.agent, fingerprint = coalesce(h.fingerprint, case when s.status = 'failed' then 'unknown' end)
from conversation_sessions s
where s.session_id = h.session_id;
