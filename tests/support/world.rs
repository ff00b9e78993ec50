//! One conversation with two messages. The model answers each after a turn of tool calls.

use super::{Answer, Client, Database, ModelServer, Options, Process, checker, checker::Traces, eventually};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tokio::sync::OnceCell;
use wakeful_engine::tool::registry::Registry;
use wakeful_store::Store;
use wakeful_store::wake::{Continues, NewMessage, NewSession};
use wakeful_workflow::agent::ToolDefinition;
use wakeful_workflow::effect::Effect;
use wakeful_workflow::policy::SessionPolicy;
use wakeful_workflow::record::Role;
use wakeful_workflow::seed::Seed;

/// A database, a model, and the options of the processes that use them.
pub struct World {
    pub database: Database,
    pub model: ModelServer,
    pub options: Options,
    /// Set once a message was posted.
    pub session_id: String,
    pub conversation: &'static str,
}

impl World {
    /// A world whose model calls `tools` (`charge`, `reserve`, `compose_email`) in parallel, then replies.
    pub async fn new(conversation: &'static str, tools: &[&str]) -> World {
        let model = model(tools).await;
        let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
        World { database: Database::new().await, model, options, session_id: String::new(), conversation }
    }

    /// Starts a process that these failpoints kill.
    pub async fn serve_until(&self, failpoints: &str) -> Process {
        self.options.clone().env("FAILPOINTS", failpoints).serve(&self.database).await
    }

    pub async fn serve(&self) -> Process {
        self.options.serve(&self.database).await
    }

    /// Posts the first message.
    pub async fn begin(&mut self, client: &Client) {
        self.session_id =
            post_before_death(&self.database, client, self.conversation, "A table for two, please.").await;
    }

    /// Waits for the first reply, posts the second message, waits for its reply, and checks what the session
    /// left.
    pub async fn finish(&self, client: &Client) -> Traces {
        client.wait_for(&self.session_id, "completed").await;
        client.chat(self.conversation, "And one for tomorrow.").await;
        client.wait_for(&self.session_id, "completed").await;
        // Separate jobs send what the run enqueued, and they write to the journal too.
        eventually("every job to end", || async {
            let jobs: i64 = self.database.value("select count(*) from jobs where $1 <> ''", "all").await;
            (jobs == 0).then_some(())
        })
        .await;
        self.check().await
    }

    pub async fn check(&self) -> Traces {
        checker::check(&self.database, &self.session_id, &self.options.effects()).await
    }

    /// The requests that the model server gets when nothing goes wrong. Each run of a process has the same, so it is run once for
    /// all rows of a test.
    pub async fn undisturbed(tools: &[&str]) -> Vec<String> {
        type Run = Arc<OnceCell<Vec<String>>>;
        static RUNS: Mutex<BTreeMap<String, Run>> = Mutex::new(BTreeMap::new());
        let run = Arc::clone(RUNS.lock().expect("nobody panics with it").entry(tools.join(" ")).or_default());
        run.get_or_init(|| World::run_undisturbed(tools)).await.clone()
    }

    async fn run_undisturbed(tools: &[&str]) -> Vec<String> {
        let mut world = World::new("undisturbed", tools).await;
        let process = world.serve().await;
        let client = process.client();
        world.begin(&client).await;
        let traces = world.finish(&client).await;
        assert_eq!(traces.steps.len(), 4);
        assert_eq!(world.options.effects().len(), 2 * tools.iter().filter(|tool| has_effect(tool)).count());
        assert!(process.terminate().success());
        let bodies = world.model.bodies();
        assert_eq!(checker::distinct(&bodies).len(), 4, "an undisturbed run asks nothing twice");
        assert_eq!(bodies.len(), 4);
        bodies
    }

    /// The number of times that a tool's effect happened.
    pub fn effects(&self, tool: &str) -> usize {
        self.options.effects().iter().filter(|line| line.starts_with(&format!("{tool} "))).count()
    }

