//! A session as it will be after a commit that is not made yet.

use std::mem::take;
use wakeful_workflow::advance::Transition;
use wakeful_workflow::session::Session;

/// Applies `transition`. Returns the session as it was, without what a transition does not change or only
/// appends to: these parts grow with the session and are not copied.
pub(crate) fn apply(session: &mut Session, transition: &Transition) -> Session {
    let (records, seeds) = (take(&mut session.records), take(&mut session.seeds));
    let (prefix, policy) = (session.prefix.take(), take(&mut session.policy));
    let before = session.clone();
    (session.records, session.seeds, session.prefix, session.policy) = (records, seeds, prefix, policy);
    session.apply(transition);
    before
}

/// Undoes [`apply`].
pub(crate) fn undo(session: &mut Session, before: Session, transition: &Transition) {
    let mut records = take(&mut session.records);
    records.truncate(records.len() - transition.records.len());
    let (seeds, prefix, policy) =
        (take(&mut session.seeds), session.prefix.take(), take(&mut session.policy));
    *session = Session { records, seeds, prefix, policy, ..before };
}
