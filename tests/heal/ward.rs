//! A database that a test damages, with its sessions and processes.

use crate::support::world::wake;
use crate::support::{Answer, Database, ModelServer, Options, Process, eventually};
use serde_json::json;
use sqlx::AssertSqlSafe;
use wakeful_store::Store;
use wakeful_store::heal::{Cursor, Healed};
use wakeful_store::wake::{Continues, NewMessage, NewSession};
use wakeful_workflow::policy::SessionPolicy;

/// A database that a test damages, and the processes on it.
pub(super) struct Ward {
    pub(super) database: Database,
    pub(super) store: Store,
    pub(super) model: ModelServer,
    pub(super) options: Options,
}

impl Ward {
    pub(super) async fn new() -> Ward {
        let model = ModelServer::start(|body, _| {
            let last = body["messages"].as_array().unwrap().last().unwrap();
            match last["content"].as_str().unwrap_or_default() {
                "ask" => Answer::call("ask_user", json!({"question": "Which?"})),
                "mail" => {
                    let mail = json!({"to": ["ann@example.org"], "subject": "Hi", "body": "Ann."});
                    Answer::call("compose_email", mail)
                }
                text => Answer::text(&format!("You said: {text}.")),
            }
        })
        .await;
        let options = Options::new()
            .model("openai/test")
            .env("OPENAI_BASE_URL", &model.url)
            .env("WAKEFUL_QUEUE__HEAL_S", "1");
        let database = Database::new().await;
        Ward { store: database.store().await, database, model, options }
    }

    /// A session with one message. No worker runs yet.
    pub(super) async fn session(&self, conversation: &str, text: &str) -> String {
        wake(&self.store, conversation, "openai/test", text).await
    }

    /// Another session of the conversation `c1`.
    pub(super) async fn beside(&self, trigger_id: &str, text: &str) -> String {
        let new = NewSession {
            space_id: "default".to_owned(),
            mailbox_id: "default".to_owned(),
            conversation_id: "default/c1".to_owned(),
            trigger_type: "test".to_owned(),
            trigger_id: trigger_id.to_owned(),
            continues: Continues::Trigger,
            agent: "default".to_owned(),
            model_id: "openai/test".to_owned(),
            model_context_window: 128_000,
            tools: crate::support::world::tools(),
            policy: SessionPolicy::default(),
            repository_id: None,
            speaker: None,
            only_agent: false,
            seeds: vec![],
        };
        self.store.wake(&new, &message(text)).await.unwrap().session_id
    }

    pub(super) async fn worker(&self) -> Process {
        let worker = self.options.clone().arg("--roles=worker").spawn(&self.database.url);
        worker.wait_for_log("\"Working\"").await;
        worker
    }

    /// Changes rows directly, as an operator with psql does.
    pub(super) async fn run_sql(&self, sql: &str, session_id: &str) {
        let done = sqlx::query(AssertSqlSafe(sql.to_owned())).bind(session_id).execute(&self.database.pool);
        assert!(done.await.expect(sql).rows_affected() > 0, "{sql} changes something");
    }

    pub(super) async fn status(&self, session_id: &str) -> String {
        self.database
            .value("select status from conversation_sessions where session_id = $1", session_id)
            .await
    }

    pub(super) async fn becomes(&self, session_id: &str, status: &str) {
        eventually(&format!("{session_id} to be {status}"), || async {
            (self.status(session_id).await == status).then_some(())
        })
        .await;
    }

    pub(super) async fn texts(&self, session_id: &str, role: &str) -> Vec<String> {
        let messages = self.store.messages(session_id, None, 100).await.unwrap();
        let of_role = messages.into_iter().filter(|message| message.role == role);
        of_role.map(|message| message.text).collect()
    }

    pub(super) async fn wake(&self, session_id: &str) -> Vec<Healed> {
        self.store.wake_session(session_id).await.unwrap()
    }

    /// Asserts that everything is in order: no job, no open run, no wrong count, nothing to heal, and message
    /// numbers without a gap.
    pub(super) async fn is_in_order(&self) {
        eventually("every job to end", || async {
            let jobs: i64 = self.database.value("select count(*) from jobs where $1 <> ''", "all").await;
            (jobs == 0).then_some(())
        })
        .await;
        let open = "select count(*) from conversation_counters where open_run_id is not null or queued_runs <> 0 or $1 = ''";
        assert_eq!(self.database.value::<i64>(open, "all").await, 0);
        let open = "select count(*) from session_runs where status in ('queued', 'running') or $1 = ''";
        assert_eq!(self.database.value::<i64>(open, "all").await, 0);
        let gaps = "select count(*) from (select message_number - lag(message_number) over
            (partition by conversation_id order by message_number) as step from conversation_records) n
            where step <> 1 or $1 = ''";
        assert_eq!(self.database.value::<i64>(gaps, "all").await, 0);
        assert_eq!(self.unattended().await, [""; 0]);
    }

    pub(super) async fn unattended(&self) -> Vec<String> {
        self.store.look_for_unattended(&mut Cursor::default(), 1000).await.unwrap().sessions
    }
}

pub(super) fn message(text: &str) -> NewMessage {
    NewMessage {
        client_key: None,
        text: text.to_owned(),
        sender: None,
        trace_context: None,
        attachments: Vec::new(),
    }
}

/// Inserts an inbox row directly, without a wake.
pub(super) async fn insert_message(ward: &Ward, session_id: &str, text: &str, run_id: &str) {
    let insert = format!(
        "insert into session_inbox (space_id, session_id, client_key, content, content_sha256, run_id, outcome)
        values ('default', $1, 'hand', '{text}', '', '{run_id}', 'queued')"
    );
    ward.run_sql(&insert, session_id).await;
}
