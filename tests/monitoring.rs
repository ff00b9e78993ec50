//! What a monitoring system asks of a process: `/healthz`, `/readyz` and `/metrics`, at an address of its own.

use crate::support::{Answer, Client, Database, ModelServer, Options, Process, Program, Server, eventually};
use reqwest::StatusCode;
use serde_json::json;
use std::collections::BTreeSet;
use std::net::TcpListener;
use std::path::Path;

const LISTEN: &str = "WAKEFUL_MONITORING__LISTEN";

fn options(model: &ModelServer) -> Options {
    Options::new()
        .model("openai/test")
        .env("OPENAI_BASE_URL", &model.url)
        .env(LISTEN, "127.0.0.1:0")
        .config("[models.\"openai/test\"]\ninput_usd = 2.0\noutput_usd = 10.0")
}

/// Where the process answers a monitoring system.
async fn monitoring(process: &Process) -> Client {
    let line = process.wait_for_log("A monitoring system may ask here").await;
    let line: serde_json::Value = serde_json::from_str(&line).expect("logs are JSON");
    Client::new(&format!("http://{}", line["address"].as_str().expect("an address")))
}

async fn metrics(client: &Client) -> String {
    let answer = client.get_request("/metrics").send().await.expect("the process answers");
    assert_eq!(answer.status(), StatusCode::OK);
    let kind = answer.headers()["content-type"].to_str().unwrap().to_owned();
    assert!(kind.starts_with("text/plain; version=0.0.4"), "{kind}");
    answer.text().await.unwrap()
}

/// The value of this series, such as `wakeful_workers{state="alive"}`.
fn value(text: &str, series: &str) -> Option<f64> {
    let line =
        text.lines().find(|line| line.strip_prefix(series).is_some_and(|rest| rest.starts_with(' ')))?;
    line.rsplit_once(' ').unwrap().1.parse().ok()
}

/// The names of all series, without what a histogram adds to its name.
fn names(text: &str) -> BTreeSet<String> {
    text.lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
        .filter_map(|line| line.split_once(' '))
        .map(|(name, _)| name.to_owned())
        .collect()
}

#[tokio::test]
async fn a_worker_without_the_api_counts_its_work_and_shows_the_fleet() {
    let database = Database::new().await;
    let model =
        ModelServer::turns(vec![Answer::call("current_time", json!({})), Answer::text("It is noon.")]).await;
    let api = options(&model).arg("--roles=api").serve(&database).await;
    let worker = options(&model).arg("--roles=worker").spawn(&database.url);
    let (of_api, of_worker) = (monitoring(&api).await, monitoring(&worker).await);
    assert_eq!(of_worker.get("/healthz").await.0, StatusCode::OK);
    eventually("the worker to be ready", || async {
        (of_worker.get("/readyz").await.0 == StatusCode::OK).then_some(())
    })
    .await;
    let before = metrics(&of_worker).await;
    assert_eq!(value(&before, "wakeful_runs_total{status=\"failed\"}"), Some(0.0), "{before}");

    let session = api.client().chat("c1", "a secret word").await;
    let session = session["session_id"].as_str().unwrap();
    api.client().wait_for(session, "completed").await;
    let body = json!({"text": "a secret word", "client_key": "k", "user_id": "zoe"});
    for _ in 0..2 {
        assert!(api.client().post("/v1/chat/c2/messages", &body).await.0.is_success());
    }
    let counted = eventually("the worker to count two runs", || async {
        let text = metrics(&of_worker).await;
        (value(&text, "wakeful_runs_total{status=\"completed\"}") == Some(2.0)).then_some(text)
    })
    .await;
    let is = |series: &str, expected: f64| {
        assert_eq!(value(&counted, series), Some(expected), "{series}:\n{counted}");
    };
    is("wakeful_step_seconds_count", 4.0);
    is("wakeful_tool_call_seconds_count{tool=\"current_time\",outcome=\"ok\"}", 2.0);
    is("wakeful_model_call_seconds_count{model=\"openai/test\",outcome=\"ok\"}", 4.0);
    is("wakeful_model_first_chunk_seconds_count{model=\"openai/test\"}", 2.0);
    is("wakeful_commit_seconds_count{result=\"closed\"}", 2.0);
    is("wakeful_database_up", 1.0);
    is("wakeful_workers{state=\"alive\"}", 1.0);
    is("wakeful_jobs{kind=\"step\",state=\"ready\"}", 0.0);
    let claimed = value(&counted, "wakeful_claimed_jobs_total{kind=\"step\"}");
    assert!(claimed >= Some(2.0), "{counted}");
    let tokens =
        value(&counted, "wakeful_model_tokens_total{model=\"openai/test\",kind=\"output\"}").unwrap();
    let cost = value(&counted, "wakeful_model_cost_dollars_total{model=\"openai/test\"}").unwrap();
    let read = ["input", "cached_input"]
        .map(|kind| format!("wakeful_model_tokens_total{{model=\"openai/test\",kind=\"{kind}\"}}"))
        .map(|series| value(&counted, &series).unwrap());
    let billed = read.iter().sum::<f64>() * 2.0 + tokens * 10.0;
    assert!((cost - billed / 1e6).abs() < 1e-6 && tokens > 0.0, "{counted}");

    let of_api = metrics(&of_api).await;
    assert_eq!(value(&of_api, "wakeful_messages_total{outcome=\"accepted\"}"), Some(2.0), "{of_api}");
    assert_eq!(value(&of_api, "wakeful_messages_total{outcome=\"duplicate\"}"), Some(1.0), "{of_api}");
    for text in [&counted, &of_api] {
        assert!(!text.contains("sess_") && !text.contains("secret") && !text.contains("zoe"), "{text}");
    }
    assert!(worker.terminate().success());
    assert!(api.terminate().success());
}

