//! Servers by HTTP: what is known of a call whose answer is none.

use super::{TOOLS, call_status, calls, folder, model_that_calls, one_run, told};
use crate::cli::run;
use crate::support::model::turns_since_user;
use crate::support::{Answer, Database, ModelServer, Options, mcp};
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// What a server does with calls of tools. All but `Refuse`, `Forget` and `Invalid` keep the call, as if they had carried it out.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Does {
    Answer,
    /// Ends the connection within the answer.
    Cut,
    /// Says that there are too many.
    Refuse,
    /// Says with this code of JSON-RPC that it failed.
    Fail(i64),
    /// Answers 500 with an error that names no request.
    FailWithoutId,
    /// Goes on with the call as a task.
    Task,
    /// Says that the arguments do not fit.
    Invalid,
    /// Lists its tools without end.
    Pages,
}

/// A server, with a session of this number.
struct Desk {
    folder: PathBuf,
    does: Mutex<Does>,
    session: Mutex<u32>,
    /// The tokens of all requests.
    tokens: Mutex<Vec<String>>,
}

impl Desk {
    /// Begins to listen, and returns its URL.
    async fn open(folder: &Path) -> (Arc<Desk>, String) {
        let desk = Arc::new(Desk {
            folder: folder.to_owned(),
            does: Mutex::new(Does::Answer),
            session: Mutex::new(1),
            tokens: Mutex::default(),
        });
        let posts = Arc::clone(&desk);
        let route =
            post(move |headers: HeaderMap, body: String| async move { posts.handled(&headers, &body) });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/mcp", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, Router::new().route("/mcp", route)).await });
        (desk, url)
    }

    fn is_to(&self, does: Does) {
        *self.does.lock().unwrap() = does;
    }

    fn handled(&self, headers: &HeaderMap, body: &str) -> Response {
        let header = |name: &str| headers.get(name).map(|value| value.to_str().unwrap().to_owned());
        self.tokens.lock().unwrap().push(header("authorization").unwrap_or_default());
        let message: Value = serde_json::from_str(body).unwrap();
        let session = self.session.lock().unwrap().to_string();
        let without_id = |status: StatusCode, code: i64, text: &str| {
            let error = json!({"code": code, "message": text});
            (status, axum::Json(json!({"jsonrpc": "2.0", "error": error, "id": null}))).into_response()
        };
        // As the protocol's reference server does.
        if message["method"] != "initialize" && header("mcp-session-id").as_ref() != Some(&session) {
            return without_id(StatusCode::BAD_REQUEST, -32000, "Bad Request: No valid session ID provided");
        }
        let error = |code: i64| json!({"jsonrpc": "2.0", "id": message["id"], "error": {"code": code, "message": "It broke."}});
        let does = *self.does.lock().unwrap();
        let answer = match (does, message["method"].as_str()) {
            (Does::Refuse, Some("tools/call")) => return StatusCode::TOO_MANY_REQUESTS.into_response(),
            (Does::Invalid, Some("tools/call")) => Some(error(-32602)),
            (Does::Pages, Some("tools/list")) => {
                let page = json!({"tools": [], "nextCursor": "more"});
                Some(json!({"jsonrpc": "2.0", "id": message["id"], "result": page}))
            }
            (Does::Cut | Does::Fail(_) | Does::FailWithoutId | Does::Task, Some("tools/call")) => {
                mcp::answer(&message, &self.folder);
                match does {
                    Does::Fail(code) => Some(error(code)),
                    Does::FailWithoutId => {
                        return without_id(
                            StatusCode::INTERNAL_SERVER_ERROR,
                            -32603,
                            "Internal server error",
                        );
                    }
                    Does::Task => {
                        let now = "2026-11-28T00:00:00Z";
                        let task = json!({"resultType": "task", "taskId": "1", "status": "working", "createdAt": now,
                            "lastUpdatedAt": now, "ttlMs": null});
                        Some(json!({"jsonrpc": "2.0", "id": message["id"], "result": task}))
                    }
                    _ => {
                        let cut = futures::stream::iter([Ok("{"), Err(std::io::Error::other("cut"))]);
                        return ([("content-type", "application/json")], Body::from_stream(cut))
                            .into_response();
                    }
                }
            }
            _ => mcp::answer(&message, &self.folder),
        };
        match answer {
            Some(answer) => ([("mcp-session-id", session)], axum::Json(answer)).into_response(),
            None => StatusCode::ACCEPTED.into_response(),
        }
    }
}

/// An agent with the tools of the server at `url`.
fn desk_at(model: &ModelServer, url: &str) -> Options {
    let options = Options::new().env("OPENAI_BASE_URL", &model.url).env("WAKEFUL_MCP__DESK__TOKEN", "s3cret");
    std::fs::create_dir(folder(&options)).unwrap();
    options.config(TOOLS).config(&format!("[mcp.desk]\nurl = \"{url}\""))
}

