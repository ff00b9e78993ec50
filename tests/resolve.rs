//! An operator says how an uncertain effect ended, and the session continues with that outcome.

use crate::support::checker;
use crate::support::client::texts;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, eventually};
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::sync::Arc;

/// A session whose worker was killed in the middle of its charges.
struct Paused {
    database: Database,
    model: ModelServer,
    options: Options,
    process: Process,
    client: Client,
    id: String,
}

const ASK: &str = "on_uncertain = \"needs_attention\"";

impl Paused {
    /// Starts a session whose worker makes `charges` charges in parallel and dies after the effects. `config`
    /// is added to the agent's configuration.
    async fn new(charges: usize, config: &str) -> Paused {
        let model = ModelServer::start(move |body, _| {
            let messages = body["messages"].as_array().unwrap();
            let last = messages.last().unwrap();
            match (last["role"].as_str(), last["content"].as_str()) {
                (Some("user"), Some("Charge me.")) => Answer::Calls(
                    (0..charges)
                        .map(|n| ("charge".to_owned(), json!({"cents": 500 + n}).to_string()))
                        .collect(),
                ),
                (_, text) => Answer::text(&format!("I see: {}", text.unwrap_or_default())),
            }
        })
        .await;
        let database = Database::new().await;
        let options = Options::new().model("openai/test").config(config).env("OPENAI_BASE_URL", &model.url);
        std::fs::write(options.path("hold"), "").unwrap();
        let process = options.serve(&database).await;
        let first = process.client().chat("c1", "Charge me.").await;
        options.has_effects(charges).await;
        process.kill();
        std::fs::remove_file(options.path("hold")).unwrap();
        let process = options.serve(&database).await;
        let (client, id) = (process.client(), first["session_id"].as_str().unwrap().to_owned());
        Paused { database, model, options, process, client, id }
    }

    async fn asks(self) -> Paused {
        self.client.wait_for(&self.id, "needs_attention").await;
        self
    }

    async fn resolve(&self, body: Value) -> (StatusCode, Value) {
        self.client.post(&format!("/v1/sessions/{}/resolve", self.id), &body).await
    }

    /// `wakeful session resolve` with these arguments: exit status, stdout, stderr.
    async fn cli(&self, args: &[&str]) -> (i32, String, String) {
        let all = ["session", "resolve", &self.id].iter().chain(args).map(|&arg| arg.to_owned()).collect();
        let options = Options { args: all, dir: Arc::clone(&self.options.dir), ..self.options.clone() };
        let (status, ran) = options.spawn(&self.database.url).ended().await;
        (status.code().expect("it was not killed"), ran.output(), ran.log())
    }

    async fn call_id(&self, number: usize) -> String {
        let session = self.client.session(&self.id).await;
        session["tool_calls"][number]["call_id"].as_str().expect("a call").to_owned()
    }

    async fn run_sql(&self, sql: &'static str) {
        let done = sqlx::query(sql).bind(&self.id).execute(&self.database.pool).await;
        assert!(done.expect(sql).rows_affected() > 0, "{sql} changes something");
    }

    async fn journal(&self, kind: &str) -> Vec<Value> {
        let (_, page) = self.client.get(&format!("/v1/sessions/{}/events?limit=500", self.id)).await;
        let items = page["items"].as_array().expect("items").iter();
        items.filter(|entry| entry["type"] == kind).map(|entry| entry["payload"].clone()).collect()
    }

    /// The last message that the model was sent.
    fn shown(&self) -> String {
        let body: Value = serde_json::from_str(self.model.bodies().last().unwrap()).unwrap();
        body["messages"].as_array().unwrap().last().unwrap()["content"].as_str().unwrap().to_owned()
    }
}

