//! The API against its own OpenAPI document: Schemathesis makes requests from it, right and wrong ones, with each scope and
//! with a token of another space. It looks for 5xx, and for answers that the document does not know.

use crate::access::stage::{Stage, TOKEN};
use crate::support::eventually;
use serde_json::json;
use std::process::Stdio;
use tokio::process::Command;

/// The same requests each time.
const SEED: &str = "20261123";
/// Requests that are made up for each operation, beside those that cover each constraint of its schema.
const EXAMPLES: &str = "6";
/// The seconds that a run may take. A run that is cut off still fails for what it found.
const SECONDS: &str = "100";
const CHECKS: &str = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,\
                      response_schema_conformance,ignored_auth,unsupported_method,allow_header_conformance,use_after_free";

#[tokio::test]
#[ignore = "needs schemathesis: make test-peers"]
async fn no_request_gets_a_5xx_or_an_answer_that_the_document_does_not_know() {
    let stage = Stage::new("").await;
    let session = stage.chat(TOKEN, "c1", json!({"text": "Hello?", "user_id": "ann"})).await;
    let path = format!("/v1/sessions/{session}");
    eventually("the run to complete", || async {
        (stage.get(TOKEN, &path).await.1["status"] == "completed").then_some(())
    })
    .await;
    let daily = json!({"name": "daily", "cron": "0 9 * * *", "prompt": "What is new?"});
    stage.post(TOKEN, "/v1/schedules", &daily).await;
    // Ids that exist, for operations that would otherwise find nothing.
    let known = [
        ("sessions", session.as_str()),
        ("conversations", "c1"),
        ("schedules", "daily"),
        // It finds the ids of tokens in the list, and would revoke its own.
        ("tokens", "tok_none"),
    ];
    let operations: String = known
        .iter()
        .map(|(of, id)| {
            format!("[[operations]]\ninclude-path-regex = \"^/v1/{of}/\"\nparameters = {{ \"path.id\" = \"{id}\" }}\n")
        })
        .collect();
    let callers = [
        ("read", "default", stage.token(&["--scope", "read"]).await),
        ("operate", "default", stage.token(&["--scope", "operate"]).await),
        ("admin", "default", stage.token(&["--scope", "admin"]).await),
        ("another space", "elsewhere", stage.token(&["--scope", "operate", "--space", "elsewhere"]).await),
    ];
    let peers = std::env::var("WAKEFUL_PEERS").expect("WAKEFUL_PEERS is set by `make test-peers`");
    let runs = callers.iter().map(|(who, space, token)| {
        let (peers, stage) = (&peers, &stage);
        let config = tempfile::TempDir::with_prefix("wakeful-schemathesis-").unwrap();
        // A space that it makes up is empty.
        let of_all = format!("[parameters]\n\"header.X-Wakeful-Space\" = \"{space}\"\n{operations}");
        std::fs::write(config.path().join("schemathesis.toml"), of_all).unwrap();
        async move {
            let output = Command::new(format!("{peers}/schemathesis/bin/st"))
                .args(["run", &format!("{}/v1/openapi.json", stage.process.url())])
                .args(["--header", &format!("Authorization: Bearer {token}")])
                .args(["--phases", "coverage,fuzzing", "--checks", CHECKS, "--seed", SEED])
                .args([
                    "--max-examples",
                    EXAMPLES,
                    "--max-time",
                    SECONDS,
                    "--no-shrink",
                    "--continue-on-failure",
                ])
                // A stream of a session that exists never ends.
                .args(["--exclude-path", "/v1/sessions/{id}/stream", "--request-timeout", "20"])
                .args(["--suppress-health-check", "all", "--warnings", "off", "--no-color"])
                .args(["--generation-with-security-parameters", "false"])
                .args(["--generation-database", "none"])
                .env("PYTHONPATH", concat!(env!("CARGO_MANIFEST_DIR"), "/peers"))
                .env("PYTHONDONTWRITEBYTECODE", "1")
                .env("SCHEMATHESIS_HOOKS", "schemathesis_hooks")
                .current_dir(config.path())
                .stdin(Stdio::null())
                .kill_on_drop(true)
                .output()
                .await
                .expect("schemathesis is installed");
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            (*who, output.status, said + &String::from_utf8_lossy(&output.stderr))
        }
    });
    for (who, status, said) in futures::future::join_all(runs).await {
        assert!(said.contains("Coverage") && said.contains("Fuzzing"), "{who}: {said}");
        assert!(status.success(), "with a token of {who}:\n{said}");
    }
    let client = stage.process.client();
    assert!(client.get("/healthz").await.0.is_success(), "the server lives");
    let log = stage.process.log();
    assert!(!log.contains("panicked"), "{log}");
}
