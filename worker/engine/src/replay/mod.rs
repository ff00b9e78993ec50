//! What a replay gets of its source: the messages, at the model calls that they came before, and the recorded answers.

mod recordings;

pub use recordings::{Recordings, Source};

use wakeful_store::Store;
use wakeful_store::wake::NewMessage;
use wakeful_workflow::plan::Action;
use wakeful_workflow::replay::{self, Input};
use wakeful_workflow::session::Session;

/// Gives a replay the message that its source took right before the model call that is planned. `true`: the session was
/// read again, and is to be planned on anew.
///
/// # Errors
/// [`wakeful_store::Error`].
pub(crate) async fn feed(
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
    let Some(input) = replay::due(session, &source.rules, &source.recording) else {
        return Ok(false);
    };
    give(store, session.session_id.as_str(), &input).await?;
    store.refresh(session).await?;
    Ok(true)
}

/// Sends a replay one of its source's messages. Sent again, it is the same message.
pub async fn give(store: &Store, session_id: &str, input: &Input) -> wakeful_store::Result<()> {
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
