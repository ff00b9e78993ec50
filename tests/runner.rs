//! The library's runner: a program starts, continues and stops a session. The workers run elsewhere or inside
//! it.

use crate::support::{Answer, Database, ModelServer, Options, Process, eventually};
use serde_json::{Value, json};
use std::sync::Arc;
use wakeful::App;
use wakeful_config::Config;
use wakeful_engine::ctx::Ctx;
use wakeful_engine::handle::{Pause, SessionHandle, SessionHandleError};
use wakeful_engine::jobs::pool;

/// A model that asks how many, and then repeats the answer.
async fn asking() -> ModelServer {
    ModelServer::start(|body, _| {
        let messages = body["messages"].as_array().expect("messages");
        let last = messages.last().expect("a message");
        match last["role"].as_str() {
            Some("tool") => {
                Answer::text(&format!("A table for {}.", last["content"].as_str().unwrap_or("?")))
            }
            _ => Answer::call("ask_user", json!({"question": "For how many?"})),
        }
    })
    .await
}

/// A worker's options, and the configuration of a program next to it.
fn options(model: &ModelServer) -> Options {
    let agents = "[agents.default]\nmodel = \"openai/test\"\ntools = [\"ask_user\", \"current_time\"]
        [agents.clerk]\nsystem_prompt = \"You are a clerk.\"\nmodel = \"openai/test\"\ntools = [\"ask_user\"]";
    Options::new().config(agents).env("OPENAI_BASE_URL", &model.url).arg("--roles=worker")
}

async fn worker(options: &Options, database: &Database) -> Process {
    let process = options.spawn(&database.url);
    process.wait_for_log("\"Working\"").await;
    process
}

/// Connects as a program that drives sessions itself, with that configuration.
async fn program(options: &Options, database: &Database) -> Arc<Ctx> {
    let config = options.path("program.toml");
    let text = format!("[workspace]\ndir = \"{}\"\n{}", options.dir.path().display(), options.config);
    std::fs::write(&config, text).expect("a configuration");
    let env = options.env.clone().into_iter();
    let config = Config::load(Some(&config), env).expect("it reads");
    App::new().context(config, &database.url).await.expect("the database answers")
}

fn pauses(question: &str) -> Pause {
    Pause::WaitingInput { question: question.to_owned() }
}

fn completes(result: &str) -> Pause {
    Pause::Completed { result: result.to_owned() }
}

