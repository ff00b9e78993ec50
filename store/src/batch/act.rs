//! Acts on the next members of a batch.

use super::{Verb, act_of, prove, watch};
use crate::audit::act::acting;
use crate::error::Outage;
use crate::fork::Model;
use crate::pool::Transaction;
use crate::wake::By;
use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use serde_json::Value;
use std::time::Duration;
use tracing::warn;

/// For how long one worker's turn lasts: a turn acts on as many members as the rate has in this time.
const TURN: Duration = Duration::from_millis(500);

/// How long a batch rests while it only waits for runs to end.
const REST: Duration = Duration::from_secs(1);

/// How long a member rests if its key cannot be had. The others go on meanwhile.
const WITHOUT_KEY: Duration = Duration::from_secs(5);

/// The longest turn: that of the lowest rate.
const LONGEST: Duration = Duration::from_secs(1000);

/// Why a batch waits if its maker may not act any more.
const NOT_IN_FORCE: &str = "the token that made it is no longer in force";

/// A batch in the hands of one worker, for one turn.
#[derive(Clone, Debug)]
pub(super) struct Claimed {
    pub batch_id: String,
    pub space_id: String,
    pub verb: String,
    pub reason: Option<String>,
    pub decision: Option<Value>,
    pub status: String,
    pub rate: f64,
    pub stages: Vec<i32>,
    pub stage: i32,
    pub stop_share: Option<f64>,
    pub model: Option<String>,
    pub model_context_window: Option<i32>,
    pub resumed_at: Option<DateTime<Utc>>,
    pub actor_kind: String,
    pub actor: String,
    pub token_id: Option<String>,
    pub user_id: Option<String>,
    pub address: Option<String>,
}

/// What a turn did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// The batch. `None`: none was due.
    pub batch_id: Option<String>,
    /// The sessions that it acted on, or copies of them. They have new work.
    pub sessions: Vec<String>,
}

pub(super) struct Next {
    ordinal: i32,
    pub session_id: String,
    pub effect_kind: Option<String>,
    pub effect_id: Option<String>,
}

impl Claimed {
    /// How many members a turn acts on, and how long it is.
    fn turn(&self) -> (i64, Duration) {
        let many = (self.rate * TURN.as_secs_f64()).floor().max(1.0);
        let lasts = Duration::try_from_secs_f64(many / self.rate).unwrap_or(LONGEST);
        (many as i64, lasts.min(LONGEST))
    }

    pub(super) fn model(&self) -> Option<Model> {
        let context_window = self.model_context_window.unwrap_or_default();
        self.model.clone().map(|id| Model { id, context_window })
    }
}

/// Whether an error is the whole database's, so that the next member would meet it too.
fn is_of_all(error: &Error) -> bool {
    match error.outage() {
        Some(Outage::Away | Outage::Crowded | Outage::ReadOnly | Outage::DiskFull | Outage::Ailing) => true,
        Some(Outage::Contended | Outage::Locked | Outage::KeysAway | Outage::Blobs) | None => false,
    }
}

impl Store {
    /// Takes a batch that is due, and acts on its next members.
    ///
    /// # Errors
    /// [`Error::Database`]. Members that were acted on stay so; the others follow in another turn.
    pub async fn work_on_batch(&self) -> Result<Turn> {
        let Some(batch) = self.claim_batch().await? else { return Ok(Turn::default()) };
        if !self.goes_on(&batch).await? {
            return Ok(Turn { batch_id: Some(batch.batch_id), sessions: Vec::new() });
        }
        let (many, lasts) = batch.turn();
        let (sessions, rests) = if batch.status == "proving" {
            prove::turn(self, &batch, many).await?
        } else {
            let next = watch::look(self, &batch).await?;
            let members = match next {
                watch::Next::Act { stage } => self.next_members(&batch.batch_id, stage, many).await?,
                watch::Next::Wait | watch::Next::Over => Vec::new(),
            };
            let mut sessions = Vec::new();
            for member in &members {
                sessions.extend(self.act_on(&batch, member).await?);
            }
            // Without a member to act on, it waits for runs to end, or for keys.
            (sessions, members.is_empty())
        };
        let lasts = if rests { lasts.max(REST) } else { lasts };
        sqlx::query!(
            "update batches set next_at = clock_timestamp() + make_interval(secs => $2)
            where batch_id = $1 and status in ('running', 'proving')",
            batch.batch_id,
            lasts.as_secs_f64()
        )
        .execute(&self.pool)
        .await?;
        Ok(Turn { batch_id: Some(batch.batch_id), sessions })
    }

