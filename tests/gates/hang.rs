//! A model that hangs keeps its own sessions waiting, and no others.

use super::{SHUT, count, options, post};
use crate::support::client::texts;
use crate::support::{Answer, Database, ModelServer, eventually};
use serde_json::json;
use tokio::sync::watch;

/// Silence is seen at once. A call would be given up after two minutes, longer than any wait of this test.
const SILENT: &str = "silent_s = 0.3\n[agents.other]\nmodel = \"openai/other\"\nsystem_prompt = \"x\"";

#[tokio::test]
async fn calls_that_hang_leave_their_slots_to_others_and_are_made_once() {
    let (database, (go, gone)) = (Database::new().await, watch::channel(false));
    let model = ModelServer::start(move |body, _| match body["model"] == "test" {
        true => Answer::Late(gone.clone(), "At last.".to_owned()),
        false => Answer::text("Here I am."),
    })
    .await;
    let asked = |name: &str| {
        let name = format!("\"model\":\"{name}\"");
        model.bodies().iter().filter(|body| body.contains(&name)).count()
    };
    let process = options(&model, "").config(SILENT).short_lease().serve(&database).await;
    let client = process.client();
    let mut hung = Vec::new();
    for n in 0..4 {
        hung.push(post(&client, &format!("hung{n}")).await);
    }
    model.asked(4).await;

    // All slots are taken. Without the mend this one waits for two minutes.
    let body = json!({"user_id": "ann", "text": "Hello?", "agent": "other"});
    let (_, answer) = client.post("/v1/chat/free/messages", &body).await;
    client.wait_for(answer["session_id"].as_str().unwrap(), "completed").await;
    let (_, queue) = client.get("/v1/queue").await;
    let gate = &queue["gates"][0];
    assert_eq!((&gate["provider"], &gate["phase"]), (&json!("openai/test"), &json!("shut")), "{queue}");
    let reason = gate["last_error"].as_str().unwrap();
    assert!(reason.contains(" calls of one worker have had no answer yet, the oldest for "), "{reason}");
    // More messages for the model that hangs: one at a time probes, and that one leaves its slot too.
    for n in 4..12 {
        hung.push(post(&client, &format!("hung{n}")).await);
    }
    // Four calls, the other model's, and three probes.
    model.asked(8).await;
    let (_, answer) = client.post("/v1/chat/free/messages", &body).await;
    let session = client.wait_for(answer["session_id"].as_str().unwrap(), "completed").await;
    assert_eq!(texts(&session, "assistant").len(), 2, "{session}");

    go.send_replace(true);
    for id in &hung {
        let session = client.wait_for(id, "completed").await;
        assert_eq!(texts(&session, "assistant"), ["At last."], "{session}");
    }
    eventually("an open gate", || async { (count(&database, SHUT).await == 0).then_some(()) }).await;
    assert_eq!(asked("test"), hung.len(), "no call was cut or made twice");
    assert!(process.terminate().success());
}
