//! A conversation and its sessions: restarted, continued, and listed with their relatives.

use crate::support::client::{numbers, texts};
use crate::support::{Answer, Client, Database, ModelServer, Options};
use reqwest::StatusCode;
use serde_json::{Value, json};
use wakeful_store::Store;

/// Processes whose model says how many messages its request has.
async fn counting() -> (ModelServer, Options) {
    let model = ModelServer::start(|body, _| {
        let messages = body["messages"].as_array().expect("messages");
        let said = messages.iter().filter(|one| one["role"] != "system").count();
        Answer::text(&format!("I was shown {said}."))
    })
    .await;
    let options = Options::new()
        .model("openai/test")
        .config("[agents.other]\nsystem_prompt = \"You are another.\"\nmodel = \"openai/test\"\ntools = [\"ask_user\"]")
        .env("OPENAI_BASE_URL", &model.url);
    (model, options)
}

fn id(answer: &Value) -> String {
    answer["session_id"].as_str().expect("an id").to_owned()
}

async fn seeds(database: &Database, session_id: &str) -> Vec<(String, bool)> {
    sqlx::query_as("select content, is_new from session_seed_messages where session_id = $1 order by ordinal")
        .bind(session_id)
        .fetch_all(&database.pool)
        .await
        .unwrap()
}

async fn verified(store: &Store, session_id: &str) {
    let verification = store.verify(session_id).await.unwrap();
    assert!(verification.agrees, "{verification:?}");
}

#[tokio::test]
async fn beginning_anew_deletes_nothing_and_the_next_message_sees_nothing_of_before() {
    let database = Database::new().await;
    let (model, options) = counting().await;
    let process = options.serve(&database).await;
    let client = process.client();
    let old = id(&client.chat("c1", "My name is Ann.").await);
    client.wait_for(&old, "completed").await;
    client.chat("c1", "Mind it.").await;
    let before = client.wait_for(&old, "completed").await;
    assert_eq!(numbers(&before), [2, 3, 4, 5]);

    let (status, begun) = client.post("/v1/conversations/c1/new", &json!({})).await;
    assert_eq!(status, StatusCode::CREATED, "{begun}");
    assert_eq!((&begun["conversation_id"], &begun["status"]), (&json!("c1"), &json!("created")));
    let new = id(&begun);
    assert_ne!(new, old);
    let at_rest = client.session(&new).await;
    assert_eq!(
        (&at_rest["status"], &at_rest["messages"], &at_rest["runs"]),
        (&json!("created"), &json!([]), &json!([]))
    );
    assert_eq!(client.session(&old).await, before, "the old one is as it was");

    let answer = client.chat("c1", "What is my name?").await;
    assert_eq!((id(&answer), &answer["outcome"]), (new.clone(), &json!("new_run")));
    let session = client.wait_for(&new, "completed").await;
    assert_eq!(texts(&session, "assistant"), ["I was shown 1."]);
    assert!(!model.bodies().last().unwrap().contains("Ann"), "{:?}", model.bodies());
    assert_eq!(numbers(&session), [6, 7], "the conversation's numbers go on");
    assert_eq!((&session["base_message_number"], &session["to_message_number"]), (&json!(5), &json!(7)));
    assert_eq!(texts(&client.session(&old).await, "user"), ["My name is Ann.", "Mind it."]);

    // A message with the old session's id still goes to the old session.
    let (status, answer) =
        client.post(&format!("/v1/sessions/{old}/messages"), &json!({"text": "And now?"})).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{answer}");
    let session = client.wait_for(&old, "completed").await;
    assert_eq!(texts(&session, "assistant").last().unwrap(), "I was shown 5.");
    assert_eq!(numbers(&session), [2, 3, 4, 5, 8, 9]);
    assert_eq!(id(&client.chat("c1", "Thanks.").await), new);
    client.wait_for(&new, "completed").await;

    assert_eq!(seeds(&database, &old).await, [("You are a test.".to_owned(), true)]);
    assert_eq!(
        seeds(&database, &new).await,
        [("You are a test.".to_owned(), false)],
        "not new since the last one"
    );
    let store = database.store().await;
    verified(&store, &old).await;
    verified(&store, &new).await;
    assert!(process.terminate().success());
}

