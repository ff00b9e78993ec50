//! What leaves the process: nothing goes to a host that the configuration does not name.

use crate::support::{Answer, Database, ModelServer, Options};
use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::any;
use serde_json::json;

/// A server that sends every request elsewhere, with this status.
fn redirects(status: StatusCode, to: String) -> String {
    let listener = crate::support::servers::listen();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let answer = move || {
        let to = to.clone();
        async move { (status, [(header::LOCATION, to)]) }
    };
    let router = Router::new().fallback(any(answer));
    drop(crate::support::servers::runtime().spawn(async move { axum::serve(listener, router).await }));
    url
}

#[tokio::test]
async fn a_provider_that_redirects_does_not_get_the_prompt_sent_to_another_host() {
    for status in [StatusCode::TEMPORARY_REDIRECT, StatusCode::PERMANENT_REDIRECT, StatusCode::FOUND] {
        let database = Database::new().await;
        let other = ModelServer::turns(vec![Answer::text("Tell me more.")]).await;
        let provider = redirects(status, format!("{}/chat/completions", other.url));
        let options = Options::new()
            .env("OPENAI_BASE_URL", &provider)
            .env("OPENAI_API_KEY", "a key of the tests")
            .config("[agents.default]\nsystem_prompt = \"You are a test.\"\nmodel = \"openai/test\"");
        let process = options.serve(&database).await;
        let client = process.client();
        let (_, woken) = client.post("/v1/chat/c1/messages", &json!({"text": "A secret."})).await;
        let session_id = woken["session_id"].as_str().unwrap();
        let session = client.wait_for(session_id, "failed").await;
        assert_eq!(other.bodies(), Vec::<String>::new(), "{status}");
        let told = session.to_string() + &process.log();
        assert!(told.contains("redirects are not followed"), "{told}");
    }
}
