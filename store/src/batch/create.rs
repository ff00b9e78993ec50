//! Chooses the members of a batch and makes it.

use super::{Batch, BulkDecision, EVERYWHERE, MEMBERS, STOP_SHARE, Verb};
use crate::audit::act;
use crate::effect::{EffectFilter, EffectKind, EffectName};
use crate::fork::Model;
use crate::session::SessionFilter;
use crate::{Error, Result, Store, new_id};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashSet};

/// Which sessions a batch is about, or which uncertain effects.
#[derive(Clone, Debug)]
pub enum Chosen {
    Filter(Box<SessionFilter>),
    /// Named one by one. The filter says which of them the caller reaches.
    Sessions {
        ids: Vec<String>,
        within: Box<SessionFilter>,
    },
    Effects(Box<EffectFilter>),
    /// Named one by one. The filter says which of them the caller reaches.
    NamedEffects {
        names: Vec<EffectName>,
        within: Box<EffectFilter>,
    },
}

/// A batch to make.
#[derive(Clone, Debug)]
pub struct NewBatch {
    /// `None`: of the whole installation.
    pub space_id: Option<String>,
    pub verb: Verb,
    pub chosen: Chosen,
    /// What was asked for, to be shown.
    pub filter: Value,
    /// Of a resolve: what is said of each effect.
    pub decision: Option<BulkDecision>,
    pub reason: Option<String>,
    /// Members a second.
    pub rate: f64,
    /// How many members are tried dry before.
    pub prove: i32,
    /// Of the dry tries. `None`: the model that a retry would ask.
    pub model: Option<Model>,
    /// The numbers of members of the first stages.
    pub canary: Vec<i32>,
    pub stop_share: Option<f64>,
    pub client_key: Option<String>,
}

/// The sessions or effects that were chosen, by whether the verb takes them.
pub(super) struct Found {
    /// Oldest first.
    pub members: Vec<Candidate>,
    pub by_status: BTreeMap<String, i64>,
    pub skipped: BTreeMap<String, i64>,
}

/// A member that is to be.
pub(super) struct Candidate {
    pub session_id: String,
    space_id: String,
    /// Of a resolve.
    effect: Option<(EffectKind, String)>,
}

/// The columns of a session `s` by which a verb decides whether it takes the session.
pub(super) const STANDING: &str = "s.session_id, s.space_id, s.status, s.runner = '' as idle,
    s.error is not distinct from 'cancelled' as cancelled";

/// A session as a verb looks at it.
#[derive(sqlx::FromRow)]
struct Standing {
    session_id: String,
    space_id: String,
    status: String,
    /// No other engine runs it.
    idle: bool,
    cancelled: bool,
}