#[tokio::test]
async fn a_charge_that_happened_becomes_the_calls_result_and_the_run_completes() {
    let paused = Paused::new(1, ASK).await.asks().await;
    let call = paused.call_id(0).await;
    assert_eq!(paused.model.bodies().len(), 1, "the model waits for the person");
    let body = json!({"call_id": call, "outcome": "happened", "result": "Charged 500 cents, receipt 7.",
        "reason": "seen in the bank's list", "by": "ann"});
    let (status, resolved) = paused.resolve(body.clone()).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{resolved}");
    assert_eq!((&resolved["status"], &resolved["effect"]), (&json!("done"), &json!(call)));
    assert!(resolved["run_id"].is_string(), "{resolved}");
    let session = paused.client.wait_for(&paused.id, "completed").await;
    assert_eq!(texts(&session, "tool"), ["Charged 500 cents, receipt 7."]);
    assert_eq!(texts(&session, "assistant")[1], "I see: Charged 500 cents, receipt 7.");
    assert_eq!(session["tool_calls"][0]["status"], "done");
    let journalled = paused.journal("EFFECT_RESOLVED").await;
    assert_eq!(
        journalled,
        [json!({"effect": call, "resolution": "happened", "by": "ann", "reason": "seen in the bank's list"})]
    );
    assert_eq!(paused.journal("TOOL_FAILED_UNCERTAIN").await.len(), 1);
    let resumed = paused.journal("state_transition").await;
    assert!(resumed.iter().any(|moved| moved["reason"] == "seen in the bank's list"), "{resumed:?}");

    // The same resolution again gets the same answer. Another one is refused. Neither changes anything.
    let before = checker::dump(&paused.database).await;
    assert_eq!(paused.resolve(body).await, (StatusCode::OK, resolved));
    let (status, problem) = paused.resolve(json!({"call_id": call, "outcome": "did_not_happen"})).await;
    assert_eq!(status, StatusCode::CONFLICT);
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("resolved before by ann, as happened"), "{problem}");
    let (status, _) = paused.resolve(json!({"call_id": call, "outcome": "happened", "result": "No."})).await;
    assert_eq!(status, StatusCode::CONFLICT);
    assert_eq!(checker::dump(&paused.database).await, before);
    assert_eq!(paused.options.effects().len(), 1, "charged once");
    checker::check(&paused.database, &paused.id, &paused.options.effects()).await;
    assert!(paused.process.terminate().success());
}

#[tokio::test]
async fn did_not_happen_is_refused_while_it_still_could_and_never_runs_the_call_again() {
    let paused = Paused::new(1, ASK).await.asks().await;
    let call = paused.call_id(0).await;
    // The worker had a minute for the call. Until that ends, it may be stopped and not dead.
    let (code, _, error) = paused.cli(&[&call, "--did-not-happen"]).await;
    assert_eq!(code, 4, "{error}");
    assert!(error.contains("may still carry it out until 20"), "{error}");
    let (status, problem) = paused.resolve(json!({"call_id": call, "outcome": "did_not_happen"})).await;
    assert_eq!(status, StatusCode::CONFLICT, "{problem}");
    assert_eq!(paused.journal("EFFECT_RESOLVED").await, [json!(null); 0]);
    assert_eq!(paused.client.session(&paused.id).await["status"], "needs_attention");

    paused
        .run_sql(
            "update tool_calls set settled_by = clock_timestamp() - interval '1 s' where session_id = $1",
        )
        .await;
    let (code, out, error) =
        paused.cli(&[&call, "--did-not-happen", "--by", "bob", "--reason", "not at the bank"]).await;
    assert_eq!(code, 0, "{error}");
    assert!(out.contains("is failed") && out.contains("goes on"), "{out}");
    let session = paused.client.wait_for(&paused.id, "completed").await;
    let told = &texts(&session, "tool")[0];
    assert!(told.starts_with("NOT DONE") && told.contains("did NOT take effect"), "{told}");
    assert_eq!(
        (session["tool_calls"][0]["status"].as_str(), paused.options.effects().len()),
        (Some("failed"), 1)
    );
    assert_eq!(paused.journal("EFFECT_RESOLVED").await[0]["by"], "bob");
    let (code, out, _) = paused.cli(&[&call, "--did-not-happen"]).await;
    assert!(code == 0 && out.contains("as it was said before"), "{out}");
    let (code, _, error) = paused.cli(&[&call, "--let-model-decide"]).await;
    assert_eq!(code, 4, "{error}");
    assert!(paused.process.terminate().success());
}

