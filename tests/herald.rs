//! Notices from other systems, and chats about them.

use crate::support::client::texts;
use crate::support::{Answer, Client, Database, ModelServer, Options};
use reqwest::StatusCode;
use serde_json::{Value, json};

async fn herald(client: &Client, body: &Value) -> (StatusCode, Value) {
    client.post("/v1/triggers/herald", body).await
}

#[tokio::test]
async fn a_notice_wakes_an_agent_once_and_is_nobodys_words() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("The disk of db1 is nearly full.")]).await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    let client = process.client();
    let notice = json!({
        "client_key": "alert-1", "user_id": "ann", "mail_to": ["Ann@example.org"],
        "notice": {"title": "Disk", "body": "92 % of db1.", "source": "monitor", "url": "https://example.org/1"}
    });
    let (status, first) = herald(&client, &notice).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{first}");
    let (status, again) = herald(&client, &notice).await;
    assert_eq!((status, &again["session_id"]), (StatusCode::OK, &first["session_id"]));
    let mut other = notice.clone();
    other["notice"]["body"] = "99 %".into();
    assert_eq!(herald(&client, &other).await.0, StatusCode::UNPROCESSABLE_ENTITY);
    for wrong in [
        json!({}),
        json!({"notice": " "}),
        json!({"notice": {"title": "x"}}),
        json!({"notice": "x", "mail_to": ["ann"]}),
    ] {
        assert_eq!(herald(&client, &wrong).await.0, StatusCode::BAD_REQUEST, "{wrong}");
    }

    let session_id = first["session_id"].as_str().unwrap();
    let session = client.wait_for(session_id, "completed").await;
    assert_eq!(
        texts(&session, "user"),
        [
            "A notice from another system. These are not the user's words.\nFor: ann\nFrom: monitor\nTitle: Disk\nLink: \
          https://example.org/1\n\n92 % of db1."
        ]
    );
    let trigger: String = database
        .value("select trigger_type from conversation_sessions where session_id = $1", session_id)
        .await;
    assert_eq!(trigger, "herald");
    let sent: Value =
        database.value("select content::jsonb from deliveries where session_id = $1", session_id).await;
    assert_eq!((&sent["to"]["to"], &sent["to"]["subject"]), (&json!(["ann@example.org"]), &json!("Disk")));
    let sessions: i64 =
        database.value("select count(*) from conversation_sessions where trigger_type = $1", "herald").await;
    assert_eq!(sessions, 1);
    // A key belongs to its conversation: in another one the same key is another notice.
    let mut elsewhere = notice.clone();
    elsewhere["conversation_id"] = "elsewhere".into();
    let (status, other) = herald(&client, &elsewhere).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{other}");
    assert_ne!(other["session_id"], first["session_id"]);

    // A plain text in a conversation that the sender chose, posted twice without a key: two notices.
    for _ in 0..2 {
        let (status, answer) =
            herald(&client, &json!({"conversation_id": "ops", "notice": "All is well."})).await;
        assert_eq!(status, StatusCode::ACCEPTED, "{answer}");
    }
    let sessions: i64 = database
        .value("select count(*) from conversation_sessions where conversation_id = $1", "default/ops")
        .await;
    assert_eq!(sessions, 2);
}

#[tokio::test]
async fn a_chat_on_a_notices_conversation_has_seen_it_and_is_answered_in_the_chat() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| {
        let last =
            body["messages"].as_array().and_then(|all| all.last()).map(|one| one["content"].to_string());
        Answer::text(&format!("You said {}", last.unwrap_or_default().len()))
    })
    .await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url).config(
        "[agents.ops]\nmodel = \"openai/test\"\nsystem_prompt = \"You watch.\"\n[herald]\nagent = \"ops\"\n",
    );
    let process = options.serve(&database).await;
    let client = process.client();
    let body = json!({"conversation_id": "ops", "notice": "92 % of db1.", "mail_to": ["ann@example.org"]});
    let (_, notice) = herald(&client, &body).await;
    let noticed = client.wait_for(notice["session_id"].as_str().unwrap(), "completed").await;
    let answered = texts(&noticed, "assistant").remove(0);

    let first = client.chat("ops", "What grows?").await;
    let chat_id = first["session_id"].as_str().unwrap();
    assert_ne!(first["session_id"], notice["session_id"], "a session of its own");
    client.wait_for(chat_id, "completed").await;
    let second = client.chat("ops", "And since when?").await;
    assert_eq!(second["session_id"], first["session_id"], "further messages go on in it");
    client.wait_for(chat_id, "completed").await;

    let (kind, agent): (String, String) = (
        database.value("select trigger_type from conversation_sessions where session_id = $1", chat_id).await,
        database.value("select agent from conversation_sessions where session_id = $1", chat_id).await,
    );
    assert_eq!((kind.as_str(), agent.as_str()), ("herald-chat", "ops"), "the agent that the notice went to");
    let bodies = model.bodies();
    let request: Value = serde_json::from_str(bodies.last().unwrap()).unwrap();
    let said: Vec<String> = request["messages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["content"].as_str().unwrap_or_default().to_owned())
        .collect();
    assert_eq!(said[0], "You watch.");
    assert!(said[1].ends_with("92 % of db1.") && said[1].starts_with("A notice"), "{said:?}");
    assert_eq!(
        (said[2].as_str(), said[3].as_str(), said[5].as_str()),
        (answered.as_str(), "What grows?", "And since when?")
    );
    let mailed: i64 = database.value("select count(*) from deliveries where session_id = $1", chat_id).await;
    assert_eq!(mailed, 0, "its replies are read in the chat");
    let rules: Value =
        database.value("select policy from conversation_sessions where session_id = $1", chat_id).await;
    assert_eq!(
        rules["participants"],
        json!(["ann@example.org"]),
        "the addresses that the notice's session may write to"
    );

    // The chat made it a conversation of its user, so the next notice has to name that user.
    let mut next = json!({"conversation_id": "ops", "notice": "95 % of db1."});
    assert_eq!(herald(&client, &next).await.0, StatusCode::FORBIDDEN);
    next["user_id"] = json!("ann");
    // It has a session of its own again, and so does the chat about it.
    let (_, another) = herald(&client, &next).await;
    assert_ne!(another["session_id"], first["session_id"]);
    client.wait_for(another["session_id"].as_str().unwrap(), "completed").await;
    let third = client.chat("ops", "Now?").await;
    assert!(third["session_id"] != first["session_id"] && third["session_id"] != another["session_id"]);
}

