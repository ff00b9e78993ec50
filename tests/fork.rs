//! Forks through the real process: requested by HTTP and by the command line, run by a worker, killed
//! half-way.

use crate::support::checker::{self, Traces, dump};
use crate::support::client::{numbers, texts};
use crate::support::model::turns_since_user;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process};
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::sync::Arc;

/// A model that writes what it is told to `notes/a.txt`, reads it, or says how many user messages it has had.
async fn model() -> ModelServer {
    ModelServer::start(|body, _| {
        let messages = body["messages"].as_array().expect("messages");
        let said = messages.iter().rfind(|message| message["role"] == "user").expect("a message");
        let said = said["content"].as_str().unwrap_or_default();
        let last = messages.last().expect("a message");
        match (turns_since_user(body), said.split_once(' ')) {
            (0, Some(("write", text))) => {
                Answer::call("write_file", json!({"path": "notes/a.txt", "content": text}))
            }
            (0, Some(("read", _))) => Answer::call("read_file", json!({"path": "notes/a.txt"})),
            (0, Some(("mail", to))) => {
                Answer::call("compose_email", json!({"to": [to], "subject": "Hi", "body": "Hello."}))
            }
            (0, _) => {
                let users = messages.iter().filter(|message| message["role"] == "user").count();
                Answer::text(&format!("Message number {users}."))
            }
            (_, _) => Answer::text(&format!("It says: {}", last["content"].as_str().unwrap_or_default())),
        }
    })
    .await
}

struct Sample {
    database: Database,
    model: ModelServer,
    options: Options,
    process: Process,
    client: Client,
}

impl Sample {
    async fn new() -> Sample {
        Sample::with("").await
    }

    /// A sample with additional configuration.
    async fn with(config: &str) -> Sample {
        let model = model().await;
        let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url).config(config);
        let database = Database::new().await;
        let process = options.serve(&database).await;
        Sample { client: process.client(), database, model, options, process }
    }

    /// Says `text` in the conversation `c1`, and waits for the reply. Returns the session's id.
    async fn say(&self, text: &str) -> String {
        let answer = self.client.chat("c1", text).await;
        let id = answer["session_id"].as_str().expect("an id").to_owned();
        self.client.wait_for(&id, "completed").await;
        self.quiet().await;
        id
    }

    /// Waits until no job is left: separate jobs send what a run enqueued.
    async fn quiet(&self) {
        crate::support::eventually("every job to end", || async {
            let jobs: i64 = self.database.value("select count(*) from jobs where $1 <> ''", "all").await;
            (jobs == 0).then_some(())
        })
        .await;
    }

    async fn post(&self, id: &str, body: Value) -> (StatusCode, Value) {
        self.client.post(&format!("/v1/sessions/{id}/fork"), &body).await
    }

    /// Makes a fork that must succeed. Returns the answer and the id of the fork's session.
    async fn fork(&self, id: &str, body: Value) -> (Value, String) {
        let (status, forked) = self.post(id, body).await;
        assert_eq!(status, StatusCode::CREATED, "{forked}");
        let child = forked["session_id"].as_str().expect("an id").to_owned();
        (forked, child)
    }

    async fn cli(&self, args: &[&str]) -> (i32, String, String) {
        let options = Options {
            config: self.options.config.clone(),
            args: args.iter().map(|&arg| arg.to_owned()).collect(),
            env: self.options.env.clone(),
            dir: Arc::clone(&self.options.dir),
        };
        let (status, process) = options.spawn(&self.database.url).ended().await;
        (status.code().expect("it was not killed"), process.output(), process.log())
    }

    fn file(&self, session_id: &str, path: &str) -> Option<String> {
        std::fs::read_to_string(self.options.path("workspaces").join(session_id).join(path)).ok()
    }

    /// Every row of the session, with the ids of the transactions that wrote it.
    async fn rows_of(&self, session_id: &str) -> Vec<Value> {
        let dump = dump(&self.database).await;
        let of =
            |row: &Value| row[1]["session_id"] == session_id || row[1]["conversation_id"] == "default/c1";
        dump.into_values().flatten().filter(of).collect()
    }
}