#[tokio::test]
async fn what_nobody_finds_out_is_left_to_the_model_and_stays_listed_until_somebody_does() {
    let paused = Paused::new(1, ASK).await.asks().await;
    let call = paused.call_id(0).await;
    let (code, _, error) = paused.cli(&[&call, "--let-model-decide"]).await;
    assert_eq!(code, 0, "{error}");
    let session = paused.client.wait_for(&paused.id, "completed").await;
    let told = texts(&session, "tool");
    assert!(told[0].starts_with("OUTCOME UNKNOWN"), "{told:?}");
    assert_eq!(session["tool_calls"][0]["status"], "uncertain", "it stays listed");

    let happened = ["--happened", "Charged 500 cents.", "--tell", "-o", "json"];
    let args: Vec<&str> = [call.as_str()].into_iter().chain(happened).collect();
    let (code, first, error) = paused.cli(&args).await;
    assert_eq!(code, 0, "{error}");
    let (_, second, _) = paused.cli(&args).await;
    assert_eq!(first, second);
    let resolved: Value = serde_json::from_str(&first).unwrap();
    assert_eq!(resolved["model_believes_unknown"], false, "{resolved}");
    let told_run = resolved["told_run_id"].as_str().expect("a run");
    let (_, said, _) = paused.cli(&[&call, "--happened", "Charged 500 cents.", "--tell"]).await;
    assert!(said.contains(&format!("the session was told, and {told_run} reads it")), "{said}");
    eventually("the model to be told", || async {
        (paused.client.session(&paused.id).await["total_turns"] == 3).then_some(())
    })
    .await;
    let session = paused.client.wait_for(&paused.id, "completed").await;
    assert_eq!(texts(&session, "tool"), told, "the transcript is as it was");
    assert_eq!(session["tool_calls"][0]["status"], "done");
    let said = texts(&session, "user");
    assert_eq!(said.len(), 2, "it is told once: {said:?}");
    assert!(said[1].contains("DID take effect") && said[1].ends_with("Charged 500 cents."), "{said:?}");
    assert_eq!(paused.shown(), said[1]);
    assert_eq!((paused.options.effects().len(), paused.journal("EFFECT_RESOLVED").await.len()), (1, 2));
    assert!(paused.process.terminate().success());
}

#[tokio::test]
async fn an_effect_that_the_model_was_told_of_is_settled_in_the_ledger_alone() {
    let paused = Paused::new(1, "").await;
    let session = paused.client.wait_for(&paused.id, "completed").await;
    let call = paused.call_id(0).await;
    let said = session["messages"].clone();
    assert_eq!(session["tool_calls"][0]["status"], "uncertain");
    let (status, resolved) =
        paused.resolve(json!({"call_id": call, "outcome": "happened", "result": "Charged 500 cents."})).await;
    assert_eq!((status, &resolved["run_id"]), (StatusCode::ACCEPTED, &Value::Null));
    assert_eq!(resolved["model_believes_unknown"], true, "{resolved}");
    let (_, shown, _) = paused.cli(&[&call, "--happened", "Charged 500 cents."]).await;
    assert!(shown.contains("was told that the outcome is unknown") && shown.contains("--tell"), "{shown}");
    let session = paused.client.session(&paused.id).await;
    assert_eq!((&session["messages"], &session["status"]), (&said, &json!("completed")));
    assert_eq!(session["tool_calls"][0]["status"], "done");
    assert_eq!(paused.model.bodies().len(), 2, "the model is not called again");
    checker::check(&paused.database, &paused.id, &paused.options.effects()).await;
    assert!(paused.process.terminate().success());
}

#[tokio::test]
async fn a_run_goes_on_when_the_last_of_its_uncertain_calls_is_resolved() {
    let paused = Paused::new(2, ASK).await.asks().await;
    let (first, second) = (paused.call_id(0).await, paused.call_id(1).await);
    let (status, resolved) =
        paused.resolve(json!({"call_id": second, "outcome": "happened", "result": "B."})).await;
    assert_eq!((status, &resolved["run_id"]), (StatusCode::ACCEPTED, &Value::Null));
    let session = paused.client.session(&paused.id).await;
    assert_eq!((&session["status"], &session["job"]), (&json!("needs_attention"), &Value::Null));
    let (_, resolved) = paused.resolve(json!({"call_id": first, "outcome": "let_model_decide"})).await;
    assert!(resolved["run_id"].is_string(), "{resolved}");
    let session = paused.client.wait_for(&paused.id, "completed").await;
    let results = texts(&session, "tool");
    assert!(results[0].starts_with("OUTCOME UNKNOWN") && results[1] == "B.", "{results:?}");
    assert_eq!((paused.options.effects().len(), paused.model.bodies().len()), (2, 2));
    checker::check(&paused.database, &paused.id, &paused.options.effects()).await;
    assert!(paused.process.terminate().success());
}

