//! What `session why` says of a session's status: the main reason why it does not move.

use super::super::effects::{attention, awaits_approval, quoted};
use super::super::job::{Finding, Surroundings};
use super::step::of_step;
use crate::command::output::{capital, printable};
use wakeful_store::session::SessionSummary;
use wakeful_store::standing::Standing;
use wakeful_workflow::session::SessionStatus;

/// Explains the status. `None`: the session waits for the approval of calls, and each of them has a finding of its own.
/// `unheard`: its person did not get what it said, which has a finding too.
pub(super) fn of_status(
    standing: &Standing,
    status: Option<SessionStatus>,
    unheard: bool,
    around: Surroundings<'_>,
) -> Option<Finding> {
    let session = &standing.session;
    let id = &session.session_id;
    let (why, remedy) = match status {
        Some(SessionStatus::Queued | SessionStatus::Running) => return Some(of_open_run(standing, around)),
        Some(SessionStatus::WaitingInput) => {
            let question = session.question.as_deref().unwrap_or("(its text could not be read)");
            (
                format!("It has asked its user a question and waits for the answer: {question}"),
                Some(format!(
                    "Answer it:\nwakeful session send {id} 'TEXT'\nOr end the run:\nwakeful session cancel {id}"
                )),
            )
        }
        Some(SessionStatus::NeedsAttention) if awaits_approval(standing) => return None,
        Some(SessionStatus::NeedsAttention) => return Some(of_attention(standing)),
        // A replay continues only through its own command; `session retry` is refused.
        Some(SessionStatus::Failed) if session.trigger_type == "replay" => {
            return Some(of_failed_replay(standing));
        }
        Some(SessionStatus::Cancelled) => (
            "Its run was cancelled, and is not retried.".to_owned(),
            Some(format!("To go on after all, say so:\nwakeful session send {id} 'TEXT'")),
        ),
        Some(SessionStatus::Failed) => return Some(of_failed(standing)),
        Some(SessionStatus::Completed) if unheard => ("Its run is complete.".to_owned(), None),
        Some(SessionStatus::Completed) => ("Nothing holds it up: its run is complete.".to_owned(), None),
        Some(SessionStatus::Created) => (
            "It has never run: it has no message yet.".to_owned(),
            Some(format!("wakeful session send {id} 'TEXT'")),
        ),
        Some(SessionStatus::Archived | SessionStatus::Terminated) => {
            (format!("It is {}: it takes no messages and never runs again.", session.status), None)
        }
        None => (
            format!("Its status {:?} is not one that this binary knows.", session.status),
            Some("Use the newer binary.".to_owned()),
        ),
    };
    Some(Finding { why, remedy })
}

/// Explains a run that is open: it waits for another session's run, or for its job.
fn of_open_run(standing: &Standing, around: Surroundings<'_>) -> Finding {
    if let Some(behind) = &standing.behind {
        let holder = &behind.session_id;
        return Finding {
            why: format!(
                "It waits for session {holder}: a conversation has one open run at a time, and {} is not over.",
                behind.run_id
            ),
            remedy: Some(format!("Look at that one:\nwakeful session why {holder}")),
        };
    }
    let job = standing.jobs.iter().find(|job| job.kind == "step");
    job.map_or_else(|| no_job(&standing.session.session_id), |job| of_step(job, standing, around))
}

/// Explains a run that waits for an operator.
fn of_attention(standing: &Standing) -> Finding {
    let id = &standing.session.session_id;
    let (error, remedy) = error_of(standing);
    let remedy = remedy.unwrap_or_else(|| attention(standing).to_owned());
    Finding {
        why: format!("It waits for an operator: {error}."),
        remedy: Some(format!(
            "{remedy}:\nwakeful session retry {id}\nOr end the run:\nwakeful session cancel {id}"
        )),
    }
}

fn of_failed_replay(standing: &Standing) -> Finding {
    let id = &standing.session.session_id;
    let (error, remedy) = error_of(standing);
    let mend = remedy.map(|remedy| format!("{remedy}. ")).unwrap_or_default();
    Finding {
        why: format!("It is a replay, and its run failed: {error}."),
        remedy: Some(format!(
            "{mend}Run the replay command again, which starts another one; or archive this one:\n\
             wakeful session archive {id}"
        )),
    }
}

fn of_failed(standing: &Standing) -> Finding {
    let session = &standing.session;
    let (error, remedy) = error_of(standing);
    let remedy = remedy.unwrap_or_else(|| "Mend the cause, then".to_owned());
    let retry = format!("wakeful session retry {}", session.session_id);
    // Another way than a retry gets a command of its own.
    let remedy = match remedy.split_once(ANEW) {
        Some((remedy, _)) => {
            format!("{remedy}:\n{retry}\nOr begin anew:\nwakeful session new {}", conversation_of(session))
        }
        None => format!("{remedy}:\n{retry}"),
    };
    Finding { why: format!("Its run failed: {error}."), remedy: Some(remedy) }
}

/// What a remedy says of another way than a retry.
const ANEW: &str = ". Or begin anew: ";

/// The session's conversation as an argument of a command.
fn conversation_of(session: &SessionSummary) -> String {
    let conversation = quoted(&printable(&session.conversation_id));
    match session.space_id.as_str() {
        "default" => conversation,
        space => format!("{conversation} --space {}", printable(space)),
    }
}

/// Splits the session's error into its text without the full stop, and the remedy in it.
fn error_of(standing: &Standing) -> (String, Option<String>) {
    let error = standing.session.error.as_deref().unwrap_or("no reason was recorded");
    match error.split_once(". Remedy: ") {
        Some((error, remedy)) => (error.to_owned(), Some(capital(remedy.trim_end_matches('.')))),
        None => (error.trim_end_matches('.').to_owned(), None),
    }
}

fn no_job(session_id: &str) -> Finding {
    Finding {
        why: "Its run is open and has no job, so nothing will continue it.".to_owned(),
        remedy: Some(
            "A worker heals it within half a minute, or at once:\nwakeful session wake {id}\nThe output of that command says what was wrong. Unless someone deleted a row by hand, this is a defect of Wakeful; please report it."
                .replace("{id}", session_id),
        ),
    }
}