#[tokio::test]
async fn k01_k02_a_notice_that_was_not_acknowledged_is_one_when_it_comes_again() {
    for (failpoint, first) in [("K1=1*return", StatusCode::ACCEPTED), ("K2=1*return", StatusCode::OK)] {
        let database = Database::new().await;
        let model = ModelServer::turns(vec![Answer::text("The disk of db1 is nearly full.")]).await;
        let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
        let notice = json!({"client_key": "alert-1", "conversation_id": "ops", "notice": "92 % of db1."});
        let api = options.clone().arg("--roles=api").env("FAILPOINTS", failpoint).serve(&database).await;
        let request = api.client().post_request("/v1/triggers/herald").body(notice.to_string());
        assert!(request.send().await.is_err(), "{failpoint}: nothing is acknowledged");
        let (_, process) = api.ended().await;
        assert!(process.log().contains("failpoint"), "{}", process.log());

        let process = options.serve(&database).await;
        let client = process.client();
        let (status, answer) = herald(&client, &notice).await;
        assert_eq!(status, first, "{failpoint}: {answer}");
        let (status, again) = herald(&client, &notice).await;
        assert_eq!((status, &again["session_id"]), (StatusCode::OK, &answer["session_id"]));
        client.wait_for(answer["session_id"].as_str().unwrap(), "completed").await;
        let sessions: i64 =
            database.value("select count(*) from conversation_sessions where $1 <> ''", "all").await;
        assert_eq!((sessions, model.bodies().len()), (1, 1), "{failpoint}");
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn a_chat_that_comes_while_a_notice_is_worked_on_waits_and_begins_with_its_answer() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| {
        let heralded = body["messages"].to_string().contains("What grows?");
        Answer::text(if heralded { "The logs." } else { "I made room on db1." })
    })
    .await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    let client = process.client();
    model.hold();
    let (_, notice) = herald(&client, &json!({"conversation_id": "ops", "notice": "92 % of db1."})).await;
    model.asked(1).await;
    let chat = client.chat("ops", "What grows?").await;
    let chat_id = chat["session_id"].as_str().unwrap();
    assert_ne!(chat["session_id"], notice["session_id"]);
    assert_eq!(client.session(chat_id).await["status"], "queued", "the notice has the conversation");
    // A second message and a kill come before the chat's run begins. It still begins once, in the same
    // session.
    client.chat("ops", "And why?").await;
    process.kill();
    model.release();

    let process = options.serve(&database).await;
    let client = process.client();
    client.wait_for(notice["session_id"].as_str().unwrap(), "completed").await;
    client.wait_for(chat_id, "completed").await;
    let bodies = model.bodies();
    let request: Value = serde_json::from_str(bodies.last().unwrap()).unwrap();
    let said: Vec<&str> =
        request["messages"].as_array().unwrap().iter().filter_map(|one| one["content"].as_str()).collect();
    assert!(said[1].ends_with("92 % of db1."), "{said:?}");
    assert_eq!(said[2..], ["I made room on db1.", "What grows?", "And why?"]);
}

#[tokio::test]
async fn what_is_no_notice_is_refused_with_the_field_what_it_is_and_what_it_must_be() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Noted.")]).await;
    let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    let client = process.client();
    for (wrong, says) in [
        (json!({"notice": 5}), "`notice` is 5: it must be a text, or an object of `title`, `body`"),
        (json!({"notice": {"title": "x"}}), "`notice.body` is missing: it must be a text"),
        (json!({"notice": {"title": 5, "body": "y"}}), "`notice.title` is 5: it must be a text"),
        (
            json!({"notice": {"title": "x", "body": "y", "colour": "red"}}),
            "`notice` has \"colour\": it takes `title`, `body`, `source` and `url`",
        ),
        (
            json!({"notice": "x", "mail_to": "ann@example.org"}),
            "`mail_to` is \"ann@example.org\": it must be a list of mail addresses, such as [\"ann@example.org\"]",
        ),
    ] {
        let (status, problem) = herald(&client, &wrong).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains(says), "{wrong}: {problem}");
    }
}
