//! Forms: each carries a word against other sites' forms and one against the second press.

use crate::press::Outcome;
use crate::refusal::Refusal;
use crate::seal::random_word;
use crate::typed::Typed;
use crate::visit::{Note, Visit};
use axum::body::to_bytes;
use axum::extract::{FromRequest, Request};
use axum::http::header::{LOCATION, SET_COOKIE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};

/// The largest form: a message of the API may have as much.
const FORM_BYTES: usize = 1 << 20;
/// The largest form of a stranger, and of acts that take a word or two. The server's door bounds larger ones in sum.
const SHORT_BYTES: usize = 16 << 10;
/// The paths of those acts. They are about the visitor and not about what is in a space, so they are taken from the pages of every
/// space.
const SHORT: [&str; 4] = ["/login", "/logout", "/theme", "/space"];

/// A form that a page of this console sent.
pub(crate) struct Form {
    pub visit: Visit,
    path: String,
    pairs: Vec<(String, String)>,
}

impl<S: Send + Sync> FromRequest<S> for Form {
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Form, Refusal> {
        let visit = request.extensions().get::<Visit>().cloned();
        let visit = visit.ok_or_else(|| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "no visitor"))?;
        let path = request.uri().path().to_owned();
        let of_visitor = SHORT.contains(&path.as_str());
        let is_short = of_visitor || visit.is_stranger(request.headers());
        let most = if is_short { SHORT_BYTES } else { FORM_BYTES };
        let body = to_bytes(request.into_body(), most).await;
        let body = body.map_err(|_| {
            Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the form has more than {} KiB", most >> 10))
        })?;
        let pairs = form_urlencoded::parse(&body).into_owned().collect();
        let form = Form { visit, path, pairs };
        let word = form.get("word");
        let is_ours = form.visit.knows(word) || (of_visitor && form.visit.knows_login(word));
        if !is_ours {
            let detail = "the page was opened in another space, before the server started, under another login, or under one that \
                has ended since: nothing was done. Open it again and press once more";
            return Err(Refusal::new(StatusCode::FORBIDDEN, detail));
        }
        Ok(form)
    }
}

impl Form {
    /// A field, or an empty text.
    pub fn get(&self, name: &str) -> &str {
        self.pairs.iter().find(|(own, _)| own == name).map_or("", |(_, value)| value)
    }

    /// Every value of a field that may be there several times.
    pub fn all(&self, name: &str) -> Vec<&str> {
        self.pairs.iter().filter(|(own, _)| own == name).map(|(_, value)| value.as_str()).collect()
    }

    /// A field that was filled in.
    pub fn filled(&self, name: &str) -> Option<String> {
        let value = self.get(name).trim().replace("\r\n", "\n");
        (!value.is_empty()).then_some(value)
    }

    /// The key under which the API knows this press.
    pub fn key(&self) -> String {
        format!("console-{}", self.press())
    }

    /// What tells this press from others. All forms of a page carry the same word, and only a press of the same button with the
    /// same fields is a second press.
    fn press(&self) -> String {
        let mut press = Sha256::new_with_prefix(&self.path);
        for (name, value) in self.pairs.iter().filter(|(name, _)| name != "word") {
            for text in [name, value] {
                press.update((text.len() as u64).to_le_bytes());
                press.update(text);
            }
        }
        // A form without a word is of no page of this console's.
        if self.get("press").is_empty() {
            press.update(random_word());
        }
        hex::encode(press.finalize())
    }

    /// Does what the form asks for once, and leads to where its outcome is seen. What the API refuses because things have
    /// changed meanwhile is said on the page at `back`.
    pub async fn act(
        &self,
        back: &str,
        act: impl Future<Output = Result<Outcome, Refusal>>,
    ) -> Result<Response, Refusal> {
        let done = self.visit.console.presses.once(self.press(), act).await;
        match done {
            Ok(outcome) => Ok(self.lead(&outcome)),
            Err(refusal) if is_of_the_moment(refusal.status) => {
                let said = format!("Nothing was done: {}", refusal.detail);
                Ok(self.led(back, Note { said, went_well: false, next: None, typed: self.keep() }))
            }
            Err(refusal) => Err(refusal),
        }
    }

    /// Keeps what was typed for the next page, and returns its key.
    pub fn keep(&self) -> Option<String> {
        let (action, fields) = (format!("{}{}", self.visit.base(), self.path), self.pairs.clone());
        let login = self.visit.login_id().to_owned();
        self.visit.console.typed.keep(Typed { login, action, fields })
    }

    fn lead(&self, outcome: &Outcome) -> Response {
        let Outcome { to, said, went_well, next } = outcome.clone();
        self.led(&to, Note { said, went_well, next, typed: None })
    }

    fn led(&self, to: &str, note: Note) -> Response {
        let mut response = see_other(to);
        if !note.said.is_empty() {
            response.headers_mut().append(SET_COOKIE, self.visit.leave_note(note));
        }
        response
    }

    /// Where a form asks to be led back to, if that is a page of this console.
    pub fn back(&self) -> String {
        let base = self.visit.base();
        let asked = self.get("back");
        let is_ours =
            asked.strip_prefix(&base).is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '?']));
        let is_plain = asked.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\');
        if is_ours && is_plain && !asked.contains("/../") { asked.to_owned() } else { format!("{base}/") }
    }
}

/// Whether another state of things would have let the request pass.
fn is_of_the_moment(status: StatusCode) -> bool {
    [
        StatusCode::CONFLICT,
        StatusCode::BAD_REQUEST,
        StatusCode::UNPROCESSABLE_ENTITY,
        StatusCode::TOO_MANY_REQUESTS,
        StatusCode::SERVICE_UNAVAILABLE,
    ]
    .contains(&status)
}

/// 303: the browser asks for the page with GET, so that going back and loading again repeat no act.
pub(crate) fn see_other(to: &str) -> Response {
    let mut response = StatusCode::SEE_OTHER.into_response();
    let to = HeaderValue::from_str(to).unwrap_or_else(|_| HeaderValue::from_static("/"));
    response.headers_mut().insert(LOCATION, to);
    response
}

/// An act that went well.
pub(crate) fn done(to: impl Into<String>, said: impl Into<String>) -> Outcome {
    Outcome { to: to.into(), said: said.into(), went_well: true, next: None }
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    /// Enter in a field presses the first button of its form: an operator who types why a call is declined would approve it.
    #[test]
    fn enter_decides_nothing() -> Result<(), Box<dyn Error>> {
        let mut deciding = 0;
        for template in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/templates"))? {
            let path = template?.path();
            let text = std::fs::read_to_string(&path)?;
            for form in text.split("<form").skip(1) {
                let form = form.split("</form>").next().unwrap_or_default();
                let is_field =
                    |input: &&str| !["hidden", "radio", "checkbox"].iter().any(|of| input.contains(of));
                let fields = form.split("<input").skip(1).filter_map(|rest| rest.split('>').next());
                let decides = form.matches("<button name=").count() > 1 || form.contains("class=\"danger\"");
                if decides && fields.filter(is_field).count() > 0 {
                    deciding += 1;
                    let button = form.find("<button").unwrap_or_default();
                    let before = form[..button].contains("no_default.html");
                    assert!(
                        before,
                        "{}: the first button of a form that decides is pressed by Enter",
                        path.display()
                    );
                }
            }
        }
        assert!(deciding >= 3, "{deciding}");
        Ok(())
    }
}
