//! The path of a message: a chat message comes in, steps run, a reply goes out.

use crate::support::client::{numbers, texts};
use crate::support::{Answer, Database, ModelServer, Options};
use serde_json::json;

#[tokio::test]
async fn a_message_becomes_steps_and_one_reply() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![
        Answer::call("reserve", json!({"persons": 2})),
        Answer::text("Your table is reserved."),
    ])
    .await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    let client = process.client();

    let answer = client.chat("c1", "A table for two, please.").await;
    assert_eq!(answer["outcome"], "new_run");
    let session = client.wait_for(answer["session_id"].as_str().unwrap(), "completed").await;

    assert_eq!(texts(&session, "assistant"), ["", "Your table is reserved."]);
    assert_eq!(texts(&session, "tool"), ["Reserved for 2."]);
    assert_eq!(numbers(&session), [2, 3, 4, 5], "seeds take the first number; the rest is dense");
    assert_eq!(options.effects().len(), 1);
    assert_eq!(session["total_turns"], 2);
    assert_eq!(session["total_input_tokens"], 200);
    assert_eq!(session["total_cached_tokens"], 80);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_message_that_names_another_agent_than_its_session_has_says_so() {
    let database = Database::new().await;
    let agent = |name: &str| {
        format!("[agents.{name}]\nmodel = \"scripted/none\"\nsystem_prompt = \"You are a test.\"\n")
    };
    let config = agent("default") + &agent("support");
    let process = Options::new().config(&config).arg("--roles=api").serve(&database).await;
    let client = process.client();
    let said = async |agent: &str| {
        let (_, answer) =
            client.post("/v1/chat/c1/messages", &json!({"text": "Hello.", "agent": agent})).await;
        (answer["session_id"].clone(), answer["warning"].as_str().unwrap_or_default().to_owned())
    };
    let (first, warning) = said("support").await;
    assert_eq!(warning, "", "it begins the session");
    let (second, warning) = said("default").await;
    assert_eq!(second, first, "the session goes on");
    assert!(warning.contains("a session of the agent support"), "{warning}");
    let (_, warning) = said("support").await;
    assert_eq!(warning, "");
    let (_, made) = client.post("/v1/conversations/c1/new", &json!({"agent": "default"})).await;
    let (third, warning) = said("default").await;
    assert_eq!((third, warning.as_str()), (made["session_id"].clone(), ""));
}