impl Store {
    /// Makes a batch. `true`: the same key made it before, and nothing is written.
    ///
    /// # Errors
    /// [`Error::Batch`] if there is no member, or too many; [`Error::KeyReused`]; [`Error::Database`].
    pub async fn create_batch(&self, new: &NewBatch) -> Result<(Batch, bool)> {
        act::does("batch.create");
        act::because(new.reason.as_deref());
        let space_id = new.space_id.as_deref().unwrap_or(EVERYWHERE);
        let sha256 = new.sha256();
        if let Some(first) = self.first_batch(space_id, new, &sha256).await? {
            return Ok((first, true));
        }
        let found = self.choose(new).await?;
        let members = found.members.len();
        if members == 0 {
            let skipped = found.skipped.iter().map(|(status, count)| format!("{count} {status}"));
            let skipped = skipped.collect::<Vec<_>>().join(", ");
            let found = if skipped.is_empty() { String::new() } else { format!(" (found: {skipped})") };
            let takes = new.verb.takes().join(", ");
            let (what, verb) = (new.what(), new.verb.as_str());
            return Err(new.refused(format!("there is no {what} to {verb}: it takes {takes}{found}")));
        }
        let batch_id = new_id("batch");
        let act = act::current().unwrap_or_default();
        let spaces: Vec<String> = found.members.iter().map(|member| member.space_id.clone()).collect();
        let kinds: Vec<Option<String>> = found
            .members
            .iter()
            .map(|member| member.effect.as_ref().map(|(kind, _)| kind.as_str().to_owned()))
            .collect();
        let (ids, effects): (Vec<String>, Vec<Option<String>>) = found
            .members
            .into_iter()
            .map(|member| (member.session_id, member.effect.map(|(_, id)| id)))
            .unzip();
        // A batch over sessions of one space is that space's, so its operators see it.
        let of_one = spaces.first().filter(|first| spaces.iter().all(|space| space == *first));
        let space_id = new.space_id.as_ref().or(of_one).map_or(EVERYWHERE, String::as_str);
        let stages: Vec<i32> = (0..members).map(|at| stage_of(at, &new.canary)).collect();
        let proofs = spread(members, usize::try_from(new.prove).unwrap_or(0));
        let is_canary = new.verb == Verb::Retry && !new.canary.is_empty();
        let mut tx = self.pool.begin().await?;
        let made = sqlx::query!(
            "insert into batches (batch_id, space_id, verb, reason, filter, status, rate, stages, stop_share, prove, model,
                model_context_window, actor_kind, actor, token_id, user_id, address, client_key, request_sha256, members, decision)
            values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21)
            on conflict (space_id, client_key) do nothing",
            batch_id,
            space_id,
            new.verb.as_str(),
            new.reason,
            new.filter,
            if proofs.is_empty() { "running" } else { "proving" },
            new.rate,
            &new.canary,
            new.stop_share.or(is_canary.then_some(STOP_SHARE)),
            proofs.len() as i32,
            new.model.as_ref().map(|model| &model.id),
            new.model.as_ref().map(|model| model.context_window),
            if act.actor_kind.is_empty() { "cli" } else { act.actor_kind },
            act.actor,
            act.token_id,
            act.user_id,
            act.address,
            new.client_key,
            sha256,
            members as i32,
            new.decision.as_ref().map(|decision| serde_json::json!(decision))
        );
        if made.execute(&mut *tx).await?.rows_affected() == 0 {
            // The same request came at the same time.
            tx.rollback().await?;
            let first = self.first_batch(space_id, new, &sha256).await?;
            return first.map(|first| (first, true)).ok_or_else(|| new.refused("it was made and is gone"));
        }
        sqlx::query!(
            "insert into batch_members (batch_id, ordinal, session_id, space_id, stage, effect_kind, effect_id)
            select $1, m.ordinal, m.session_id, m.space_id, m.stage, m.effect_kind, m.effect_id
            from unnest($2::text[], $3::text[], $4::integer[], $5::text[], $6::text[]) with ordinality
                as m (session_id, space_id, stage, effect_kind, effect_id, ordinal)",
            batch_id,
            &ids,
            &spaces,
            &stages,
            &kinds as &[Option<String>],
            &effects as &[Option<String>]
        )
        .execute(&mut *tx)
        .await?;
        sqlx::query!(
            "insert into batch_proofs (batch_id, ordinal, session_id, space_id)
            select batch_id, ordinal, session_id, space_id from batch_members
            where batch_id = $1 and ordinal = any ($2)",
            batch_id,
            &proofs
        )
        .execute(&mut *tx)
        .await?;
        act::on(&batch_id);
        tx.commit().await?;
        Ok((self.batch(None, &batch_id).await?, false))
    }

    async fn first_batch(&self, space_id: &str, new: &NewBatch, sha256: &str) -> Result<Option<Batch>> {
        let Some(client_key) = &new.client_key else { return Ok(None) };
        let first = sqlx::query!(
            "select batch_id, request_sha256 from batches where space_id = $1 and client_key = $2",
            space_id,
            client_key
        );
        match first.fetch_optional(&self.pool).await? {
            Some(first) if first.request_sha256 == sha256 => {
                Ok(Some(self.batch(None, &first.batch_id).await?))
            }
            Some(_) => Err(Error::KeyReused { client_key: client_key.clone() }),
            None => Ok(None),
        }
    }

    pub(super) async fn choose(&self, new: &NewBatch) -> Result<Found> {
        if new.verb == Verb::Resolve {
            let found = self.choose_effects(new).await?;
            let members = found.members.into_iter().map(|effect| {
                let kind = if effect.is_call { EffectKind::Call } else { EffectKind::Delivery };
                let (session_id, space_id) = (effect.session_id, effect.space_id);
                Candidate { session_id, space_id, effect: Some((kind, effect.effect_id)) }
            });
            let members = members.collect();
            return Ok(Found { members, by_status: BTreeMap::new(), skipped: found.skipped });
        }
        let rows = match &new.chosen {
            Chosen::Filter(filter) => {
                // One more than may be, so that too many are noticed and not left out.
                let mut rows = self.find::<Standing>(STANDING, &all_of(filter)).await?;
                new.is_not_too_large(rows.len() as i64)?;
                rows.sort_unstable_by(|a, b| a.session_id.cmp(&b.session_id));
                rows
            }
            Chosen::Sessions { ids, within } => {
                let mut ids = ids.clone();
                ids.sort_unstable();
                ids.dedup();
                if ids.len() as i64 > MEMBERS {
                    return Err(new.refused(format!("a batch has at most {MEMBERS} sessions")));
                }
                self.reached(&ids, within).await?
            }
            // A request cannot make these.
            Chosen::Effects(_) | Chosen::NamedEffects { .. } => {
                return Err(new.refused("only a resolve takes effects"));
            }
        };
        let mut found = Found { members: Vec::new(), by_status: BTreeMap::new(), skipped: BTreeMap::new() };
        for row in rows {
            let (taken, status) = new.verb.looks_at(row.status, row.idle, row.cancelled);
            let counts = if taken { &mut found.by_status } else { &mut found.skipped };
            *counts.entry(status).or_default() += 1;
            if taken {
                let (session_id, space_id) = (row.session_id, row.space_id);
                found.members.push(Candidate { session_id, space_id, effect: None });
            }
        }
        Ok(found)
    }

    /// Those of the sessions that a caller reaches, oldest first. All others do not exist for the caller.
    async fn reached(&self, ids: &[String], within: &SessionFilter) -> Result<Vec<Standing>> {
        let found = sqlx::query_as!(
            Standing,
            r#"select s.session_id, s.space_id, s.status, s.runner = '' as "idle!",
                s.error is not distinct from 'cancelled' as "cancelled!"
            from conversation_sessions s
            left join conversation_counters c using (conversation_id)
            where s.session_id = any ($1)
                and ($2::text is null or s.space_id = $2)
                and ($3::text is null or s.agent = $3)
                and ($4::text is null or c.user_id = $4)
            order by s.session_id"#,
            ids,
            within.space_id,
            within.agent,
            within.user_id
        )
        .fetch_all(&self.pool)
        .await?;
        let known: HashSet<&str> = found.iter().map(|one| one.session_id.as_str()).collect();
        match ids.iter().find(|id| !known.contains(id.as_str())) {
            Some(missing) => Err(Error::NotFound { what: "session", id: missing.clone() }),
            None => Ok(found),
        }
    }
}