#[tokio::test]
async fn a_failed_call_of_a_model_counts_by_its_fault_and_the_run_as_failed() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, _| Answer::Error(401)).await;
    let server = options(&model).serve(&database).await;
    let monitoring = monitoring(&server).await;
    let session = server.client().chat("c1", "Hello.").await;
    server.client().wait_for(session["session_id"].as_str().unwrap(), "failed").await;
    let text = metrics(&monitoring).await;
    assert_eq!(value(&text, "wakeful_runs_total{status=\"failed\"}"), Some(1.0), "{text}");
    let calls = "wakeful_model_call_seconds_count{model=\"openai/test\",outcome=\"unauthorized\"}";
    assert_eq!(value(&text, calls), Some(1.0), "{text}");
    assert!(server.terminate().success());
}

#[tokio::test]
async fn jobs_that_wait_for_a_provider_are_counted_at_its_gate() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, _| Answer::Busy(429, 60_000)).await;
    let server = options(&model).serve(&database).await;
    let monitoring = monitoring(&server).await;
    assert!(!metrics(&monitoring).await.contains("wakeful_provider_gate_waiting_jobs"));
    server.client().chat("c1", "Hello.").await;
    eventually("the job to be counted", || async {
        let text = metrics(&monitoring).await;
        (value(&text, "wakeful_provider_gate_waiting_jobs{provider=\"openai/test\"}") == Some(1.0))
            .then_some(())
    })
    .await;
    server.kill();
}

