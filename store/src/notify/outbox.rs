//! The messages of notifications: claimed, sent, settled and shown. One is tried like a delivery, but one that
//! may have been sent is sent again, under its id: twice is better than not at all.
//!
//! A process that dies while it sends leaves the row in `sending`, and another takes it when the claim's time is over. A row that
//! settles is not a transition, so a notification that fails causes none.

use crate::error::bounded;
use crate::outbox::WAITING;
use crate::{Error, Result, Store, new_id};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::Value;
use std::time::Duration;
use wakeful_workflow::notify::Kind;

/// How many of its transitions a message names.
const NAMED: i64 = 50;

/// Every status of a notification.
pub const STATUSES: [&str; 5] = ["queued", "sending", "sent", "failed", "uncertain"];

/// A message that this claim may send now.
#[derive(Clone, Debug)]
pub struct ClaimedNotification {
    pub notification_id: String,
    pub rule: String,
    pub kind: Kind,
    /// `began`, `more` or `over`.
    pub phase: String,
    /// New in this message, and in its group so far.
    pub count: i64,
    pub total: i64,
    /// The cause in words.
    pub label: String,
    pub cause: String,
    pub first_at: DateTime<Utc>,
    pub last_at: DateTime<Utc>,
    pub ended_at: Option<DateTime<Utc>>,
    pub created_at: DateTime<Utc>,
    /// Number of this attempt, from 1.
    pub attempt: i32,
    /// An earlier attempt may have sent it.
    pub maybe_sent: bool,
    pub tried_for: Duration,
    claim: String,
}

/// One of the transitions of a message, as it is now.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Told {
    pub transition_id: i64,
    pub at: DateTime<Utc>,
    pub space_id: String,
    /// A session, a delivery, a provider, a batch.
    pub subject: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// Without its space.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conversation_id: Option<String>,
    /// The session's status now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    /// The session's error, or the delivery's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub question: Option<String>,
}

/// How a notification ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Ended {
    Sent { receipt: Value },
    Failed { error: String },
    Uncertain { error: String },
}

/// One notification for display.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Notification {
    pub notification_id: String,
    /// `*`: of several spaces, or of the whole installation.
    pub space_id: String,
    pub group_id: String,
    pub rule: String,
    pub kind: String,
    pub phase: String,
    /// The cause in words.
    pub label: String,
    pub count: i64,
    pub total: i64,
    #[cfg_attr(feature = "schema", schemars(extend("enum" = STATUSES)))]
    pub status: String,
    pub attempt: i32,
    pub last_error: Option<String>,
    pub receipt: Option<Value>,
    /// For one that is still to be sent.
    pub next_attempt_at: Option<DateTime<Utc>>,
    pub created_at: DateTime<Utc>,
    pub settled_at: Option<DateTime<Utc>>,
}

/// Which notifications to list.
#[derive(Clone, Debug, Default)]
pub struct NotificationFilter {
    /// `None`: all.
    pub space_id: Option<String>,
    /// Also those of the whole installation.
    pub of_installation: bool,
    pub notification_id: Option<String>,
    /// Any of these; see [`statuses`].
    pub statuses: Option<Vec<String>>,
    pub rule: Option<String>,
    /// The last id of the page before.
    pub before: Option<String>,
    pub limit: i64,
}

/// Returns the statuses that a word means: one of them, or `waiting` for what is still to be sent.
///
/// # Errors
/// For another word, a sentence that lists the known ones.
pub fn statuses(word: &str) -> std::result::Result<Vec<String>, String> {
    match word {
        WAITING => Ok(vec!["queued".to_owned(), "sending".to_owned()]),
        known if STATUSES.contains(&known) => Ok(vec![known.to_owned()]),
        _ => Err(format!("no status {word:?}; there are: {WAITING}, {}", STATUSES.join(", "))),
    }
}