#[tokio::test]
async fn beginning_anew_with_the_same_key_is_one_session_and_an_unknown_conversation_has_none() {
    let database = Database::new().await;
    let (_model, options) = counting().await;
    let process = options.serve(&database).await;
    let client = process.client();
    let (status, problem) = client.post("/v1/conversations/c1/new", &json!({})).await;
    assert_eq!(status, StatusCode::NOT_FOUND, "{problem}");
    assert!(problem["detail"].as_str().unwrap().contains("conversation c1 "), "{problem}");
    let old = id(&client.chat("c1", "one").await);
    client.wait_for(&old, "completed").await;

    let body = json!({"client_key": "k", "agent": "other", "repository_id": "github.com/a/b"});
    let (status, first) = client.post("/v1/conversations/c1/new", &body).await;
    assert_eq!(status, StatusCode::CREATED, "{first}");
    let (status, again) = client.post("/v1/conversations/c1/new", &body).await;
    assert_eq!((status, &again), (StatusCode::OK, &first));
    let request = client.post_request("/v1/conversations/c1/new").header("Idempotency-Key", "k");
    assert_eq!(request.send().await.unwrap().status(), StatusCode::OK, "a header does as well");
    let (status, problem) =
        client.post("/v1/conversations/c1/new", &json!({"client_key": "k", "agent": "default"})).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{problem}");
    let (status, problem) = client.post("/v1/conversations/c1/new", &json!({"agent": "nobody"})).await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{problem}");
    let (status, _) = client.post("/v1/conversations/c1/new", &json!({"text": "hello"})).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);

    let session = client.session(&id(&first)).await;
    assert_eq!((&session["agent"], &session["repository_id"]), (&json!("other"), &json!("github.com/a/b")));
    assert_eq!(seeds(&database, &id(&first)).await, [("You are another.".to_owned(), true)]);
    // Without a choice, the next session has the agent of the latest one.
    let (_, next) = client.post("/v1/conversations/c1/new", &json!({})).await;
    assert_eq!(next["agent"], "other");
    let sessions: i64 =
        database.value("select count(*) from conversation_sessions where $1 <> ''", "all").await;
    assert_eq!(sessions, 3);
}

#[tokio::test]
async fn a_question_of_the_old_session_stays_open_and_is_answered_there() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| {
        let messages = body["messages"].as_array().expect("messages");
        match messages.last().and_then(|last| last["content"].as_str()) {
            Some("ask") => Answer::call("ask_user", json!({"question": "Which?"})),
            Some(text) => Answer::text(&format!("You said: {text}.")),
            None => Answer::text("?"),
        }
    })
    .await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    let client = process.client();
    let old = id(&client.chat("c1", "ask").await);
    client.wait_for(&old, "waiting_input").await;
    let (_, begun) = client.post("/v1/conversations/c1/new", &json!({})).await;
    let new = id(&begun);
    assert_eq!(id(&client.chat("c1", "hello").await), new, "it does not answer the old question");
    client.wait_for(&new, "completed").await;
    assert_eq!(client.session(&old).await["question"], "Which?");
    let (_, answer) =
        client.post(&format!("/v1/sessions/{old}/messages"), &json!({"text": "That one"})).await;
    assert_eq!(answer["outcome"], "delivered");
    let session = client.wait_for(&old, "completed").await;
    assert_eq!(texts(&session, "assistant"), ["", "You said: That one."]);
    let store = database.store().await;
    verified(&store, &old).await;
    verified(&store, &new).await;
}

