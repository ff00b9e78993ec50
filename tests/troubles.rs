//! The troubles of `docs/operators.md`, each provoked on a running `serve`. What `session why`, `doctor` and the lists say is
//! read as an operator reads it, and the command that stands in the remedy is run as it stands there. Then the run completes.

mod outside;

use crate::support::model::turns_since_user;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, eventually};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const TOOLS: &str =
    "tools = [\"charge\", \"reserve\", \"misbehave\", \"compose_email\"]\nrecipients = [\"*\"]";
/// Short times of a gate, so that the tests are quick.
const GATE: &str = "[gate]\nprobe_s = 0.2\nprobe_max_s = 0.4\nwave_s = 0.1";

/// An installation, and what its provider of models does: 0 answers, a status refuses with it.
struct Scene {
    database: Database,
    model: ModelServer,
    provider: Arc<AtomicU64>,
    options: Options,
}

impl Scene {
    /// The model calls the tool that a message names (`charge`, `reserve`, `misbehave MODE`), once, and then replies.
    async fn new(agent: &str, more: &str) -> Scene {
        Scene::on(Database::new().await, agent, more).await
    }

    async fn on(database: Database, agent: &str, more: &str) -> Scene {
        let provider = Arc::new(AtomicU64::new(0));
        let now = Arc::clone(&provider);
        let model = ModelServer::start(move |body, _| {
            match now.load(Ordering::SeqCst) {
                0 => {}
                413 => {
                    return Answer::Refused(
                        413,
                        "This model's maximum context length is 9 tokens.".to_owned(),
                    );
                }
                status => return Answer::Error(u16::try_from(status).unwrap()),
            }
            let messages = body["messages"].as_array().unwrap();
            let said = messages.iter().rev().find(|message| message["role"] == "user").unwrap();
            match (said["content"].as_str().unwrap(), turns_since_user(body)) {
                ("charge", 0) => Answer::call("charge", json!({"cents": 500})),
                ("reserve", 0) => Answer::call("reserve", json!({"persons": 2})),
                ("mail", 0) => Answer::call(
                    "compose_email",
                    json!({"to": ["ann@example.org"], "subject": "Hi", "body": "Ann."}),
                ),
                (text, 0) if text.starts_with("misbehave ") => {
                    Answer::call("misbehave", json!({"mode": text.trim_start_matches("misbehave ")}))
                }
                _ => Answer::text("Here I am."),
            }
        })
        .await;
        let options = Options::new().env("OPENAI_BASE_URL", &model.url);
        Scene { database, model, provider, options }.configured(agent, more)
    }

    /// The same installation with another configuration: keys of the agent, and sections.
    fn configured(mut self, agent: &str, more: &str) -> Scene {
        self.options.config = format!(
            "[agents.default]\nsystem_prompt = \"You are a test.\"\nmodel = \"openai/test\"\n{TOOLS}\n{agent}\n{GATE}\n{more}\n"
        );
        self
    }

    fn provider_is(&self, status: u64) {
        self.provider.store(status, Ordering::SeqCst);
    }

    async fn serve(&self) -> Process {
        self.options.serve(&self.database).await
    }

    /// Runs a line of a shell, in which `wakeful` is the program of the tests with this configuration.
    fn shell(&self, line: &str) -> Process {
        let mut options = self.options.clone();
        options.args = Vec::new();
        // The program is $0, and `--config FILE` follows. `exec`, so that a signal reaches the program.
        let script = format!("config=$2; wakeful() {{ exec \"$0\" \"$@\" --config \"$config\"; }}\n{line}");
        options.spawn_via(&["sh".to_owned(), "-c".to_owned(), script], &self.database.url)
    }

    /// The output of a command that must succeed.
    async fn said(&self, line: &str) -> String {
        let (status, ran) = self.shell(line).ended().await;
        assert!(status.success(), "{line}: {}{}", ran.output(), ran.log());
        ran.output()
    }

    async fn why(&self, id: &str) -> Why {
        let said = self.said(&format!("wakeful session why {id} -o json")).await;
        let said: Value = serde_json::from_str(&said).unwrap();
        let findings = said["findings"].as_array().unwrap().iter();
        let text = |finding: &Value, key: &str| finding[key].as_str().unwrap_or_default().to_owned();
        Why(findings.map(|finding| (text(finding, "why"), text(finding, "remedy"))).collect())
    }

