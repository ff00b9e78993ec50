//! A session that edits a git repository over ten steps, on three hosts that share no disk, killed again and again: its files,
//! its index, its branches and what the model was asked are those of one that never died.

use super::files::completed;
use crate::support::checker::distinct;
use crate::support::git::standing;
use crate::support::model::turns_since_user;
use crate::support::{Answer, Database, ModelServer, Options};
use serde_json::json;
use std::sync::Arc;

/// Where a process dies, in turn. Each of them is reached by whatever is left of the session.
const EVERYWHERE: &[&str] = &[
    "K30_put=1*return",
    "K21=2*off->1*return",
    "K31=1*return",
    "K22=3*off->1*return",
    "K31_rename=1*return",
    "K19=1*off->1*return",
    "K18=1*return",
    "K10=1*off->1*return",
    "K30_put=1*off->1*return",
    "K17=1*return",
    "K22=1*return",
];

/// Those of the quick form.
const FEW: &[&str] = &["K30_put=1*off->1*return", "K31_rename=1*return", "K21=3*off->1*return"];

async fn model() -> ModelServer {
    ModelServer::start(|body, _| {
        let git = |arguments: &[&str]| Answer::call("run_git", json!({"arguments": arguments}));
        match turns_since_user(body) {
            0 => Answer::call("write_file", json!({"path": "src/main.rs", "content": "fn one() {}\n"})),
            1 => git(&["init", "-q", "-b", "trunk"]),
            2 => git(&["add", "."]),
            3 => git(&["commit", "-q", "-m", "one"]),
            4 => Answer::call("write_file", json!({"path": "notes.md", "content": "Not added.\n"})),
            5 => Answer::call("edit_file", json!({"path": "src/main.rs", "old": "one", "new": "two"})),
            6 => git(&["checkout", "-q", "-b", "side"]),
            7 => git(&["add", "src/main.rs"]),
            8 => Answer::call("edit_file", json!({"path": "src/main.rs", "old": "two", "new": "three"})),
            9 => git(&["status", "--porcelain=v1", "--branch"]),
            _ => Answer::text("Done."),
        }
    })
    .await
}

/// What a session left: the model's requests, and its repository as another host restores it.
struct Left {
    bodies: Vec<String>,
    standing: String,
    at_step_5: String,
}

/// Runs the session. A process dies at each of `kills` in turn, on one of three hosts, and one more ends the run.
/// `env`: where packs are kept.
async fn run(env: &[(&str, String)], kills: &[&str]) -> Left {
    let database = Database::new().await;
    database.with_roles().await;
    let model = model().await;
    let mut options = Options::new()
        .config(
            "[agents.default]\nmodel = \"openai/test\"\ntools = [\"read_file\", \"write_file\", \"edit_file\", \"run_git\"]",
        )
        .env("OPENAI_BASE_URL", &model.url);
    for (name, value) in env {
        options = options.env(name, value.as_str());
    }
    let on_host = |number: usize| {
        let folder = options.path(&format!("host{}", number % 3)).display().to_string();
        options.clone().env("WAKEFUL_WORKSPACE__DIR", folder)
    };
    let mut id = None;
    for (number, kill) in kills.iter().enumerate() {
        let options = on_host(number).env("FAILPOINTS", *kill);
        let process = if id.is_none() {
            let process = options.serve(&database).await;
            id = Some(process.client().chat("c1", "Go.").await["session_id"].as_str().unwrap().to_owned());
            process
        } else {
            options.spawn(&database.url)
        };
        let (status, process) = process.ended().await;
        assert!(!status.success() && process.log().contains("failpoint"), "{kill}: {}", process.log());
    }
    let process = on_host(kills.len()).serve(&database).await;
    let client = process.client();
    let (id, session) = completed(&client, &database, id, "Go.").await;
    // A fork after the fifth step.
    let tool = session["messages"].as_array().unwrap().iter().filter(|message| message["role"] == "tool");
    let fifth = tool.map(|message| message["message_number"].as_i64().unwrap()).nth(4).unwrap();
    let (_, fork) =
        client.post(&format!("/v1/sessions/{id}/fork"), &json!({"at": fifth, "start": false})).await;
    let fork = fork["session_id"].as_str().unwrap_or_else(|| panic!("{fork}")).to_owned();
    assert!(process.terminate().success());

    let cli = async |args: &[&str]| {
        let args = args.iter().map(|&arg| arg.to_owned()).collect();
        let one = Options {
            args,
            env: options.env.clone(),
            dir: Arc::clone(&options.dir),
            config: options.config.clone(),
        };
        let (status, process) = one.spawn(&database.url).ended().await;
        assert!(status.success(), "{}{}", process.output(), process.log());
    };
    let mut checked_out = Vec::new();
    for (session, name) in [(&id, "whole"), (&fork, "fork")] {
        let folder = options.path(name);
        cli(&["session", "checkout", session, &folder.display().to_string()]).await;
        checked_out.push(standing(&folder));
    }
    // No orphan after a collection, and nothing that is named is gone.
    let old = "update blobs set touched_at = now() - interval '2 days'";
    sqlx::query(old).execute(&database.pool).await.unwrap();
    cli(&["blobs", "gc"]).await;
    cli(&["blobs", "verify"]).await;
    let unnamed = "select count(*) from blobs b where media_type like $1 and not exists (
        select from session_events e, jsonb_array_elements(e.payload -> 'packs') pack
        where e.type = 'WORKSPACE_SNAPSHOT' and pack ->> 'sha256' = b.sha256)";
    assert_eq!(database.value::<i64>(unnamed, "%pack").await, 0);
    let bodies = distinct(&model.bodies()).into_iter().cloned().collect();
    let at_step_5 = checked_out.pop().unwrap();
    Left { bodies, standing: checked_out.pop().unwrap(), at_step_5 }
}

async fn survives(env: &[(&str, String)], kills: &[&str]) {
    let undisturbed = run(&[], &[]).await;
    let status = undisturbed.standing.lines().take(3).collect::<Vec<_>>();
    assert_eq!(status, ["## side", "MM src/main.rs", "?? notes.md"], "{}", undisturbed.standing);
    assert!(undisturbed.at_step_5.starts_with("## trunk\n?? notes.md\n"), "{}", undisturbed.at_step_5);
    let left = run(env, kills).await;
    assert_eq!(left.bodies, undisturbed.bodies, "what the model was asked");
    assert_eq!(left.standing, undisturbed.standing);
    assert_eq!(left.at_step_5, undisturbed.at_step_5, "the fork's files");
}

/// The whole acceptance on a store outside of Postgres: `env` says which.
pub async fn survives_on(env: &[(&str, String)]) {
    let mut kills = EVERYWHERE.to_vec();
    kills.insert(3, "K30_outside=1*return");
    survives(env, &kills).await;
}

#[tokio::test]
async fn a_repository_is_edited_on_three_hosts_that_are_killed() {
    let folder = tempfile::tempdir().unwrap();
    let store = [("WAKEFUL_BLOBS__STORE", folder.path().display().to_string())];
    survives(&store, FEW).await;
}

/// `make test-slow` runs it.
#[tokio::test]
#[ignore = "slow: make soak"]
async fn k30_k31_a_repository_is_edited_on_three_hosts_that_are_killed_at_each_failpoint() {
    survives(&[], EVERYWHERE).await;
    let folder = tempfile::tempdir().unwrap();
    survives_on(&[("WAKEFUL_BLOBS__STORE", folder.path().display().to_string())]).await;
}