#[tokio::test]
async fn a_chat_in_a_forks_conversation_goes_on_with_the_fork() {
    let database = Database::new().await;
    let (model, options) = counting().await;
    let process = options.serve(&database).await;
    let client = process.client();
    let body = json!({"text": "My name is Ann.", "repository_id": "github.com/a/b"});
    let (_, answer) = client.post("/v1/chat/c1/messages", &body).await;
    let parent = id(&answer);
    let before = client.wait_for(&parent, "completed").await;
    let (status, forked) =
        client.post(&format!("/v1/sessions/{parent}/fork"), &json!({"start": false})).await;
    assert_eq!(status, StatusCode::CREATED, "{forked}");
    let (child, conversation) = (id(&forked), forked["conversation_id"].as_str().unwrap());
    let answer = client.chat(conversation, "What is my name?").await;
    assert_eq!((id(&answer), &answer["outcome"]), (child.clone(), &json!("new_run")));
    let session = client.wait_for(&child, "completed").await;
    assert_eq!(texts(&session, "assistant"), ["I was shown 1.", "I was shown 3."]);
    assert!(model.bodies().last().unwrap().contains("My name is Ann."));
    assert_eq!(
        (&session["trigger_source"], &session["repository_id"]),
        (&json!("fork"), &json!("github.com/a/b"))
    );
    assert_eq!(
        (&session["parent_session_id"], &session["parent_conversation_id"]),
        (&json!(parent), &json!("c1"))
    );
    assert_eq!(session["debug_meta"]["turns"], 1, "the parent's turns are not counted");
    assert_eq!(client.session(&parent).await, before);

    // After a restart the conversation no longer ends with the fork.
    let (_, begun) = client.post(&format!("/v1/conversations/{conversation}/new"), &json!({})).await;
    let new = id(&begun);
    assert_eq!(id(&client.chat(conversation, "Hello.").await), new);
    let session = client.wait_for(&new, "completed").await;
    assert_eq!(
        (texts(&session, "assistant"), numbers(&session)),
        (vec!["I was shown 1.".to_owned()], vec![6, 7])
    );
    let items = pages(&client, "c1", 10).await;
    let sessions: Vec<&str> = items.iter().map(|one| one["session_id"].as_str().unwrap()).collect();
    assert_eq!(sessions, [new.as_str(), child.as_str(), parent.as_str()]);
    let store = database.store().await;
    for session in [&parent, &child, &new] {
        verified(&store, session).await;
    }
}

