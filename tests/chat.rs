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
