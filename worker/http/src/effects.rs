//! Effects whose end is unknown, across sessions: the list, and what a batch that resolves them may ask for.

use crate::access::Caller;
use crate::body::{NO_CURSOR, check_text};
use crate::openapi::Operation;
use crate::problem::Problem;
use crate::search::Refused;
use crate::sessions::{Answer, limit, next_page, page};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use chrono::{DateTime, Utc};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::sync::Arc;
use wakeful_engine::ctx::Ctx;
use wakeful_store::effect::{EffectFilter, EffectKind, EffectName, UncertainEffect};
use wakeful_store::space::{Scope, within};

/// The longest text of a parameter, in bytes.
const LONGEST: usize = 256;

/// The statuses by which effects may be listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EffectStatus {
    /// It began, and its end is unknown.
    Uncertain,
}

/// How an effect ended, as a person says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EffectOutcome {
    Happened,
    DidNotHappen,
    LetModelDecide,
}

impl EffectOutcome {
    /// The word of the API.
    pub fn as_str(self) -> &'static str {
        match self {
            EffectOutcome::Happened => "happened",
            EffectOutcome::DidNotHappen => "did_not_happen",
            EffectOutcome::LetModelDecide => "let_model_decide",
        }
    }
}

/// A search for uncertain effects. An effect must match all that is given.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EffectSearch {
    /// `uncertain`, which is the default: there are no others in this list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<EffectStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<EffectKind>,
    /// Only calls of this tool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool: Option<String>,
    /// Only messages of this channel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub space: Option<String>,
    /// That began then or later.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(default, deserialize_with = "crate::times::usual")]
    #[schemars(with = "Option<DateTime<Utc>>")]
    pub since: Option<DateTime<Utc>>,
    /// That began before then.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(default, deserialize_with = "crate::times::usual")]
    #[schemars(with = "Option<DateTime<Utc>>")]
    pub until: Option<DateTime<Utc>>,
    /// Also those that were left to the model, and those of replays and imports.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<i64>,
}

impl EffectSearch {
    /// Returns whether nothing is asked for: it would find every uncertain effect.
    pub fn is_empty(&self) -> bool {
        let nothing = EffectSearch {
            status: self.status,
            cursor: self.cursor.clone(),
            limit: self.limit,
            all: self.all,
            ..EffectSearch::default()
        };
        *self == nothing
    }

    /// The filter for the store. It covers every space, unless one is asked for.
    ///
    /// # Errors
    /// [`Refused`] for a parameter that has no meaning.
    pub fn filter(&self) -> Result<EffectFilter, Refused> {
        self.checked().map_err(|problem| Refused::Wrong(problem.to_string()))
    }

    fn checked(&self) -> Result<EffectFilter, Problem> {
        for (name, text) in [
            ("tool", &self.tool),
            ("channel", &self.channel),
            ("agent", &self.agent),
            ("session_id", &self.session_id),
            ("space", &self.space),
        ] {
            check_text(name, text.as_deref(), LONGEST)?;
        }
        if self.tool.is_some() && (self.channel.is_some() || self.kind == Some(EffectKind::Delivery)) {
            return Err(Problem::bad_request("`tool` is of calls, and `channel` is of messages"));
        }
        if self.channel.is_some() && self.kind == Some(EffectKind::Call) {
            return Err(Problem::bad_request("`channel` is of messages: a call has a `tool`"));
        }
        if let (Some(since), Some(until)) = (self.since, self.until)
            && since >= until
        {
            return Err(Problem::bad_request("`since` is before `until`"));
        }
        Ok(EffectFilter {
            space_id: self.space.clone(),
            agent: self.agent.clone(),
            session_id: self.session_id.clone(),
            tool: self.tool.clone(),
            channel: self.channel.clone(),
            kind: self.kind,
            since: self.since,
            until: self.until,
            all: self.all,
            before: self.cursor.as_deref().map(name_of).transpose()?,
            limit: limit(self.limit)?,
        })
    }

    /// The filter for a caller. It finds only what the caller reaches, and always names a space: ask the store within that space.
    ///
    /// # Errors
    /// 400 for a parameter that has no meaning, 403 for a space or an agent beyond the caller's.
    pub(crate) fn filter_for(&self, caller: &Caller) -> Result<EffectFilter, Problem> {
        let space = caller.asked_space(self.space.as_deref())?.to_owned();
        let agent = caller.agent(self.agent.as_deref())?.map(str::to_owned);
        EffectSearch { space: Some(space), agent, ..self.clone() }.checked()
    }
}

/// The effect that a cursor names: its session and its id.
fn name_of(cursor: &str) -> Result<EffectName, Problem> {
    let parts = cursor.split_once('~').filter(|(session, effect)| {
        session.starts_with("sess_") && !effect.is_empty() && cursor.len() <= 1024 && !cursor.contains('\0')
    });
    let (session_id, effect_id) = parts.ok_or_else(|| Problem::bad_request(NO_CURSOR))?;
    Ok(EffectName { session_id: session_id.to_owned(), effect_id: effect_id.to_owned() })
}

/// Uncertain effects, those of the newest sessions first.
pub(super) async fn list(
    State(ctx): State<Arc<Ctx>>,
    caller: Caller,
    query: Result<Query<EffectSearch>, QueryRejection>,
) -> Answer {
    let Query(query) = query?;
    let filter = query.filter_for(&caller)?;
    let space = filter.space_id.as_deref().unwrap_or(caller.space());
    let items = within(Scope::of(space), ctx.store.uncertain_effects(&filter)).await?;
    let next =
        next_page(&items, filter.limit, |last| json!(format!("{}~{}", last.session_id, last.effect_id)));
    page(&items, next)
}

/// What the API's document says of these routes.
pub(crate) fn operations() -> Vec<Operation> {
    vec![
        Operation::get("/v1/effects", "Effects whose end is unknown, those of the newest sessions first")
            .query::<EffectSearch>()
            .lists::<UncertainEffect>(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_a_session_and_an_effect_and_nothing_else() {
        let name = name_of("sess_1~call~2").unwrap();
        assert_eq!((name.session_id.as_str(), name.effect_id.as_str()), ("sess_1", "call~2"));
        for wrong in ["zzz", "sess_1~", "~x", "dlv_1~x", "sess_1~a\0"] {
            assert!(name_of(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_search_that_asks_for_nothing_is_empty_and_one_that_contradicts_itself_is_refused() {
        let nothing = EffectSearch { all: true, status: Some(EffectStatus::Uncertain), ..Default::default() };
        assert!(nothing.is_empty());
        let tool = EffectSearch { tool: Some("charge".to_owned()), ..Default::default() };
        assert!(!tool.is_empty() && tool.filter().is_ok());
        assert!(EffectSearch { channel: Some("email".to_owned()), ..tool.clone() }.filter().is_err());
        assert!(EffectSearch { kind: Some(EffectKind::Delivery), ..tool }.filter().is_err());
    }
}
