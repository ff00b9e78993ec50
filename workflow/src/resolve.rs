//! How a person can resolve an effect with an unknown outcome, and what the model is then told.
#![doc = include_str!("resolve.md")]

use crate::session::{CallOutcome, CallStatus};
use serde::{Deserialize, Serialize};

/// The result of a question that nobody answered within `seconds`, as the model sees it.
pub fn unanswered(seconds: u64) -> CallOutcome {
    let details = Some(serde_json::json!({"type": "questionExpired", "after_s": seconds}));
    let content = format!(
        "NO ANSWER. Nobody answered within {seconds} seconds, and the question is closed. Go on without the answer, or say \
         what cannot be done without it. Whatever the user writes from now on is a message of its own."
    );
    CallOutcome { content, is_error: true, details }
}

/// A person's decision about an uncertain effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Resolution {
    /// It took effect, with this result.
    Happened { result: String },
    /// It did not take effect, and can no longer take effect.
    DidNotHappen,
    /// The outcome stays unknown, and the model is told so.
    LetModelDecide,
}

impl Resolution {
    /// The word that is journalled and shown.
    pub fn as_str(&self) -> &'static str {
        match self {
            Resolution::Happened { .. } => "happened",
            Resolution::DidNotHappen => "did_not_happen",
            Resolution::LetModelDecide => "let_model_decide",
        }
    }

    /// The new status of the call's ledger row, and the result that the model gets.
    pub fn of_call(&self) -> (CallStatus, CallOutcome) {
        match self {
            Resolution::Happened { result } => {
                (CallStatus::Done, CallOutcome { content: result.clone(), is_error: false, details: None })
            }
            Resolution::DidNotHappen => (
                CallStatus::Failed,
                error(
                    "NOT DONE. This call was interrupted, and an operator has confirmed that it did NOT take effect. \
                     It is not run again by itself. If it is still wanted, make it again as a new call.",
                ),
            ),
            Resolution::LetModelDecide => (CallStatus::Uncertain, outcome_unknown()),
        }
    }

    /// The message to a model that was already told OUTCOME UNKNOWN.
    pub fn news_of_call(&self, name: &str, call_id: &str) -> String {
        let about = format!("About the earlier call of {name} ({call_id}), whose outcome was unknown");
        match self {
            Resolution::Happened { result } => {
                format!("{about}: an operator has confirmed that it DID take effect. Its result: {result}")
            }
            Resolution::DidNotHappen => format!(
                "{about}: an operator has confirmed that it did NOT take effect. If it is still wanted, make it again \
                 as a new call."
            ),
            Resolution::LetModelDecide => {
                format!(
                    "{about}: an operator could not find out either. Decide how to go on without knowing."
                )
            }
        }
    }
}

/// The result of a call that may or may not have taken effect.
pub(crate) fn outcome_unknown() -> CallOutcome {
    error(
        "OUTCOME UNKNOWN. The call was started and the worker stopped before it reported back. It may have taken \
         effect and it may not have; nobody can tell from here. Do not treat it as done, do not treat it as failed, \
         and do not simply repeat it. Check by other means, or tell the user that the outcome is unknown.",
    )
}

fn error(text: &str) -> CallOutcome {
    CallOutcome { content: text.to_owned(), is_error: true, details: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_resolution_reads_like_another() {
        let happened = Resolution::Happened { result: "Charged 5 cents.".into() };
        assert_eq!(happened.of_call().1.content, "Charged 5 cents.");
        let (status, told) = Resolution::DidNotHappen.of_call();
        assert_eq!((status, told.is_error), (CallStatus::Failed, true));
        assert!(told.content.contains("did NOT") && !told.content.contains("UNKNOWN"));
        let (status, told) = Resolution::LetModelDecide.of_call();
        assert_eq!((status, told.is_error), (CallStatus::Uncertain, true));
        assert!(told.content.starts_with("OUTCOME UNKNOWN"));
    }

    #[test]
    fn a_resolution_is_stored_under_its_word() {
        for (resolution, word) in [
            (Resolution::Happened { result: "x".into() }, "happened"),
            (Resolution::DidNotHappen, "did_not_happen"),
            (Resolution::LetModelDecide, "let_model_decide"),
        ] {
            assert_eq!(resolution.as_str(), word);
            assert_eq!(serde_json::to_value(&resolution).unwrap()["outcome"], word);
        }
    }
}
