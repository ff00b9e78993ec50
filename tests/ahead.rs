//! Pure tools of a reply run while the reply waits for its statement. If they are in time, one commit has both.

use crate::support::model::turns_since_user;
use crate::support::proxy::{CutAt, Proxy};
use crate::support::world::{post_before_death, wake};
use crate::support::{Answer, Database, ModelServer, Options, Process, eventually};
use serde_json::json;
use wakeful_workflow::record::Role;

/// The text of the first part of a statement that records tool calls.
const CALLS: &str = "opened as (";

/// The text of a statement that records only the intent of a model call.
const INTENT_ALONE: &str = "where job_id = $10 and lease = $11 and (select set_config";

#[tokio::test]
async fn on_a_busy_worker_a_reply_and_the_results_of_its_pure_tools_are_one_commit() {
    let mut database = Database::new().await;
    let model = ModelServer::start(|body, _| match turns_since_user(body) {
        0 => Answer::call("read_file", json!({"path": "menu.txt"})),
        _ => Answer::text("There is no menu."),
    })
    .await;
    let direct = database.url.clone();
    let proxy = Proxy::start(&direct);
    database.url = proxy.url.clone();
    let process =
        Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url).serve(&database).await;
    database.url = direct;
    let client = process.client();

    // One lane waits for the late answer to this commit.
    proxy.cut_when(CALLS, CutAt::LateAnswer);
    let slow = client.chat("slow", "Read the menu, please.").await;
    eventually("the commit that is late", || async { (proxy.cut_count() == 1).then_some(()) }).await;
    proxy.cut_when(INTENT_ALONE, CutAt::LateAnswer);
    let mut sessions = Vec::new();
    for number in 0..8 {
        sessions.push(client.chat(&format!("c{number}"), "Read the menu, please.").await);
    }
    sessions.push(slow);
    for session in &sessions {
        client.wait_for(session["session_id"].as_str().unwrap(), "completed").await;
    }

    // Nothing but commits recorded the intents of model calls: this trap is sprung by a statement of its own.
    assert_eq!(proxy.cut_count(), 1, "an intent was written alone");
    // Rows of one transaction have one `xmin`.
    let joined: i64 = database
        .value(
            "select count(*) from conversation_records reply
            join conversation_records result using (conversation_id)
            where reply.role = 'assistant' and result.role = $1 and reply.xmin::text = result.xmin::text
                and result.message_number = reply.message_number + 1",
            Role::Tool.as_str(),
        )
        .await;
    assert!(joined > 0, "no reply was committed with its results");
    // However they were committed, each session has the same journal.
    let journals: i64 = database
        .value(
            "select count(distinct journal) from (
                select string_agg(type, ' ' order by seq) as journal from session_events
                where session_id <> $1 group by session_id
            ) as journals",
            "",
        )
        .await;
    assert_eq!(journals, 1);
    let store = database.store().await;
    for session in &sessions {
        let session_id = session["session_id"].as_str().unwrap();
        let verified = store.verify(session_id).await.unwrap();
        assert!(verified.agrees, "{verified:?}");
    }
    assert_eq!(model.bodies().len(), 2 * sessions.len(), "each model call is made once");
}

/// The text of the first part of a statement that a lane writes, whatever it commits.
const COMMIT: &str = "set last_message_number = session.last_message_number + given.record_count";

#[tokio::test]
async fn a_pure_tool_that_kills_its_process_ahead_of_its_reply_costs_one_more_model_call_and_no_second() {
    let mut database = Database::new().await;
    let model = ModelServer::start(|body, _| match turns_since_user(body) {
        0 if body.to_string().contains("Stumble") => {
            Answer::call("misbehave_purely", json!({"mode": "abort"}))
        }
        _ => Answer::text("That went well."),
    })
    .await;
    let direct = database.url.clone();
    let proxy = Proxy::start(&direct);
    let config = "[agents.default]\nsystem_prompt = \"You are a test.\"\nmodel = \"openai/test\"\n\
                  tools = [\"misbehave_purely\"]";
    let options = Options::new().config(config).env("OPENAI_BASE_URL", &model.url);
    let store = database.store().await;
    let replies = "select count(*) from conversation_records where session_id = $1 and role = 'assistant'";
    let asked = || model.bodies().iter().filter(|body| body.contains("Stumble")).count();

    // In the first life a lane waits for the late answer to another session's commit. So the reply waits too, and its
    // tool runs ahead of it.
    database.url = proxy.url.clone();
    proxy.cut_when(COMMIT, CutAt::LateAnswer);
    let process = options.serve(&database).await;
    wake(&store, "slow1", "openai/test", "Hello.").await;
    eventually("the commit that is late", || async { (proxy.cut_count() == 1).then_some(()) }).await;
    let stumbling = post_before_death(&database, &process.client(), "c1", "Stumble, please.").await;
    ends(process).await;
    let committed: i64 = database.value(replies, &stumbling).await;
    assert_eq!((committed, asked()), (0, 1), "the reply is lost with its tool");

    // In the second life a lane is as busy, but a worker died of this step: the reply is committed first.
    wake(&store, "slow2", "openai/test", "Hello.").await;
    proxy.cut_when(COMMIT, CutAt::LateAnswer);
    ends(options.spawn(&database.url)).await;
    let committed: i64 = database.value(replies, &stumbling).await;
    assert_eq!((committed, asked()), (1, 2), "the reply is kept");
    let runs = options.effects().iter().filter(|line| line.starts_with("misbehave_purely ")).count();
    assert_eq!(runs, 2);

    // So no later life asks the model for it again.
    std::fs::write(options.path("hold-mended"), "").unwrap();
    database.url = direct;
    let process = options.serve(&database).await;
    process.client().wait_for(&stumbling, "completed").await;
    assert_eq!(asked(), 3, "the third call is the one with the result");
    assert!(process.terminate().success());
}

/// Waits until its work kills the process.
async fn ends(process: Process) {
    let (status, process) = process.ended().await;
    assert!(!status.success(), "{}", process.log());
}
