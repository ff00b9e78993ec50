//! Outgoing messages as an operator sees them: their status, and for a waiting one, what it waits for.

use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;

/// Every status of a delivery.
pub const STATUSES: [&str; 6] = ["queued", "sending", "sent", "failed", "expired", "uncertain"];

/// The word that covers the statuses of a delivery that is not sent yet: `queued` and `sending`.
pub const WAITING: &str = "waiting";

/// One outgoing message for display. Relative times use the database's clock.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Delivery {
    pub delivery_id: String,
    pub session_id: String,
    /// As in the API: without the space.
    pub conversation_id: String,
    pub channel: String,
    #[cfg_attr(feature = "schema", schemars(extend("enum" = STATUSES)))]
    pub status: String,
    /// Attempts since it was made or sent again.
    pub attempt: i32,
    /// Its last fifty tries, the oldest first: a list of objects with `began` and `ended`. `ended` is null while a try goes on, and
    /// if it cannot be known.
    pub tries: Value,
    pub last_error: Option<String>,
    pub receipt: Option<Value>,
    /// Recipients that a sent delivery did not reach: a list of [`crate::bounce::Undelivered`].
    pub undelivered: Value,
    /// It came in a bundle and is never sent from this database.
    pub imported: bool,
    pub created_at: DateTime<Utc>,
    /// Time of the first attempt. None: it was not tried yet.
    pub tried_since: Option<DateTime<Utc>>,
    pub settled_at: Option<DateTime<Utc>>,
    /// How many times an operator sent it again, and when last.
    pub resent: i32,
    pub resent_at: Option<DateTime<Utc>>,
    /// The oldest open delivery of the same conversation and channel, if it is another one. It has to end
    /// first.
    pub held_up_by: Option<String>,
    pub held_up_since: Option<DateTime<Utc>>,
    /// Why that delivery was not sent so far.
    pub held_up_error: Option<String>,
    /// Its channel is paused: the reason.
    pub held_for: Option<String>,
    /// For a waiting delivery: seconds until its job may be claimed; negative if it could be claimed already. None:
    /// it has no job.
    pub next_attempt_in_s: Option<f64>,
    /// The worker that holds the delivery's job now.
    pub worker_id: Option<String>,
    /// The message itself. Set only by [`Store::delivery`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<Value>,
    /// Its order among all deliveries.
    #[serde(skip)]
    pub ordinal: i64,
}

impl Delivery {
    /// Returns whether it is still to be sent.
    pub fn waits(&self) -> bool {
        matches!(self.status.as_str(), "queued" | "sending")
    }
}

/// Filter of a list of deliveries.
#[derive(Clone, Debug, Default)]
pub struct DeliveryFilter {
    pub space_id: Option<String>,
    pub delivery_id: Option<String>,
    pub session_id: Option<String>,
    /// As stored: `space/id`.
    pub conversation_id: Option<String>,
    pub channel: Option<String>,
    /// With any of these statuses: see [`statuses`]. None: all.
    pub statuses: Option<Vec<String>>,
    /// Only deliveries that were not sent, or that did not reach every recipient.
    pub unsettled: bool,
    /// Leave out what came in a bundle and what belongs to a replay.
    pub only_live: bool,
    /// The last delivery id of the page before.
    pub before: Option<String>,
    pub limit: i64,
}

/// Returns the statuses that a word means: one of `STATUSES`, or `WAITING`.
///
/// # Errors
/// For another word, a sentence that lists the known ones.
pub fn statuses(word: &str) -> std::result::Result<Vec<String>, String> {
    if word == WAITING {
        return Ok(vec!["queued".to_owned(), "sending".to_owned()]);
    }
    match STATUSES.contains(&word) {
        true => Ok(vec![word.to_owned()]),
        false => Err(format!("no status {word:?}; there are: {WAITING}, {}", STATUSES.join(", "))),
    }
}

