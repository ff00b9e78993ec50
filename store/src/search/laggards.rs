//! Sessions whose ids are older than their rows, because the clock of the host that made them is behind.

use super::id_of;
use crate::Result;
use chrono::{DateTime, TimeDelta, Utc};
use sqlx::PgConnection;

/// A clock that makes ids may be behind by so much.
const BEHIND: TimeDelta = TimeDelta::hours(1);
/// And ahead by so much.
const AHEAD: TimeDelta = TimeDelta::seconds(60);

/// Enters the sessions that the sweeps have missed: those of [`BEHIND`] that are not entered, and those with a run of that time and
/// messages that the search has not read. It reads the ids of an hour, so it is done every ten minutes.
pub(super) async fn enter(tx: &mut PgConnection, now: DateTime<Utc>) -> Result<()> {
    // Ids that are hashes are mostly greater. Others enter those.
    let (from, until) = (now - BEHIND, now + AHEAD);
    sqlx::query!(
        "with found as (
            select session_id from session_runs where run_id > $1 and run_id < $3
            union
            select session_id from conversation_sessions where session_id > $2 and session_id < $4
        )
        insert into search_sessions (session_id, space_id, due_at)
        select s.session_id, s.space_id, clock_timestamp()
        from found
        cross join lateral (
            select session_id, space_id, last_message_number from conversation_sessions
            where session_id = found.session_id offset 0
        ) s
        left join lateral (
            select session_id, due_at, through_message_number from search_sessions
            where session_id = found.session_id offset 0
        ) known on true
        where known.session_id is null
            or (known.due_at is null and known.through_message_number < s.last_message_number)
        on conflict (session_id) do update set due_at = excluded.due_at",
        id_of("run", from),
        id_of("sess", from),
        id_of("run", until),
        id_of("sess", until)
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!("update search_progress set looked_back_at = clock_timestamp()").execute(tx).await?;
    Ok(())
}
