//! What leaves the process: nothing goes to a host that the configuration does not name, and no other user of
//! the machine can read what it writes.

use crate::support::{Answer, Database, ModelServer, Options};
use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::any;
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A server that sends every request elsewhere, with this status.
fn redirects(status: StatusCode, to: String) -> String {
    let listener = crate::support::servers::listen();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let answer = move || {
        let to = to.clone();
        async move { (status, [(header::LOCATION, to)]) }
    };
    let router = Router::new().fallback(any(answer));
    drop(crate::support::servers::runtime().spawn(async move { axum::serve(listener, router).await }));
    url
}

#[tokio::test]
async fn a_provider_that_redirects_does_not_get_the_prompt_sent_to_another_host() {
    for status in [StatusCode::TEMPORARY_REDIRECT, StatusCode::PERMANENT_REDIRECT, StatusCode::FOUND] {
        let database = Database::new().await;
        let other = ModelServer::turns(vec![Answer::text("Tell me more.")]).await;
        let provider = redirects(status, format!("{}/chat/completions", other.url));
        let options = Options::new()
            .env("OPENAI_BASE_URL", &provider)
            .env("OPENAI_API_KEY", "a-key-of-the-tests")
            .config("[agents.default]\nsystem_prompt = \"You are a test.\"\nmodel = \"openai/test\"");
        let process = options.serve(&database).await;
        let client = process.client();
        let (_, woken) = client.post("/v1/chat/c1/messages", &json!({"text": "A secret."})).await;
        let session_id = woken["session_id"].as_str().unwrap();
        let session = client.wait_for(session_id, "failed").await;
        assert_eq!(other.bodies(), Vec::<String>::new(), "{status}");
        let told = session.to_string() + &process.log();
        assert!(told.contains("redirects are not followed"), "{told}");
    }
}

/// A server with one page, and how often it was asked.
fn page() -> (String, Arc<AtomicUsize>) {
    let listener = crate::support::servers::listen();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let asked = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&asked);
    let answer = move || {
        counts.fetch_add(1, Ordering::SeqCst);
        async { "the wiki of the house" }
    };
    let router = Router::new().fallback(any(answer));
    drop(crate::support::servers::runtime().spawn(async move { axum::serve(listener, router).await }));
    (url, asked)
}

#[tokio::test]
async fn a_tool_fetches_only_what_agent_and_mailbox_allow_and_nothing_private_unless_it_is_named() {
    let (database, (url, asked)) = (Database::new().await, page());
    let wiki = url.clone();
    let model = ModelServer::start(move |body, _| {
        if crate::support::model::turns_since_user(body) > 0 {
            return Answer::text("I see.");
        }
        let to = if body.to_string().contains("metadata") { "http://0xa9fea9fe/latest/" } else { &wiki };
        Answer::call("fetch", json!({"url": to}))
    })
    .await;
    let agent = |name: &str, more: &str| {
        format!(
            "[agents.{name}]\nmodel = \"openai/test\"\nsystem_prompt = \"x\"\ntools = [\"fetch\"]\n{more}\n"
        )
    };
    let agents = agent("default", "")
        + &agent("denied", "web_deny = [\"127.0.0.1\"]")
        + &agent("elsewhere", "web_allow = [\"example.org\"]");
    let mailbox = "[email.mailboxes.support]\naddress = \"support@example.org\"\nweb_allow = []";
    let options = Options::new().env("OPENAI_BASE_URL", &model.url).config(&agents).config(mailbox);
    let named = options.config("[web]\nprivate_hosts = [\"127.0.0.1\"]");
    let process = named.serve(&database).await;
    let client = process.client();
    let told = async |conversation: &str, agent: &str, text: &str| {
        let message = json!({"text": text, "agent": agent});
        let (_, woken) = client.post(&format!("/v1/chat/{conversation}/messages"), &message).await;
        client.wait_for(woken["session_id"].as_str().unwrap(), "completed").await;
        model.bodies().pop().unwrap()
    };
    assert!(told("c1", "default", "the wiki, please").await.contains("200: the wiki of the house"));
    assert_eq!(asked.load(Ordering::SeqCst), 1);
    for (conversation, agent) in [("c2", "denied"), ("c3", "elsewhere")] {
        let told = told(conversation, agent, "the wiki, please").await;
        assert!(told.contains("127.0.0.1 may not be contacted: the operator's web_allow"), "{told}");
    }
    let metadata = told("c4", "default", "the metadata, please").await;
    assert!(
        metadata.contains("169.254.169.254 may not be contacted: it is not a public address"),
        "{metadata}"
    );
    // A mail's session has the mailbox's rules, and they hold above the agent's.
    let mail = "From: ann@example.com\r\nTo: support@example.org\r\nMessage-ID: <w@example.com>\r\n\
                Subject: The wiki\r\n\r\nPlease.\r\n";
    let request = client.post_request("/v1/triggers/email/raw").header("content-type", "message/rfc822");
    let woken: Value = request.body(mail).send().await.unwrap().json().await.unwrap();
    client.wait_for(woken["session_id"].as_str().unwrap(), "completed").await;
    let told = model.bodies().pop().unwrap();
    assert!(told.contains("127.0.0.1 may not be contacted: the operator's web_allow"), "{told}");
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

/// Everything below `path`, and `path` itself.
fn below(path: &Path) -> Vec<PathBuf> {
    let mut found = vec![path.to_owned()];
    if path.is_dir() {
        for entry in std::fs::read_dir(path).unwrap() {
            found.extend(below(&entry.unwrap().path()));
        }
    }
    found
}

#[tokio::test]
async fn no_other_user_can_read_files_and_mails_whatever_the_umask() {
    let database = Database::new().await;
    let calls = vec![
        ("write_file".to_owned(), json!({"path": "deep/note.txt", "content": "A secret."}).to_string()),
        (
            "compose_email".to_owned(),
            json!({"to": ["bob@example.com"], "subject": "Lunch", "body": "A secret."}).to_string(),
        ),
    ];
    let model = ModelServer::turns(vec![Answer::Calls(calls), Answer::text("Done.")]).await;
    let options = Options::new().env("OPENAI_BASE_URL", &model.url).model("openai/test");
    let open = ["sh", "-c", "umask 0 && exec \"$@\"", "sh"].map(str::to_owned);
    let process = options.spawn_via(&open, &database.url);
    process.wait_for_log("\"Listening\"").await;
    let client = process.client();
    let (_, woken) = client.post("/v1/chat/c1/messages", &json!({"text": "Hello?"})).await;
    client.wait_for(woken["session_id"].as_str().unwrap(), "completed").await;
    let new = options.path("mail/new");
    crate::support::eventually("the mail", || async {
        std::fs::read_dir(&new).ok().and_then(|mut mails| mails.next()).map(drop)
    })
    .await;
    let made = [below(&options.path("mail")), below(&options.path("workspaces"))].concat();
    assert!(made.iter().any(|path| path.ends_with("note.txt")), "{made:?}");
    for path in made {
        let mode = std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        // A folder within a closed folder is out of reach.
        let is_within = path.ends_with("deep");
        assert!(mode & 0o077 == 0 || is_within, "{}: {mode:o}", path.display());
    }
}