#[tokio::test]
async fn while_the_database_is_away_the_process_lives_says_so_and_shows_no_old_numbers() {
    let mut server = Server::start().await;
    let database = Database::on(&server.url(), "pg_default").await;
    let model = ModelServer::start(|_, _| Answer::text("Heard.")).await;
    let process = options(&model).arg("--roles=worker").spawn(&database.url);
    let monitoring = monitoring(&process).await;
    eventually("the process to be ready", || async {
        (monitoring.get("/readyz").await.0 == StatusCode::OK).then_some(())
    })
    .await;
    assert!(metrics(&monitoring).await.contains("wakeful_oldest_ready_job_seconds"));
    server.stop().await;
    let text = eventually("the process to say that the database is away", || async {
        let text = metrics(&monitoring).await;
        (value(&text, "wakeful_database_up") == Some(0.0)).then_some(text)
    })
    .await;
    assert!(!text.contains("wakeful_oldest_ready_job_seconds"), "{text}");
    assert!(text.contains("wakeful_step_seconds_count"), "{text}");
    eventually("the process to say which connections it lost", || async {
        metrics(&monitoring)
            .await
            .contains("wakeful_lost_connection_seconds{use=\"heartbeat\"}")
            .then_some(())
    })
    .await;
    assert_eq!(monitoring.get("/healthz").await.0, StatusCode::OK);
    assert_eq!(monitoring.get("/readyz").await.0, StatusCode::SERVICE_UNAVAILABLE);
    server.start_again().await;
    eventually("the database to be back", || async {
        (value(&metrics(&monitoring).await, "wakeful_database_up") == Some(1.0)).then_some(())
    })
    .await;
    assert!(process.terminate().success());
}

/// An API and a worker, and a model that lets a step wait.
struct Fleet {
    _database: Database,
    model: ModelServer,
    api: Process,
    worker: Process,
    /// Where the worker answers.
    monitoring: Client,
}

impl Fleet {
    async fn new() -> Fleet {
        let database = Database::new().await;
        let model = ModelServer::turns(vec![Answer::text("Heard.")]).await;
        model.hold();
        let api = options(&model).arg("--roles=api").serve(&database).await;
        let worker = options(&model).arg("--roles=worker").spawn(&database.url);
        let monitoring = monitoring(&worker).await;
        Fleet { _database: database, model, api, worker, monitoring }
    }

    /// The worker begins a step, and is asked to end. Returns the step's session.
    async fn drain_at_work(&self) -> String {
        let session = self.api.client().chat("c1", "Hello.").await;
        self.model.asked(1).await;
        self.worker.signal(libc::SIGTERM);
        session["session_id"].as_str().unwrap().to_owned()
    }

    /// The model answers, and the worker ends after its step.
    async fn finish(&self, session: &str) {
        self.model.release();
        self.api.client().wait_for(session, "completed").await;
    }
}

#[tokio::test]
async fn a_worker_that_drains_is_not_ready_until_its_last_step_has_ended() {
    let fleet = Fleet::new().await;
    let session = fleet.drain_at_work().await;
    let monitoring = &fleet.monitoring;
    eventually("the worker to say that it drains", || async {
        let (status, said) = monitoring.get("/readyz").await;
        let drains = said["checks"]["draining"] == "draining";
        (status == StatusCode::SERVICE_UNAVAILABLE && drains).then_some(())
    })
    .await;
    assert_eq!(monitoring.get("/healthz").await.0, StatusCode::OK);
    fleet.finish(&session).await;
    let (status, worker) = fleet.worker.ended().await;
    assert!(status.success(), "{}", worker.log());
    assert!(fleet.api.terminate().success());
}

#[tokio::test]
async fn a_server_that_drains_takes_requests_until_its_load_balancer_can_have_heard_of_it() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Heard.")]).await;
    for roles in ["api", "api,worker,scheduler"] {
        let options = options(&model)
            .env("WAKEFUL_SERVER__DRAIN_DELAY_S", "600")
            .env("WAKEFUL_QUEUE__DRAIN_S", "600")
            .arg(&format!("--roles={roles}"));
        drains(options.serve(&database).await, roles).await;
    }
}

async fn drains(api: Process, roles: &str) {
    let monitoring = monitoring(&api).await;
    api.signal(libc::SIGTERM);
    eventually("the API to say that it drains", || async {
        (monitoring.get("/readyz").await.0 == StatusCode::SERVICE_UNAVAILABLE).then_some(())
    })
    .await;
    // The worker of this process has ended, so the message waits for another one.
    let session = api.client().chat(roles, "Hello.").await;
    assert!(session["session_id"].is_string(), "{session}");
    // The second signal ends the wait.
    api.signal(libc::SIGTERM);
    let (status, api) = api.ended().await;
    assert!(status.success(), "{}", api.log());
}

