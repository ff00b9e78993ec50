//! What a person does to a session from its page.

use crate::api::{part, query};
use crate::form::{Form, done};
use crate::press::Outcome;
use crate::refusal::Refusal;
use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Map, Value, json};

/// The verbs that take nothing but a reason, and what the page says after them.
const VERBS: [(&str, &str); 5] = [
    ("retry", "The run goes on from its last commit."),
    ("cancel", "The run is asked to end."),
    ("wake", "The session was looked at and goes on with what is still open."),
    ("archive", "The session is archived."),
    ("terminate", "The session has ended for good."),
];

pub(crate) async fn steer(Path((id, verb)): Path<(String, String)>, form: Form) -> Result<Response, Refusal> {
    let Some((verb, said)) = VERBS.iter().find(|(name, _)| *name == verb) else {
        return Err(Refusal::new(StatusCode::NOT_FOUND, "a session has no such button"));
    };
    let back = match form.get("back") {
        "" => format!("{}/sessions/{}", form.visit.base(), part(&id)),
        _ => form.back(),
    };
    let body = form.filled("reason").map_or_else(|| json!({}), |reason| json!({"reason": one_line(&reason)}));
    form.act(&back, async {
        form.visit.api.post(&format!("/v1/sessions/{}/{verb}", part(&id)), &body, None).await?;
        Ok(done(&back, *said))
    })
    .await
}

/// Sends a message to a session: a follow-up, or the answer to its question.
pub(crate) async fn message(Path(id): Path<String>, form: Form) -> Result<Response, Refusal> {
    let back = match form.get("back") {
        "" => format!("{}/sessions/{}", form.visit.base(), part(&id)),
        _ => form.back(),
    };
    let body = json!({"text": form.filled("text").unwrap_or_default()});
    form.act(&back, async {
        let path = format!("/v1/sessions/{}/messages", part(&id));
        let woken = form.visit.api.post(&path, &body, Some(&form.key())).await?;
        let said = match woken["outcome"].as_str() {
            Some("delivered") => "The agent has the answer.",
            Some("queued") => "The agent reads the message at its next step.",
            _ => "The message is sent.",
        };
        Ok(done(&back, said))
    })
    .await
}

/// Approves or declines a call that waits for it, with the arguments that the page showed.
pub(crate) async fn approval(Path(id): Path<String>, form: Form) -> Result<Response, Refusal> {
    let back = match form.get("back") {
        "" => format!("{}/sessions/{}", form.visit.base(), part(&id)),
        _ => form.back(),
    };
    let (verb, said) = match form.get("decision") {
        "approve" => ("approve", "The call is approved, and runs."),
        "decline" => ("decline", "The call is declined. It does not run, and the agent is told so."),
        _ => return Err(Refusal::new(StatusCode::BAD_REQUEST, "a call is approved or declined")),
    };
    let mut body = Map::new();
    for name in ["call_id", "args_sha256", "reason"] {
        if let Some(value) = form.filled(name) {
            let value = if name == "reason" { one_line(&value) } else { value };
            body.insert(name.to_owned(), value.into());
        }
    }
    form.act(&back, async {
        let path = format!("/v1/sessions/{}/{verb}", part(&id));
        form.visit.api.post(&path, &Value::Object(body), None).await?;
        Ok(done(&back, said))
    })
    .await
}

/// Says how an uncertain effect ended.
pub(crate) async fn resolve(Path(id): Path<String>, form: Form) -> Result<Response, Refusal> {
    let back = match form.get("back") {
        "" => format!("{}/sessions/{}?tab=effects", form.visit.base(), part(&id)),
        _ => form.back(),
    };
    let mut body = Map::new();
    for name in ["call_id", "delivery_id", "outcome", "result", "reason"] {
        if let Some(value) = form.filled(name) {
            let value = if name == "reason" { one_line(&value) } else { value };
            body.insert(name.to_owned(), value.into());
        }
    }
    if body.get("outcome").is_some_and(|outcome| outcome != "happened") {
        body.remove("result");
    }
    form.act(&back, async {
        form.visit
            .api
            .post(&format!("/v1/sessions/{}/resolve", part(&id)), &Value::Object(body), None)
            .await?;
        Ok(done(&back, "It is written down how the effect ended."))
    })
    .await
}

/// Makes another session of this one's beginning.
pub(crate) async fn fork(Path(id): Path<String>, form: Form) -> Result<Response, Refusal> {
    let back = format!("{}/sessions/{}/fork?at={}", form.visit.base(), part(&id), part(form.get("at")));
    let mut body = Map::new();
    if let Some(at) = form.filled("at") {
        body.insert("at".to_owned(), at.into());
    }
    // An edited message replaces the one at which the session is cut.
    let edited =
        form.filled("text").filter(|text| *text != form.get("original").trim().replace("\r\n", "\n"));
    if let Some(text) = edited {
        body.insert("text".to_owned(), text.into());
    }
    for name in ["model", "tool_mode", "prompt"] {
        if let Some(value) = form.filled(name) {
            body.insert(name.to_owned(), value.into());
        }
    }
    if let Some(more) = form.filled("append") {
        body.insert("system_prompt_patch".to_owned(), json!({"append": more}));
    }
    form.act(&back, async {
        let path = format!("/v1/sessions/{}/fork", part(&id));
        let forked = form.visit.api.post(&path, &Value::Object(body), Some(&form.key())).await?;
        let new = forked["session_id"].as_str().unwrap_or_default();
        let base = form.visit.base();
        let compare = query(&[("left", &id), ("right", new)]);
        let next = ("Compare it with its parent".to_owned(), format!("{base}/compare{compare}"));
        let done = done(format!("{base}/sessions/{}", part(new)), "This is the fork.");
        Ok(Outcome { next: Some(next), ..done })
    })
    .await
}

/// A reason of the journal is one line.
pub(super) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