    /// Waits until `session why` names a cause with these parts, and returns its remedy. While a step is tried again, what holds
    /// it up changes from moment to moment.
    async fn because(&self, id: &str, parts: &[&str]) -> String {
        eventually(&format!("session why to say {parts:?}"), || async {
            self.why(id).await.find(parts).map(|(_, remedy)| remedy.clone())
        })
        .await
    }

    /// What `doctor` warns of under this name: the text and the remedy.
    async fn doctor(&self, name: &str) -> String {
        let (_, ran) = self.shell("wakeful doctor -o json").ended().await;
        let checks: Value =
            serde_json::from_str(&ran.output()).unwrap_or_else(|_| panic!("{}{}", ran.output(), ran.log()));
        let told =
            checks.as_array().unwrap().iter().filter(|check| check["name"] == name && check["level"] != "ok");
        let told: Vec<String> =
            told.map(|check| format!("{} -> {}", check["text"], check["remedy"])).collect();
        assert!(!told.is_empty(), "doctor says nothing of {name}: {checks}");
        told.join("\n")
    }

    async fn list(&self) -> String {
        self.said("wakeful session list -o table").await
    }
}

/// What `session why` says: reasons with their remedies, the main one first.
struct Why(Vec<(String, String)>);

impl Why {
    /// The first cause with these parts, and its remedy.
    fn find(&self, parts: &[&str]) -> Option<&(String, String)> {
        self.0.iter().find(|(why, _)| parts.iter().all(|part| why.contains(part)))
    }
}

/// The line of a remedy that is a command beginning so.
fn command(remedy: &str, begin: &str) -> String {
    let line = remedy.lines().find(|line| line.starts_with(begin));
    line.unwrap_or_else(|| panic!("no command {begin:?} in {remedy:?}")).to_owned()
}

async fn ask(client: &Client, text: &str) -> String {
    let answer = client.chat("c1", text).await;
    answer["session_id"].as_str().unwrap().to_owned()
}

