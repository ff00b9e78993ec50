//! A provider is down. No run fails for it, the fleet hardly calls it, and work goes on in order when it is back.

mod hang;
mod minutes;
mod own;

use crate::support::checker::check;
use crate::support::client::texts;
use crate::support::proxy::{CutAt, Proxy};
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, eventually};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Short times, so that the tests are quick.
const GATE: &str = "[gate]\nprobe_s = 0.2\nprobe_max_s = 0.4\nwave_s = 0.1";

/// What the provider does now: 0 answers, a status refuses with it.
#[derive(Clone, Default)]
struct Provider(Arc<AtomicU64>);

impl Provider {
    fn is(&self, status: u16) {
        self.0.store(status.into(), Ordering::SeqCst);
    }

    async fn start(&self) -> ModelServer {
        let now = Arc::clone(&self.0);
        ModelServer::start(move |_, _| match now.load(Ordering::SeqCst) {
            0 => Answer::text("Here I am."),
            status => Answer::Error(u16::try_from(status).unwrap()),
        })
        .await
    }
}

fn options(model: &ModelServer, config: &str) -> Options {
    let options = Options::new().model("openai/test").config(config).config(GATE);
    options.env("OPENAI_BASE_URL", &model.url).env("WAKEFUL_QUEUE__CONCURRENCY", "4")
}

async fn post(client: &Client, conversation: &str) -> String {
    let answer = client.chat(conversation, "Hello?").await;
    answer["session_id"].as_str().unwrap().to_owned()
}

async fn journal(client: &Client, id: &str, kind: &str) -> Vec<Value> {
    let (_, page) = client.get(&format!("/v1/sessions/{id}/events?limit=500")).await;
    let entries = page["items"].as_array().unwrap().iter().filter(|entry| entry["type"] == kind);
    entries.map(|entry| entry["payload"].clone()).collect()
}

async fn count(database: &Database, sql: &'static str) -> i64 {
    database.value(sql, "all").await
}

const SHUT: &str = "select count(*) from provider_gates where phase = 'shut' and $1 <> ''";

const WAITING: &str = "select count(*) from jobs where waits_for is not null and lease is null and $1 <> ''";

async fn all_wait(database: &Database, sessions: i64) {
    eventually("every session to wait at the gate", || async {
        (count(database, WAITING).await == sessions).then_some(())
    })
    .await;
}

/// Waits until the session has so many failed attempts in its journal, where they stay.
async fn refusals(client: &Client, id: &str, many: usize) {
    eventually("the refusal", || async {
        (journal(client, id, "ATTEMPT_FAILED").await.len() == many).then_some(())
    })
    .await;
}

/// Runs a command of the client.
async fn said(options: &Options, database: &Database, args: &[&str]) -> String {
    let mut command = options.clone();
    command.args = args.iter().map(|arg| (*arg).to_owned()).collect();
    let (_, process) = command.spawn(&database.url).ended().await;
    process.output()
}

