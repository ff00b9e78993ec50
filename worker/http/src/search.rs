//! What a search for sessions may ask for: the parameters of `GET /v1/sessions`, the `filter` of a batch, the options of
//! `wakeful session list`.

use crate::access::Caller;
use crate::body::{NO_CURSOR, check_cursor, check_text, check_word};
use crate::problem::Problem;
use crate::sessions::{limit, no_trigger};
use chrono::{DateTime, Utc};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use wakeful_store::session::{SessionFilter, SessionPlace};
use wakeful_store::space::{Scope, within};
use wakeful_store::{Error, Store};
use wakeful_workflow::access::Reach;
use wakeful_workflow::failure::is_fingerprint;
use wakeful_workflow::id::{DEFAULT_SPACE, conversation_id_in};
use wakeful_workflow::session::SessionStatus;

/// The longest text of a parameter, in bytes.
const LONGEST: usize = 256;

/// The cursor of the page after this place. See [`Search::place`].
pub(crate) fn cursor(place: SessionPlace) -> String {
    match place.active_at {
        Some(at) => format!("{}~{}", at.timestamp_micros(), place.session_id),
        None => place.session_id,
    }
}

/// The orders of a list: the newest sessions first, or those that were active most recently.
const SORTS: [&str; 2] = ["newest", "activity"];

/// A search. A session must match all that is given.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Search {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = SessionStatus::WORDS))]
    pub status: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conversation_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trigger_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub space: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(default, deserialize_with = "crate::times::usual")]
    #[schemars(with = "Option<DateTime<Utc>>")]
    pub since: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(default, deserialize_with = "crate::times::usual")]
    #[schemars(with = "Option<DateTime<Utc>>")]
    pub until: Option<DateTime<Utc>>,
    /// US dollars.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost_over: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps_over: Option<i64>,
    /// With tool calls that failed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failed_calls: bool,
    /// `newest` is the default.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = SORTS))]
    pub sort: Option<String>,
    /// Includes replays and imports. By default the list leaves them out, unless their type or conversation is asked for.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<i64>,
}

/// Why a search is refused.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// A parameter has no meaning.
    #[error("{0}")]
    Wrong(String),
    #[error(transparent)]
    Store(#[from] Error),
}

impl From<Refused> for Problem {
    fn from(refused: Refused) -> Problem {
        match refused {
            Refused::Wrong(said) => Problem::bad_request(said),
            Refused::Store(error) => error.into(),
        }
    }
}

impl Search {
    /// Returns whether nothing is asked for: it would find every session.
    pub fn is_empty(&self) -> bool {
        *self
            == Search {
                cursor: self.cursor.clone(),
                limit: self.limit,
                all: self.all,
                sort: self.sort.clone(),
                ..Search::default()
            }
    }

    /// The filter for the store. It covers every space, unless one is asked for.
    ///
    /// # Errors
    /// [`Refused`].
    pub async fn filter(&self, store: &Store) -> Result<SessionFilter, Refused> {
        self.filter_of(store, None).await
    }