#[tokio::test]
async fn a_chain_is_every_session_of_a_conversation_its_parents_and_its_children() {
    let database = Database::new().await;
    let (_model, options) = counting().await;
    let process = options.arg("--roles=api").serve(&database).await;
    let client = process.client();
    for conversation in ["root", "child", "grandchild", "sibling", "stranger"] {
        client.chat(conversation, "one").await;
    }
    client.post("/v1/conversations/child/new", &json!({})).await;
    for (child, parent) in [("child", "root"), ("grandchild", "child"), ("sibling", "root")] {
        let fork = sqlx::query(
            "update conversation_counters set parent_conversation_id = 'default/' || $2, forked_at_message_number = 2
            where conversation_id = 'default/' || $1",
        );
        fork.bind(child).bind(parent).execute(&database.pool).await.unwrap();
    }
    let chain = async |conversation: &str| -> Vec<String> {
        let items = pages(&client, conversation, 500).await;
        items.iter().map(|one| one["conversation_id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(chain("child").await, ["child", "grandchild", "child", "root"], "newest first");
    assert_eq!(chain("root").await, ["child", "sibling", "grandchild", "child", "root"]);
    assert_eq!(chain("sibling").await, ["sibling", "root"]);
    assert_eq!(chain("stranger").await, ["stranger"]);
    let items = pages(&client, "grandchild", 500).await;
    assert_eq!(items[1]["parent_conversation_id"], "child");
    assert_eq!(items[1]["forked_at_message_number"], 2);
    for limit in [1, 2, 4] {
        assert_eq!(pages(&client, "child", limit).await, pages(&client, "child", 500).await, "by {limit}");
    }
    let (status, _) = client.get("/v1/conversations/nobody/sessions").await;
    assert_eq!(status, StatusCode::NOT_FOUND);

    // Even when someone bends the chain into a circle by SQL, the list ends.
    let bent = "update conversation_counters set parent_conversation_id = 'default/grandchild'
        where conversation_id = 'default/root'";
    sqlx::query(bent).execute(&database.pool).await.unwrap();
    assert_eq!(chain("child").await.len(), 5);
}

/// The whole list, fetched page by page.
async fn pages(client: &Client, conversation: &str, limit: usize) -> Vec<Value> {
    let (mut items, mut cursor) = (Vec::new(), String::new());
    loop {
        let path = format!("/v1/conversations/{conversation}/sessions?limit={limit}{cursor}");
        let (status, page) = client.get(&path).await;
        assert_eq!(status, StatusCode::OK, "{page}");
        let page_items = page["items"].as_array().unwrap();
        assert!(page_items.len() <= limit);
        items.extend(page_items.iter().cloned());
        match page["next"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return items,
        }
    }
}

#[tokio::test]
async fn the_command_line_begins_anew_as_well() {
    let database = Database::new().await;
    let (_model, options) = counting().await;
    let process = options.serve(&database).await;
    let client = process.client();
    let old = id(&client.chat("c1", "one").await);
    client.wait_for(&old, "completed").await;
    let run = async |args: &[&str]| {
        let args = args.iter().map(|&arg| arg.to_owned()).collect();
        let (status, process) = Options { args, ..options.clone() }.spawn(&database.url).ended().await;
        (status.code().expect("it was not killed"), process.output(), process.log())
    };
    let (code, out, log) = run(&["session", "new", "c1", "--client-key", "k", "-o", "json"]).await;
    assert_eq!(code, 0, "{log}");
    let begun: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        run(&["session", "new", "c1", "--client-key", "k", "-o", "json"]).await.1,
        out,
        "once per key"
    );
    let (code, out, log) = run(&["session", "new", "c1"]).await;
    assert_eq!(code, 0, "{log}");
    assert!(out.contains("takes the conversation's next message"), "{out}");
    assert!(!out.contains(&id(&begun)), "without a key each is its own");
    let (code, _, log) = run(&["session", "new", "nobody"]).await;
    assert_eq!(code, 3, "{log}");
    assert!(log.contains("conversation nobody does not exist"), "{log}");
    assert_eq!(run(&["session", "new", "c1", "--agent", "nobody"]).await.0, 2);
    assert_eq!(run(&["session", "new", "c1", "--client-key", ""]).await.0, 2);
    assert_eq!(run(&["session", "new", "c1", "--client-key", "k", "--agent", "other"]).await.0, 4);

    let (_, out, _) = run(&["session", "show", &id(&begun)]).await;
    assert!(out.contains("c1 (new, by user)") && out.contains("1 seed, none yet"), "{out}");
    let (_, out, _) = run(&["session", "show", &old]).await;
    assert!(out.contains("Runs") && out.contains("1 seed, #2 to #3"), "{out}");
}

#[tokio::test]
async fn what_was_said_before_the_session_is_shown_and_marked_where_people_read() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Hello again.")]).await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    let client = process.client();
    let id = client.chat("c1", "It is me.").await["session_id"].as_str().unwrap().to_owned();
    client.wait_for(&id, "completed").await;
    let before = |page: &Value| page["earlier"].as_array().unwrap().len();
    assert_eq!(before(&client.session(&id).await), 0, "a system prompt is not said");
    // As the cache of an older system had it.
    sqlx::query(
        "insert into session_seed_messages (space_id, session_id, ordinal, role, content, \"timestamp\")
        values ('default', $1, 1, 'user', 'I am Ann.', 1700000000000), ('default', $1, 2, 'assistant', 'Hello, Ann.', null)",
    )
    .bind(&id)
    .execute(&database.pool)
    .await
    .unwrap();
    let said = |page: &Value| -> Vec<(String, String)> {
        let text = |one: &Value, key: &str| one[key].as_str().unwrap_or("-").to_owned();
        let earlier = page["earlier"].as_array().unwrap().iter();
        earlier.map(|one| (text(one, "text"), text(one, "said_at"))).collect()
    };
    let want = [("I am Ann.", "2023-11-14T22:13:20Z"), ("Hello, Ann.", "-")];
    let want = want.map(|(text, at)| (text.to_owned(), at.to_owned()));
    assert_eq!(said(&client.session(&id).await), want);
    let path = format!("/v1/sessions/{id}/messages");
    let (_, newest) = client.get(&format!("{path}?limit=1")).await;
    assert_eq!(before(&newest), 0, "they come with the oldest page: {newest}");
    assert_eq!(said(&client.get(&path).await.1), want);
    let (_, history) = client.get("/v1/conversations/c1/history").await;
    let items = history["items"].as_array().unwrap();
    let marked: Vec<_> = items.iter().filter(|item| item["earlier"] == true).collect();
    assert_eq!(
        marked.iter().map(|item| item["text"].as_str().unwrap()).collect::<Vec<_>>(),
        ["Hello, Ann.", "I am Ann."]
    );
    assert_eq!(items.last(), marked.last().copied(), "the oldest comes last");
    // Page by page it is the same.
    let mut paged = Vec::new();
    let mut next = String::new();
    loop {
        let (_, page) = client.get(&format!("/v1/conversations/c1/history?limit=1{next}")).await;
        paged.extend(page["items"].as_array().unwrap().iter().cloned());
        match page["next"].as_str() {
            Some(cursor) => next = format!("&cursor={cursor}"),
            None => break,
        }
    }
    assert_eq!(&paged, items);
    for args in [&["session", "show", id.as_str()][..], &["conversation", "history", "c1"]] {
        let ran = crate::cli::run(&options, &database.url, args).await;
        assert!(ran.out.contains("I am Ann.") && ran.out.contains("before th"), "{}{}", ran.out, ran.err);
    }
    assert!(process.terminate().success());
}
