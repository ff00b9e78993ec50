//! Pure tools of a reply run while the reply waits for its statement. If they are in time, one commit has both.

use crate::support::model::turns_since_user;
use crate::support::proxy::{CutAt, Proxy};
use crate::support::world::{post_before_death, wake};
use crate::support::{Answer, Database, ModelServer, Options, Process, eventually};
use serde_json::json;
use wakeful_workflow::record::Role;

/// The text of a statement that records only the intent of a model call.
const INTENT_ALONE: &str = "where job_id = $10 and lease = $11 and (select set_config";

/// The text of the first part of a statement that a lane writes, whatever it commits.
const COMMIT: &str = "set last_message_number = session.last_message_number + given.record_count";

#[tokio::test]
async fn on_a_busy_worker_a_reply_and_the_results_of_its_pure_tools_are_one_commit() {
    let mut database = Database::new().await;
    let model = ModelServer::start(|body, _| match turns_since_user(body) {
        0 => Answer::call("misbehave_purely", json!({"mode": "yield"})),
        _ => Answer::text("That went well."),
    })
    .await;
    let direct = database.url.clone();
    let proxy = Proxy::start(&direct);
    database.url = proxy.url.clone();
    let config = "[agents.default]\nsystem_prompt = \"You are a test.\"\nmodel = \"openai/test\"\n\
                  tools = [\"misbehave_purely\"]";
    let options = Options::new().config(config).env("OPENAI_BASE_URL", &model.url);
    std::fs::write(options.path("hold-mended"), "").unwrap();
    let process = options.serve(&database).await;
    database.url = direct;
    let client = process.client();

    // Four model calls are under way: fewer commits than fill half a statement.
    model.hold();
    let mut sessions = Vec::new();
    for number in 0..4 {
        sessions.push(client.chat(&format!("c{number}"), "Try it, please.").await);
    }
    model.asked(4).await;
    // Each lane waits for the answer to a commit that begins another session.
    for lane in 1..=2 {
        proxy.cut_when(COMMIT, CutAt::HeldAnswer);
        sessions.push(client.chat(&format!("slow{lane}"), "Try it, please.").await);
        eventually("a commit whose answer is held", || async { (proxy.cut_count() == lane).then_some(()) })
            .await;
    }
    // So the replies wait, and a tool runs meanwhile.
    model.release();
    options.has_effects(1).await;
    proxy.cut_when(INTENT_ALONE, CutAt::HeldAnswer);
    proxy.release();
    for session in &sessions {
        client.wait_for(session["session_id"].as_str().unwrap(), "completed").await;
    }

    // Nothing but commits recorded the intents of model calls: this trap is sprung by a statement of its own.
    assert_eq!(proxy.cut_count(), 2, "an intent was written alone");
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

    // In the first life a lane waits for the held answer to another session's commit. So the reply waits too, and its
    // tool runs ahead of it.
    database.url = proxy.url.clone();
    proxy.cut_when(COMMIT, CutAt::HeldAnswer);
    let process = options.serve(&database).await;
    wake(&store, "slow1", "openai/test", "Hello.").await;
    eventually("the commit whose answer is held", || async { (proxy.cut_count() == 1).then_some(()) }).await;
    let stumbling = post_before_death(&database, &process.client(), "c1", "Stumble, please.").await;
    ends(process).await;
    let committed: i64 = database.value(replies, &stumbling).await;
    assert_eq!((committed, asked()), (0, 1), "the reply is lost with its tool");

    // In the second life a lane is as busy, but a worker died of this step: the reply is committed first.
    wake(&store, "slow2", "openai/test", "Hello.").await;
    proxy.cut_when(COMMIT, CutAt::HeldAnswer);
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