#[tokio::test]
async fn an_outage_under_load_fails_no_run_and_the_fleet_hardly_calls() {
    const SESSIONS: i64 = 40;
    let (database, provider) = (Database::new().await, Provider::default());
    let model = provider.start().await;
    provider.is(503);
    let options = options(&model, "");
    let mut processes = Vec::new();
    for _ in 0..3 {
        processes.push(options.serve(&database).await);
    }
    let client = processes[0].client();
    let mut ids = Vec::new();
    for n in 0..SESSIONS {
        ids.push(post(&client, &format!("c{n}")).await);
    }
    // Every job gets its turn to look, and waits without a slot. Only the probe of the moment is under way.
    eventually("the sessions to wait", || async {
        let idle = "select count(*) from jobs where lease is not null and $1 <> ''";
        (count(&database, WAITING).await >= SESSIONS - 1 && count(&database, idle).await <= 1).then_some(())
    })
    .await;
    let before = model.bodies().len();
    let probes = "select probes::bigint from provider_gates where $1 <> ''";
    let first = count(&database, probes).await;
    assert!(
        before as i64 <= 3 * 4 + first + 2,
        "no more calls than were under way when it failed, and probes: {before} calls, {first} probes"
    );
    eventually("more probes", || async { (count(&database, probes).await >= first + 3).then_some(()) }).await;
    // A probe is counted in the row after its call was counted at the provider.
    let (calls, probed) = (model.bodies().len() - before, count(&database, probes).await - first);
    assert!(calls as i64 <= probed + 2, "only probes: {calls} calls, {probed} probes");

    let why = said(&options, &database, &["session", "why", &ids[20]]).await;
    assert!(why.contains("waits for model openai/test,") && why.contains("status 503"), "{why}");
    let list = said(&options, &database, &["session", "list", "-o", "json"]).await;
    assert!(list.contains("\"waits_for\""), "{list}");
    let (_, shown) = client.get(&format!("/v1/sessions/{}", ids[20])).await;
    assert_eq!(shown["job"]["waits_for"], "openai/test", "{shown}");
    let status = said(&options, &database, &["queue", "status"]).await;
    assert!(
        status.contains("odel openai/test has failed for") && status.contains("sessions wait"),
        "{status}"
    );

    provider.is(0);
    for id in &ids {
        assert_eq!(texts(&client.wait_for(id, "completed").await, "assistant"), ["Here I am."]);
    }
    eventually("an open gate", || async {
        let open = "select count(*) from provider_gates where phase = 'open' and $1 <> ''";
        (count(&database, open).await == 1).then_some(())
    })
    .await;
    let failed = "select count(*) from session_events where payload ->> 'to_state' = 'failed' and $1 <> ''";
    assert_eq!(count(&database, failed).await, 0);
    let died = "select count(*) from jobs where $1 <> ''";
    assert_eq!(count(&database, died).await, 0);
}

#[tokio::test]
async fn when_the_holder_of_the_probe_is_killed_another_one_probes() {
    let (database, provider) = (Database::new().await, Provider::default());
    let model = provider.start().await;
    provider.is(500);
    let options = options(&model, "");
    let first = options.serve(&database).await;
    let second = options.serve(&database).await;
    let third = options.clone().arg("--roles").arg("api").serve(&database).await;
    let client = third.client();
    let ids = [post(&client, "c1").await, post(&client, "c2").await];
    all_wait(&database, 2).await;
    // The provider takes the next call and does not answer to its end.
    model.hold();
    provider.is(0);
    let asked = model.bodies().len();
    eventually("a probe that hangs", || async {
        let held = "select count(*) from provider_gates where probe_until > clock_timestamp() and $1 <> ''";
        (model.bodies().len() > asked && count(&database, held).await == 1).then_some(())
    })
    .await;
    // The last call before may have failed while the provider came back, so look for the process that has the job.
    let pid: i64 = eventually("the holder", || async {
        let holder =
            "select coalesce(max(w.pid), 0)::bigint from workers w join jobs j on j.worker_id = w.worker_id
            join provider_gates g on g.probe_job = j.job_id
            where j.lease is not null and g.probe_until > clock_timestamp() and $1 <> ''";
        Some(count(&database, holder).await).filter(|pid| *pid != 0)
    })
    .await;
    let asked = model.bodies().len();
    let (holder, other): (Process, Process) =
        if i64::from(first.pid()) == pid { (first, second) } else { (second, first) };
    holder.kill();
    model.asked(asked + 1).await;
    assert_eq!(
        count(&database, "select count(*) from provider_gates where phase = 'shut' and $1 <> ''").await,
        1
    );
    model.release();
    for id in ids {
        client.wait_for(&id, "completed").await;
    }
    assert!(other.terminate().success() && third.terminate().success());
}

#[tokio::test]
async fn a_pause_that_the_provider_asks_for_is_kept_by_every_worker() {
    const PAUSE: Duration = Duration::from_millis(700);
    let database = Database::new().await;
    let model = ModelServer::start(|_, number| match number {
        0 => Answer::Busy(429, 700),
        _ => Answer::text("Here I am."),
    })
    .await;
    let options = options(&model, "");
    let processes = [options.serve(&database).await, options.serve(&database).await];
    let client = processes[0].client();
    let first = post(&client, "c0").await;
    refusals(&client, &first, 1).await;
    let mut ids = vec![first];
    for n in 1..5 {
        ids.push(post(&processes[n % 2].client(), &format!("c{n}")).await);
    }
    for id in &ids {
        processes[0].client().wait_for(id, "completed").await;
    }
    let arrivals = model.arrivals();
    assert!(arrivals[1] - arrivals[0] >= PAUSE, "{:?}", arrivals[1] - arrivals[0]);
    assert_eq!(arrivals.len(), 6, "one refusal, five answers");
    let failed = journal(&processes[0].client(), &ids[0], "ATTEMPT_FAILED").await;
    assert_eq!(failed.len(), 1);
    assert_eq!((&failed[0]["fault"], &failed[0]["attempt"]), (&json!("rate_limited"), &json!(1)));
}

