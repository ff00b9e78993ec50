//! A session's beginning is pinned: a deploy changes nothing for a session in flight.

use crate::support::{Answer, Database, ModelServer, Options, client::texts};
use serde_json::{Value, json};

/// Two turns: a reservation in the first version's schema, then words.
async fn model() -> ModelServer {
    ModelServer::turns(vec![Answer::call("reserve", json!({"persons": 2})), Answer::text("Reserved.")]).await
}

#[tokio::test]
async fn k35_a_deploy_with_another_tool_schema_and_prompt_changes_no_request_of_a_session_in_flight() {
    let database = Database::new().await;
    let model = model().await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    let client = process.client();
    let session =
        client.chat("c1", "A table for two, please.").await["session_id"].as_str().unwrap().to_owned();
    client.wait_for(&session, "completed").await;
    process.kill();

    let mut next = options.clone().env("FIXTURE_NEXT", "1");
    next.config = next.config.replace("You are a test.", "You are the next version.");
    let process = next.serve(&database).await;
    let client = process.client();
    client.chat("c1", "And one for tomorrow.").await;
    client.wait_for(&session, "completed").await;
    let replies = texts(&client.session(&session).await, "tool");
    assert_eq!(
        replies,
        ["Reserved for 2.", "Reserved for 2."],
        "arguments are held against the schema that was told"
    );
    let bodies = model.bodies();
    assert_eq!(bodies.len(), 4);
    for pair in bodies.windows(2) {
        assert_eq!(tools(&pair[0]), tools(&pair[1]));
        assert_eq!(messages(&pair[0]), messages(&pair[1])[..messages(&pair[0]).len()]);
    }

    // A session that begins after the deploy gets the new tools and prompt.
    let other =
        client.chat("c2", "A table for two, please.").await["session_id"].as_str().unwrap().to_owned();
    client.wait_for(&other, "completed").await;
    assert_ne!(tools(&model.bodies()[4]), tools(&bodies[0]));
    assert_eq!(messages(&model.bodies()[4])[0]["content"], "You are the next version.");
    assert!(
        texts(&client.session(&other).await, "tool")[0].contains("name"),
        "and its arguments are held to that"
    );
    let shared: i64 = database
        .value("select count(distinct prefix_sha256) from conversation_sessions where $1 <> ''", "all")
        .await;
    assert_eq!(shared, 2);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn sessions_that_begin_alike_share_one_blob_and_one_of_before_the_pin_uses_the_configuration() {
    let database = Database::new().await;
    let model = model().await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    let client = process.client();
    for conversation in ["c1", "c2"] {
        let answer = client.chat(conversation, "A table for two, please.").await;
        client.wait_for(answer["session_id"].as_str().unwrap(), "completed").await;
    }
    let prefixes: i64 = database
        .value(
            "select count(*) from blobs b where $1 <> '' and exists (select from conversation_sessions s
                where s.prefix_sha256 = b.sha256)",
            "all",
        )
        .await;
    assert_eq!(prefixes, 1);

    sqlx::query("update conversation_sessions set prefix_sha256 = null")
        .execute(&database.pool)
        .await
        .unwrap();
    let answer = client.chat("c1", "And one for tomorrow.").await;
    client.wait_for(answer["session_id"].as_str().unwrap(), "completed").await;
    let bodies = model.bodies();
    assert_eq!(bodies.len(), 6);
    assert_eq!(tools(&bodies[4]), tools(&bodies[0]));
    assert_eq!(messages(&bodies[4])[0], messages(&bodies[0])[0]);
    assert!(process.terminate().success());
}

fn parsed(body: &str) -> Value {
    serde_json::from_str(body).expect("a body is JSON")
}

fn tools(body: &str) -> Value {
    parsed(body)["tools"].clone()
}

fn messages(body: &str) -> Vec<Value> {
    parsed(body)["messages"].as_array().expect("messages").clone()
}
