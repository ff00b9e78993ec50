//! The outbox: outgoing messages, called deliveries. The step that makes a delivery commits it, and a deliver
//! job sends it.
//!
//! A delivery goes from `queued` to `sending` to `sent`. If a worker finds one in `sending` after a crash, the
//! message may have gone out. The worker asks the channel about it, or sends it again under the same key. If
//! the channel can do neither, the delivery becomes `uncertain` and operators see it. A delivery past its
//! `not_after` becomes `expired` and is never sent late. The journal gets one entry for each end. An operator
//! may send a failed or expired delivery again: see [`crate::resend`].

mod unsent;

use crate::bounce;
use crate::encryption::{SEALED, Seal, may_be_sealed};
use crate::error::bounded;
use crate::queue::Lease;
use crate::run::{Wakes, append_events};
use crate::{Result, Store, new_id};
use serde_json::{Value, json};
use sqlx::PgConnection;
use std::time::Duration;
use wakeful_workflow::event::Event;

/// Calls `$then!` with the SQL that makes deliver jobs for the rows of a CTE `to_deliver (space_id,
/// conversation_id, channel, trace_context)`. If a job exists already, the SQL makes it check once more
/// before it ends. This is a macro because sqlx accepts only literals, so each statement joins this literal
/// with its own.
macro_rules! deliver_jobs {
    ($then:ident) => {
        $then!(
            "
            insert into jobs (kind, space_id, conversation_id, channel, trace_context)
            select distinct 'deliver', to_deliver.space_id, to_deliver.conversation_id, to_deliver.channel,
                to_deliver.trace_context
            from to_deliver
            on conflict (conversation_id, channel) where kind = 'deliver'
                do update set pending = jobs.pending + 1"
        )
    };
}
pub(crate) use deliver_jobs;

/// A larger receipt is replaced by its size.
const RECEIPT_BYTES: usize = 4096;

/// A delivery that this lease may send or end now.
#[derive(Clone, Debug)]
pub struct ClaimedDelivery {
    pub delivery_id: String,
    pub session_id: String,
    pub content: Value,
    /// Number of this attempt, from 1.
    pub attempt: i32,
    /// It was `sending` already, so an earlier attempt may have sent it.
    pub maybe_sent: bool,
    /// It is past its `not_after`. If no attempt was begun before, the claim leaves it `queued`. Otherwise an
    /// earlier attempt may have sent it.
    pub late: bool,
    /// The time limit of every earlier attempt is over, so none can still be under way.
    pub quiet: bool,
    /// Time since its first attempt, or since an operator sent it again.
    pub tried_for: Duration,
    /// How many times an operator sent it again.
    resent: i32,
}

/// Time limits of a claim.
#[derive(Clone, Copy, Debug)]
pub struct DeliveryLimits {
    /// Longest age before sending, for a delivery without a `not_after` of its own.
    pub max_age: Option<Duration>,
    /// How long after its start an attempt may still be under way if its end is unknown.
    pub attempt_limit: Duration,
    /// A longer pause without attempts resets [`ClaimedDelivery::tried_for`]: the workers were away, so the receiver
    /// is not to blame.
    pub longest_pause: Duration,
}

/// How a delivery ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Settled {
    Sent {
        receipt: Value,
    },
    /// It was not sent and never will be.
    Failed {
        error: String,
    },
    /// It was not sent in time and never will be.
    Expired {
        error: String,
    },
    /// It may or may not have been sent.
    Uncertain {
        error: String,
    },
}

