//! Resend: an operator queues an unsent delivery again. It keeps its id, so a receiver that checks the key
//! gets it once.

use crate::audit::act;
use crate::delivery::enqueue;
use crate::run::{self, Locked, Wakes, append_events};
use crate::{Error, Result, Store};
use serde::Serialize;
use sqlx::PgConnection;
use wakeful_workflow::event::Event;

/// The operator who asks, and the reason.
#[derive(Clone, Debug, Default)]
pub struct Resend {
    pub by: Option<String>,
    pub reason: Option<String>,
    /// W3C traceparent of the request.
    pub trace_context: Option<String>,
}

/// A delivery that waits to be sent once more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Resent {
    pub delivery_id: String,
    pub session_id: String,
    pub channel: String,
    pub status: String,
    /// An earlier request already queued it again, and it still waits. Nothing was written.
    #[serde(skip)]
    pub duplicate: bool,
}

impl Store {
    /// Queues a failed or expired delivery again. It keeps its id and its place in the order, so deliveries
    /// that were queued after it wait for it. Its attempts, its time limits and its age start from zero. One
    /// commit writes the job, the journal entry and the row.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Refused`] for a delivery that was sent, may have been sent, already waits, or
    /// was imported; [`Error::Database`].
    pub async fn resend(&self, space_id: Option<&str>, delivery_id: &str, asked: &Resend) -> Result<Resent> {
        let session_id = sqlx::query_scalar!(
            "select session_id from deliveries where delivery_id = $1 and ($2::text is null or space_id = $2)",
            delivery_id,
            space_id
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or_else(|| Error::NotFound { what: "delivery", id: delivery_id.to_owned() })?;
        let mut tx = self.pool.in_line(&session_id).begin().await?;
        // Everyone who changes a delivery's status locks the session's row first. So of two concurrent requests the
        // second sees the result of the first.
        let session = run::lock(&mut tx, &session_id).await?;
        let by = asked.by.clone().or_else(act::actor);
        let asked = &Resend { by, reason: asked.reason.clone(), trace_context: asked.trace_context.clone() };
        let resent = queue_again(&mut tx, &session, delivery_id, asked).await?;
        act::on(delivery_id);
        act::because(asked.reason.as_deref());
        tx.commit().await?;
        Ok(resent)
    }
}

/// Queues a locked session's delivery again.
pub(crate) async fn queue_again(
    tx: &mut PgConnection,
    session: &Locked,
    delivery_id: &str,
    asked: &Resend,
) -> Result<Resent> {
    let delivery = sqlx::query!(
        r#"select channel, status, resent, imported, undelivered <> '[]' as "missed!"
        from deliveries
        where delivery_id = $1"#,
        delivery_id
    )
    .fetch_one(&mut *tx)
    .await?;
    let refused = |reason: String| {
        Err(Error::Refused {
            session_id: session.session_id.clone(),
            reason: format!("delivery {delivery_id} {reason}"),
        })
    };
    let answer = |status: &str, duplicate| Resent {
        delivery_id: delivery_id.to_owned(),
        session_id: session.session_id.clone(),
        channel: delivery.channel.clone(),
        status: status.to_owned(),
        duplicate,
    };
    match delivery.status.as_str() {
        _ if delivery.imported => {
            return refused(
                "was imported, and nothing of a bundle is sent: send it where it came from".to_owned(),
            );
        }
        "failed" | "expired" => {}
        status @ ("queued" | "sending") if delivery.resent > 0 => return Ok(answer(status, true)),
        "queued" | "sending" => {
            return refused(format!(
                "waits to be sent already: `wakeful delivery show {delivery_id}` says when it is tried next"
            ));
        }
        "sent" if delivery.missed => {
            return refused(
                "was sent and did not reach everybody: sent again it would go to all of its recipients. Correct the \
                 address, and ask the agent for a new one"
                    .to_owned(),
            );
        }
        "sent" => return refused("was sent: ask the agent for a new one".to_owned()),
        "uncertain" => {
            return refused(format!(
                "may have been sent: look at the channel, then say what you found: `wakeful session resolve {} \
                 {delivery_id} --happened ''`, or --did-not-happen, which sends it again",
                session.session_id
            ));
        }
        other => return Err(Error::corrupt("delivery status", other)),
    }
    let event = Event::DeliveryResent {
        delivery_id: delivery_id.to_owned(),
        channel: delivery.channel.clone(),
        by: asked.by.clone(),
        reason: asked.reason.clone(),
    };
    let dedupe = format!("resent/{delivery_id}/{}", delivery.resent + 1);
    append_events(tx, &session.session_id, None, Some(&dedupe), Wakes::Nothing, &[event]).await?;
    let trace_context = asked.trace_context.as_deref();
    enqueue(tx, &session.space_id, &session.conversation_id, &delivery.channel, trace_context).await?;
    // If the agent was already told of the failure, a later success needs a notice too. If not, the agent is
    // told only how the delivery ended now.
    sqlx::query!(
        "update deliveries
        set status = 'queued',
            tries = case when status = 'failed' then keep_tries(tries, tried_at, settled_at) else tries end,
            attempt = 0,
            lease = null,
            not_after = null,
            settled_at = null,
            tried_since = null,
            tried_at = null,
            resent = resent + 1,
            resent_at = clock_timestamp(),
            told_unsent = told_unsent or (status = 'failed' and channel = 'email' and not untold)
        where delivery_id = $1",
        delivery_id
    )
    .execute(tx)
    .await?;
    Ok(answer("queued", false))
}