    /// Takes the batch whose turn it is. If this worker dies, another one takes it two seconds later; nothing is lost, because each
    /// member's outcome commits by itself.
    async fn claim_batch(&self) -> Result<Option<Claimed>> {
        Ok(sqlx::query_as!(
            Claimed,
            "update batches
            set next_at = clock_timestamp() + interval '2 s', started_at = coalesce(started_at, clock_timestamp())
            where batch_id = (
                    select batch_id from batches
                    where status in ('running', 'proving') and next_at <= clock_timestamp()
                    order by next_at limit 1
                    for update skip locked
                )
                and status in ('running', 'proving') and next_at <= clock_timestamp()
            returning batch_id, space_id, verb, reason, decision, status, rate, stages, stage, stop_share, model, model_context_window,
                resumed_at, actor_kind, actor, token_id, user_id, address"
        )
        .fetch_optional(&self.pool)
        .await?)
    }

    /// Whether its maker may still act. If the maker's token is not in force any more, the batch is paused, until somebody resumes
    /// it in a name of their own.
    async fn goes_on(&self, batch: &Claimed) -> Result<bool> {
        let Some(token_id) = &batch.token_id else { return Ok(true) };
        if !self.tokens_in_force(std::slice::from_ref(token_id)).await?.is_empty() {
            return Ok(true);
        }
        sqlx::query!(
            "update batches set status = 'paused', status_reason = $3
            where batch_id = $1 and token_id = $2 and status in ('running', 'proving')",
            batch.batch_id,
            token_id,
            NOT_IN_FORCE
        )
        .execute(&self.pool)
        .await?;
        Ok(false)
    }

    async fn next_members(&self, batch_id: &str, stage: i32, many: i64) -> Result<Vec<Next>> {
        Ok(sqlx::query_as!(
            Next,
            "select ordinal, session_id, effect_kind, effect_id from batch_members
            where batch_id = $1 and outcome = 'pending' and stage <= $2
                and (tried_at is null or tried_at < clock_timestamp() - make_interval(secs => $4))
            order by ordinal
            limit $3",
            batch_id,
            stage,
            many,
            WITHOUT_KEY.as_secs_f64()
        )
        .fetch_all(&self.pool)
        .await?)
    }

    /// Acts on one member, as the person who made or resumed the batch. Returns its session if it has work now.
    async fn act_on(&self, batch: &Claimed, member: &Next) -> Result<Option<String>> {
        let Some(verb) = Verb::parse(&batch.verb) else {
            return Err(Error::corrupt("batch verb", &batch.verb));
        };
        let act = act_of(verb, &member.session_id, batch);
        let (done, _, _) = acting(act, self.act_and_note(batch, verb, member)).await;
        done
    }

