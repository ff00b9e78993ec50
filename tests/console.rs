//! The console: a person logs in, sees what the token may see, and acts by forms, each once. Hostile text stays text.

mod access;
pub(crate) mod browser;
mod bulk;
pub(crate) mod hostile;
mod live;
mod newcomer;
mod presses;

use crate::support::{Answer, Database, ModelServer, Options, Process, eventually};
use browser::Browser;
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A server without a token on this machine, whose model asks, acts, and sometimes fails.
pub(crate) struct Scene {
    pub database: Database,
    pub process: Process,
    pub model_fails: Arc<AtomicBool>,
    _model: ModelServer,
}

impl Scene {
    pub async fn new(config: &str) -> Scene {
        Scene::with(&[], config).await
    }

    async fn with(variables: &[(&str, &str)], config: &str) -> Scene {
        let model_fails = Arc::new(AtomicBool::new(false));
        let fails = Arc::clone(&model_fails);
        let model = ModelServer::start(move |body, _| {
            let said = body["messages"].to_string();
            match said.matches("\"role\":\"tool\"").count() {
                _ if fails.load(Ordering::SeqCst) => Answer::Error(400),
                0 if said.contains("ask me") => {
                    Answer::call("ask_user", json!({"question": "Which colour?"}))
                }
                0 if said.contains("charge") => Answer::call("charge", json!({"cents": 500})),
                0 if said.contains("write") => Answer::call(
                    "compose_email",
                    json!({"to": ["bob@example.com"],
                    "subject": "A note", "body": "The note."}),
                ),
                _ => Answer::text("Here I am."),
            }
        })
        .await;
        let database = Database::new().await;
        let mut options =
            Options::new().model("openai/test").config(config).env("OPENAI_BASE_URL", &model.url);
        for (name, value) in variables {
            options = options.env(name, *value);
        }
        let process = options.serve(&database).await;
        Scene { database, process, model_fails, _model: model }
    }

    fn browser(&self) -> Browser {
        Browser::new(&self.process.url())
    }

    /// Sends a message, and returns its session when that has the status.
    pub async fn session(&self, conversation: &str, text: &str, status: &str) -> String {
        let client = self.process.client();
        let body = json!({"text": text});
        let (_, woken) = client.post(&format!("/v1/chat/{conversation}/messages"), &body).await;
        let id = woken["session_id"].as_str().unwrap_or_else(|| panic!("{woken}")).to_owned();
        client.wait_for(&id, status).await;
        id
    }

    async fn count(&self, sql: &'static str) -> i64 {
        self.database.value(sql, "all").await
    }
}

const SCHEDULE: &str = "[schedules.daily]\ncron = \"0 9 * * *\"\nprompt = \"What is new?\"\n";

/// The addresses of all pages that show something of `session`, below the root.
pub(crate) fn pages(
    session: &str,
    conversation: &str,
    other: &str,
    delivery: &str,
    schedule: &str,
) -> Vec<String> {
    let mut pages: Vec<String> = [
        "/",
        "/sessions",
        "/sessions?status=failed",
        "/sessions?text=words&since=2026-01-01T00:00",
        "/errors",
        "/effects",
        "/batches",
        "/batches/new",
        "/batches/new?verb=archive&status=completed",
        "/chat",
        "/deliveries",
        "/notifications",
        "/schedules",
        "/mails",
        "/queue",
        "/audit",
        "/tokens",
    ]
    .map(str::to_owned)
    .to_vec();
    for tab in ["", "timeline", "effects", "context", "forks", "journal"] {
        pages.push(format!("/sessions/{session}?tab={tab}"));
    }
    pages.push(format!("/sessions/{session}/fork?at=2"));
    pages.push(format!("/chat/{conversation}"));
    pages.push(format!("/compare?left={session}&right={other}"));
    pages.push(format!("/deliveries/{delivery}"));
    pages.push(format!("/schedules/{schedule}"));
    pages
}

/// Of the first item of a list, when it has one. A job may still be writing it.
pub(crate) async fn first(scene: &Scene, path: &str, key: &str) -> String {
    eventually(path, || async {
        let (_, list) = scene.process.client().get(path).await;
        list["items"][0][key].as_str().map(str::to_owned)
    })
    .await
}

