//! Two sessions side by side: the same talk twice, and the same talk with another word or another call.

use crate::support::{Answer, Client, Database, ModelServer, Options, Process};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Talks with the same beginning and different ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
enum Talk {
    Plain,
    OtherWords,
    OtherFile,
    /// One more call than the other talks.
    Longer,
}

struct World {
    database: Database,
    options: Options,
    process: Process,
    client: Client,
    talk: Arc<AtomicUsize>,
    _model: ModelServer,
}

impl World {
    async fn new() -> World {
        let talk = Arc::new(AtomicUsize::new(Talk::Plain as usize));
        let now = Arc::clone(&talk);
        let model = ModelServer::start(move |body, _| {
            let talk = now.load(Ordering::SeqCst);
            let is = |one: Talk| talk == one as usize;
            let path = if is(Talk::OtherFile) { "plan.md" } else { "note.md" };
            let note = || Answer::call("write_file", json!({"path": path, "content": "Friday at ten."}));
            let end = if is(Talk::OtherWords) { "It is noted." } else { "It is written down." };
            match (crate::support::model::turns_since_user(body), is(Talk::Longer)) {
                (0, _) => note(),
                (1, true) => Answer::call("reserve", json!({"persons": 2})),
                (_, _) => Answer::text(end),
            }
        })
        .await;
        let database = Database::new().await;
        let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
        let process = options.serve(&database).await;
        let client = process.client();
        World { database, options, process, client, talk, _model: model }
    }

    /// Runs a talk of two messages in a conversation of its own.
    async fn talk(&self, conversation: &str, talk: Talk) -> String {
        self.talk.store(talk as usize, Ordering::SeqCst);
        let mut id = String::new();
        for text in ["Write down: Friday at ten.", "And once more, please."] {
            let answer = self.client.chat(conversation, text).await;
            answer["session_id"].as_str().unwrap().clone_into(&mut id);
            self.client.wait_for(&id, "completed").await;
        }
        id
    }

    async fn cli(&self, args: &[&str]) -> (i32, String, String) {
        let options =
            Options { args: args.iter().map(|&arg| arg.to_owned()).collect(), ..self.options.clone() };
        let (status, process) = options.spawn(&self.database.url).ended().await;
        (status.code().expect("it was not killed"), process.output(), process.log())
    }

    async fn report(&self, left: &str, right: &str, exit: i32) -> Value {
        let (code, out, err) = self.cli(&["session", "diff", left, right, "-o", "json"]).await;
        assert_eq!(code, exit, "{out}{err}");
        serde_json::from_str(&out).unwrap()
    }
}