#[tokio::test]
async fn an_answer_after_the_workers_death_goes_on_with_the_same_run_and_every_entry_is_given_once() {
    let database = Database::new().await;
    let model = asking().await;
    let options = options(&model);
    let process = worker(&options, &database).await;
    let ctx = program(&options, &database).await;
    let mut runner = SessionHandle::new(Arc::clone(&ctx));
    runner.start("A table, please.", Some("You book tables.")).await.unwrap();
    let mut given: Vec<(i64, String)> = Vec::new();
    let paused =
        runner.consume_until_pause(|entry| given.push((entry.seq, entry.kind.clone()))).await.unwrap();
    assert_eq!(paused, pauses("For how many?"));
    let id = runner.session_id().unwrap().to_owned();
    process.kill();

    // No process holds the pause: it exists only in the database.
    runner.continue_with("four").await.unwrap();
    let process = worker(&options, &database).await;
    let ended =
        runner.consume_until_pause(|entry| given.push((entry.seq, entry.kind.clone()))).await.unwrap();
    assert_eq!(ended, completes("A table for four."));
    let numbers: Vec<i64> = given.iter().map(|(seq, _)| *seq).collect();
    assert_eq!(numbers, (1..=given.len() as i64).collect::<Vec<_>>(), "{given:?}");
    for kind in
        ["MESSAGE_RECEIVED", "LLM_CALLED", "TOOL_INVOKED", "TOOL_RESULT", "GEN_COMPLETE", "checkpoint"]
    {
        assert!(given.iter().any(|(_, one)| one == kind), "{kind}: {given:?}");
    }

    let store = &ctx.store;
    let session = store.session(None, &id).await.unwrap();
    assert_eq!((session.trigger_type.as_str(), session.trigger_source.as_str()), ("api", "api"));
    assert_eq!(
        store.runs(&id, None, 10, i64::MAX).await.unwrap().items.len(),
        1,
        "the answer opens no run of its own"
    );
    let first: Value = serde_json::from_str(&model.bodies()[0]).unwrap();
    assert_eq!(first["messages"][0]["content"], "You book tables.");
    assert_eq!(runner.consume_until_pause(|_| panic!("nothing is new")).await.unwrap(), ended);
    assert!(store.verify(&id).await.unwrap().agrees);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn another_program_goes_on_with_the_session_of_one_that_died() {
    let database = Database::new().await;
    let model = asking().await;
    let options = options(&model);
    let process = worker(&options, &database).await;
    let mut first = SessionHandle::new(program(&options, &database).await).agent("clerk");
    first.start("A table, please.", None).await.unwrap();
    assert_eq!(first.consume_until_pause(|_| {}).await.unwrap(), pauses("For how many?"));
    let id = first.session_id().unwrap().to_owned();
    drop(first);

    let ctx = program(&options, &database).await;
    let mut second = SessionHandle::attach(Arc::clone(&ctx), &id).await.unwrap();
    let mut given = 0;
    assert_eq!(second.consume_until_pause(|_| given += 1).await.unwrap(), pauses("For how many?"));
    assert!(given > 5, "it is given the earlier entries: {given}");
    second.continue_with("two").await.unwrap();
    assert_eq!(second.consume_until_pause(|_| {}).await.unwrap(), completes("A table for two."));
    assert!(model.bodies()[0].contains("You are a clerk."));
    assert!(SessionHandle::attach(ctx, "sess_none").await.is_err());
    assert!(process.terminate().success());
}

#[tokio::test]
async fn going_on_has_its_two_errors_and_stopping_ends_the_run() {
    let database = Database::new().await;
    let model = asking().await;
    let options = options(&model);
    let process = worker(&options, &database).await;
    let ctx = program(&options, &database).await;
    let mut runner = SessionHandle::new(Arc::clone(&ctx));
    let says = |answered: Result<(), SessionHandleError>| answered.unwrap_err().to_string();
    assert_eq!(says(runner.continue_with("four").await), "this handle has no session: start one first");
    let consumed = runner.consume_until_pause(|_| {}).await;
    assert_eq!(consumed.unwrap_err().to_string(), "this handle has no session: start one first");
    runner.stop().await.unwrap();

    model.hold();
    runner.start("A table, please.", None).await.unwrap();
    assert_eq!(says(runner.continue_with("four").await), "the session does not wait for an answer");
    model.asked(1).await;
    assert_eq!(says(runner.continue_with("four").await), "the session does not wait for an answer");
    model.release();
    assert_eq!(runner.consume_until_pause(|_| {}).await.unwrap(), pauses("For how many?"));
    runner.continue_with("four").await.unwrap();
    assert_eq!(says(runner.continue_with("five").await), "the session does not wait for an answer");
    assert_eq!(runner.consume_until_pause(|_| {}).await.unwrap(), completes("A table for four."));
    assert_eq!(says(runner.continue_with("six").await), "the session does not wait for an answer");
    assert_eq!(says(runner.start(" ", None).await), "the message is empty, or has a NUL character");
    let refused: i64 = database.value("select count(*) from session_inbox where $1 <> ''", "all").await;
    assert_eq!(refused, 2, "refused messages left no row");

    model.hold_from(model.bodies().len());
    runner.start("Another, please.", None).await.unwrap();
    let id = runner.session_id().unwrap().to_owned();
    model.asked(3).await;
    runner.stop().await.unwrap();
    assert_eq!(says(runner.continue_with("four").await), "this handle has no session: start one first");
    let mut looker = SessionHandle::attach(Arc::clone(&ctx), &id).await.unwrap();
    let ended = looker.consume_until_pause(|_| {}).await.unwrap();
    assert_eq!(ended, Pause::Cancelled);
    // `stop` also ends a session that waits with a question.
    model.release();
    runner.start("A third, please.", None).await.unwrap();
    assert_eq!(runner.consume_until_pause(|_| {}).await.unwrap(), pauses("For how many?"));
    let id = runner.session_id().unwrap().to_owned();
    runner.stop().await.unwrap();
    eventually("the question to be closed", || async {
        (ctx.store.session(None, &id).await.unwrap().status == "cancelled").then_some(())
    })
    .await;
    assert!(process.terminate().success());
}

#[tokio::test]
async fn the_workers_may_be_those_of_the_same_process() {
    let database = Database::new().await;
    let model = asking().await;
    let options = options(&model);
    let ctx = program(&options, &database).await;
    let working = tokio::spawn(pool::run(Arc::clone(&ctx), ctx.bus.news.clone()));
    let mut runner = SessionHandle::new(Arc::clone(&ctx));
    runner.start("A table, please.", None).await.unwrap();
    assert_eq!(runner.consume_until_pause(|_| {}).await.unwrap(), pauses("For how many?"));
    runner.continue_with("six").await.unwrap();
    assert_eq!(runner.consume_until_pause(|_| {}).await.unwrap(), completes("A table for six."));
    ctx.shutdown.draining.cancel();
    working.await.unwrap().unwrap();
    ctx.shutdown.abort.cancel();
}