#[tokio::test]
async fn every_page_answers_with_what_there_is_and_loads_nothing_from_elsewhere() {
    let scene = Scene::new(SCHEDULE).await;
    let session = scene.session("desk", "write a note", "completed").await;
    let other = scene.session("other", "Hello?", "completed").await;
    let delivery = first(&scene, "/v1/deliveries", "delivery_id").await;
    let schedule = first(&scene, "/v1/schedules", "schedule_id").await;
    let browser = scene.browser();
    let start = browser.get("/").await;
    assert_eq!((start.status, start.location().as_str()), (StatusCode::SEE_OTHER, "/console/"));
    for path in pages(&session, "desk", &other, &delivery, &schedule) {
        let page = browser.open(&path).await;
        assert!(page.header("content-security-policy").starts_with("default-src 'self'"), "{path}");
        assert_eq!(page.header("cache-control"), "no-store", "{path}");
        assert!(!page.html.contains("<script>") && !page.html.contains(" style="), "{path}: {}", page.html);
        for attribute in ["src=\"", "href=\"", "action=\""] {
            for place in page.html.split(attribute).skip(1).map(|rest| rest.split('"').next().unwrap()) {
                let is_ours = place.starts_with("/console") || place.starts_with(['#', '?']);
                assert!(is_ours, "{path} loads {place}");
            }
        }
    }
    for (path, shown) in [
        ("/".to_owned(), "desk"),
        (format!("/sessions/{session}"), "Here I am."),
        (format!("/sessions/{session}?tab=timeline"), "compose_email"),
        (format!("/sessions/{session}?tab=effects"), "compose_email"),
        (format!("/sessions/{session}?tab=context"), "You are a test."),
        (format!("/sessions/{session}?tab=journal"), "TOOL_INVOKED"),
        (format!("/deliveries/{delivery}"), "The note."),
        (format!("/schedules/{schedule}"), "What is new?"),
        ("/queue".to_owned(), "alive"),
        ("/audit".to_owned(), "chat.message"),
    ] {
        assert!(browser.open(&path).await.html.contains(shown), "{path} shows {shown}");
    }
    let short =
        browser.get(&format!("/console/sessions/{}?tab=effects", &session[..session.len() - 1])).await;
    assert_eq!(
        (short.status, short.location()),
        (StatusCode::SEE_OTHER, format!("/console/sessions/{session}?tab=effects"))
    );
    let style = browser.open("/").await.link("/assets/console.");
    let asset = browser.get(&style).await;
    assert_eq!(asset.header("content-type"), "text/css; charset=utf-8");
    assert!(asset.header("cache-control").contains("immutable"));
    for path in ["/console/nothing", "/console/sessions/sess_none", "/console/assets/none.css"] {
        assert_eq!(browser.get(path).await.status, StatusCode::NOT_FOUND, "{path}");
    }
}

#[tokio::test]
async fn a_failed_run_is_found_understood_and_retried_by_forms_alone() {
    let scene = Scene::new("").await;
    scene.model_fails.store(true, Ordering::SeqCst);
    let session = scene.session("broken", "Hello?", "failed").await;
    let browser = scene.browser();
    let overview = browser.open("/").await;
    let found = overview.link(&format!("/sessions/{session}"));
    let page = browser.get(&found).await;
    assert!(page.html.contains("Why it failed") && page.html.contains("400"), "{}", page.html);
    scene.model_fails.store(false, Ordering::SeqCst);
    let after = browser.press(&page, &format!("/sessions/{session}/retry"), &[]).await;
    assert!(after.html.contains("goes on from its last commit"), "{}", after.html);
    scene.process.client().wait_for(&session, "completed").await;
    // The note is said once.
    assert!(!browser.get(&after.path).await.html.contains("goes on from its last commit"));
    // A page that was opened before is stale; it says so, and nothing happens.
    let stale = page.form("/retry");
    let fields: Vec<_> = stale.fields.iter().filter(|(name, _)| name != "press").cloned().collect();
    let answer = browser.post(&browser::Form { fields, ..stale }, &[("press", "another")]).await;
    let told = browser.get(&answer.location()).await;
    assert!(told.html.contains("Nothing was done"), "{}", told.html);
    assert_eq!(scene.count("select count(*) from audit_log where verb = 'session.retry' and outcome = 'done' and $1 <> ''").await, 1);
}