#[tokio::test]
async fn a_resolution_that_fits_nothing_is_refused_with_the_reason() {
    let paused = Paused::new(1, ASK).await.asks().await;
    let call = paused.call_id(0).await;
    for (body, said) in [
        (json!({"outcome": "did_not_happen"}), "`call_id`"),
        (json!({"call_id": "a", "delivery_id": "b", "outcome": "did_not_happen"}), "`call_id`"),
        (json!({"call_id": call, "outcome": "happened"}), "`result`"),
        (json!({"call_id": call, "outcome": "did_not_happen", "result": "x"}), "`result`"),
        (json!({"call_id": call, "outcome": "perhaps"}), "perhaps"),
        (json!({"call_id": call, "outcome": "happened", "result": "a\u{0}b"}), "NUL"),
        (json!({"call_id": call, "outcome": "did_not_happen", "reason": "a\nb"}), "`reason`"),
    ] {
        let (status, problem) = paused.resolve(body.clone()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body}: {problem}");
        assert!(problem["detail"].as_str().unwrap().contains(said), "{body}: {problem}");
    }
    for key in ["call_id", "delivery_id"] {
        let (status, _) = paused.resolve(json!({key: "none", "outcome": "did_not_happen"})).await;
        assert_eq!(status, StatusCode::NOT_FOUND);
    }
    assert_eq!(paused.cli(&["none", "--did-not-happen"]).await.0, 3);
    // No worker runs: the retried run is open, and its call has no result yet.
    let api = paused.options.clone().arg("--roles=api");
    assert!(paused.process.terminate().success());
    let process = api.serve(&paused.database).await;
    let client = process.client();
    let path = format!("/v1/sessions/{}", paused.id);
    let (status, _) = client.post(&format!("{path}/retry"), &json!({})).await;
    assert_eq!(status, StatusCode::ACCEPTED);
    let body = json!({"call_id": call, "outcome": "happened", "result": "x"});
    let (status, problem) = client.post(&format!("{path}/resolve"), &body).await;
    assert_eq!(status, StatusCode::CONFLICT);
    assert!(problem["detail"].as_str().unwrap().contains("goes on"), "{problem}");
    let settle = "update tool_calls set status = 'done' where session_id = $1";
    sqlx::query(settle).bind(&paused.id).execute(&paused.database.pool).await.unwrap();
    let (status, problem) = client.post(&format!("{path}/resolve"), &body).await;
    assert_eq!(status, StatusCode::CONFLICT);
    assert!(problem["detail"].as_str().unwrap().contains("is done, not uncertain"), "{problem}");
}

/// A delivery that a worker was sending when it died, so its outcome is unknown. Its job is still leased.
async fn uncertain_delivery() -> (Database, Options, Process, String, String) {
    let model = ModelServer::start(|body, _| {
        match body["messages"].as_array().unwrap().last().unwrap()["role"].as_str() {
            Some("user") => {
                let mail = json!({"to": ["ann@example.org"], "subject": "Hi", "body": "Ann."});
                Answer::call("compose_email", mail)
            }
            _ => Answer::text("It is on its way."),
        }
    })
    .await;
    let database = Database::new().await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let dying = options.clone().env("FAILPOINTS", "K12=1*return").serve(&database).await;
    let answer = dying.client().chat("c1", "Write to Ann.").await;
    let (_, dead) = dying.ended().await;
    assert!(dead.log().contains("failpoint K12"), "{}", dead.log());
    let id = answer["session_id"].as_str().unwrap().to_owned();
    // The test makes the delivery uncertain by SQL. It would become uncertain by itself on a channel without
    // idempotency keys.
    for spoil in [
        "update deliveries set status = 'uncertain', settled_at = clock_timestamp() where session_id = $1",
        "update jobs set run_at = clock_timestamp() + interval '1 hour' where kind = 'deliver' and $1 <> ''",
    ] {
        let done = sqlx::query(spoil).bind(&id).execute(&database.pool).await.unwrap();
        assert_eq!(done.rows_affected(), 1);
    }
    let delivery: String =
        database.value("select delivery_id from deliveries where session_id = $1", &id).await;
    // The model's server stops when this function returns. The rest of the run does not matter here.
    let api = options.clone().arg("--roles=api").serve(&database).await;
    (database, options, api, id, delivery)
}

