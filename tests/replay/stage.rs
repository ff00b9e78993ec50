//! A session in which everything happens, and the program that replays it.

use crate::support::checker::Traces;
use crate::support::{Answer, Database, ModelServer, Options, World, eventually};
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;
use std::collections::BTreeMap;

/// Role and text of the newest message in a request.
fn last(body: &Value) -> (&str, &str) {
    let newest = body["messages"].as_array().and_then(|messages| messages.last()).expect("messages");
    (newest["role"].as_str().unwrap_or_default(), newest["content"].as_str().unwrap_or_default())
}

fn answer(body: &Value) -> Answer {
    let calls = |calls: &[(&str, Value)]| {
        Answer::Calls(calls.iter().map(|(name, args)| ((*name).to_owned(), args.to_string())).collect())
    };
    match last(body) {
        ("user", "A table for two, please.") => calls(&[
            ("charge", json!({"cents": 1250})),
            ("write_file", json!({"path": "notes/table.md", "content": "A table for two.\n"})),
            ("reserve", json!({"persons": 2})),
            (
                "compose_email",
                json!({"to": ["ann@example.org"], "subject": "Your table", "body": "It is yours."}),
            ),
        ]),
        ("user", "By the window.") => calls(&[("read_file", json!({"path": "notes/table.md"}))]),
        ("user", "Which day?") => calls(&[("ask_user", json!({"question": "Which day do you like?"}))]),
        ("tool", "Friday") => calls(&[("read_file", json!({"path": "./notes/table.md"}))]),
        ("tool", _) => Answer::text("That is done, as you see above."),
        (_, said) => Answer::text(&format!("You said: {said}")),
    }
}

pub struct Stage {
    /// The world's session is the source of the replays.
    pub world: World,
    pub model: ModelServer,
}

/// What a command left behind.
pub struct CommandOutput {
    pub status: i32,
    pub json: Value,
    pub output: String,
    pub log: String,
}

impl Stage {
    /// A source of three runs: a turn of four parallel calls with a message in the middle and a `kill -9`; a
    /// question with its answer; and a model call that was cut off.
    pub async fn eventful() -> Stage {
        let model = ModelServer::start(|body, _| answer(body)).await;
        let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
        let mut world = World {
            database: Database::new().await,
            model: idle().await,
            options,
            session_id: String::new(),
            conversation: "eventful",
        };
        let hold = world.options.path("hold-reserve");
        std::fs::write(&hold, "").unwrap();
        let process = world.serve().await;
        world.begin(&process.client()).await;
        world.has_effect("reserve").await;
        let others = "select count(*) from tool_calls where session_id = $1 and effect = 'guarded' and status = 'done'";
        eventually("the charge to settle", || async {
            (world.database.value::<i64>(others, &world.session_id).await == 1).then_some(())
        })
        .await;
        process.client().chat("eventful", "By the window.").await;
        process.kill();
        std::fs::remove_file(hold).unwrap();
        let process = world.serve().await;
        let client = process.client();
        client.wait_for(&world.session_id, "completed").await;
        client.chat("eventful", "Which day?").await;
        client.wait_for(&world.session_id, "waiting_input").await;
        model.hold();
        let asked = model.bodies().len();
        client.chat("eventful", "Friday").await;
        model.asked(asked + 1).await;
        process.kill();
        model.release();
        let process = world.serve().await;
        let client = process.client();
        client.wait_for(&world.session_id, "completed").await;
        client.chat("eventful", "Thank you.").await;
        client.wait_for(&world.session_id, "completed").await;
        world.has_mails(1).await;
        eventually("every job to end", || async {
            let jobs: i64 = world.database.value("select count(*) from jobs where $1 <> ''", "all").await;
            (jobs == 0).then_some(())
        })
        .await;
        assert!(process.terminate().success());
        let stage = Stage { world, model };
        let source = stage.source().await;
        let roles: Vec<&str> = source.records.iter().map(|record| record["role"].as_str().unwrap()).collect();
        assert_eq!(roles[..8], ["user", "assistant", "tool", "tool", "tool", "tool", "user", "assistant"]);
        assert!(!source.journal("GEN_RESUMED").is_empty(), "a call was cut off");
        stage
    }

    pub async fn source(&self) -> Traces {
        Traces::of(&self.world.database, &self.world.session_id).await
    }

    /// Every row of the source, in every table.
    pub async fn dump(&self) -> BTreeMap<String, Value> {
        let columns: Vec<(String, String)> = sqlx::query_as(
            "select table_name::text, column_name::text from information_schema.columns
            where table_schema = 'public' and column_name in ('session_id', 'conversation_id')
            order by 1, 2 desc",
        )
        .fetch_all(&self.world.database.pool)
        .await
        .unwrap();
        let mut dump = BTreeMap::new();
        for (table, column) in columns {
            if dump.contains_key(&table) {
                continue;
            }
            let key = if column == "session_id" { &self.world.session_id } else { "default/eventful" };
            let sql = format!(
                "select coalesce(json_agg(t order by t::text), '[]') from {table} t where {column} = $1"
            );
            let rows: Value = sqlx::query_scalar(AssertSqlSafe(sql))
                .bind(key)
                .fetch_one(&self.world.database.pool)
                .await
                .unwrap();
            dump.insert(table, rows);
        }
        assert!(dump["conversation_records"].as_array().unwrap().len() > 10, "it sees something");
        assert!(dump["conversation_counters"].as_array().unwrap().len() == 1);
        dump
    }