#[tokio::test]
async fn a_newcomer_talks_to_an_agent_answers_its_question_and_forks_without_javascript() {
    let scene = Scene::new("").await;
    let browser = scene.browser();
    let chats = browser.open("/chat").await;
    let page = browser
        .press(&chats, "/console/chat", &[("text", "ask me something"), ("conversation", "my desk/1")])
        .await;
    assert!(page.path.ends_with("/chat/my%20desk%2F1"), "{}", page.path);
    let session = first(&scene, "/v1/sessions", "session_id").await;
    let client = scene.process.client();
    client.wait_for(&session, "waiting_input").await;
    let page = browser.get(&page.path).await;
    assert!(page.html.contains("The agent asks") && page.html.contains("Which colour?"), "{}", page.html);
    assert!(browser.open("/").await.html.contains("<b>1</b><span>waits for input</span>"));
    let page = browser.press(&page, "/chat/my%20desk%2F1", &[("text", "Green, please.")]).await;
    client.wait_for(&session, "completed").await;
    let page = browser.get(&page.path).await;
    assert!(page.html.contains("Green, please.") && page.html.contains("Here I am."), "{}", page.html);
    let fork = browser.open(&format!("/sessions/{session}/fork?at=2")).await;
    assert!(fork.html.contains("ask me something"));
    let forked =
        browser.press(&fork, "/fork", &[("at", "2"), ("text", "Hello instead."), ("tool_mode", "dry")]).await;
    assert!(forked.html.contains("Hello instead.") && forked.html.contains("dry tools"), "{}", forked.html);
    let new = forked.path.rsplit('/').next().unwrap().to_owned();
    assert_ne!(new, session);
    client.wait_for(&new, "completed").await;
    let tree = browser.open(&format!("/sessions/{new}?tab=forks")).await;
    // The note after the fork leads there too, and so do the fork's facts.
    let of_both = format!("/compare?left={session}");
    assert!(forked.html.contains("Compare it with its parent"), "{}", forked.html);
    assert_eq!(forked.link(&of_both), tree.link(&of_both));
    let compared = browser.get(&tree.link("/compare?")).await;
    for shown in
        ["They part in turn", "message 2 was edited", "Parent: <a", "Fork: <a", "<ins>Hello", "<dt>took</dt>"]
    {
        assert!(compared.html.contains(shown), "{shown}: {}", compared.html);
    }
    // Without ids: one is picked from the list, and then the other.
    let picked = browser.get(&browser.open("/compare").await.link("/compare?left=")).await;
    let compared = browser.get(&picked.link("&#38;right=").replace("&#38;", "&")).await;
    assert!(compared.html.contains("They part in turn"), "{}", compared.html);
}

#[tokio::test]
async fn a_dry_fork_says_of_its_calls_that_they_were_not_carried_out() {
    let scene = Scene::new("").await;
    let session = scene.session("desk", "write a note", "completed").await;
    let client = scene.process.client();
    let fork = json!({"at": 2, "text": "write another note", "tool_mode": "dry"});
    let (_, forked) = client.post(&format!("/v1/sessions/{session}/fork"), &fork).await;
    let forked = forked["session_id"].as_str().unwrap_or_else(|| panic!("{forked}")).to_owned();
    client.wait_for(&forked, "completed").await;
    let browser = scene.browser();
    for tab in ["", "effects"] {
        for (id, is_dry) in [(&session, false), (&forked, true)] {
            let page = browser.open(&format!("/sessions/{id}?tab={tab}")).await;
            assert_eq!(page.html.contains("dry: not carried out"), is_dry, "{}", page.html);
        }
    }
}

