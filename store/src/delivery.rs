//! The outbox: outgoing messages, committed with the step that made them and sent by a job of their own.
//!
//! `queued` → `sending` → `sent`. Found `sending` after a crash, a delivery may have gone out: the channel is asked for
//! its key or sent to again under the same key, and where neither is possible it is `uncertain` and shown. Past its
//! `not_after` it is `expired` and never sent late. Whatever the end, the journal has one entry for it. An operator may send
//! one again that was not sent: see [`crate::resend`].

use crate::bounce;
use crate::error::bounded;
use crate::queue::Lease;
use crate::run::{Wakes, journal};
use crate::{Result, Store, new_id};
use serde_json::{Value, json};
use sqlx::PgConnection;
use std::time::Duration;
use wakeful_workflow::event::Event;

/// Calls `$then!` with the one text that makes deliver jobs: for the rows of a CTE `sent (space_id, conversation_id,
/// channel, trace_context)`. A job that exists looks once more before it ends. sqlx reads literals only, so each
/// statement puts this literal between its own.
macro_rules! deliver_jobs {
    ($then:ident) => {
        $then!(
            "
            insert into jobs (kind, space_id, conversation_id, channel, trace_context)
            select distinct 'deliver', sent.space_id, sent.conversation_id, sent.channel, sent.trace_context
            from sent
            on conflict (conversation_id, channel) where kind = 'deliver'
                do update set pending = jobs.pending + 1"
        )
    };
}
pub(crate) use deliver_jobs;

/// A receipt that is larger is replaced by a word about its size.
const RECEIPT_BYTES: usize = 4096;

/// A delivery that this lease may bring to its end now.
#[derive(Clone, Debug)]
pub struct ClaimedDelivery {
    pub delivery_id: String,
    pub session_id: String,
    pub content: Value,
    /// How often sending it was begun, this time included.
    pub attempt: i32,
    /// It was `sending` already: an earlier attempt may have gone out.
    pub maybe_sent: bool,
    /// It is past its `not_after`. Unless it may have gone out already it is still `queued`, and was not begun.
    pub late: bool,
    /// The time that the caller allows for an attempt is over: none may be under way any more.
    pub quiet: bool,
    /// How long it has been tried, since its first attempt or since an operator sent it again.
    pub tried_for: Duration,
    /// How often an operator sent it again.
    resent: i32,
}

/// What a claim goes by.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// How old a delivery without a `not_after` of its own may become before it is sent.
    pub max_age: Option<Duration>,
    /// How long after its beginning an attempt that nobody saw end may still be under way.
    pub attempt_limit: Duration,
    /// After a pause that is longer than this one, in which nobody tried it, the time that it has been tried begins anew: the
    /// workers were away, and not its receiver.
    pub longest_pause: Duration,
}

/// How a delivery ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Settled {
    Sent {
        receipt: Value,
    },
    /// It was not sent and will not be.
    Failed {
        error: String,
    },
    /// It was not sent in time and will not be.
    Expired {
        error: String,
    },
    /// Nobody knows whether it was sent.
    Uncertain {
        error: String,
    },
}

impl Settled {
    /// The word that is stored, and the reason where it was not sent for certain.
    fn words(&self) -> (&'static str, Option<String>) {
        match self {
            Settled::Sent { .. } => ("sent", None),
            Settled::Failed { error } => ("failed", Some(bounded(error))),
            Settled::Expired { error } => ("expired", Some(bounded(error))),
            Settled::Uncertain { error } => ("uncertain", Some(bounded(error))),
        }
    }
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

