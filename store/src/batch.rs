//! Batches: retry, cancel, archive or wake many sessions, or resolve many uncertain effects, as one durable object.
//!
//! | to | read |
//! |---|---|
//! | choose the members, and make a batch | `create` |
//! | say what a batch would do | `preview` |
//! | act on the next members, each once | `act` |
//! | choose effects, and what is said of each | `resolve` |
//! | see how retried members end, and stop when the failure comes back | `watch` |
//! | try members dry before anything is retried | `prove` |
//!
//! A worker that has a moment takes the batch that is due: one update of its row moves `next_at` on, so several workers together keep
//! the rate. The outcome of a member commits with the act on its session, so a kill leaves both or none. The member's row is locked
//! last, after schedule, conversation, session and job.

mod act;
mod create;
mod preview;
mod prove;
mod resolve;
mod watch;

pub use create::{Chosen, NewBatch};
pub use preview::Preview;
pub use resolve::{BulkDecision, EffectsPreview};

use crate::audit::act::{Act, because, current, does};
use crate::{Error, Result, Store};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::PgConnection;

/// The space of a batch of the whole installation.
pub const EVERYWHERE: &str = "*";

/// The most members of a batch.
pub const MEMBERS: i64 = 100_000;

/// The statuses of a batch.
pub const STATUSES: [&str; 5] = ["proving", "running", "paused", "done", "cancelled"];

/// What became of a member.
pub const OUTCOMES: [&str; 3] = ["pending", "acted", "refused"];

/// How the run of a retried member ended.
pub const RESULTS: [&str; 3] = ["passed", "failed_again", "cancelled"];

/// The share of a stage's members that may fail again, if nothing else is said.
pub const STOP_SHARE: f64 = 0.2;

/// What a batch does with its members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Verb {
    /// Continues failed runs, and those that need attention.
    Retry,
    /// Ends open runs.
    Cancel,
    /// Takes sessions that rest out of use.
    Archive,
    /// Heals sessions whose runs are open.
    Wake,
    /// Says how uncertain effects ended. Its members are effects.
    Resolve,
}

impl Verb {
    /// The word that is stored and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Verb::Retry => "retry",
            Verb::Cancel => "cancel",
            Verb::Archive => "archive",
            Verb::Wake => "wake",
            Verb::Resolve => "resolve",
        }
    }

    /// Reads the stored word.
    pub fn parse(word: &str) -> Option<Verb> {
        [Verb::Retry, Verb::Cancel, Verb::Archive, Verb::Wake, Verb::Resolve]
            .into_iter()
            .find(|verb| verb.as_str() == word)
    }

    /// The statuses of the sessions that it takes; of a resolve, those of the effects. A cancelled run is never retried.
    pub fn takes(self) -> &'static [&'static str] {
        match self {
            Verb::Retry => &["failed", "needs_attention"],
            Verb::Cancel => &["queued", "running", "waiting_input", "needs_attention"],
            Verb::Archive => &["created", "completed", "failed", "cancelled"],
            Verb::Wake => &["queued", "running"],
            Verb::Resolve => &["uncertain"],
        }
    }
}

/// How many members are where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Counts {
    pub pending: i64,
    pub acted: i64,
    pub refused: i64,
    /// Of a retry's acted members: ended well.
    pub passed: i64,
    pub failed_again: i64,
    /// Still at work.
    pub open: i64,
}

/// What trying members dry has found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Proof {
    pub asked: i64,
    pub passed: i64,
    pub failed: i64,
    pub pending: i64,
    /// One sentence.
    pub text: String,
    pub errors: Vec<ProofError>,
}

/// An error that dry tries ended with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ProofError {
    pub text: String,
    pub count: i64,
    /// It is the error that these sessions had failed with.
    pub same: bool,
}

/// A batch for display.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Batch {
    pub batch_id: String,
    /// `*`: of the whole installation.
    pub space_id: String,
    #[cfg_attr(feature = "schema", schemars(with = "Verb"))]
    pub verb: String,
    pub reason: Option<String>,
    pub filter: Value,
    /// Of a resolve: what is said of each effect.
    pub decision: Option<BulkDecision>,
    #[cfg_attr(feature = "schema", schemars(extend("enum" = STATUSES)))]
    pub status: String,
    pub status_reason: Option<String>,
    pub rate: f64,
    pub stages: Vec<i32>,
    pub stage: i32,
    pub stop_share: Option<f64>,
    pub model: Option<String>,
    pub proof: Option<Proof>,
    pub by: String,
    pub created_at: DateTime<Utc>,
    pub started_at: Option<DateTime<Utc>>,
    pub ended_at: Option<DateTime<Utc>>,
    pub members: i32,
    pub counts: Counts,
}

