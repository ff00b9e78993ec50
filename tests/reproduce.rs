//! No state hides in a process: from the log alone, the projection makes every request to the model again,
//! byte for byte.

use crate::support::{Options, World};
use std::collections::BTreeMap;
use wakeful_engine::tool::registry::Registry;
use wakeful_workflow::context::full;
use wakeful_workflow::wire::openai;

const TOOLS: [&str; 2] = ["compose_email", "current_time"];

#[tokio::test]
async fn the_log_gives_every_request_again_byte_for_byte() {
    let mut world = World::new("reproduced", &["compose_email"]).await;
    let toml = format!(
        "[agents.default]\nsystem_prompt = \"You are a test.\"\nmodel = \"openai/test\"\ntools = {TOOLS:?}\nrecipients = [\"*\"]\n"
    );
    world.options = Options { config: toml, ..world.options };
    world.model.hold_from(1);
    let process = world.serve().await;
    world.begin(&process.client()).await;
    // One attempt is cut off, so that one call is made twice.
    world.model.asked(2).await;
    process.kill();
    world.model.release();
    let process = world.serve().await;
    let traces = world.finish(&process.client()).await;
    assert!(process.terminate().success());

    // The message that each model call produced, either itself or through the attempt that replaced it.
    let mut answers: BTreeMap<String, i64> = BTreeMap::new();
    for event in traces.events.iter().rev() {
        let payload = &event["payload"];
        let id = |key: &str| payload[key].as_str().unwrap_or_default().to_owned();
        match event["type"].as_str().unwrap() {
            "GEN_COMPLETE" => {
                answers.insert(id("generation_id"), payload["message_number"].as_i64().unwrap());
            }
            "GEN_RESUMED" => {
                let number = answers[&id("generation_id")];
                answers.insert(id("replaces"), number);
            }
            _ => {}
        }
    }

    let session = world.database.store().await.hydrate(&world.session_id).await.unwrap();
    let tools = Registry::built_in().unwrap().definitions(&TOOLS).unwrap();
    let rebuilt = traces.journal("LLM_CALLED").into_iter().map(|called| {
        let answer = answers[called["generation_id"].as_str().unwrap()];
        let mut then = session.clone();
        then.records.retain(|record| record.message_number < answer);
        let request = openai::project(&full(&then, tools.clone()), &openai::Options::new("test", 8192));
        assert_eq!(request.sha256(), called["request_sha256"], "the journal's hash is that of these bytes");
        String::from_utf8(request.body.to_vec()).unwrap()
    });
    assert_eq!(rebuilt.collect::<Vec<_>>(), world.model.bodies());
    assert_eq!(world.model.bodies().len(), 5);
}