    /// Exports the source into a file with this name, and returns its path.
    pub async fn bundle(&self, name: &str) -> String {
        let path = self.world.options.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mut export =
            self.world.database.store().await.export(&self.world.session_id, false).await.unwrap();
        let mut bundle = Vec::new();
        while let Some(lines) = export.next().await.unwrap() {
            bundle.extend(lines);
        }
        std::fs::write(&path, bundle).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Runs `wakeful replay` of the source to its end.
    pub async fn replay(&self, args: &[&str]) -> CommandOutput {
        self.replay_with(|options| options, args).await
    }

    pub async fn replay_with(&self, change: impl FnOnce(Options) -> Options, args: &[&str]) -> CommandOutput {
        let all: Vec<&str> =
            [self.world.session_id.as_str(), "-o", "json"].into_iter().chain(args.iter().copied()).collect();
        let mut told = self.command(change, &all).await;
        told.json = serde_json::from_str(&told.output)
            .unwrap_or_else(|error| panic!("{error}: {}\n{}", told.output, told.log));
        told
    }

    /// Runs `wakeful replay` with these arguments.
    pub async fn command(&self, change: impl FnOnce(Options) -> Options, args: &[&str]) -> CommandOutput {
        let mut options = change(self.world.options.clone());
        options.args = std::iter::once("replay").chain(args.iter().copied()).map(str::to_owned).collect();
        let (status, process) = options.spawn(&self.world.database.url).ended().await;
        let json = Value::Null;
        let status = status.code().expect("it ended by itself");
        CommandOutput { status, json, output: process.output(), log: process.log() }
    }

    /// Starts or continues a replay that a failpoint kills. Returns the id of its session if there already is
    /// one.
    pub async fn killed_replay(&self, failpoint: &str, args: &[&str]) -> Option<String> {
        // It may die before it has its liveness lock. Then the next one waits for the lease.
        let mut options = self.world.options.clone().short_lease().env("FAILPOINTS", failpoint);
        options.args = ["replay", &self.world.session_id, "-o", "json"].map(str::to_owned).to_vec();
        options.args.extend(args.iter().map(|arg| (*arg).to_owned()));
        let (status, process) = options.spawn(&self.world.database.url).ended().await;
        assert_eq!(status.code(), None, "{failpoint} kills it: {}\n{}", process.output(), process.log());
        let fork = "select max(session_id) from conversation_sessions where parent_session_id = $1";
        self.world.database.value(fork, &self.world.session_id).await
    }

    /// Asserts that the replay sent and wrote nothing, and that its source is unchanged.
    pub async fn assert_untouched(&self, before: &BTreeMap<String, Value>, told: &CommandOutput) {
        assert_eq!(&self.dump().await, before, "the source, row by row");
        assert_eq!(self.world.options.effects().len(), 3, "charge once; reserve twice, for it is idempotent");
        assert_eq!(self.world.mails(), 1);
        let id = told.session_id();
        for sql in [
            "select count(*) from deliveries where session_id = $1",
            "select count(*) from tool_calls where session_id = $1 and started_at is not null",
            "select count(*) from jobs where session_id = $1",
        ] {
            assert_eq!(self.world.database.value::<i64>(sql, &id).await, 0, "{sql}");
        }
        assert!(!self.world.options.path("workspaces").join(&id).exists(), "no file is written");
        let verified = self.world.database.store().await.verify(&id).await.unwrap();
        assert!(verified.agrees, "{:#?}", verified.checks);
    }
}

impl CommandOutput {
    pub fn session_id(&self) -> String {
        self.json["replay"]["session_id"].as_str().expect("an id").to_owned()
    }

    pub async fn traces(&self, stage: &Stage) -> Traces {
        Traces::of(&stage.world.database, &self.session_id()).await
    }
}

/// Number, role, content and `internal` of each message.
pub fn messages(traces: &Traces) -> Vec<Value> {
    let messages = traces.records.iter();
    messages.map(|one| json!([one["message_number"], one["role"], one["content"], one["internal"]])).collect()
}

/// The hash of the request behind each answer, by the answer's message number.
pub fn answered(traces: &Traces) -> BTreeMap<i64, String> {
    let called: BTreeMap<String, String> = traces
        .journal("LLM_CALLED")
        .into_iter()
        .map(|call| (call["generation_id"].to_string(), call["request_sha256"].to_string()))
        .collect();
    let ended = traces.journal("GEN_COMPLETE").into_iter();
    ended
        .map(|end| {
            (end["message_number"].as_i64().unwrap(), called[&end["generation_id"].to_string()].clone())
        })
        .collect()
}

/// A model that is never asked.
async fn idle() -> ModelServer {
    ModelServer::turns(vec![Answer::text("Nobody asks me.")]).await
}