/// A member for display.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Member {
    pub ordinal: i32,
    pub session_id: String,
    /// Of a resolve: `call` or `delivery`, and its id.
    pub effect_kind: Option<String>,
    pub effect_id: Option<String>,
    pub stage: i32,
    #[cfg_attr(feature = "schema", schemars(extend("enum" = OUTCOMES)))]
    pub outcome: String,
    pub detail: Option<String>,
    pub acted_at: Option<DateTime<Utc>>,
    /// `passed`, `failed_again` or `cancelled`, once a retried member has ended.
    pub result: Option<String>,
    pub result_at: Option<DateTime<Utc>>,
}

/// What a person does to a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steer {
    Pause,
    Resume,
    Cancel,
}

impl Steer {
    /// The verb, as the audit has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Steer::Pause => "batch.pause",
            Steer::Resume => "batch.resume",
            Steer::Cancel => "batch.cancel",
        }
    }

    /// From which statuses, and to which one.
    fn moves(self) -> (&'static [&'static str], &'static str) {
        match self {
            Steer::Pause => (&["running", "proving"], "paused"),
            Steer::Resume => (&["paused"], "running"),
            Steer::Cancel => (&["running", "proving", "paused"], "cancelled"),
        }
    }
}

impl Store {
    /// Batches, newest first. `space_id`: none for all.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Database`].
    pub async fn batches(
        &self,
        space_id: Option<&str>,
        status: Option<&str>,
        before: Option<&str>,
        limit: i64,
    ) -> Result<Vec<Batch>> {
        self.read_batches(space_id, None, status, before, limit).await
    }

    /// One batch.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Corrupt`], [`Error::Database`].
    pub async fn batch(&self, space_id: Option<&str>, batch_id: &str) -> Result<Batch> {
        let found = self.read_batches(space_id, Some(batch_id), None, None, 1).await?.pop();
        found.ok_or_else(|| Error::NotFound { what: "batch", id: batch_id.to_owned() })
    }

    async fn read_batches(
        &self,
        space_id: Option<&str>,
        batch_id: Option<&str>,
        status: Option<&str>,
        before: Option<&str>,
        limit: i64,
    ) -> Result<Vec<Batch>> {
        let mut tx = self.pool.planned().await?;
        let rows = sqlx::query!(
            // The counts of a batch that has ended are in its row, so a list of old batches counts nothing.
            r#"select b.*, coalesce(b.ended_counts, m.counts) as "counts!"
            from (
                select * from batches
                where ($1::text is null or space_id = $1)
                    and ($2::text is null or batch_id = $2)
                    and ($3::text is null or status = $3)
                    and ($4::text is null or batch_id < $4)
                order by batch_id desc
                limit $5
            ) b
            left join lateral (
                select count_batch(b.batch_id) as counts where b.ended_counts is null
            ) m on true
            order by b.batch_id desc"#,
            space_id,
            batch_id,
            status,
            before,
            limit
        )
        .fetch_all(&mut *tx)
        .await?;
        tx.rollback().await?;
        rows.into_iter()
            .map(|row| {
                let proof = row.proof.map(serde_json::from_value).transpose();
                let decision = row.decision.map(serde_json::from_value).transpose();
                Ok(Batch {
                    batch_id: row.batch_id,
                    space_id: row.space_id,
                    verb: row.verb,
                    reason: row.reason,
                    filter: row.filter,
                    decision: decision.map_err(|error| Error::corrupt("decision of a batch", error))?,
                    status: row.status,
                    status_reason: row.status_reason,
                    rate: row.rate,
                    stages: row.stages,
                    stage: row.stage,
                    stop_share: row.stop_share,
                    model: row.model,
                    proof: proof.map_err(|error| Error::corrupt("proof", error))?,
                    by: row.actor,
                    created_at: row.created_at,
                    started_at: row.started_at,
                    ended_at: row.ended_at,
                    members: row.members,
                    counts: serde_json::from_value(row.counts)
                        .map_err(|error| Error::corrupt("counts of a batch", error))?,
                })
            })
            .collect()
    }