#[tokio::test]
async fn a_button_that_is_pressed_twice_acts_once() {
    let scene = Scene::new(SCHEDULE).await;
    let browser = scene.browser();
    let form = browser.open("/chat").await.form("/console/chat");
    let fields = [("text", "Hello?"), ("conversation", "twice")];
    let presses = (0..16).map(|_| browser.post(&form, &fields));
    for answer in futures::future::join_all(presses).await {
        assert_eq!(
            (answer.status, answer.location().as_str()),
            (StatusCode::SEE_OTHER, "/console/chat/twice")
        );
    }
    assert_eq!(scene.count("select count(*) from session_inbox where $1 <> ''").await, 1);
    let schedule = first(&scene, "/v1/schedules", "schedule_id").await;
    let fire = browser.open(&format!("/schedules/{schedule}")).await.form("/trigger");
    let presses = (0..16).map(|_| browser.post(&fire, &[]));
    for answer in futures::future::join_all(presses).await {
        assert_eq!(answer.status, StatusCode::SEE_OTHER, "{}", answer.html);
    }
    assert_eq!(scene.count("select count(*) from schedule_firings where $1 <> ''").await, 1);
}

#[tokio::test]
async fn the_overview_has_the_figures_of_the_last_day_and_an_error_those_of_its_hours() {
    let scene = Scene::new("").await;
    scene.session("desk", "Hello?", "completed").await;
    scene.model_fails.store(true, Ordering::SeqCst);
    for conversation in ["one", "two"] {
        scene.session(conversation, "Hello?", "failed").await;
    }
    let client = scene.process.client();
    let (_, overview) = client.get("/v1/overview").await;
    let day = &overview["day"];
    assert_eq!(
        (&day["runs"], &day["completed"], &day["failed"], &day["is_partial"]),
        (&json!(3), &json!(1), &json!(2), &json!(false)),
        "{overview}"
    );
    assert!(day["first_reply_p95_ms"].is_i64(), "{overview}");
    let in_hours = day["hours"].as_array().unwrap().iter().map(|hour| hour["runs"].as_i64().unwrap());
    assert_eq!(in_hours.sum::<i64>(), 3, "{overview}");
    let page = scene.browser().open("/").await;
    for shown in ["33.3 %", "2 failed", "until the first reply, p95", "no run took longer"] {
        assert!(page.html.contains(shown), "{shown}: {}", page.html);
    }
    // A moment later the failures are counted.
    let group = eventually("both failures in one group", || async {
        let (_, groups) = client.get("/v1/errors").await;
        (groups["items"][0]["count"] == 2).then(|| groups["items"][0].clone())
    })
    .await;
    let sum = |group: &Value| -> (usize, i64) {
        let hours = group["hours"].as_array().unwrap();
        (hours.len(), hours.iter().map(|count| count.as_i64().unwrap()).sum())
    };
    assert_eq!(sum(&group), (24, 2), "{group}");
    let path = format!("/errors/{}", group["fingerprint"].as_str().unwrap());
    let (_, one) = client.get(&format!("/v1{path}")).await;
    assert_eq!(sum(&one), (168, 2), "{one}");
    let page = scene.browser().open(&path).await;
    assert!(page.html.contains("Failures in each of the last 168 hours, at most"), "{}", page.html);
}

#[tokio::test]
async fn below_a_base_path_pages_and_api_are_there_too_and_links_have_it() {
    let scene = Scene::with(&[("WAKEFUL_SERVER__BASE_PATH", "/ops/wakeful")], "").await;
    let browser = scene.browser();
    // A proxy may pass the path on, or strip it.
    for start in ["/ops/wakeful/", "/ops/wakeful", "/"] {
        assert_eq!(browser.get(start).await.location(), "/ops/wakeful/console/", "{start}");
    }
    for page in [browser.get("/ops/wakeful/console/").await, browser.get("/console/").await] {
        assert_eq!(page.status, StatusCode::OK);
        assert!(page.link("/sessions").starts_with("/ops/wakeful/console/"));
    }
    let sessions: Value = serde_json::from_str(&browser.get("/ops/wakeful/v1/sessions").await.html).unwrap();
    assert_eq!(sessions["items"], json!([]));
}

#[tokio::test]
async fn without_the_console_only_the_api_is_there() {
    let scene = Scene::with(&[("WAKEFUL_SERVER__CONSOLE", "false")], "").await;
    for path in ["/", "/console", "/console/", "/console/login"] {
        assert_eq!(scene.browser().get(path).await.status, StatusCode::NOT_FOUND, "{path}");
    }
}
