//! Mailboxes of several spaces: a mail is of the space of its mailbox, and no answer crosses to another one.

use super::{PROVED, mail, policy, post, says};
use crate::support::{Answer, Client, Database, ModelServer, Options};
use reqwest::StatusCode;
use serde_json::Value;

/// Two mailboxes of two spaces, with an agent each that the other space does not have, and one whose space is a setting.
fn options(model: &ModelServer, help: &str) -> Options {
    let agent = |name: &str, space: &str| {
        format!(
            "[agents.{name}]\nsystem_prompt = \"You are {name}.\"\nmodel = \"openai/test\"\nspaces = [\"{space}\"]\n"
        )
    };
    Options::new()
        .env("OPENAI_BASE_URL", &model.url)
        .config(&format!(
            "[agents.default]\nsystem_prompt = \"You are a test.\"\nmodel = \"openai/test\"\n{}{}\
             [email.mailboxes.acme]\naddress = \"acme@example.org\"\nspace = \"acme\"\nagent = \"acmes\"\n\
             [email.mailboxes.bolt]\naddress = \"bolt@example.org\"\nspace = \"bolt\"\nagent = \"bolts\"\n\
             [email.mailboxes.help]\naddress = \"support@example.org\"\n",
            agent("acmes", "acme"),
            agent("bolts", "bolt")
        ))
        .env("WAKEFUL_EMAIL__SPACE", help)
        .env("WAKEFUL_EMAIL__RAW_SECRETS", super::SECRET)
        .env("WAKEFUL_EMAIL__THREAD_SECRET", "a secret of the tests")
        .env("WAKEFUL_EMAIL__TRUSTED_AUTHSERV", "mx.example.org")
}

/// Posts a mail that wakes sessions, and returns their ids.
async fn woken(client: &Client, mail: String) -> Vec<String> {
    let (status, answer) = post(client, mail).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{answer}");
    let items = answer["items"].as_array().unwrap();
    items.iter().map(|item| item["session_id"].as_str().unwrap().to_owned()).collect()
}

/// Waits until the session has ended.
async fn ended(database: &Database, session_id: &str) {
    crate::support::eventually("the run to end", || async {
        let status: String = database
            .value("select status from conversation_sessions where session_id = $1", session_id)
            .await;
        (status == "completed").then_some(())
    })
    .await;
}

/// The spaces of everything that belongs to a session: itself, its conversation, mail, messages, and deliveries.
async fn spaces(database: &Database, session_id: &str) -> String {
    database
        .value(
            "select string_agg(distinct space_id, ' ') from (
                select space_id from conversation_sessions where session_id = $1
                union all select space_id from mails where session_id = $1
                union all select split_part(conversation_id, '/', 1) from mails where session_id = $1
                union all select c.space_id from conversation_counters c
                    join conversation_sessions s on s.conversation_id = c.conversation_id where s.session_id = $1
                union all select space_id from session_inbox where session_id = $1
                union all select space_id from conversation_records where session_id = $1
                union all select space_id from session_events where session_id = $1
                union all select space_id from deliveries where session_id = $1
                union all select d.space_id from deliveries d where d.session_id = $1 and d.channel = 'email'
            ) as of_it",
            session_id,
        )
        .await
}

async fn conversation(database: &Database, session_id: &str) -> String {
    database
        .value("select conversation_id from conversation_sessions where session_id = $1", session_id)
        .await
}

