//! The console: pages for people, over the HTTP API.
//!
//! The pages speak to the API only. Each request asks the API's router in this process with the token of the person who
//! looks, so scopes, spaces and the audit hold by construction; this crate cannot reach the database. Every page reads and
//! acts without JavaScript: an act is a form, and its answer leads to the page that shows what came of it.
//!
//! This crate is internal and not stable. Programs use the crate `wakeful`.

mod api;
mod assets;
mod door;
mod draw;
mod ended;
mod form;
mod frame;
mod job;
mod list;
mod model;
mod pages;
mod press;
mod recent;
mod refusal;
mod seal;
mod search;
mod text;
mod typed;
mod visit;

use axum::Router;
use axum::body::Body;
use axum::http::uri::{PathAndQuery, Uri};
use axum::http::{Extensions, Method, Request, Response, StatusCode, Version};
use axum::middleware::from_fn_with_state;
use ended::Ended;
use press::Presses;
use recent::Recent;
use seal::Seal;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tower::ServiceExt as _;
use tower_service::Service;

/// Where the pages are.
pub const ROOT: &str = "/console";

/// How the console is set up.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// The server's own token, of which the key of the cookies is made.
    pub token: Option<String>,
    /// The path below which a proxy serves all this, without a slash at its end; empty for none.
    pub base_path: String,
    /// Whether there are pages at all.
    pub enabled: bool,
}

/// What all requests of the pages share.
pub(crate) struct Console {
    api: Router,
    settings: Settings,
    seal: Seal,
    ended: Ended,
    presses: Presses,
    recent: Recent,
    typed: typed::Kept,
}

/// What the front line knows of a request, before a router sees it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outside {
    extensions: Extensions,
    version: Version,
}

/// The API with the console next to it. Below the base path both are there too. `guarded` puts the server's door before
/// the pages, which bounds how long a form takes and what forms hold in memory.
pub fn mount(api: Router, settings: Settings, guarded: impl FnOnce(Router) -> Router) -> Router {
    let base_path = settings.base_path.clone();
    let pages = settings.enabled.then(|| {
        let seal = Seal::new(settings.token.as_deref());
        let console = Arc::new(Console {
            api: api.clone(),
            settings,
            seal,
            ended: Ended::default(),
            presses: Presses::default(),
            recent: Recent::default(),
            typed: typed::Kept::default(),
        });
        let door = from_fn_with_state(Arc::clone(&console), door::door);
        guarded(pages::router().with_state(console)).layer(door)
    });
    Router::new().fallback_service(Mount { api, pages, base_path: base_path.into() })
}

/// Gives each request to the API or to the pages.
#[derive(Clone)]
struct Mount {
    api: Router,
    pages: Option<Router>,
    base_path: Arc<str>,
}

impl Service<Request<Body>> for Mount {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if let Some(inner) = within(request.uri(), &self.base_path) {
            *request.uri_mut() = inner;
        }
        let path = request.uri().path();
        let is_page = path.strip_prefix(ROOT).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        let Some(pages) = self.pages.clone() else { return Box::pin(self.api.clone().oneshot(request)) };
        if is_page {
            // The router changes the request's extensions, and the API has to see those from outside.
            let outside = Outside { extensions: request.extensions().clone(), version: request.version() };
            request.extensions_mut().insert(outside);
            return Box::pin(pages.oneshot(request));
        }
        let leads = path == "/" && matches!(*request.method(), Method::GET | Method::HEAD);
        let (api, to) = (self.api.clone(), format!("{}{ROOT}/", self.base_path));
        Box::pin(async move {
            let response = api.oneshot(request).await?;
            // A program may have a first page of its own.
            let has_none = leads && response.status() == StatusCode::NOT_FOUND;
            Ok(if has_none { form::see_other(&to) } else { response })
        })
    }
}

/// The address without the base path, if it is below that.
fn within(uri: &Uri, base_path: &str) -> Option<Uri> {
    if base_path.is_empty() {
        return None;
    }
    let path = uri.path_and_query()?.as_str();
    let rest = path.strip_prefix(base_path)?;
    let rest = match rest.chars().next() {
        None => "/".to_owned(),
        Some('/') => rest.to_owned(),
        Some('?') => format!("/{rest}"),
        Some(_) => return None,
    };
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(rest.parse::<PathAndQuery>().ok()?);
    Uri::from_parts(parts).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_base_path_is_taken_away_and_nothing_else() {
        let within = |path: &str| within(&path.parse().unwrap(), "/wakeful").map(|uri| uri.to_string());
        assert_eq!(within("/wakeful/v1/sessions?limit=1").as_deref(), Some("/v1/sessions?limit=1"));
        assert_eq!(within("/wakeful").as_deref(), Some("/"));
        assert_eq!(within("/wakeful?x=1").as_deref(), Some("/?x=1"));
        assert_eq!(within("/wakefulness"), None);
        assert_eq!(within("/v1/sessions"), None);
    }
}
