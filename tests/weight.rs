//! The size of a step's stored result does not grow with its messages.

use crate::support::{Answer, Database, ModelServer, Options};

#[tokio::test]
async fn a_steps_cached_result_stays_at_256_bytes_when_its_messages_reach_1_mib() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::call("reserve", serde_json::json!({"persons": 2})), {
        Answer::text(&"All work and no play. ".repeat(13_000))
    }])
    .await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    let client = process.client();
    let mut session_id = String::new();
    for _ in 0..4 {
        let answer = client.chat("c1", "Go on.").await;
        answer["session_id"].as_str().unwrap().clone_into(&mut session_id);
        client.wait_for(&session_id, "completed").await;
    }
    let weighed: i64 = database
        .value(
            "select sum(length(content::text)) from conversation_records where session_id = $1",
            &session_id,
        )
        .await;
    assert!(weighed > 1024 * 1024, "{weighed} bytes of messages");
    let heaviest: i32 = database
        .value("select max(pg_column_size(s.*)) from session_steps s where session_id = $1", &session_id)
        .await;
    assert!(heaviest <= 256, "{heaviest} bytes");
}
