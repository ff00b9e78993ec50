//! A step that kills every worker that takes it (K36).

use crate::support::world::wake;
use crate::support::{Answer, Database, ModelServer, Options};
use serde_json::json;

#[tokio::test]
async fn k36_a_step_that_kills_its_worker_each_time_fails_its_run_and_not_its_neighbours() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| {
        let poisoned = body.to_string().contains("poison");
        if poisoned { Answer::call("charge", json!({"cents": 1})) } else { Answer::text("Fine.") }
    })
    .await;
    // A life may end before it has its liveness lock. Then the next one waits for the lease.
    let options = Options::new()
        .short_lease()
        .model("openai/test")
        .config("[agents.default.limits]\nattempts = 5")
        .env("OPENAI_BASE_URL", &model.url)
        .env("FAILPOINTS", "K17=return");
    let store = database.store().await;
    let poisoned = wake(&store, "poisoned", "openai/test", "This is poison.").await;
    let mut neighbours = Vec::new();
    // The first attempt commits the message with the call. The fifth worker that dies ends the run.
    for life in 1..=5 {
        neighbours.push(wake(&store, &format!("neighbour{life}"), "openai/test", "Hello.").await);
        let (status, process) = options.spawn(&database.url).ended().await;
        assert!(!status.success() && process.log().contains("failpoint"), "{}", process.log());
    }
    let process = options.serve(&database).await;
    let client = process.client();
    let failed = client.wait_for(&poisoned, "failed").await;
    let error = failed["error"].as_str().unwrap();
    assert!(
        error.contains("made no progress")
            && error.contains("its worker died each time")
            && error.contains("Remedy: "),
        "{error}"
    );
    for neighbour in &neighbours {
        client.wait_for(neighbour, "completed").await;
    }
    assert!(options.effects().is_empty());
    assert!(process.terminate().success());

    // The step is fine apart from the poison: without it the retry continues where the run stopped.
    let mut calm = options.clone();
    calm.env.remove("FAILPOINTS");
    assert_eq!(model.bodies().iter().filter(|body| body.contains("poison")).count(), 1);
    let process = calm.serve(&database).await;
    store.retry(&poisoned, None).await.unwrap();
    calm.has_effects(1).await;
    drop(process);
}
