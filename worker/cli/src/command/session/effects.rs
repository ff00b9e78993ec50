//! What `session why` says of tool calls, and the commands that resolve what is uncertain and decide what waits for approval.

use super::super::output::count;
use super::job::Finding;
use wakeful_store::standing::Standing;
use wakeful_workflow::session::SessionStatus;

/// Explains each call that a person has to judge: whether it may run, or how it ended.
pub(super) fn of_calls(standing: &Standing) -> Vec<Finding> {
    of_unapproved(standing).into_iter().chain(of_uncertain(standing)).collect()
}

/// Returns whether a call waits for approval.
pub(super) fn awaits_approval(standing: &Standing) -> bool {
    standing.open_calls.iter().any(|call| call.status == "unapproved")
}

/// What to do about a run that waits for an operator. Each uncertain call has a finding of its own.
pub(super) fn attention(standing: &Standing) -> &'static str {
    if standing.open_calls.iter().any(|call| call.status == "uncertain") {
        "Find out what took effect and say so (below). Or let the model decide"
    } else {
        "Let the model go on"
    }
}

/// Explains each call whose outcome is unknown.
fn of_uncertain(standing: &Standing) -> Vec<Finding> {
    let uncertain = standing.open_calls.iter().filter(|call| call.status == "uncertain");
    uncertain
        .map(|call| {
            let told = if call.told { "the model was told so" } else { "the model has not been told yet" };
            let arguments = call.arguments.as_ref().map(|given| format!(" with {}", bounded(&given.to_string())));
            let how = call.reason.as_deref().map_or("its worker died in the middle of it", |why| why.trim_end_matches('.'));
            Finding {
                why: format!(
                    "It is not known whether {}{} took effect (call {}, asked for in message #{}): {how}; {told}, and it is \
                     never run again by itself.",
                    call.name,
                    arguments.unwrap_or_default(),
                    call.call_id,
                    call.message_number
                ),
                remedy: Some(format!(
                    "Look at the service behind {}, then say what you found:\n{}{}",
                    call.name,
                    resolve_call(&standing.session.session_id, &call.call_id),
                    if call.told { "With --tell the model gets a message of it, and a run reads it." } else { "" }
                )),
            }
        })
        .collect()
}

/// The statuses of a session whose run has not ended.
pub(super) const OPEN: [&str; 4] = ["queued", "running", "waiting_input", "needs_attention"];

/// Explains each call that waits for approval.
fn of_unapproved(standing: &Standing) -> Vec<Finding> {
    // Of a run that has failed or was cancelled no call can be approved.
    let open = OPEN.contains(&standing.session.status.as_str());
    let unapproved = standing.open_calls.iter().filter(|call| open && call.status == "unapproved");
    unapproved
        .map(|call| Finding {
            why: format!(
                "{} waits for approval (call {}, asked for in message #{}){}. It did not run yet.",
                call.name,
                call.call_id,
                call.message_number,
                call.arguments
                    .as_ref()
                    .map(|given| format!(": {}", bounded(&given.to_string())))
                    .unwrap_or_default()
            ),
            remedy: Some(format!(
                "Let it run once, or close it; the model is told why:\n{}",
                decide_call(&standing.session.session_id, &call.call_id)
            )),
        })
        .collect()
}

/// Returns the two commands that decide about a call that waits for approval.
pub(in crate::command) fn decide_call(session_id: &str, call_id: &str) -> String {
    let call_id = quoted(call_id);
    format!(
        "wakeful session approve {session_id} {call_id}\nwakeful session decline {session_id} {call_id} --reason 'WHY'\n"
    )
}

/// Says how many tool calls of the newest run failed, and why the last of them did. The model was told.
pub(super) fn of_failed_calls(standing: &Standing) -> Option<Finding> {
    let last = standing.failed_calls.first()?;
    // Only the newest are listed.
    let failed = standing.run_failed_calls;
    let error = last.error.as_deref().map(|error| format!(": {}", bounded(error.trim_end_matches('.'))));
    Some(Finding {
        why: format!(
            "{failed} of {} of its newest run failed. The last was {} ({}, message #{}){}. The model was told, and went on.",
            count(standing.run_calls, "tool call"),
            last.name,
            last.call_id,
            last.message_number,
            error.unwrap_or_default()
        ),
        remedy: (standing.session.status == SessionStatus::Completed.as_str()).then(|| {
            format!(
                "If its answer suffers from that, mend the tool and ask again:\nwakeful session send {} 'TEXT'",
                standing.session.session_id
            )
        }),
    })
}

/// The beginning of a text that may be long.
fn bounded(text: &str) -> String {
    match text.char_indices().nth(300) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Returns the three commands that resolve a call.
pub(in crate::command) fn resolve_call(session_id: &str, call_id: &str) -> String {
    let call_id = quoted(call_id);
    let command = format!("wakeful session resolve {session_id} {call_id}");
    format!("{command} --happened 'RESULT'\n{command} --did-not-happen\n{command} --let-model-decide\n")
}

/// Returns the two commands that resolve a delivery; the second one sends it again.
pub(in crate::command) fn resolve_delivery(session_id: &str, delivery_id: &str) -> String {
    let command = format!("wakeful session resolve {session_id} {delivery_id}");
    format!("{command} --happened ''\n{command} --did-not-happen\n")
}

/// Quotes a word for a shell. Call ids come from the provider and may hold any character.
pub(super) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.:/".contains(c);
    if !word.is_empty() && word.chars().all(plain) && !word.starts_with('-') {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}