#[tokio::test]
async fn a_mail_to_mailboxes_of_two_spaces_is_two_conversations_each_of_its_own_space() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model, "default").serve(&database).await;
    let client = process.client();
    let to_all = mail("m1@example.com", "Lunch", PROVED, "Shall we?")
        .replace("To: support@example.org", "To: acme@example.org, bolt@example.org, support@example.org");
    let sessions = woken(&client, to_all.clone()).await;
    assert_eq!(sessions.len(), 3);
    for (session, (space, agent)) in
        sessions.iter().zip([("acme", "acmes"), ("bolt", "bolts"), ("default", "default")])
    {
        ended(&database, session).await;
        assert_eq!(spaces(&database, session).await, space);
        let of: String =
            database.value("select agent from conversation_sessions where session_id = $1", session).await;
        assert_eq!(of, agent);
        let replies: i64 = database
            .value("select count(*) from deliveries where session_id = $1 and channel = 'email'", session)
            .await;
        assert_eq!(replies, 1, "{space}");
    }
    let (status, again) = post(&client, to_all).await;
    assert_eq!((status, &again["duplicate"]), (StatusCode::OK, &Value::Bool(true)), "{again}");
    // Each space sees its own mail, and nothing of the others.
    for space in ["acme", "bolt", "default", "other"] {
        let asked = client.get_request("/v1/mails").header("x-wakeful-space", space).send().await.unwrap();
        let mails: Value = asked.json().await.unwrap();
        let seen: Vec<&str> = mails["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["session_id"].as_str().unwrap())
            .collect();
        let own = ["acme", "bolt", "default"].iter().position(|one| *one == space);
        assert_eq!(seen, own.map(|at| sessions[at].as_str()).into_iter().collect::<Vec<_>>(), "{space}");
    }
    // An answer to the thread of one space, in the mailbox of another: by header, and by its signed address.
    let plus = policy(&database, &sessions[0]).await["reply"]["to"]["reply_to"].as_str().unwrap().to_owned();
    let token = plus.strip_prefix("acme+").unwrap().strip_suffix("@example.org").unwrap().to_owned();
    let reply: String = database
        .value("select delivery_id from deliveries where session_id = $1 and channel = 'email'", &sessions[0])
        .await;
    let answer = |id: &str, to: &str| {
        let headers =
            format!("{PROVED}In-Reply-To: <{reply}@example.org>\r\nReferences: <m1@example.com>\r\n");
        mail(id, "Re: Lunch", &headers, "One.").replace("support@example.org", to)
    };
    for (at, to) in [format!("bolt+{token}@example.org"), "bolt@example.org".to_owned()].iter().enumerate() {
        let crossed = woken(&client, answer(&format!("a{at}@example.com"), to)).await;
        assert_eq!(spaces(&database, &crossed[0]).await, "bolt");
        assert_ne!(conversation(&database, &crossed[0]).await, conversation(&database, &sessions[0]).await);
    }
    let joined = woken(&client, answer("a2@example.com", "acme@example.org")).await;
    assert_eq!(conversation(&database, &joined[0]).await, conversation(&database, &sessions[0]).await);
    let joined = woken(&client, answer("a3@example.com", &plus)).await;
    assert_eq!(conversation(&database, &joined[0]).await, conversation(&database, &sessions[0]).await);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_mailbox_that_moves_to_another_space_begins_anew_there() {
    let model =
        ModelServer::turns(vec![Answer::call("ask_user", serde_json::json!({"question": "When?"}))]).await;
    let database = Database::new().await;
    let process = options(&model, "acme").serve(&database).await;
    let before =
        woken(&process.client(), mail("m1@example.com", "Lunch", PROVED, "Shall we?")).await.remove(0);
    crate::support::eventually("the question", || async {
        let sql = "select status from conversation_sessions where session_id = $1";
        (database.value::<String>(sql, &before).await == "waiting_input").then_some(())
    })
    .await;
    assert_eq!(spaces(&database, &before).await, "acme");
    let plus = policy(&database, &before).await["reply"]["to"]["reply_to"].as_str().unwrap().to_owned();
    assert!(process.terminate().success());

    let process = options(&model, "bolt").serve(&database).await;
    let client = process.client();
    // The very same mail, an answer by header, and one to the signed address: none of them reaches the first thread, which
    // has the same mailbox and waits for an answer.
    let same = woken(&client, mail("m1@example.com", "Lunch", PROVED, "Shall we?")).await.remove(0);
    let headers = format!("{PROVED}In-Reply-To: <m1@example.com>\r\n");
    let named = woken(&client, mail("a@example.com", "Re: Lunch", &headers, "At noon.")).await.remove(0);
    let signed = mail("b@example.com", "Re: Lunch", "", "At one.").replace("support@example.org", &plus);
    let signed = woken(&client, signed).await.remove(0);
    for session in [&same, &named, &signed] {
        assert_eq!(spaces(&database, session).await, "bolt");
    }
    let (first, then) = (conversation(&database, &before).await, conversation(&database, &same).await);
    assert_eq!(first.replace("acme/", ""), then.replace("bolt/", ""), "the same id, in two spaces");
    assert_eq!(conversation(&database, &named).await, then);
    assert!(
        ![first, then].contains(&conversation(&database, &signed).await),
        "its signature is of the other space"
    );
    let status: String =
        database.value("select status from conversation_sessions where session_id = $1", &before).await;
    assert_eq!(status, "waiting_input");
    assert!(process.terminate().success());
}
