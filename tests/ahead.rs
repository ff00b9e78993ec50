//! Pure tools of a reply run before the reply is committed, if the process has other jobs. If they are in time, one commit has both.

use crate::support::model::turns_since_user;
use crate::support::proxy::{CutAt, Proxy};
use crate::support::world::{post_before_death, wake};
use crate::support::{Answer, Database, ModelServer, Options, Process, eventually};
use serde_json::{Value, json};
use wakeful_workflow::record::Role;

/// The text of a statement that records only the intent of a model call.
const INTENT_ALONE: &str = "where job_id = $10 and lease = $11 and (select set_config";

/// How many replies of a session are committed.
const REPLIES: &str =
    "select count(*) from conversation_records where session_id = $1 and role = 'assistant'";

/// The message of a session that is at work until it is mended.
const KEEP_BUSY: &str = "Keep busy, please.";

/// A model that asks for the tool `misbehave_purely` in `mode`, and a worker that has it.
async fn scene(mode: &'static str) -> (ModelServer, Options) {
    let model = ModelServer::start(move |body, _| match turns_since_user(body) {
        0 if is_about(body, KEEP_BUSY) => Answer::call("misbehave", json!({"mode": "yield"})),
        0 => Answer::call("misbehave_purely", json!({"mode": mode})),
        _ => Answer::text("That went well."),
    })
    .await;
    let config = "[agents.default]\nsystem_prompt = \"You are a test.\"\nmodel = \"openai/test\"\n\
                  tools = [\"misbehave\", \"misbehave_purely\"]";
    let options = Options::new().config(config).env("OPENAI_BASE_URL", &model.url);
    (model, options)
}

/// A scene whose process is at work on a session that keeps busy, so that no other session is alone.
async fn busy_scene(mode: &'static str) -> (Database, ModelServer, Options, Process) {
    let database = Database::new().await;
    let (model, options) = scene(mode).await;
    wake(&database.store().await, "busy", "openai/test", KEEP_BUSY).await;
    let process = options.serve(&database).await;
    options.has_effects(1).await;
    (database, model, options, process)
}

fn is_about(body: &Value, text: &str) -> bool {
    body["messages"].to_string().contains(text)
}

fn mend(options: &Options) {
    std::fs::write(options.path("hold-mended"), "").unwrap();
}

/// Runs of the pure tool.
fn runs(options: &Options) -> usize {
    options.effects().iter().filter(|line| line.starts_with("misbehave_purely ")).count()
}