    /// Tells whoever writes to the conversation's latest session something that this session did not say: `content`, by
    /// `channel`, at most once a minute. `false`: they were told within this minute.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn turn_away(&self, conversation_id: &str, channel: &str, content: &Value) -> Result<bool> {
        macro_rules! statement {
            ($deliver_jobs:tt) => {
                sqlx::query_scalar!(
                    r#"with s as (
                        select session_id, space_id, conversation_id from conversation_sessions
                        where conversation_id = $1
                        order by ordinal desc
                        limit 1
                        -- A writer of deliveries locks their session, because an export counts them by their order.
                        for update
                    ), sent as (
                        insert into deliveries
                            (delivery_id, space_id, conversation_id, channel, ordinal, session_id, source_key, content)
                        select $2, s.space_id, s.conversation_id, $3, nextval('delivery_ordinals'), s.session_id,
                            'full/' || floor(extract(epoch from clock_timestamp()) / 60)::bigint, $4::text::json
                        from s
                        on conflict (session_id, source_key, channel) do nothing
                        returning space_id, conversation_id, channel, null::text as trace_context
                    ), deliver_jobs as ("#
                        + $deliver_jobs
                        + r#"
                    )
                    select exists (select from sent) as "told!""#,
                    conversation_id,
                    new_id("dlv"),
                    channel,
                    content.to_string()
                )
            };
        }
        Ok(deliver_jobs!(statement).fetch_one(&self.intake).await?)
    }

    /// Takes the oldest open delivery of the channel, fenced. Later ones wait for it, whatever becomes of it.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn claim_delivery(
        &self,
        lease: &Lease,
        conversation_id: &str,
        channel: &str,
        terms: Terms,
    ) -> Result<Option<ClaimedDelivery>> {
        let claimed = sqlx::query!(
            r#"
            with oldest as (
                select delivery_id, status, sending_at,
                    coalesce(not_after, coalesce(resent_at, created_at) + make_interval(secs => $5)) as not_after,
                    case when tried_at >= clock_timestamp() - make_interval(secs => $7) then tried_since end
                        as tried_since
                from deliveries
                where conversation_id = $3 and channel = $4 and status in ('queued', 'sending')
                order by ordinal
                limit 1
            ), next as (
                select delivery_id, status, not_after, tried_since,
                    coalesce(not_after < clock_timestamp(), false) as late,
                    coalesce(sending_at + make_interval(secs => $6) < clock_timestamp(), true) as quiet
                from oldest
            ), j as (
                update jobs set stuck = stuck
                where job_id = $1 and lease = $2
                returning job_id
            )
            update deliveries
            set status = case when next.late then next.status else 'sending' end,
                attempt = attempt + case when next.late and next.status = 'queued' then 0 else 1 end,
                sending_at = case when next.status = 'queued' then clock_timestamp() else sending_at end,
                settled_by = case when next.status = 'queued' then clock_timestamp() + make_interval(secs => $6)
                    else settled_by end,
                not_after = next.not_after,
                tried_since = coalesce(next.tried_since, clock_timestamp()),
                tried_at = clock_timestamp(),
                lease = $2
            from next, j
            where deliveries.delivery_id = next.delivery_id
            returning deliveries.delivery_id, deliveries.session_id, deliveries.content::text as "content!",
                deliveries.attempt, deliveries.resent,
                extract(epoch from deliveries.tried_at - deliveries.tried_since)::float8 as "tried_for_s!",
                next.status = 'sending' as "maybe_sent!", next.late as "late!",
                next.quiet as "quiet!"
            "#,
            lease.job_id,
            lease.token,
            conversation_id,
            channel,
            terms.max_age.map(|age| age.as_secs_f64()),
            terms.attempt_limit.as_secs_f64(),
            terms.longest_pause.as_secs_f64()
        )
        .fetch_optional(&self.pool)
        .await?;
        claimed
            .map(|row| {
                Ok(ClaimedDelivery {
                    delivery_id: row.delivery_id,
                    session_id: row.session_id,
                    content: crate::hydrate::from_text("delivery", &row.content)?,
                    attempt: row.attempt,
                    maybe_sent: row.maybe_sent,
                    late: row.late,
                    quiet: row.quiet,
                    tried_for: Duration::try_from_secs_f64(row.tried_for_s).unwrap_or_default(),
                    resent: row.resent,
                })
            })
            .transpose()
    }

    /// Writes down that a delivery which may have gone out is now sent once more: from here on the time runs in which
    /// this attempt may be under way. `false`: the lease is lost, so it must not be sent.
    ///
    /// # Errors
    /// [`crate::Error::Database`]; then it must not be sent.
    pub async fn send_again(
        &self,
        lease: &Lease,
        delivery_id: &str,
        attempt_limit: Duration,
    ) -> Result<bool> {
        let begun = sqlx::query!(
            "with j as (
                update jobs set stuck = stuck
                where job_id = $2 and lease = $3
                returning job_id
            )
            update deliveries
            set sending_at = clock_timestamp(), settled_by = clock_timestamp() + make_interval(secs => $4)
            from j
            where delivery_id = $1 and deliveries.lease = $3 and status = 'sending'",
            delivery_id,
            lease.job_id,
            lease.token,
            attempt_limit.as_secs_f64()
        )
        .execute(&self.pool)
        .await?;
        Ok(begun.rows_affected() == 1)
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
            bounded(error)
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Gives a claimed delivery back because its receiver takes no more just now. The attempt that was begun does not count.
    /// `unsent`: it certainly was not sent; otherwise an earlier attempt may still have been.
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
        sqlx::query!(
            "update deliveries
            set status = case when $3 then 'queued' else status end, attempt = greatest(attempt - 1, 0), last_error = $4
            where delivery_id = $1 and lease = $2 and status = 'sending'",
            delivery_id,
            lease.token,
            unsent,
            bounded(error)
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
        claimed: &ClaimedDelivery,
        channel: &str,
        settled: &Settled,
    ) -> Result<bool> {
        let done = self.try_settle(lease, claimed, channel, settled).await;
        self.noted(done)
    }

    async fn try_settle(
        &self,
        lease: &Lease,
        claimed: &ClaimedDelivery,
        channel: &str,
        settled: &Settled,
    ) -> Result<bool> {
        let (status, reason) = settled.words();
        let mut tx = self.pool.begin().await?;
        sqlx::query!(
            "select session_id from conversation_sessions where session_id = $1 for update",
            claimed.session_id
        )
        .fetch_optional(&mut *tx)
        .await?;
        let held = sqlx::query!(
            "update jobs set stuck = 0, died = 0 where job_id = $1 and lease = $2",
            lease.job_id,
            lease.token
        )
        .execute(&mut *tx)
        .await?;
        if held.rows_affected() == 0 {
            return Ok(false);
        }
        // A bounce that came before the end was known is still to be told, however this ended.
        let changed = sqlx::query!(
            "update deliveries
            set status = $3, receipt = $4::text::json, last_error = $5, settled_at = clock_timestamp(),
                untold = case
                    -- A failure that nobody was told of is none any more.
                    when $3 = 'sent' then undelivered <> '[]' and untold or told_unsent
                    else untold or ($3 = 'failed' and channel = 'email')
                end
            where delivery_id = $1 and lease = $2 and status in ('queued', 'sending')",
            claimed.delivery_id,
            lease.token,
            status,
            receipt_of(settled),
            reason
        )
        .execute(&mut *tx)
        .await?;
        if changed.rows_affected() == 0 {
            // An earlier try of this went through, and only its answer was lost.
            return Ok(true);
        }
        let (delivery_id, channel_name) = (claimed.delivery_id.clone(), channel.to_owned());
        let (dedupe, event) = match reason {
            None => (format!("sent/{delivery_id}"), Event::GenSent { delivery_id, channel: channel_name }),
            Some(reason) => {
                let status = status.to_owned();
                // An operator may have it tried again after such an end, and then it may have another one.
                let ClaimedDelivery { attempt, resent, .. } = claimed;
                let dedupe = format!("unsent/{delivery_id}/{resent}.{attempt}/{status}");
                (dedupe, Event::DeliveryFailed { delivery_id, channel: channel_name, status, reason })
            }
        };
        journal(&mut tx, &claimed.session_id, None, Some(&dedupe), Wakes::Nobody, &[event]).await?;
        if let Settled::Sent { receipt } = settled {
            bounce::note_refused(&mut tx, &claimed.session_id, &claimed.delivery_id, channel, receipt)
                .await?;
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

/// Makes the job that sends the channel's open deliveries. One that exists looks once more before it ends.
pub(crate) async fn enqueue(
    tx: &mut PgConnection,
    space_id: &str,
    conversation_id: &str,
    channel: &str,
    trace_context: Option<&str>,
) -> Result<()> {
    macro_rules! statement {
        ($deliver_jobs:tt) => {
            sqlx::query!(
                "with sent (space_id, conversation_id, channel, trace_context) as (
                    select $1::text, $2::text, $3::text, $4::text
                )"
                    + $deliver_jobs,
                space_id,
                conversation_id,
                channel,
                trace_context
            )
        };
    }
    deliver_jobs!(statement).execute(tx).await?;
    Ok(())
}

/// What the provider gave for the message, as far as it is small.
fn receipt_of(settled: &Settled) -> Option<String> {
    let receipt = match settled {
        Settled::Sent { receipt } => receipt.to_string(),
        Settled::Failed { .. } | Settled::Expired { .. } | Settled::Uncertain { .. } => return None,
    };
    // Postgres keeps an escaped NUL in `json` and then fails whoever asks for the text.
    let kept = receipt.len() <= RECEIPT_BYTES && !receipt.contains("\\u0000");
    Some(if kept { receipt } else { json!({ "omitted_bytes": receipt.len() }).to_string() })
}