/// Ends the time in which an attempt at the delivery may still be under way.
async fn time_is_over(database: &Database) {
    for statement in
        ["update jobs set run_at = clock_timestamp()", "update deliveries set settled_by = clock_timestamp()"]
    {
        sqlx::query(statement).execute(&database.pool).await.unwrap();
    }
}

fn mails(options: &Options) -> usize {
    std::fs::read_dir(options.path("mail").join("new")).map_or(0, Iterator::count)
}

#[tokio::test]
async fn a_delivery_that_happened_is_sent_and_one_that_did_not_is_sent_now() {
    let (database, options, api, id, delivery) = uncertain_delivery().await;
    let client = api.client();
    let path = format!("/v1/sessions/{id}/resolve");
    let happened = json!({"delivery_id": delivery, "outcome": "happened", "reason": "Ann has it"});
    let (status, resolved) = client.post(&path, &happened).await;
    assert_eq!((status, &resolved["status"]), (StatusCode::ACCEPTED, &json!("sent")), "{resolved}");
    let (status, again) = client.post(&path, &happened).await;
    assert_eq!((status, again), (StatusCode::OK, resolved));
    let sent = "select count(*) from session_events where type = 'GEN_SENT' and dedupe_key = 'sent/' || $1";
    assert_eq!(database.value::<i64>(sent, &delivery).await, 1);
    let (status, _) =
        client.post(&path, &json!({"delivery_id": delivery, "outcome": "did_not_happen"})).await;
    assert_eq!((status, mails(&options)), (StatusCode::CONFLICT, 0));

    let (database, options, api, id, delivery) = uncertain_delivery().await;
    let client = api.client();
    let path = format!("/v1/sessions/{id}/resolve");
    let not = json!({"delivery_id": delivery, "outcome": "did_not_happen"});
    let (status, problem) = client.post(&path, &not).await;
    assert_eq!(status, StatusCode::CONFLICT, "its sender may only be stopped: {problem}");
    assert!(problem["detail"].as_str().unwrap().contains("may still carry it out until 20"), "{problem}");
    let (status, _) =
        client.post(&path, &json!({"delivery_id": delivery, "outcome": "let_model_decide"})).await;
    assert_eq!(status, StatusCode::CONFLICT);
    time_is_over(&database).await;
    let cli = Options {
        args: ["session", "resolve", &id, &delivery, "--did-not-happen"].map(str::to_owned).into(),
        ..options.clone()
    };
    let (status, ran) = cli.spawn(&database.url).ended().await;
    assert!(status.success() && ran.output().contains("is queued"), "{}{}", ran.output(), ran.log());
    let worker = options.clone().arg("--roles=worker").spawn(&database.url);
    eventually("the mail", || async {
        let status: String =
            database.value("select status from deliveries where delivery_id = $1", &delivery).await;
        (status == "sent").then_some(())
    })
    .await;
    assert_eq!((mails(&options), database.value::<i64>(sent, &delivery).await), (1, 1));
    assert!(worker.terminate().success());

    let (database, options, api, id, delivery) = uncertain_delivery().await;
    let late = "update deliveries set not_after = clock_timestamp() - interval '1 s' where delivery_id = $1";
    sqlx::query(late).bind(&delivery).execute(&database.pool).await.unwrap();
    time_is_over(&database).await;
    let not = json!({"delivery_id": delivery, "outcome": "did_not_happen"});
    let (_, resolved) = api.client().post(&format!("/v1/sessions/{id}/resolve"), &not).await;
    assert_eq!((&resolved["status"], mails(&options)), (&json!("expired"), 0), "{resolved}");
}
