-- Words are taken apart by the program now, and no longer by Postgres: see `store/src/search/words.rs`. So all sessions are read again,
-- beside the steps, the newest first and 200 a second at most. What is said meanwhile is read at once, and until a session is read
-- again it is found by its words as before, though not by the parts of an address or of a path.
update search_sessions h
set through_message_number = 0,
    parts = 0,
    due_at = clock_timestamp() + old.place * interval '5 milliseconds'
from (select session_id, row_number() over (order by session_id desc) as place from search_sessions) old
where h.session_id = old.session_id;
