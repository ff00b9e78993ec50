//! Who may begin a conversation that a schedule will use.

use super::NewSession;
use crate::session::shown;
use crate::{Error, Result};
use sqlx::PgConnection;
use wakeful_workflow::access::Speaker;

/// Checks that the sender may begin this conversation, which does not exist yet. Who reaches only one agent or user must not be in a
/// schedule's conversation before its first tick: in a conversation of a user all ticks are skipped, and in any other the agent reads
/// what he wrote. Others are asked nothing.
///
/// # Errors
/// [`Error::OfASchedule`], [`Error::Database`].
pub(crate) async fn may_begin(connection: &mut PgConnection, new: &NewSession) -> Result<()> {
    if !new.only_agent && !matches!(new.speaker, Some(Speaker::OwnToken { .. })) {
        return Ok(());
    }
    let is_scheduled = sqlx::query_scalar!(
        r#"select exists (
            select from schedules where space_id = $1 and conversation_id = $2
        ) as "scheduled!""#,
        new.space_id,
        new.conversation_id
    )
    .fetch_one(connection)
    .await?;
    if is_scheduled {
        return Err(Error::OfASchedule { conversation_id: shown(&new.conversation_id).to_owned() });
    }
    Ok(())
}