impl NewBatch {
    /// What its members are.
    fn what(&self) -> &'static str {
        if self.verb == Verb::Resolve { "effect" } else { "session" }
    }

    /// Checks the number of sessions that a filter found.
    pub(super) fn is_not_too_large(&self, found: i64) -> Result<()> {
        if found > MEMBERS {
            return Err(self.refused(format!("the filter finds more than {MEMBERS} sessions: narrow it")));
        }
        Ok(())
    }

    pub(super) fn refused(&self, reason: impl Into<String>) -> Error {
        Error::Batch { batch_id: self.verb.as_str().to_owned(), reason: reason.into() }
    }

    /// Hash of the request, for its key.
    fn sha256(&self) -> String {
        let ids = match &self.chosen {
            Chosen::Sessions { ids, .. } => Some(ids),
            Chosen::Filter(_) | Chosen::Effects(_) | Chosen::NamedEffects { .. } => None,
        };
        let effects = match &self.chosen {
            Chosen::NamedEffects { names, .. } => Some(names),
            _ => None,
        };
        let mut asked = format!(
            "{:?}",
            (
                self.verb,
                &self.filter,
                ids,
                &self.reason,
                self.rate,
                self.prove,
                &self.model,
                &self.canary,
                self.stop_share
            )
        );
        if let Some(decision) = &self.decision {
            asked.push_str(&format!("{decision:?} {effects:?}"));
        }
        hex::encode(Sha256::digest(asked.as_bytes()))
    }
}

impl Verb {
    /// Whether it takes such a session, and what the status of the session is called. See [`STANDING`].
    pub(super) fn looks_at(self, status: String, idle: bool, cancelled: bool) -> (bool, String) {
        let taken = self.takes().contains(&status.as_str()) && idle && !(self == Verb::Retry && cancelled);
        (taken, if cancelled { "cancelled".to_owned() } else { status })
    }
}

/// The same filter without a cursor. It finds one session more than a batch may have, so that too many are noticed and not left
/// out.
pub(super) fn all_of(filter: &SessionFilter) -> SessionFilter {
    SessionFilter { limit: MEMBERS + 1, before: None, ..filter.clone() }
}

/// The stage of the member at this place.
fn stage_of(at: usize, canary: &[i32]) -> i32 {
    let mut end = 0;
    for (stage, size) in canary.iter().enumerate() {
        end += usize::try_from(*size).unwrap_or(0);
        if at < end {
            return stage as i32;
        }
    }
    canary.len() as i32
}

/// `asked` ordinals, spread evenly over all members.
pub(super) fn spread(members: usize, asked: usize) -> Vec<i32> {
    let asked = asked.min(members);
    (0..asked).map(|n| (n * members / asked) as i32 + 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_follow_one_another_and_the_last_has_the_rest() {
        let stages: Vec<i32> = (0..15).map(|at| stage_of(at, &[1, 10])).collect();
        assert_eq!(stages, [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2]);
        assert_eq!(stage_of(7, &[]), 0);
    }

    #[test]
    fn tries_are_spread_over_all_members() {
        assert_eq!(spread(10, 3), [1, 4, 7]);
        assert_eq!(spread(2, 50), [1, 2]);
        assert_eq!(spread(5, 0), [0; 0]);
    }
}