    /// Members of a batch, in their order. `space_id`: none for all.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn batch_members(
        &self,
        space_id: Option<&str>,
        batch_id: &str,
        outcome: Option<&str>,
        result: Option<&str>,
        after: Option<i32>,
        limit: i64,
    ) -> Result<Vec<Member>> {
        let mut tx = self.pool.planned().await?;
        let found = sqlx::query_as!(
            Member,
            "select ordinal, session_id, effect_kind, effect_id, stage, outcome, detail, acted_at, result, result_at
            from batch_members
            where batch_id = $1
                and ($2::text is null or outcome = $2)
                and ($3::text is null or result = $3)
                and ($4::integer is null or ordinal > $4)
                and ($6::text is null or space_id = $6)
            order by ordinal
            limit $5",
            batch_id,
            outcome,
            result,
            after,
            limit,
            space_id
        )
        .fetch_all(&mut *tx)
        .await?;
        tx.rollback().await?;
        Ok(found)
    }

    /// Pauses, resumes or cancels a batch. Members that are in hand now may still be acted on. Doing it twice changes nothing. From
    /// a resume on, the batch acts in the name of the person who resumed it.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Batch`] if its status does not allow it, [`Error::Database`].
    pub async fn steer_batch(
        &self,
        space_id: Option<&str>,
        batch_id: &str,
        steer: Steer,
        reason: Option<&str>,
    ) -> Result<Batch> {
        does(steer.as_str());
        because(reason);
        let (from, to) = steer.moves();
        let from: Vec<String> = from.iter().map(|&status| status.to_owned()).collect();
        let act = current();
        let by = act.clone().unwrap_or_default();
        let mut tx = self.pool.begin().await?;
        let moved = sqlx::query!(
            "update batches
            set status = case
                    -- A batch that was paused while it tried its members dry goes on with that.
                    when $4 = 'running' and exists (
                        select from batch_proofs p where p.batch_id = batches.batch_id and p.result is null
                    ) then 'proving'
                    else $4
                end,
                status_reason = $5,
                next_at = clock_timestamp(),
                resumed_at = case when $4 = 'running' then clock_timestamp() else resumed_at end,
                ended_at = case when $4 = 'cancelled' then clock_timestamp() end,
                actor_kind = case when $6 then $7 else actor_kind end,
                actor = case when $6 then $8 else actor end,
                token_id = case when $6 then $9 else token_id end,
                user_id = case when $6 then $10 else user_id end,
                address = case when $6 then $11 else address end
            where batch_id = $1 and ($2::text is null or space_id = $2) and status = any ($3)",
            batch_id,
            space_id,
            &from,
            to,
            reason,
            steer == Steer::Resume && act.is_some(),
            by.actor_kind,
            by.actor,
            by.token_id,
            by.user_id,
            by.address
        );
        let moved = moved.execute(&mut *tx).await?.rows_affected();
        if moved == 1 {
            if to == "cancelled" {
                // By now no member is acted on any more.
                write_counts(&mut tx, batch_id).await?;
            }
            tx.commit().await?;
            if to == "cancelled" {
                self.cancel_copies(batch_id).await?;
            }
            return self.batch(space_id, batch_id).await;
        }
        tx.rollback().await?;
        let batch = self.batch(space_id, batch_id).await?;
        if batch.status == to || (to == "running" && batch.status == "proving") {
            if to == "cancelled" {
                // A process that died after its cancel has left them.
                self.cancel_copies(batch_id).await?;
            }
            return Ok(batch);
        }
        let verb = steer.as_str().trim_start_matches("batch.");
        let reason = format!("it is {}, and one that is {} can be {verb}d", batch.status, from.join(" or "));
        Err(Error::Batch { batch_id: batch_id.to_owned(), reason: reason.replace("canceld", "cancelled") })
    }
}

impl Store {
    /// Ends the dry tries of a batch that is cancelled, so that they ask no model any more.
    async fn cancel_copies(&self, batch_id: &str) -> Result<()> {
        let copies = sqlx::query_scalar!(
            r#"select copy_session_id as "id!" from batch_proofs
            where batch_id = $1 and result is null and copy_session_id is not null"#,
            batch_id
        )
        .fetch_all(&self.pool)
        .await?;
        for copy in copies {
            match self.cancel(&copy, Some("its batch was cancelled")).await {
                // It ended a moment ago.
                Ok(_) | Err(Error::Conflict { .. } | Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Writes the counts of a batch that has ended into its row. It is a statement of its own, so that it sees the commits for which
/// the statement before it has waited.
async fn write_counts(tx: &mut PgConnection, batch_id: &str) -> Result<()> {
    sqlx::query!("update batches set ended_counts = count_batch(batch_id) where batch_id = $1", batch_id)
        .execute(tx)
        .await?;
    Ok(())
}

/// The act of a batch on one of its members: the person's who made or resumed it.
fn act_of(verb: Verb, session_id: &str, row: &act::Claimed) -> Act {
    Act {
        actor_kind: kind_of(&row.actor_kind),
        actor: row.actor.clone(),
        token_id: row.token_id.clone(),
        user_id: row.user_id.clone(),
        verb: format!("session.{}", verb.as_str()),
        target: Some(session_id.to_owned()),
        space_id: (row.space_id != EVERYWHERE).then(|| row.space_id.clone()),
        reason: None,
        address: row.address.clone(),
    }
}

/// The kind of an actor, from the stored word.
fn kind_of(word: &str) -> &'static str {
    ["token", "configuration", "machine", "user", "cli"]
        .into_iter()
        .find(|kind| *kind == word)
        .unwrap_or("cli")
}
