//! apalis with its storage in Postgres: each task is a workflow of five steps, and each step returns two messages of 2 KB.

use apalis::prelude::*;
use apalis_postgres::{Config, PgPool, PostgresStorage};
use apalis_workflow::SteppedFlow;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader};

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Message {
    role: String,
    content: String,
}

/// What a step stores.
async fn step<T>(_: T) -> Result<Vec<Message>, BoxDynError> {
    let message = |role: &str| Message { role: role.to_owned(), content: variable("BENCH_TEXT") };
    Ok(vec![message("assistant"), message("tool")])
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}

#[tokio::main]
async fn main() -> Result<(), BoxDynError> {
    let tasks: usize = variable("BENCH_TASKS").parse()?;
    assert_eq!(variable("BENCH_STEPS"), "5", "the workflow below has five steps");
    let pool = PgPool::connect(&variable("BENCH_DATABASE_URL")).await?;
    PostgresStorage::setup(&pool).await?;
    let config = Config::default().queue("bench").batch_size(16);
    let mut backend =
        PostgresStorage::new(&pool).with_config(config).with_pubsub().poll_with_interval(Duration::from_millis(20));
    for task in 0..tasks {
        backend.push(task).await?;
    }
    println!("ready");
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    lines.next_line().await?;
    let began = Instant::now();
    let workflow = SteppedFlow::new("session")
        .and_then(step::<usize>)
        .and_then(step::<Vec<Message>>)
        .and_then(step::<Vec<Message>>)
        .and_then(step::<Vec<Message>>)
        .and_then(step::<Vec<Message>>);
    let worker = WorkerBuilder::new("bench").backend(backend).concurrency(16).build(workflow);
    let working = tokio::spawn(worker.run());
    loop {
        // Each step is a job of its own.
        let done: i64 = sqlx::query_scalar("select count(*) as of_the_bench from apalis.jobs where status = 'Done'")
            .fetch_one(&pool)
            .await?;
        if done as usize >= 5 * tasks {
            break;
        }
        // A job is done when its row says so, and apalis tells nobody. Each look reads all rows, so looks are rare.
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    println!("seconds {}", began.elapsed().as_secs_f64());
    lines.next_line().await?;
    working.abort();
    Ok(())
}
