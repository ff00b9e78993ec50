//! Approvals: a call of a tool that the agent lists under `approve` waits for a person, runs once if it is approved, and never if it
//! is declined.

use crate::console::browser::Browser;
use crate::support::checker;
use crate::support::client::texts;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, eventually};
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::sync::Arc;

/// A server whose agent may charge after a person's yes, and reserve without.
struct Stage {
    database: Database,
    model: ModelServer,
    options: Options,
    process: Process,
    client: Client,
}

impl Stage {
    async fn new() -> Stage {
        Stage::with(|options| options).await
    }

    /// `more` changes how the first process starts.
    async fn with(more: impl FnOnce(Options) -> Options) -> Stage {
        Stage::of(|options| options, more).await
    }

    /// `all` changes how every process starts, `more` how the first one does.
    async fn of(all: impl FnOnce(Options) -> Options, more: impl FnOnce(Options) -> Options) -> Stage {
        let model = ModelServer::start(|body, _| {
            let last = body["messages"].as_array().unwrap().last().unwrap();
            let charge = |cents: Value| ("charge".to_owned(), json!({ "cents": cents }).to_string());
            match (last["role"].as_str(), last["content"].as_str()) {
                (Some("user"), Some("Charge me.")) => Answer::Calls(vec![charge(json!(500))]),
                (Some("user"), Some("Charge twice.")) => {
                    Answer::Calls(vec![charge(json!(500)), charge(json!(700))])
                }
                (Some("user"), Some("Charge wrongly.")) => Answer::Calls(vec![charge(json!("much"))]),
                (Some("user"), Some("Charge, reserve and ask.")) => Answer::Calls(vec![
                    charge(json!(500)),
                    ("reserve".to_owned(), json!({"persons": 2}).to_string()),
                    ("ask_user".to_owned(), json!({"question": "By the window?"}).to_string()),
                ]),
                (_, text) => Answer::text(&format!("I see: {}", text.unwrap_or_default())),
            }
        })
        .await;
        let options = Options::new()
            .model("openai/test")
            .config("approve = [\"charge\"]")
            .env("OPENAI_BASE_URL", &model.url);
        let options = all(options);
        let database = Database::new().await;
        let process = more(options.clone()).serve(&database).await;
        let client = process.client();
        Stage { database, model, options, process, client }
    }

    /// The session of a message, when it waits.
    async fn asks(&self, text: &str) -> String {
        let id = self.client.chat("c1", text).await["session_id"].as_str().unwrap().to_owned();
        let session = self.client.wait_for(&id, "needs_attention").await;
        assert_eq!(session["job"], Value::Null, "nothing runs meanwhile");
        id
    }

    async fn post(&self, id: &str, verb: &str, body: &Value) -> (StatusCode, Value) {
        self.client.post(&format!("/v1/sessions/{id}/{verb}"), body).await
    }

    /// `wakeful session` with these arguments: exit status, stdout, stderr.
    async fn cli(&self, args: &[&str]) -> (i32, String, String) {
        let all = std::iter::once(&"session").chain(args).map(|&arg| arg.to_owned()).collect();
        let options = Options { args: all, dir: Arc::clone(&self.options.dir), ..self.options.clone() };
        let (status, ran) = options.spawn(&self.database.url).ended().await;
        (status.code().expect("it was not killed"), ran.output(), ran.log())
    }

    async fn calls(&self, id: &str) -> Vec<Value> {
        self.client.session(id).await["tool_calls"].as_array().unwrap().clone()
    }

    /// How often this tool took effect.
    fn times(&self, tool: &str) -> usize {
        self.options.effects().iter().filter(|line| line.starts_with(tool)).count()
    }

    async fn decisions(&self, id: &str) -> Vec<Value> {
        let (_, page) = self.client.get(&format!("/v1/sessions/{id}/events?limit=500")).await;
        let entries = page["items"].as_array().unwrap().iter();
        entries.filter(|one| one["type"] == "EFFECT_RESOLVED").map(|one| one["payload"].clone()).collect()
    }
}