    async fn act_and_note(&self, batch: &Claimed, verb: Verb, member: &Next) -> Result<Option<String>> {
        let id = &member.session_id;
        let reason = batch.reason.as_deref().map_or_else(String::new, |reason| format!("{reason} "));
        let reason = format!("{reason}({})", batch.batch_id);
        let done: Result<(Transaction, Option<String>)> = match verb {
            Verb::Retry => {
                self.retried(id, Some(&reason), By::Anyone).await.map(|(tx, run_id)| (tx, Some(run_id)))
            }
            Verb::Cancel => self.cancelled(id, Some(&reason)).await.map(|(tx, run_id)| (tx, Some(run_id))),
            Verb::Archive => self.archived(id, Some(&reason)).await.map(|tx| (tx, None)),
            Verb::Wake => self.woken(id).await.map(|(tx, _)| (tx, None)),
            Verb::Resolve => self.resolved_once(batch, member, &reason).await,
        };
        let (mut tx, run_id) = match done {
            Ok(done) => done,
            Err(
                error @ (Error::Conflict { .. }
                | Error::Refused { .. }
                | Error::NotFound { .. }
                | Error::InboxFull { .. }
                | Error::Corrupt { .. }),
            ) => {
                self.refuse(batch, member, &error.to_string()).await?;
                return Ok(None);
            }
            Err(error @ Error::Keys { .. }) => {
                if self.key_is_lost(id).await? {
                    self.refuse(batch, member, &error.to_string()).await?;
                } else {
                    self.pass_over(batch, member, &error).await?;
                }
                return Ok(None);
            }
            Err(error) if is_of_all(&error) => return Err(error),
            // What is wrong with one session keeps no other from its turn.
            Err(error) => {
                self.pass_over(batch, member, &error).await?;
                return Ok(None);
            }
        };
        // Locked last, the batch's row before it. If another worker has acted on it, or the batch rests now, this act is undone. A
        // cancel waits for this commit.
        let noted = sqlx::query!(
            "with batch as (
                select from batches where batch_id = $1 and status = 'running' for share
            )
            update batch_members set outcome = 'acted', run_id = $3, acted_at = clock_timestamp(), detail = null
            where batch_id = $1 and ordinal = $2 and outcome = 'pending' and exists (select from batch)",
            batch.batch_id,
            member.ordinal,
            run_id
        );
        if noted.execute(&mut *tx).await?.rows_affected() == 0 {
            tx.rollback().await?;
            return Ok(None);
        }
        crate::failpoint!("B1");
        tx.commit().await?;
        crate::failpoint!("B2");
        Ok(Some(id.clone()))
    }

    /// Notes that a member cannot be acted on any more. No act of anybody: nothing happened to the session.
    async fn refuse(&self, batch: &Claimed, member: &Next, detail: &str) -> Result<()> {
        sqlx::query!(
            "with batch as (
                select from batches where batch_id = $1 and status = 'running' for share
            )
            update batch_members set outcome = 'refused', detail = $3, acted_at = clock_timestamp()
            where batch_id = $1 and ordinal = $2 and outcome = 'pending' and exists (select from batch)",
            batch.batch_id,
            member.ordinal,
            detail
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Notes why a member cannot be acted on now. The others go on, and it is tried again.
    async fn pass_over(&self, batch: &Claimed, member: &Next, why: &Error) -> Result<()> {
        warn!(error = %why, session.id = member.session_id, "A member of a batch cannot be acted on now; trying again");
        sqlx::query!(
            "update batch_members set tried_at = clock_timestamp(), detail = $3
            where batch_id = $1 and ordinal = $2 and outcome = 'pending'",
            batch.batch_id,
            member.ordinal,
            why.to_string()
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(rate: f64) -> (i64, Duration) {
        let batch = Claimed {
            batch_id: String::new(),
            space_id: String::new(),
            verb: "wake".to_owned(),
            reason: None,
            decision: None,
            status: "running".to_owned(),
            rate,
            stages: Vec::new(),
            stage: 0,
            stop_share: None,
            model: None,
            model_context_window: None,
            resumed_at: None,
            actor_kind: String::new(),
            actor: String::new(),
            token_id: None,
            user_id: None,
            address: None,
        };
        batch.turn()
    }

    #[test]
    fn a_turn_is_as_long_as_its_members_take_and_no_rate_is_too_slow() {
        assert_eq!(at(20.0), (10, Duration::from_millis(500)));
        assert_eq!(at(0.5), (1, Duration::from_secs(2)));
        for slow in [0.001, 1e-13, 5e-21, f64::MIN_POSITIVE, 0.0, -1.0, f64::NAN] {
            assert_eq!(at(slow), (1, LONGEST), "{slow}");
        }
    }
}
