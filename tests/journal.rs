//! The journal of the real process, and the commands `session recover` and `session verify`.

use crate::support::checker::Traces;
use crate::support::{Answer, Database, ModelServer, Options, Program, World, eventually};
use chrono::{DateTime, Utc};
use futures::future::join_all;
use serde_json::{Value, json};
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;

const LEVELS: [&str; 2] = ["full", "checkpoint"];

/// The result of a command.
struct Ran {
    code: i32,
    out: String,
    err: String,
}

impl Ran {
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}{}", self.out, self.err))
    }
}

/// `wakeful session` with these arguments and this stdin.
async fn session(database_url: Option<&str>, args: &[&str], input: &str) -> Ran {
    let mut command = Program::command(&std::env::temp_dir());
    command.arg("session").args(args);
    if let Some(url) = database_url {
        command.env("DATABASE_URL", url);
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let input = input.to_owned();
    let ended = tokio::task::spawn_blocking(move || {
        let mut child = command.spawn().expect("the program was built");
        // A command that does not read stdin may already have ended.
        let _ = child.stdin.take().expect("piped").write_all(input.as_bytes());
        child.wait_with_output().expect("it ends")
    });
    let ended = ended.await.expect("waiting does not panic");
    let text = |bytes| String::from_utf8(bytes).expect("it prints UTF-8");
    Ran { code: ended.status.code().expect("no signal"), out: text(ended.stdout), err: text(ended.stderr) }
}

async fn row(database: &Database, session_id: &str) -> Value {
    database
        .value(
            "select json_build_object('context_state', state, 'lifecycle_state', status) from conversation_sessions
            where session_id = $1",
            session_id,
        )
        .await
}

/// Checks that both commands agree with the row: from the database, and from a printed journal without a
/// database.
async fn the_journal_gives_the_row(database: &Database, session_id: &str) {
    let url = Some(database.url.as_str());
    let row = row(database, session_id).await;
    let recovered = session(url, &["recover", session_id, "-o", "json"], "").await.json();
    for field in ["context_state", "lifecycle_state"] {
        assert_eq!(recovered[field], row[field], "{field}");
    }
    let printed = session(url, &["tail", session_id, "--after", "0", "-o", "jsonl"], "").await.out;
    let from_lines = session(None, &["recover", "--journal", "-", "-o", "json"], &printed).await;
    assert_eq!((from_lines.json(), from_lines.err.as_str()), (recovered, ""));
    let verified = session(url, &["verify", session_id], "").await;
    assert_eq!(verified.code, 0, "{}{}", verified.out, verified.err);
}

#[tokio::test]
async fn every_entry_of_a_run_stands_in_its_order() {
    let mut world = World::new("ordered", &["reserve", "compose_email"]).await;
    let process = world.serve().await;
    let client = process.client();
    world.begin(&client).await;
    let traces = world.finish(&client).await;
    assert!(process.terminate().success());

    let run_id = traces.events[0]["run_id"].clone();
    let of_run: Vec<&Value> = traces.events.iter().filter(|event| event["run_id"] == run_id).collect();
    let kinds: Vec<&str> = of_run.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let call = ["LLM_CALLED", "GEN_START", "GEN_COMPLETE"];
    let wanted = [
        ["MESSAGE_RECEIVED", "trigger_event", "state_transition", "state_transition"].as_slice(),
        &call,
        &["TOOL_INVOKED", "TOOL_INVOKED", "TOOL_RESULT", "context_update", "TOOL_RESULT"],
        &call,
        &["state_transition", "invocation_result", "checkpoint"],
    ];
    assert_eq!(kinds, wanted.concat());
    assert_eq!(traces.journal("GEN_SENT").len(), 2, "a mail of each run");
    let trigger = traces.journal("trigger_event");
    assert_eq!(*trigger[0], json!({"trigger_type": "chat", "trigger_id": "ordered"}));
    assert_eq!(trigger.len(), 2, "each message opened a run");
    assert_eq!(*traces.journal("invocation_result")[0], json!({"ok": true, "status": "completed"}));

    for event in of_run.iter().filter(|event| event["type"] == "LLM_CALLED") {
        let called = &event["payload"];
        assert_eq!((&called["prompt_tokens"], &called["repairs"]), (&json!(100), &json!(0)), "{called}");
        let time = |value: &Value| value.as_str().unwrap().parse::<DateTime<Utc>>().unwrap();
        assert!(time(&called["started_at"]) < time(&event["ts"]), "the entry's time is the commit's");
    }
    the_journal_gives_the_row(&world.database, &world.session_id).await;
}

#[tokio::test]
async fn at_either_level_a_killed_session_is_recovered_from_its_journal_as_its_row_has_it() {
    // The commits of a run, in order: it begins, the turn with its calls, the step, the reply.
    let kills = ["K22=1*off->1*return", "K22=2*off->1*return", "K22=3*off->1*return"];
    let lives = LEVELS.iter().flat_map(|level| kills.iter().map(move |kill| (level, kill)));
    join_all(lives.map(async |(level, kill)| {
        let mut world = World::new("killed", &["charge", "compose_email"]).await;
        world.options = world.options.config(&format!("journal = \"{level}\""));
        let process = world.serve_until(kill).await;
        world.begin(&process.client()).await;
        let (status, _) = process.ended().await;
        assert!(!status.success());
        the_journal_gives_the_row(&world.database, &world.session_id).await;

        let process = world.serve().await;
        let traces = world.finish(&process.client()).await;
        assert!(process.terminate().success());
        assert_eq!(traces.session["state"].as_object().unwrap().len(), 2, "a mail of each run");
        let updates = traces.journal("context_update").len();
        assert_eq!(updates, if *level == "full" { 2 } else { 0 }, "{level}");
        the_journal_gives_the_row(&world.database, &world.session_id).await;
    }))
    .await;
}

/// Traces of a session whose model call is not made again.
async fn failed_call(database: &Database, session_id: &str) -> Traces {
    let traces = Traces::of(database, session_id).await;
    let kinds: Vec<&str> = traces.events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let end =
        ["LLM_CALLED", "GEN_START", "GEN_FAILED", "state_transition", "invocation_result", "checkpoint"];
    assert!(kinds.ends_with(&end), "{kinds:?}");
    let called = traces.journal("LLM_CALLED")[0];
    assert_eq!(called["generation_id"], traces.journal("GEN_FAILED")[0]["generation_id"]);
    assert!(called["prompt_tokens"].is_null() && called["started_at"].is_string(), "{called}");
    assert_eq!(traces.journal("invocation_result")[0]["ok"], false);
    traces
}

#[tokio::test]
async fn a_call_that_was_cancelled_or_refused_is_journalled_as_failed_with_its_reason() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("That takes long.")]).await;
    model.hold();
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    let client = process.client();
    let id = client.chat("cancelled", "Hello.").await["session_id"].as_str().unwrap().to_owned();
    model.asked(1).await;
    let (status, answer) = client.post(&format!("/v1/sessions/{id}/cancel"), &json!({})).await;
    assert!(status.is_success(), "{answer}");
    client.wait_for(&id, "cancelled").await;
    let traces = failed_call(&database, &id).await;
    assert_eq!(traces.journal("GEN_FAILED")[0]["reason"], "cancelled");
    assert_eq!(traces.journal("invocation_result")[0]["error"], "cancelled");
    assert!(process.terminate().success());

    let refusing = ModelServer::turns(vec![Answer::Error(401)]).await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &refusing.url);
    let process = options.serve(&database).await;
    let client = process.client();
    let id = client.chat("refused", "Hello.").await["session_id"].as_str().unwrap().to_owned();
    client.wait_for(&id, "failed").await;
    let traces = failed_call(&database, &id).await;
    let reason = traces.journal("GEN_FAILED")[0]["reason"].as_str().unwrap();
    assert!(reason.contains("refused the credentials"), "{reason}");
}