#[tokio::test]
async fn a_limit_of_the_rate_holds_up_one_session_while_the_provider_answers_others() {
    const PAUSE: Duration = Duration::from_millis(1500);
    let database = Database::new().await;
    let model = ModelServer::start(|_, number| match number {
        1 => Answer::Busy(429, 1500),
        _ => Answer::text("Here I am."),
    })
    .await;
    let process = options(&model, "").serve(&database).await;
    let client = process.client();
    let first = post(&client, "c0").await;
    client.wait_for(&first, "completed").await;
    let limited = post(&client, "c1").await;
    refusals(&client, &limited, 1).await;
    let shut = "select count(*) from provider_gates where phase <> 'open' and $1 <> ''";
    assert_eq!(count(&database, shut).await, 0, "others may call");
    client.wait_for(&limited, "completed").await;
    let arrivals = model.arrivals();
    assert!(arrivals[2] - arrivals[1] >= PAUSE, "the session itself keeps the pause");
    assert!(process.terminate().success());
}

/// A provider that answers the first call, so that its gate stays open, and then asks for an hour's pause.
async fn limits_one_model() -> ModelServer {
    ModelServer::start(|_, number| match number {
        0 => Answer::text("Here I am."),
        _ => Answer::Busy(429, 3_600_000),
    })
    .await
}

#[tokio::test]
async fn a_pause_that_the_provider_asks_for_ends_with_the_budget_of_the_outage() {
    let (database, model) = (Database::new().await, limits_one_model().await);
    let process = options(&model, "limits = { outage_s = 2 }").serve(&database).await;
    let client = process.client();
    let first = post(&client, "c0").await;
    client.wait_for(&first, "completed").await;
    let limited = post(&client, "c1").await;
    let session = client.wait_for(&limited, "failed").await;
    assert!(session["error"].as_str().unwrap().contains("limits.outage_s"), "{session}");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_long_pause_for_one_model_leaves_the_turn_to_the_fallback() {
    let (database, model) = (Database::new().await, limits_one_model().await);
    let options = options(&model, "fallback = [\"scripted/spare\"]\n[scripted]\ndir = \".\"");
    let script = "[[turn]]\n[[turn.reply]]\ntext = \"The spare one answers.\"\n";
    std::fs::write(options.path("spare.toml"), script).unwrap();
    let process = options.serve(&database).await;
    let client = process.client();
    let first = post(&client, "c0").await;
    client.wait_for(&first, "completed").await;
    let limited = post(&client, "c1").await;
    let session = client.wait_for(&limited, "completed").await;
    assert_eq!(texts(&session, "assistant"), ["The spare one answers."]);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_fault_whose_words_the_database_cannot_store_is_a_fault_like_any_other() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, number| match number {
        0 => Answer::RefusedAs(500, "over\0loaded".to_owned()),
        _ => Answer::text("Here I am."),
    })
    .await;
    let process = options(&model, "").serve(&database).await;
    let client = process.client();
    let id = post(&client, "c0").await;
    client.wait_for(&id, "completed").await;
    let failed = journal(&client, &id, "ATTEMPT_FAILED").await;
    assert!(failed[0]["reason"].as_str().unwrap().contains("over\u{fffd}loaded"), "{failed:?}");
    assert!(process.terminate().success());
}

/// A session that waits at a gate that stays shut for an hour.
async fn waits_for_an_hour(database: &Database) -> (ModelServer, Process, String) {
    let model = ModelServer::start(|_, number| match number {
        0 => Answer::Busy(503, 3_600_000),
        _ => Answer::text("Here I am."),
    })
    .await;
    let process = options(&model, "").serve(database).await;
    let id = post(&process.client(), "c1").await;
    all_wait(database, 1).await;
    (model, process, id)
}