#[tokio::test]
async fn a_server_by_http_gets_its_token_and_is_called_in_a_new_session_when_it_began_anew() {
    let folder = tempfile::TempDir::new().unwrap();
    let (desk, url) = Desk::open(folder.path()).await;
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| match turns_since_user(body) {
        0 => Answer::call("desk_pay", json!({"table": 7})),
        _ => Answer::text("Done."),
    })
    .await;
    let options = desk_at(&model, &url);
    assert_eq!(run(&options, &database.url, &["mcp", "pull"]).await.code, 0);
    let process = options.serve(&database).await;
    one_run(&process.client()).await;
    *desk.session.lock().unwrap() = 2;
    one_run(&process.client()).await;
    let bodies = model.bodies();
    let body: Value = serde_json::from_str(bodies.last().unwrap()).unwrap();
    assert_eq!(body["messages"].as_array().unwrap().last().unwrap()["content"], "pay: table 7");
    assert_eq!(calls(folder.path()).len(), 2);
    assert!(desk.tokens.lock().unwrap().iter().all(|token| token == "Bearer s3cret"));
}

#[tokio::test]
async fn a_guarded_call_is_uncertain_unless_the_server_did_not_take_it_and_is_made_once() {
    let folder = tempfile::TempDir::new().unwrap();
    let (desk, url) = Desk::open(folder.path()).await;
    let pulled = {
        let model = model_that_calls("desk_pay", 7).await;
        let options = desk_at(&model, &url);
        assert_eq!(run(&options, "postgres://none", &["mcp", "pull"]).await.code, 0);
        std::fs::read_to_string(options.path("mcp/desk.json")).unwrap()
    };
    for (does, status, text, made) in [
        (Does::Answer, "done", "pay: table 7", 1),
        (Does::Refuse, "failed", "too many requests now", 0),
        (Does::Invalid, "failed", "It broke.", 0),
        (Does::Cut, "uncertain", "OUTCOME UNKNOWN", 1),
        (Does::Fail(-32603), "uncertain", "it says \"It broke.\"", 1),
        (Does::Fail(-32001), "uncertain", "OUTCOME UNKNOWN", 1),
        (Does::FailWithoutId, "uncertain", "OUTCOME UNKNOWN", 1),
        (Does::Task, "uncertain", "it goes on with the call", 1),
    ] {
        desk.is_to(does);
        let before = calls(folder.path()).len();
        let database = Database::new().await;
        let model = model_that_calls("desk_pay", 7).await;
        let options = desk_at(&model, &url);
        std::fs::create_dir(options.path("mcp")).unwrap();
        std::fs::write(options.path("mcp/desk.json"), &pulled).unwrap();
        let process = options.serve(&database).await;
        let id = one_run(&process.client()).await;
        assert_eq!(call_status(&database, &id).await, status, "{does:?}: {}", told(&model));
        assert!(told(&model).contains(text), "{does:?}: {}", told(&model));
        assert_eq!(calls(folder.path()).len() - before, made, "{does:?}: calls that reached the server");
    }
}

#[tokio::test]
async fn a_server_that_does_not_listen_was_not_called_and_a_key_in_its_url_is_told_to_nobody() {
    let folder = tempfile::TempDir::new().unwrap();
    let (_desk, url) = Desk::open(folder.path()).await;
    let database = Database::new().await;
    let model = model_that_calls("desk_pay", 7).await;
    let mut options = desk_at(&model, &url);
    assert_eq!(run(&options, &database.url, &["mcp", "pull"]).await.code, 0);
    // Nobody listens at port 1. The address is not written as libraries write it.
    options.config = options.config.replace(&url, "http://127.0.0.1:1?key=tvly-s3cret");
    let process = options.serve(&database).await;
    let id = one_run(&process.client()).await;
    assert!(told(&model).contains("cannot be reached, so nothing was done"), "{}", told(&model));
    assert_eq!(call_status(&database, &id).await, "failed");
    assert!(!told(&model).contains("tvly") && !process.log().contains("tvly"), "{}", process.log());
}

#[tokio::test]
async fn a_server_that_lists_tools_without_end_is_given_up() {
    let folder = tempfile::TempDir::new().unwrap();
    let (desk, url) = Desk::open(folder.path()).await;
    desk.is_to(Does::Pages);
    let model = model_that_calls("desk_pay", 7).await;
    let pulled = run(&desk_at(&model, &url), "postgres://none", &["mcp", "pull"]).await;
    assert!(pulled.code == 7 && pulled.err.contains("more than 100 pages"), "{} {}", pulled.code, pulled.err);
}