async fn waits(scene: &Scene) {
    let sql = "select count(*) from jobs where waits_for is not null and lease is null and $1 <> ''";
    eventually("the session to wait", || async {
        (scene.database.value::<i64>(sql, "all").await == 1).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_model_that_answers_500_is_waited_for() {
    let scene = Scene::new("", "").await;
    scene.provider_is(500);
    let process = scene.serve().await;
    let client = process.client();
    let id = ask(&client, "Hello?").await;
    waits(&scene).await;
    let remedy = scene.because(&id, &["waits for model openai/test", "status 500", "failed."]).await;
    assert!(remedy.contains("goes on by itself") && remedy.contains("fallback"), "{remedy}");
    // During a probe the job does not wait.
    eventually("the list to say it", || async {
        scene.list().await.contains("waits for openai/test, which has failed").then_some(())
    })
    .await;
    let told = scene.doctor("providers").await;
    assert!(told.contains("status 500") && told.contains("nothing is lost"), "{told}");
    assert!(scene.said("wakeful queue status -o table").await.contains("Model openai/test has failed for"));
    // Nothing is to be done.
    scene.provider_is(0);
    client.wait_for(&id, "completed").await;
}

#[tokio::test]
async fn a_model_that_hangs_is_named_with_its_limit() {
    let scene = Scene::new("limits = { attempts = 1 }", "").await;
    let process = scene.serve().await;
    scene.model.hold();
    let id = ask(&process.client(), "Hello?").await;
    scene.model.asked(1).await;
    scene
        .because(
            &id,
            &[
                "waits for the model openai/test",
                "the call fails after 2m without a word, or after 15m in all",
            ],
        )
        .await;
    // A lower limit, so that it is over soon.
    process.kill();
    let scene = scene.configured("limits = { attempts = 1 }", "[providers.openai]\nidle_s = 1");
    let process = scene.serve().await;
    let client = process.client();
    client.wait_for(&id, "failed").await;
    let remedy = scene.because(&id, &["Its run failed", "did not go on within 1000 ms"]).await;
    scene.model.release();
    scene.said(&command(&remedy, "wakeful session retry")).await;
    client.wait_for(&id, "completed").await;
}

#[tokio::test]
async fn a_refused_key_is_named_and_a_retry_goes_on() {
    let scene = Scene::new("", "").await;
    scene.provider_is(401);
    let process = scene.serve().await;
    let client = process.client();
    let id = ask(&client, "Hello?").await;
    client.wait_for(&id, "failed").await;
    let remedy = scene.because(&id, &["Its run failed", "refused the credentials"]).await;
    assert!(remedy.contains("OPENAI_API_KEY"), "{remedy}");
    assert!(scene.list().await.contains("refused the credentials"));
    assert!(scene.doctor("sessions").await.contains(&format!("wakeful session why {id}")));
    // A worker groups the failures beside its steps.
    eventually("the group of the failure", || async {
        scene.said("wakeful errors list -o table").await.contains("credentials").then_some(())
    })
    .await;
    scene.provider_is(0);
    scene.said(&command(&remedy, "wakeful session retry")).await;
    client.wait_for(&id, "completed").await;
}

/// Waits until the tool has behaved in a later turn, and its run is over.
async fn behaves(client: &Client, id: &str) {
    eventually("the tool to behave", || async {
        let session = client.session(id).await;
        let texts = crate::support::client::texts(&session, "tool");
        (session["status"] == "completed" && texts.last().unwrap() == "Behaved.").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_tool_that_fails_is_counted_and_named_and_the_agent_is_asked_again() {
    let scene = Scene::new("", "").await;
    let process = scene.serve().await;
    let client = process.client();
    let id = ask(&client, "misbehave panic").await;
    client.wait_for(&id, "completed").await;
    let remedy = scene.because(&id, &["1 of 1 tool call", "misbehave (call_", "as told"]).await;
    assert!(remedy.contains("mend the tool"), "{remedy}");
    // A worker fills the index beside its steps.
    eventually("the list of failed calls", || async {
        let listed = scene.said("wakeful session list --failed-calls -o table").await;
        listed.contains("completed").then_some(())
    })
    .await;
    std::fs::write(scene.options.path("hold-mended"), "").unwrap();
    let again = command(&remedy, "wakeful session send").replace("TEXT", "misbehave panic");
    scene.said(&again).await;
    behaves(&client, &id).await;
}

#[tokio::test]
async fn a_tool_that_hangs_is_named_with_its_limit() {
    let scene = Scene::new("", "").await;
    let process = scene.serve().await;
    let id = ask(&process.client(), "misbehave yield").await;
    scene.options.has_effects(1).await;
    scene.because(&id, &["it runs misbehave (call_", "the call fails after 60s"]).await;
    // A lower limit, so that it is over soon.
    process.kill();
    let scene = scene.configured("limits = { tool_s = 1 }", "");
    let process = scene.serve().await;
    let client = process.client();
    client.wait_for(&id, "completed").await;
    let remedy = scene.because(&id, &["1 of 1 tool call", "did not finish within 1 seconds"]).await;
    std::fs::write(scene.options.path("hold-mended"), "").unwrap();
    let again = command(&remedy, "wakeful session send").replace("TEXT", "misbehave yield");
    scene.said(&again).await;
    behaves(&client, &id).await;
}

#[tokio::test]
async fn a_step_that_kills_its_workers_names_its_tool() {
    let scene = Scene::new("", "").await;
    let process = scene.serve().await;
    let id = ask(&process.client(), "misbehave abort").await;
    process.ended().await;
    scene.options.spawn(&scene.database.url).ended().await;
    // After the second death the log names the tool.
    let (_, third) = scene.options.spawn(&scene.database.url).ended().await;
    assert!(third.log().contains("misbehave (call_"), "{}", third.log());
    // A death is counted when the next worker takes the step.
    scene.options.spawn(&scene.database.url).ended().await;
    scene.because(&id, &["workers died at this step", "misbehave (call_", "at 5 deaths the run fails"]).await;
    let told = scene.doctor("steps").await;
    assert!(told.contains("misbehave") && told.contains(&format!("wakeful session cancel {id}")), "{told}");
    scene.options.spawn(&scene.database.url).ended().await;
    let process = scene.serve().await;
    let client = process.client();
    client.wait_for(&id, "failed").await;
    let remedy = scene.because(&id, &["Its run failed", "its worker died each time", "misbehave"]).await;
    std::fs::write(scene.options.path("hold-mended"), "").unwrap();
    scene.said(&command(&remedy, "wakeful session retry")).await;
    client.wait_for(&id, "completed").await;
}

#[tokio::test]
async fn an_uncertain_effect_waits_for_what_a_person_found_out() {
    let scene = Scene::new("on_uncertain = \"needs_attention\"", "").await;
    std::fs::write(scene.options.path("hold"), "").unwrap();
    let process = scene.serve().await;
    let id = ask(&process.client(), "charge").await;
    scene.options.has_effects(1).await;
    process.kill();
    std::fs::remove_file(scene.options.path("hold")).unwrap();
    let process = scene.serve().await;
    let client = process.client();
    client.wait_for(&id, "needs_attention").await;
    scene.because(&id, &["It waits for an operator"]).await;
    let remedy = scene.because(&id, &["not known whether charge", "\"cents\":500", "took effect"]).await;
    assert!(scene.doctor("sessions").await.contains("need attention"));
    assert!(scene.doctor("tool calls").await.contains(&format!("wakeful session why {id}")));
    let happened = command(&remedy, &format!("wakeful session resolve {id}"));
    assert!(happened.ends_with("--happened 'RESULT'"), "{happened}");
    scene.said(&happened.replace("RESULT", "Charged 500 cents.")).await;
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(crate::support::client::texts(&session, "tool"), ["Charged 500 cents."]);
    assert_eq!(scene.options.effects().len(), 1, "charged once");
}

#[tokio::test]
async fn a_run_behind_another_one_leads_to_it() {
    let scene = Scene::new("", "").await;
    scene.provider_is(503);
    let process = scene.serve().await;
    let client = process.client();
    let first = ask(&client, "Hello?").await;
    waits(&scene).await;
    scene.said("wakeful session new c1").await;
    let second = ask(&client, "Anybody?").await;
    assert_ne!(first, second);
    let remedy = scene.because(&second, &[&format!("It waits for session {first}")]).await;
    let why = command(&remedy, "wakeful session why");
    // Between two pauses, its next call is under way.
    eventually("the first run to wait for the provider", || async {
        scene.said(&why).await.contains("waits for model openai/test").then_some(())
    })
    .await;
    scene.provider_is(0);
    client.wait_for(&first, "completed").await;
    client.wait_for(&second, "completed").await;
}

#[tokio::test]
async fn a_run_over_its_budget_goes_on_under_a_higher_one() {
    for (low, high, said) in [
        ("limits = { steps = 1 }", "limits = { steps = 9 }", "its limit of 1 step"),
        ("limits = { tokens = 50 }", "limits = { tokens = 5000 }", "its limit of 50 tokens"),
    ] {
        let scene = Scene::new(low, "").await;
        let process = scene.serve().await;
        let id = ask(&process.client(), "reserve").await;
        process.client().wait_for(&id, "failed").await;
        let remedy = scene.because(&id, &["Its run failed", said]).await;
        assert!(remedy.starts_with("Raise `limits."), "{remedy}");
        assert!(process.terminate().success());
        let scene = scene.configured(high, "");
        let process = scene.serve().await;
        scene.said(&command(&remedy, "wakeful session retry")).await;
        process.client().wait_for(&id, "completed").await;
        assert_eq!(scene.options.effects().len(), 1, "what was done stays done");
    }
}

#[tokio::test]
async fn a_conversation_that_is_too_long_goes_on_where_more_fits() {
    let scene = Scene::new("", "").await;
    scene.provider_is(413);
    let process = scene.serve().await;
    let client = process.client();
    let id = ask(&client, "Hello?").await;
    client.wait_for(&id, "failed").await;
    let remedy = scene.because(&id, &["Its run failed", "longer than the model's context window"]).await;
    for way in ["strategy = \"compaction\"", "larger context window", "wakeful session new c1"] {
        assert!(remedy.contains(way), "{way}: {remedy}");
    }
    // The agent has a model that takes more.
    scene.provider_is(0);
    scene.said(&command(&remedy, "wakeful session retry")).await;
    client.wait_for(&id, "completed").await;
    // Or the conversation begins anew.
    scene.said(&command(&remedy, "wakeful session new")).await;
    let anew = ask(&client, "Hello again.").await;
    assert_ne!(anew, id);
    client.wait_for(&anew, "completed").await;
}
