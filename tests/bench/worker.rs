//! The whole worker: processes of the release binary drain a backlog of sessions with a model that answers at once.
//! And what an operator waits for: the start, the pick-up of a message, the takeover after a kill.

use crate::fixture::Database;
use crate::process::{self, STEPS, Serve, Site};
use crate::provider::Provider;
use crate::server::{Server, Spent};
use anyhow::{Context, Result, bail, ensure};
use sqlx::Connection;
use std::time::{Duration, Instant};
use wakeful_engine::tool::registry::Registry;
use wakeful_store::Store;
use wakeful_store::wake::{Continues, NewMessage, NewSession};
use wakeful_workflow::policy::SessionPolicy;
use wakeful_workflow::record::Role;
use wakeful_workflow::seed::Seed;

/// One drained backlog.
#[derive(Clone, Copy, Debug)]
pub struct Drain {
    pub steps: f64,
    /// From the beginning of the first step to the end of the last.
    pub seconds: f64,
    /// All of the processes together.
    pub worker_cpu_s: f64,
    pub spent: Spent,
}

/// Drains a backlog of `sessions` with `processes` workers. Each session has [`STEPS`] tool steps, which count, and an
/// answer, which does not.
pub async fn drain(server: &mut Server, processes: usize, sessions: usize) -> Result<Drain> {
    let database = Database::lasting(server.url(), "worker").await?;
    let site = Site::new()?;
    backlog(&database, &site, sessions, "steps").await?;
    let mut connection = database.connect().await?;
    // The workers start idle, so that the figures do not contain their start.
    sqlx::query("update jobs set run_at = 'infinity'").execute(&mut connection).await?;
    sqlx::query("vacuum analyze").execute(&mut connection).await?;
    let mut workers = Vec::new();
    for _ in 0..processes {
        workers.push(site.serve(&database.url, "worker").await?);
    }
    // Their first looks and heartbeats are over then, so that the figures do not contain them either. Nothing tells of it.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let pids = workers.iter().map(Serve::pid).collect::<Result<Vec<_>>>()?;
    let cpu = || pids.iter().map(|pid| process::cpu_seconds(*pid)).sum::<f64>();
    let meter = server.start(&database).await?;
    let before = cpu();
    // The comment and the alias keep the bench's own statements out of the count.
    sqlx::query("update jobs set run_at = clock_timestamp() /* of_the_bench */")
        .execute(&mut connection)
        .await?;
    let store = database.store(1).await?;
    store.announce("").await?;
    store.close().await;
    let began = Instant::now();
    while sqlx::query_scalar::<_, bool>("select exists (select from jobs) as of_the_bench")
        .fetch_one(&mut connection)
        .await?
    {
        if began.elapsed() > Duration::from_secs(180) {
            let log = workers[0].log_text();
            bail!(
                "the backlog is not drained after three minutes:\n{}",
                &log[log.len().saturating_sub(4000)..]
            );
        }
        // To be told of each commit would cost the server more than to look. The times are those of the rows.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let worker_cpu_s = cpu() - before;
    let spent = server.stop(&database, meter).await?;
    let (steps, seconds): (i64, f64) = sqlx::query_as(
        "select count(*) filter (where executed_local_tool_count > 0),
            extract(epoch from max(committed_at) - min(started_at))::float8
        from session_steps",
    )
    .fetch_one(&mut connection)
    .await?;
    ensure!(steps as usize == sessions * STEPS, "{steps} steps of {sessions} sessions");
    drop(workers);
    connection.close().await?;
    Ok(Drain { steps: steps as f64, seconds, worker_cpu_s, spent })
}

/// Sessions that wait for a worker.
async fn backlog(database: &Database, site: &Site, sessions: usize, says: &str) -> Result<()> {
    let store = database.store(4).await?;
    for number in 0..sessions {
        let session_id = wake(&store, &format!("backlog-{number}"), says).await?;
        site.furnish(&session_id)?;
    }
    store.close().await;
    Ok(())
}

/// Brings in a session of [`STEPS`] steps with its file, and tells the workers.
pub async fn bring_in(store: &Store, site: &Site, conversation: &str) -> Result<()> {
    let session_id = wake(store, conversation, "steps").await?;
    site.furnish(&session_id)?;
    Ok(store.announce(&session_id).await?)
}

/// Waits until the queue is empty. The worker tells of the end of each run.
pub async fn at_rest_again(database: &Database, worker: &Serve) -> Result<()> {
    let mut news = database.news().await?;
    let mut connection = database.connect().await?;
    while sqlx::query_scalar::<_, i64>("select count(*) from jobs").fetch_one(&mut connection).await? > 0 {
        let told = tokio::time::timeout(Duration::from_secs(60), news.recv()).await;
        told.with_context(|| format!("a run does not end:\n{}", worker.log_text()))??;
    }
    Ok(connection.close().await?)
}

/// Posts a message to a new chat, without a process. Returns the session's id.
async fn wake(store: &Store, conversation: &str, says: &str) -> Result<String> {
    let registry = Registry::built_in()?;
    let new = NewSession {
        space_id: "default".to_owned(),
        mailbox_id: "default".to_owned(),
        conversation_id: format!("default/{conversation}"),
        trigger_type: "chat".to_owned(),
        trigger_id: conversation.to_owned(),
        continues: Continues::Trigger,
        agent: "default".to_owned(),
        model_id: "scripted/bench".to_owned(),
        model_context_window: 200_000,
        tools: registry.definitions(&["read_file"])?,
        policy: SessionPolicy::default(),
        repository_id: None,
        speaker: None,
        only_agent: false,
        seeds: vec![Seed { role: Role::System, content: "You are measured.".to_owned(), is_new: true }],
    };
    let message = NewMessage {
        client_key: None,
        text: says.to_owned(),
        sender: None,
        trace_context: None,
        attachments: Vec::new(),
    };
    Ok(store.wake(&new, &message).await?.session_id)
}

/// Milliseconds from a message that is posted to an idle process until its first step begins.
pub async fn pick_ups(server: &Server, times: usize) -> Result<Vec<f64>> {
    let database = Database::create(server.url(), "pick_up").await?;
    let site = Site::new()?;
    let process = site.serve(&database.url, "api,worker").await?;
    let mut connection = database.connect().await?;
    // The process tells of each commit. So the bench asks nothing of the database while it measures.
    let mut news = database.news().await?;
    let (client, url) = (reqwest::Client::new(), process.url()?);
    let mut waits = Vec::new();
    // The first posts prepare statements and open connections.
    for number in 0..times + 5 {
        let posted = chrono::Utc::now();
        let answer = client
            .post(format!("{url}/v1/chat/pick-up-{number}/messages"))
            .body(serde_json::json!({"user_id": "ann", "text": "answer"}).to_string())
            .send()
            .await?
            .error_for_status()?
            .text()
            .await?;
        let answer: serde_json::Value = serde_json::from_str(&answer)?;
        let session_id = answer["session_id"].as_str().context("an id")?;
        let began = loop {
            let began: Option<chrono::DateTime<chrono::Utc>> = sqlx::query_scalar(
                "select started_at from session_steps where session_id = $1 and step_number = 1",
            )
            .bind(session_id)
            .fetch_optional(&mut connection)
            .await?;
            match began {
                Some(began) => break began,
                None => {
                    let told = tokio::time::timeout(Duration::from_secs(30), news.recv());
                    told.await.context("no step was committed")??;
                }
            }
        };
        if number >= 5 {
            waits.push((began - posted).num_microseconds().context("a short time")? as f64 / 1e3);
        }
        // What is measured is a process that has rested: people write with pauses. A post right after a run would be faster.
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    process.kill().await?;
    connection.close().await?;
    database.remove().await?;
    Ok(waits)
}

/// Milliseconds from a message that is posted to an idle process until the first byte of the model's request arrives at
/// the provider. Each message is of a new conversation.
pub async fn first_bytes(server: &Server, times: usize) -> Result<Vec<f64>> {
    let database = Database::create(server.url(), "first_byte").await?;
    let mut provider = Provider::start().await?;
    let site = Site::with_provider(&provider.url)?;
    let process = site.serve(&database.url, "api,worker").await?;
    let (client, url) = (reqwest::Client::new(), process.url()?);
    let mut waits = Vec::new();
    // The first posts prepare statements and open connections, also the one to the provider.
    for number in 0..times + 5 {
        let posted = Instant::now();
        let answer = client
            .post(format!("{url}/v1/chat/first-byte-{number}/messages"))
            .body(serde_json::json!({"user_id": "ann", "text": "answer"}).to_string())
            .send()
            .await?
            .error_for_status();
        answer?;
        let came = tokio::time::timeout(Duration::from_secs(30), provider.first_bytes.recv());
        let came = came.await.context("no request came to the provider")?.context("the provider runs")?;
        if number >= 5 {
            waits.push((came - posted).as_secs_f64() * 1e3);
        }
        // As above.
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    process.kill().await?;
    database.remove().await?;
    Ok(waits)
}

/// Seconds from `kill -9` of a worker with the default settings until another one claims its job.
pub async fn takeovers(server: &Server, times: usize) -> Result<Vec<f64>> {
    let database = Database::create(server.url(), "takeover").await?;
    let site = Site::new()?;
    let mut connection = database.connect().await?;
    let (store, mut news) = (database.store(2).await?, database.news().await?);
    let mut workers =
        vec![site.serve(&database.url, "worker").await?, site.serve(&database.url, "worker").await?];
    let mut waits = Vec::new();
    for number in 0..times {
        // Each kill has a session of its own: a job that has killed several workers is given up.
        let session_id = wake(&store, &format!("held-{number}"), "hold").await?;
        store.announce(&session_id).await?;
        // A step must have begun: a job that was only claimed may be on its way back.
        let pid = loop {
            let holder: Option<i32> = sqlx::query_scalar(
                "select workers.pid from jobs join workers using (worker_id)
                where session_id = $1 and exists (select from generations where session_id = $1)",
            )
            .bind(&session_id)
            .fetch_optional(&mut connection)
            .await?;
            match holder {
                Some(pid) => break pid,
                None => {
                    let told = tokio::time::timeout(Duration::from_secs(30), news.recv()).await;
                    told.context("no step began")??;
                }
            }
        };
        // Let its heartbeat run, so that the kill strikes at a random moment of it.
        tokio::time::sleep(Duration::from_millis(700)).await;
        let at = workers.iter().position(|worker| worker.pid().is_ok_and(|one| one == pid)).with_context(
            || {
                let pids: Vec<_> = workers.iter().map(|worker| worker.pid().ok()).collect();
                format!("process {pid} holds the job, and the bench started {pids:?}")
            },
        )?;
        let holder = "select worker_id from jobs where session_id = $1";
        let before: Option<String> =
            sqlx::query_scalar(holder).bind(&session_id).fetch_one(&mut connection).await?;
        workers.swap_remove(at).kill().await?;
        let killed = Instant::now();
        // The job is freed first: it gets a new lease, and keeps the dead worker's name until another one claims it.
        loop {
            let now: Option<String> =
                sqlx::query_scalar(holder).bind(&session_id).fetch_one(&mut connection).await?;
            if now.is_some() && now != before {
                break;
            }
            ensure!(killed.elapsed() < Duration::from_secs(90), "no worker claimed the job");
            // Nothing tells of a claim.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        waits.push(killed.elapsed().as_secs_f64());
        workers.push(site.serve(&database.url, "worker").await?);
    }
    drop(workers);
    store.close().await;
    connection.close().await?;
    database.remove().await?;
    Ok(waits)
}

/// What one process needs while nothing happens.
#[derive(Clone, Debug)]
pub struct Idle {
    /// From the start of `serve` until `/readyz` says yes, several times.
    pub ready_ms: Vec<f64>,
    pub resident_mb: f64,
    pub cpu_percent: f64,
    pub resting: usize,
    pub resident_with_resting_mb: f64,
}

pub async fn idle(server: &Server, resting: usize, times: usize) -> Result<Idle> {
    let database = Database::create(server.url(), "idle").await?;
    let site = Site::new()?;
    let mut ready_ms = Vec::new();
    for _ in 0..times {
        let process = site.serve(&database.url, "api,worker,scheduler").await?;
        ready_ms.push(process.ready_ms);
        process.kill().await?;
    }
    let (resident_mb, cpu_percent) = at_rest(&site, &database).await?;
    rest(&database, &site, resting).await?;
    let (resident_with_resting_mb, _) = at_rest(&site, &database).await?;
    database.remove().await?;
    Ok(Idle { ready_ms, resident_mb, cpu_percent, resting, resident_with_resting_mb })
}

/// Resident memory and CPU of a process that does nothing.
async fn at_rest(site: &Site, database: &Database) -> Result<(f64, f64)> {
    let process = site.serve(&database.url, "api,worker,scheduler").await?;
    // What a start does once is not part of resting.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (pid, seconds) = (process.pid()?, 5.0);
    let before = process::cpu_seconds(pid);
    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
    let cpu = process::cpu_seconds(pid) - before;
    let resident = process::resident_mb(pid)?;
    process.kill().await?;
    Ok((resident, 100.0 * cpu / seconds))
}

/// Makes sessions that rest: one runs to its end, and SQL copies its rows.
pub async fn rest(database: &Database, site: &Site, count: usize) -> Result<()> {
    backlog(database, site, 1, "answer").await?;
    let mut connection = database.connect().await?;
    let worker = site.serve(&database.url, "worker").await?;
    at_rest_again(database, &worker).await?;
    worker.kill().await?;
    let columns: String = sqlx::query_scalar(
        "select string_agg(case column_name
                when 'session_id' then '''sess_copy_'' || n'
                when 'conversation_id' then '''default/copy-'' || n'
                when 'trigger_id' then '''copy-'' || n'
                else 's.' || quote_ident(column_name) end, ', ' order by ordinal_position)
            || chr(10) || string_agg(quote_ident(column_name), ', ' order by ordinal_position)
        from information_schema.columns
        where table_name = 'conversation_sessions' and table_schema = 'public'
            and is_generated = 'NEVER' and is_identity = 'NO'",
    )
    .fetch_one(&mut connection)
    .await?;
    let (values, columns) = columns.split_once('\n').context("two lists")?;
    let copy = format!(
        "insert into conversation_sessions ({columns}) select {values} from conversation_sessions s, generate_series(2, {count}) n"
    );
    // Foreign keys would ask for each copy's conversation, which a session at rest does not need here.
    for statement in ["set session_replication_role = replica", &copy, "vacuum analyze"] {
        sqlx::query(sqlx::AssertSqlSafe(statement.to_owned())).execute(&mut connection).await?;
    }
    connection.close().await?;
    Ok(())
}