#[tokio::test]
async fn a_call_waits_while_others_of_its_reply_run_and_then_runs_once() {
    let stage = Stage::new().await;
    let id = stage.asks("Charge, reserve and ask.").await;
    assert_eq!((stage.times("charge"), stage.times("reserve")), (0, 1));
    let calls = stage.calls(&id).await;
    let charge = calls.iter().find(|call| call["name"] == "charge").unwrap();
    assert_eq!((&charge["status"], &charge["attempts"]), (&json!("unapproved"), &json!(0)));
    assert_eq!(charge["arguments"], "{\"cents\": 500}");
    let told = texts(&stage.client.session(&id).await, "tool");
    assert!(told.iter().any(|text| text.starts_with("Not asked: another call")), "{told:?}");
    let call = charge["call_id"].as_str().unwrap();
    for shown in ["why", "show"] {
        let (code, said, error) = stage.cli(&[shown, &id]).await;
        assert_eq!(code, 0, "{error}");
        let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(said.contains(&format!("wakeful session approve {id} {call}")), "{said}");
        assert!(said.contains("500"), "the arguments are there: {said}");
    }
    // A message waits with the run, and a retry runs nothing.
    assert_eq!(stage.client.chat("c1", "Are you there?").await["outcome"], "queued");
    assert_eq!(stage.post(&id, "retry", &json!({})).await.0, StatusCode::ACCEPTED);
    stage.client.wait_for(&id, "needs_attention").await;
    let (status, problem) =
        stage.post(&id, "approve", &json!({"call_id": call, "args_sha256": "0".repeat(64)})).await;
    assert_eq!(status, StatusCode::CONFLICT);
    assert!(problem["detail"].as_str().unwrap().contains("other arguments than those"), "{problem}");
    let (status, problem) =
        stage.post(&id, "resolve", &json!({"call_id": call, "outcome": "happened", "result": "x"})).await;
    assert_eq!(status, StatusCode::CONFLICT);
    assert!(problem["detail"].as_str().unwrap().contains("is unapproved, not uncertain"), "{problem}");
    assert_eq!(stage.times("charge"), 0);

    let yes =
        json!({"call_id": call, "args_sha256": charge["args_sha256"], "by": "ann", "reason": "a good guest"});
    let (status, approved) = stage.post(&id, "approve", &yes).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{approved}");
    assert_eq!((&approved["resolution"], &approved["status"]), (&json!("approved"), &json!("invoked")));
    let session = stage.client.wait_for(&id, "completed").await;
    assert!(texts(&session, "tool").contains(&"Charged 500 cents.".to_owned()));
    // The message was taken when the run went on, before the call had its result. The model reads the result first.
    assert_eq!(texts(&session, "user").last().unwrap(), "Are you there?");
    let asked: Value = serde_json::from_str(stage.model.bodies().last().unwrap()).unwrap();
    let said = asked["messages"].as_array().unwrap().iter().rev().take(4);
    let said: Vec<&str> = said.map(|message| message["content"].as_str().unwrap_or_default()).collect();
    assert_eq!(said[0], "Are you there?", "{asked}");
    assert!(said[1..].contains(&"Charged 500 cents."), "{asked}");
    assert!(!asked.to_string().contains("is not known"), "{asked}");
    let entry = json!({"effect": call, "resolution": "approved", "by": "ann", "reason": "a good guest"});
    assert_eq!(stage.decisions(&id).await, [entry]);
    // Said again it changes nothing, and it cannot be taken back.
    let (status, again) = stage.post(&id, "approve", &yes).await;
    assert_eq!((status, &again["run_id"]), (StatusCode::OK, &approved["run_id"]));
    let (status, problem) = stage.post(&id, "decline", &json!({"call_id": call})).await;
    assert_eq!(status, StatusCode::CONFLICT);
    assert!(problem["detail"].as_str().unwrap().contains("by ann, as approved"), "{problem}");
    let (status, problem) = stage.post(&id, "approve", &json!({})).await;
    assert_eq!(status, StatusCode::CONFLICT);
    assert!(problem["detail"].as_str().unwrap().contains("no call of it waits"), "{problem}");
    assert_eq!((stage.times("charge"), stage.times("reserve")), (1, 1));
    let audited: i64 = stage
        .database
        .value("select count(*) from audit_log where verb = 'session.approve' and outcome = 'done' and target = $1", &id)
        .await;
    assert_eq!(audited, 2);
    assert!(stage.process.terminate().success());
}

