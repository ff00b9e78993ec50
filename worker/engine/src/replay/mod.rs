//! Gives a replay what its source recorded: each user message before the same model call as in the source,
//! and the recorded answers.

mod recordings;

pub use recordings::{Recordings, Source};

use wakeful_store::Store;
use wakeful_store::wake::NewMessage;
use wakeful_workflow::plan::Action;
use wakeful_workflow::replay::Input;
use wakeful_workflow::session::Session;

/// Sends a replay the user message that its source received right before the planned model call, if the
/// replay does not have it yet. Returns `true` if it sent one: `session` was then read again, and the caller
/// must plan again.
///
/// # Errors
/// [`wakeful_store::Error`].
pub(crate) async fn send_due_input(
    store: &Store,
    recordings: &Recordings,
    session: &mut Session,
    action: &Action,
) -> wakeful_store::Result<bool> {
    if session.policy.replay.is_none() || *action != Action::CallModel {
        return Ok(false);
    }
    let Some(source) = recordings.of(store, session).await? else {
        return Ok(false);
    };
    let due = source.follower().follow(session, &source.rules, &source.recording).due();
    let Some(input) = due else {
        return Ok(false);
    };
    send_input(store, session.session_id.as_str(), &input).await?;
    store.refresh(session).await?;
    Ok(true)
}

/// Sends a replay one of its source's messages. Sending it again has no effect, because its `client_key` is
/// the same.
pub async fn send_input(store: &Store, session_id: &str, input: &Input) -> wakeful_store::Result<()> {
    let message = NewMessage {
        client_key: Some(input.client_key()),
        text: input.text.clone(),
        sender: None,
        trace_context: None,
        attachments: Vec::new(),
    };
    store.feed(session_id, &message).await?;
    Ok(())
}
