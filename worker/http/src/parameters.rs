//! Parameters of the query: a request with one that its route does not take is refused.
//!
//! A handler that reads a query refuses unknown names itself. But most handlers read none, and then `?dry_run=true` of a
//! request that has it in its body would be ignored, and the request would act. So one layer compares the names with those that
//! the OpenAPI document has for the route.

use crate::openapi::{Operation, query_names};
use crate::problem::Problem;
use axum::extract::{MatchedPath, Query, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::{Arc, OnceLock};

/// The names of each method and path. They are looked up when a request has a query first.
type Names = Vec<(&'static str, &'static str, Vec<String>)>;

/// What each route takes.
#[derive(Clone)]
pub(crate) struct Parameters {
    of_channels: fn() -> Vec<Operation>,
    names: Arc<OnceLock<Names>>,
}

impl Parameters {
    pub(crate) fn new(of_channels: fn() -> Vec<Operation>) -> Parameters {
        Parameters { of_channels, names: Arc::default() }
    }

    /// A route that the document does not have takes none.
    fn of(&self, method: &Method, path: &str) -> &[String] {
        let all = self.names.get_or_init(|| {
            let operations = crate::operations().into_iter().chain((self.of_channels)());
            operations.map(|one| (one.method, one.path, query_names(&one))).collect()
        });
        // Every GET route takes HEAD too.
        let method = if *method == Method::HEAD { "GET" } else { method.as_str() };
        let found = all.iter().find(|(of, at, _)| *of == method && *at == path);
        found.map_or(&[], |(.., names)| names)
    }
}

/// Refuses a query with a name that the route does not take.
pub(crate) async fn known(State(parameters): State<Parameters>, request: Request, next: Next) -> Response {
    if request.uri().query().is_some_and(|query| !query.is_empty())
        && let Err(problem) = check(&parameters, &request)
    {
        return problem.into_response();
    }
    next.run(request).await
}

fn check(parameters: &Parameters, request: &Request) -> Result<(), Problem> {
    let Query(given) = Query::<Vec<(String, String)>>::try_from_uri(request.uri())?;
    let path = request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str);
    let known = parameters.of(request.method(), path);
    let Some((name, _)) = given.iter().find(|(name, _)| !known.contains(name)) else { return Ok(()) };
    let takes = if known.is_empty() {
        let in_body = if request.method() == Method::GET { "" } else { "; what it takes is in its body" };
        format!("this route takes none{in_body}")
    } else {
        let known: Vec<String> = known.iter().map(|name| format!("`{name}`")).collect();
        format!("there is {}", known.join(", "))
    };
    let name: String = name.chars().take(100).collect();
    Err(Problem::bad_request(format!("there is no query parameter `{name}`; {takes}")))
}
