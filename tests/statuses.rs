//! What each status accepts: messages, and the verbs of people.

use crate::support::{Answer, Client, Database, ModelServer, Options, Process};
use reqwest::StatusCode;
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;

const STATUSES: [&str; 10] = [
    "created",
    "queued",
    "running",
    "waiting_input",
    "needs_attention",
    "completed",
    "failed",
    "cancelled",
    "archived",
    "terminated",
];

/// A server without workers, so a session stays in the status that a test sets.
struct Still {
    database: Database,
    client: Client,
    _process: Process,
}

impl Still {
    async fn new() -> Still {
        let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
        let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
        let database = Database::new().await;
        let process = options.arg("--roles=api").serve(&database).await;
        Still { client: process.client(), database, _process: process }
    }

    /// Makes a session of this status, with the rows that belong to it. Returns its id and its run's.
    async fn session(&self, conversation: &str, status: &str) -> (String, String) {
        let answer = self.client.chat(conversation, "one").await;
        let text = |key: &str| answer[key].as_str().expect("an id").to_owned();
        let (id, run_id) = (text("session_id"), text("run_id"));
        let run = match status {
            "queued" | "running" => "running",
            "archived" | "terminated" => "completed",
            other => other,
        };
        let mut spoil =
            vec![format!("update conversation_sessions set status = '{status}' where session_id = $1")];
        if status == "created" {
            spoil.push("delete from session_runs where session_id = $1".to_owned());
        } else {
            spoil.push(format!("update session_runs set status = '{run}' where session_id = $1"));
        }
        if run != "running" {
            spoil.push("delete from jobs where session_id = $1".to_owned());
            spoil.push(
                "update conversation_counters c set open_run_id = null, last_message_number = s.last_message_number
                from conversation_sessions s where s.conversation_id = c.conversation_id and s.session_id = $1"
                    .to_owned(),
            );
        }
        for sql in spoil {
            let done = sqlx::query(AssertSqlSafe(sql.clone())).bind(&id).execute(&self.database.pool).await;
            assert_eq!(done.expect(&sql).rows_affected(), 1, "{sql}");
        }
        (id, run_id)
    }

    async fn post(&self, id: &str, verb: &str, body: Value) -> (StatusCode, Value) {
        self.client.post(&format!("/v1/sessions/{id}/{verb}"), &body).await
    }

    async fn journal(&self, id: &str) -> Vec<Value> {
        let (_, page) = self.client.get(&format!("/v1/sessions/{id}/events?limit=500")).await;
        page["items"].as_array().expect("items").clone()
    }
}

#[tokio::test]
async fn k26_a_message_in_each_status_has_its_answer() {
    let still = Still::new().await;
    for status in STATUSES {
        let (id, run_id) = still.session(status, status).await;
        let (code, answer) = still.post(&id, "messages", json!({"text": "two"})).await;
        let expected = match status {
            "queued" | "running" | "needs_attention" => Some(("queued", true)),
            "waiting_input" => Some(("delivered", true)),
            "created" | "completed" | "failed" | "cancelled" => Some(("new_run", false)),
            _ => None,
        };
        match expected {
            Some((outcome, same_run)) => {
                assert_eq!((code, &answer["outcome"]), (StatusCode::ACCEPTED, &json!(outcome)), "{status}");
                assert_eq!(answer["run_id"] == json!(run_id), same_run, "{status}: {answer}");
            }
            None => assert_eq!((code, &answer["session_status"]), (StatusCode::CONFLICT, &json!(status))),
        }
        let now = still.client.session(&id).await;
        let woken = matches!(status, "created" | "waiting_input" | "completed" | "failed" | "cancelled");
        assert_eq!(now["status"], if woken { "queued" } else { status });
        assert_eq!(now["job"].is_object(), woken || matches!(status, "queued" | "running"), "{status}");
    }
}

#[tokio::test]
async fn each_verb_is_taken_where_it_is_named_and_nowhere_else() {
    let still = Still::new().await;
    for verb in ["retry", "cancel", "archive", "terminate"] {
        for status in STATUSES {
            let (id, _) = still.session(&format!("{verb}-{status}"), status).await;
            let (code, answer) = still.post(&id, verb, json!({"reason": "a test"})).await;
            let taken = match verb {
                "retry" => matches!(status, "needs_attention" | "failed"),
                "cancel" => matches!(status, "queued" | "running" | "waiting_input" | "needs_attention"),
                "archive" => matches!(status, "created" | "completed" | "failed" | "cancelled"),
                _ => matches!(status, "created" | "completed" | "failed" | "cancelled" | "archived"),
            };
            if taken {
                assert_eq!(code, StatusCode::ACCEPTED, "{verb} {status}: {answer}");
            } else {
                assert_eq!(code, StatusCode::CONFLICT, "{verb} {status}: {answer}");
                let valid = answer["valid"].as_array().unwrap();
                assert!(!valid.contains(&json!(verb)), "{verb} {status}: {answer}");
                if verb == "archive" && matches!(status, "running" | "waiting_input" | "needs_attention") {
                    assert!(valid.contains(&json!("cancel")), "{answer}");
                }
                assert_eq!(still.client.session(&id).await["status"], status);
            }
        }
    }
}

#[tokio::test]
async fn what_is_put_away_says_so_in_its_journal_and_takes_nothing_more() {
    let still = Still::new().await;
    for (verb, status) in [("archive", "archived"), ("terminate", "terminated")] {
        let (id, _) = still.session(verb, "completed").await;
        let (code, answer) = still.post(&id, verb, json!({"reason": "the season is over"})).await;
        assert_eq!((code, &answer["status"]), (StatusCode::ACCEPTED, &json!(status)));
        let journal = still.journal(&id).await;
        let moved = journal.iter().rfind(|entry| entry["type"] == "state_transition").unwrap();
        assert_eq!(
            moved["payload"],
            json!({"from_state": "completed", "to_state": status, "reason": "the season is over"})
        );
        let ended: Vec<&Value> =
            journal.iter().filter(|entry| entry["type"] == "SESSION_TERMINATED").collect();
        assert_eq!(ended.len(), usize::from(verb == "terminate"));
        assert!(ended.iter().all(|entry| entry["payload"]["reason"] == "the season is over"), "{ended:?}");
        assert!(still.client.session(&id).await["completed_at"].is_string());
        for again in ["messages", "retry", "cancel", "archive"] {
            let body = if again == "messages" { json!({"text": "two"}) } else { json!({}) };
            assert_eq!(still.post(&id, again, body).await.0, StatusCode::CONFLICT, "{verb} then {again}");
        }
        let (code, _) = still.post(&id, "terminate", json!({})).await;
        assert_eq!(code == StatusCode::ACCEPTED, verb == "archive");
    }
}

#[tokio::test]
async fn the_reason_of_a_retry_is_in_the_journal() {
    let still = Still::new().await;
    let (id, _) = still.session("c1", "failed").await;
    let (code, _) = still.post(&id, "retry", json!({"reason": "the model is back"})).await;
    assert_eq!(code, StatusCode::ACCEPTED);
    let journal = still.journal(&id).await;
    let moved = journal.iter().rfind(|entry| entry["type"] == "state_transition").unwrap();
    assert_eq!(
        moved["payload"],
        json!({"from_state": "failed", "to_state": "queued", "reason": "the model is back"})
    );
    assert_eq!(still.post(&id, "cancel", json!({"reason": "a\u{1}b"})).await.0, StatusCode::BAD_REQUEST);
}