#[tokio::test]
async fn the_same_talk_twice_is_equal_to_the_byte_and_a_difference_ends_with_8() {
    let world = World::new().await;
    let one = world.talk("c1", Talk::Plain).await;
    let same = world.talk("c2", Talk::Plain).await;
    let report = world.report(&one, &same, 0).await;
    assert_eq!(report["verdict"], "equal", "{report:#}");
    assert_eq!(report["turns"].as_array().unwrap().len(), 4);
    assert_eq!(
        report["requests"],
        json!({"equal": 4, "differ": 0, "unknown": 0, "first_that_differs": null})
    );
    assert_eq!((&report["setup"], &report["state"]), (&json!([]), &json!([])));
    for side in ["left", "right"] {
        assert_eq!(report["totals"][side]["input_tokens"], 400);
        assert_eq!(report["totals"][side]["tool_calls"], 2);
        assert!(report["turns"][0][side]["answer"]["time_ms"].as_i64().unwrap() >= 0);
    }
    let (code, out, _) = world.cli(&["session", "diff", &one, &same, "--fail-on", "bytes"]).await;
    assert_eq!(code, 0, "{out}");
    assert!(out.starts_with("equal\n") && out.contains("turns 1–4  equal"), "{out}");

    let words = world.talk("c3", Talk::OtherWords).await;
    let report = world.report(&one, &words, 8).await;
    assert_eq!(report["verdict"], "prose");
    let levels = |report: &Value| -> Vec<String> {
        let turns = report["turns"].as_array().unwrap().iter();
        turns.map(|turn| turn["level"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(levels(&report), ["equal", "prose", "equal", "prose"]);
    assert_eq!(report["first_divergence"]["left_message"], 5);
    assert_eq!(report["first_tool_divergence"], Value::Null);
    // Every later request contains the first message, so they differ as well.
    assert_eq!(report["requests"]["first_that_differs"], 3);
    for (fail_on, exit) in [("tools", 0), ("state", 0), ("any", 8), ("bytes", 8)] {
        let (code, _, _) = world.cli(&["session", "diff", &one, &words, "--fail-on", fail_on]).await;
        assert_eq!(code, exit, "{fail_on}");
    }

    let file = world.talk("c4", Talk::OtherFile).await;
    let report = world.report(&one, &file, 8).await;
    assert_eq!(
        (report["verdict"].as_str(), report["first_divergence"]["turn"].as_i64()),
        (Some("tools"), Some(1))
    );
    let difference = &report["turns"][0]["differences"][0];
    assert_eq!(difference["arguments"][0], json!({"path": "/path", "left": "note.md", "right": "plan.md"}));
    let keys: Vec<&Value> = report["state"].as_array().unwrap().iter().map(|one| &one["path"]).collect();
    assert_eq!(keys, ["/file~1note.md", "/file~1plan.md"]);

    let longer = world.talk("c5", Talk::Longer).await;
    let report = world.report(&one, &longer, 8).await;
    assert_eq!(levels(&report), ["equal", "tools", "equal", "equal", "tools", "equal"]);
    assert_eq!(report["turns"][1]["left"], Value::Null);
    assert!(world.process.terminate().success());
}

#[tokio::test]
async fn a_difference_is_read_on_a_page_on_a_terminal_and_over_http() {
    let world = World::new().await;
    let one = world.talk("c1", Talk::Plain).await;
    let other = world.talk("c2", Talk::OtherFile).await;

    let (status, report) = world.client.get(&format!("/v1/sessions/{one}/diff/{other}")).await;
    assert_eq!(status, 200);
    assert_eq!(report, world.report(&one, &other, 8).await, "the program and the server say the same");
    for (path, expected) in [
        (format!("/v1/sessions/{one}/diff/sess_none"), 404),
        (format!("/v1/sessions/sess_none/diff/{one}"), 404),
        (format!("/v1/sessions/{one}/diff/%00"), 400),
    ] {
        assert_eq!(world.client.get(&path).await.0, expected, "{path}");
    }
    // A session of another space does not exist for this one. Its prefix is a blob of its space.
    for move_there in [
        "update conversation_sessions set space_id = 'other' where session_id = $1",
        "insert into blobs (space_id, sha256, size, media_type, bytes)
            select 'other', sha256, size, media_type, bytes from blobs
            where sha256 in (select prefix_sha256 from conversation_sessions where session_id = $1)",
    ] {
        sqlx::query(move_there).bind(&other).execute(&world.database.pool).await.unwrap();
    }
    assert_eq!(world.client.get(&format!("/v1/sessions/{one}/diff/{other}")).await.0, 404);

    let page = world.options.path("report.html");
    let page = page.to_str().unwrap();
    let (code, out, err) = world.cli(&["session", "diff", &one, &other, "--report", page]).await;
    assert_eq!(code, 8, "{err}");
    for part in [
        "differs: tools",
        "first divergence: turn 1 (from message 2): write_file is called with another /path",
        "      /path\n      [-\"note.md\"-]{+\"plan.md\"+}\n",
        "another state: /file~1note.md, /file~1plan.md",
        "State at the end",
        "requests: 1 with the same bytes, 3 with others (the first in turn 2), 0 not known",
    ] {
        assert!(out.contains(part), "{part:?} in:\n{out}");
    }
    let written = std::fs::read_to_string(page).unwrap();
    assert!(
        written.starts_with("<!doctype html>") && written.contains("<ins>&#34;plan.md&#34;</ins>"),
        "{written}"
    );

    let (code, _, err) = world.cli(&["session", "diff", &one, "sess_none"]).await;
    assert_eq!((code, err.contains("session sess_none does not exist")), (3, true), "{err}");
    let (code, _, err) =
        world.cli(&["session", "diff", &one, &other, "--report", "/nowhere/report.html"]).await;
    assert_eq!((code, err.contains("cannot write /nowhere/report.html")), (1, true), "{err}");
    assert_eq!(world.cli(&["session", "diff", &one]).await.0, 2);
}