impl Store {
    /// Claims the notification that has been due longest, of those rules that this process can send. `rules`: each with how long
    /// an attempt may take; another process takes the row only after that.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn claim_notification(
        &self,
        rules: &[(String, Duration)],
    ) -> Result<Option<ClaimedNotification>> {
        let (names, holds): (Vec<String>, Vec<f64>) =
            rules.iter().map(|(name, hold)| (name.clone(), hold.as_secs_f64())).unzip();
        let claim = new_id("clm");
        let row = sqlx::query!(
            r#"with next as (
                select n.notification_id, n.status, r.hold
                from notifications n
                join unnest($2::text[], $3::float8[]) as r (rule, hold) on r.rule = n.rule
                where n.status in ('queued', 'sending') and n.next_at <= clock_timestamp()
                order by n.next_at
                limit 1
                for update of n skip locked
            )
            update notifications n
            set status = 'sending', attempt = n.attempt + 1, claim = $1,
                next_at = clock_timestamp() + make_interval(secs => next.hold),
                tried_since = coalesce(n.tried_since, clock_timestamp())
            from next, notification_groups g
            where n.notification_id = next.notification_id and g.group_id = n.group_id
            returning n.notification_id, n.rule, n.kind, n.phase, n.count, n.total, n.attempt, n.created_at,
                next.status = 'sending' as "maybe_sent!",
                extract(epoch from clock_timestamp() - n.tried_since)::float8 as "tried_for_s!",
                g.label, g.cause, g.first_at, g.last_at, g.ended_at"#,
            claim,
            &names,
            &holds
        )
        .fetch_optional(&self.pool)
        .await?;
        row.map(|row| {
            Ok(ClaimedNotification {
                notification_id: row.notification_id,
                rule: row.rule,
                kind: Kind::parse(&row.kind).ok_or_else(|| Error::corrupt("notification kind", &row.kind))?,
                phase: row.phase,
                count: row.count,
                total: row.total,
                label: row.label,
                cause: row.cause,
                first_at: row.first_at,
                last_at: row.last_at,
                ended_at: row.ended_at,
                created_at: row.created_at,
                attempt: row.attempt,
                maybe_sent: row.maybe_sent,
                tried_for: Duration::try_from_secs_f64(row.tried_for_s).unwrap_or_default(),
                claim,
            })
        })
        .transpose()
    }

    /// The first transitions that a message tells, as they are now.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn told_by(&self, notification_id: &str) -> Result<Vec<Told>> {
        let mut rows = sqlx::query!(
            r#"select m.transition_id, m.at, m.space_id, m.subject, m.session_id, d.last_error as "unsent?"
            from notifications n
            join notification_members m on m.group_id = n.group_id
                and m.member_id > n.after_member and m.member_id <= n.through_member
            left join deliveries d on n.kind = 'delivery_failed' and d.delivery_id = m.subject
            where n.notification_id = $1
            order by m.member_id
            limit $2"#,
            notification_id,
            NAMED
        )
        .fetch_all(&self.pool)
        .await?;
        for row in &mut rows {
            row.unsent = self.reveal_some(row.session_id.as_deref(), row.unsent.take()).await;
        }
        let mut ids: Vec<String> = rows.iter().filter_map(|row| row.session_id.clone()).collect();
        ids.sort_unstable();
        ids.dedup();
        let sessions = self.sessions_by_id(&ids).await?;
        let told = rows.into_iter().map(|row| {
            let session = sessions.iter().find(|one| Some(&one.session_id) == row.session_id.as_ref());
            Told {
                transition_id: row.transition_id,
                at: row.at,
                space_id: row.space_id,
                subject: row.subject,
                agent: session.map(|one| one.agent.clone()),
                conversation_id: session.map(|one| one.conversation_id.clone()),
                status: session.map(|one| one.status.clone()),
                error: row.unsent.or_else(|| session.and_then(|one| one.error.clone())),
                question: session.and_then(|one| one.question.clone()),
                session_id: row.session_id,
            }
        });
        Ok(told.collect())
    }

    /// Records how a claimed notification ended. `false`: the claim is lost, and nothing was written.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn settle_notification(&self, claimed: &ClaimedNotification, ended: &Ended) -> Result<bool> {
        let (status, error, receipt) = match ended {
            Ended::Sent { receipt } => ("sent", None, Some(receipt.to_string().replace("\\u0000", ""))),
            Ended::Failed { error } => ("failed", Some(bounded(error)), None),
            Ended::Uncertain { error } => ("uncertain", Some(bounded(error)), None),
        };
        let written = sqlx::query!(
            "update notifications
            set status = $3, last_error = $4, receipt = $5::text::json, settled_at = clock_timestamp(), claim = null
            where notification_id = $1 and claim = $2",
            claimed.notification_id,
            claimed.claim,
            status,
            error,
            receipt
        );
        Ok(written.execute(&self.pool).await?.rows_affected() == 1)
    }

    /// Gives a claimed notification back, to be tried again `after` this time. `unsent`: it certainly was not sent.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn postpone_notification(
        &self,
        claimed: &ClaimedNotification,
        unsent: bool,
        error: &str,
        after: Duration,
    ) -> Result<()> {
        sqlx::query!(
            "update notifications
            set status = case when $3 then 'queued' else 'sending' end, last_error = $4, claim = null,
                next_at = clock_timestamp() + make_interval(secs => $5)
            where notification_id = $1 and claim = $2",
            claimed.notification_id,
            claimed.claim,
            unsent,
            bounded(error),
            after.as_secs_f64()
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Notifications, newest first.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn notifications(&self, filter: &NotificationFilter) -> Result<Vec<Notification>> {
        let mut tx = self.pool.planned().await?;
        let found = sqlx::query_as!(
            Notification,
            r#"select n.notification_id as "notification_id!", n.space_id as "space_id!", n.group_id as "group_id!",
                n.rule as "rule!", n.kind as "kind!", n.phase as "phase!", g.label, n.count as "count!", n.total as "total!",
                n.status as "status!", n.attempt as "attempt!", n.last_error, n.receipt, n.created_at as "created_at!", n.settled_at,
                case when n.status in ('queued', 'sending') then n.next_at end as next_attempt_at
            from (
                -- Those of the space and those of the installation, each in their order.
                (select * from notifications
                where ($1::text is null or space_id = $1)
                    and ($3::text is null or notification_id = $3)
                    and ($4::text[] is null or status = any ($4))
                    and ($5::text is null or rule = $5)
                    and ($6::text is null or notification_id < $6)
                order by notification_id desc
                limit $7)
                union all
                (select * from notifications
                where $1 <> '*' and $2 and space_id = '*'
                    and ($3::text is null or notification_id = $3)
                    and ($4::text[] is null or status = any ($4))
                    and ($5::text is null or rule = $5)
                    and ($6::text is null or notification_id < $6)
                order by notification_id desc
                limit $7)
            ) n
            join notification_groups g using (group_id)
            order by n.notification_id desc
            limit $7"#,
            filter.space_id,
            filter.of_installation,
            filter.notification_id,
            filter.statuses.as_deref(),
            filter.rule,
            filter.before,
            filter.limit
        )
        .fetch_all(&mut *tx)
        .await?;
        tx.rollback().await?;
        Ok(found)
    }

    /// Queues a notification again if it failed or may not have been sent. Returns whether it was one of those.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn resend_notification(&self, notification_id: &str) -> Result<bool> {
        let mut tx = self.pool.begin().await?;
        let queued = sqlx::query!(
            "update notifications
            set status = 'queued', attempt = 0, next_at = clock_timestamp(), tried_since = null, settled_at = null
            where notification_id = $1 and status in ('failed', 'uncertain')",
            notification_id
        );
        let queued = queued.execute(&mut *tx).await?.rows_affected() == 1;
        crate::audit::act::on(notification_id);
        tx.commit().await?;
        Ok(queued)
    }
}
