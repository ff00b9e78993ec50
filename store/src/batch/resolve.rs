//! A batch that says how uncertain effects ended: which effects it takes, and the act on one of them.

use super::act::{Claimed, Next};
use super::{MEMBERS, NewBatch, Verb};
use crate::effect::{EffectFilter, EffectKind, EffectName, FoundEffect, UncertainEffect};
use crate::pool::Transaction;
use crate::resolve::{Decision, Effect};
use crate::{Error, Result, Store};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use wakeful_workflow::resolve::Resolution;

/// How many effects a preview shows.
const SAMPLE: usize = 10;

/// What a batch says of each of its effects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BulkDecision {
    /// `happened`, `did_not_happen` or `let_model_decide`.
    pub outcome: String,
    /// What a call would have returned that happened.
    #[serde(default)]
    pub result: Option<String>,
    /// Whether to send the outcome to models that were told that it is unknown.
    #[serde(default)]
    pub tell: bool,
}

/// It was given when the batch was made. An erasure takes it, if an erased session was a member.
const NO_RESULT: &str = "the result that it would get was erased with a session of this batch";

impl BulkDecision {
    /// The decision about one effect. `None`: there is no such outcome.
    fn resolution(&self) -> Option<Resolution> {
        Some(match self.outcome.as_str() {
            "happened" => Resolution::Happened { result: self.result.clone().unwrap_or_default() },
            "did_not_happen" => Resolution::DidNotHappen,
            "let_model_decide" => Resolution::LetModelDecide,
            _ => return None,
        })
    }

    /// Why an effect would be refused at this moment.
    fn refuses(&self, effect: &FoundEffect) -> Option<&'static str> {
        match self.outcome.as_str() {
            _ if effect.in_hand => Some("its run goes on"),
            "did_not_happen" if effect.may_happen => Some("it may still be carried out"),
            "let_model_decide" if !effect.is_call => Some("a model cannot decide about a message"),
            _ => None,
        }
    }
}

/// What a batch that resolves effects would do.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EffectsPreview {
    pub verb: Verb,
    pub members: i64,
    /// By tool and by channel.
    pub by_name: BTreeMap<String, i64>,
    /// What was named and is not uncertain, by status.
    pub skipped: BTreeMap<String, i64>,
    /// How many of the members would be refused at this moment, by the reason.
    pub refused: BTreeMap<String, i64>,
    /// Ten of the members.
    pub sample: Vec<UncertainEffect>,
}

/// The effects of a batch, by whether they are uncertain.
pub(super) struct FoundEffects {
    /// Those of the oldest sessions first.
    pub members: Vec<FoundEffect>,
    pub skipped: BTreeMap<String, i64>,
}

impl Store {
    /// Says what [`Store::create_batch`] would do with a batch that resolves effects. Writes nothing.
    ///
    /// # Errors
    /// [`Error::Batch`] if there are too many, [`Error::NotFound`], [`Error::Database`].
    pub async fn preview_effects(&self, new: &NewBatch) -> Result<EffectsPreview> {
        let found = self.choose_effects(new).await?;
        let (mut by_name, mut refused) = (BTreeMap::new(), BTreeMap::new());
        for effect in &found.members {
            *by_name.entry(effect.name.clone()).or_default() += 1;
            if let Some(why) = new.decision.as_ref().and_then(|decision| decision.refuses(effect)) {
                *refused.entry(why.to_owned()).or_default() += 1;
            }
        }
        let step = found.members.len().div_ceil(SAMPLE).max(1);
        let sample: Vec<FoundEffect> = found.members.iter().step_by(step).cloned().collect();
        Ok(EffectsPreview {
            verb: new.verb,
            members: found.members.len() as i64,
            by_name,
            skipped: found.skipped,
            refused,
            sample: self.effects_by_name(&sample).await?,
        })
    }

    /// Chooses the effects of a batch.
    pub(super) async fn choose_effects(&self, new: &NewBatch) -> Result<FoundEffects> {
        let mut found = match &new.chosen {
            super::Chosen::Effects(filter) => {
                // One more than may be, so that too many are noticed and not left out.
                let filter = EffectFilter { limit: MEMBERS + 1, before: None, ..(**filter).clone() };
                self.find_effects(&filter).await?
            }
            super::Chosen::NamedEffects { names, within } => {
                let names: Vec<EffectName> =
                    names.iter().collect::<std::collections::BTreeSet<_>>().into_iter().cloned().collect();
                self.named_effects(&names, within).await?
            }
            super::Chosen::Filter(_) | super::Chosen::Sessions { .. } => Vec::new(),
        };
        if found.len() as i64 > MEMBERS {
            return Err(new.refused(format!("there are more than {MEMBERS} effects: narrow the filter")));
        }
        found.sort_by(|one, other| {
            (&one.session_id, &one.effect_id).cmp(&(&other.session_id, &other.effect_id))
        });
        let mut skipped = BTreeMap::new();
        for effect in found.iter().filter(|effect| effect.status != "uncertain") {
            *skipped.entry(effect.status.clone()).or_default() += 1;
        }
        found.retain(|effect| effect.status == "uncertain");
        let wants_result =
            new.decision.as_ref().is_some_and(|one| one.outcome == "happened" && one.result.is_none());
        if wants_result && found.iter().any(|effect| effect.is_call) {
            return Err(new.refused("a call that happened needs its result: what it would have returned"));
        }
        Ok(FoundEffects { members: found, skipped })
    }

    /// Resolves the effect of a member in a transaction that the caller commits. What somebody else has resolved meanwhile is refused,
    /// also if it was resolved the same.
    pub(super) async fn resolved_once(
        &self,
        batch: &Claimed,
        member: &Next,
        reason: &str,
    ) -> Result<(Transaction, Option<String>)> {
        let corrupt = || Error::corrupt("decision of a batch", &batch.batch_id);
        let decision: BulkDecision = batch
            .decision
            .clone()
            .and_then(|stored| serde_json::from_value(stored).ok())
            .ok_or_else(corrupt)?;
        let id = member.effect_id.clone().ok_or_else(corrupt)?;
        let effect = match member.effect_kind.as_deref().and_then(EffectKind::parse) {
            Some(EffectKind::Call) => Effect::Call(id.clone()),
            Some(EffectKind::Delivery) => Effect::Delivery(id.clone()),
            None => return Err(corrupt()),
        };
        if matches!(effect, Effect::Call(_)) && decision.outcome == "happened" && decision.result.is_none() {
            return Err(Error::Refused {
                session_id: member.session_id.clone(),
                reason: NO_RESULT.to_owned(),
            });
        }
        let decision = Decision {
            effect,
            resolution: decision.resolution().ok_or_else(corrupt)?,
            by: None,
            reason: Some(reason.to_owned()),
            args_sha256: None,
            tell: decision.tell,
            trace_context: None,
        };
        let (tx, resolved) = self.resolved(&member.session_id, &decision).await?;
        if resolved.duplicate {
            tx.rollback().await?;
            let reason = format!("{id} was resolved before, as {}", resolved.resolution);
            return Err(Error::Refused { session_id: member.session_id.clone(), reason });
        }
        Ok((tx, resolved.run_id.or(resolved.told_run_id)))
    }
}
