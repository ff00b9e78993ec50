//! Questions that get no answer in time.
//!
//! A search finds them by the database's clock and takes no lock. Closing a question takes the same locks as
//! an answer, so whichever commits first wins. After an answer there is no question to close. After a close,
//! a late answer is an ordinary message.
#![doc = include_str!("question.md")]

use crate::json::to_json;
use crate::run::{self, Opened};
use crate::{Result, Store};
use sqlx::PgConnection;
use wakeful_workflow::agent::OnExpired;
use wakeful_workflow::resolve::unanswered;
use wakeful_workflow::session::SessionStatus;

/// How long the questions of one agent wait for an answer.
#[derive(Clone, Copy, Debug)]
pub struct Patience<'a> {
    pub agent: &'a str,
    pub seconds: u64,
}

impl Store {
    /// Returns sessions of this agent that have waited longer than `patience` for an answer: at most `limit`,
    /// with ids above `after`.
    ///
    /// Leaves out imported sessions, because their question was asked elsewhere, and sessions of replays.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn unanswered(&self, patience: Patience<'_>, after: &str, limit: i64) -> Result<Vec<String>> {
        Ok(sqlx::query_scalar!(
            "select s.session_id from conversation_sessions s
            where s.status = 'waiting_input'
                and s.session_id > $3
                and s.agent = $1
                and s.runner = ''
                and s.imported_from is null
                and (
                    select e.ts from session_events e
                    where e.session_id = s.session_id and e.type = 'state_transition'
                    order by e.seq desc
                    limit 1
                ) < clock_timestamp() - make_interval(secs => $2)
            order by s.session_id
            limit $4",
            patience.agent,
            patience.seconds as f64,
            after,
            limit
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// Closes the question of a session that has waited longer than `patience`, and makes the session
    /// continue. Returns `false` and does nothing if the session no longer waits, or not long enough.
    ///
    /// # Errors
    /// [`crate::Error::NotFound`], [`crate::Error::Database`].
    pub async fn expire_question(
        &self,
        session_id: &str,
        patience: Patience<'_>,
        then: OnExpired,
    ) -> Result<bool> {
        let mut tx = self.pool.in_line(session_id).begin().await?;
        let session = run::lock(&mut tx, session_id).await?;
        let waits = session.status == SessionStatus::WaitingInput && !session.cancel_requested;
        if !waits || !has_waited(&mut tx, session_id, patience).await? {
            return Ok(false);
        }
        let Some(run_id) = run::newest(&mut tx, session_id).await? else { return Ok(false) };
        let reason = format!("no answer came within {} s", patience.seconds);
        match then {
            OnExpired::TellModel => {
                // This run may have to queue behind another session's run. The ledger keeps the result until then.
                sqlx::query!(
                    "update tool_calls set outcome = $2::text::json
                    where session_id = $1 and status = 'waiting' and result_message_number is null",
                    session_id,
                    to_json(&unanswered(patience.seconds))?
                )
                .execute(&mut *tx)
                .await?;
            }
            OnExpired::Fail => {
                sqlx::query!(
                    "update conversation_sessions
                    set cancel_requested = true, cancel_reason = $2, wake_seq = wake_seq + 1
                    where session_id = $1",
                    session_id,
                    reason
                )
                .execute(&mut *tx)
                .await?;
            }
        }
        let conversation = run::lock_conversation(&mut tx, &session.conversation_id).await?;
        let _: Opened = run::open(&mut tx, &conversation, &session, &run_id, None, Some(&reason)).await?;
        crate::failpoint!("K27_expire");
        tx.commit().await?;
        crate::failpoint!("K27_expired");
        Ok(true)
    }
}

/// Repeats the search's condition for one session, under its lock. Since the search, an answer may have
/// arrived or the model may have asked another question.
async fn has_waited(tx: &mut PgConnection, session_id: &str, patience: Patience<'_>) -> Result<bool> {
    Ok(sqlx::query_scalar!(
        r#"select coalesce(max(e.ts) < clock_timestamp() - make_interval(secs => $2), false)
            and not exists (select from session_inbox where session_id = $1 and status = 'pending') as "waited!"
        from (
            select ts from session_events
            where session_id = $1 and type = 'state_transition'
            order by seq desc
            limit 1
        ) e"#,
        session_id,
        patience.seconds as f64
    )
    .fetch_one(tx)
    .await?)
}
