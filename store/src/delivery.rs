//! The outbox: outgoing messages, committed with the step that made them and sent by a job of their own.
//!
//! `queued` → `sending` → `sent`. Found `sending` after a crash, a delivery may have gone out: a channel that knows its
//! keys is asked or sent to again under the same key, any other leaves it `uncertain` and shows it.

use crate::queue::Lease;
use crate::run::{Wakes, journal};
use crate::{Result, Store};
use serde_json::Value;
use wakeful_workflow::event::Event;

/// A delivery that this lease may send now.
#[derive(Clone, Debug)]
pub struct Claimed {
    pub delivery_id: String,
    pub session_id: String,
    pub content: Value,
    /// How often sending it was begun, this time included.
    pub attempt: i32,
    /// It was `sending` already: an earlier attempt may have gone out.
    pub maybe_sent: bool,
}

/// How a delivery ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Settled {
    Sent { receipt: Value },
    Failed { error: String },
    Uncertain { error: String },
}

impl Store {
    /// What the deliver job's `pending` count is now. Read before looking for open deliveries.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn pending_deliveries(&self, lease: &Lease) -> Result<Option<i64>> {
        Ok(sqlx::query_scalar!(
            "select pending from jobs where job_id = $1 and lease = $2",
            lease.job_id,
            lease.token
        )
        .fetch_optional(&self.pool)
        .await?)
    }

    /// Takes the oldest open delivery of the channel, fenced. What is past its `not_after` expires on the way.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn claim_delivery(
        &self,
        lease: &Lease,
        conversation_id: &str,
        channel: &str,
    ) -> Result<Option<Claimed>> {
        sqlx::query!(
            "update deliveries
            set status = 'expired', settled_at = clock_timestamp()
            where conversation_id = $1 and channel = $2 and status = 'queued' and not_after < clock_timestamp()",
            conversation_id,
            channel
        )
        .execute(&self.pool)
        .await?;
        let claimed = sqlx::query!(
            r#"
            with next as (
                select delivery_id, status from deliveries
                where conversation_id = $3 and channel = $4 and status in ('queued', 'sending')
                order by ordinal
                limit 1
            ), j as (
                update jobs set stuck = stuck
                where job_id = $1 and lease = $2
                returning job_id
            )
            update deliveries
            set status = 'sending', attempt = attempt + 1, lease = $2
            from next, j
            where deliveries.delivery_id = next.delivery_id
            returning deliveries.delivery_id, deliveries.session_id, deliveries.content::text as "content!",
                deliveries.attempt, next.status = 'sending' as "maybe_sent!"
            "#,
            lease.job_id,
            lease.token,
            conversation_id,
            channel
        )
        .fetch_optional(&self.pool)
        .await?;
        claimed
            .map(|row| {
                Ok(Claimed {
                    delivery_id: row.delivery_id,
                    session_id: row.session_id,
                    content: crate::hydrate::from_text("delivery", &row.content)?,
                    attempt: row.attempt,
                    maybe_sent: row.maybe_sent,
                })
            })
            .transpose()
    }

    /// Gives a claimed delivery back: it was certainly not sent and will be tried again.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn unsend(&self, lease: &Lease, delivery_id: &str, error: &str) -> Result<()> {
        sqlx::query!(
            "update deliveries set status = 'queued', last_error = $3 where delivery_id = $1 and lease = $2",
            delivery_id,
            lease.token,
            error
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Writes down how a claimed delivery ended, with its journal entry. `false`: the lease is lost and nothing was
    /// written.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn settle_delivery(
        &self,
        lease: &Lease,
        claimed: &Claimed,
        channel: &str,
        settled: &Settled,
    ) -> Result<bool> {
        let (status, receipt, error) = match settled {
            Settled::Sent { receipt } => ("sent", Some(receipt.to_string()), None),
            Settled::Failed { error } => ("failed", None, Some(error.as_str())),
            Settled::Uncertain { error } => ("uncertain", None, Some(error.as_str())),
        };
        let mut tx = self.pool.begin().await?;
        sqlx::query!(
            "select session_id from conversation_sessions where session_id = $1 for update",
            claimed.session_id
        )
        .fetch_optional(&mut *tx)
        .await?;
        let held = sqlx::query!(
            "update jobs set stuck = 0 where job_id = $1 and lease = $2",
            lease.job_id,
            lease.token
        )
        .execute(&mut *tx)
        .await?;
        if held.rows_affected() == 0 {
            return Ok(false);
        }
        let changed = sqlx::query!(
            "update deliveries
            set status = $3, receipt = $4::text::json, last_error = coalesce($5, last_error),
                settled_at = clock_timestamp()
            where delivery_id = $1 and lease = $2 and status = 'sending'",
            claimed.delivery_id,
            lease.token,
            status,
            receipt,
            error
        )
        .execute(&mut *tx)
        .await?;
        if changed.rows_affected() == 0 {
            // An earlier try of this went through, and only its answer was lost.
            return Ok(true);
        }
        if let Settled::Sent { .. } = settled {
            let event =
                Event::GenSent { delivery_id: claimed.delivery_id.clone(), channel: channel.to_owned() };
            let dedupe = format!("sent/{}", claimed.delivery_id);
            journal(&mut tx, &claimed.session_id, None, Some(&dedupe), Wakes::Nobody, &[event]).await?;
        }
        tx.commit().await?;
        Ok(true)
    }

    /// Ends the deliver job if nothing was enqueued since `seen` was read. `false`: look again.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn end_deliver_job(&self, lease: &Lease, seen: i64) -> Result<bool> {
        let ended = sqlx::query!(
            "delete from jobs where job_id = $1 and lease = $2 and pending = $3",
            lease.job_id,
            lease.token,
            seen
        )
        .execute(&self.pool)
        .await?;
        Ok(ended.rows_affected() == 1)
    }
}