    /// Waits until the effect of a tool has happened.
    pub async fn has_effect(&self, tool: &str) {
        self.options.until_effects(tool, |_| self.effects(tool) >= 1).await;
    }

    pub fn mails(&self) -> usize {
        std::fs::read_dir(self.options.path("mail").join("new")).map_or(0, Iterator::count)
    }

    /// Waits until so many mails are there.
    pub async fn has_mails(&self, count: usize) {
        let new = self.options.path("mail").join("new");
        std::fs::create_dir_all(&new).expect("a folder of mails");
        let come = super::folder::Changes::of(new.join("mail")).until(|| self.mails() >= count);
        super::within(&format!("{count} mails"), come).await;
    }
}

/// A model that calls `tools` in parallel and then replies.
pub async fn model(tools: &[&str]) -> ModelServer {
    let calls = tools.iter().map(|tool| {
        let arguments = match *tool {
            "charge" => json!({"cents": 1250}),
            "reserve" => json!({"persons": 2}),
            "compose_email" => {
                json!({"to": ["ann@example.org"], "subject": "Your table", "body": "It is yours."})
            }
            other => panic!("no arguments for {other}"),
        };
        ((*tool).to_owned(), arguments.to_string())
    });
    ModelServer::turns(vec![Answer::Calls(calls.collect()), Answer::text("That is done, as you see above.")])
        .await
}

/// Posts the first message of a chat to a process that may die between its commit and its answer. Returns the session's
/// id.
pub async fn post_before_death(
    database: &Database,
    client: &Client,
    conversation: &str,
    text: &str,
) -> String {
    let request = client.post_request(&format!("/v1/chat/{conversation}/messages"));
    let sent = request.body(json!({"user_id": "ann", "text": text}).to_string()).send().await;
    if let Ok(answer) = sent {
        assert_eq!(answer.status(), 202);
    }
    eventually("a session of the message", || async {
        let sql = "select max(session_id) from conversation_sessions where conversation_id = $1";
        database.value::<Option<String>>(sql, &format!("default/{conversation}")).await
    })
    .await
}

/// Posts a message to a chat's session of the default agent, as the API would, without a process. Returns the
/// session's id.
pub async fn wake(store: &Store, conversation: &str, model: &str, text: &str) -> String {
    let new = NewSession {
        space_id: "default".to_owned(),
        mailbox_id: "default".to_owned(),
        conversation_id: format!("default/{conversation}"),
        trigger_type: "chat".to_owned(),
        trigger_id: conversation.to_owned(),
        continues: Continues::Trigger,
        agent: "default".to_owned(),
        model_id: model.to_owned(),
        model_context_window: 128_000,
        tools: tools(),
        policy: SessionPolicy::default(),
        repository_id: None,
        speaker: None,
        only_agent: false,
        seeds: vec![Seed { role: Role::System, content: "You are a test.".to_owned(), is_new: true }],
    };
    store.wake(&new, &message(text)).await.expect("a message is taken").session_id
}

/// Sends one more message to a session, as the API would, without a process.
pub async fn send(store: &Store, session_id: &str, text: &str) {
    store.send(session_id, &message(text)).await.expect("a message is taken");
}

fn message(text: &str) -> NewMessage {
    NewMessage {
        client_key: None,
        text: text.to_owned(),
        sender: None,
        trace_context: None,
        attachments: Vec::new(),
    }
}

/// The built-in tools and those of `fixture_worker`, as defined for a session's model.
pub fn tools() -> Vec<ToolDefinition> {
    let built_in = Registry::built_in().expect("the built-in tools register");
    let names: Vec<&str> = built_in.names().collect();
    let own = |name: &str, effect| {
        ToolDefinition::new(name, "One of the example's.", json!({"type": "object"}), effect)
    };
    let mut tools = built_in.definitions(&names).expect("they are registered");
    tools.extend([
        own("charge", Effect::Guarded),
        own("misbehave", Effect::Idempotent),
        own("reserve", Effect::Idempotent),
    ]);
    tools
}

fn has_effect(tool: &str) -> bool {
    matches!(tool, "charge" | "reserve")
}
