//! The page of a link by which a person acts once, without a login. Looking at it changes nothing: programs that open every link of
//! a mail do no harm. The act is a form.

use crate::api::part;
use crate::form::{Form, see_other};
use crate::frame::{Frame, page};
use crate::refusal::Refusal;
use crate::text::Moment;
use crate::visit::{Note, Visit};
use askama::Template;
use axum::extract::Path;
use axum::http::StatusCode;
use axum::http::header::SET_COOKIE;
use axum::response::Response;
use serde::Deserialize;
use serde_json::json;

/// What a link would do: `POST /v1/links/look`.
#[derive(Clone, Debug, Deserialize)]
struct Link {
    act: String,
    session_id: String,
    agent: String,
    conversation_id: String,
    status: String,
    about: Option<String>,
    expires_at: Moment,
    used_at: Option<Moment>,
    used_by: Option<String>,
    state: String,
}

impl Link {
    fn title(&self) -> &'static str {
        match self.act.as_str() {
            "retry" => "Go on with a run that failed",
            "answer" => "Answer the agent’s question",
            "resolve" => "Say how an effect ended",
            "approve" => "Approve a call, or decline it",
            _ => "Send a message again",
        }
    }

    fn is(&self, state: &str) -> bool {
        self.state == state
    }

    /// What a press does.
    fn does(&self) -> &'static str {
        match self.act.as_str() {
            "retry" => {
                "The run goes on from its last commit, with the same agent and model. Work that is done is not done again."
            }
            "answer" => "The agent gets the answer as the result of its question and goes on.",
            "approve" => {
                "Nothing ran yet. If you approve, this call runs once, with these arguments. If you decline, it does not run, and the agent goes on without it. What you say is final."
            }
            "resolve" => {
                "The effect began, and its end is unknown. Look where it would be seen, then say what you found. What you say is final."
            }
            _ => "The message is sent again under its id, to the same recipients.",
        }
    }
}

#[derive(Template)]
#[template(path = "act.html")]
struct Act {
    frame: Frame,
    token: String,
    one: Link,
}

pub(crate) async fn show(visit: Visit, Path(token): Path<String>) -> Result<Response, Refusal> {
    let one = look(&visit, &token).await?;
    let mut frame = Frame::bare(&visit, one.title());
    frame.note.clone_from(&visit.note);
    Ok(page(&Act { frame, token: part(&token), one }))
}

async fn look(visit: &Visit, token: &str) -> Result<Link, Refusal> {
    let said = visit.api.look("/v1/links/look", &json!({"token": token})).await?;
    serde_json::from_value(said).map_err(|error| Refusal::broken("the link", &error))
}

/// Presses are not remembered here as those of other forms are: the link itself is used up once, in the act's transaction.
pub(crate) async fn act(Path(token): Path<String>, form: Form) -> Result<Response, Refusal> {
    let back = format!("{}/act/{}", form.visit.base(), part(&token));
    let mut body = json!({"token": token});
    for name in ["answer", "outcome", "result"] {
        if let Some(value) = form.filled(name) {
            body[name] = value.into();
        }
    }
    let (said, went_well) = match form.visit.api.post("/v1/links/use", &body, None).await {
        Ok(_) => ("It is done. This link is used up.".to_owned(), true),
        Err(refusal)
            if refusal.status == StatusCode::CONFLICT || refusal.status == StatusCode::BAD_REQUEST =>
        {
            (format!("Nothing was done by this press: {}.", refusal.detail.trim_end_matches('.')), false)
        }
        Err(refusal) => return Err(refusal),
    };
    let mut response = see_other(&back);
    let typed = if went_well { None } else { form.keep() };
    let note = Note { said, went_well, next: None, typed };
    response.headers_mut().append(SET_COOKIE, form.visit.leave_note(note));
    Ok(response)
}