#[tokio::test]
async fn a_session_that_waits_at_a_shut_gate_can_be_cancelled() {
    let database = Database::new().await;
    let (model, process, id) = waits_for_an_hour(&database).await;
    let client = process.client();
    client.post(&format!("/v1/sessions/{id}/cancel"), &json!({"reason": "too late"})).await;
    let session = client.wait_for(&id, "cancelled").await;
    assert!(session["error"].as_str().unwrap().contains("cancelled"), "{session}");
    assert_eq!(session["total_input_tokens"], 0, "the provider refused the call, so it cost nothing");
    assert_eq!(count(&database, "select count(*) from jobs where $1 <> ''").await, 0);
    assert_eq!(model.bodies().len(), 1, "the gate is still shut");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_session_that_waits_at_a_gate_looks_again_when_it_is_woken() {
    let database = Database::new().await;
    let (_model, process, id) = waits_for_an_hour(&database).await;
    let client = process.client();
    // An operator knows that the provider is back.
    sqlx::query("delete from provider_gates").execute(&database.pool).await.unwrap();
    client.post(&format!("/v1/sessions/{id}/wake"), &json!({})).await;
    client.wait_for(&id, "completed").await;
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_give_back_that_meets_a_cut_is_tried_again_and_is_no_death() {
    let (database, provider) = (Database::new().await, Provider::default());
    let model = provider.start().await;
    provider.is(503);
    let options = options(&model, "").short_lease();
    let proxy = Proxy::start(&database.url);
    proxy.cut_when("stuck = case when $5::boolean", CutAt::BeforeServer);
    let process = options.spawn(&proxy.url);
    process.wait_for_log("\"Listening\"").await;
    let client = process.client();
    let id = post(&client, "c1").await;
    process.wait_for_log("The job could not be given back; trying again").await;
    provider.is(0);
    client.wait_for(&id, "completed").await;
    assert_eq!(journal(&client, &id, "ATTEMPT_FAILED").await.len(), 1, "the wait is in the journal");
    assert!(!process.log().contains("Workers died"), "{}", process.log());
    assert!(process.terminate().success());
}

#[tokio::test]
async fn an_outage_longer_than_its_budget_fails_the_run_with_its_name_and_a_retry_goes_on() {
    let (database, provider) = (Database::new().await, Provider::default());
    let model = provider.start().await;
    provider.is(503);
    // The first worker does not live to see the end of its budget.
    let patient = options(&model, "limits = { outage_s = 3600, attempts = 1 }");
    let process = patient.serve(&database).await;
    let id = post(&process.client(), "c1").await;
    all_wait(&database, 1).await;
    let since = "select (extract(epoch from outage_since) * 1000)::bigint from jobs where $1 <> ''";
    let began = count(&database, since).await;
    // What the outage has used up survives the worker.
    process.kill();
    assert_eq!(count(&database, since).await, began);
    let options = options(&model, "limits = { outage_s = 3, attempts = 1 }");
    let process = options.serve(&database).await;
    let client = process.client();
    let session = client.wait_for(&id, "failed").await;
    let error = session["error"].as_str().unwrap();
    for part in ["openai failed for", "status 503", "Remedy:", "limits.outage_s"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let due = "update provider_gates set probe_at = clock_timestamp() - interval '2 min'";
    sqlx::query(due).execute(&database.pool).await.unwrap();
    let doctor = said(&options, &database, &["doctor"]).await;
    let doctor = doctor.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(doctor.contains("The next call tells whether it answers"), "nobody waits for it: {doctor}");
    provider.is(0);
    client.post(&format!("/v1/sessions/{id}/retry"), &json!({})).await;
    client.wait_for(&id, "completed").await;
    assert!(process.terminate().success());
}

#[tokio::test]
async fn with_a_fallback_no_session_waits_and_the_first_model_answers_again_when_it_is_back() {
    let (database, provider) = (Database::new().await, Provider::default());
    let model = provider.start().await;
    provider.is(503);
    let config = "fallback = [\"scripted/spare\"]\n[scripted]\ndir = \".\"";
    let options = options(&model, config);
    let script = "[[turn]]\n[[turn.reply]]\ntext = \"The spare one answers.\"\n";
    std::fs::write(options.path("spare.toml"), script).unwrap();
    let process = options.serve(&database).await;
    let client = process.client();
    let id = post(&client, "c1").await;
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "assistant"), ["The spare one answers."]);
    let asked = model.bodies().len();
    assert!((1..=3).contains(&asked), "{asked}");
    assert_eq!(journal(&client, &id, "ATTEMPT_FAILED").await.len(), asked);
    let called = journal(&client, &id, "LLM_CALLED").await;
    assert_eq!(called.last().unwrap()["model"], "scripted/spare", "{called:?}");

    // The same conversation, while the gate is shut, and when the provider is back.
    provider.is(0);
    eventually("the first model to answer again", || async {
        client.chat("c1", "And now?").await;
        client.wait_for(&id, "completed").await;
        let called = journal(&client, &id, "LLM_CALLED").await;
        (called.last()?["model"] == "openai/test").then_some(())
    })
    .await;
    // It saw what the other model said.
    let last = model.bodies().pop().unwrap();
    assert!(last.contains("The spare one answers."), "{last}");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn each_failed_attempt_is_seen_while_the_run_goes_on() {
    let database = Database::new().await;
    let model = ModelServer::start(|_, number| match number {
        0 | 1 => Answer::Cut("Half an ans".to_owned()),
        _ => Answer::text("Here I am."),
    })
    .await;
    let options = options(&model, "limits = { attempts = 3 }");
    let process = options.serve(&database).await;
    let client = process.client();
    let id = post(&client, "c1").await;
    client.wait_for(&id, "completed").await;
    let failed = journal(&client, &id, "ATTEMPT_FAILED").await;
    let seen: Vec<_> = failed.iter().map(|one| (&one["attempt"], &one["attempts"], &one["fault"])).collect();
    let (three, cut) = (json!(3), json!("stream_cut"));
    assert_eq!(seen, [(&json!(1), &three, &cut), (&json!(2), &three, &cut)]);
    let tail = said(&options, &database, &["session", "tail", &id, "--after", "0"]).await;
    assert!(tail.contains("attempt 2 of 3 of openai/test: ") && tail.contains("next in"), "{tail}");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn an_empty_reply_is_asked_about_once_in_other_words_and_fails_its_run_or_is_accepted() {
    for (setting, empty, calls, said) in [
        ("ask_again", 1, 2, vec!["", "Here I am."]),
        ("ask_again", 2, 3, vec!["", "", "Here I am."]),
        ("accept", 9, 1, vec![""]),
    ] {
        let database = Database::new().await;
        let model =
            ModelServer::start(move |_, number| Answer::text(if number < empty { "" } else { "Here I am." }))
                .await;
        let options = options(&model, &format!("on_empty_reply = \"{setting}\""));
        let process = options.serve(&database).await;
        let client = process.client();
        let id = post(&client, "c1").await;
        if empty == 2 {
            let failed = client.wait_for(&id, "failed").await;
            let error = failed["error"].to_string();
            assert!(error.contains("was empty, also when it was asked again. Remedy: retry"), "{failed}");
            assert_eq!(client.post(&format!("/v1/sessions/{id}/retry"), &json!({})).await.0, 202);
        }
        let session = client.wait_for(&id, "completed").await;
        assert_eq!(texts(&session, "assistant"), said, "{setting}");
        let bodies = model.bodies();
        assert_eq!(bodies.len(), calls, "{setting} {empty}");
        if calls > 1 {
            assert!(bodies[1].contains("Your last reply was empty") && bodies[0] != bodies[1], "{bodies:?}");
        }
        assert_eq!(session["total_output_tokens"], json!(10 * calls), "every call is paid for and counted");
        check(&database, &id, &[]).await;
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn a_model_that_makes_only_malformed_calls_fails_its_run_and_a_retry_asks_it_once_more() {
    let database = Database::new().await;
    let broken = || Answer::Calls(vec![("read_file".to_owned(), "{\"path\": \"a".to_owned())]);
    let model =
        ModelServer::start(move |_, at| if at < 5 { broken() } else { Answer::text("Here I am.") }).await;
    let process = options(&model, "").serve(&database).await;
    let client = process.client();
    let id = post(&client, "c1").await;
    let error = client.wait_for(&id, "failed").await["error"].to_string();
    assert!(error.contains("malformed tool calls in 5 turns in a row. Remedy: "), "{error}");
    assert_eq!(client.post(&format!("/v1/sessions/{id}/retry"), &json!({})).await.0, 202);
    client.wait_for(&id, "completed").await;
    assert_eq!(model.bodies().len(), 6);
}