#[tokio::test]
async fn a_session_whose_caches_differ_is_named_with_status_8_and_rebuilt() {
    let mut world = World::new("corrupted", &["compose_email"]).await;
    let process = world.serve().await;
    let client = process.client();
    world.begin(&client).await;
    world.finish(&client).await;
    let other = client.chat("whole", "Hello.").await["session_id"].as_str().unwrap().to_owned();
    client.wait_for(&other, "completed").await;
    eventually("every job to end", || async {
        let jobs: i64 = world.database.value("select count(*) from jobs where $1 <> ''", "all").await;
        (jobs == 0).then_some(())
    })
    .await;
    assert!(process.terminate().success());
    let id = world.session_id.as_str();
    let cli = async |args: &[&str]| session(Some(&world.database.url), args, "").await;
    let before = row(&world.database, id).await;
    let whole = cli(&["verify", id]).await;
    assert_eq!(whole.code, 0, "{}", whole.err);
    assert!(whole.out.starts_with(&format!("{id}  agrees\n")), "{}", whole.out);
    for part in ["state", "status", "total_input_tokens", "to_message_number", "last_event_seq"] {
        assert!(whole.out.contains(&format!("ok  {part}")), "{part}: {}", whole.out);
    }

    sqlx::query("update conversation_sessions set state = '{}', total_turns = 0 where session_id = $1")
        .bind(id)
        .execute(&world.database.pool)
        .await
        .unwrap();
    let damaged = cli(&["verify", id]).await;
    assert_eq!(damaged.code, 8, "{}", damaged.err);
    let differing = damaged.out.lines().filter(|line| line.contains("DIFFERS")).count();
    assert_eq!(differing, 3, "the state by both logs, and the turns: {}", damaged.out);
    let remedy = format!("differs: state, total_turns. Remedy: `wakeful session verify {id} --rebuild`");
    assert!(damaged.out.contains(&remedy), "{}", damaged.out);

    let all = cli(&["verify", "--all", "-o", "json"]).await;
    assert_eq!(all.code, 8);
    let agrees: Vec<(Value, Value)> = all
        .json()
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["session_id"].clone(), one["agrees"].clone()))
        .collect();
    assert_eq!(agrees, [(json!(id), json!(false)), (json!(other), json!(true))]);

    let rebuilt = cli(&["verify", "--all", "--rebuild"]).await;
    assert_eq!(rebuilt.code, 0, "{}{}", rebuilt.out, rebuilt.err);
    assert!(
        rebuilt.out.contains("rebuilt state: {} → ") && rebuilt.out.contains("rebuilt total_turns: 0 → 4")
    );
    assert_eq!(row(&world.database, id).await, before);
    let quiet = cli(&["verify", "--all"]).await;
    assert_eq!((quiet.code, quiet.out), (0, format!("{id}  agrees\n{other}  agrees\n")));

    assert_eq!(cli(&["verify", "sess_none"]).await.code, 3);
    assert_eq!(cli(&["verify"]).await.code, 2);
    assert_eq!(cli(&["verify", id, "--all"]).await.code, 2);
    let unknown = cli(&["recover", "sess_none"]).await;
    assert_eq!((unknown.code, unknown.out.as_str()), (3, ""), "{}", unknown.err);
    assert_eq!(cli(&["recover"]).await.code, 2);
}

