//! A person's decision about an effect with an unknown outcome: a tool call or a delivery that is `uncertain`. Or about a call that
//! must not run before a person approves it: it is `unapproved`.
//!
//! A decision does not rewrite the logs. If the model has not been told of the call, the ledger gets the outcome and
//! the next plan finds it. If it has been told, the decision settles the ledger row, and a new message may tell the
//! model.

mod call;

use crate::audit::act;
use crate::delivery::enqueue;
use crate::encryption::Vault;
use crate::pool::Transaction;
use crate::run::{self, Locked, Wakes, append_events};
use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::{Value, json};
use sqlx::PgConnection;
use wakeful_workflow::event::Event;
use wakeful_workflow::resolve::Resolution;

/// The effect to decide.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    Call(String),
    Delivery(String),
}

/// A person's decision.
#[derive(Clone, Debug)]
pub struct Decision {
    pub effect: Effect,
    pub resolution: Resolution,
    /// The person who decides.
    pub by: Option<String>,
    pub reason: Option<String>,
    /// The hash of the arguments that the person read. `None`: of those that the call has.
    pub args_sha256: Option<String>,
    /// Whether to send a message with the new outcome to a model that was told OUTCOME UNKNOWN.
    pub tell: bool,
    /// W3C traceparent of the request.
    pub trace_context: Option<String>,
}

/// Result of the decision. The same decision again gets the same answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Resolved {
    pub session_id: String,
    /// Id of the call or the delivery.
    pub effect: String,
    pub resolution: String,
    /// The new status of the ledger row or the delivery.
    pub status: String,
    /// The run that goes on because of it.
    pub run_id: Option<String>,
    /// The run that reads the message with this outcome, when `tell` sent one.
    pub told_run_id: Option<String>,
    /// The model was told OUTCOME UNKNOWN, and this request told it nothing else. `tell` does.
    pub model_believes_unknown: bool,
    #[serde(skip)]
    pub duplicate: bool,
}

impl Resolved {
    /// Says what the model knows of a call. `outdated`: it was told that the outcome is unknown, and now it is known.
    fn told(self, outdated: bool, told_run_id: Option<String>) -> Resolved {
        Resolved { model_believes_unknown: outdated && told_run_id.is_none(), told_run_id, ..self }
    }
}

impl Store {
    /// Settles an uncertain effect, or says whether a call may run. A run that paused for it goes on if nothing else of its turn
    /// waits for a person.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Refused`] for an effect that does not wait for this decision, that has other arguments or was
    /// decided otherwise, and for "did not happen" while the process that began it may still be alive; [`Error::Conflict`] when the message to
    /// the model cannot be sent; [`Error::Database`].
    pub async fn resolve(&self, session_id: &str, decision: &Decision) -> Result<Resolved> {
        let (tx, resolved) = self.resolved(session_id, decision).await?;
        tx.commit().await?;
        Ok(resolved)
    }

    /// Like [`Store::resolve`], in a transaction that the caller commits.
    pub(crate) async fn resolved(
        &self,
        session_id: &str,
        decision: &Decision,
    ) -> Result<(Transaction, Resolved)> {
        let decision = &Decision { by: decision.by.clone().or_else(act::actor), ..decision.clone() };
        act::because(decision.reason.as_deref());
        let mut tx = self.pool.in_line(session_id).begin().await?;
        let session = run::lock(&mut tx, session_id).await?;
        let resolved = resolve_in(&mut tx, &self.vault, &session, decision).await?;
        Ok((tx, resolved))
    }

    /// Returns the id of the one call of the session that waits for approval.
    ///
    /// # Errors
    /// [`Error::Refused`] if none waits, or several do; [`Error::Database`].
    pub async fn unapproved_call(&self, session_id: &str) -> Result<String> {
        let mut waiting = sqlx::query_scalar!(
            "select call_id from tool_calls
            where session_id = $1 and status = 'unapproved' and result_message_number is null
            order by message_number, call_id",
            session_id
        )
        .fetch_all(&self.pool)
        .await?;
        let reason = match waiting.len() {
            1 => return Ok(waiting.remove(0)),
            0 => "no call of it waits for approval".to_owned(),
            _ => format!("{} calls wait for approval, so name one: {}", waiting.len(), waiting.join(", ")),
        };
        Err(Error::Refused { session_id: session_id.to_owned(), reason })
    }
}

/// Settles an uncertain effect of a locked session.
pub(crate) async fn resolve_in(
    tx: &mut PgConnection,
    vault: &Vault,
    session: &Locked,
    decision: &Decision,
) -> Result<Resolved> {
    match &decision.effect {
        Effect::Call(call_id) => call::resolve(tx, vault, session, call_id, decision).await,
        Effect::Delivery(delivery_id) => resolve_delivery(tx, vault, session, delivery_id, decision).await,
    }
}