#[tokio::test]
async fn a_fork_answers_again_and_its_first_request_is_its_parents_byte_for_byte() {
    let sample = Sample::new().await;
    sample.say("one").await;
    let id = sample.say("two").await;
    let (before, asked) = (sample.rows_of(&id).await, sample.model.bodies());
    let (forked, child) = sample.fork(&id, json!({"at": "last-user"})).await;
    assert_eq!((&forked["asked_message_number"], &forked["at_message_number"]), (&json!(4), &json!(4)));
    assert_eq!((&forked["parent_session_id"], &forked["moved"]), (&json!(id), &Value::Null));
    let session = sample.client.wait_for(&child, "completed").await;
    sample.quiet().await;
    assert_eq!(numbers(&session), [2, 3, 4, 5]);
    assert_eq!(texts(&session, "assistant"), ["Message number 1.", "Message number 2."]);
    assert_eq!((&session["trigger_type"], &session["total_turns"]), (&json!("fork"), &json!(1)));
    assert_eq!(session["steps"].as_array().unwrap().len(), 1);
    assert_eq!(session["steps"][0]["step_number"], 2);
    let bodies = sample.model.bodies();
    assert_eq!(bodies[2], asked[1], "the provider's cache stays valid");
    assert_eq!(
        sample.rows_of(&id).await,
        before,
        "the parent has no new row and no row of it was written again"
    );
    let verification = sample.database.store().await.verify(&child).await.unwrap();
    assert!(verification.agrees, "{verification:#?}");
    let journal = Traces::of(&sample.database, &child).await;
    let kinds: Vec<&str> = journal.events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(
        kinds[..6],
        [
            "SESSION_FORKED",
            "SESSION_STEERED",
            "checkpoint",
            "trigger_event",
            "state_transition",
            "state_transition"
        ]
    );
    let payload = &journal.events[0]["payload"];
    assert_eq!(
        (&payload["parent_session_id"], &payload["parent_conversation_id"]),
        (&json!(id), &json!("default/c1"))
    );
}

#[tokio::test]
async fn a_fork_sees_the_window_that_its_parent_saw_there() {
    let window = "[agents.default.context]\nstrategy = \"sliding_window\"\nhigh = 4\nlow = 2";
    let sample = Sample::with(window).await;
    let mut id = String::new();
    for n in 1..=6 {
        id = sample.say(&format!("message {n}")).await;
    }
    let asked = sample.model.bodies();
    assert!(!asked[5].contains("message 1"), "the window has moved: {}", asked[5]);
    for (n, body) in asked.iter().enumerate() {
        let (_, child) = sample.fork(&id, json!({"at": 2 + 2 * n})).await;
        sample.client.wait_for(&child, "completed").await;
        assert_eq!(sample.model.bodies().last(), Some(body), "message {}", n + 1);
        sample.quiet().await;
        checker::check(&sample.database, &child, &[]).await;
    }
}

#[tokio::test]
async fn what_a_fork_is_asked_to_have_otherwise_reaches_its_model() {
    let sample = Sample::new().await;
    let id = sample.say("one").await;
    let body = json!({
        "at_message_number": 2, "model": "openai/other", "system_prompt_patch": {"append": "Be kind."},
        "tools": ["reserve", "current_time"], "text": "uno", "prompt": "and more",
    });
    let (forked, child) = sample.fork(&id, body).await;
    assert_eq!((&forked["asked_message_number"], &forked["at_message_number"]), (&json!(2), &json!(1)));
    let session = sample.client.wait_for(&child, "completed").await;
    assert_eq!(texts(&session, "user"), ["uno", "and more"]);
    assert_eq!(session["model_id"], "openai/other");
    let request: Value = serde_json::from_str(sample.model.bodies().last().unwrap()).unwrap();
    assert_eq!(request["model"], "other");
    assert_eq!(request["messages"][0]["content"], "You are a test.\n\nBe kind.");
    let tools = request["tools"].as_array().unwrap().iter().map(|tool| &tool["function"]["name"]);
    assert_eq!(tools.collect::<Vec<_>>(), ["current_time", "reserve"]);
}