/// Runs `recover` on a file with these lines, without any database.
async fn recover_file(dir: &Path, lines: &str) -> Ran {
    let file = dir.join("journal.jsonl");
    std::fs::write(&file, lines).expect("the test's folder");
    session(None, &["recover", "--journal", file.to_str().unwrap(), "-o", "json"], "").await
}

#[tokio::test]
async fn a_journal_in_a_file_recovers_without_a_database() {
    let dir = tempfile::TempDir::with_prefix("journal-").unwrap();
    let crashed = r#"{"entry_type": "state_transition", "data": {"from_state": "created", "to_state": "starting"}}
{"entry_type": "state_transition", "data": {"from_state": "starting", "to_state": "running"}}
{"entry_type": "trigger_event", "data": {"trigger_type": "cron"}}
{"entry_type": "invocation_result", "data": {"ok": true}}
{"entry_type": "checkpoint", "data": {"context_state": {"check_count": 10}, "lifecycle_state": "running"}}
{"entry_type": "trigger_event", "data": {"trigger_type": "cron"}}
{"entry_type": "context_update", "data": {"key": "check_count", "value": 11}}
{"entry_type": "invocation_result", "data": {"ok": true}}
"#;
    let recovered = json!({"context_state": {"check_count": 11}, "lifecycle_state": "running",
        "last_entry_type": "invocation_result", "entries_replayed": 3});
    let ran = recover_file(dir.path(), crashed).await;
    assert_eq!((ran.code, ran.json(), ran.err.as_str()), (0, recovered.clone(), ""));
    let piped = session(None, &["recover", "--journal", "-", "-o", "jsonl"], crashed).await;
    assert_eq!(piped.json(), recovered);
    let shown = session(None, &["recover", "--journal", "-"], crashed).await;
    for line in ["lifecycle_state", "running", "entries_replayed", "check_count"] {
        assert!(shown.out.contains(line), "{line}: {}", shown.out);
    }

    let none = recover_file(dir.path(), "").await;
    assert_eq!(
        none.json(),
        json!({"context_state": {}, "lifecycle_state": "created", "last_entry_type": "", "entries_replayed": 0})
    );

    let torn = recover_file(dir.path(), &format!("{crashed}{{\"entry_type\": \"context_upd")).await;
    assert_eq!((torn.code, torn.json()), (0, recovered));
    assert!(torn.err.contains("line 9 was not finished and is left out"), "{}", torn.err);

    let bad = recover_file(dir.path(), &format!("nonsense\n{crashed}")).await;
    assert_eq!((bad.code, bad.out.as_str()), (1, ""));
    assert!(bad.err.contains("line 1: no JSON"), "{}", bad.err);
    let pointer =
        "{\"type\":\"context_update\",\"payload\":{\"key\":\"k\",\"value_sha256\":\"00\",\"bytes\":9}}\n";
    let unresolved = recover_file(dir.path(), pointer).await;
    assert_eq!(unresolved.code, 1);
    assert!(unresolved.err.contains("line 1: the payload of this context_update has no value"));

    let missing = session(None, &["recover", "--journal", "/nowhere/journal.jsonl"], "").await;
    assert_eq!(missing.code, 3, "{}", missing.err);
    let both = session(None, &["recover", "sess_1", "--journal", "-"], "").await;
    assert_eq!(both.code, 2);
}
