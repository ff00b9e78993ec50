//! Gives back claimed deliveries, so that they are tried again.

use crate::queue::{self, Lease};
use crate::{Result, Store};
use std::time::Duration;

impl Store {
    /// Gives back a claimed delivery, so that it is tried again, and notes why. `unsent`: it certainly was not sent. Otherwise it
    /// stays a message that may have gone out, and the end of its try stays unknown.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn try_delivery_later(
        &self,
        lease: &Lease,
        delivery_id: &str,
        unsent: bool,
        error: &str,
    ) -> Result<()> {
        let error = self.sealed_for_job(lease.job_id, error).await?;
        sqlx::query!(
            "update deliveries
            set status = case when $3 then 'queued' else status end, last_error = $4,
                tries = case when $3 then keep_tries(tries, tried_at, clock_timestamp()) else tries end
            where delivery_id = $1 and lease = $2 and ($3 or status = 'sending')",
            delivery_id,
            lease.token,
            unsent,
            error
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Gives a claimed delivery back because its receiver accepts no messages now. The attempt does not
    /// count. `unsent`: it certainly was not sent. Otherwise an earlier attempt may have sent it.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn postpone_delivery(
        &self,
        lease: &Lease,
        delivery_id: &str,
        unsent: bool,
        error: &str,
    ) -> Result<()> {
        let error = self.sealed_for_job(lease.job_id, error).await?;
        sqlx::query!(
            "update deliveries
            set status = case when $3 then 'queued' else status end, attempt = greatest(attempt - 1, 0), last_error = $4,
                tries = keep_tries(tries, tried_at, clock_timestamp())
            where delivery_id = $1 and lease = $2 and status = 'sending'",
            delivery_id,
            lease.token,
            unsent,
            error
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Gives back a deliver job, as [`Store::retry_later`] does, after the claim of a delivery got no answer. If the claim took the
    /// delivery all the same, this attempt has not sent it. An earlier attempt may have sent it.
    ///
    /// # Errors
    /// [`crate::Error::Database`]; then the delivery may count as begun.
    pub async fn unclaim_delivery(
        &self,
        lease: &Lease,
        conversation_id: &str,
        channel: &str,
        delay: Duration,
        error: &str,
    ) -> Result<()> {
        let error = self.sealed_for_job(lease.job_id, error).await?;
        let mut tx = self.pool.begin().await?;
        // First: a claim that still runs holds the job's row, and one that comes later misses its lease.
        queue::give_back(&mut *tx, lease, delay, &error, true).await?;
        sqlx::query!(
            "update deliveries
            set status = 'queued', last_error = $4, tries = keep_tries(tries, tried_at, clock_timestamp())
            where conversation_id = $1 and channel = $2 and lease = $3 and status = 'sending' and sending_at = tried_at",
            conversation_id,
            channel,
            lease.token,
            error
        )
        .execute(&mut *tx)
        .await?;
        tx.commit().await?;
        Ok(())
    }
}