impl Store {
    /// Outgoing messages, newest first.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn outbox(&self, filter: &DeliveryFilter) -> Result<Vec<Delivery>> {
        let mut tx = self.pool.planned().await?;
        let mut deliveries = sqlx::query_as!(
            Delivery,
            r#"
            select d.delivery_id, d.session_id, right(d.conversation_id, -length(d.space_id) - 1) as "conversation_id!",
                d.channel, d.status, d.attempt,
                case when d.status in ('sending', 'sent', 'failed', 'uncertain')
                    then keep_tries(d.tries, d.tried_at, d.settled_at) else d.tries end as "tries!",
                d.last_error, d.receipt, d.undelivered, d.imported, d.created_at, d.tried_since, d.settled_at, d.resent, d.resent_at,
                head.delivery_id as "held_up_by?", head.since as "held_up_since?", head.last_error as "held_up_error?",
                (select p.reason from pauses p where p.pause_id = j.held_by) as held_for,
                extract(epoch from j.run_at - clock_timestamp())::float8 as next_attempt_in_s,
                case when j.lease is not null and j.run_at > clock_timestamp() then j.worker_id end as worker_id,
                null::json as content, d.ordinal
            from deliveries d
            left join lateral (
                select h.delivery_id, coalesce(h.tried_since, h.created_at) as since, h.last_error
                from deliveries h
                where h.conversation_id = d.conversation_id and h.channel = d.channel
                    and h.status in ('queued', 'sending') and h.ordinal < d.ordinal
                order by h.ordinal
                limit 1
            ) head on d.status in ('queued', 'sending')
            left join jobs j on j.kind = 'deliver' and j.conversation_id = d.conversation_id and j.channel = d.channel
                and d.status in ('queued', 'sending')
            where ($1::text is null or d.space_id = $1)
                and ($2::text is null or d.delivery_id = $2)
                and ($3::text is null or d.session_id = $3)
                and ($4::text is null or d.conversation_id = $4)
                and ($5::text is null or d.channel = $5)
                and ($6::text[] is null or d.status = any ($6))
                and (not $7 or d.status <> 'sent' or d.undelivered <> '[]')
                and ($8::text is null or d.delivery_id < $8)
                and (not $10 or not d.imported and not exists (
                    select from conversation_sessions s
                    where s.session_id = d.session_id and s.trigger_type in ('replay', 'import')))
            order by d.delivery_id desc
            limit $9
            "#,
            filter.space_id,
            filter.delivery_id,
            filter.session_id,
            filter.conversation_id,
            filter.channel,
            filter.statuses.as_deref(),
            filter.unsettled,
            filter.before,
            filter.limit,
            filter.only_live
        )
        .fetch_all(&mut *tx)
        .await?;
        tx.rollback().await?;
        for one in &mut deliveries {
            let of = Some(one.session_id.as_str());
            one.last_error = self.reveal_some(of, one.last_error.take()).await;
            // The one before it is of the same conversation, and so of the same key.
            one.held_up_error = self.reveal_some(of, one.held_up_error.take()).await;
            one.undelivered = self.reveal_value(of, one.undelivered.take()).await;
            if let Some(receipt) = one.receipt.take() {
                one.receipt = Some(self.reveal_value(of, receipt).await);
            }
        }
        Ok(deliveries)
    }

    /// One outgoing message with its content.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Database`], [`Error::Corrupt`].
    pub async fn delivery(&self, space_id: Option<&str>, delivery_id: &str) -> Result<Delivery> {
        let filter = DeliveryFilter {
            space_id: space_id.map(str::to_owned),
            delivery_id: Some(delivery_id.to_owned()),
            limit: 1,
            ..DeliveryFilter::default()
        };
        let not_found = || Error::NotFound { what: "delivery", id: delivery_id.to_owned() };
        let delivery = self.outbox(&filter).await?.pop().ok_or_else(not_found)?;
        let content = sqlx::query_scalar!(
            r#"select content::text as "content!" from deliveries where delivery_id = $1"#,
            delivery_id
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or_else(not_found)?;
        let content = self.seal_of(&delivery.session_id).await?.open_json(content)?;
        Ok(Delivery { content: Some(crate::json::from_text("delivery", &content)?), ..delivery })
    }
}
