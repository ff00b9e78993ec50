//! A real Absurd and our command beside it.

use crate::support::{Answer, Database, ModelServer, Options};
use serde_json::Value;
use sqlx::{AssertSqlSafe, PgPool};
use std::process::Stdio;
use std::sync::Arc;
use tokio::process::{Child, Command};

/// A database with Absurd in it.
pub(super) struct Peer {
    pub database: Database,
    /// Ids of tasks with something particular.
    pub ids: Value,
    version: Version,
}

/// A version of Absurd: what `scripts/setup peers` names its SDK and the file of its schema.
#[derive(Clone, Copy)]
pub(super) struct Version {
    pub sdk: &'static str,
    pub sql: &'static str,
}

const NEWEST: Version = Version { sdk: "absurd-sdk", sql: "absurd.sql" };

impl Peer {
    pub async fn new() -> Peer {
        Peer::of(NEWEST).await
    }

    pub async fn of(version: Version) -> Peer {
        let peer = Peer { database: Database::without_schema().await, ids: Value::Null, version };
        peer.node("schema", &[]).await;
        peer
    }

    pub async fn filled(finished: u32) -> Peer {
        let mut peer = Peer::new().await;
        peer.fill(finished).await;
        peer
    }

    pub async fn fill(&mut self, finished: u32) {
        self.ids = self.node("fill", &[("FINISHED", &finished.to_string())]).await;
    }

    pub fn id(&self, name: &str) -> &str {
        self.ids[name].as_str().unwrap_or_else(|| panic!("no {name} in {}", self.ids))
    }

    pub fn start(&self, verb: &str, env: &[(&str, &str)]) -> Child {
        let peers = std::env::var("WAKEFUL_PEERS").expect("WAKEFUL_PEERS is set by `make test-peers`");
        Command::new("node")
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/peers/absurd.mjs"))
            .arg(verb)
            .env("ABSURD_URL", &self.database.url)
            .env("WAKEFUL_PEERS", peers)
            .env("ABSURD_SDK", self.version.sdk)
            .env("ABSURD_SQL", self.version.sql)
            .envs(env.iter().copied())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("node: scripts/setup peers installs it")
    }

    pub async fn node(&self, verb: &str, env: &[(&str, &str)]) -> Value {
        let out = self.start(verb, env).wait_with_output().await.unwrap();
        assert!(out.status.success(), "{verb}");
        let text = String::from_utf8(out.stdout).unwrap();
        if text.trim().is_empty() { Value::Null } else { serde_json::from_str(&text).unwrap() }
    }

    pub async fn count(&self, sql: &str) -> i64 {
        count(&self.database.pool, sql).await
    }
}

pub(super) async fn count(pool: &PgPool, sql: &str) -> i64 {
    sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(pool).await.expect(sql)
}

/// How a command ended, and what it printed as JSON.
pub(super) struct Ran {
    pub code: Option<i32>,
    pub json: Value,
    pub errors: String,
}

/// `wakeful absurd ARGS` from `peer` into `database`.
pub(super) async fn absurd(options: &Options, peer: &Peer, database: &Database, args: &[&str]) -> Ran {
    let all = [&["absurd", "-o", "json", "--from", peer.database.url.as_str()][..], args].concat();
    command(options, database, &all).await
}

pub(super) async fn command(options: &Options, database: &Database, args: &[&str]) -> Ran {
    let (status, process) = with_args(options, args).spawn(&database.url).ended().await;
    let out = process.output();
    let json = serde_json::from_str(&out).unwrap_or(Value::String(out));
    Ran { code: status.code(), json, errors: process.log() }
}

pub(super) fn with_args(options: &Options, args: &[&str]) -> Options {
    Options {
        config: options.config.clone(),
        args: args.iter().map(|&arg| arg.to_owned()).collect(),
        env: options.env.clone(),
        dir: Arc::clone(&options.dir),
    }
}

const OWN: &str = r#"
[absurd.tasks."own-agent"]
steps = ["turn"]
messages = "$.said"
role = "$.who"
content = "$.text"
calls = "$.asks[*]"
call_id = "$.no"
call_name = "$.tool"
call_arguments = "$.with"
results = "$.got[*]"
result_call_id = "$.no"
result_content = "$.said"
input_tokens = "$.tokens[0]"
output_tokens = "$.tokens[1]"
"#;

pub(super) fn options(model: &ModelServer) -> Options {
    Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url).config(OWN)
}

pub(super) async fn model() -> ModelServer {
    ModelServer::turns(vec![Answer::text("I went on.")]).await
}
