//! What `session why` says of messages that did not reach their people.

use super::super::output::printable;
use super::job::Finding;
use wakeful_store::bounce::{How, Undelivered};
use wakeful_store::outbox::Delivery;
use wakeful_workflow::id::DEFAULT_SPACE;

/// Explains why the session's replies are not sent: its mails look like a loop.
pub(super) fn loop_finding(reason: String, space: &str) -> Finding {
    let list = match space {
        DEFAULT_SPACE => "wakeful mail list".to_owned(),
        space => format!("wakeful mail list --space {}", printable(space)),
    };
    // Both reasons name a limit, but only the loop limit is configurable.
    let remedy = if reason.contains("email.loop_limit") {
        "For a person, raise email.loop_limit, and answer this one by hand."
    } else {
        "A sender that repeats one text is most likely a machine, and no setting changes this limit. For a person, answer this one by hand: a mail with another text gets an answer again."
    };
    Finding {
        why: format!("Its replies are not sent: {reason}."),
        remedy: Some(format!("Read who writes to it:\n{list}\n{remedy}")),
    }
}

/// Reports the recipients that a sent message did not reach.
pub(super) fn missed(delivery: &Delivery) -> impl Iterator<Item = Finding> {
    let missed: Vec<Undelivered> = serde_json::from_value(delivery.undelivered.clone()).unwrap_or_default();
    missed.into_iter().map(|one| {
        let how = match one.how {
            How::Refused => "was refused by the server that it was handed to",
            How::Bounced => "came back",
        };
        Finding {
            why: format!(
                "A message by {} ({}) did not reach {}: it {how} ({}: {}). The agent is told with the conversation's next \
                 message.",
                delivery.channel,
                delivery.delivery_id,
                one.recipient,
                one.status,
                one.reason.trim_end_matches('.')
            ),
            remedy: Some("Correct the address, then send it by hand or ask the agent to.".to_owned()),
        }
    })
}