#[tokio::test]
async fn a_recorded_replay_of_a_session_that_waits_for_approval_waits_too_and_differs_in_nothing() {
    let stage = Stage::new().await;
    let id = stage.asks("Charge, reserve and ask.").await;
    let args = ["replay", &id, "--model", "recorded", "--tools", "recorded", "-o", "json"];
    let args = args.map(str::to_owned).to_vec();
    let options = Options { args, dir: Arc::clone(&stage.options.dir), ..stage.options.clone() };
    let (status, ran) = options.spawn(&stage.database.url).ended().await;
    assert_eq!(status.code(), Some(0), "{}\n{}", ran.output(), ran.log());
    let told: Value = serde_json::from_str(&ran.output()).unwrap();
    assert_eq!(told["diff"]["verdict"], "equal", "{told:#}");
    assert_eq!(
        (&told["replay"]["failed"], &told["replay"]["unrecorded"]),
        (&Value::Null, &json!([])),
        "{told:#}"
    );
    let replay = told["replay"]["session_id"].as_str().unwrap();
    assert_eq!(stage.client.session(replay).await["status"], "needs_attention");
    // The command that ran it has ended, so no process would go on.
    let (code, _, error) = stage.cli(&["approve", replay]).await;
    assert!(code == 4 && error.contains("it belongs to a replay"), "{code} {error}");
    assert_eq!((stage.times("charge"), stage.times("reserve")), (0, 1));
}

#[tokio::test]
async fn a_declined_call_never_runs_and_its_model_reads_who_declined_and_why() {
    let stage = Stage::new().await;
    let id = stage.asks("Charge twice.").await;
    let (code, _, error) = stage.cli(&["decline", &id]).await;
    assert_eq!(code, 4, "{error}");
    assert!(error.contains("2 calls wait for approval, so name one"), "{error}");
    let calls = stage.calls(&id).await;
    let (first, second) = (calls[0]["call_id"].as_str().unwrap(), calls[1]["call_id"].as_str().unwrap());
    let (code, said, error) =
        stage.cli(&["decline", &id, first, "--by", "bob", "--reason", "too dear"]).await;
    assert_eq!(code, 0, "{error}");
    assert!(said.contains("charge {\"cents\":") && said.contains("is declined"), "{said}");
    assert_eq!(stage.client.session(&id).await["status"], "needs_attention", "the other one still waits");
    // The page shows the other call with its arguments, and a button decides.
    let browser = Browser::new(&stage.process.url());
    let chat = browser.open("/chat/c1").await;
    assert!(
        chat.html.contains("It waits for a person") && !chat.html.contains("The run failed"),
        "{}",
        chat.html
    );
    assert!(chat.link("/sessions/").ends_with(&id), "{}", chat.html);
    let overview = browser.open("/").await;
    assert!(overview.html.contains("a call waits for approval</p>"), "{}", overview.html);
    let page = browser.open(&format!("/sessions/{id}")).await;
    assert!(page.html.contains("charge waits for approval") && page.html.contains("cents"), "{}", page.html);
    let mut form = page.form("/approval");
    let read = form.fields.iter().position(|(name, _)| name == "args_sha256").unwrap();
    form.fields[read].1 = "0".repeat(64);
    let answer = browser.post(&form, &[("decision", "approve")]).await;
    assert!(browser.get(&answer.location()).await.html.contains("other arguments"), "nothing was done");
    let page = browser.open(&format!("/sessions/{id}")).await;
    let after = browser.press(&page, "/approval", &[("decision", "approve")]).await;
    assert!(after.html.contains("The call is approved, and runs."), "{}", after.html);
    let session = stage.client.wait_for(&id, "completed").await;
    let told = texts(&session, "tool");
    let declined = told.iter().find(|text| text.starts_with("DECLINED")).unwrap();
    assert!(declined.contains("bob declined it") && declined.contains("too dear"), "{declined}");
    let status = |id: &str| {
        session["tool_calls"].as_array().unwrap().iter().find(|call| call["call_id"] == id).unwrap()["status"]
            .clone()
    };
    assert_eq!((status(first), status(second)), (json!("failed"), json!("done")));
    assert_eq!(stage.times("charge"), 1);
    let (code, _, error) = stage.cli(&["approve", &id, first]).await;
    assert_eq!(code, 4, "{error}");
    assert!(error.contains("by bob, as declined"), "{error}");
    checker::check(&stage.database, &id, &stage.options.effects()).await;
    assert!(stage.process.terminate().success());
}