async fn resolve_delivery(
    tx: &mut PgConnection,
    vault: &Vault,
    session: &Locked,
    delivery_id: &str,
    decision: &Decision,
) -> Result<Resolved> {
    let delivery = sqlx::query!(
        r#"select d.channel, d.status, d.attempt, d.resent, d.resolution,
            case when d.settled_by > clock_timestamp() then d.settled_by end as sender_until,
            coalesce(d.not_after < clock_timestamp(), false) as "late!"
        from deliveries d
        where d.session_id = $1 and d.delivery_id = $2"#,
        session.session_id,
        delivery_id
    )
    .fetch_optional(&mut *tx)
    .await?
    .ok_or_else(|| Error::NotFound { what: "delivery", id: delivery_id.to_owned() })?;
    let resolution = &decision.resolution;
    let seal = vault.seal(session.data_key.as_deref()).await?;
    if delivery.status != "uncertain" {
        let taken = delivery.resolution.map(|taken| seal.open_value(taken)).transpose()?;
        let first = first_answer(session, delivery_id, taken.as_ref(), resolution, &delivery.status)?;
        return first.ok_or_else(|| {
            refused(session, format!("delivery {delivery_id} is {}, not uncertain", delivery.status))
        });
    }
    let status = match resolution {
        Resolution::LetModelDecide => {
            let reason = format!(
                "the model cannot decide about delivery {delivery_id}: say whether it happened, or did not"
            );
            return Err(refused(session, reason));
        }
        Resolution::Approved | Resolution::Declined => {
            return Err(refused(
                session,
                format!("delivery {delivery_id} is no call, so nothing of it waits for approval"),
            ));
        }
        Resolution::Happened { .. } => "sent",
        Resolution::DidNotHappen if delivery.sender_until.is_some() => {
            return Err(may_live(session, delivery_id, delivery.sender_until));
        }
        Resolution::DidNotHappen if delivery.late => "expired",
        Resolution::DidNotHappen => "queued",
    };
    let dedupe = format!("resolved/{delivery_id}/{}.{}", delivery.resent, delivery.attempt);
    let events = [event(delivery_id, decision)];
    append_events(tx, &session.session_id, None, Some(&dedupe), Wakes::Nothing, &events).await?;
    if status == "sent" {
        let sent = Event::GenSent { delivery_id: delivery_id.to_owned(), channel: delivery.channel.clone() };
        let dedupe = format!("sent/{delivery_id}");
        append_events(tx, &session.session_id, None, Some(&dedupe), Wakes::Nothing, &[sent]).await?;
    }
    if status == "queued" {
        let trace_context = decision.trace_context.as_deref();
        enqueue(tx, &session.space_id, &session.conversation_id, &delivery.channel, trace_context).await?;
    }
    sqlx::query!(
        "update deliveries
        set status = $2,
            resolution = $3,
            last_error = case when $2 = 'sent' then null else last_error end,
            untold = case when $2 = 'sent' then undelivered <> '[]' and untold or told_unsent else untold end,
            tried_since = null,
            settled_at = case when $2 = 'queued' then null else clock_timestamp() end
        where delivery_id = $1",
        delivery_id,
        status,
        seal.with_reasons(to_store(decision, None, false))
    )
    .execute(&mut *tx)
    .await?;
    Ok(answer(session, delivery_id, resolution, status, None, false))
}

/// Returns the earlier answer if the effect was resolved with the same decision. `None`: it was not resolved, or the
/// earlier decision left it open.
fn first_answer(
    session: &Locked,
    effect: &str,
    taken: Option<&Value>,
    resolution: &Resolution,
    status: &str,
) -> Result<Option<Resolved>> {
    let Some(taken) = taken else { return Ok(None) };
    if *taken == merged(resolution, taken) {
        let run_id = taken["run_id"].as_str().map(str::to_owned);
        return Ok(Some(answer(session, effect, resolution, status, run_id, true)));
    }
    // The earlier answer left the question open, so a later decision may still close it.
    if taken["outcome"] == Resolution::LetModelDecide.as_str() && status == "uncertain" {
        return Ok(None);
    }
    let by = taken["by"].as_str().map(|by| format!(" by {by}")).unwrap_or_default();
    let word = taken["outcome"].as_str().unwrap_or("something else");
    Err(refused(session, format!("{effect} was resolved before{by}, as {word}; that decision is final")))
}

/// Returns `taken` with this resolution in it. It equals `taken` if the resolution is the same.
fn merged(resolution: &Resolution, taken: &Value) -> Value {
    let mut merged = taken.clone();
    let result = match resolution {
        Resolution::Happened { result } => json!(result),
        Resolution::DidNotHappen
        | Resolution::LetModelDecide
        | Resolution::Approved
        | Resolution::Declined => Value::Null,
    };
    merged["outcome"] = json!(resolution.as_str());
    merged["result"] = result;
    merged
}

/// `told`: the model had been told that the outcome is unknown.
fn to_store(decision: &Decision, run_id: Option<&str>, told: bool) -> Value {
    let about = json!({"by": decision.by, "reason": decision.reason, "run_id": run_id, "told": told});
    merged(&decision.resolution, &about)
}

fn event(effect: &str, decision: &Decision) -> Event {
    Event::EffectResolved {
        effect: effect.to_owned(),
        resolution: decision.resolution.as_str().to_owned(),
        by: decision.by.clone(),
        reason: decision.reason.clone(),
    }
}

fn answer(
    session: &Locked,
    effect: &str,
    resolution: &Resolution,
    status: &str,
    run_id: Option<String>,
    duplicate: bool,
) -> Resolved {
    Resolved {
        session_id: session.session_id.clone(),
        effect: effect.to_owned(),
        resolution: resolution.as_str().to_owned(),
        status: status.to_owned(),
        run_id,
        told_run_id: None,
        model_believes_unknown: false,
        duplicate,
    }
}

/// A process that was suspended between its last check and the effect could still perform it.
fn may_live(session: &Locked, effect: &str, until: Option<DateTime<Utc>>) -> Error {
    let until = until.map(|until| until.to_rfc3339_opts(chrono::SecondsFormat::Millis, true));
    refused(
        session,
        format!(
            "the process that began {effect} may still carry it out until {}: only then can it be said that it did \
             not happen",
            until.unwrap_or_default()
        ),
    )
}

fn refused(session: &Locked, reason: String) -> Error {
    Error::Refused { session_id: session.session_id.clone(), reason }
}