    /// Like [`Search::filter`], for sessions of one user's conversations.
    async fn filter_of(&self, store: &Store, user_id: Option<String>) -> Result<SessionFilter, Refused> {
        let reach = Reach { space_id: self.space.clone(), agent: self.agent.clone(), user_id };
        let wrong = |said: String| Err(Refused::Wrong(said));
        for (name, word, known) in [
            ("status", &self.status, SessionStatus::WORDS.as_slice()),
            ("sort", &self.sort, SORTS.as_slice()),
        ] {
            check_word(name, word.as_deref(), known)
                .map_err(|problem| Refused::Wrong(problem.to_string()))?;
        }
        for (name, text) in [
            ("trigger_type", &self.trigger_type),
            ("agent", &self.agent),
            ("space", &self.space),
            ("user", &self.user),
            ("text", &self.text),
            ("from", &self.from),
            ("tool", &self.tool),
            ("error", &self.error),
        ] {
            check_text(name, text.as_deref(), LONGEST)
                .map_err(|problem| Refused::Wrong(problem.to_string()))?;
        }
        let by_activity = self.sort.as_deref() == Some("activity");
        let (before, before_active_at) =
            self.place(by_activity).map_err(|problem| Refused::Wrong(problem.to_string()))?;
        if self.cost_over.is_some_and(|dollars| !(0.0..=1e9).contains(&dollars)) {
            return wrong("`cost_over` is a number of dollars, 0 or more".to_owned());
        }
        if self.steps_over.is_some_and(|steps| steps < 0) {
            return wrong("`steps_over` is a number, 0 or more".to_owned());
        }
        if let (Some(since), Some(until)) = (self.since, self.until)
            && since >= until
        {
            return wrong("`since` is before `until`".to_owned());
        }
        if let Some(trigger_type) = &self.trigger_type
            && !store.knows_trigger_type(&reach, trigger_type).await?
        {
            return wrong(no_trigger(trigger_type));
        }
        let conversation_id = match &self.conversation_id {
            Some(id) => {
                let space = self.space.as_deref().unwrap_or(DEFAULT_SPACE);
                Some(conversation_id_in(space, id).map_err(|error| Refused::Wrong(error.to_string()))?)
            }
            None => None,
        };
        Ok(SessionFilter {
            space_id: reach.space_id,
            agent: reach.agent,
            user_id: reach.user_id,
            status: self.status.clone(),
            only_live: !self.all && self.trigger_type.is_none() && conversation_id.is_none(),
            conversation_id,
            trigger_type: self.trigger_type.clone(),
            user: self.user.clone(),
            text: self.text.clone(),
            from: self.from.clone(),
            tool: self.tool.clone(),
            error: self.error.clone(),
            since: self.since,
            until: self.until,
            cost_over_micros: self.cost_over.map(|dollars| (dollars * 1e6).round() as i64),
            steps_over: self.steps_over,
            failed_calls: self.failed_calls,
            by_activity,
            before,
            before_active_at,
            limit: limit(self.limit).map_err(|problem| Refused::Wrong(problem.to_string()))?,
        })
    }

    /// What the cursor names. In a list by activity it has the time as the page before had it, because the session may have moved since.
    fn place(&self, by_activity: bool) -> Result<(Option<String>, Option<DateTime<Utc>>), Problem> {
        let Some(cursor) = self.cursor.as_deref() else { return Ok((None, None)) };
        let (at, id) = match cursor.split_once('~') {
            Some((at, id)) if by_activity => {
                let at = at.parse().ok().and_then(DateTime::from_timestamp_micros);
                (Some(at.ok_or_else(|| Problem::bad_request(NO_CURSOR))?), id)
            }
            None if !by_activity => (None, cursor),
            Some(_) | None => return Err(Problem::bad_request(NO_CURSOR)),
        };
        check_cursor(Some(id), "sess")?;
        Ok((Some(id.to_owned()), at))
    }

    /// The filter for a caller. It finds only what the caller reaches, and always names a space: ask the store within that space.
    ///
    /// # Errors
    /// 400 for a parameter that has no meaning, 403 for a space or an agent beyond the caller's.
    pub async fn filter_for(&self, store: &Store, caller: &Caller) -> Result<SessionFilter, Problem> {
        let space = caller.asked_space(self.space.as_deref())?;
        let agent = caller.agent(self.agent.as_deref())?;
        let is_limited = caller.reach.agent.is_some() || caller.reach.user_id.is_some();
        // A part of a text is looked for in the errors of the whole space, so the answer would tell of sessions of others.
        if is_limited && self.error.as_deref().is_some_and(|error| !is_fingerprint(error)) {
            return Err(Problem::bad_request(
                "with a token of one agent or user, `error` is the fingerprint of a group: 16 of 0-9 and a-f",
            ));
        }
        let search =
            Search { space: Some(space.to_owned()), agent: agent.map(str::to_owned), ..self.clone() };
        // The header may name another space.
        let filter = search.filter_of(store, caller.reach.user_id.clone());
        Ok(within(Scope::of(space), filter).await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_that_asks_for_nothing_is_empty() {
        assert!(Search { limit: Some(3), all: true, ..Search::default() }.is_empty());
        assert!(!Search { status: Some("failed".to_owned()), ..Search::default() }.is_empty());
        let kept = serde_json::to_string(&Search { steps_over: Some(3), ..Search::default() }).unwrap();
        assert_eq!(kept, r#"{"steps_over":3}"#);
    }
}