impl Settled {
    /// The word that the database stores.
    pub fn as_str(&self) -> &'static str {
        self.words().0
    }

    /// The stored status, and the reason unless it was sent.
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
    /// Returns the deliver job's `pending` count. Read it before looking for open deliveries.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn enqueued_deliveries(&self, lease: &Lease) -> Result<Option<i64>> {
        Ok(sqlx::query_scalar!(
            "select pending from jobs where job_id = $1 and lease = $2",
            lease.job_id,
            lease.token
        )
        .fetch_optional(&self.pool)
        .await?)
    }

    /// Queues `content` for the people of the conversation's latest session, by `channel`, at most once a
    /// minute. The text does not come from the agent: it tells senders that their messages are not accepted.
    /// Returns `false` if this minute already has one.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn enqueue_full_notice(
        &self,
        conversation_id: &str,
        channel: &str,
        content: &Value,
    ) -> Result<bool> {
        let mut content = content.clone();
        self.seal_of_conversation(conversation_id).await?.value(&mut content);
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
                    ), to_deliver as (
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
                    select exists (select from to_deliver) as "told!""#,
                    conversation_id,
                    new_id("dlv"),
                    channel,
                    content.to_string()
                )
            };
        }
        Ok(deliver_jobs!(statement).fetch_one(&self.intake).await?)
    }

    /// Claims the oldest open delivery of the conversation's channel, fenced by the lease. Later deliveries
    /// wait until it has ended.
    ///
    /// # Errors
    /// [`crate::Error::Database`].
    pub async fn claim_delivery(
        &self,
        lease: &Lease,
        conversation_id: &str,
        channel: &str,
        terms: DeliveryLimits,
    ) -> Result<Option<ClaimedDelivery>> {
        // Before the claim: without the key nothing is begun.
        self.seal_of_conversation(conversation_id).await?;
        let claimed = sqlx::query!(
            r#"
            with oldest as (
                select delivery_id, status, sending_at, settled_by,
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
                    -- The worker of the attempt may have had another limit.
                    sending_at is null
                        or greatest(settled_by, sending_at + make_interval(secs => $6)) < clock_timestamp() as quiet
                from oldest
            ), j as (
                update jobs set stuck = stuck
                where job_id = $1 and lease = $2
                returning job_id
            )
            update deliveries
            set status = case when next.late then next.status else 'sending' end,
                attempt = attempt + case when next.late and next.status = 'queued' then 0 else 1 end,
                -- Equal to tried_at in the claim that begins the attempt, and in no other: see `unclaim_delivery`.
                sending_at = case when next.status = 'queued' then statement_timestamp() else sending_at end,
                settled_by = case when next.status = 'queued' then clock_timestamp() + make_interval(secs => $6)
                    else settled_by end,
                not_after = next.not_after,
                tried_since = coalesce(next.tried_since, clock_timestamp()),
                tried_at = statement_timestamp(),
                -- Nobody knows when a try ended whose worker is gone.
                tries = case when next.status = 'sending' and not next.late
                    then keep_tries(tries, deliveries.tried_at, null) else tries end,
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
        let Some(row) = claimed else { return Ok(None) };
        // Never send a sealed text to a person. The delivery has the key of its session, whatever the conversation's row says.
        let seal = match self.own_seal_of_text(&row.session_id, &row.content).await {
            Ok(seal) => seal,
            Err(error) => {
                if !row.maybe_sent {
                    self.try_delivery_later(lease, &row.delivery_id, true, "its worker cannot open its text")
                        .await?;
                }
                return Err(error);
            }
        };
        Ok(Some(ClaimedDelivery {
            delivery_id: row.delivery_id,
            session_id: row.session_id,
            content: crate::json::from_text("delivery", &seal.open_json(row.content)?)?,
            attempt: row.attempt,
            maybe_sent: row.maybe_sent,
            late: row.late,
            quiet: row.quiet,
            tried_for: Duration::try_from_secs_f64(row.tried_for_s).unwrap_or_default(),
            resent: row.resent,
        }))
    }

    /// What opens this text. Asks for the session's key only if the text may be sealed.
    async fn own_seal_of_text(&self, session_id: &str, text: &str) -> Result<Seal> {
        if may_be_sealed(text) { self.own_seal_of(session_id).await } else { Ok(Seal::default()) }
    }

    /// Records that the caller is about to send a delivery again that may have been sent before. The time limit
    /// of this attempt starts now. `false`: the lease is lost, so the caller must not send.
    ///
    /// # Errors
    /// [`crate::Error::Database`]; then the caller must not send.
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

    /// Records how a claimed delivery ended, with its journal entry. `false`: the lease is lost and nothing was
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
        self.note_refusal(done)
    }

    async fn try_settle(
        &self,
        lease: &Lease,
        claimed: &ClaimedDelivery,
        channel: &str,
        settled: &Settled,
    ) -> Result<bool> {
        let (status, reason) = settled.words();
        // The end must be written even if the key cannot be had any more, because the message may have left. Then its words are
        // left out.
        let seal = self.seal_of_row(&claimed.session_id).await?;
        let (sealed, receipt) = match &seal {
            Some(seal) => (
                reason.as_deref().map(|reason| seal.text(reason).into_owned()),
                receipt_of(settled).map(|receipt| seal.receipt(receipt).to_string()),
            ),
            None => (reason.as_deref().map(|_| SEALED.to_owned()), None),
        };
        let reason = if seal.is_some() { reason } else { sealed.clone() };
        let mut tx = self.pool.in_line(&claimed.session_id).begin().await?;
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
        // If a bounce arrived before this, the agent must still be told about it.
        let changed = sqlx::query!(
            "update deliveries
            set status = $3, receipt = $4::text::json, last_error = $5, settled_at = clock_timestamp(),
                untold = case
                    -- After 'sent', an earlier failure that the agent has not heard of needs no notice. An
                    -- unreached recipient still does. An agent that heard of a failure must hear that it was sent.
                    when $3 = 'sent' then undelivered <> '[]' and untold or told_unsent
                    else untold or ($3 = 'failed' and channel = 'email')
                end
            where delivery_id = $1 and lease = $2 and status in ('queued', 'sending')",
            claimed.delivery_id,
            lease.token,
            status,
            receipt,
            sealed
        )
        .execute(&mut *tx)
        .await?;
        if changed.rows_affected() == 0 {
            // An earlier try was committed, and only its answer was lost.
            return Ok(true);
        }
        let (delivery_id, channel_name) = (claimed.delivery_id.clone(), channel.to_owned());
        let (dedupe, event) = match reason {
            None => (format!("sent/{delivery_id}"), Event::GenSent { delivery_id, channel: channel_name }),
            Some(reason) => {
                let status = status.to_owned();
                // An operator may send it again after this, so it can end more than once.
                let ClaimedDelivery { attempt, resent, .. } = claimed;
                let dedupe = format!("unsent/{delivery_id}/{resent}.{attempt}/{status}");
                (dedupe, Event::DeliveryFailed { delivery_id, channel: channel_name, status, reason })
            }
        };
        append_events(&mut tx, &claimed.session_id, None, Some(&dedupe), Wakes::Nothing, &[event]).await?;
        if let Settled::Sent { receipt } = settled {
            bounce::note_refused(&mut tx, &claimed.session_id, &claimed.delivery_id, channel, receipt)
                .await?;
        }
        tx.commit().await?;
        Ok(true)
    }

    /// Ends the deliver job if nothing was enqueued since `seen` was read. `false`: check again.
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

/// Makes the job that sends the channel's open deliveries. If the job exists, makes it check once more before
/// it ends.
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
                "with to_deliver (space_id, conversation_id, channel, trace_context) as (
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

/// The provider's receipt, if it is small.
fn receipt_of(settled: &Settled) -> Option<Value> {
    let receipt = match settled {
        Settled::Sent { receipt } => receipt,
        Settled::Failed { .. } | Settled::Expired { .. } | Settled::Uncertain { .. } => return None,
    };
    let text = receipt.to_string();
    // Postgres stores an escaped NUL in `json`, but then each read of the text fails.
    let kept = text.len() <= RECEIPT_BYTES && !text.contains("\\u0000");
    Some(if kept { receipt.clone() } else { json!({ "omitted_bytes": text.len() }) })
}
