//! A database that answers, and fails the statements of one session's step again and again.

use crate::support::{Answer, Database, ModelServer, Options, eventually};
use serde_json::json;
use sqlx::AssertSqlSafe;
use std::sync::Arc;

/// Fails every commit that writes a message, as a server does whose file or function is broken.
const BREAK: &str = "
    create function broken() returns trigger language plpgsql as $$
    begin raise exception 'the index is broken' using errcode = 'XX002'; end $$;
    create trigger broken before insert on conversation_records for each row
        when (new.role = 'assistant') execute function broken()";
const MEND: &str = "drop trigger broken on conversation_records";

async fn sql(database: &Database, text: &'static str) {
    sqlx::raw_sql(text).execute(&database.pool).await.unwrap();
}

async fn run(options: &Options, database: &Database, args: &[&str]) -> String {
    let command = Options {
        config: options.config.clone(),
        args: args.iter().map(|&arg| arg.to_owned()).collect(),
        env: options.env.clone(),
        dir: Arc::clone(&options.dir),
    };
    let (_, process) = command.spawn(&database.url).ended().await;
    process.output()
}

#[tokio::test]
async fn a_step_that_the_database_fails_is_named_everywhere_and_goes_on_when_it_is_mended() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    let client = process.client();
    sql(&database, BREAK).await;
    let id = client.chat("c1", "Hi.").await["session_id"].as_str().unwrap().to_owned();
    let (status, body) = eventually("/readyz to name the step", || async {
        let (status, body) = client.get("/readyz").await;
        body["checks"]["steps"].as_str().unwrap().contains("again and again").then_some((status, body))
    })
    .await;
    assert_eq!((status.as_u16(), &body["checks"]["database"]), (200, &json!("ok")));
    let job = client.session(&id).await["job"].clone();
    assert!(job["faults"].as_i64().unwrap() > 1 && job["fault_since"].is_string(), "{job}");
    let why = run(&options, &database, &["session", "why", &id]).await;
    assert!(why.contains("the index is broken") && why.contains("The database has failed it"), "{why}");
    let doctor = run(&options, &database, &["doctor"]).await;
    assert!(doctor.contains("PROBLEM\tsteps") && doctor.contains(&id), "{doctor}");

    sql(&database, MEND).await;
    client.wait_for(&id, "completed").await;
    assert_eq!(client.get("/readyz").await.1["checks"]["steps"], "ok");
}

#[tokio::test]
async fn a_step_that_the_database_fails_for_too_long_rests_until_an_operator_retries_it() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
    let options = Options::new()
        .model("openai/test")
        .env("OPENAI_BASE_URL", &model.url)
        .config("[queue]\ndatabase_faults_s = 0.1");
    let process = options.serve(&database).await;
    let client = process.client();
    sql(&database, BREAK).await;
    let id = client.chat("c1", "Hi.").await["session_id"].as_str().unwrap().to_owned();
    let session = client.wait_for(&id, "needs_attention").await;
    let error = session["error"].as_str().unwrap();
    assert!(error.contains("the index is broken") && error.contains("Remedy"), "{error}");
    let jobs = AssertSqlSafe("select count(*) from jobs");
    let jobs: i64 = sqlx::query_scalar(jobs).fetch_one(&database.pool).await.unwrap();
    assert_eq!(jobs, 0, "nothing loops");
    let why = run(&options, &database, &["session", "why", &id]).await;
    assert!(why.contains("waits for an operator") && why.contains("session retry"), "{why}");

    sql(&database, MEND).await;
    let (status, _) = client.post(&format!("/v1/sessions/{id}/retry"), &json!({})).await;
    assert_eq!(status.as_u16(), 202);
    client.wait_for(&id, "completed").await;
}

#[tokio::test]
async fn a_reply_is_tried_again_although_the_database_failed_its_step_long_ago() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    let client = process.client();
    model.hold();
    let id = client.chat("c1", "Hi.").await["session_id"].as_str().unwrap().to_owned();
    model.asked(1).await;
    sql(&database, "update jobs set faults = 5, fault_since = clock_timestamp() - interval '2 hours'").await;
    sql(
        &database,
        // Once as one of several commits, and once alone.
        "create sequence tries;
        create function cut_twice() returns trigger language plpgsql as $$
        begin
            if nextval('tries') <= 2 then raise exception 'cut' using errcode = '57P01'; end if;
            return new;
        end $$;
        create trigger cut_twice before insert on conversation_records for each row
            when (new.role = 'assistant') execute function cut_twice()",
    )
    .await;
    model.release();
    client.wait_for(&id, "completed").await;
    assert_eq!(model.bodies().len(), 1);
}

#[tokio::test]
async fn a_database_whose_default_isolation_is_serializable_works() {
    let database = Database::new().await;
    let stricter =
        format!("alter database \"{}\" set default_transaction_isolation = 'serializable'", database.name);
    sqlx::raw_sql(AssertSqlSafe(stricter)).execute(&database.pool).await.unwrap();
    let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    let client = process.client();
    let chats = (0..12).map(|number| {
        let client = client.clone();
        async move {
            let id =
                client.chat(&format!("c{number}"), "Hi.").await["session_id"].as_str().unwrap().to_owned();
            client.wait_for(&id, "completed").await;
        }
    });
    futures::future::join_all(chats).await;
    assert!(!process.log().contains("could not serialize"), "{}", process.log());
}
