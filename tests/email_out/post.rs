//! A process that sends mail to a fake SMTP server, and what it leaves in the database.

use crate::support::checker::Traces;
use crate::support::world::tools;
use crate::support::{
    Answer, Client, Database, ModelServer, Options, Process, Program, SmtpServer, eventually,
};
use serde_json::{Value, json};
use wakeful_store::Store;
use wakeful_store::wake::{Continues, NewMessage, NewSession};
use wakeful_workflow::policy::{ReplyRoute, SessionPolicy};
use wakeful_workflow::record::Role;
use wakeful_workflow::seed::Seed;

/// The beginning of a note that tells the agent how its mail ended.
pub(super) const TOLD: &str = "[A note of the system, not of a person]";

/// A world whose mail goes out by an SMTP server. A chat message that begins with `Mail ` makes the agent
/// compose a mail to the addresses in it. A session opened by a mail replies by its reply route.
pub(super) struct Post {
    pub(super) database: Database,
    pub(super) model: ModelServer,
    pub(super) server: SmtpServer,
    pub(super) options: Options,
}

impl Post {
    pub(super) async fn new() -> Post {
        let model = ModelServer::start(|body, _| {
            let messages = body["messages"].as_array().unwrap();
            // In the request, a note about the agent's mail may follow the user's message. Skip such notes.
            let said = messages.iter().rev().filter(|message| message["role"] == "user");
            let mut said = said.map(|message| message["content"].as_str().unwrap());
            let asked = said.find(|text| !text.starts_with(TOLD)).unwrap();
            match asked.strip_prefix("Mail ") {
                Some(to) if crate::support::model::turns_since_user(body) == 0 => {
                    let to: Vec<&str> = to.split(' ').collect();
                    let mail = json!({"to": to, "subject": "Grüße", "body": "As asked.\n.\nBye"});
                    Answer::call("compose_email", mail)
                }
                _ => Answer::text("It is on its way."),
            }
        })
        .await;
        let server = SmtpServer::start().await;
        let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
        let options = options.config(&server.config());
        Post { database: Database::new().await, model, server, options }
    }

    pub(super) async fn serve(&self) -> Process {
        self.options.serve(&self.database).await
    }

    /// Asks for a mail by chat, and waits for the run's end.
    pub(super) async fn ask(&self, client: &Client, text: &str) -> String {
        let answer = client.chat("office", text).await;
        let id = answer["session_id"].as_str().unwrap().to_owned();
        client.wait_for(&id, "completed").await;
        id
    }

    /// Ann's mail arrives, in a session of its own in the conversation `thread`.
    pub(super) async fn mail_comes_in(&self, store: &Store, number: usize, text: &str) -> String {
        let (mail, before) = (format!("<m{number}@example.com>"), format!("<m{}@example.com>", number - 1));
        let to = json!({
            "from": "Front Desk <front@example.org>", "to": ["ann@example.com"], "cc": ["bob@example.com"],
            "subject": "Re: Your table", "in_reply_to": mail, "references": [before, mail],
            "reply_to": "front+t1.sig@example.org",
        });
        let policy = SessionPolicy {
            reply: Some(ReplyRoute { channel: "email".to_owned(), to, split_at: None }),
            ..SessionPolicy::default()
        };
        let new = NewSession {
            space_id: "default".to_owned(),
            mailbox_id: "default".to_owned(),
            conversation_id: "default/thread".to_owned(),
            trigger_type: "email".to_owned(),
            trigger_id: mail,
            continues: Continues::Trigger,
            agent: "default".to_owned(),
            model_id: "openai/test".to_owned(),
            model_context_window: 128_000,
            tools: tools(),
            policy,
            repository_id: None,
            speaker: None,
            only_agent: false,
            seeds: vec![Seed { role: Role::System, content: "You are a test.".to_owned(), is_new: true }],
        };
        let message = NewMessage {
            client_key: None,
            text: text.to_owned(),
            sender: Some("ann@example.com".to_owned()),
            trace_context: None,
            attachments: Vec::new(),
        };
        store.wake(&new, &message).await.unwrap().session_id
    }

    pub(super) async fn is_done(&self) {
        eventually("every job to end", || async {
            let jobs: i64 = self.database.value("select count(*) from jobs where $1 <> ''", "all").await;
            (jobs == 0).then_some(())
        })
        .await;
    }

    /// The outbox: (id, status, last_error), in order.
    pub(super) async fn outbox(&self) -> Vec<(String, String, Option<String>)> {
        sqlx::query_as("select delivery_id, status, last_error from deliveries order by ordinal")
            .fetch_all(&self.database.pool)
            .await
            .unwrap()
    }

    pub(super) async fn statuses(&self) -> Vec<String> {
        self.outbox().await.into_iter().map(|(_, status, _)| status).collect()
    }

    /// The journal's entries about deliveries.
    pub(super) async fn journal(&self, session_id: &str) -> Vec<Value> {
        let traces = Traces::of(&self.database, session_id).await;
        traces.events.into_iter().filter(|event| event["payload"]["delivery_id"].is_string()).collect()
    }

    pub(super) fn cli(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    pub(super) fn run(&self, args: &[&str]) -> std::process::Output {
        let mut command = Program::command(self.options.dir.path());
        command.args(args).env("DATABASE_URL", &self.database.url).env("WAKEFUL_LOG", "error");
        command.output().unwrap()
    }

    /// The body of the last request to the model.
    pub(super) fn last_request(&self) -> String {
        self.model.bodies().last().unwrap().clone()
    }
}