#[tokio::test]
async fn of_sixteen_who_decide_at_once_one_decides() {
    let stage = Stage::new().await;
    let id = stage.asks("Charge me.").await;
    let decide = async |number: usize| {
        let verb = if number.is_multiple_of(2) { "approve" } else { "decline" };
        (verb, stage.post(&id, verb, &json!({"by": format!("person {number}")})).await)
    };
    let answers = futures::future::join_all((0..16).map(decide)).await;
    let first: Vec<&str> = answers
        .iter()
        .filter(|(_, (status, _))| *status == StatusCode::ACCEPTED)
        .map(|(verb, _)| *verb)
        .collect();
    assert_eq!(first.len(), 1, "{answers:?}");
    let others = answers.iter().filter(|(verb, _)| *verb != first[0]);
    assert!(others.clone().all(|(_, (status, _))| *status == StatusCode::CONFLICT), "{answers:?}");
    stage.client.wait_for(&id, "completed").await;
    assert_eq!(stage.decisions(&id).await.len(), 1);
    assert_eq!(stage.times("charge"), usize::from(first[0] == "approve"));
    checker::check(&stage.database, &id, &stage.options.effects()).await;
    assert!(stage.process.terminate().success());
}

#[tokio::test]
async fn a_kill_between_the_approval_and_the_call_runs_it_once() {
    let stage = Stage::with(|options| options.env("FAILPOINTS", "K17=1*return")).await;
    let id = stage.asks("Charge me.").await;
    let (code, _, error) = stage.cli(&["approve", &id]).await;
    assert_eq!(code, 0, "{error}");
    let Stage { database, model, options, process, .. } = stage;
    assert!(!process.ended().await.0.success());
    assert!(options.effects().is_empty(), "it died before the call");
    let process = options.serve(&database).await;
    let session = process.client().wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "tool"), ["Charged 500 cents."]);
    assert_eq!((options.effects().len(), model.bodies().len()), (1, 2));
    checker::check(&database, &id, &options.effects()).await;
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_kill_in_the_approved_call_leaves_it_uncertain_and_it_is_resolved_like_any_other() {
    let stage = Stage::with(|options| options.env("FAILPOINTS", "K19=1*return")).await;
    let id = stage.asks("Charge me.").await;
    let (code, _, error) = stage.cli(&["approve", &id]).await;
    assert_eq!(code, 0, "{error}");
    let Stage { database, model: _model, options, process, .. } = stage;
    assert!(!process.ended().await.0.success());
    let process = options.serve(&database).await;
    let client = process.client();
    let session = client.wait_for(&id, "completed").await;
    assert!(texts(&session, "tool")[0].starts_with("OUTCOME UNKNOWN"));
    assert_eq!(options.effects().len(), 1, "it is not run again");
    let (_, doctor) =
        Options { args: vec!["doctor".into()], ..options.clone() }.spawn(&database.url).ended().await;
    let said = doctor.output();
    assert!(said.contains(&format!("wakeful session why {id}")), "{said}");
    let call = session["tool_calls"][0]["call_id"].as_str().unwrap();
    let body = json!({"call_id": call, "outcome": "happened", "result": "Charged."});
    let (status, resolved) = client.post(&format!("/v1/sessions/{id}/resolve"), &body).await;
    assert_eq!((status, &resolved["status"]), (StatusCode::ACCEPTED, &json!("done")), "{resolved}");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_cancel_closes_the_call_a_fork_asks_again_and_a_dry_one_asks_nobody() {
    let stage = Stage::new().await;
    let id = stage.asks("Charge me.").await;
    let fork = async |body: Value| {
        let (status, forked) = stage.post(&id, "fork", &body).await;
        assert_eq!(status, StatusCode::CREATED, "{forked}");
        forked["session_id"].as_str().unwrap().to_owned()
    };
    let live = fork(json!({"at": "last-user"})).await;
    stage.client.wait_for(&live, "needs_attention").await;
    assert_eq!(stage.calls(&live).await[0]["status"], "unapproved");
    let dry = fork(json!({"at": "last-user", "tool_mode": "dry"})).await;
    let rehearsed = stage.client.wait_for(&dry, "completed").await;
    assert!(!texts(&rehearsed, "tool")[0].starts_with("Charged"), "{rehearsed}");

    assert_eq!(stage.post(&id, "cancel", &json!({"reason": "closed"})).await.0, StatusCode::ACCEPTED);
    let session = stage.client.wait_for(&id, "cancelled").await;
    assert!(texts(&session, "tool")[0].starts_with("This call was not carried out"), "{session}");
    let call = session["tool_calls"][0]["call_id"].clone();
    let (status, problem) = stage.post(&id, "approve", &json!({ "call_id": call })).await;
    assert_eq!(status, StatusCode::CONFLICT);
    assert!(problem["detail"].as_str().unwrap().contains("is abandoned, not unapproved"), "{problem}");
    assert_eq!(stage.times("charge"), 0);
    assert!(stage.process.terminate().success());
}

#[tokio::test]
async fn a_session_that_waits_is_cancelled_before_it_is_archived_or_terminated() {
    let stage = Stage::new().await;
    let id = stage.asks("Charge me.").await;
    let before = checker::dump(&stage.database).await;
    for verb in ["archive", "terminate"] {
        let (status, problem) = stage.post(&id, verb, &json!({"reason": "closed"})).await;
        assert_eq!(status, StatusCode::CONFLICT, "{problem}");
        let said = problem["detail"].as_str().unwrap();
        assert!(said.contains(&format!("needs_attention: {verb} is not possible now")), "{problem}");
        let next = problem["valid"].as_array().unwrap_or_else(|| panic!("{problem}"));
        assert!(next.contains(&json!("cancel")) && next.contains(&json!("approve")), "{problem}");
    }
    assert_eq!(checker::dump(&stage.database).await, before, "nothing was changed");
    assert_eq!(stage.post(&id, "cancel", &json!({"reason": "closed"})).await.0, StatusCode::ACCEPTED);
    stage.client.wait_for(&id, "cancelled").await;
    let (status, problem) = stage.post(&id, "terminate", &json!({"reason": "closed"})).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{problem}");
    let (status, problem) = stage.post(&id, "approve", &json!({})).await;
    assert_eq!(status, StatusCode::CONFLICT, "{problem}");
    assert_eq!((stage.times("charge"), stage.calls(&id).await[0]["status"].as_str()), (0, Some("abandoned")));
    assert!(stage.process.terminate().success());
}

#[tokio::test]
async fn an_encrypted_call_is_shown_to_people_is_sealed_and_runs_once_when_it_is_approved() {
    let encrypted = |options: Options| {
        let keys = options.path("keys");
        std::fs::create_dir(&keys).unwrap();
        options
            .env("WAKEFUL_ENCRYPTION__KEYS", keys.to_str().unwrap())
            .env("WAKEFUL_ENCRYPTION__MASTER_KEY", crate::encryption::MASTER)
    };
    let stage = Stage::of(encrypted, |options| options).await;
    let id = stage.asks("Charge twice.").await;
    let calls = stage.calls(&id).await;
    let of = |cents: usize| {
        let is_meant = |call: &&Value| {
            let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
            arguments == json!({ "cents": cents })
        };
        let call = calls.iter().find(is_meant).unwrap_or_else(|| panic!("{calls:?}"));
        assert_eq!(call["status"], "unapproved");
        call["call_id"].as_str().unwrap()
    };
    let (first, second) = (of(500), of(700));
    let why = "a word that only people read";
    let (code, said, error) = stage.cli(&["approve", &id, first, "--by", "ann", "--reason", why]).await;
    assert_eq!(code, 0, "{error}");
    assert!(said.contains("charge {\"cents\":") && said.contains("500"), "{said}");
    let no = json!({"call_id": second, "by": "bob", "reason": why});
    let (status, declined) = stage.post(&id, "decline", &no).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{declined}");
    let told = texts(&stage.client.wait_for(&id, "completed").await, "tool");
    assert!(told.contains(&"Charged 500 cents.".to_owned()), "{told:?}");
    assert!(told.iter().any(|text| text.starts_with("DECLINED") && text.contains(why)), "{told:?}");
    assert_eq!(stage.times("charge"), 1);
    assert!(stage.decisions(&id).await.iter().all(|one| one["reason"] == why));
    let (status, again) = stage.post(&id, "decline", &no).await;
    assert_eq!(status, StatusCode::OK, "{again}");
    let (status, problem) = stage.post(&id, "approve", &json!({"call_id": second})).await;
    assert_eq!(status, StatusCode::CONFLICT);
    assert!(problem["detail"].as_str().unwrap().contains("by bob, as declined"), "{problem}");
    // The reason is in no table, nor what the call returned.
    let stored = checker::dump(&stage.database).await;
    let rows = stored.values().flatten().map(Value::to_string);
    let in_clear = rows.filter(|row| row.contains(why) || row.contains("Charged 500 cents."));
    assert_eq!(in_clear.collect::<Vec<_>>(), [""; 0]);
    assert!(stage.process.terminate().success());
}

#[tokio::test]
async fn a_call_that_is_refused_anyway_waits_for_nobody() {
    let stage = Stage::new().await;
    let id = stage.client.chat("c1", "Charge wrongly.").await["session_id"].as_str().unwrap().to_owned();
    let session = stage.client.wait_for(&id, "completed").await;
    assert_eq!((stage.times("charge"), session["tool_calls"][0]["status"].as_str()), (0, Some("failed")));
    eventually("the job to end", || async {
        (stage.client.session(&id).await["job"] == Value::Null).then_some(())
    })
    .await;
    assert!(stage.process.terminate().success());
}

#[tokio::test]
async fn an_imported_run_that_waited_for_approval_says_so_and_goes_on_after_a_retry() {
    let stage = Stage::new().await;
    let id = stage.asks("Charge me.").await;
    let (code, _, error) = stage.cli(&["export", &id, "--file", "waits.jsonl"]).await;
    assert_eq!(code, 0, "{error}");
    let (code, imported, error) = stage.cli(&["import", "waits.jsonl", "-o", "json"]).await;
    assert_eq!(code, 0, "{error}");
    let imported: Value = serde_json::from_str(&imported).unwrap();
    let copy = imported["session_id"].as_str().unwrap();
    assert_eq!(stage.client.session(copy).await["status"], "needs_attention");
    let (_, said, _) = stage.cli(&["why", copy]).await;
    let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(said.contains("its call that waited for approval was given up"), "{said}");
    assert!(!said.contains("session approve") && !said.contains("(below)"), "{said}");
    assert_eq!(stage.post(copy, "retry", &json!({})).await.0, StatusCode::ACCEPTED);
    let session = stage.client.wait_for(copy, "completed").await;
    assert!(texts(&session, "tool")[0].starts_with("This call was not carried out"), "{session}");
    assert_eq!(stage.times("charge"), 0);
}
