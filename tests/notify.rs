//! Notifications: what needs a person is told once, in groups, to a receiver that checks the signature; and a person acts by a link, once.

mod channels;
mod kills;
mod links;

use crate::console::browser::Browser;
use crate::support::messengers::{WEBHOOK_SECRET, webhook_signature};
use crate::support::received::Received;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, eventually, servers};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};

/// A receiver of webhooks. It takes only what is signed, and remembers each post with its id.
struct Sink {
    url: String,
    got: Arc<Got>,
    server: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct Got {
    /// The id of each post, and its body.
    posts: Received<(String, Value)>,
    /// What it answers to the next posts, which it then forgets.
    says: Mutex<VecDeque<u16>>,
    asked: Mutex<usize>,
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Sink {
    fn start() -> Sink {
        let listener = servers::listen();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        let got = Arc::new(Got::default());
        let router = Router::new().route("/hook", post(take)).with_state(Arc::clone(&got));
        let server = servers::runtime().spawn(async move { axum::serve(listener, router).await.unwrap() });
        Sink { url, got, server }
    }

    /// A rule that tells everything here, soon.
    fn rule(&self, more: &str) -> String {
        format!(
            "[web]\nprivate_hosts = [\"127.0.0.1\"]\n[[notify]]\nname = \"ops\"\nto = \"webhook\"\nurl = \"{}\"\n\
             secrets = [\"{WEBHOOK_SECRET}\"]\nwindow_s = 0.2\nquiet_s = 2\nper_hour = 3600\n{more}\n",
            self.url
        )
    }

    /// The answers to the next posts.
    fn says(&self, statuses: &[u16]) {
        self.got.says.lock().unwrap().extend(statuses);
    }

    fn asked(&self) -> usize {
        *self.got.asked.lock().unwrap()
    }

    /// What was posted, each id once: a receiver drops a repeated one.
    fn messages(&self) -> Vec<Value> {
        messages(&self.got.posts.all())
    }

    async fn has(&self, count: usize) -> Vec<Value> {
        self.until(&format!("{count} notifications"), |messages| messages.len() >= count).await
    }

    async fn until(&self, what: &str, are_enough: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        messages(&self.got.posts.until(what, |posts| are_enough(&messages(posts))).await)
    }
}

fn messages(posts: &[(String, Value)]) -> Vec<Value> {
    let mut seen = BTreeMap::new();
    for (id, body) in posts {
        seen.entry(id).or_insert(&body["data"]);
    }
    seen.into_values().cloned().collect()
}

async fn take(State(got): State<Arc<Got>>, headers: HeaderMap, body: Bytes) -> StatusCode {
    *got.asked.lock().unwrap() += 1;
    let header = |name: &str| headers.get(name).unwrap().to_str().unwrap().to_owned();
    let (id, timestamp) = (header("webhook-id"), header("webhook-timestamp"));
    let text = String::from_utf8(body.to_vec()).unwrap();
    if header("webhook-signature") != webhook_signature(WEBHOOK_SECRET, &id, &timestamp, &text) {
        return StatusCode::UNAUTHORIZED;
    }
    if let Some(status) = got.says.lock().unwrap().pop_front() {
        return StatusCode::from_u16(status).unwrap();
    }
    got.posts.push((id, serde_json::from_str(&text).unwrap()));
    StatusCode::NO_CONTENT
}

/// A server whose model fails, asks or answers, and a receiver of its notifications.
struct Stage {
    database: Database,
    sink: Sink,
    options: Options,
    /// 0: the model answers. 1: it asks a question. 2: it wants to charge. A status: it refuses.
    model_does: Arc<AtomicU16>,
    _model: ModelServer,
}

impl Stage {
    async fn new(rule: &str) -> Stage {
        let model_does = Arc::new(AtomicU16::new(0));
        let does = Arc::clone(&model_does);
        let model = ModelServer::start(move |body, _| match does.load(Ordering::SeqCst) {
            0 => Answer::text("Here I am."),
            1 | 2 if body["messages"].to_string().contains("\"role\":\"tool\"") => Answer::text("Thank you."),
            1 => Answer::call("ask_user", json!({"question": "May I order it?"})),
            2 => Answer::call("charge", json!({"cents": 500})),
            status => Answer::Error(status),
        })
        .await;
        let sink = Sink::start();
        let options = Options::new()
            .model("openai/test")
            .config("approve = [\"charge\"]")
            .config("[gate]\nfaults = 1\nprobe_s = 0.2\nprobe_max_s = 0.4\nwave_s = 0.1")
            .config(&sink.rule(rule))
            .env("OPENAI_BASE_URL", &model.url)
            .env("WAKEFUL_SERVER__PUBLIC_URL", "http://127.0.0.1:7");
        Stage { database: Database::new().await, sink, options, model_does, _model: model }
    }

    async fn serve(&self) -> Process {
        self.options.serve(&self.database).await
    }

    /// Sends a message with this behaviour of the model, and returns its session when it has the status.
    async fn session(&self, process: &Process, conversation: &str, does: u16, status: &str) -> String {
        self.model_does.store(does, Ordering::SeqCst);
        let client = process.client();
        let id = client.chat(conversation, "Hello?").await["session_id"].as_str().unwrap().to_owned();
        client.wait_for(&id, status).await;
        id
    }

    async fn count(&self, sql: &'static str) -> i64 {
        self.database.value(sql, "all").await
    }

    /// Makes copies of a session's row that run.
    async fn copies(&self, session_id: &str, from: i64, to: i64) {
        let columns: Vec<String> = sqlx::query_scalar(
            "select quote_ident(attname) from pg_attribute
            where attrelid = 'conversation_sessions'::regclass and attnum > 0 and not attisdropped and attgenerated = ''
                and attidentity = ''",
        )
        .fetch_all(&self.database.pool)
        .await
        .unwrap();
        let chosen = columns.iter().map(|name| format!("c.{name}")).collect::<Vec<_>>().join(", ");
        let insert = format!(
            "insert into conversation_sessions ({}) overriding system value
            select {chosen} from conversation_sessions s
            cross join generate_series($2::bigint, $3::bigint) n
            cross join lateral jsonb_populate_record(s, jsonb_build_object('session_id', 'sess_copy_' || n,
                'trigger_id', 'copy' || n, 'status', 'running', 'error', null)) c
            where s.session_id = $1",
            columns.join(", ")
        );
        sqlx::query(sqlx::AssertSqlSafe(insert))
            .bind(session_id)
            .bind(from)
            .bind(to)
            .execute(&self.database.pool)
            .await
            .unwrap();
    }

    /// Fails those of the copies, as a step would.
    async fn fail(&self, from: i64, to: i64) {
        sqlx::query(
            "update conversation_sessions set status = 'failed', error = 'down'
            where session_id in (select 'sess_copy_' || n from generate_series($1::bigint, $2::bigint) n)",
        )
        .bind(from)
        .bind(to)
        .execute(&self.database.pool)
        .await
        .unwrap();
    }
}

async fn listed(client: &Client, query: &str) -> Vec<Value> {
    let (status, page) = client.get(&format!("/v1/notifications{query}")).await;
    assert_eq!(status, reqwest::StatusCode::OK, "{page}");
    page["items"].as_array().unwrap().clone()
}

#[tokio::test]
async fn a_failed_run_is_told_once_with_what_a_person_needs() {
    let stage = Stage::new("when = [\"failed\", \"over_budget\"]").await;
    let process = stage.serve().await;
    stage.session(&process, "fine", 0, "completed").await;
    stage.session(&process, "asks", 1, "waiting_input").await;
    let failed = stage.session(&process, "broken", 400, "failed").await;
    let told = stage.sink.has(1).await.remove(0);
    assert_eq!(
        (told["kind"].as_str(), told["phase"].as_str(), told["count"].as_i64()),
        (Some("failed"), Some("began"), Some(1)),
        "{told}"
    );
    let item = &told["items"][0];
    assert_eq!(
        (item["session_id"].as_str(), item["status"].as_str()),
        (Some(failed.as_str()), Some("failed"))
    );
    assert!(item["error"].as_str().unwrap().contains("400"), "{item}");
    assert_eq!(told["links"], json!([]), "no links unless the rule says so");
    let client = process.client();
    let sent = eventually("the notification to be settled", || async {
        listed(&client, "?status=sent").await.pop()
    })
    .await;
    assert_eq!((&sent["rule"], &sent["count"], &sent["attempt"]), (&json!("ops"), &json!(1), &json!(1)));
    let (_, shown) =
        client.get(&format!("/v1/notifications/{}", sent["notification_id"].as_str().unwrap())).await;
    assert_eq!(shown["items"][0]["session_id"], json!(failed));
    // The group closes without another message, because everything was told.
    eventually("the group to close", || async {
        (stage.count("select count(*) from notification_groups where closed_at is null and $1 <> ''").await
            == 0)
            .then_some(())
    })
    .await;
    assert_eq!(stage.sink.messages().len(), 1);
    assert_eq!(stage.count("select count(*) from transitions where $1 <> ''").await, 0);
    let mut command = stage.options.clone();
    command.args = ["notification", "list"].map(str::to_owned).to_vec();
    let (status, listed) = command.spawn(&stage.database.url).ended().await;
    assert!(status.success() && listed.output().contains("failed"), "{}", listed.output());
}

#[tokio::test]
async fn a_rule_that_is_new_tells_of_no_wait_that_is_over() {
    let stage = Stage::new("when = [\"waiting_input\"]").await;
    let mut before = stage.options.clone();
    before.config = before.config.split_once("[[notify]]").unwrap().0.to_owned();
    let process = before.serve(&stage.database).await;
    let answered = stage.session(&process, "answered", 1, "waiting_input").await;
    let waits = stage.session(&process, "waits", 1, "waiting_input").await;
    process.client().chat("answered", "Yes.").await;
    process.client().wait_for(&answered, "completed").await;
    assert!(process.terminate().success());

    let process = stage.serve().await;
    let told = stage.sink.has(1).await.remove(0);
    let items: Vec<_> = told["items"].as_array().unwrap().iter().map(|item| &item["session_id"]).collect();
    assert_eq!((told["count"].as_i64(), items), (Some(1), vec![&json!(waits)]), "{told}");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn doctor_and_the_overview_name_a_message_that_did_not_reach_people() {
    let stage = Stage::new("when = [\"failed\"]").await;
    stage.sink.says(&[403]);
    let process = stage.serve().await;
    stage.session(&process, "broken", 400, "failed").await;
    let lost = eventually("the message to fail", || async {
        listed(&process.client(), "?status=failed").await.pop()
    })
    .await;
    let ran = crate::cli::run(&stage.options, &stage.database.url, &["doctor"]).await;
    let said = ran.out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        said.contains("1 message of [[notify]] did not reach people; the newest, of rule ops"),
        "{}",
        ran.out
    );
    let resend = format!("wakeful notification resend {}", lost["notification_id"].as_str().unwrap());
    assert!(said.contains(&resend), "{}", ran.out);
    let overview = Browser::new(&process.url()).open("/").await;
    let strip = "A message of [[notify]] did not reach people</strong>, the newest of the rule ops: ";
    assert!(overview.html.contains(strip), "{}", overview.html);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn an_outage_of_a_thousand_sessions_is_one_message_and_one_when_it_is_over() {
    let mut stage = Stage::new("when = [\"failed\"]").await;
    // However long it takes until all have failed, they are one group.
    stage.options.config = stage.options.config.replace("quiet_s = 2", "quiet_s = 600");
    let process = stage.serve().await;
    let first = stage.session(&process, "fine", 0, "completed").await;
    stage.copies(&first, 1, 1000).await;
    for part in 0..10 {
        stage.fail(part * 100 + 1, part * 100 + 100).await;
    }
    eventually("all to be in the group", || async {
        let sql = "select count(*) from notification_groups where count = 1000 and messages = 1 and $1 <> ''";
        (stage.count(sql).await == 1).then_some(())
    })
    .await;
    sqlx::query("update notification_groups set last_at = last_at - interval '1 hour'")
        .execute(&stage.database.pool)
        .await
        .unwrap();
    let messages = stage.sink.has(2).await;
    let phases: Vec<_> = messages.iter().map(|one| one["phase"].as_str().unwrap()).collect();
    assert_eq!(phases, ["began", "over"]);
    let told: i64 = messages.iter().map(|one| one["count"].as_i64().unwrap()).sum();
    assert_eq!((told, messages[1]["total"].as_i64()), (1000, Some(1000)));
    assert!(process.terminate().success());
    assert_eq!(stage.sink.messages().len(), 2);
    assert_eq!(stage.count("select count(*) from notification_members where $1 <> ''").await, 1000);
}

#[tokio::test]
async fn a_provider_that_is_down_is_told_when_its_gate_shuts_and_when_it_opens() {
    let stage = Stage::new("when = [\"gate_shut\"]").await;
    let process = stage.serve().await;
    stage.model_does.store(503, Ordering::SeqCst);
    let woken = process.client().chat("waits", "Hello?").await;
    let began = stage.sink.has(1).await.remove(0);
    assert_eq!(
        (began["phase"].as_str(), began["cause"].as_str()),
        (Some("began"), Some("openai/test")),
        "{began}"
    );
    stage.model_does.store(0, Ordering::SeqCst);
    process.client().wait_for(woken["session_id"].as_str().unwrap(), "completed").await;
    let over = stage.sink.has(2).await.remove(1);
    assert_eq!(over["phase"], "over", "{over}");
    assert!(over["ended_at"].is_string(), "{over}");
}

#[tokio::test]
async fn jobs_without_a_worker_are_told_by_a_process_that_only_serves() {
    let stage = Stage::new("when = [\"no_worker\"]").await;
    let api = stage.options.clone().arg("--roles=api").serve(&stage.database).await;
    let woken = api.client().chat("waits", "Hello?").await;
    sqlx::query("update jobs set run_at = run_at - interval '1 minute'")
        .execute(&stage.database.pool)
        .await
        .unwrap();
    let began = stage.sink.has(1).await.remove(0);
    assert_eq!(
        (began["kind"].as_str(), began["phase"].as_str()),
        (Some("no_worker"), Some("began")),
        "{began}"
    );
    let _worker = stage.options.clone().arg("--roles=worker").spawn(&stage.database.url);
    api.client().wait_for(woken["session_id"].as_str().unwrap(), "completed").await;
    assert_eq!(stage.sink.has(2).await.remove(1)["phase"], "over");
}

#[tokio::test]
async fn a_receiver_that_is_down_gets_it_later_and_a_refused_one_is_sent_again_by_hand() {
    let stage = Stage::new("when = [\"waiting_input\"]").await;
    let process = stage.serve().await;
    stage.sink.says(&[500, 503]);
    stage.session(&process, "one", 1, "waiting_input").await;
    stage.sink.has(1).await;
    assert_eq!(stage.sink.asked(), 3);
    let client = process.client();
    eventually("it to be sent", || async { listed(&client, "?status=sent").await.pop() }).await;
    stage.sink.says(&[400]);
    stage.session(&process, "two", 1, "waiting_input").await;
    let failed = eventually("it to fail", || async { listed(&client, "?status=failed").await.pop() }).await;
    assert!(failed["last_error"].as_str().unwrap().contains("400"), "{failed}");
    let resend = format!("/v1/notifications/{}/resend", failed["notification_id"].as_str().unwrap());
    let (status, refused) = client.post(&resend, &json!({"resaon": "mended"})).await;
    assert_eq!(status, reqwest::StatusCode::BAD_REQUEST, "{refused}");
    let (status, _) = client.post(&resend, &json!({"reason": "mended"})).await;
    assert_eq!(status, reqwest::StatusCode::ACCEPTED);
    stage.sink.has(2).await;
    eventually("it to be sent", || async {
        listed(&client, "?status=failed").await.is_empty().then_some(())
    })
    .await;
    let (status, _) = client.post(&resend, &json!({})).await;
    assert_eq!(status, reqwest::StatusCode::CONFLICT);
    let id = failed["notification_id"].as_str().unwrap();
    let mut resend = stage.options.clone();
    resend.args = ["notification", "resend", id].map(str::to_owned).into();
    let (status, again) = resend.spawn(&stage.database.url).ended().await;
    assert!(status.code() == Some(4) && again.log().contains("is sent: only a failed"), "{}", again.log());
    // A notification that fails is not a transition.
    assert_eq!(stage.count("select count(*) from notification_members where $1 <> ''").await, 2);
}

#[tokio::test]
async fn a_rule_sends_no_more_than_its_bound_an_hour_and_loses_nothing() {
    // A second rule without a bound has the same window. Whatever is due is made in one transaction for both.
    let mut stage = Stage::new("when = [\"waiting_input\", \"failed\"]").await;
    stage.options.config = stage.options.config.replace("per_hour = 3600", "per_hour = 1");
    let other = stage.sink.rule("when = [\"failed\"]").replace("\"ops\"", "\"unbounded\"");
    stage.options.config.push_str(&other[other.find("[[notify]]").unwrap()..]);
    let process = stage.serve().await;
    stage.session(&process, "one", 1, "waiting_input").await;
    stage.sink.has(1).await;
    stage.session(&process, "two", 400, "failed").await;
    stage.sink.has(2).await;
    let of_the_bounded = "select count(*) from notifications where rule = 'ops' and $1 <> ''";
    assert_eq!(stage.count(of_the_bounded).await, 1, "the bound of the hour is reached");
    sqlx::query("update notifications set created_at = created_at - interval '1 hour'")
        .execute(&stage.database.pool)
        .await
        .unwrap();
    let told = stage.sink.has(3).await;
    let late = told.iter().find(|one| one["rule"] == "ops" && one["kind"] == "failed").unwrap();
    assert_eq!(late["count"].as_i64(), Some(1), "{late}");
}

#[tokio::test]
async fn spaces_see_only_the_notifications_of_their_own_rules() {
    let stage = Stage::new("spaces = [\"default\"]\nwhen = [\"failed\"]").await;
    let process = stage.serve().await;
    stage.session(&process, "broken", 400, "failed").await;
    stage.sink.has(1).await;
    let client = process.client();
    let of = async |space: &str| {
        let request = client.get_request("/v1/notifications").header("x-wakeful-space", space);
        let page: Value = request.send().await.unwrap().json().await.unwrap();
        page["items"].as_array().unwrap().len()
    };
    assert_eq!((of("default").await, of("acme").await), (1, 0));
}
