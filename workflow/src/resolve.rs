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

/// Why a run pauses while a call waits for approval.
pub(crate) const AWAITS_APPROVAL: &str =
    "a call waits for approval: read it, then say `wakeful session approve` or `wakeful session decline`";

/// What the model reads of a call whose cause is in the journal alone.
pub(crate) const NO_END: &str = "The call was started, and how it ended is not known.";

/// Why a call is uncertain whose worker lives, and ended it because the run was cancelled.
pub(crate) const CANCELLED: &str = "The run was cancelled while the call ran.";

/// A person's decision about an uncertain effect, or about a call that waits for approval.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Resolution {
    /// It took effect, with this result.
    Happened { result: String },
    /// It did not take effect, and can no longer take effect.
    DidNotHappen,
    /// The outcome stays unknown, and the model is told so.
    LetModelDecide,
    /// The call may run.
    Approved,
    /// The call must not run, and the model is told so.
    Declined,
}

impl Resolution {
    /// The word that is journalled and shown.
    pub fn as_str(&self) -> &'static str {
        match self {
            Resolution::Happened { .. } => "happened",
            Resolution::DidNotHappen => "did_not_happen",
            Resolution::LetModelDecide => "let_model_decide",
            Resolution::Approved => "approved",
            Resolution::Declined => "declined",
        }
    }

    /// The status of a call that it is about.
    pub fn decides(&self) -> CallStatus {
        match self {
            Resolution::Happened { .. } | Resolution::DidNotHappen | Resolution::LetModelDecide => {
                CallStatus::Uncertain
            }
            Resolution::Approved | Resolution::Declined => CallStatus::Unapproved,
        }
    }

    /// The new status of the call's ledger row, and the result that the model gets. `None`: the call runs, and returns it.
    /// `by` and `reason` are the person's who decides.
    pub fn of_call(&self, by: Option<&str>, reason: Option<&str>) -> (CallStatus, Option<CallOutcome>) {
        let (status, outcome) = match self {
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
            Resolution::LetModelDecide => (CallStatus::Uncertain, outcome_unknown(Some(NO_END))),
            Resolution::Approved => return (CallStatus::Invoked, None),
            Resolution::Declined => (CallStatus::Failed, declined(by, reason)),
        };
        (status, Some(outcome))
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
            // The model is not told of a call before a person has decided.
            Resolution::Approved | Resolution::Declined => format!("{about}: it is {}.", self.as_str()),
        }
    }
}

/// The result of a call that a person declined.
fn declined(by: Option<&str>, reason: Option<&str>) -> CallOutcome {
    let by = by.unwrap_or("A person");
    let reason = reason.map(|reason| format!(" The reason given: {reason}")).unwrap_or_default();
    error(&format!(
        "DECLINED. This call needed a person's approval, and {by} declined it. It did not run and had no effect.{reason}\n\
         Do not make the same call again by yourself. Go on without it, or say what cannot be done without it."
    ))
}

/// The result of a call that may or may not have taken effect. `why` is what is known; without it, its worker stopped.
pub(crate) fn outcome_unknown(why: Option<&str>) -> CallOutcome {
    let why = why.unwrap_or("The call was started and the worker stopped before it reported back.");
    error(&format!(
        "OUTCOME UNKNOWN. {why} It may have taken effect and it may not have; nobody can tell from here. Do not treat \
         it as done, do not treat it as failed, and do not simply repeat it. Check by other means, or tell the user \
         that the outcome is unknown."
    ))
}

fn error(text: &str) -> CallOutcome {
    CallOutcome { content: text.to_owned(), is_error: true, details: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_resolution_reads_like_another() {
        let of_call = |resolution: Resolution| {
            let (status, outcome) = resolution.of_call(Some("ann"), Some("too dear"));
            (status, outcome.expect("a result"))
        };
        let happened = Resolution::Happened { result: "Charged 5 cents.".into() };
        assert_eq!(of_call(happened).1.content, "Charged 5 cents.");
        let (status, told) = of_call(Resolution::DidNotHappen);
        assert_eq!((status, told.is_error), (CallStatus::Failed, true));
        assert!(told.content.contains("did NOT") && !told.content.contains("UNKNOWN"));
        let (status, told) = of_call(Resolution::LetModelDecide);
        assert_eq!((status, told.is_error), (CallStatus::Uncertain, true));
        assert!(told.content.starts_with("OUTCOME UNKNOWN"));
        let (status, told) = of_call(Resolution::Declined);
        assert_eq!((status, told.is_error), (CallStatus::Failed, true));
        assert!(told.content.starts_with("DECLINED"));
        assert!(told.content.contains("ann declined it") && told.content.contains("given: too dear\n"));
        assert_eq!(Resolution::Approved.of_call(None, None), (CallStatus::Invoked, None), "it never ran");
    }

    #[test]
    fn a_resolution_is_stored_under_its_word() {
        for (resolution, word) in [
            (Resolution::Happened { result: "x".into() }, "happened"),
            (Resolution::DidNotHappen, "did_not_happen"),
            (Resolution::LetModelDecide, "let_model_decide"),
            (Resolution::Approved, "approved"),
            (Resolution::Declined, "declined"),
        ] {
            assert_eq!(resolution.as_str(), word);
            assert_eq!(serde_json::to_value(&resolution).unwrap()["outcome"], word);
        }
    }
}