#[tokio::test]
async fn a_fork_that_cannot_be_made_is_refused_and_one_that_is_repeated_is_made_once() {
    let sample = Sample::new().await;
    let id = sample.say("one").await;
    let before = dump(&sample.database).await;
    let refused = async |body: Value, expected: StatusCode, word: &str| {
        let (status, problem) = sample.post(&id, body).await;
        assert_eq!(status, expected, "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains(word), "{problem}");
    };
    let (conflict, bad) = (StatusCode::CONFLICT, StatusCode::BAD_REQUEST);
    refused(json!({}), conflict, "give a prompt").await;
    refused(json!({"at": 9}), conflict, "it has no message 9").await;
    refused(json!({"at": 3, "text": "x"}), conflict, "the assistant's").await;
    refused(json!({"at": 2, "start": false, "prompt": "x"}), conflict, "a message begins a run").await;
    refused(json!({"at": "turn:4"}), bad, "is no place").await;
    refused(json!({"at": 2, "at_message_number": 2}), bad, "give one").await;
    refused(json!({"at": 2, "model": "nobody/none"}), bad, "`model`").await;
    refused(json!({"at": 2, "tools": ["reserv"]}), bad, "did you mean `reserve`").await;
    refused(json!({"at": 2, "text": " "}), bad, "empty").await;
    refused(json!({"at": 2, "prompt": "a\0b"}), bad, "NUL").await;
    refused(json!({"at": 2, "system_prompt_patch": {"replace": "a\0b"}}), bad, "NUL").await;
    refused(json!({"at": 2, "system_prompt_patch": {"other": "x"}}), bad, "JSON").await;
    refused(json!({"at": 2, "tool_mode": "wet"}), bad, "JSON").await;
    refused(json!({"at": 2, "agent": "x"}), bad, "JSON").await;
    let (status, _) = sample.post("sess_none", json!({"at": 2})).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert_eq!(sample.client.get("/v1/sessions/sess_none/tree").await.0, StatusCode::NOT_FOUND);
    assert_eq!(dump(&sample.database).await, before, "a refusal writes nothing");

    let (first, child) = sample.fork(&id, json!({"at": 2, "client_key": "k"})).await;
    let path = format!("/v1/sessions/{id}/fork");
    let again =
        sample.client.post_request(&path).header("Idempotency-Key", "k").body(json!({"at": 2}).to_string());
    let again = again.send().await.unwrap();
    assert_eq!(again.status(), StatusCode::OK);
    assert_eq!(again.json::<Value>().await.unwrap(), first);
    let (status, _) = sample.post(&id, json!({"at": 2, "start": false, "client_key": "k"})).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    sample.client.wait_for(&child, "completed").await;

    let (_, tree) = sample.client.get(&format!("/v1/sessions/{child}/tree")).await;
    let items = tree["items"].as_array().unwrap();
    assert_eq!(items.len(), 2, "{tree}");
    assert_eq!((&items[0]["session_id"], &items[0]["depth"]), (&json!(id), &json!(0)));
    assert_eq!((&items[1]["session_id"], &items[1]["forked_at_message_number"]), (&json!(child), &json!(2)));
}

#[tokio::test]
async fn an_operator_forks_a_session_and_sees_the_tree() {
    let sample = Sample::new().await;
    let id = sample.say("one").await;
    let prompt = sample.options.path("prompt.txt");
    std::fs::write(&prompt, "Be another.").unwrap();
    let prompt = prompt.to_str().unwrap();
    let args = [
        "session",
        "fork",
        &id,
        "--at",
        "last-user",
        "--system-prompt",
        prompt,
        "--tools",
        "reserve",
        "-o",
        "json",
    ];
    let (code, out, err) = sample.cli(&args).await;
    assert_eq!(code, 0, "{err}");
    let forked: Value = serde_json::from_str(&out).unwrap();
    let child = forked["session_id"].as_str().unwrap();
    assert_eq!(forked["at_message_number"], 2);
    sample.client.wait_for(child, "completed").await;
    let request: Value = serde_json::from_str(sample.model.bodies().last().unwrap()).unwrap();
    assert_eq!(request["messages"][0]["content"], "Be another.");
    assert_eq!(request["tools"].as_array().unwrap().len(), 1);

    let (code, out, _) = sample.cli(&["session", "fork", child, "--at", "3", "--no-start"]).await;
    assert_eq!(code, 0);
    assert!(out.contains("it waits for a message"), "{out}");
    let (code, out, _) = sample.cli(&["session", "fork", &id, "--text", "uno", "--tool-mode", "dry"]).await;
    assert_eq!(code, 0);
    assert!(out.contains("begins") && out.contains("after message 1"), "{out}");

    let (code, out, _) = sample.cli(&["session", "tree", child]).await;
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!((code, lines.len()), (0, 4), "{out}");
    assert!(lines[0].starts_with(&format!("{id}\t\tcompleted\t1\t")), "{out}");
    assert!(lines[1].starts_with(&format!("{child}\t#2\tcompleted\t1\t")), "{out}");
    let (_, out, _) = sample.cli(&["session", "tree", child, "-o", "table"]).await;
    assert!(out.contains(&format!("\n  {child}")) && out.contains("\n    sess_"), "{out}");

    let code = async |args: &[&str]| sample.cli(&[&["session", "fork"], args].concat()).await.0;
    // A mail that went out would go out again. A fork from after it, a dry one and one that waits change nothing.
    let mailed = sample.say("mail ann@example.org").await;
    let before = dump(&sample.database).await;
    let live = ["session", "fork", &mailed, "--at", "last-user"];
    let (refused, _, said) = sample.cli(&live).await;
    assert_eq!(refused, 2, "{said}");
    assert!(said.contains("compose_email (") && said.contains("--yes"), "{said}");
    assert_eq!(dump(&sample.database).await, before);
    assert_eq!(code(&[&mailed, "--prompt", "Thanks."]).await, 0);
    assert_eq!(code(&[&mailed, "--at", "last-user", "--tool-mode", "dry"]).await, 0);
    assert_eq!(code(&[&mailed, "--at", "last-user", "--tools", "reserve"]).await, 0);
    assert_eq!(code(&[&mailed, "--at", "last-user", "--no-start"]).await, 0);
    assert_eq!(code(&[&live[2..], &["--yes"]].concat()).await, 0);
    // What the fork begins with, its parent did.
    let (_, copy) = sample.fork(&mailed, json!({"start": false})).await;
    let (refused, _, said) = sample.cli(&["session", "fork", &copy, "--at", "last-user"]).await;
    assert!(refused == 2 && said.contains("compose_email ("), "{refused} {said}");
    assert_eq!(code(&["sess_none"]).await, 3);
    assert_eq!(code(&[&id]).await, 4, "nothing to answer");
    assert_eq!(code(&[&id, "--at", "17"]).await, 4);
    assert_eq!(code(&[&id, "--at", "turn:1"]).await, 2);
    assert_eq!(code(&[&id, "--at", "2", "--tools", "nothing"]).await, 2);
    assert_eq!(code(&[&id, "--at", "2", "--model", "nobody/none"]).await, 2);
    assert_eq!(code(&[&id, "--no-start", "--prompt", "x"]).await, 2);
    assert_eq!(sample.cli(&["session", "tree", "sess_none"]).await.0, 3);
}

#[tokio::test]
async fn a_history_leaves_replays_out_and_says_what_a_fork_did() {
    let sample = Sample::new().await;
    let id = sample.say("one").await;
    let (forked, child) = sample.fork(&id, json!({"prompt": "two"})).await;
    let fork = forked["conversation_id"].as_str().unwrap();
    sample.client.wait_for(&child, "completed").await;
    let (code, out, error) = sample.cli(&["replay", &id, "--model", "recorded"]).await;
    assert_eq!(code, 0, "{out} {error}");
    // The conversation under IN, and the session, of each row.
    let rows = async |more: &[&str]| -> Vec<(String, String)> {
        let (code, out, error) = sample.cli(&[&["conversation", "history", "c1"], more].concat()).await;
        assert_eq!(code, 0, "{error}");
        let cells = out.lines().map(|line| line.split('\t').collect::<Vec<_>>());
        let rows = cells.filter(|cells| cells.len() == 6);
        rows.map(|cells| (cells[3].to_owned(), cells[5].to_owned())).collect()
    };
    let shown = rows(&[]).await;
    assert!(shown.iter().any(|(_, session)| *session == id), "{shown:?}");
    for (place, session) in &shown {
        assert_eq!(place, if *session == child { fork } else { "" }, "{shown:?}");
    }
    assert!(shown.iter().any(|(place, _)| place == fork), "{shown:?}");
    let all = rows(&["--all"]).await;
    assert!(all.len() > shown.len() && all.iter().any(|(place, _)| place.starts_with("replay_")), "{all:?}");
}

#[tokio::test]
async fn a_fork_has_its_parents_files_as_they_were_at_the_cut() {
    let sample = Sample::new().await;
    sample.say("write first").await;
    let id = sample.say("write second").await;
    // Messages 2 to 5 wrote `first`, 6 to 9 `second`.
    let (_, early) = sample.fork(&id, json!({"at": 5, "prompt": "read it"})).await;
    let session = sample.client.wait_for(&early, "completed").await;
    assert_eq!(texts(&session, "assistant").last().unwrap(), "It says: first");
    assert_eq!(sample.file(&early, "notes/a.txt").as_deref(), Some("first"));
    let (_, late) = sample.fork(&id, json!({"prompt": "write third"})).await;
    sample.client.wait_for(&late, "completed").await;
    assert_eq!(sample.file(&late, "notes/a.txt").as_deref(), Some("third"));
    assert_eq!(sample.file(&id, "notes/a.txt").as_deref(), Some("second"), "the parent's are its own");
    // A fork from before the file existed does not have it.
    let (_, none) = sample.fork(&id, json!({"at": 2, "text": "read it"})).await;
    let session = sample.client.wait_for(&none, "completed").await;
    assert!(texts(&session, "tool")[0].contains("There is no file"), "{session}");
    let folders = std::fs::read_dir(sample.options.path("workspaces")).unwrap();
    let folders = folders.map(|one| one.unwrap().file_name().into_string().unwrap());
    let mut folders: Vec<String> = folders.filter(|name| name != ".state").collect();
    folders.sort();
    let mut expected = [id.clone(), early.clone(), late.clone()];
    expected.sort();
    assert_eq!(folders, expected, "there are no other folders");

    // A host without the files of the fork restores them.
    std::fs::remove_dir_all(sample.options.path("workspaces").join(&late)).unwrap();
    let (_, answer) =
        sample.client.post(&format!("/v1/sessions/{late}/messages"), &json!({"text": "read it"})).await;
    assert_eq!(answer["outcome"], "new_run", "{answer}");
    let session = sample.client.wait_for(&late, "completed").await;
    assert_eq!(texts(&session, "assistant").last().unwrap(), "It says: third");
    assert_eq!(sample.file(&late, "notes/a.txt").as_deref(), Some("third"));
}

#[tokio::test]
async fn files_that_the_transcript_does_not_hold_are_an_error_and_no_empty_folder() {
    let sample = Sample::new().await;
    let id = sample.say("write first").await;
    // In a session from before snapshots, a custom tool could leave a file whose content is not in its arguments.
    sqlx::raw_sql(
        "set session_replication_role = replica;
        delete from session_events where type = 'WORKSPACE_SNAPSHOT';
        update conversation_records set content = replace(content::text, 'first', 'by another way')::json
        where role = 'assistant' and content::text like '%write_file%'",
    )
    .execute(&sample.database.pool)
    .await
    .unwrap();
    let (_, child) = sample.fork(&id, json!({"prompt": "read it"})).await;
    let session = sample.client.wait_for(&child, "completed").await;
    let told = texts(&session, "tool").pop().unwrap();
    assert!(told.contains("cannot be made again") && told.contains("notes/a.txt"), "{told}");
    assert!(!sample.options.path("workspaces").join(&child).exists());
}

#[tokio::test]
async fn a_chat_goes_on_with_the_fork_in_its_conversation_and_with_its_parent_in_the_other() {
    let sample = Sample::new().await;
    let id = sample.say("one").await;
    let (forked, child) = sample.fork(&id, json!({"at": 2})).await;
    sample.client.wait_for(&child, "completed").await;
    let conversation = forked["conversation_id"].as_str().unwrap();
    let answer = sample.client.chat(conversation, "and then?").await;
    assert_eq!((&answer["session_id"], &answer["outcome"]), (&json!(child), &json!("new_run")));
    let session = sample.client.wait_for(&child, "completed").await;
    assert_eq!(texts(&session, "user"), ["one", "and then?"]);
    assert_eq!(texts(&session, "assistant"), ["Message number 1.", "Message number 2."]);
    assert_eq!(sample.say("two").await, id);
    assert_eq!(texts(&sample.client.session(&id).await, "user"), ["one", "two"]);

    // A restart continues the conversation's message numbers, and so does a fork of the new session.
    let (status, anew) =
        sample.client.post("/v1/conversations/c1/new", &json!({"repository_id": "repo"})).await;
    assert_eq!(status, StatusCode::CREATED, "{anew}");
    let second = sample.say("three").await;
    assert_eq!(anew["session_id"], second.as_str());
    assert_eq!(numbers(&sample.client.session(&second).await), [6, 7]);
    let (forked, third) = sample.fork(&second, json!({"at": 6})).await;
    assert_eq!(forked["at_message_number"], 6);
    let session = sample.client.wait_for(&third, "completed").await;
    assert_eq!((numbers(&session), texts(&session, "user")), (vec![6, 7], vec!["three".to_owned()]));
    assert_eq!(session["repository_id"], "repo");
    sample.quiet().await;
    for session_id in [&child, &second, &third] {
        checker::check(&sample.database, session_id, &[]).await;
    }
}

#[tokio::test]
async fn a_fork_sends_nothing_of_what_its_parent_sent() {
    let sample = Sample::new().await;
    let id = sample.say("mail ann@example.org").await;
    let mails = || std::fs::read_dir(sample.options.path("mail").join("new")).map_or(0, Iterator::count);
    assert_eq!(mails(), 1);
    let (_, child) = sample.fork(&id, json!({"prompt": "thanks"})).await;
    let session = sample.client.wait_for(&child, "completed").await;
    sample.quiet().await;
    assert_eq!((session["deliveries"].as_array().unwrap().len(), mails()), (0, 1));
    assert_eq!(session["tool_calls"], json!([]));
    assert!(session["state"].as_object().unwrap().keys().any(|key| key.starts_with("email/")), "{session}");
    // A dry fork composes a mail, and sends nothing.
    let (_, dry) = sample.fork(&id, json!({"at": 2, "tool_mode": "dry"})).await;
    sample.client.wait_for(&dry, "completed").await;
    sample.quiet().await;
    assert_eq!(mails(), 1);
    assert!(sample.process.log().contains("Listening"));
}
