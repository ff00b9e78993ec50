//! Who may do what over HTTP: tokens with scopes, spaces, agents and users, and the user that a conversation belongs to.

mod agents;
mod audit;
mod claims;
mod jwt;
mod open;
pub(crate) mod stage;
mod streams;
mod tokens;
mod users;

use crate::support::Database;
use reqwest::{Method, StatusCode};
use serde_json::json;
use stage::{As, Stage, TOKEN, problem, send};
use std::path::Path;
use wakeful_http::access::{OpenTo, RULES, Rule};

/// A path that names nothing that exists.
fn concrete(path: &str) -> String {
    path.replace("{id}", "none").replace("{other}", "none").replace("{conversation_id}", "none")
}

#[tokio::test]
async fn every_route_refuses_a_scope_below_the_one_that_the_table_says_and_takes_the_others() {
    let stage = Stage::new("").await;
    for scope in ["read", "operate", "admin"] {
        let token = stage.token(&["--scope", scope]).await;
        for rule in RULES {
            let method: Method = rule.method.parse().unwrap();
            let request = stage.request(&token, method, &concrete(rule.path)).body("{}");
            let (status, body) = send(request).await;
            let needed = rule.needs.as_str();
            let rank =
                |scope: &str| ["read", "operate", "admin"].iter().position(|one| *one == scope).unwrap();
            let said = format!("{scope}: {} {}: {status} {body}", rule.method, rule.path);
            if rank(scope) < rank(needed) {
                assert_eq!(
                    (status, &body["needed_scope"]),
                    (StatusCode::FORBIDDEN, &json!(needed)),
                    "{said}"
                );
                assert_eq!(body["scope"], scope, "{said}");
            } else {
                assert!(!matches!(status.as_u16(), 401 | 403 | 405 | 500..), "{said}");
            }
        }
    }
}

#[tokio::test]
async fn a_limited_token_may_ask_only_what_is_open_to_its_kind() {
    let stage = Stage::new("").await;
    let (of_space, of_agent) = (
        stage.token(&["--scope", "operate", "--space", "acme"]).await,
        stage.token(&["--scope", "operate", "--agent", "default"]).await,
    );
    let of_user = stage.user(TOKEN, "ann").await;
    for (token, kind) in [(of_space, OpenTo::Spaces), (of_agent, OpenTo::Agents), (of_user, OpenTo::Users)] {
        for rule in RULES.iter().filter(|rule| rule.needs.as_str() != "admin") {
            let method: Method = rule.method.parse().unwrap();
            let (status, body) = send(stage.request(&token, method, &concrete(rule.path)).body("{}")).await;
            let refused = status == StatusCode::FORBIDDEN;
            assert_eq!(refused, rule.open_to < kind, "{kind:?}: {} {}: {body}", rule.method, rule.path);
        }
    }
}

/// Routes whose callers prove themselves in other ways, or that everyone may ask.
const OPEN: [&str; 13] = [
    "/healthz",
    "/readyz",
    "/sessions/{id}/export",
    "/v1/links/look",
    "/v1/links/use",
    "/v1/triggers/email/postmark",
    "/v1/triggers/email/mailgun",
    "/v1/triggers/email/mailgun/mime",
    "/v1/triggers/email/ses",
    "/v1/triggers/messenger/slack",
    "/v1/triggers/messenger/slack/actions",
    "/v1/triggers/messenger/telegram",
    "/v1/triggers/messenger/webhook",
];

#[test]
fn every_route_of_the_sources_is_in_the_table() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = Vec::new();
    for folder in ["worker/http/src", "worker/channels/src"] {
        routes(&root.join(folder), &mut found);
    }
    assert!(found.len() >= RULES.len(), "the routes are read: {found:?}");
    // The listener for monitoring has it, which is not the API and asks for no token.
    found.retain(|(_, path)| path != "/metrics");
    let at = |path: &str| -> Vec<String> {
        if path.starts_with("/email/") || path.starts_with("/messenger/") {
            return vec![format!("/v1/triggers{path}")];
        }
        vec![path.to_owned(), format!("/v1{path}")]
    };
    for (method, path) in &found {
        let known =
            at(path).iter().any(|path| OPEN.contains(&path.as_str()) || Rule::of(method, path).is_some());
        assert!(known, "{method} {path} has no rule in worker/http/src/access/rules.rs");
    }
    for rule in RULES {
        let known = found
            .iter()
            .any(|(method, path)| *method == rule.method && at(path).iter().any(|at| at == rule.path));
        assert!(known, "there is no route {} {}", rule.method, rule.path);
    }
}

/// The methods and paths of all routes in the sources below `dir`.
pub(crate) fn routes(dir: &Path, found: &mut Vec<(String, String)>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            routes(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = std::fs::read_to_string(&path).unwrap();
            let source = source.split("#[cfg(test)]").next().unwrap();
            for call in source.split(".route(").skip(1) {
                let Some(path) = call.trim_start().strip_prefix('"').and_then(|rest| rest.split('"').next())
                else {
                    continue;
                };
                // Up to the end of this call: its handlers are named before the next method or statement.
                let end =
                    ["\n        .", "\n    .", ";", "\n}"].iter().filter_map(|end| call.find(end)).min();
                let call = &call[..end.unwrap_or(call.len())];
                let methods = ["get", "post", "put", "delete"];
                let of_call = methods.iter().filter(|method| {
                    call.contains(&format!(" {method}(")) || call.contains(&format!(".{method}("))
                });
                let before = found.len();
                found.extend(of_call.map(|method| (method.to_uppercase(), path.to_owned())));
                if found.len() == before {
                    // The handler is a variable: of the messengers, which take POST.
                    found.push(("POST".to_owned(), path.to_owned()));
                }
            }
        }
    }
}

#[tokio::test]
async fn a_server_without_a_token_still_takes_tokens_and_asks_nobody_else_for_one() {
    let database = Database::new().await;
    let stage = Stage::on(database, "", None).await;
    let reader = stage.token(&["--scope", "read"]).await;
    let message = json!({"text": "Hi"});
    assert_eq!(stage.post(&reader, "/v1/chat/c1/messages", &message).await.0, StatusCode::FORBIDDEN);
    assert_eq!(stage.get(&reader, "/v1/sessions").await.0, StatusCode::OK);
    let client = stage.process.client();
    assert_eq!(client.post("/v1/chat/c1/messages", &message).await.0, StatusCode::ACCEPTED);
    let foreign = client.get_request("/v1/sessions").header("origin", "https://evil.example");
    let (status, body) = send(foreign).await;
    assert_eq!(status, StatusCode::FORBIDDEN, "{}", problem(&body));
    let wrong: As = "wkt_0000000000000000_".to_owned() + &"0".repeat(64);
    assert_eq!(stage.get(&wrong, "/v1/sessions").await.0, StatusCode::UNAUTHORIZED);
}