#[tokio::test]
async fn a_process_with_several_jobs_commits_a_reply_and_the_results_of_its_pure_tools_at_once() {
    let mut database = Database::new().await;
    let (model, options) = scene("yield").await;
    let direct = database.url.clone();
    let proxy = Proxy::start(&direct);
    database.url = proxy.url.clone();
    mend(&options);
    let process = options.serve(&database).await;
    database.url = direct;
    let client = process.client();

    // Four model calls are under way, so no session is alone.
    model.hold();
    let mut sessions = Vec::new();
    for number in 0..4 {
        sessions.push(client.chat(&format!("c{number}"), "Try it, please.").await);
    }
    model.asked(4).await;
    proxy.cut_when(INTENT_ALONE, CutAt::HeldAnswer);
    model.release();
    for session in &sessions {
        client.wait_for(session["session_id"].as_str().unwrap(), "completed").await;
    }

    // Nothing but commits recorded the intents of model calls: this trap is sprung by a statement of its own.
    assert_eq!(proxy.cut_count(), 0, "an intent was written alone");
    assert!(joined(&database).await > 0, "no reply was committed with its results");
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
async fn a_process_with_one_job_commits_a_reply_before_its_tools_run() {
    let database = Database::new().await;
    let (_model, options) = scene("yield").await;
    mend(&options);
    let process = options.serve(&database).await;
    let client = process.client();
    let session = client.chat("c1", "Try it, please.").await;
    client.wait_for(session["session_id"].as_str().unwrap(), "completed").await;
    assert_eq!(runs(&options), 1);
    assert_eq!(joined(&database).await, 0);
}

#[tokio::test]
async fn a_paused_tool_does_not_run_ahead() {
    let (database, _model, options, process) = busy_scene("yield").await;
    mend(&options);
    let client = process.client();
    let pause = json!({"kind": "tool", "name": "misbehave_purely", "reason": "wrong prices"});
    assert_eq!(client.post("/v1/pauses", &pause).await.0, 201);
    process.wait_for_log("Paused now: ").await;
    let session = client.chat("c1", "Try it, please.").await;
    let session = session["session_id"].as_str().unwrap();
    eventually("the session to wait for the end of the pause", || async {
        let sql = "select exists (select from jobs where session_id = $1 and held_by is not null)";
        database.value::<bool>(sql, session).await.then_some(())
    })
    .await;
    assert_eq!((database.value::<i64>(REPLIES, session).await, runs(&options)), (1, 0));
    let pause = json!({"kind": "tool", "name": "misbehave_purely"});
    assert_eq!(client.post("/v1/pauses/end", &pause).await.0, 202);
    client.wait_for(session, "completed").await;
    assert_eq!(runs(&options), 1);
}

#[tokio::test]
async fn a_reply_waits_for_no_slow_tool_and_the_tool_runs_once() {
    let (database, model, options, process) = busy_scene("wait").await;
    let client = process.client();
    let session = client.chat("c1", "Try it, please.").await;
    let session = session["session_id"].as_str().unwrap();
    eventually("the reply's commit while its tool runs", || async {
        (database.value::<i64>(REPLIES, session).await == 1).then_some(())
    })
    .await;
    options.has_effects(2).await;
    mend(&options);
    client.wait_for(session, "completed").await;
    assert_eq!(runs(&options), 1);
    assert_eq!(model.bodies().iter().filter(|body| !body.contains(KEEP_BUSY)).count(), 2);
    let verified = database.store().await.verify(session).await.unwrap();
    assert!(verified.agrees, "{verified:?}");
}

#[tokio::test]
async fn a_pure_tool_that_kills_its_process_ahead_of_its_reply_costs_one_more_model_call_and_no_second() {
    // In the first life another session is at work, so the tool runs ahead of its reply.
    let (database, model, options, process) = busy_scene("abort").await;
    let asked = || model.bodies().iter().filter(|body| body.contains("Stumble")).count();
    let stumbling = post_before_death(&database, &process.client(), "c1", "Stumble, please.").await;
    ends(process).await;
    let committed: i64 = database.value(REPLIES, &stumbling).await;
    assert_eq!((committed, asked()), (0, 1), "the reply is lost with its tool");

    // In the second life the other session is at work too, but a worker died of this step: the reply is committed first.
    model.hold();
    let process = options.spawn(&database.url);
    let is_busy_again =
        |lines: &[String]| lines.iter().filter(|line| line.starts_with("misbehave ")).count() == 2;
    options.until_effects("the other session to be at work again", is_busy_again).await;
    model.release();
    ends(process).await;
    let committed: i64 = database.value(REPLIES, &stumbling).await;
    assert_eq!((committed, asked()), (1, 2), "the reply is kept");
    assert_eq!(runs(&options), 2);

    // So no later life asks the model for it again.
    mend(&options);
    let process = options.serve(&database).await;
    process.client().wait_for(&stumbling, "completed").await;
    assert_eq!(asked(), 3, "the third call is the one with the result");
    assert!(process.terminate().success());
}

/// How many replies were committed together with the result of their tool. Rows of one transaction have one `xmin`.
async fn joined(database: &Database) -> i64 {
    let sql = "select count(*) from conversation_records reply
        join conversation_records result using (conversation_id)
        where reply.role = 'assistant' and result.role = $1 and reply.xmin::text = result.xmin::text
            and result.message_number = reply.message_number + 1";
    database.value(sql, Role::Tool.as_str()).await
}

/// Waits until its work kills the process.
async fn ends(process: Process) {
    let (status, process) = process.ended().await;
    assert!(!status.success(), "{}", process.log());
}