#[tokio::test]
async fn the_command_for_health_checks_says_what_the_process_says() {
    let fleet = Fleet::new().await;
    let folder = tempfile::tempdir().unwrap();
    let ask = async |listen: &str| {
        let mut command = Program::command(folder.path());
        command.arg("ready").env(LISTEN, listen);
        let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(said).unwrap())
    };
    let listen = fleet.monitoring.url.trim_start_matches("http://").to_owned();
    let is_ready = || async { (ask(&listen).await == (Some(0), "ready\n".to_owned())).then_some(()) };
    eventually("the worker to be ready", is_ready).await;
    let session = fleet.drain_at_work().await;
    eventually("the worker to drain", || async {
        let (status, said) = ask(&listen).await;
        (status == Some(6) && said.contains("it is draining")).then_some(())
    })
    .await;
    fleet.finish(&session).await;
    assert!(fleet.worker.ended().await.0.success());
    let (status, said) = ask(&listen).await;
    assert!(status == Some(6) && said.contains("nothing listens there"), "{said}");
    assert!(fleet.api.terminate().success());
}

#[tokio::test]
async fn an_address_that_is_in_use_is_said_with_its_key() {
    let database = Database::new().await;
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let model = ModelServer::start(|_, _| Answer::text("Heard.")).await;
    let listen = taken.local_addr().unwrap().to_string();
    let mut process = options(&model).env(LISTEN, &listen).spawn(&database.url);
    assert_eq!(process.wait().code(), Some(6), "{}", process.log());
    let said = process.log();
    assert!(said.contains(&listen) && said.contains("monitoring.listen"), "{said}");
}

/// The names of metrics in a text: whatever begins with `wakeful_` and is no name of a role.
fn named_in(text: &str) -> BTreeSet<String> {
    let is_of_name = |c: char| c.is_ascii_lowercase() || c == '_';
    let mut found = BTreeSet::new();
    for (at, _) in text.match_indices("wakeful_") {
        let name: String = text[at..].chars().take_while(|c| is_of_name(*c)).collect();
        let of_histogram = ["_bucket", "_count", "_sum"].iter().find_map(|part| name.strip_suffix(part));
        found.insert(of_histogram.unwrap_or(&name).to_owned());
    }
    found
}

#[tokio::test]
async fn the_documents_and_the_alerts_name_the_metrics_that_there_are() {
    let database = Database::new().await;
    let model =
        ModelServer::turns(vec![Answer::call("current_time", json!({})), Answer::text("It is noon.")]).await;
    let server = options(&model).serve(&database).await;
    let session = server.client().chat("c1", "Hello.").await;
    server.client().wait_for(session["session_id"].as_str().unwrap(), "completed").await;
    let mut shown = names(&metrics(&monitoring(&server).await).await);
    // Only in trouble, for which there are tests above.
    shown
        .extend(["wakeful_lost_connection_seconds", "wakeful_provider_gate_waiting_jobs"].map(str::to_owned));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let documented = named_in(&read("docs/monitoring.md"));
    assert_eq!(documented, shown);
    let rules = read("deploy/prometheus/wakeful.rules.yaml");
    let used = named_in(&rules);
    assert!(used.is_subset(&shown), "{:?}", used.difference(&shown));
    assert!(used.len() > 10, "{used:?}");
    let dashboard = named_in(&read("deploy/grafana/wakeful.json"));
    assert_eq!(dashboard, shown, "the dashboard shows every metric");
    let alerts = |text: &str, before: &str| -> BTreeSet<String> {
        let begun = text.lines().filter_map(|line| line.trim_start().strip_prefix(before));
        begun.filter_map(|rest| rest.split('`').next()).map(str::to_owned).collect()
    };
    let document = read("docs/monitoring.md");
    assert_eq!(
        alerts(&document, "| `Wakeful"),
        alerts(&rules, "- alert: Wakeful"),
        "each alert has its remedy"
    );
    assert!(server.terminate().success());
}
