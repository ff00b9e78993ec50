//! A batch that resolves uncertain effects: what a request for one says.

use super::{RATE, RATES, check_reason};
use crate::access::Caller;
use crate::body::{check_text, message_text};
use crate::effects::{EffectOutcome, EffectSearch};
use crate::problem::Problem;
use crate::search::Refused;
use axum::Json;
use axum::http::StatusCode;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};
use wakeful_engine::ctx::Ctx;
use wakeful_store::audit::act;
use wakeful_store::batch::{BulkDecision, Chosen, NewBatch, Verb};
use wakeful_store::effect::{EffectFilter, EffectName};
use wakeful_store::space::{Scope, within};

/// The only verb of such a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResolveVerb {
    Resolve,
}

/// The body of `POST /v1/batches` that resolves effects.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "NewResolveBatch")]
pub struct Input {
    pub verb: ResolveVerb,
    pub filter: Option<EffectSearch>,
    pub effects: Option<Vec<EffectName>>,
    pub outcome: EffectOutcome,
    /// The result of a call that happened, as the tool would have returned it.
    pub result: Option<String>,
    /// Send the outcome to models that were told that it is unknown.
    #[serde(default)]
    pub tell: bool,
    pub reason: Option<String>,
    #[serde(default)]
    pub dry_run: bool,
    pub rate: Option<f64>,
    pub client_key: Option<String>,
}

impl Input {
    /// Checks what the command line and the API check alike, and makes the batch of it. `filter`: `self.filter` for the store, or
    /// all that the caller reaches.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn batch(&self, space_id: Option<String>, filter: EffectFilter) -> Result<NewBatch, Refused> {
        let wrong = |said: &str| Err(Refused::Wrong(said.to_owned()));
        let is_text = |problem: Problem| Refused::Wrong(problem.to_string());
        let chosen = match (&self.filter, &self.effects) {
            (Some(search), None) if search.is_empty() => {
                return wrong(
                    "an empty filter would take every uncertain effect: say which, such as tool=charge",
                );
            }
            (Some(search), None) if search.cursor.is_some() || search.limit.is_some() => {
                return wrong("a batch takes all that its filter finds: it has no `cursor` and no `limit`");
            }
            (Some(_), None) => Chosen::Effects(Box::new(filter)),
            (None, Some(names)) if !names.is_empty() => {
                for name in names {
                    check_text("session_id", Some(&name.session_id), 256).map_err(is_text)?;
                    check_text("effect_id", Some(&name.effect_id), 256).map_err(is_text)?;
                }
                Chosen::NamedEffects { names: names.clone(), within: Box::new(filter) }
            }
            (_, _) => return wrong("say which effects: by a filter, or by naming at least one"),
        };
        let is_one = self.effects.as_ref().is_some_and(|names| names.len() == 1);
        check_reason(self.reason.as_deref(), self.client_key.as_deref(), is_one || self.dry_run, "effect")?;
        let rate = self.rate.unwrap_or(RATE);
        if !RATES.contains(&rate) {
            return wrong("`rate` is members a second: from 0.001 to 1000");
        }
        if self.outcome != EffectOutcome::Happened && self.result.is_some() {
            return wrong("`result` is only for effects that happened");
        }
        let result = self.result.clone().map(message_text).transpose().map_err(is_text)?;
        Ok(NewBatch {
            space_id,
            verb: Verb::Resolve,
            chosen,
            filter: self.shown(),
            decision: Some(BulkDecision {
                outcome: self.outcome.as_str().to_owned(),
                result,
                tell: self.tell,
            }),
            reason: self.reason.clone(),
            rate,
            prove: 0,
            model: None,
            canary: Vec::new(),
            stop_share: None,
            client_key: self.client_key.clone(),
        })
    }

    /// What was asked for, as it is shown: long lists of names by their number.
    fn shown(&self) -> Value {
        match (&self.filter, &self.effects) {
            (Some(search), _) => json!(search),
            (None, Some(names)) if names.len() <= 100 => json!({"effects": names}),
            (None, names) => json!({"effects": names.as_ref().map_or(0, Vec::len)}),
        }
    }
}

/// Makes such a batch, or says what it would do.
pub(super) async fn create(
    ctx: &Ctx,
    caller: &Caller,
    input: Input,
) -> Result<(StatusCode, Json<Value>), Problem> {
    let filter = input.filter.clone().unwrap_or_default().filter_for(caller)?;
    let space = filter.space_id.clone().unwrap_or_else(|| caller.space().to_owned());
    let scope = Scope::of(&space);
    let new = input.batch(Some(space), filter)?;
    if input.dry_run {
        let preview = within(scope, ctx.store.preview_effects(&new)).await?;
        act::only_looks();
        return Ok((StatusCode::OK, Json(json!(preview))));
    }
    let (batch, is_duplicate) = within(scope, ctx.store.create_batch(&new)).await?;
    let status = if is_duplicate { StatusCode::OK } else { StatusCode::CREATED };
    Ok((status, Json(json!(batch))))
}
